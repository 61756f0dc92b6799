"""The tables of speed: what they show is in the committed run, and a goal is met or not as its figure is printed."""

import json
from pathlib import Path

import pytest

import generated
import performance_tables as tables

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.quick
MODES = list(tables.MODES)


def committed(file: Path) -> tables.Run:
    return tables.Run(json.loads(file.read_text(encoding="utf-8")))


@pytest.fixture(scope="module")
def run() -> tables.Run:
    return committed(tables.DATA)


def made_up(**us: float) -> tables.Run:
    """A run of setting A, ``us`` by mode."""
    rows = [{"setting": "A", "mode": mode, "us": value, "hbm": 1 / value, "x_peer": 100 / value} for mode, value in us.items()]
    return tables.Run({"machine": {}, "rows": rows})


def test_the_pages_show_the_committed_runs(run: tables.Run) -> None:
    """Otherwise: ``hatch run tables``."""
    for path, parts in tables.pages(run, committed(tables.H100)).items():
        text = path.read_text(encoding="utf-8")
        for marks, expected in parts.items():
            assert generated.part(text, marks) == expected, marks[0]


@pytest.mark.parametrize("broken", ["no json", "cut off", "an error"])
def test_what_is_no_whole_run_changes_nothing(broken: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = json.loads(tables.DATA.read_text(encoding="utf-8"))
    if broken == "cut off":
        content["rows"] = content["rows"][:-1]
    elif broken == "an error":
        content["rows"][3] |= {"us": None, "error": "OutOfMemoryError", "hbm": None, "x_none": None, "x_peer": None}
    file = tmp_path / "benchmarks.json"
    file.write_text("[" if broken == "no json" else json.dumps(content))
    paths = (tables.DATA, tables.PAGE, tables.FIGURES)
    before = [path.read_bytes() for path in paths]
    with pytest.raises(SystemExit) as ended:
        tables.main([str(file)])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert {"no json": str(file), "cut off": "int2_per_token_head in setting w8192-8", "an error": "in setting A:"}[broken] in said
    assert [path.read_bytes() for path in paths] == before


@pytest.mark.parametrize("file", [tables.DATA, tables.H100], ids=lambda file: file.stem)
def test_the_committed_runs_are_whole(file: Path) -> None:
    """Every mode in every setting; FlashInfer and the copy where they can be asked."""
    content = json.loads(file.read_text(encoding="utf-8"))
    run = tables.Run(content)
    assert not [row for row in content["rows"] if row["error"]]
    assert run.machine["gpu"] and run.machine["flashinfer"] and not run.machine["commit"].endswith("dirty")
    settings = {*tables.SMALL, *tables.OTHERS, *tables.PREFILL, *tables.WRITES, "B", "C"}
    assert settings == {row["setting"] for row in content["rows"]}
    assert all(run.of(setting, mode) for setting in settings for mode in MODES)


def test_eight_writes_are_shown_as_one(run: tables.Run) -> None:
    eight, one = (f"| {run.of('w8192-8', 'int4_per_token_head') / parts:.1f} " for parts in (1, 8))
    shown = tables.figures(run, {"w8192-8": "eight"}, "write", tables.COPY)
    assert one in shown and eight not in shown


@pytest.mark.parametrize(
    ("at_most", "us", "met"),
    [(False, 50.0, True), (False, 50.1, True), (False, 50.2, False), (True, 50.0, True), (True, 49.9, True), (True, 49.8, False)],
)
def test_a_goal_is_judged_by_what_is_printed(at_most: bool, us: float, met: bool) -> None:
    goal = tables.Goal("twice as fast", lambda run, mode: run.of("A", mode, "x_peer"), (2.0,), at_most)
    given = made_up(none=us, **dict.fromkeys(MODES[1:], 50.0))
    assert goal.met(given, "none") is met
    what, wanted, first, *others = goal.cells(given)
    assert (what, wanted) == ("twice as fast", "at most 2" if at_most else "at least 2")
    assert first == (f"{100 / us:.2f}" if met else f"**{100 / us:.2f}**")
    assert others == ["2.00"] * 5


def test_each_mode_has_its_own_bound() -> None:
    goal = tables.Goal("", lambda run, mode: run.of("A", mode, "us"), (11.0, 12.0, 13.0, 14.0), form=".0f")
    for mode, bound in zip(MODES, (11, 12, 12, 12, 13, 14), strict=True):
        assert goal.met(made_up(**{mode: bound}), mode)
        assert not goal.met(made_up(**{mode: bound - 1}), mode)


def test_times_and_shares_are_held_against_setting_a() -> None:
    rows = [("A", 4, 0.9), ("A-q2", 5, 0.6), ("A-d64", 2, 0.45)]
    given = tables.Run({"machine": {}, "rows": [{"setting": s, "mode": "none", "us": us, "hbm": hbm} for s, us, hbm in rows]})
    figures = {goal.what: goal.figure for goal in tables.GOALS}
    assert figures["2 query rows, time for one row's"](given, "none") == 1.25
    assert figures["heads of 64, share of memory for A's"](given, "none") == 0.5
