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
from kvq_core.plan import Decode, Entry, Measurement, Range, Run, Table, choose, lookup, tables_for
from kvq_core.plan.table import Alternative

pytestmark = pytest.mark.quick

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
    assert tables_for("sm_90")[0].source == str(path) and [table.arch for table in tables_for("sm_90")[1:]] == ["sm_90", "generic"]


@pytest.mark.parametrize(
    ("arch", "known", "found"),
    [
        ("sm_86", ["sm_80", "sm_89", "sm_90"], ["sm_80"]),
        ("sm_89", ["sm_80", "sm_86", "sm_89"], ["sm_89", "sm_86"]),
        ("sm_80", ["sm_89", "sm_86"], ["sm_86"]),
        ("sm_103", ["sm_100", "sm_10"], ["sm_100"]),
        ("gfx942", ["gfx940", "gfx950"], ["gfx940"]),
        ("", ["sm_90"], []),
    ],
)
def test_the_nearest_of_the_family(arch: str, known: list[str], found: list[str]) -> None:
    assert lookup.nearest(arch, known) == found


def test_the_switch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    default = own(MINE)
    file = tmp_path / "mine.json"
    MINE.write(file)
    for value, found in ((None, default), ("", None), (str(file), file), (str(tmp_path), tmp_path / "sm_90.json")):
        monkeypatch.delenv(lookup.SWITCH, raising=False)
        if value is not None:
            monkeypatch.setenv(lookup.SWITCH, value)
        assert lookup.own_file("sm_90") == found
    monkeypatch.setenv(lookup.SWITCH, str(tmp_path / "nowhere"))
    lookup.forget()
    with pytest.raises(ArgumentError, match=r"^KVQ_PLANS: got '.*nowhere', need a table of launch plans"):
        choose("sm_90", Decode, INT4)
    assert choose("", Decode, INT4)  # what is no GPU has no table of one's own


# -- tables as files ----------------------------------------------------------------------------------------------------------


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
}
WRITE = ["write", 0]
WRONG: list[tuple[list[Any], Any, str]] = [
    (["format"], 2, "format: got 2, need 1, the format that this version of kvq reads"),
    (["arch"], 90, "arch: got 90, need text"),
    (["prefil"], [], "prefil: got [], need one of arch, combine, decode, format, groups, prefill, runs, write in its place"),
    (["write"], {}, "write: got {}, need a list"),
    ([*WRITE, "where", "keys"], 3, "write[0].where.keys: got 3, need one of rows, store_mma, variant, ways, width in its place"),
    ([*WRITE, "where", "ways"], True, "write[0].where.ways: got True, need a whole number, or its bounds {min, max}"),
    ([*WRITE, "where", "rows"], {"min": 9, "max": 8}, "write[0].where.rows: got {'min': 9, 'max': 8}, need bounds"),
    ([*WRITE, "choice", "rows"], 48, "write[0].choice.rows: got 48, need a power of two from 4 to 128"),
    ([*WRITE, "choice"], {"rows": 32, "warps": 1, "store_mma": 1}, "need 8 or 16 rows a warp with store_mma 1"),
    ([*WRITE, "choice", "warps"], KeyError, "write[0].choice.warps: got None, need a value: it is missing"),
    ([*WRITE, "measured", 0, "run"], "s", "write[0].measured[0].run: got 's', need one of runs: r"),
    ([*WRITE, "measured", 0, "us"], -1, "write[0].measured[0].us: got -1, need a positive number"),
    (["groups"], [{"where": {}, "choice": {"groups": 1, "stages": 2, "registers": 184, "staged": 0}}], "need 3 to 6 stages with groups 1"),
    (["groups"], [{"where": {}, "choice": {"groups": 1, "stages": 4, "registers": 184, "staged": 1}}], "need groups 2 with staged 1"),
]


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
        (lambda path: path.write_text("[" * 100_000), "the file: got 'something nested too deep'"),
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


def test_doctor_shows_the_tables_in_use_and_broken_ones(torch_path: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=9, minor=0))
    path = own(MINE)
    plans, wrong = doctor._plans()
    words = [
        f"{path} (NVIDIA Test, triton 3.6.0)",
        "kvq's sm_90 (NVIDIA H100 80GB HBM3, triton 3.6.0; NVIDIA H200, triton 3.6.0)",
        "kvq's generic",
    ]
    assert [doctor._in_words(one) for one in plans] == words and not wrong
    path.write_text("nothing")
    lookup.forget()
    broken = doctor._plans()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for found, status, said in ((doctor._plans(), 0, "\nplans "), (broken, 1, f"broken: {path}: the file: got ")):
        monkeypatch.setattr(doctor, "_plans", lambda found=found: found)
        ran = CliRunner().invoke(app, ["doctor"])
        assert ran.exit_code == status and said in ran.stdout
