"""One scale for a whole tensor: what the caller of a mode such as ``fp8_per_tensor`` gives for a layer's keys, and for its values."""

from __future__ import annotations

import math
from numbers import Number
from typing import Final

import torch

from kvq_core import checks
from kvq_core.errors import ArgumentError, described
from kvq_core.smoothing.calibration import KeySmoothing

LARGEST_CODE: Final = torch.finfo(torch.float8_e4m3fn).max / 2
"""What the largest value seen is stored as: half of e4m3's largest, for a text to come that has larger ones. A floating-point code loses
nothing by it."""
_SMALLEST: Final = 1e-6


def is_scale(given: object) -> bool:
    """Whether ``given`` is one scale, a number or a one-element tensor, and no sequence of them."""
    return given.numel() == 1 if isinstance(given, torch.Tensor) else isinstance(given, Number)


def checked_scale(argument: str, layer: int | None, scale: object) -> float:
    """``scale``, a number, Python's or numpy's, or a one-element tensor, as a float; ``layer``: its layer, if that is known. Waits for the
    device of a tensor.

    Raises:
        ArgumentError: it is nothing of that kind, or not positive and finite in float32.
    """
    given, of_layer = scale, "" if layer is None else f" for layer {layer}"
    if isinstance(scale, torch.Tensor):
        one = checks.tensor(argument, scale)
        if one.numel() != 1 or one.is_complex() or one.dtype == torch.bool or one.is_meta:
            got = f"shape {tuple(one.shape)}, {one.dtype} on {one.device}{of_layer}"
            raise ArgumentError(argument, got, "a number or a one-element tensor")
        given = one.detach().item()
    # Checked as float32, where a tiny scale may have become 0.
    value = float(torch.tensor(checks.real(argument, given), dtype=torch.float64, device="cpu").float())
    if not (math.isfinite(value) and value > 0):
        raise ArgumentError(argument, f"{described(given)}{of_layer}", "a positive, finite float32")
    return value


class TensorRange:
    """The least and the largest value of each channel over rows of keys or values, as they come: from any number of :meth:`add`. Tokens
    with a number that is not finite do not count."""

    def __init__(self) -> None:
        self._low: torch.Tensor | None = None
        self._high: torch.Tensor | None = None

    def add(self, rows: torch.Tensor) -> None:
        """Count rows [num_tokens, num_kv_heads, head_size]; none is no error."""
        if rows.dim() != 3 or not rows.is_floating_point():
            raise ArgumentError("rows", f"shape {tuple(rows.shape)}, {rows.dtype}", "[num_tokens, num_kv_heads, head_size] floats")
        rows = rows.detach()
        rows = rows[rows.isfinite().flatten(1).all(1)]
        if not len(rows):
            return
        low, high = rows.float().aminmax(dim=0)
        self._low = low if self._low is None else torch.minimum(low, self._low)
        self._high = high if self._high is None else torch.maximum(high, self._high)

    def scale(self, smoothing: KeySmoothing | None = None) -> torch.Tensor:
        """[1] float32: the largest absolute value over :data:`LARGEST_CODE`; with ``smoothing``, that of the rows as they are stored.

        Raises:
            ArgumentError: there were no rows, or ``smoothing`` is for other heads.
        """
        if self._low is None or self._high is None:
            raise ArgumentError("rows", "none so far", "rows to take a scale from")
        low, high = self._low, self._high
        if smoothing is not None:
            smoothing.check(*low.shape)
            low, high = low - smoothing.mean, high - smoothing.mean
            if smoothing.rotary is not None:
                reach = smoothing.rotary.channel_table[:, :2].norm(dim=1)
                low, high = low - reach, high + reach
            if smoothing.balance is not None:
                low, high = low / smoothing.balance, high / smoothing.balance
        return (torch.maximum(-low, high).amax() / LARGEST_CODE).clamp(min=_SMALLEST).reshape(1)
