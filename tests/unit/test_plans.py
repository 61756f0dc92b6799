"""Launch plans are values: what every plan must hold to, over all kinds of problems, and the plans that the shipped tables give.

And the tables: which one is asked, what a wrong one is told, and that a file and a table are the same.
"""

import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from command_line import kvq
from kvq_core.call import ops
from kvq_core.cli import doctor
from kvq_core.errors import ArgumentError, PlanTableError
from kvq_core.plan import Decode, Entry, Measurement, Range, Run, Table, choose, invariance, lookup, planner, tables_for
from kvq_core.plan.planner import KernelFamily, Problem, combine_tile, plan, power_of_two, write_tile
from kvq_core.plan.table import Alternative

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def nobody_s_tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Lookups that find no table of the user who runs the tests, and forget those of a test."""
    monkeypatch.delenv(lookup.SWITCH, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    lookup.forget()
    plan.cache_clear()
    monkeypatch.setattr(lookup, "_TABLES", lookup._Tables())


FLAGS = ("uniform", "scaled", "may_split", "batch_invariant", "foldable", "apart", "in_chunks", "sm90_fits", "multirow_fits")
SHAPE: dict[str, Any] = {"max_seqlen_q": 1, "uniform": True, "num_kv_heads": 8, "lane_bytes": 2, "num_sms": 132}
A = Problem(num_seqs=64, max_seqlen_k=8192, max_keys=8192, group=4, lanes=32, ways=4, arch="sm_90", **SHAPE)
"""int4 at batch 64, context 8192, 32/8 heads of 128 on an H200."""
PROBLEMS = st.builds(
    Problem,
    num_seqs=st.integers(1, 2048),
    max_seqlen_q=st.integers(1, 9000),
    max_seqlen_k=st.integers(0, 20).map(lambda exponent: 2**exponent),
    max_keys=st.integers(1, 2**20),
    group=st.integers(1, 64),
    num_kv_heads=st.integers(1, 32),
    lane_bytes=st.sampled_from([1, 2, 4]),
    lanes=st.sampled_from([16, 32, 64, 128, 256]),
    ways=st.sampled_from([1, 2, 4, 8]),
    num_sms=st.sampled_from([4, 84, 132]),
    engine_segments=st.sampled_from([0, 0, 1, 16]),
    arch=st.sampled_from(["", "sm_90"]),  # one that no table knows, and the one that choices were measured on
    variant=st.sampled_from(["", "int8"]),
    head_lanes=st.sampled_from([4, 8, 12, 16, 24, 32, 64]),
    most_staged=st.sampled_from([0, 1, 512]),
    **dict.fromkeys(FLAGS, st.booleans()),
)


@given(PROBLEMS)
@example(replace(A, max_seqlen_q=8, ways=2, variant="int8", multirow_fits=True, uniform=False))
@example(replace(A, max_seqlen_q=2048, num_seqs=1, sm90_fits=True, most_staged=512))
@example(replace(A, max_seqlen_q=2048, uniform=False, ways=2, most_staged=1))
def test_what_every_plan_holds_to(problem: Problem) -> None:
    launches = plan(problem)
    # Of a uniform batch, too: max_seqlen_q is a bound. What is staged, and is not alone, leaves sequences over to the launch after it.
    whole = [launch for launch in launches if not launch.staged or launch is launches[-1]]
    for length in {min(length, problem.max_seqlen_q) for length in (1, 2, planner.DECODE_QUERY_LEN, planner.DECODE_QUERY_LEN + 1, 9000)}:
        assert sum(launch.min_query_len <= length <= launch.max_query_len for launch in whole) == 1, "served once"
    for launch in launches:
        tile, longest = launch.tile, min(launch.max_query_len, problem.max_seqlen_q)
        tokens = tile.query_rows // problem.group
        assert tokens >= 1 and launch.max_row_blocks * tokens >= longest, "every row has a tile"
        assert problem.batch_invariant or (launch.max_row_blocks - 1) * tokens < longest, "no tile is empty"
        if tile.family is not KernelFamily.TRITON:
            multirow = tile.family is KernelFamily.SM90_DECODE_MULTIROW
            assert (problem.multirow_fits and problem.uniform and problem.may_split) if multirow else problem.sm90_fits or launch.staged
            assert not problem.batch_invariant, "which kernel a row is in would follow from the batch"
            assert tile.programs_per_sm * tile.warps * 32 * (tile.register_limit or 255) <= 65536, "programs that share a multiprocessor"
        assert tile.rows == power_of_two(tile.rows) >= 8
        if tile.decode and tile.family is KernelFamily.TRITON and problem.ways > 1:
            assert tile.query_rows <= max(planner.PACKED_ROWS, power_of_two(problem.group)), (
                "more rows beside packed keys find no registers"
            )
        blocks = problem.num_seqs * launch.max_row_blocks
        # A work tile's number is its program's plus its row block's.
        assert launch.split not in ("equal", "chunks") or launch.max_items >= launch.programs + blocks
        assert launch.split != "chunks" or launch.programs * launch.chunk >= problem.max_keys
        if launch.split == "equal":
            resident, ranges = problem.num_sms * tile.programs_per_sm, blocks * -(-problem.max_seqlen_k // (launch.least * tile.keys))
            # One wave, and no program without a share of the keys: it takes its time, too.
            assert launch.programs == 1 or (launch.programs * problem.num_kv_heads <= resident and launch.programs <= ranges)
            assert launch.combine_waits == (ranges <= max(1, resident // problem.num_kv_heads)), "where programs without work leave room"


@given(PROBLEMS, st.integers(1, 2048))
def test_batch_invariance_ignores_the_rest_of_the_batch(problem: Problem, num_seqs: int) -> None:
    """What decides how a sequence is computed, and the order of its sums, is the same whatever else is in the batch."""

    def deciding(problem: Problem) -> Iterator[tuple[object, ...]]:
        for x in plan(problem):
            combine = combine_tile(problem, x, problem.num_seqs * x.max_row_blocks) if x.split else None
            yield x.tile, x.split, x.chunk, x.min_query_len, x.max_query_len, combine

    alone = replace(problem, batch_invariant=True, engine_segments=0)
    others = replace(alone, num_seqs=num_seqs, uniform=not alone.uniform, max_seqlen_k=2 * alone.max_seqlen_k)
    assert list(deciding(alone)) == list(deciding(others))
    few, many = (write_tile(problem.arch, "int4", 4, 128, rows, batch_invariant=True) for rows in (num_seqs, 10_000 * num_seqs))
    assert few == many


def in_words(problem: Problem) -> Iterator[str]:
    """Each launch's tile (rows x keys, warps, stages, K or Q first, registers, programs an SM, loops), split, and combine tile."""
    for launch in plan.__wrapped__(problem):
        tile = launch.tile
        words = f"{tile.rows}x{tile.keys} w{tile.warps} s{tile.stages} {'K' if tile.keys_first else 'Q'}"
        words += f" r{tile.register_limit}" if tile.register_limit else ""
        words += f" {tile.programs_per_sm}/SM {tile.loops}L" if tile.decode else ""
        words += " fold" * (tile.fold > 1) + f" {tile.family.name}" * (tile.groups > 0)
        if launch.split:
            size = f"chunk {launch.chunk}" if launch.chunk else f"least {launch.least}"
            words += f"; {launch.split} {launch.programs}/{launch.max_items} {size}" + " waits" * launch.combine_waits
            combine = combine_tile(problem, launch, problem.num_seqs * launch.max_row_blocks)
            words += f"; {combine.few},{combine.splits},{combine.blocks},{combine.slices} w{combine.warps}"
        yield words


BF16: dict[str, Any] = {"ways": 1, "scaled": False}
MIXED: dict[str, Any] = {"num_seqs": 9, "max_seqlen_q": 500, "max_seqlen_k": 4096, "uniform": False}
SM90: dict[str, Any] = {"sm90_fits": True, "multirow_fits": True}
PROMPTS: dict[str, Any] = {**BF16, **MIXED, **SM90, "lanes": 64}
INVARIANT: dict[str, Any] = {"max_seqlen_q": 20, "batch_invariant": True}
LONG: dict[str, Any] = {"num_seqs": 1, "max_seqlen_k": 131072}
DRAFTS: dict[str, Any] = {"max_seqlen_q": 8, "ways": 2, "variant": "int8", **SM90}
FOLD: dict[str, Any] = {"ways": 8, "head_lanes": 24, "foldable": True, "group": 8}
PLANS: dict[str, dict[str, Any]] = {
    # On a GPU that no table knows.
    "8x32 w1 s2 K r255 8/SM 1L; equal 132/133 least 4; 1,128,1,1 w8": {**BF16, **LONG, "arch": "", "lanes": 64},
    "64x16 w4 s2 K 4/SM 1L; chunks 256/320 chunk 2048; 8,32,8,1 w4 + 32x32 w4 s2 Q": {**BF16, **INVARIANT, "arch": "", "lanes": 512},
    "8x64 w1 s2 K r168 12/SM 1L; equal 4/5 least 2 waits; 1,32,1,1 w4": {"arch": "", "num_seqs": 1, "max_seqlen_k": 512, "lanes": 16},
    "8x64 w1 s2 K r168 12/SM 1L; segments 1024/1024 least 0; 8,32,8,1 w4": {"arch": "", "engine_segments": 16},
    "16x32 w1 s2 Q r168 12/SM 1L; equal 198/234 least 4; 8,32,8,1 w4 + 64x64 w4 s2 Q": {**MIXED, "arch": "", "lanes": 32, "ways": 2},
    # On an H200.
    "64x32 w2 s2 K r255 4/SM 1L; equal 66/75 least 4; 8,128,64,4 w4 + 128x128 w4 s2 Q r232 SM90_PREFILL": PROMPTS,
    "8x32 w1 s5 K r255 6/SM 2L; equal 64/68 least 2 waits; 1,32,1,2 w2": {**BF16, "num_seqs": 4, "max_seqlen_k": 1024, "lanes": 128},
    "128x128 w8 s2 Q": {**BF16, "num_seqs": 1, "max_seqlen_q": 8192, "lanes": 128},
    "32x64 w4 s4 K r248 2/SM 2L SM90_DECODE_MULTIROW; equal 33/97 least 2; 8,32,64,1 w4": DRAFTS,
    "8x64 w1 s5 K r255 8/SM 2L; equal 132/133 least 2; 1,128,1,2 w4": LONG,
    "8x64 w1 s2 K r168 12/SM 1L; equal 198/262 least 2; 8,128,64,4 w4": {"max_seqlen_k": 131072},
    "8x32 w1 s5 K r255 8/SM 2L; equal 132/196 least 4; 8,128,64,4 w4": {"apart": True},
    "16x64 w1 s7 K r255 8/SM 2L fold; equal 132/133 least 2; 1,128,1,2 w4": {**LONG, **FOLD},
    "8x64 w1 s5 K r255 8/SM 2L; equal 132/196 least 2; 8,128,64,4 w4": {"lanes": 16, "ways": 8, "side_bytes": True},
}


@pytest.mark.parametrize("words", PLANS)
def test_plans_of_the_shipped_tables(words: str) -> None:
    """A row for each rule of the planner: a change shows here which problems it plans otherwise, from A on."""
    assert " + ".join(in_words(replace(A, **PLANS[words]))) == words


WRITES: dict[str, tuple[str, str, int, int, bool, bool]] = {
    "8 w1": ("", "", 4, 512, False, False),
    "16 w1": ("", "", 4, 65536, False, False),
    "4 w1": ("sm_90", "int8", 2, 1024, False, False),
    "8 w2": ("sm_90", "int8", 2, 1025, False, False),
    "16 w1 mma": ("sm_90", "", 4, 49152, True, False),
    "16 w2 mma": ("sm_90", "", 8, 16383, True, False),
    "4 w1 of int3": ("sm_90", "", 8, 1024, False, True),
    "8 w1 of int3": ("sm_90", "", 8, 1025, False, True),
}


@pytest.mark.parametrize("words", WRITES)
def test_writes_of_the_shipped_tables(words: str) -> None:
    arch, variant, ways, rows, fits, side_bytes = WRITES[words]
    tile = write_tile(arch, variant, ways, 128, rows, store_mma_fits=fits, side_bytes=side_bytes)
    assert f"{tile.rows} w{tile.warps}" + " mma" * tile.store_mma == words.removesuffix(" of int3")


def test_batch_invariance_is_switched(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the process; what the environment says is test_variables.py's."""
    # Whatever an earlier test of this process has set.
    monkeypatch.setattr(invariance._SWITCH, "value", None)
    monkeypatch.delenv("KVQ_SWITCH", raising=False)
    with invariance.batch_invariant():
        assert invariance.is_batch_invariant()
        with invariance.batch_invariant(False):
            assert not invariance.is_batch_invariant()
        assert invariance.is_batch_invariant()
    assert not invariance.is_batch_invariant()


def test_batch_invariance_of_overlapping_blocks() -> None:
    """Each thread has what its own block says, whichever ends first; threads without one have what the newest says."""
    entered, ended, seen = threading.Event(), threading.Event(), []

    def other() -> None:
        seen.append(invariance.is_batch_invariant())
        with invariance.batch_invariant(False):
            entered.set()
            ended.wait(60)
            seen.append(invariance.is_batch_invariant())

    before = invariance.is_batch_invariant()
    with invariance.batch_invariant():
        thread = threading.Thread(target=other)
        thread.start()
        assert entered.wait(60) and invariance.is_batch_invariant()
    assert not invariance.is_batch_invariant()
    ended.set()
    thread.join()
    assert seen == [True, False] and invariance.is_batch_invariant() == before


INT4 = {
    **{"variant": "", "ways": 4, "width": 128, "lane_bytes": 2, "scaled": True, "side_bytes": False},
    **{"rows": 8, "folded": False, "apart": False, "keys_per_sm": 31775, "longest": 8192},
}
"""Of setting A of the benchmarks on an H200."""
FEW = Decode(keys=32, warps=1, stages=3, programs_per_sm=8, registers=None, min_keys=256, loops=1)
RUN = Run("NVIDIA Test", "3.6.0", "abc", "2026-11-21")
MEASURED = Measurement("r", "int4_per_token_head", "A", 160.5, "us", (Alternative({"stages": 2}, 170.0),))
WHERE = {"ways": 4, "width": Range(65, 128), "rows": Range(None, 8), "keys_per_sm": Range(16384, None)}
MINE = Table("sm_90", {"decode": (Entry(WHERE, FEW, (MEASURED,)),)}, {"r": RUN})


def own(write: Callable[[Path], object] = MINE.write) -> Path:
    """One's own table for sm_90, as ``write`` leaves it."""
    path = lookup.own_folder() / "sm_90.json"
    path.parent.mkdir(parents=True)
    write(path)
    return path


def test_one_s_own_table_answers_first_and_only_for_its_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chain: one's own, kvq's for the architecture, the generic one. Each is read once."""
    outside = [INT4 | other for other in ({"rows": 16}, {"width": 64}, {"keys_per_sm": 16383}, {"ways": 8})]
    before, *others = (choose("sm_90", Decode, facts) for facts in (INT4, *outside))
    with lookup.asking_first(MINE):
        assert choose("sm_90", Decode, INT4) == FEW
    assert choose("sm_90", Decode, INT4) == before
    path = own()
    lookup.forget()
    assert choose("sm_90", Decode, INT4) == FEW != before
    monkeypatch.setattr(Table, "read", lambda path: pytest.fail("read again"))
    assert [choose("sm_90", Decode, facts) for facts in outside] == others and FEW not in others
    assert choose("sm_80", Decode, INT4) == choose("", Decode, INT4) != FEW
    assert tables_for("sm_90")[0].source == str(path) and [table.arch for table in tables_for("sm_90")[1:]] == ["sm_90", "generic"]


def test_the_nearest_of_the_family() -> None:
    for arch, known, found in (
        ("sm_86", "sm_80 sm_89 sm_90", "sm_80"),
        ("sm_89", "sm_80 sm_86 sm_89", "sm_89 sm_86"),
        ("sm_80", "sm_89 sm_86", "sm_86"),
        ("sm_103", "sm_100 sm_10", "sm_100"),
        ("gfx942", "gfx940 gfx950", "gfx940"),
        ("", "sm_90", ""),
    ):
        assert lookup.nearest(arch, known.split()) == found.split(), arch


def test_the_switch_names_one_s_own_tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    default, file = own(), tmp_path / "mine.json"
    MINE.write(file)
    assert lookup.own_file("sm_90") == default
    for value, found in (("", None), (str(file), file), (str(tmp_path), tmp_path / "sm_90.json")):
        monkeypatch.setenv(lookup.SWITCH, value)
        assert lookup.own_file("sm_90") == found
    monkeypatch.setenv(lookup.SWITCH, str(tmp_path / "nowhere"))
    lookup.forget()
    with pytest.raises(ArgumentError, match=r"^KVQ_PLANS: got '.*nowhere', need a table of launch plans"):
        choose("sm_90", Decode, INT4)
    assert choose("", Decode, INT4)  # what is no GPU has no table of one's own


TIMES = [{"run": "r", "mode": "m", "setting": "w64", "us": 5, "alternatives": [{"choice": {"warps": 2}, "us": 6.5}]}]
CLASS = {"where": {"ways": 4, "rows": {"min": 8}}, "choice": {"rows": 16, "warps": 1, "store_mma": 0}, "measured": TIMES}
RIGHT = {"format": 1, "arch": "sm_90", "runs": {"r": {"gpu": "g", "triton": "3", "commit": "c", "date": "d"}}, "write": [CLASS]}
GROUPS = {"groups": 1, "stages": 4, "registers": 184, "staged": 0}
WRITE = ["write", 0]
CHANGES: list[tuple[list[Any], Any, str]] = [
    (["format"], 2, "format: got 2, need 1, the format that this version of kvq reads"),
    (["arch"], 90, "arch: got 90, need text"),
    (["prefil"], [], "prefil: got [], need one of arch, combine, decode, format, groups, prefill, runs, write in its place"),
    (["write"], {}, "write: got {}, need a list"),
    (
        [*WRITE, "where", "keys"],
        3,
        "write[0].where.keys: got 3, need one of rows, side_bytes, store_mma, variant, ways, width in its place",
    ),
    ([*WRITE, "where", "ways"], True, "write[0].where.ways: got True, need a whole number, or its bounds {min, max}"),
    ([*WRITE, "where", "rows"], {"min": 9, "max": 8}, "write[0].where.rows: got {'min': 9, 'max': 8}, need bounds"),
    ([*WRITE, "choice", "rows"], 48, "write[0].choice.rows: got 48, need a power of two from 4 to 128"),
    ([*WRITE, "choice"], {"rows": 32, "warps": 1, "store_mma": 1}, "need 8 or 16 rows a warp with store_mma 1"),
    ([*WRITE, "choice", "warps"], KeyError, "write[0].choice.warps: got None, need a value: it is missing"),
    ([*WRITE, "measured", 0, "run"], "s", "write[0].measured[0].run: got 's', need one of runs: r"),
    ([*WRITE, "measured", 0, "us"], -1, "write[0].measured[0].us: got -1, need a positive number"),
    (["groups"], [{"where": {}, "choice": GROUPS | {"stages": 2}}], "need 3 to 6 stages with groups 1"),
    (["groups"], [{"where": {}, "choice": GROUPS | {"staged": 1}}], "need groups 2 with staged 1"),
]


def changed(path: list[Any], value: Any, file: Path) -> None:
    """Write what is right, but for the value at this path (``KeyError``: none)."""
    content = place = json.loads(json.dumps(RIGHT))
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    if value is KeyError:
        del place[path[-1]]
    file.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("write", "said"),
    [
        *((partial(changed, path, value), said) for path, value, said in CHANGES),
        (lambda file: file.write_text("nothing"), "the file: got 'Expecting value"),
        (lambda file: file.write_text("[" * 100_000), "the file: got 'something nested too deep'"),
        (lambda file: file.mkdir(), "the file: got"),
        (replace(MINE, arch="sm_80").write, "arch: got 'sm_80', need 'sm_90', that of this GPU"),
    ],
)
def test_a_wrong_table_of_one_s_own_is_an_error_at_each_lookup(write: Callable[[Path], object], said: str) -> None:
    file = own(write)
    for _ in range(2):
        with pytest.raises(PlanTableError, match=f"^{re.escape(str(file))}: .*{re.escape(said)}"):
            choose("sm_90", Decode, INT4)
    assert choose("sm_80", Decode, INT4)  # nobody else's business


def test_nothing_is_planned_by_a_table_that_was_withdrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a thread plans while plans are forgotten is planned by the table in force, or forgotten."""
    before, forget = plan(A), ops.forget_repeats
    monkeypatch.setattr(ops, "forget_repeats", lambda: (forget(), plan(A)))
    with ops.planning_with(Table("sm_90", {"decode": (Entry({}, replace(FEW, keys=16)),)})):
        assert plan(A) != before
    assert plan(A) == before


def test_who_listens_is_told_again_once_another_stopped_listening() -> None:
    def ask() -> None:
        write_tile("", "int8", 2, 128, 64)

    with lookup.listening() as outer:
        with lookup.listening() as inner:
            ask()
        ask()
    ask()
    assert (len(outer), len(inner)) == (1, 1)


def test_doctor_shows_the_tables_in_use_and_broken_ones(torch_path: None, monkeypatch: pytest.MonkeyPatch) -> None:
    path = own()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=9, minor=0))
    plans = doctor._plans()
    path.write_text("nothing")
    lookup.forget()
    broken = doctor._plans()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ours = "kvq's sm_90 (NVIDIA H100 80GB HBM3, triton 3.6.0; NVIDIA H200, triton 3.6.0)"
    assert [doctor._in_words(one) for one in plans[0]] == [f"{path} (NVIDIA Test, triton 3.6.0)", ours, "kvq's generic"] and not plans[1]
    for found, status, said in ((plans, 0, "\nplans "), (broken, 1, f"broken: {path}: the file: got ")):
        monkeypatch.setattr(doctor, "_plans", lambda found=found: found)
        ran = kvq("doctor")
        assert ran.status == status and said in ran.out
