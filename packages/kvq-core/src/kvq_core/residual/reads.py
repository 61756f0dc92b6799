"""The two reads of a residual window: exact rows, packed rows, and their combination by log-sum-exps.

In decode the exact read is small and all latency. It runs beside the packed one, on a stream of its own: a branch in a CUDA graph.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from kvq_core.backend import QuantKVBackend
from kvq_core.cache.layout import LayerCaches
from kvq_core.call.cascade import combine
from kvq_core.call.gradients import refuse_gradients
from kvq_core.call.memory import check_apart, shares_storage
from kvq_core.call.reference import to_output_dtype
from kvq_core.call.spec import check_output
from kvq_core.plan.planner import DECODE_QUERY_LEN, is_batch_invariant

MOST_KEYS: Final = 512
"""Exact keys of a sequence that one program reads: more are split, which takes the workspace that the packed read is using."""

_CACHES: Final = ("k_cache", "v_cache", "k_scale_cache", "v_scale_cache")


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
        _check_output(q, out, exact, packed, output_scale)
    exact_out, packed_out = (torch.empty(out.shape, dtype=torch.float32, device=q.device) for _ in range(2))
    exact_lse, packed_lse = (torch.empty(out.shape[:2], dtype=torch.float32, device=q.device) for _ in range(2))
    if q.is_cuda and runs_beside(options["max_seqlen_q"], exact.options["max_seqlen_k"]) and not torch.compiler.is_compiling():
        with _beside(q.device) as stream:
            packed(q, packed_out, lse=packed_lse, **options)
            with torch.cuda.stream(stream):
                exact(q, exact_out, lse=exact_lse, seq_threshold_3D=0, **options)
    else:
        exact(q, exact_out, lse=exact_lse, **options)
        packed(q, packed_out, lse=packed_lse, **options)
    parts = exact_out, exact_lse, packed_out, packed_lse
    if output_scale is None and out.is_contiguous():
        combine(*parts, result=out)
    else:
        out.copy_(to_output_dtype(combine(*parts)[0], out.dtype, output_scale))


def _check_output(q: torch.Tensor, out: torch.Tensor, exact: PagedRead, packed: PagedRead, output_scale: torch.Tensor | None) -> None:
    """Raise :class:`ArgumentError` where ``out`` or ``output_scale`` do not fit: neither of two reads is given them."""
    check_output(exact.backend, q, out, output_scale)
    if torch.is_grad_enabled():
        refuse_gradients(("out", "output_scale"), (out, output_scale))
    read = (q, output_scale, *vars(exact.caches).values(), *vars(packed.caches).values())
    if not out.is_contiguous() or shares_storage(out, read):
        check_apart(("out", "q", "output_scale", *_CACHES, *_CACHES), (out, *read), frozenset({"out"}))


def runs_beside(max_seqlen_q: int, max_seqlen_k: int) -> bool:
    """Whether an exact read with these bounds may run beside the packed one on a GPU: not split, so that it takes no workspace."""
    return max_seqlen_q <= DECODE_QUERY_LEN and max_seqlen_k <= MOST_KEYS and not is_batch_invariant()


@contextlib.contextmanager
def _beside(device: torch.device) -> Iterator[torch.cuda.Stream]:
    """A stream that starts from here, and that the current one waits for at the end."""
    current = torch.cuda.current_stream(device)
    stream = _stream_of(device, current.cuda_stream)
    stream.wait_stream(current)
    yield stream
    current.wait_stream(stream)


@functools.cache
def _stream_of(device: torch.device, current: int) -> torch.cuda.Stream:
    """One for each stream: what another thread launches meanwhile must not end up in a graph that this one captures."""
    return torch.cuda.Stream(device)
