"""Does an installed mode work here? A small write and read through its doors, held against its own specification."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from kvq_core import variables
from kvq_core.cache.paged import PagedKVCache
from kvq_core.call import reference, torch_path
from kvq_core.call.spec import Attention, Batch, Plane, Scoring
from kvq_core.environment import check_interpreter
from kvq_core.errors import ArgumentError, KVQError

if TYPE_CHECKING:
    from kvq_core.backend import QuantKVBackend

HEAD_SIZE: Final = 128
"""The head size of a check, or the nearest one that the mode takes."""
LARGEST_HEAD: Final = 4096
"""Where the search for a mode's head sizes ends."""
READ_TOLERANCE: Final = 6 * 2.0**-8
"""Relative error of a read against dense attention over the decoded pages: twice three roundings to bf16, as in the benchmarks' gate."""


class SelfCheckError(KVQError):
    """A mode loads, but what it stores or reads is wrong."""


@dataclass(frozen=True)
class SelfCheck:
    """What a mode stores and loses, on standard normal rows with heads of 128, or of the nearest size to it that the mode takes.

    ``bits_per_element`` counts scales; ``relative_mse`` is that of the stored rows; ``read_error`` is that of the attention over them,
    against dense attention over the same decoded rows.
    """

    bits_per_element: float
    relative_mse: float
    read_error: float


def nearest_head_size(backend: QuantKVBackend, wanted: int) -> int:
    """The head size nearest to ``wanted`` that ``backend`` takes; raise :class:`SelfCheckError` if there is none."""
    largest = min(backend.max_head_size, LARGEST_HEAD)
    for size in _nearest_first(backend.head_size_multiple, largest, wanted):
        with contextlib.suppress(ArgumentError):
            backend.check_head_size(size, "head_size")
            return size
    raise SelfCheckError(f"mode {backend.mode}: takes no head size, of the multiples of {backend.head_size_multiple} up to {largest}")


@functools.cache
def _nearest_first(multiple: int, largest: int, wanted: int) -> tuple[int, ...]:
    """The multiples of ``multiple`` up to ``largest``, by their distance from ``wanted``."""
    return tuple(sorted(range(multiple, largest + 1, multiple), key=lambda size: abs(size - wanted)))


@torch.inference_mode()
def check(backend: QuantKVBackend, device: torch.device | str = "cpu", *, tokens: int = 37) -> SelfCheck:
    """Write ``tokens`` rows through ``backend``'s door on ``device``, read them back through the other.

    Raises:
        SelfCheckError: the mode takes no head size, rows decode to something else than finite values near them, or the read is not
            attention over them.
        ArgumentError: kernels are to be interpreted, and numpy is none that the interpreter of this Triton takes.
    """
    if variables.interpreting():
        check_interpreter()
    device, size = torch.device(device), nearest_head_size(backend, HEAD_SIZE)
    generator = torch.Generator("cpu").manual_seed(0)
    drawn = (torch.randn(tokens, heads, size, generator=generator, dtype=torch.float32, device="cpu") for heads in (4, 2, 2))
    q, key, value = (rows.to(device, torch.bfloat16) for rows in drawn)
    given = 6 / 448 if backend.takes_scales else None  # of the whole tensor; rows stay within 6
    cache = PagedKVCache(backend, num_blocks=4, num_kv_heads=2, head_size=size, device=device, k_scale=given, v_scale=given)
    step = cache.append({cache.allocate_sequence(): tokens})
    cache.write(0, key, value, step)
    out = cache.attend(0, q, step)

    caches = cache.layer(0)
    planes = [Plane(c, s, size) for c, s in ((caches.key_cache, caches.k_scale_cache), (caches.value_cache, caches.v_scale_cache))]
    halves = (backend.key_half, backend.value_half)
    stored = [torch_path.gather(half, plane, step.block_table[0].long())[:tokens] for half, plane in zip(halves, planes, strict=True)]
    lost = max(float((s - x).square().sum() / x.square().sum()) for s, x in zip(stored, (key.float(), value.float()), strict=True))
    if not lost < 1:
        raise SelfCheckError(f"mode {backend.mode}: stored rows are off by {lost:.2g} of their own energy on {device}")
    batch = Batch(step.cu_seqlens_q, step.seqused_k, step.block_table, tokens, tokens)
    attention = Attention(q, out, planes[0], planes[1], batch, Scoring(size**-0.5))
    exact = reference.attention(attention, torch_path.gathering(backend, attention))
    error = float((out.float() - exact).norm() / exact.norm())
    levels = max((abs(error) for half in halves for error in half.read_level_errors), default=0.0)
    if not error <= READ_TOLERANCE + levels:
        raise SelfCheckError(f"mode {backend.mode}: its read is off by {error:.2g} from attention over its own bytes on {device}")
    return SelfCheck(cache.bits_per_element, lost, error)
