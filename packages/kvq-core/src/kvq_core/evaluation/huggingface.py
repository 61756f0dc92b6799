"""A Hugging Face model over the caches of kvq-transformers. Imports both, so only :func:`load` of a model's path brings them in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvq_core.capacity import model_shape
from kvq_core.capacity.plan import layer_bytes
from kvq_core.errors import ArgumentError, KVQError
from kvq_core.evaluation.subject import Passage, cut
from kvq_core.evaluation.texts import Document
from kvq_core.smoothing.calibration import ModelSmoothing, Smoothings

if TYPE_CHECKING:
    from kvq_core.backend import QuantKVBackend


class MissingPackageError(KVQError):
    """What a Hugging Face model needs is not installed."""


def load(name: str, device: torch.device) -> HuggingFaceSubject:
    """The model and tokenizer at a path or id, in the checkpoint's dtype on a GPU and in float32 on a CPU.

    Raises:
        MissingPackageError: transformers or kvq-transformers is not installed.
        ArgumentError: neither a folder here nor an id on the hub holds such a model.
    """
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        import kvq_transformers
    except ImportError as missing:
        need = "pip install kvq-transformers (which brings transformers)"
        raise MissingPackageError(f"a Hugging Face model ({name}) needs kvq-transformers: {missing}; {need}") from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model: Any = AutoModelForCausalLM.from_pretrained(name, dtype="auto" if device.type == "cuda" else torch.float32)
    except (OSError, ValueError, KeyError) as problem:
        why = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
        raise ArgumentError("model", f"{name!r}: {why}", "a folder with a model and its tokenizer, or an id on the hub") from problem
    return HuggingFaceSubject(name, model.to(device).eval().requires_grad_(False), tokenizer, kvq_transformers)


class HuggingFaceSession:
    """One passage in one cache, which the model takes as its argument ``name``."""

    def __init__(self, model: Any, cache: Any, name: str) -> None:
        self.model, self.cache, self.name = model, cache, name

    def feed(self, rows: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """See :class:`~kvq_core.evaluation.subject.Session`."""
        (row,) = rows
        ids = torch.tensor([row], device=self.model.device)
        return [self.model(input_ids=ids, use_cache=True, **{self.name: self.cache}).logits[0]]


class HuggingFaceSubject:
    """See :class:`~kvq_core.evaluation.subject.Subject`. One passage at a time; it opens with the tokenizer's first token, if any."""

    def __init__(self, name: str, model: Any, tokenizer: Any, kvq_transformers: Any) -> None:
        self.name, self.model, self.tokenizer, self.kvq = Path(name).name, model, tokenizer, kvq_transformers
        self.smoothing: Smoothings = None
        self._scales: tuple[Passage, Smoothings, dict[str, Any]] | None = None
        self.device: torch.device = model.device

    def passages(self, documents: Sequence[Document], length: int) -> list[Passage]:
        first = self.tokenizer.bos_token_id
        found = []
        for document in documents:
            ids = self.tokenizer(document.text.decode(), add_special_tokens=False)["input_ids"]
            for piece in cut(ids, length):
                opening, predicted = ([first], piece) if first is not None else (piece[:1], piece[1:])
                if predicted:
                    nbytes = len(self.tokenizer.decode(predicted, clean_up_tokenization_spaces=False).encode())
                    found.append(Passage((*opening, *predicted), nbytes))
        return found

    def open(self, backend: QuantKVBackend, passages: Sequence[Passage], calibration: Passage) -> HuggingFaceSession:
        if len(passages) != 1:
            raise ArgumentError("batch", len(passages), "1: Hugging Face models read one passage at a time here")
        scales = self._scales_from(calibration) if backend.takes_scales else {}
        cache = self.kvq.KVQCache(self.model.config, mode=backend, smoothing=self.smoothing, **scales)
        return HuggingFaceSession(self.model, cache, self.kvq.naming.cache_argument(self.model.forward))

    def calibrate(self, passage: Passage, *, balanced: bool = False) -> ModelSmoothing:
        """The smoothing of the model's layers from a passage that is not scored; ``balanced``: with factors for the channels."""
        found: ModelSmoothing = self._calibrated(passage, "balanced" if balanced else "mean").smoothing
        return found

    def _scales_from(self, passage: Passage) -> dict[str, Any]:
        """For modes that take scales, of keys smoothed as they will be; the text is read once."""
        if self._scales is None or self._scales[:2] != (passage, self.smoothing):
            known = self.smoothing if isinstance(self.smoothing, ModelSmoothing) else None
            found = self._calibrated(passage, known)
            self._scales = passage, self.smoothing, {"k_scale": found.k_scale, "v_scale": found.v_scale}
        return self._scales[2]

    def _calibrated(self, passage: Passage, smoothing: Smoothings) -> Any:
        return self.kvq.calibrate(self.model, torch.tensor([passage.tokens], device=self.device), smoothing=smoothing)

    def bytes_per_token(self, backend: QuantKVBackend, dtype: torch.dtype | None = None) -> int:
        shape = model_shape(self.model.config.to_dict())
        return sum(layer_bytes(backend, layer, dtype or self.model.dtype) for layer in shape.layers)
