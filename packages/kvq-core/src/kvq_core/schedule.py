"""From a problem's facts to a launch plan: a pure function, so that every decision can be read and tested without a GPU.

A call is served by one or two launches. Sequences with few query rows (decode, speculative decoding) take tiles with keys first and
have their keys split over programs; sequences with many rows (prefill) take tiles with rows first. Each launch skips the sequences of
the other, so that the two may mix in one batch without either setting the pace.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass

# Query lengths up to this are served by the decode launch.
DECODE_QUERY_LEN = 16
# A decode tile holds at most this many query rows (tokens x heads of a group); more rows take more tiles.
DECODE_ROWS = 64
# Tokens in a chunk of a batch-invariant split: long enough that a chunk's result (2 KB a kv head) is small beside its keys.
INVARIANT_CHUNK = 2048
# Keys that a program of a split takes at least.
LEAST_SHARE = 128
UNLIMITED = 2**30


@dataclass(frozen=True)
class Problem:
    """What a plan depends on. Lengths are bounds, rounded up to powers of two by the caller, so that few plans exist."""

    num_seqs: int
    max_seqlen_q: int
    max_seqlen_k: int
    max_keys: int
    uniform: bool
    group: int
    num_kv_heads: int
    lane_bytes: int
    lanes: int
    streams: int
    num_sms: int
    engine_segments: int = 0
    scaled: bool = True
    may_split: bool = True
    batch_invariant: bool = False


@dataclass(frozen=True)
class Tile:
    """One measured choice: the shape of a program's work and how it is pipelined.

    ``registers``: at most so many for a thread (CUDA), so that more programs fit a multiprocessor; ``None`` leaves it to the compiler.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    keys_first: bool
    programs_per_sm: int
    registers: int | None = None


@dataclass(frozen=True)
class Launch:
    """One launch of the attention kernel and, if its keys are split, of the merge after it.

    ``split``: "" (a program has a whole row block), "shares" (``programs`` equal shares of the batch's tiles, ``least`` of them or more),
    "chunks" (``chunk`` keys each) or "segments" (an engine's). ``max_items``: pieces there can be.
    """

    tile: Tile
    min_query_len: int
    max_query_len: int
    max_row_blocks: int
    split: str = ""
    programs: int = 0
    max_items: int = 0
    least: int = 0
    chunk: int = 0
    segments: int = 0


class _Switch:
    def __init__(self) -> None:
        self.value: bool | None = None


_BATCH_INVARIANT = _Switch()


def is_batch_invariant() -> bool:
    """Whether bytes and results must not depend on what else is in a batch: the switch below, or ``KVQ_BATCH_INVARIANT=1``."""
    if _BATCH_INVARIANT.value is None:
        return os.environ.get("KVQ_BATCH_INVARIANT") == "1"
    return _BATCH_INVARIANT.value


def set_batch_invariant(on: bool) -> None:
    """Make each sequence's result bit-identical whatever else is in its batch (a fixed split; a few per cent slower)."""
    _BATCH_INVARIANT.value = on


@contextlib.contextmanager
def batch_invariant(on: bool = True) -> Iterator[None]:
    """:func:`set_batch_invariant` for a ``with`` block."""
    before = _BATCH_INVARIANT.value
    _BATCH_INVARIANT.value = on
    try:
        yield
    finally:
        _BATCH_INVARIANT.value = before


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least ``n`` (1 for 0)."""
    return 1 << max(n - 1, 0).bit_length()


@functools.lru_cache(maxsize=4096)
def plan(problem: Problem) -> tuple[Launch, ...]:
    """The launches that serve ``problem``."""
    longest = problem.max_seqlen_q
    if problem.batch_invariant:
        return (_decode(problem, DECODE_QUERY_LEN), *([_prefill(problem)] if longest > DECODE_QUERY_LEN else []))
    if longest <= DECODE_QUERY_LEN:
        return (_decode(problem, longest),)
    if problem.uniform:
        return (_prefill(problem),)
    return (_decode(problem, DECODE_QUERY_LEN), _prefill(problem))


def _decode(problem: Problem, longest: int) -> Launch:
    rows = max(8, min(power_of_two(longest * problem.group), max(DECODE_ROWS, power_of_two(problem.group))))
    tile = decode_tile(problem, rows)
    row_blocks = -(-longest // (rows // problem.group))
    blocks = problem.num_seqs * row_blocks
    if problem.engine_segments and longest == 1:
        programs = blocks * problem.engine_segments
        return Launch(tile, 1, longest, row_blocks, "segments", programs, programs, segments=problem.engine_segments)
    if problem.batch_invariant:
        chunk = -(-INVARIANT_CHUNK // tile.keys) * tile.keys
        if problem.max_keys <= chunk:
            return Launch(tile, 1, longest, row_blocks)
        programs = blocks * -(-problem.max_keys // chunk)
        return Launch(tile, 1, longest, row_blocks, "chunks", programs, programs + blocks, chunk=chunk)
    least = max(2, LEAST_SHARE // tile.keys)
    if not problem.may_split or problem.max_seqlen_k <= least * tile.keys:
        # A merge costs more than it saves.
        return Launch(tile, 1, longest, row_blocks)
    programs = max(1, problem.num_sms * tile.programs_per_sm // problem.num_kv_heads)
    return Launch(tile, 1, longest, row_blocks, "shares", programs, programs + blocks, least)


def _prefill(problem: Problem) -> Launch:
    tile = prefill_tile(problem)
    shortest = 1 if problem.uniform and not problem.batch_invariant else DECODE_QUERY_LEN + 1
    row_blocks = -(-problem.max_seqlen_q // (tile.rows // problem.group))
    return Launch(tile, shortest, UNLIMITED, row_blocks)


def decode_tile(problem: Problem, rows: int) -> Tile:
    """Few query rows: one warp a program keeps the softmax free of barriers (measured: docs/performance-notes.md)."""
    width = problem.lanes * problem.streams
    if rows > 16 or width > 256:
        keys = 64 if width <= 128 else 32 if width <= 256 else 16
        return Tile(rows, keys, 4, 2, keys_first=True, programs_per_sm=4)
    if problem.streams == 1:
        return Tile(rows, 32 if width <= 128 else 16, 1, 2, keys_first=True, programs_per_sm=8)
    keys = 64 if problem.streams > 2 else 32
    # 168 registers a thread let 12 one-warp programs share a multiprocessor (a quarter of its registers holds three).
    return Tile(rows, keys if width <= 128 else 32, 1, 2, keys_first=True, programs_per_sm=12, registers=168)


def prefill_tile(problem: Problem) -> Tile:
    """Many query rows: 64 a tile for four warps, so that accumulators and scores stay in registers; fewer for large heads."""
    width = problem.lanes * problem.streams
    full_precision = problem.streams == 1 and problem.lane_bytes == 4
    rows = 64 if width <= 256 and not full_precision else 32
    keys = 64 if width <= 128 else 32 if width <= 512 else 16
    if problem.streams == 2 and not problem.scaled and width <= 128:
        keys = 128
    rows = max(rows, power_of_two(problem.group))
    return Tile(rows, keys // 2 if full_precision else keys, 4, 2, keys_first=False, programs_per_sm=1)


@dataclass(frozen=True)
class Merge:
    """How the merge works: eight rows together up to ``few`` pieces; of more, ``pieces`` of a row, a program each if ``spread``."""

    few: int
    pieces: int
    spread: bool
    warps: int


def merge_tile(problem: Problem, launch: Launch, row_blocks: int) -> Merge:
    """Its time is that of its loads: many pieces of a row are loaded at once; of few pieces, eight rows share an un-rotation."""
    programs = row_blocks * problem.num_kv_heads
    # The order of the sums may follow the batch only where results may.
    if not problem.batch_invariant and programs * launch.tile.rows <= 4 * problem.num_sms:
        pieces = max(32, min(256, power_of_two(-(-launch.max_items // row_blocks))))
        return Merge(1, pieces, True, 4 if pieces <= 64 else 8)
    # Programs that end at once cost their share of the multiprocessors, too.
    return Merge(8, 32, programs * launch.tile.rows <= 64 * problem.num_sms, 4)


def write_tile(rows: int, batch_invariant: bool = False) -> tuple[int, int]:
    """((token, head) rows of a write program, warps). A row's sums may be laid out as its program's rows are."""
    return (16, 1) if rows >= 8192 and not batch_invariant else (8, 1)
