"""What a residual window is: how many tokens are kept exact, in how many blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from kvq_core import checks
from kvq_core.errors import ArgumentError


@dataclass(frozen=True)
class ResidualWindow:
    """The newest ``length`` tokens and the first ``sinks`` of a sequence, in blocks of ``block_size`` slots.

    ``sinks`` is a number of whole blocks, of these and of packed ones.
    """

    length: int
    sinks: int
    block_size: int

    @classmethod
    def of(cls, residual_length: int, sink_tokens: int, packed_block_size: int) -> Self | None:
        """``None`` if nothing is kept exact. Raises :class:`~kvq_core.ArgumentError` naming what is no count."""
        length = checks.integer("residual_length", residual_length, 0)
        sinks = -(-checks.integer("sink_tokens", sink_tokens, 0) // packed_block_size) * packed_block_size
        return cls(length, sinks, 8 if packed_block_size % 16 else 16) if length or sinks else None

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
        window_size: tuple[int, int] = (-1, -1),
        alibi_slopes: object = None,
        mm_prefix_range: object = None,
        **options: object,
    ) -> None:
        """Raise :class:`~kvq_core.ArgumentError` for an option of a read that counts keys between those that lie side by side in exact
        rows."""
        if mm_prefix_range is not None:
            raise ArgumentError("mm_prefix_range", "ranges", "None: a residual window reads keys before a row alone")
        if self.sinks and window_size[0] >= 0:
            raise ArgumentError("window_size", window_size, "(-1, -1) with sink_tokens: a sliding window does not see the first tokens")
        if self.sinks and alibi_slopes is not None:
            raise ArgumentError("alibi_slopes", "slopes", "None with sink_tokens: exact rows do not tell how far away the first tokens are")
