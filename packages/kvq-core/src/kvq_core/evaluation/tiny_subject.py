"""The tiny model over a :class:`~kvq_core.PagedKVCache`."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

import kvq_core
from kvq_core.cache.paged import PagedKVCache
from kvq_core.errors import ArgumentError
from kvq_core.evaluation.subject import Passage, cut, fingerprint_of
from kvq_core.evaluation.texts import Document
from kvq_core.evaluation.tiny_model import SEPARATOR, TinyModel, dense_attention, given_scales, rotary_channels
from kvq_core.smoothing.calibration import KEY_BIAS, WEIGHTS, KeySmoothing, KeyStatistics, ModelSmoothing, Smoothings
from kvq_core.smoothing.rotary import RotaryStatistics

if TYPE_CHECKING:
    from kvq_core.backend import QuantKVBackend

_BLOCK_SIZE: Final = 16
_ROWS_DTYPE: Final = torch.bfloat16
"""Of the rows that reach the cache, as of most models."""
_FOLDER: Final = Path("examples", "tiny_model")


def bundled(name: str) -> Path:
    """A file of the repository's ``examples/tiny_model``: of the checkout that kvq runs from, or of the one around the working folder.

    Raises:
        ArgumentError: there is no such checkout; the weights are too large to be in the package.
    """
    places = [Path(kvq_core.__file__).resolve(), *(Path.cwd().resolve() / "x").parents]
    for place in [*places[0].parents, *places[1:]]:
        file = place / _FOLDER / name
        if file.is_file():
            return file
    need = "a checkout of kvq's repository around the working folder (the package leaves its 9 MB of weights out), or --model and --text"
    raise ArgumentError("model", f"none, and no {_FOLDER / name} to take its place", need)


class TinySession:
    """Passages of one group in one cache."""

    def __init__(self, model: TinyModel, cache: PagedKVCache, count: int) -> None:
        self.model, self.cache = model, cache
        self.sequences = [cache.allocate_sequence() for _ in range(count)]

    def feed(self, rows: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """See :class:`~kvq_core.evaluation.subject.Session`."""
        work = {seq: row for seq, row in zip(self.sequences, rows, strict=True) if row}
        starts = {seq: self.cache.length(seq) for seq in work}
        step = self.cache.append({seq: len(row) for seq, row in work.items()})
        device, c = self.cache.device, self.model.config
        tokens = torch.tensor([token for row in work.values() for token in row], device=device)
        positions = torch.cat([torch.arange(starts[seq], starts[seq] + len(row), device=device) for seq, row in work.items()])

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            query, key, value = (x.to(_ROWS_DTYPE) for x in (q, k, v))
            self.cache.write(layer, key, value, step)
            return self.cache.attend(layer, query, step, softmax_scale=c.softmax_scale).to(q.dtype)

        return list(self.model(tokens, positions, attend).split([len(row) for row in rows]))


class TinySubject:
    """See :class:`~kvq_core.evaluation.subject.Subject`. Tokens are bytes; ``SEPARATOR`` opens every passage. Caches take ``smoothing``."""

    rows_dtype = _ROWS_DTYPE
    licence = "Apache-2.0, as kvq's"
    stop_tokens: Collection[int] = frozenset({SEPARATOR})
    cache_name = "kvq_core.PagedKVCache"
    cache_keywords: Collection[str] = frozenset(inspect.signature(PagedKVCache).parameters)

    def __init__(self, model: TinyModel, name: str = "tiny model", smoothing: Smoothings = None) -> None:
        self.model, self.name, self.smoothing = model, name, smoothing
        self.device = model.embed.weight.device

    def passages(self, documents: Sequence[Document], length: int) -> list[Passage]:
        length = min(length, self.model.config.max_len - 1)
        return [
            Passage((SEPARATOR, *piece), len(piece), document.name)
            for document in documents
            for piece in cut(document.text, length)
            if len(piece) >= 1
        ]

    def opening(self, text: str) -> list[int]:
        return [SEPARATOR, *text.encode()]

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    def fingerprint(self) -> str:
        return fingerprint_of(self.model.parameters(), self.model.config)

    @torch.inference_mode()
    def calibrate(self, passage: Passage, kind: str = "mean") -> ModelSmoothing:
        """The smoothing of the model's layers from a passage that is not scored; ``kind``: one of ``kvq_core.evaluation.options``'."""
        found: dict[int, KeySmoothing] = {}
        tokens = torch.tensor(passage.tokens, device=self.device)
        positions = torch.arange(len(tokens), device=self.device)
        pairs, rates = rotary_channels(self.model.config)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            rows, rotary = k, None
            if kind.startswith("rotary"):
                before = RotaryStatistics(pairs, rates)
                before.add(k, positions)
                rotary = before.mean()
                rows = k - rotary.at(positions).to(k.dtype)
            statistics = KeyStatistics()
            statistics.add(rows, q)
            found[layer] = replace(statistics.of_kind(kind), rotary=rotary)
            return dense_attention(layer, q[None], k[None], v[None])[0]

        self.model.hidden(tokens, positions, attend)
        return ModelSmoothing(found)

    def open(self, backend: QuantKVBackend, passages: Sequence[Passage], calibration: Passage, **options: Any) -> TinySession:
        c = self.model.config
        smoothing = options.pop("smoothing", self.smoothing)
        if smoothing in (KEY_BIAS, WEIGHTS):
            # Its keys have no biases, and no norm.
            smoothing = None
        k_scales: list[torch.Tensor] | None = None
        v_scales: list[torch.Tensor] | None = None
        if backend.takes_scales:
            k_scales, v_scales = map(list, zip(*given_scales(self.model, list(calibration.tokens), smoothing), strict=True))
        if options.get("residual_length") or options.get("sink_tokens"):
            options["max_sequences"] = len(passages)
        cache = PagedKVCache(
            backend,
            num_blocks=sum(-(-len(p.tokens) // _BLOCK_SIZE) for p in passages),
            block_size=_BLOCK_SIZE,
            num_kv_heads=c.num_kv_heads,
            head_size=c.head_size,
            num_layers=c.num_layers,
            dtype=_ROWS_DTYPE,
            device=self.device,
            k_scale=k_scales,
            v_scale=v_scales,
            smoothing=smoothing,
            **options,
        )
        return TinySession(self.model, cache, len(passages))

    def bytes_per_token(self, backend: QuantKVBackend, dtype: torch.dtype | None = None) -> int:
        c = self.model.config
        cache = PagedKVCache(
            backend, num_blocks=1, num_kv_heads=c.num_kv_heads, head_size=c.head_size, num_layers=c.num_layers, dtype=dtype or _ROWS_DTYPE
        )
        return cache.bytes_per_token
