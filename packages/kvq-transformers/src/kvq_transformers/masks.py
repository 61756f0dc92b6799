"""The mask that transformers builds for kvq's attention: which tokens are padding, and nothing else.

Causality and sliding windows are the kernels' business, so that no [queries, keys] mask ever exists. What they cannot express is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.masking_utils import causal_mask_function, sdpa_mask

from kvq_core.errors import ArgumentError
from kvq_transformers.forward import CacheStateError


def kvq_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    local_size: int | None = None,
    use_vmap: bool = False,
    config: Any = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> torch.Tensor | None:
    """The new tokens' columns [batch_size, 1, 1, columns] bool of ``attention_mask``, or ``None`` where all are real.

    Columns of ``attention_mask`` [batch_size, tokens seen and new, or more] count from the text's first token, padding included.
    ``columns`` are the keys that the cache says the mask must cover: for a ``KVQCache`` the new ones, otherwise all.

    Raises:
        ArgumentError: a mask that is no causal or sliding-window one, or whose columns do not fit the cache.
    """
    if "allow_is_bidirectional_skip" in kwargs:
        common: dict[str, Any] = {"q_offset": q_offset, "kv_offset": kv_offset, "attention_mask": attention_mask, "local_size": local_size}
        return sdpa_mask(batch_size, q_length, kv_length, mask_function=mask_function, use_vmap=use_vmap, device=device, **common, **kwargs)
    _refuse_overlays(q_length, allow_is_causal_skip, use_vmap, local_size, config)
    if isinstance(q_offset, torch.Tensor) or kv_offset + kv_length != q_offset + q_length:
        return _of_fixed_length(batch_size, q_length, q_offset, kv_offset + kv_length, attention_mask, device)
    if attention_mask is None:
        return None
    _check_width(attention_mask, q_offset + q_length)
    columns = attention_mask[:, kv_offset : kv_offset + kv_length]
    if not torch.compiler.is_compiling() and columns.all():
        return None
    return columns[:, None, None, :]


def _of_fixed_length(
    batch_size: int,
    q_length: int,
    q_offset: int | torch.Tensor,
    capacity: int,
    attention_mask: torch.Tensor | None,
    device: torch.device | str,
) -> torch.Tensor:
    """The new columns for a cache of ``capacity`` tokens, whose length ``q_offset`` is known on the device only.

    Waits for the device to check it, where that is possible: in code that is compiled or captured, columns that the mask lacks are padding.
    """
    if may_wait(device):
        total = int(q_offset) + q_length
        if total > capacity:
            raise CacheStateError("attention_mask", f"{total} tokens", f"at most the max_cache_len of {capacity}")
        if attention_mask is not None:
            _check_width(attention_mask, total)
    if attention_mask is None:
        return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device).expand(batch_size, 1, 1, q_length)
    columns = torch.arange(q_length, device=attention_mask.device) + q_offset
    last = attention_mask.shape[-1] - 1
    # A tensor of its own: a view's strides would grow with the text, and torch.compile would recompile for each.
    return (attention_mask.index_select(1, columns.clamp(max=last)) & (columns <= last))[:, None, None, :]


def may_wait(device: torch.device | str) -> bool:
    """Whether a value on ``device`` can be looked at: not in code that is compiled or captured."""
    return not torch.compiler.is_compiling() and not (torch.device(device).type == "cuda" and torch.cuda.is_current_stream_capturing())


def reaching_too_far(real: torch.Tensor, columns: torch.Tensor, window: int) -> torch.Tensor:
    """Which tokens in ``columns`` [n] int64 would see keys that their window hides in transformers: [batch_size, n] bool.

    A window counts columns there, padding included; kvq's count real tokens. They part where padding lies within a window, and tokens
    before it. ``real`` [batch_size, all columns] bool: which are no padding.
    """
    seen = real.cumsum(1, dtype=torch.int32)
    start = columns - window
    before = torch.where(start < 0, 0, seen.index_select(1, start.clamp(min=0)))
    return real.index_select(1, columns) & (before > 0) & (seen.index_select(1, columns) - before < window)


def check_reach(too_far: torch.Tensor, window: int) -> None:
    """Raise :class:`ArgumentError` if :func:`reaching_too_far` found a token. Waits for the device."""
    if too_far.any():
        need = f"padding before a row's first token only: a sliding window of {window} counts columns, and kvq's counts tokens"
        raise ArgumentError("attention_mask", "padding between tokens, within the window of a later one", need)


def _check_width(attention_mask: torch.Tensor, total: int) -> None:
    if attention_mask.shape[-1] < total:
        raise ArgumentError("attention_mask", f"{attention_mask.shape[-1]} columns", f"{total}: all tokens of the cache and the new ones")


def _refuse_overlays(q_length: int, allow_is_causal_skip: bool, use_vmap: bool, local_size: int | None, config: Any) -> None:
    # A single new token sees all keys before it whatever is overlaid on a causal mask, and compiled decoding clears the flag, too.
    if q_length > 1 and (use_vmap or not allow_is_causal_skip):
        need = "a causal or sliding-window mask: kvq has none for tokens that see later ones, for packed sequences or custom overlays"
        raise ArgumentError("attention_mask", "a mask function that is not plainly causal", need)
    if local_size is not None and local_size != getattr(config, "sliding_window", None):
        raise ArgumentError(
            "attention_mask", f"chunks of {local_size}", "a causal or sliding-window mask: kvq has none for chunked attention"
        )


def padding_of(attention_mask: torch.Tensor | None, num_queries: int) -> torch.Tensor | None:
    """What :func:`kvq_mask` returned, as [batch_size, columns].

    Raises:
        ArgumentError: it is someone else's mask.
    """
    if attention_mask is None:
        return None
    ours = attention_mask.dim() == 4 and attention_mask.shape[1:3] == (1, 1) and attention_mask.dtype == torch.bool
    if not ours or attention_mask.shape[-1] < num_queries:
        got = f"a mask {tuple(attention_mask.shape)} of {attention_mask.dtype}"
        raise ArgumentError("attention_mask", got, "[batch_size, tokens] saying which are padding: kvq takes no custom mask")
    return attention_mask[:, 0, 0, :]
