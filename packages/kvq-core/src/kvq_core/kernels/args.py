"""What the kernels are told at run time, in NamedTuples. What they are compiled for is in :mod:`.config`.

A pointer that is ``None`` switches its feature off at compile time. Test the pointer, not the bundle, and do not nest bundles: Triton 3.6
cannot compare a tuple that holds None or a specialized 1, and loses a specialized 1 two levels down.
"""

from typing import Any, NamedTuple

import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


class PlaneArgs(NamedTuple):
    """K or V of a paged cache. Strides in elements; ``codes`` of a packed mode is seen as 16-bit lanes."""

    codes: Any
    scales: Any
    block_stride: Any
    slot_stride: Any
    head_stride: Any
    scale_block_stride: Any
    scale_slot_stride: Any
    scale_head_stride: Any


class RowsArgs(NamedTuple):
    """A [tokens, heads, channels] tensor with contiguous channels: q, out, or new K/V rows.

    Where keys are smoothed, ``mean`` and ``factor`` [kv heads, channels] float32 or None: new keys become ``(k - mean) * factor``; q
    becomes ``q * factor``, and ``q . mean`` joins its scores. ``rotary``: a table of a rotary mean (:mod:`.rotary`), or
    None; ``positions`` [tokens] int32: those of new keys.
    """

    ptr: Any
    token_stride: Any
    head_stride: Any
    mean: Any = None
    factor: Any = None
    rotary: Any = None
    positions: Any = None


class OutputArgs(NamedTuple):
    """Where results go: a [tokens, heads, channels] tensor with contiguous channels, and ``lse`` [tokens, heads] float32, contiguous, or
    None: the natural logarithm of each row's softmax denominator.

    ``other`` [tokens, heads, channels] and ``other_lse`` [tokens, heads], float32, contiguous, or None: what another read of the rows has
    found in other keys, which results are to be of as well.
    """

    ptr: Any
    token_stride: Any
    head_stride: Any
    lse: Any
    other: Any = None
    other_lse: Any = None


class BatchArgs(NamedTuple):
    """Who attends to what. ``table_stride`` travels beside it, so that it is not specialized on. ``key_stops`` and ``first_positions`` may
    be None, and ``first_tiles``, where no keys are staged (:mod:`.staging`)."""

    cu_seqlens_q: Any
    seqused_k: Any
    block_table: Any
    key_stops: Any = None
    first_positions: Any = None
    first_tiles: Any = None


class ScoringArgs(NamedTuple):
    """How a score comes from a query and a key. ``window_left``, ``softcap`` and the pointers may be None.

    ``qq_bias`` is [qq_bias_size, qq_bias_size] with row stride ``qq_bias_stride``; ``ranges`` is mm_prefix_range [num_seqs, num_ranges, 2].
    """

    softmax_scale: Any
    window_left: Any
    softcap: Any
    sinks: Any
    alibi_slopes: Any
    qq_bias: Any
    qq_bias_stride: Any
    qq_bias_size: Any
    ranges: Any
    num_ranges: Any


class Splits(NamedTuple):
    """The keys' split. "equal": at least ``least`` tiles a program; "chunks": ``chunk`` keys; "segments": so many a sequence."""

    least: Any
    chunk: Any
    segments: Any


class Partials(NamedTuple):
    """Where programs leave their partials: acc [n, head_size_v] float32 (way-major columns), max and sum [n] float32.

    ``plan`` [row blocks, 2] int32: how many splits, and the item of the first.
    """

    acc: Any
    max: Any
    sum: Any
    plan: Any
    row_stride: Any


class SoftmaxState(NamedTuple):
    """Running maximum (in units of the scores; log2 units after the loop) and sum of each query row."""

    max: Any
    sum: Any


class TileRange(NamedTuple):
    """A program's units of work, ``next`` up to ``stop``; every program has ``size`` of them.

    ``row_units``: above 0, the units that every row block is numbered as having, those after a shorter one's end empty. 0: each has its
    own number.
    """

    next: Any
    stop: Any
    size: Any
    row_units: Any


class WorkTile(NamedTuple):
    """Some rows of one sequence against the keys ``start`` to ``stop``.

    ``num_splits``: of the row block's keys; exact in the first split, at unit 0, and 2, for more than one, in every other. ``unit``: where
    this split begins. ``item``: its number among the launch's work tiles.
    """

    seq: Any
    row_start: Any
    num_rows: Any
    first_token: Any
    context_len: Any
    seq_len: Any
    start: Any
    stop: Any
    unit: Any
    num_splits: Any
    item: Any


class CombineRows(NamedTuple):
    """The query rows of one tile, as the combine kernel knows them: in ``num_splits``, of which the first is ``item``."""

    first_token: Any
    row_start: Any
    query_len: Any
    num_splits: Any
    item: Any


class QueryRows(NamedTuple):
    """The query rows of a tile: [ROWS] vectors. Row r is query head ``r % group`` of token ``r // group``.

    ``shift``: what the smoothed keys' mean adds to all scores of a row; means nothing unless C.features.shifted.
    """

    index: Any
    token: Any
    head: Any
    position: Any
    valid: Any
    shift: Any


class QueryOperand(NamedTuple):
    """The query rows as keys are multiplied by them: ``ways``, and [ROWS] vectors. ``unit``: what a product is multiplied by to be a score,
    ``factor`` what is left of it to :func:`.scores.finish_scores`, and ``score_scale`` to the softmax; ``zero``: the seed of a zero point
    of 1 (:func:`.queries.scaled_queries`)."""

    ways: Any
    unit: Any
    factor: Any
    score_scale: Any
    zero: Any


class RotaryRows(NamedTuple):
    """A rotary mean as a tile's query rows see it (:mod:`.rotary`), in log2 units.

    ``along``, ``across``: A and B, [PAIRS, ROWS] if keys come first, else [ROWS, PAIRS]. ``steps``: of the pairs, in the shape of A
    and B. ``cosines``, ``sines``: of a few rows, those of a tile's keys counted from its first. ``first``: the position of the sequence's
    first key.
    """

    along: Any
    across: Any
    steps: Any
    cosines: Any
    sines: Any
    first: Any


class KeyTiles(NamedTuple):
    """Numbers of key tiles: ``first`` up to ``last``, and from ``gap_at`` on ``gap`` more (scalars)."""

    first: Any
    last: Any
    gap_at: Any
    gap: Any


class KeyTile(NamedTuple):
    """The keys of a tile: [KEYS] vectors. ``valid``: in the work tile's range, and in a block that exists. ``first``: the first position.

    ``block``, ``slot``: of each key, or, in a tile that is not checked, of the first of every C.keys_an_id. ``row_block``, ``row_slot``:
    those of each row of lanes, [KEYS // FOLD].
    """

    position: Any
    block: Any
    slot: Any
    valid: Any
    row_block: Any
    row_slot: Any
    first: Any
