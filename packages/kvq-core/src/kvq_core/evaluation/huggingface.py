"""A Hugging Face model over the caches of kvq-transformers. Imports both, so only :func:`load` of a model's path brings them in."""

from __future__ import annotations

import inspect
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from kvq_core.capacity import model_shape
from kvq_core.capacity.plan import layer_bytes
from kvq_core.errors import ArgumentError
from kvq_core.evaluation.pretrained import READER, MissingPackageError
from kvq_core.evaluation.subject import Passage, cut, fingerprint_of
from kvq_core.evaluation.texts import Document
from kvq_core.smoothing.calibration import WEIGHTS, ModelSmoothing, Smoothings

if TYPE_CHECKING:
    from kvq_core.backend import QuantKVBackend

_NO_PART: Final = ("_name_or_path", "transformers_version")
"""Entries of a config that results do not depend on."""


def load(name: str, device: torch.device, dtype: torch.dtype | None = None) -> HuggingFaceSubject:
    """The model and tokenizer at a path or id, in ``dtype``; by default in the checkpoint's on a GPU and in float32 on a CPU.

    Raises:
        MissingPackageError: transformers or kvq-transformers is not installed.
        ArgumentError: neither a folder here nor an id on the hub holds such a model.
    """
    return _load(name, name, {}, dtype or ("auto" if device.type == "cuda" else torch.float32), device)


def load_gguf(path: Path, device: torch.device, licence: str = "", dtype: torch.dtype | None = None) -> HuggingFaceSubject:
    """The model and tokenizer in a GGUF file, dequantized to ``dtype``; by default to bf16 on a GPU and to float32 on a CPU.

    Raises:
        MissingPackageError: as :func:`load`; or gguf or accelerate, which transformers reads such files with, is not installed.
        ArgumentError: transformers cannot read the file, or leaves out the token that opens every text.
    """
    try:
        import accelerate  # noqa: F401
        from gguf import GGUFReader
    except ImportError as missing:
        raise MissingPackageError(f"a GGUF file ({path.name}) needs gguf and accelerate: {missing}; {READER}") from None
    try:
        reader = GGUFReader(path)
    except (OSError, ValueError) as problem:
        raise ArgumentError("model", f"{path}: {problem}", "a GGUF file") from problem
    names = ("general.license", "tokenizer.ggml.pre", "tokenizer.ggml.add_bos_token")
    told = {name: field.contents() for name in names if (field := reader.get_field(name))}
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    subject = _load(path.name, str(path.parent), {"gguf_file": path.name}, dtype, device)
    subject.licence = licence or str(told.get("general.license", ""))
    if told.get("tokenizer.ggml.pre") == "smollm":
        _split_digits(subject.tokenizer)
    if told.get("tokenizer.ggml.add_bos_token") and not subject.opening(""):
        what = f"{path.name}: this transformers does not open texts with the token that the file asks for"
        raise ArgumentError("model", what, "one that reads its tokenizer, such as 5.24")
    return subject


def _split_digits(tokenizer: Any) -> None:
    """SmolLM's pre-tokenizer, of which transformers' reader of GGUF files keeps the second part alone."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    parts = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(parts)


def _load(name: str, source: str, options: dict[str, str], dtype: torch.dtype | str, device: torch.device) -> HuggingFaceSubject:
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        import kvq_transformers
    except ImportError as missing:
        need = "pip install ./packages/kvq-transformers, in a checkout (which brings transformers)"
        raise MissingPackageError(f"a Hugging Face model ({name}) needs kvq-transformers: {missing}; {need}") from None
    showed = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
        model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **options)
    except (OSError, ValueError, KeyError) as problem:
        why = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
        need = "a folder with a model and its tokenizer, a GGUF file of a kind that transformers reads, or an id on the hub"
        raise ArgumentError("model", f"{name!r}: {why}", need) from problem
    finally:
        if showed:
            logging.enable_progress_bar()
    return HuggingFaceSubject(name, model.to(device).eval().requires_grad_(False), tokenizer, kvq_transformers)


class HuggingFaceSession:
    """Passages in the rows of one cache, which the model takes as its argument ``name``."""

    def __init__(self, model: Any, cache: Any, name: str, count: int) -> None:
        self.model, self.cache, self.name = model, cache, name
        self._real = torch.ones(count, 0, dtype=torch.int64)
        """[count, columns]: 1 where a row has a token, 0 where it is padded to the length of the longest row of its chunk."""

    def feed(self, rows: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """See :class:`~kvq_core.evaluation.subject.Session`."""
        logits = self._forward(rows)
        return [found[: len(row)] for found, row in zip(logits, rows, strict=True)]

    def prefill(self, rows: Sequence[Sequence[int]]) -> None:
        """See :class:`~kvq_core.evaluation.subject.Prefilling`: the head, a third of a small model's work, sees one position."""
        self._forward(rows, logits_to_keep=1)

    def _forward(self, rows: Sequence[Sequence[int]], **given: Any) -> torch.Tensor:
        columns, device = max(map(len, rows)), self.model.device
        ids = torch.tensor([[*row, *([0] * (columns - len(row)))] for row in rows], device=device)
        new = torch.tensor([[1] * len(row) + [0] * (columns - len(row)) for row in rows])
        self._real = torch.cat([self._real, new], 1)
        if not self._real.all():
            positions = (self._real.cumsum(1)[:, -columns:] - 1).clamp(min=0)
            given |= {"attention_mask": self._real.to(device), "position_ids": positions.to(device)}
        logits: torch.Tensor = self.model(input_ids=ids, use_cache=True, **given, **{self.name: self.cache}).logits
        return logits


class HuggingFaceSubject:
    """See :class:`~kvq_core.evaluation.subject.Subject`.

    Passages open with what the tokenizer puts before a text: a beginning-of-text token, if its settings say so, else the text's first.
    """

    cache_name = "this kvq-transformers"
    licence = ""

    def __init__(self, name: str, model: Any, tokenizer: Any, kvq_transformers: Any) -> None:
        self.name, self.model, self.tokenizer, self.kvq = Path(name).name, model, tokenizer, kvq_transformers
        self.cache_keywords: Collection[str] = frozenset(inspect.signature(kvq_transformers.KVQCache).parameters)
        generation = getattr(model, "generation_config", None)
        ends = None if generation is None else generation.eos_token_id
        self.stop_tokens: Collection[int] = frozenset([ends] if isinstance(ends, int) else ends or ())
        self.smoothing: Smoothings = WEIGHTS
        self._scales: tuple[Passage, Smoothings, dict[str, Any]] | None = None
        self.device: torch.device = model.device
        self.rows_dtype: torch.dtype = model.dtype

    def passages(self, documents: Sequence[Document], length: int) -> list[Passage]:
        first = self.opening("")
        positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if positions is not None:
            # The last token is predicted and not read.
            length = min(length, positions + 1 - len(first))
        found = []
        for document in documents:
            for piece in cut(self.encode(document.text.decode()), length):
                opening, predicted = (first, piece) if first else (piece[:1], piece[1:])
                if predicted:
                    nbytes = len(self.tokenizer.decode(predicted, clean_up_tokenization_spaces=False).encode())
                    found.append(Passage((*opening, *predicted), nbytes, document.name))
        return found

    def opening(self, text: str) -> list[int]:
        plain, special = (self.tokenizer("a", add_special_tokens=given)["input_ids"] for given in (False, True))
        before = next((n for n in range(len(special)) if special[n : n + len(plain)] == plain), 0)
        return [*special[:before], *self.encode(text)]

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False))

    def fingerprint(self) -> str:
        config = self.model.config.to_dict()
        told = json.dumps({name: value for name, value in config.items() if name not in _NO_PART}, sort_keys=True, default=str)
        return fingerprint_of(self.model.parameters(), told, sorted(self.stop_tokens))

    def open(self, backend: QuantKVBackend, passages: Sequence[Passage], calibration: Passage, **options: Any) -> HuggingFaceSession:
        smoothing = options.pop("smoothing", self.smoothing)
        scales = self._scales_from(calibration, smoothing) if backend.takes_scales else {}
        cache = self.kvq.KVQCache(self.model, mode=backend, smoothing=smoothing, **scales, **options)
        return HuggingFaceSession(self.model, cache, self.kvq.naming.cache_argument(self.model.forward), len(passages))

    def calibrate(self, passage: Passage, kind: str = "mean") -> ModelSmoothing:
        """The smoothing of the model's layers from a passage that is not scored; ``kind``: as ``kvq_transformers.calibrate`` takes it."""
        found: ModelSmoothing = self._calibrated(passage, kind).smoothing
        return found

    def balance_values(self, documents: Sequence[Document], length: int, **exact: int) -> None:
        """Change the model's weights by ``kvq_transformers.balance_values``, on documents cut into passages of ``length`` tokens.

        ``exact``: its ``residual_length`` and ``sink_tokens``.
        """
        rows = [passage.tokens for passage in self.passages(documents, length)]
        longest = max(map(len, rows), default=0)
        ids = torch.tensor([[0] * (longest - len(row)) + list(row) for row in rows], device=self.device)
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=self.device)
        self.kvq.balance_values(self.model, ids, None if mask.all() else mask, **exact)

    def _scales_from(self, passage: Passage, smoothing: Smoothings) -> dict[str, Any]:
        """For modes that take scales, of keys smoothed as they will be; the text is read once."""
        if self._scales is None or self._scales[:2] != (passage, smoothing):
            found = self._calibrated(passage, smoothing if isinstance(smoothing, ModelSmoothing) else None)
            self._scales = passage, smoothing, {"k_scale": found.k_scale, "v_scale": found.v_scale}
        return self._scales[2]

    def _calibrated(self, passage: Passage, smoothing: Smoothings) -> Any:
        return self.kvq.calibrate(self.model, torch.tensor([passage.tokens], device=self.device), smoothing=smoothing)

    def bytes_per_token(self, backend: QuantKVBackend, dtype: torch.dtype | None = None) -> int:
        shape = model_shape(self.model.config.to_dict())
        return sum(layer_bytes(backend, layer, dtype or torch.bfloat16) for layer in shape.layers)
