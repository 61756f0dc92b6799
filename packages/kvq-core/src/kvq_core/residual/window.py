"""What a residual window is: how many tokens are kept exact, in how many blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from kvq_core import checks
from kvq_core.errors import ArgumentError, described
from kvq_core.registry import get_backend

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvq_core.smoothing.rotary import RotaryMean


@dataclass(frozen=True)
class ResidualWindow:
    """The newest ``length`` tokens and the first ``sinks`` of a sequence, in blocks of ``block_size`` slots.

    ``sinks`` is a number of whole blocks, of these and of packed ones. ``mode``: what their rows are stored in.
    """

    length: int
    sinks: int
    block_size: int
    mode: str = "none"

    @classmethod
    def of(cls, residual_length: int, sink_tokens: int, packed_block_size: int, residual_mode: str = "none") -> Self | None:
        """``None`` if nothing is kept exact.

        Raises:
            ArgumentError: a number is no count, or rows cannot be kept in ``residual_mode``.
            UnknownModeError: no installed package provides that mode.
        """
        length = checks.integer("residual_length", residual_length, 0)
        sinks = -(-checks.integer("sink_tokens", sink_tokens, 0) // packed_block_size) * packed_block_size
        if not isinstance(residual_mode, str):
            raise ArgumentError("residual_mode", described(residual_mode), "a mode's name or alias")
        rows = get_backend(residual_mode)
        if rows.takes_scales:
            raise ArgumentError("residual_mode", rows.mode, "a mode that finds its own scales: exact rows have none from the caller")
        if length or sinks:
            return cls(length, sinks, 8 if packed_block_size % 16 else 16, rows.mode)
        if rows.mode != "none":
            raise ArgumentError("residual_mode", rows.mode, "none: without residual_length and sink_tokens no exact rows are kept")
        return None

    def serves(self, mode: str) -> bool:
        """Whether its rows may be nearer to what was given than packed rows of ``mode``."""
        return mode not in ("none", self.mode)

    def check_rotary(self, means: Iterable[RotaryMean | None]) -> None:
        """Raise :class:`~kvq_core.ArgumentError` if one of these is there and keys of exact rows cannot be stored without it."""
        if self.mode != "none" and self.sinks and any(mean is not None for mean in means):
            need = "none with sink_tokens and a rotary mean (key biases): in exact rows positions jump from the first tokens to the newest"
            raise ArgumentError("residual_mode", self.mode, need)

    @property
    def sink_blocks(self) -> int:
        return self.sinks // self.block_size

    @property
    def blocks_per_sequence(self) -> int:
        """The most blocks that a sequence takes, for its sinks, the window, which begins with a block, and the new tokens of a call."""
        return self.sink_blocks + -(-(self.length + 2 * self.block_size - 1) // self.block_size)

    @property
    def appended(self) -> int:
        """New tokens up to which a call appends to a sequence's blocks, as decode steps and drafts to verify do."""
        return self.block_size

    def check(
        self,
        *,
        window_size: tuple[int, int] | None = (-1, -1),
        alibi_slopes: object = None,
        mm_prefix_range: object = None,
        **options: object,
    ) -> None:
        """Raise :class:`~kvq_core.ArgumentError` for an option of a read that counts keys between those that lie side by side in exact
        rows."""
        if mm_prefix_range is not None:
            raise ArgumentError("mm_prefix_range", "ranges", "None: a residual window reads keys before a row alone")
        if checks.window_left(window_size) >= 0 and self.sinks:
            raise ArgumentError("window_size", window_size, "(-1, -1) with sink_tokens: a sliding window does not see the first tokens")
        if self.sinks and alibi_slopes is not None:
            raise ArgumentError("alibi_slopes", "slopes", "None with sink_tokens: exact rows do not tell how far away the first tokens are")
