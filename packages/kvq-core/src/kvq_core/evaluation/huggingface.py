"""A Hugging Face model over the caches of kvq-transformers. Imports both, so only :func:`load` of a model's path brings them in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvq_core.calibration import FIRST_PREFILL, ModelSmoothing, Smoothings
from kvq_core.capacity import model_shape
from kvq_core.capacity.plan import layer_bytes
from kvq_core.errors import ArgumentError, KVQError
from kvq_core.evaluation.subject import Passage, cut
from kvq_core.evaluation.texts import Document

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
    return HuggingFaceSubject(name, model.to(device).eval().requires_grad_(False), tokenizer, kvq_transformers.KVQCache)


class HuggingFaceSession:
    """One passage in one cache."""

    def __init__(self, model: Any, cache: Any) -> None:
        self.model, self.cache = model, cache

    def feed(self, rows: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """See :class:`~kvq_core.evaluation.subject.Session`."""
        (row,) = rows
        ids = torch.tensor([row], device=self.model.device)
        return [self.model(input_ids=ids, past_key_values=self.cache, use_cache=True).logits[0]]


class HuggingFaceSubject:
    """See :class:`~kvq_core.evaluation.subject.Subject`. One passage at a time; it opens with the tokenizer's first token, if any."""

    def __init__(self, name: str, model: Any, tokenizer: Any, make_cache: Any) -> None:
        self.name, self.model, self.tokenizer, self.make_cache = Path(name).name, model, tokenizer, make_cache
        self.smoothing: Smoothings = None
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
        return HuggingFaceSession(self.model, self.make_cache(self.model.config, mode=backend, smoothing=self.smoothing))

    @torch.inference_mode()
    def calibrate(self, passage: Passage, *, balanced: bool = False) -> ModelSmoothing:
        """The smoothing of the model's layers from a passage that is not scored. Means only.

        Raises:
            ArgumentError: ``balanced``, which needs the queries, or more layers than have keys of their own.
        """
        if balanced:
            raise ArgumentError("smoothing", "balanced", "mean or first_prefill: a Hugging Face model's queries are not recorded")
        cache = self.make_cache(self.model.config, mode="none", smoothing=FIRST_PREFILL)
        HuggingFaceSession(self.model, cache).feed([passage.tokens])
        found: ModelSmoothing = cache.smoothing
        return found

    def bytes_per_token(self, backend: QuantKVBackend) -> int:
        shape = model_shape(self.model.config.to_dict())
        return sum(layer_bytes(backend, layer, self.model.dtype) for layer in shape.layers)
