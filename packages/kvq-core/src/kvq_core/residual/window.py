"""What a residual window is: how many tokens are kept exact, in how many blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from kvq_core import checks
from kvq_core.errors import ArgumentError


@dataclass(frozen=True)
class ResidualWindow:
    """The newest ``length`` tokens and the first ``sinks`` of a sequence, in blocks of ``block_size`` slots."""

    length: int
    sinks: int
    block_size: int

    @classmethod
    def of(cls, residual_length: int, sink_tokens: int, block_size: int) -> Self | None:
        """``None`` if nothing is kept exact. Raises :class:`ArgumentError` naming what is no count."""
        length = checks.integer("residual_length", residual_length, 0)
        sinks = checks.integer("sink_tokens", sink_tokens, 0)
        return cls(length, sinks, block_size) if length or sinks else None

    @property
    def sink_blocks(self) -> int:
        return -(-self.sinks // self.block_size)

    @property
    def blocks_per_sequence(self) -> int:
        """The most blocks that a sequence takes in a call: its sinks, the window before it and after it, each up to a block longer, and a
        copy of a shared block."""
        return self.sink_blocks + -(-2 * self.kept // self.block_size) + 4

    @property
    def kept(self) -> int:
        """New tokens up to which a call appends to a sequence's blocks: at least a block's, for decode steps without a window."""
        return max(self.length, self.block_size)

    def check(
        self,
        *,
        window_size: tuple[int, int] = (-1, -1),
        alibi_slopes: object = None,
        mm_prefix_range: object = None,
        **options: object,
    ) -> None:
        """Raise :class:`ArgumentError` for an option of a read that counts distances between keys which exact rows have side by side."""
        if mm_prefix_range is not None:
            raise ArgumentError("mm_prefix_range", "ranges", "None: a residual window reads keys before a row alone")
        if self.sinks and window_size[0] >= 0:
            raise ArgumentError("window_size", window_size, "(-1, -1) with sink_tokens: a sliding window does not see the first tokens")
        if self.sinks and alibi_slopes is not None:
            raise ArgumentError("alibi_slopes", "slopes", "None with sink_tokens: exact rows do not tell how far away the first tokens are")
