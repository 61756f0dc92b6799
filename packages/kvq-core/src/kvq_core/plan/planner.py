"""From a problem's facts to a launch plan: a pure function, so that every decision can be read and tested without a GPU.

What was measured is data: tiles come from the tables of :mod:`kvq_core.plan`. Here is what follows from the facts.

A call is served by one or two launches. Sequences with few query rows (decode, speculative decoding) take tiles of few rows and have
their keys split over programs; sequences with many rows (prefill) take tiles of many. Each launch skips the sequences of
the other, so that the two may mix in one batch without either setting the pace.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from enum import Enum

from kvq_core.plan import choices, lookup

# Query lengths up to this are served by the decode launch.
DECODE_QUERY_LEN = 16
# A decode tile holds at most this many query rows (tokens x heads of a group); more rows take more tiles, each of which reads the keys.
DECODE_ROWS = 64
# The same over packed keys: more rows beside them find no registers, which costs more than to unpack the keys again for the next rows.
PACKED_ROWS = 16
# Of a product on the tensor cores. So many query rows fill it themselves, and come first where a warp has them all: the weights are then
# the next product's operand as they come, where keys first have them transposed by way of other threads.
LONG_SIDE = 16
# Rows and keys of a tile that warp groups work on.
GROUPS_TILE = 128
# Keys of a tile that one warp group works on, the rows it has at most, and the keys below which it is not worth its start.
MULTIROW_KEYS = 64
MULTIROW_ROWS = 64
MULTIROW_MIN_KEYS = 128
# Registers of a multiprocessor and, at most, of a thread; threads of a warp and of a warp group.
SM_REGISTERS = 65536
THREAD_REGISTERS = 255
WARP_THREADS = 32
GROUP_THREADS = 128
# Tokens in a chunk of a batch-invariant split: long enough that a chunk's result (2 KB a kv head) is small beside its keys.
INVARIANT_CHUNK = 2048
# Rows on a multiprocessor that the combine kernel of such a split is planned for, whatever is there.
INVARIANT_ROWS = 64
UNLIMITED = 2**30
# Row blocks of a prompt from which its keys are staged (kvq_core.kernels.staging): each of fewer may as well unpack them in the mode's own
# kernel for sm_90. In place of the Triton kernel it pays earlier.
STAGED_ROW_BLOCKS = 32
STAGED_ROW_BLOCKS_OR_TRITON = 8


class KernelFamily(Enum):
    """Which of a mode's attention kernels a launch is of. Values: warp groups that multiply, as tables of plans choose them."""

    TRITON = 0
    SM90_DECODE_MULTIROW = 1
    SM90_PREFILL = 2


@dataclass(frozen=True)
class Problem:
    """What a plan depends on. Lengths are bounds; keys' are rounded up to powers of two by the caller, so that few plans exist.

    ``max_seqlen_k``: of the keys that a sequence's rows see, which a window may leave few of. ``max_keys``: that a sequence can have.
    ``lanes``: of a head, padded; ``head_lanes``: its own. ``foldable``: two keys can share a row of them. ``apart``: something
    lies between a head's rows. ``in_chunks``: lanes are multiplied in chunks, without padding. ``arch``: ``sm_90``, ``gfx942``;
    "" for what is no GPU. ``variant``: the format's own. ``side_bytes``: a byte beside each lane.
    ``sm90_fits``, ``multirow_fits``: warp groups can take many rows; one can take few. ``most_staged``: tiles of every kv head that there
    is room to stage; 0 where none can be.
    """

    num_seqs: int
    max_seqlen_q: int
    max_seqlen_k: int
    max_keys: int
    uniform: bool
    group: int
    num_kv_heads: int
    lane_bytes: int
    lanes: int
    ways: int
    num_sms: int
    head_lanes: int = 0
    foldable: bool = False
    apart: bool = False
    in_chunks: bool = False
    engine_segments: int = 0
    scaled: bool = True
    may_split: bool = True
    batch_invariant: bool = False
    arch: str = ""
    variant: str = ""
    side_bytes: bool = False
    sm90_fits: bool = False
    multirow_fits: bool = False
    most_staged: int = 0

    @property
    def width(self) -> int:
        """Channels of a head, padded."""
        return self.lanes * self.ways

    @property
    def format_facts(self) -> dict[str, choices.Fact]:
        """What tables choose by for every kind of kernel."""
        return {"variant": self.variant, "ways": self.ways, "width": self.width}

    @property
    def prompt_facts(self) -> dict[str, choices.Fact]:
        """What they choose warp groups for prompts by, beside whether tiles can be staged."""
        return {**self.format_facts, "rows": self.max_seqlen_q * self.group}

    @property
    def plane_facts(self) -> dict[str, choices.Fact]:
        """What they choose tiles by."""
        return {**self.format_facts, "lane_bytes": self.lane_bytes, "scaled": self.scaled, "side_bytes": self.side_bytes}


@dataclass(frozen=True)
class PlannedTile:
    """The shape of a program's work and how it is pipelined: what a table chooses, and the rows.

    ``registers``: at most so many for a thread (CUDA), so that more programs fit a multiprocessor; ``None`` leaves it to the compiler.
    ``least``: tiles that a program of a split takes at least. ``loops``: loops over its keys, where its rows are those of one token.
    ``decode``: a tile of few rows. ``keys_first``: scores are [keys, rows], since the rows do not fill the tensor cores' long side.
    ``groups``: warp groups that multiply, in kernels that have such; of two, ``registers`` are those groups' alone. ``fold``: keys that
    share a row of lanes, each with its own of the ``rows``.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    decode: bool
    keys_first: bool
    programs_per_sm: int
    registers: int | None = None
    least: int = 1
    loops: int = 2
    groups: int = 0
    fold: int = 1

    @property
    def family(self) -> KernelFamily:
        return KernelFamily(self.groups)

    @property
    def register_limit(self) -> int | None:
        """Registers that ptxas is told a thread may have; ``None``: nothing, it chooses.

        Where a decode tile's programs leave every thread all of them, it is told so. By itself it may take fewer, to make room for
        programs that are not launched: 168 for int2 and heads of 96, whose decode is then 9 % slower (H200).
        """
        left = SM_REGISTERS // (WARP_THREADS * self.warps * self.programs_per_sm)
        return THREAD_REGISTERS if self.registers is None and self.decode and left > THREAD_REGISTERS else self.registers

    @property
    def query_rows(self) -> int:
        """Rows of queries in a tile."""
        return self.rows // self.fold


@dataclass(frozen=True)
class Launch:
    """One launch of the attention kernel and, if its keys are split, of the combine kernel after it.

    ``split``: "" (a program has a whole row block), "equal" (the batch's tiles over ``programs``, ``least`` or more each),
    "chunks" (``chunk`` keys each) or "segments" (an engine's). ``max_items``: most work tiles. ``combine_waits``: the combine
    kernel is launched, to wait, when the programs have begun rather than when they end (where a GPU can). ``staged``: tiles of every kv
    head that are staged for it at most; 0: it reads pages, after a launch with staged tiles those of the sequences left over.
    """

    tile: PlannedTile
    min_query_len: int
    max_query_len: int
    max_row_blocks: int
    split: str = ""
    programs: int = 0
    max_items: int = 0
    least: int = 0
    chunk: int = 0
    segments: int = 0
    combine_waits: bool = False
    staged: int = 0


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least ``n`` (1 for 0)."""
    return 1 << max(n - 1, 0).bit_length()


@functools.lru_cache(maxsize=4096)
def plan(problem: Problem) -> tuple[Launch, ...]:
    """The launches that serve ``problem``. Split ones come first: their partial results have the memory of tiles that are staged later."""
    longest = problem.max_seqlen_q
    if problem.batch_invariant:
        return (_decode(problem, DECODE_QUERY_LEN), *(_prefill(problem) if longest > DECODE_QUERY_LEN else []))
    if longest <= DECODE_QUERY_LEN:
        return (_decode(problem, longest),)
    if problem.uniform:
        return _prefill(problem)
    return (_decode(problem, DECODE_QUERY_LEN), *_prefill(problem))


def _decode(problem: Problem, longest: int) -> Launch:
    multirow = multirow_tile(problem, longest * problem.group)
    if multirow is not None and not (problem.engine_segments and longest == 1):
        return _shared(problem, multirow, longest)
    most = PACKED_ROWS if problem.ways > 1 else DECODE_ROWS
    needed = power_of_two(longest * problem.group)
    tile = decode_tile(problem, min(needed, max(most, power_of_two(problem.group))))
    row_blocks = -(-longest // (tile.query_rows // problem.group))
    blocks = problem.num_seqs * row_blocks
    if problem.engine_segments and longest == 1:
        programs = blocks * problem.engine_segments
        return Launch(tile, 1, longest, row_blocks, "segments", programs, programs, segments=problem.engine_segments)
    if problem.batch_invariant:
        chunk = -(-INVARIANT_CHUNK // tile.keys) * tile.keys
        # However short: a kernel that splits nothing is another kernel.
        programs = blocks * -(-problem.max_keys // chunk)
        return Launch(tile, 1, longest, row_blocks, "chunks", programs, programs + blocks, chunk=chunk)
    if not problem.may_split or problem.max_seqlen_k <= tile.least * tile.keys:
        # A combine kernel costs more than it saves.
        return Launch(tile, 1, longest, row_blocks)
    return _shared(problem, tile, longest)


def _shared(problem: Problem, tile: PlannedTile, longest: int) -> Launch:
    """Keys split equally."""
    row_blocks = -(-longest // (tile.query_rows // problem.group))
    blocks = problem.num_seqs * row_blocks
    programs = max(1, problem.num_sms * tile.programs_per_sm // problem.num_kv_heads)
    # Programs without work leave room for the combine kernel; beside busy ones it would have none.
    ranges = blocks * -(-problem.max_seqlen_k // (tile.least * tile.keys))
    waits = ranges <= programs
    programs = min(programs, ranges)
    return Launch(tile, 1, longest, row_blocks, "equal", programs, programs + blocks, tile.least, combine_waits=waits)


def _prefill(problem: Problem) -> tuple[Launch, ...]:
    shortest = 1 if problem.uniform and not problem.batch_invariant else DECODE_QUERY_LEN + 1
    staged = _staged(problem, shortest)
    if staged is not None and problem.uniform and staged.staged < problem.most_staged:
        # Every sequence has room there. max_seqlen_q is a bound: shorter ones may be among them.
        return (replace(staged, min_query_len=shortest),)
    tile = prefill_tile(problem)
    plain = Launch(tile, shortest, UNLIMITED, -(-problem.max_seqlen_q // (tile.rows // problem.group)))
    return (plain,) if staged is None else (staged, plain)


def _staged(problem: Problem, shortest: int) -> Launch | None:
    """The launch for prompts long enough to stage their keys, if there are any and the table wants it."""
    tokens = GROUPS_TILE // problem.group
    row_blocks = -(-problem.max_seqlen_q // max(1, tokens))
    # Whatever max_seqlen_k says: no sequence has more keys than its row of the block table.
    tiles = min(problem.num_seqs * -(-problem.max_keys // GROUPS_TILE), problem.most_staged)
    least = staged_row_blocks(problem)
    if not tiles or problem.batch_invariant or row_blocks < least:
        return None
    way = lookup.choose(problem.arch, choices.Groups, {**problem.prompt_facts, "stageable": True})
    if not way.staged:
        return None
    return Launch(_tile_of_groups(way), max(shortest, (least - 1) * tokens + 1), UNLIMITED, row_blocks, staged=tiles)


def staged_row_blocks(problem: Problem) -> int:
    """Those of the shortest prompt whose keys are staged."""
    return STAGED_ROW_BLOCKS if problem.sm90_fits else STAGED_ROW_BLOCKS_OR_TRITON


def decode_tile(problem: Problem, query_rows: int) -> PlannedTile:
    """Few query rows."""
    longest = 0 if problem.batch_invariant else problem.max_seqlen_k
    keys = problem.num_seqs * longest * problem.num_kv_heads // problem.num_sms
    fold = 2 if problem.foldable and 2 * query_rows <= PACKED_ROWS else 1
    facts = {
        **problem.plane_facts,
        "rows": max(8, query_rows),
        "folded": fold > 1,
        "apart": problem.apart,
        "keys_per_sm": keys,
        "longest": longest,
    }
    choice = lookup.choose(problem.arch, choices.Decode, facts)
    rows = max(8, fold * query_rows)
    # As many lanes in a tile as without, or fewer.
    tile_keys = fold * choice.keys // (1 if fold * problem.head_lanes <= problem.lanes else 2)
    # Pieces of lanes leave rows that come first too few registers.
    keys_first = rows < LONG_SIDE or fold > 1 or choice.warps > 1 or problem.in_chunks
    return PlannedTile(
        rows=rows,
        keys=tile_keys,
        warps=choice.warps,
        stages=choice.stages,
        decode=True,
        keys_first=keys_first,
        programs_per_sm=choice.programs_per_sm,
        registers=choice.registers,
        least=max(1, choice.min_keys // tile_keys),
        loops=choice.loops,
        fold=fold,
    )


def multirow_tile(problem: Problem, rows: int) -> PlannedTile | None:
    """Query rows for one warp group, keys first, if it can take them and the table wants it to. All sequences have as many."""
    small = rows <= PACKED_ROWS or problem.max_seqlen_k <= MULTIROW_MIN_KEYS
    if not problem.multirow_fits or problem.batch_invariant or not problem.uniform or not problem.may_split or small:
        return None
    way = lookup.choose(problem.arch, choices.Groups, {**problem.format_facts, "rows": rows, "stageable": False})
    if way.groups != 1 or problem.group > MULTIROW_ROWS:
        return None
    return PlannedTile(
        rows=min(power_of_two(rows), MULTIROW_ROWS),
        keys=MULTIROW_KEYS,
        warps=4,
        stages=way.stages,
        decode=True,
        keys_first=True,
        programs_per_sm=SM_REGISTERS // (GROUP_THREADS * way.registers),
        registers=way.registers,
        least=MULTIROW_MIN_KEYS // MULTIROW_KEYS,
        groups=1,
    )


def prefill_tile(problem: Problem) -> PlannedTile:
    """Many query rows, which come first; all of a group's heads are in one tile."""
    # Which kernel a row is in must not follow from the batch, where results may not.
    if problem.sm90_fits and not problem.batch_invariant:
        way = lookup.choose(problem.arch, choices.Groups, {**problem.prompt_facts, "stageable": False})
        if way.groups > 1:
            return _tile_of_groups(way)
    choice = lookup.choose(problem.arch, choices.Prefill, problem.plane_facts)
    rows = max(choice.rows, power_of_two(problem.group))
    return PlannedTile(
        rows=rows,
        keys=choice.keys,
        warps=choice.warps,
        stages=choice.stages,
        decode=False,
        keys_first=False,
        programs_per_sm=1,
        registers=choice.registers,
    )


def _tile_of_groups(way: choices.Groups) -> PlannedTile:
    """Of two groups."""
    return PlannedTile(
        rows=GROUPS_TILE,
        keys=GROUPS_TILE,
        warps=4,
        stages=way.stages,
        decode=False,
        keys_first=False,
        programs_per_sm=1,
        registers=way.registers,
        groups=way.groups,
    )


def combine_tile(problem: Problem, launch: Launch, row_blocks: int) -> choices.Combine:
    """How the splits of a launch are combined. Its time is that of its loads."""
    rows = -(-row_blocks * problem.num_kv_heads * launch.tile.rows // problem.num_sms)
    splits = -(-launch.max_items // row_blocks)
    if launch.split == "equal":
        # No more than the longest sequence has splits of the least size.
        splits = min(splits, -(-problem.max_seqlen_k // (launch.least * launch.tile.keys)))
    splits = power_of_two(splits)
    if problem.batch_invariant:
        # The order of the sums may follow the batch only where results may.
        rows, splits = INVARIANT_ROWS, 1
    return lookup.choose(problem.arch, choices.Combine, {**problem.format_facts, "rows_per_sm": rows, "splits": splits})


def write_tile(
    arch: str,
    variant: str,
    ways: int,
    width: int,
    rows: int,
    batch_invariant: bool = False,
    store_mma_fits: bool = False,
    side_bytes: bool = False,
) -> choices.Write:
    """The tile of a write of ``rows`` (token, head) rows with ``width`` channels, padded; ``store_mma_fits``: whether the mode's kernel in
    the MMA layout can take them; ``side_bytes``: whether a byte lies beside each lane."""
    # A row's sums may be laid out as its program's rows are.
    rows = 1 if batch_invariant else rows
    facts: dict[str, choices.Fact] = {"variant": variant, "ways": ways, "width": width, "rows": rows}
    facts |= {"side_bytes": side_bytes, "store_mma": store_mma_fits}
    return lookup.choose(arch, choices.Write, facts)
