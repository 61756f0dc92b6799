"""Hadamard transforms: they spread a row's outliers over all its channels, so that few bits suffice.

``H`` is the unnormalized Sylvester matrix, ``H[i, j] = (-1)^popcount(i & j)``, with ``H H = d I``. The randomized transform (RHT) of
vLLM's int4 mode multiplies by a fixed +-1 vector ``D`` first: forward ``H D x``, backward ``D H y / b``. For a head size d that is not
a power of two both act on blocks of ``b = d & -d`` channels (80 -> 16, 96 -> 32, 192 -> 64), with the same signs in each block.

The CUDA tier is whichever tensor-core kernel an installed package provides; then a matmul with the +-1 matrix, then a butterfly. The
write and attention kernels do not call any of these: they carry the rotation inside (:mod:`kvq_core.kernels.hadamard`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final

import torch

from kvq_core import checks
from kvq_core.errors import ArgumentError

# vLLM's generator seed for the signs, and the step between rounds (vllm int4_per_token_head, Apache-2.0).
_SEED, _SEED_STEP = 0x9E3779B9, 0x517CC1B7


def block_of(head_size: int) -> int:
    """The transform's block: the largest power of two that divides ``head_size``."""
    head_size = checks.integer("head_size", head_size, 1)
    return head_size & -head_size


@functools.cache
def sign_bits(round_index: int = 0, length: int = 1024) -> int:
    """The RHT's sign vector as an integer whose bit i is 1 where ``D[i] = +1``. A prefix serves every smaller block."""
    generator = torch.Generator("cpu").manual_seed(_SEED + round_index * _SEED_STEP)
    half = torch.full((length,), 0.5, dtype=torch.float32, device="cpu")
    bits = torch.bernoulli(half, generator=generator).to(torch.int64).tolist()
    return sum(bit << i for i, bit in enumerate(bits))


def rht_signs(head_size: int, round_index: int = 0, device: torch.device | str = "cpu") -> torch.Tensor:
    """The +-1 vector D [head_size] float32 of the RHT: the block's signs, repeated for each block."""
    block = block_of(head_size)
    bits = sign_bits(round_index)
    signs = torch.tensor([1.0 if bits >> i & 1 else -1.0 for i in range(block)], dtype=torch.float32, device=device)
    return signs.repeat(head_size // block)


def hadamard_matrix(size: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """The Sylvester matrix [size, size] float32, entries +-1. ``size`` is a power of two. Shared: do not write to it."""
    if size < 1 or size & (size - 1):
        raise ArgumentError("size", size, "a power of two")
    # A tracer's tensors (FakeTensorMode's) are its own: they serve nobody else, and nobody else's serve it.
    of_tracer = type(torch.empty(0, device="cpu")) is not torch.Tensor
    return _sylvester.__wrapped__(size, device) if of_tracer else _sylvester(size, device)


@functools.cache
# Never inference tensors, which autograd cannot save.
@torch.inference_mode(False)
def _sylvester(size: int, device: torch.device | str) -> torch.Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float32, device=device)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    return matrix


def butterfly(x: torch.Tensor) -> torch.Tensor:
    """H x along the last dimension (a power of two) by log2(d) add/subtract passes, in ``x``'s dtype."""
    size = x.shape[-1]
    half = 1
    while half < size:
        pairs = x.unflatten(-1, (size // (2 * half), 2, half))
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack((low + high, low - high), dim=-2).flatten(-3)
        half *= 2
    return x


@functools.cache
def _tensor_core_kernel() -> Callable[[torch.Tensor], torch.Tensor] | None:
    """A tensor-core H x from an installed package, or None: Hadacore's torch op, or Dao's fast-hadamard-transform."""
    namespace = getattr(torch.ops, "hadacore", None) or getattr(torch.ops, "_C", None)
    for name in ("hadacore_transform", "hadamard_transform"):
        try:
            op = getattr(namespace, name)
        except (AttributeError, RuntimeError):
            continue
        return lambda x: op(x.clone(), False)
    try:
        from fast_hadamard_transform import hadamard_transform
    except ImportError:
        return None
    kernel: Callable[[torch.Tensor], torch.Tensor] = hadamard_transform
    return kernel


LARGEST_SCALE: Final = 2.0**107
"""What a stored scale is at most. A level times it, summed over a head and over many keys, stays in float32. Rows of values beyond 1e30
or so may come back shorter than they were, but finite."""


SCALE_BITS: Final = 7
"""Scales of rotated modes have so many significant bits. A number of four bits times such a scale is exact in float16, which has eleven."""


def rounded_scale(scale: torch.Tensor) -> torch.Tensor:
    """float32 ``scale`` with SCALE_BITS significant bits, half away from zero; NaN as it is."""
    last = 1 << (24 - SCALE_BITS)
    bits = (scale.contiguous().view(torch.int32) + last // 2) & -last
    return torch.where(scale.isnan(), scale, bits.view(torch.float32))


def headroom(x: torch.Tensor) -> torch.Tensor:
    """The power of two [..., 1] by which to multiply float32 rows [..., d], so that no sum over one overflows; 1 but for huge rows."""
    peak = x.abs().amax(-1, keepdim=True)
    return torch.ones_like(peak).masked_fill(peak > 2.0**100, 2.0**-20)


def _rows(x: torch.Tensor) -> torch.Tensor:
    if checks.tensor("x", x).dim() == 0 or x.shape[-1] == 0 or not x.is_floating_point() or x.dtype.itemsize == 1:
        raise ArgumentError("x", f"shape {tuple(x.shape)}, {x.dtype}", "[..., channels] of bfloat16, float16, float32 or float64")
    return x


def fast_hadamard_transform(x: torch.Tensor) -> torch.Tensor:
    """Unnormalized Sylvester transform H x along the last dimension, so that applying it twice multiplies by d.

    Args:
        x: [..., d], d a power of two, float dtype. Returned in the same dtype; the sums are taken in float32 at least.

    Raises:
        ArgumentError: d is not a power of two.
    """
    size = _rows(x).shape[-1]
    if size < 1 or size & (size - 1):
        raise ArgumentError("x", f"last dimension {size}", "a power of two")
    if x.is_cuda and x.dtype in (torch.float16, torch.bfloat16) and size <= 2**15:
        kernel = _tensor_core_kernel()
        if kernel is not None:
            return kernel(x.contiguous())
        # +-1 is exact in every float dtype, and the matrix product accumulates in float32: one tensor-core pass beats the butterfly.
        return x @ hadamard_matrix(size, x.device).to(x.dtype)
    if x.dtype in (torch.float16, torch.bfloat16):
        return butterfly(x.float()).to(x.dtype)
    return butterfly(x)


def block_hadamard(x: torch.Tensor) -> torch.Tensor:
    """H applied to each block of ``b = d & -d`` channels of the last dimension."""
    block = block_of(x.shape[-1])
    return fast_hadamard_transform(x.unflatten(-1, (-1, block))).flatten(-2)


def single_rht(x: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    """The randomized transform: ``H D x`` forward, ``D H x`` with ``inverse=True`` (divide by ``block_of(d)`` to undo the forward one).

    Args:
        x: [..., d], any d; acts on blocks of ``d & -d`` channels.
    """
    checks.flag("inverse", inverse)
    signs = rht_signs(_rows(x).shape[-1], device=x.device).to(x.dtype)
    return block_hadamard(x) * signs if inverse else block_hadamard(x * signs)
