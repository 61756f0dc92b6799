"""Tables of launch plans: which one is asked, what a wrong one is told, and that a file and a table are the same."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from kvq_core.cli import doctor
from kvq_core.cli.app import app
from kvq_core.errors import ArgumentError, PlanTableError
from kvq_core.plan import KINDS, Decode, Entry, Measurement, Range, Run, Table, Write, choose, lookup, tables_for
from kvq_core.plan.planner import Problem, plan
from kvq_core.plan.table import Alternative

pytestmark = pytest.mark.quick

SHIPPED = sorted(path.stem for path in lookup.SHIPPED.glob("*.json"))
INT4 = {
    **{"variant": "", "ways": 4, "width": 128, "lane_bytes": 2, "scaled": True, "side_bytes": False},
    **{"rows": 8, "folded": False, "keys_per_sm": 31775, "longest": 8192},
}
"""Of setting A of the benchmarks on an H200."""
FEW = Decode(keys=32, warps=1, stages=3, programs_per_sm=8, registers=None, min_keys=256, loops=1)
RUN = Run("NVIDIA Test", "3.6.0", "abc", "2026-11-21")
MEASURED = Measurement("r", "int4_per_token_head", "A", 160.5, "us", (Alternative({"stages": 2}, 170.0),))
WHERE = {"ways": 4, "width": Range(65, 128), "rows": Range(None, 8), "keys_per_sm": Range(16384, None)}
MINE = Table("sm_90", {"decode": (Entry(WHERE, FEW, (MEASURED,)),)}, {"r": RUN})


@pytest.fixture(autouse=True)
def nobody_s_tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Lookups that find no table of the user who runs the tests, and forget those of a test."""
    monkeypatch.delenv(lookup.SWITCH, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    lookup.forget()
    monkeypatch.setattr(lookup, "_TABLES", lookup._Tables())


def own(table: Table) -> Path:
    path = lookup.own_folder() / f"{table.arch}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    table.write(path)
    return path


# -- which table is asked -----------------------------------------------------------------------------------------------------


def test_one_s_own_table_answers_first_and_only_for_its_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chain: one's own, kvq's for the architecture, the generic one. Each is read once."""
    outside = [{**INT4, **other} for other in ({"rows": 16}, {"width": 64}, {"keys_per_sm": 16383}, {"ways": 8})]
    before, generic, others = choose("sm_90", Decode, INT4), choose("", Decode, INT4), [choose("sm_90", Decode, f) for f in outside]
    with lookup.asking_first(MINE):
        assert choose("sm_90", Decode, INT4) == FEW
    assert choose("sm_90", Decode, INT4) == before
    path = own(MINE)
    lookup.forget()
    assert choose("sm_90", Decode, INT4) == FEW != before
    monkeypatch.setattr(Table, "read", lambda path: pytest.fail("read again"))
    assert [choose("sm_90", Decode, facts) for facts in outside] == others and FEW not in others
    assert choose("sm_80", Decode, INT4) == choose("", Decode, INT4) == generic != FEW
    assert [table.source for table in tables_for("sm_90")] == [
        str(path),
        *(str(lookup.SHIPPED / f"{n}.json") for n in ("sm_90", "generic")),
    ]
    assert [table.arch for arch in ("sm_80", "") for table in tables_for(arch)] == ["generic"] * 2


def test_a_plan_is_made_of_what_was_chosen() -> None:
    own(MINE)
    shape = {"uniform": True, "group": 4, "num_kv_heads": 8, "lane_bytes": 2, "lanes": 32, "ways": 4, "num_sms": 132}
    problem = Problem(num_seqs=64, max_seqlen_q=1, max_seqlen_k=8192, max_keys=8192, arch="sm_90", **shape)
    (launch,) = plan.__wrapped__(problem)
    tile = launch.tile
    assert (tile.rows, tile.keys, tile.warps, tile.stages, tile.registers) == (8, FEW.keys, FEW.warps, FEW.stages, FEW.registers)
    assert (launch.programs, launch.least) == (132, 8)  # 132 multiprocessors x 8 programs / 8 kv heads; 256 keys
    # As many keys in all, and in each sequence no more than the least share.
    assert plan.__wrapped__(replace(problem, num_seqs=2048, max_seqlen_k=256))[0].split == ""


@pytest.mark.parametrize(
    ("arch", "known", "found"),
    [
        ("sm_90", ["sm_90", "sm_80"], ["sm_90"]),
        ("sm_86", ["sm_80", "sm_89", "sm_90"], ["sm_80"]),
        ("sm_89", ["sm_80", "sm_86", "sm_89"], ["sm_89", "sm_86"]),
        ("sm_80", ["sm_89", "sm_86"], ["sm_86"]),
        ("sm_100", ["sm_90", "sm_120"], []),
        ("sm_103", ["sm_100", "sm_10"], ["sm_100"]),
        ("gfx942", ["gfx940", "gfx950"], ["gfx940"]),
        ("gfx90a", ["gfx908"], ["gfx908"]),
        ("", ["sm_90"], []),
    ],
)
def test_the_nearest_of_the_family(arch: str, known: list[str], found: list[str]) -> None:
    assert lookup.nearest(arch, known) == found


def test_the_switch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    default = own(MINE)
    file, folder = tmp_path / "mine.json", tmp_path / "tables"
    folder.mkdir()
    MINE.write(file)
    assert lookup.own_file("sm_90") == default
    for value, found in (("", None), (str(file), file), (str(folder), folder / "sm_90.json")):
        monkeypatch.setenv(lookup.SWITCH, value)
        assert lookup.own_file("sm_90") == found
    lookup.forget()
    assert len(tables_for("sm_90")) == 2  # nothing in that folder
    monkeypatch.setenv(lookup.SWITCH, str(tmp_path / "nowhere"))
    lookup.forget()
    with pytest.raises(ArgumentError, match=r"^KVQ_PLANS: got '.*nowhere', need a table of launch plans"):
        choose("sm_90", Decode, INT4)
    assert choose("", Decode, INT4)  # what is no GPU has no table of one's own


# -- what is shipped ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_files_are_what_writing_them_gives(name: str, tmp_path: Path) -> None:
    path = lookup.SHIPPED / f"{name}.json"
    table = Table.read(path)
    table.write(tmp_path / "again.json")
    assert table.arch == name and (tmp_path / "again.json").read_text() == path.read_text()
    if name == "generic":
        assert {kind: dict(table.entries[kind][-1].where) for kind in KINDS} == {kind: {} for kind in KINDS}, "it answers everything"
    if name == "sm_90":
        measured = [
            one for e in table.entries["decode"] for one in e.measured if (one.mode, one.run, one.setting) == ("none", "92ed51f", "A")
        ]
        assert {one.value for one in measured} == {507.3} and {run.gpu for run in table.runs.values()} == {"NVIDIA H200"}


# -- what a wrong table is told -----------------------------------------------------------------------------------------------

RIGHT: dict[str, Any] = {
    "format": 1,
    "arch": "sm_90",
    "runs": {"r": {"gpu": "g", "triton": "3", "commit": "c", "date": "d"}},
    "write": [
        {
            "where": {"ways": 4, "rows": {"min": 8}},
            "choice": {"rows": 16, "warps": 1, "store_mma": 0},
            "measured": [{"run": "r", "mode": "m", "setting": "w64", "us": 5, "alternatives": [{"choice": {"warps": 2}, "us": 6.5}]}],
        }
    ],
    "decode": [
        {
            "where": {"scaled": True},
            "choice": {"keys": 32, "warps": 1, "stages": 2, "programs_per_sm": 8, "registers": None, "min_keys": 128, "loops": 1},
        }
    ],
    "groups": [{"where": {}, "choice": {"groups": groups, "stages": 3, "registers": 184}} for groups in (1, 2)],
}


WRONG: list[tuple[list[Any], Any, str]] = [
    (["format"], 2, "format: got 2, need 1, the format that this version of kvq reads"),
    (["format"], KeyError, "format: got None, need a value: it is missing"),
    (["arch"], 90, "arch: got 90, need text"),
    (["prefil"], [], "prefil: got [], need one of arch, combine, decode, format, groups, prefill, runs, write in its place"),
    (["write"], {}, "write: got {}, need a list"),
    (["write", 0], 7, "write[0]: got 7, need an object"),
    (["write", 0, "where", "keys"], 3, "write[0].where.keys: got 3, need one of rows, store_mma, variant, ways, width in its place"),
    (["write", 0, "where", "ways"], True, "write[0].where.ways: got True, need a whole number, or its bounds {min, max}"),
    (["write", 0, "where", "rows"], {}, "write[0].where.rows: got {}, need bounds min and max"),
    (["write", 0, "where", "rows"], {"min": 9, "max": 8}, "write[0].where.rows: got {'min': 9, 'max': 8}, need bounds"),
    (["write", 0, "where", "rows", "max"], 8.5, "write[0].where.rows.max: got 8.5, need a whole number"),
    (["decode", 0, "where", "scaled"], 1, "decode[0].where.scaled: got 1, need true or false"),
    (["write", 0, "choice", "rows"], 48, "write[0].choice.rows: got 48, need a power of two from 4 to 128"),
    (["write", 0, "choice"], {"rows": 32, "warps": 1, "store_mma": 1}, "need 8 or 16 rows a warp with store_mma 1"),
    (["write", 0, "choice", "warps"], KeyError, "write[0].choice.warps: got None, need a value: it is missing"),
    (["decode", 0, "choice", "stages"], 0, "decode[0].choice.stages: got 0, need a whole number from 1 to 8"),
    (["decode", 0, "choice", "registers"], 300, "decode[0].choice.registers: got 300, need null or a whole number from 24 to 255"),
    (["write", 0, "measured", 0, "run"], "s", "write[0].measured[0].run: got 's', need one of runs: r"),
    (["write", 0, "measured", 0, "us"], -1, "write[0].measured[0].us: got -1, need a positive number"),
    (["write", 0, "measured", 0, "us"], KeyError, "write[0].measured[0].us: got None, need a value: it is missing"),
    (["write", 0, "measured", 0, "alternatives", 0, "us"], "6", "write[0].measured[0].alternatives[0].us: got '6', need a positive number"),
    (["write", 0, "measured", 0, "alternatives", 0, "choice", "warps"], 3, "alternatives[0].choice.warps: got 3, need a power of two"),
    (["runs", "r", "gpu"], "", "runs.r.gpu: got '', need text"),
    (["groups"], [{"where": {}, "choice": {"groups": 1, "stages": 2, "registers": 184}}], "need 3 to 6 stages with groups 1"),
    (["groups"], [{"where": {}, "choice": {"groups": 2, "stages": 4, "registers": 184}}], "need 1 to 3 stages with groups 2"),
]  # fmt: skip


def test_what_is_right_is_read(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps(RIGHT))
    entry = Table.read(path).entries["write"][0]
    assert (entry.choice, entry.where) == (Write(rows=16, warps=1, store_mma=0), {"ways": 4, "rows": Range(8, None)})
    assert entry.measured[0].alternatives == (Alternative({"warps": 2}, 6.5),)
    MINE.write(path)
    read = Table.read(path)
    assert (read.arch, read.runs, read.entries["decode"]) == (MINE.arch, MINE.runs, MINE.entries["decode"])


@pytest.mark.parametrize(("path", "value", "said"), WRONG, ids=[f"{'.'.join(map(str, p))} {v}" for p, v, _ in WRONG])
def test_what_is_wrong_is_named(path: list[Any], value: Any, said: str, tmp_path: Path) -> None:
    content = changed = json.loads(json.dumps(RIGHT))
    for part in path[:-1]:
        changed = changed[part]
    changed[path[-1]] = value
    if value is KeyError:
        del changed[path[-1]]
    file = tmp_path / "sm_90.json"
    file.write_text(json.dumps(content))
    with pytest.raises(PlanTableError) as caught:
        Table.read(file)
    assert str(caught.value).startswith(f"{file}: ") and said in str(caught.value)


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (lambda path: path.write_text("nothing"), "the file: got 'Expecting value"),
        (lambda path: replace(MINE, arch="sm_80").write(path), "arch: got 'sm_80', need 'sm_90', that of this GPU"),
        (lambda path: path.mkdir(), "the file: got"),
    ],
)
def test_a_wrong_table_of_one_s_own_is_an_error_at_each_lookup(write: Callable[[Path], object], said: str) -> None:
    path = lookup.own_folder() / "sm_90.json"
    path.parent.mkdir(parents=True)
    write(path)
    for _ in range(2):
        with pytest.raises(PlanTableError, match=f"^{re.escape(str(path))}.*{re.escape(said)}"):
            choose("sm_90", Decode, INT4)
    assert choose("sm_80", Decode, INT4)  # nobody else's business


# -- what kvq doctor says of them ---------------------------------------------------------------------------------------------


def test_doctor_shows_the_tables_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    plans, wrong = doctor._plans()
    assert [doctor._in_words(one) for one in plans] == ["kvq's generic"] and not wrong
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=9, minor=0))
    path = own(MINE)
    plans, wrong = doctor._plans()
    assert [(one["arch"], one["own"]) for one in plans] == [("sm_90", True), ("sm_90", False), ("generic", False)] and not wrong
    words = [f"{path} (NVIDIA Test, triton 3.6.0)", "kvq's sm_90 (NVIDIA H200, triton 3.6.0)", "kvq's generic"]
    assert [doctor._in_words(one) for one in plans] == words
    path.write_text("nothing")
    lookup.forget()
    plans, wrong = doctor._plans()
    assert not plans and wrong.startswith(f"broken: {path}: the file: got ")


def test_a_broken_table_is_doctor_s_to_tell(torch_path: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for found, status, said in ((doctor._plans(), 0, "\nplans "), (([], "broken: x.json: arch: got 1"), 1, "broken: x.json: arch: got 1")):
        monkeypatch.setattr(doctor, "_plans", lambda found=found: found)
        ran = CliRunner().invoke(app, ["doctor"])
        assert ran.exit_code == status and said in ran.stdout


# -- adding to a table --------------------------------------------------------------------------------------------------------


def test_entries_take_the_place_of_their_class() -> None:
    slower = replace(FEW, stages=2)
    again = Entry(MINE.entries["decode"][0].where, slower, (replace(MEASURED, run="s"),))
    other = Entry({"ways": 8}, FEW)
    table = MINE.with_entries({"decode": [other, again], "write": [Entry({}, Write(8, 1, 0))]}, {"s": RUN})
    assert table.entries["decode"] == (other, again)
    assert table.entries["write"] == (Entry({}, Write(8, 1, 0)),)
    assert list(table.runs) == ["s"]  # nothing refers to the first any more
