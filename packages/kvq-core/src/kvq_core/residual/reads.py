"""The two reads of a residual window: exact rows, then packed rows, whose read joins what the first has found."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvq_core.backend import QuantKVBackend
from kvq_core.cache.layout import LayerCaches
from kvq_core.call.gradients import refuse_gradients
from kvq_core.call.memory import check_apart, shares_storage
from kvq_core.call.ops import joined_reads
from kvq_core.call.spec import check_output


@dataclass(frozen=True)
class PagedRead:
    """Keys to attend to: ``caches`` of ``backend``, and the options of ``unified_attention`` that say which."""

    backend: QuantKVBackend
    caches: LayerCaches
    options: Mapping[str, Any]

    def __call__(self, q: torch.Tensor, out: torch.Tensor, **options: Any) -> None:
        """Attention of ``q`` into ``out``."""
        caches = self.caches
        scales: dict[str, Any] = {"k_scale_cache": caches.k_scale_cache, "v_scale_cache": caches.v_scale_cache}
        self.backend.unified_attention(q, caches.key_cache, caches.value_cache, out, **scales, **self.options, **options)


def attend(
    q: torch.Tensor,
    out: torch.Tensor,
    exact: PagedRead,
    packed: PagedRead | None,
    *,
    output_scale: torch.Tensor | None = None,
    **options: Any,
) -> None:
    """Attention of ``q`` [T, Hq, D] over the keys of both reads, into ``out`` [T, Hq, Dv].

    ``options``: those of ``unified_attention`` that both have, ``max_seqlen_q`` among them. ``packed=None``: there are exact keys alone.

    Raises:
        ArgumentError: an argument does not fit, as ``unified_attention`` says; ``out`` was not written.
    """
    if packed is None:
        exact(q, out, output_scale=output_scale, **options)
        return
    if not torch.compiler.is_compiling():
        _check_output(q, out, exact, output_scale)
    found = torch.empty(out.shape, dtype=torch.float32, device=q.device)
    found_lse = torch.empty(out.shape[:2], dtype=torch.float32, device=q.device)
    with contextlib.nullcontext() if torch.compiler.is_compiling() else joined_reads():
        exact(q, found, lse=found_lse, **options)
        packed(q, out, output_scale=output_scale, other=found, other_lse=found_lse, **options)


def _check_output(q: torch.Tensor, out: torch.Tensor, exact: PagedRead, output_scale: torch.Tensor | None) -> None:
    """Raise :class:`ArgumentError` where ``out`` or ``output_scale`` do not fit: the first of the reads is given neither, and takes the
    shape of its rows from them."""
    check_output(exact.backend, q, out, output_scale)
    if torch.is_grad_enabled():
        refuse_gradients(("out", "output_scale"), (out, output_scale))
    caches = vars(exact.caches)
    if shares_storage(out, caches.values()):
        check_apart(("out", *caches), (out, *caches.values()), frozenset({"out"}))
