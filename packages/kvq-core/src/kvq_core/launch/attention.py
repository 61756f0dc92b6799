"""From validated problems to kernel launches: bundle, plan, launch, combine."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import triton

from kvq_core.call.spec import Attention
from kvq_core.errors import ArgumentError
from kvq_core.kernels import args
from kvq_core.kernels.combine import combine_kernel
from kvq_core.kernels.config import CombineTile, Features, ReadConfig, Shape, Tile
from kvq_core.kernels.formats import Format, Kernels, Sm90Kernels
from kvq_core.kernels.heads import Heads, multiplied_lanes
from kvq_core.launch import dispatch, target
from kvq_core.launch.bundles import (
    FP8_NAMES,
    PagesArgs,
    bundle_output,
    bundle_pages,
    bundle_rows,
    bundle_scoring,
    row_alignment,
    strides_of,
)
from kvq_core.launch.device import device_facts, interpreting, overlaps
from kvq_core.launch.replay import LaunchRecord
from kvq_core.launch.staging import most_tiles, stage, staged_config
from kvq_core.launch.workspace import sole_use
from kvq_core.plan import planner
from kvq_core.plan.planner import KernelFamily

MOST_KEYS = 512
"""Keys of a sequence that one program of a read beside another has at most: more are better split."""
PREFETCHED_KEYS = 32
"""Keys of a split up to which a program prefetches its first tile; with 64 it gains nothing (docs/dev/experiments/2026-11.md)."""

Parts = tuple[args.Splits, args.Partials]
"""How keys are split, and where the results of splits go."""


@dataclass(frozen=True)
class Read:
    """A mode's kernels and what they attend to."""

    kernels: Kernels
    attention: Attention

    @functools.cached_property
    def sm90(self) -> Sm90Kernels:
        return dispatch.sm90_reads(self.kernels, self.attention)

    @functools.cached_property
    def problem(self) -> planner.Problem:
        return problem_of(self.attention, self.kernels.format, self.sm90)


def launch_attention(kernels: Kernels, attention: Attention, first: Read | None = None) -> LaunchRecord:
    """Launch a mode's attention kernel, and the combine kernel where keys are split, for every class of query lengths in the batch.

    ``first``: the read whose result this one joins, launched along with it: just before its two kernels or between them, where it can, to
    fill the places that programs leave free.
    """
    record, read = LaunchRecord(attention.q.device), Read(kernels, attention)
    elsewhere = target.current()
    one_of_two = elsewhere is not None and elsewhere.beside
    if one_of_two and attention.other is None and (unsplit := _unsplit(read)) is not None:
        # The read that joins it is not known here, and asks for either.
        for before in (True, False):
            _launch_unsplit(record, unsplit, before)
        return record
    launches = planner.plan(read.problem)
    with sole_use(attention.q.device):
        # One launch of two kernels leaves room beside them, and has the workspace.
        beside = _unsplit(first) if first is not None and _leaves_room(launches) else None
        if first is not None and beside is None:
            _launch(record, first, planner.plan(first.problem))
        _launch(record, read, launches, beside, beside is not None or (one_of_two and _leaves_room(launches)))
    return record


def _leaves_room(launches: tuple[planner.Launch, ...]) -> bool:
    """Whether another read can be launched beside these: two kernels, of which the second needs it."""
    return len(launches) == 1 and bool(launches[0].split)


def _other_goes_first(form: Format, launch: planner.Launch) -> bool:
    """Whether another read, of few keys, is best launched before this one, and not between its two kernels.

    Before, it runs while this one's programs find their work. But where these are planned to fill a multiprocessor, and the memory's
    bandwidth, those that find their places taken begin late (docs/dev/experiments/2026-11.md). Few keys leave places free.
    """
    tile = launch.tile
    has_room = launch.combine_waits or (form.packed and (tile.rows > 8 or tile.registers is not None))
    return has_room and tile.family is KernelFamily.TRITON


def _unsplit(read: Read) -> Read | None:
    """``read`` with no keys split, which takes no workspace, as it is launched beside another; ``None`` if it cannot be."""
    attention = read.attention
    if attention.batch.max_seqlen_k > MOST_KEYS or not overlaps(attention.q.device):
        return None
    whole = Read(read.kernels, replace(attention, seq_threshold_3d=0))
    planned = planner.plan(whole.problem)
    alike = len(planned) == 1 and planned[0].tile.decode and planned[0].tile.family is KernelFamily.TRITON and not planned[0].split
    return whole if alike else None


def _launch(
    record: LaunchRecord, read: Read, launches: tuple[planner.Launch, ...], beside: Read | None = None, leaves_room: bool = False
) -> None:
    kernels, attention, sm90 = read.kernels, read.attention, read.sm90
    entries = {
        KernelFamily.TRITON: kernels.attend,
        KernelFamily.SM90_PREFILL: sm90.prefill,
        KernelFamily.SM90_DECODE_MULTIROW: sm90.decode_multirow,
    }
    packed = bundle_pages(attention, kernels.format)
    before = leaves_room and _other_goes_first(kernels.format, launches[0])
    for launch in launches:
        entry, pages, config = entries[launch.tile.family], packed, _config(attention, kernels.format, launch)
        if leaves_room:
            # What is launched then takes the places that programs leave as they end. Its result is not there before the combine kernel.
            config = replace(config, tile=replace(config.tile, overlap="start", least_splits=1, waits=before))
        if launch.staged:
            pages = stage(record, attention, packed, launch.staged, config)
            entry, config = sm90.staged, staged_config(config)
            # The launches after it leave out the sequences that are staged.
            packed = replace(packed, batch=packed.batch._replace(first_tiles=pages.batch.first_tiles))
        parts = _splits(record, attention, launch, config)
        if beside is not None and before:
            _launch_unsplit(record, beside, before=True)
        _attend(record, entry, attention, pages, launch, parts, config)
        if beside is not None and not before:
            _launch_unsplit(record, beside, before=False)
        if launch.split:
            _combine(record, attention, read.problem, launch, pages.batch, parts, config)


def _launch_unsplit(record: LaunchRecord, read: Read, before: bool) -> None:
    """Launch a read that is not split ``before`` another, which begins at once and ends after it; or after another's first kernel, beside
    whose last programs it begins, and after which it ends."""
    attention, form = read.attention, read.kernels.format
    (launch,) = planner.plan(read.problem)
    config = _config(attention, form, launch)
    config = replace(config, tile=replace(config.tile, overlap="start" if before else "end", waits=not before))
    nothing = args.Splits(0, 0, 0), args.Partials(None, None, None, None, 0)
    _attend(record, read.kernels.attend, attention, bundle_pages(attention, form), launch, nothing, config)


def problem_of(attention: Attention, form: Format, sm90: Sm90Kernels) -> planner.Problem:
    """The facts that the plan depends on; ``sm90``: those kernels that can take the call."""
    batch, q, device = attention.batch, attention.q, device_facts(attention.q.device)
    plane = form.wider
    head = Heads(max(q.shape[2], attention.out.shape[2]), plane.ways)
    max_seqlen_q = min(batch.max_seqlen_q, planner.power_of_two(q.shape[0]))
    max_seqlen_k, scoring = batch.max_seqlen_k, attention.scoring
    if scoring.window_left >= 0 and scoring.mm_prefix_range is None:
        # What a window leaves of a long sequence is read as a short one is.
        max_seqlen_k = min(max_seqlen_k, scoring.window_left + max_seqlen_q)
    segments, may_split = 0, True
    if attention.seq_threshold_3d is not None and batch.num_seqs > attention.seq_threshold_3d:
        may_split = False
    elif attention.scratch is not None and attention.scratch.output.shape[0] >= q.shape[0]:
        segments = attention.scratch.num_segments
    return planner.Problem(
        num_seqs=batch.num_seqs,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=planner.power_of_two(max_seqlen_k),
        max_keys=batch.block_table.shape[1] * attention.keys.block_size,
        uniform=batch.num_seqs * batch.max_seqlen_q == q.shape[0],
        group=attention.queries_per_kv,
        num_kv_heads=attention.keys.num_kv_heads,
        lane_bytes=2 if plane.packed else attention.keys.codes.element_size(),
        lanes=head.width,
        ways=plane.ways,
        num_sms=device.num_sms,
        head_lanes=head.lanes,
        foldable=_foldable(attention, form),
        apart=attention.keys.codes.stride(1) > attention.keys.codes.shape[3],
        in_chunks=plane.packed and multiplied_lanes(head.lanes) < head.width,
        engine_segments=segments,
        scaled=attention.keys.scales is not None and attention.keys.scales.dim() == 3,
        may_split=may_split,
        batch_invariant=attention.batch_invariant,
        arch=device.arch,
        variant=plane.variant,
        side_bytes=any(half.side_bytes for half in form.halves),
        sm90_fits=sm90.prefill is not None,
        multirow_fits=sm90.decode_multirow is not None,
        most_staged=0 if sm90.staged is None else most_tiles(attention),
    )


def _attend(
    record: LaunchRecord,
    kernel: Any,
    attention: Attention,
    pages: PagesArgs,
    launch: planner.Launch,
    parts: Parts,
    config: ReadConfig,
) -> None:
    batch, tile, programs = attention.batch, launch.tile, launch.programs
    if not launch.split:
        # Every sequence has at most one row block that is not full.
        programs = min(batch.num_seqs * launch.max_row_blocks, attention.q.shape[0] // config.tokens + batch.num_seqs)
    record.start(
        kernel,
        (programs, attention.keys.num_kv_heads),
        bundle_rows(attention.q, attention.smoothing),
        pages.keys,
        pages.values,
        bundle_output(attention),
        attention.output_scale,
        pages.batch,
        bundle_scoring(attention),
        *parts,
        batch.num_seqs,
        *pages.table,
        C=config,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **_options(tile, config),
    )


def _options(tile: planner.PlannedTile, config: ReadConfig) -> dict[str, Any]:
    """Triton's own, where they are not its defaults."""
    limited = tile.register_limit and config.features.use_asm and tile.family is not KernelFamily.SM90_PREFILL
    return ({"maxnreg": tile.register_limit} if limited else {}) | ({"launch_pdl": True} if config.tile.waits else {})


def _combine(
    record: LaunchRecord,
    attention: Attention,
    problem: planner.Problem,
    launch: planner.Launch,
    batch: args.BatchArgs,
    parts: Parts,
    config: ReadConfig,
) -> None:
    row_blocks = problem.num_seqs * launch.max_row_blocks
    combine = planner.combine_tile(problem, launch, row_blocks)
    slices = min(combine.slices, config.slices)
    rows = triton.cdiv(row_blocks, combine.blocks) * config.tokens * config.shape.group * slices
    eights = 0 if config.tile.alone else row_blocks * (launch.tile.rows // 8)
    record.start(
        combine_kernel,
        (eights + rows, problem.num_kv_heads),
        bundle_output(attention),
        attention.output_scale,
        batch,
        bundle_scoring(attention)._replace(qq_bias=None, alibi_slopes=None),
        *parts,
        row_blocks,
        launch.programs,
        # With fewer slices than planned, as many bytes together all the same.
        TILE=CombineTile(combine.few, combine.splits * slices // combine.slices, combine.blocks, slices),
        C=config,
        num_warps=combine.warps,
        **({"launch_pdl": True} if config.tile.overlap else {}),
    )


def _loops(attention: Attention, launch: planner.Launch) -> int:
    """Loops over a work tile's key tiles."""
    if attention.scoring.mm_prefix_range is not None:
        # Who sees what of a prefix is known row by row.
        return 1
    # Of a sequence's newest token every valid key is seen: nothing but the last tile's end, and blocks that are missing, asks for a mask.
    return launch.tile.loops if launch.max_query_len == 1 else 2


def _config(attention: Attention, form: Format, launch: planner.Launch) -> ReadConfig:
    return ReadConfig(form, _shape(attention, launch.tile.fold), _tile(attention, form, launch), _features(attention, form, launch))


def _shape(attention: Attention, fold: int) -> Shape:
    keys, values = attention.keys, attention.values
    stride = max(strides_of(keys) + strides_of(values))
    return Shape(
        head_size=attention.q.shape[2],
        head_size_v=attention.out.shape[2],
        block_size=keys.block_size,
        group=attention.queries_per_kv,
        same_strides=strides_of(attention.keys) == strides_of(attention.values),
        key_alignment=row_alignment(keys, fold),
        value_alignment=row_alignment(values, fold),
        wide_planes=keys.num_blocks * stride >= 2**31,
        wide_pages=keys.block_size * stride >= 2**31,
        wide_rows=max((x.shape[1] - 1) * x.stride(1) for x in (attention.q, attention.out)) >= 2**31,
    )


def _tile(attention: Attention, form: Format, launch: planner.Launch) -> Tile:
    tile = launch.tile
    # Warp groups have a loop over work tiles, and may leave a row in one split to the combine kernel.
    alone = launch.split == "equal" and attention.batch.num_seqs * launch.max_row_blocks == 1 and tile.family is KernelFamily.TRITON
    return Tile(
        rows=tile.rows,
        keys=tile.keys,
        fold=tile.fold,
        warps=tile.warps,
        stages=tile.stages,
        decode=tile.decode,
        keys_first=tile.keys_first,
        narrow_n=_narrow_n(attention, form, launch),
        min_query_len=launch.min_query_len,
        max_query_len=launch.max_query_len,
        max_row_blocks=launch.max_row_blocks if launch.split else 0,
        loops=_loops(attention, launch),
        alone=alone,
        prefetch=alone and _prefetch(form, launch) and device_facts(attention.q.device).use_asm,
        split=launch.split,
        least_splits=2 if tile.family is KernelFamily.TRITON else 1,
        overlap=("start" if launch.combine_waits else "end") if launch.split and overlaps(attention.q.device) else "",
        waits=False,
        registers=(tile.registers or 0) if tile.family is KernelFamily.SM90_PREFILL else 0,
    )


def _features(attention: Attention, form: Format, launch: planner.Launch) -> Features:
    device = device_facts(attention.q.device)
    return Features(
        alibi_sqrt=attention.scoring.use_alibi_sqrt,
        shifted=attention.smoothing is not None and attention.sees_shift,
        rotary_pairs=0 if attention.smoothing is None else attention.smoothing.num_pairs,
        output=FP8_NAMES.get(attention.out.dtype, ""),
        mixed=form.value.rotated and launch.tile.family is KernelFamily.TRITON,
        use_asm=device.use_asm,
        fp8_hardware=device.fp8_hardware,
        upcast_dots=interpreting(),
    )


def _narrow_n(attention: Attention, form: Format, launch: planner.Launch) -> bool:
    """Whether rows have two columns each: where much is done to each score, and at most half of the fewest rows of a tile can be valid."""
    tile = launch.tile
    eight = tile.keys_first and tile.family is KernelFamily.TRITON and tile.fold == 1 and tile.rows == 8
    return form.narrow_n and attention.scoring.softcap > 0 and eight and 2 * launch.max_query_len * attention.queries_per_kv <= tile.rows


def _prefetch(form: Format, launch: planner.Launch) -> bool:
    """Whether programs prefetch their first tile: of packed rows, where each has one work tile, and that is short."""
    tile = launch.tile
    short = launch.combine_waits and launch.least * tile.keys <= PREFETCHED_KEYS
    return short and form.packed and tile.keys_first and (tile.warps, tile.rows, tile.fold) == (1, 8, 1)


def _foldable(attention: Attention, form: Format) -> bool:
    """Whether two keys' lanes take less padding in one row than in two, and are neighbours in memory, in the same block."""
    size = attention.q.shape[2]
    if not (form.packed and form.alike) or size != attention.out.shape[2] or attention.keys.block_size % 2:
        return False
    lanes = size // form.key.ways
    spares = multiplied_lanes(2 * lanes) < 2 * multiplied_lanes(lanes)
    row_bytes = 2 * lanes
    if form.key.side_bytes:
        # Which of them belong to which lane is found for rows that need no padding.
        spares = spares and 2 * lanes == triton.next_power_of_2(2 * lanes) == multiplied_lanes(2 * lanes)
        row_bytes += lanes
    return spares and all(plane.codes.stride(1) * plane.codes.element_size() == row_bytes for plane in (attention.keys, attention.values))


def _splits(record: LaunchRecord, attention: Attention, launch: planner.Launch, config: ReadConfig) -> Parts:
    if not launch.split:
        return args.Splits(0, 0, 0), args.Partials(None, None, None, None, 0)
    row_blocks = attention.batch.num_seqs * launch.max_row_blocks
    if launch.split == "segments":
        scratch = attention.scratch
        if scratch is None:
            raise ArgumentError("softmax_segm_output", "None", "the scratch of the planned segments")
        plan, *_ = record.workspace(row_blocks, 0, 0)
        partials = args.Partials(scratch.output, scratch.max, scratch.expsum, plan, scratch.output.stride(2))
        return args.Splits(0, 0, launch.segments), partials
    rows = launch.max_items * attention.keys.num_kv_heads * config.tile.rows
    plan, acc, top, total = record.workspace(row_blocks, rows, config.shape.head_size_v)
    return args.Splits(launch.least, launch.chunk, 0), args.Partials(acc, top, total, plan, config.shape.head_size_v)
