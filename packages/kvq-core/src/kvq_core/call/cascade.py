"""Combine two reads of the same query rows over disjoint keys, by their log-sum-exp.

With ``lse_i = ln sum_j exp(s_j)`` over the keys of read ``i`` and ``out_i`` its softmax-weighted values::

    lse = ln(exp(lse_1) + exp(lse_2))        out = out_1 exp(lse_1 - lse) + out_2 exp(lse_2 - lse)

which is attention over both sets of keys: cascade attention over a shared prefix, and context parallelism, read their keys in parts. Give
sinks to one of the reads only, since each read counts them. The second of two reads may as well be given the first's result (``other`` and
``other_lse`` of ``unified_attention``): that spares a launch, and the second result in memory.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvq_core import checks
from kvq_core.call.gradients import refuse_gradients
from kvq_core.call.memory import Extent, shares_bytes
from kvq_core.call.ops import kernels_run_on
from kvq_core.call.reference import joined, to_output_dtype
from kvq_core.call.spec import FLOATS
from kvq_core.errors import ArgumentError


def combine(
    out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor, *, result: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the keys of two reads.

    Args:
        out, other: [num_tokens, num_query_heads, head_size_v], the results of ``unified_attention`` without an ``output_scale``.
        lse, other_lse: [num_tokens, num_query_heads] float32, what it filled ``lse`` with.
        result: a contiguous tensor of ``out``'s shape to fill, bfloat16, float16 or float32; ``out`` or ``other`` itself, or one that
            shares no memory with the others. Default: a new one of ``out``'s dtype.

    Returns:
        ``result``, and a new tensor like ``lse``, computed in float32. A row that saw nothing in either read is 0, its LSE -inf.

    Raises:
        ArgumentError: the tensors do not belong together, or one requires grad, in grad mode: there is no backward pass.
    """
    named = {"out": out, "lse": lse, "other": other, "other_lse": other_lse} | ({} if result is None else {"result": result})
    for name, tensor in named.items():
        checks.tensor(name, tensor)
    if torch.is_grad_enabled():
        refuse_gradients(tuple(named), tuple(named.values()))
    if out.dim() != 3 or not out.shape[2] or out.dtype not in FLOATS:
        need = "[num_tokens, num_query_heads, head_size_v] of bfloat16, float16 or float32"
        raise ArgumentError("out", f"shape {tuple(out.shape)} of {out.dtype}", need)
    needs = {"lse": (out.shape[:2], torch.float32), "other": (out.shape, out.dtype), "other_lse": (out.shape[:2], torch.float32)}
    for name, (shape, dtype) in needs.items():
        tensor = named[name]
        if tensor.shape != shape or tensor.dtype != dtype or tensor.device != out.device:
            got = f"shape {tuple(tensor.shape)} of {tensor.dtype} on {tensor.device}"
            raise ArgumentError(name, got, f"shape {tuple(shape)} of {dtype} on {out.device}")
    if result is None:
        result = torch.empty_like(out, memory_format=torch.contiguous_format)
    elif result.shape != out.shape or result.device != out.device or result.dtype not in FLOATS or not result.is_contiguous():
        got = f"shape {tuple(result.shape)} of {result.dtype} on {result.device}, strides {result.stride()}"
        raise ArgumentError("result", got, f"shape {tuple(out.shape)} of floats on {out.device}, contiguous")
    else:
        _check_apart(result, named)
    if kernels_run_on(out.device) and not torch.compiler.is_compiling():
        from kvq_core.launch.reads import combine_reads

        return result, combine_reads(result, out, lse, other, other_lse)
    both, total = joined(out, lse, other, other_lse)
    result.copy_(to_output_dtype(both, result.dtype, None))
    return result, total


def _check_apart(result: torch.Tensor, named: Mapping[str, torch.Tensor]) -> None:
    """Raise :class:`ArgumentError` if ``result`` covers bytes of an input, unless each of its elements takes the place of its own input."""
    if torch.compiler.is_compiling():
        return
    mine = Extent.of(result)
    for name, tensor in named.items():
        in_place = (tensor.data_ptr(), tensor.dtype, tensor.stride()) == (result.data_ptr(), result.dtype, result.stride())
        between = tensor.data_ptr() - result.data_ptr()
        if not in_place and shares_bytes(mine, Extent.of(tensor), between):
            raise ArgumentError("result", f"memory that {name} has as well", f"{name} itself, or memory of its own: it is written")
