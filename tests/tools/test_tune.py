"""``kvq tune`` but for the GPU: which candidates there are, which is kept for which times, what is printed and written."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import precompile
import tune
from command_line import kvq, refused
from kvq_core import get_backend
from kvq_core.call import ops
from kvq_core.cli import suite
from kvq_core.launch import offline
from kvq_core.plan import Choice, Decode, Prefill, Range, Table, Write, choose, lookup
from kvq_core.plan.candidates import candidates
from kvq_core.plan.selection import select

ROOT = Path(__file__).parents[2]

ONE, TWO, FOUR = (Write(rows=rows, warps=1, store_mma=0) for rows in (8, 16, 32))


@pytest.fixture(autouse=True)
def nobody_s_tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(lookup.SWITCH, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(lookup, "_TABLES", lookup._Tables())
    monkeypatch.setattr("gate.release", lambda device: None)  # collecting garbage takes longer than all else


@pytest.mark.quick
@pytest.mark.parametrize(
    ("times", "kept"),
    [
        ({ONE: (100, 100), TWO: (97, 97)}, TWO),
        ({ONE: (100, 100), TWO: (98.5, 98.5)}, ONE),  # noise
        ({ONE: (100, 100), TWO: (80, 103)}, ONE),  # slower in one setting
        ({ONE: (100, 100), TWO: (80, 101)}, TWO),  # by no more than noise
        ({ONE: (100, 10), TWO: (90, 10), FOUR: (100, 8)}, FOUR),  # ratios count, not microseconds
        ({ONE: (100, 100), TWO: ("out of shared memory", 1)}, ONE),
        ({ONE: (100, 100), TWO: (50, "fault"), FOUR: (90, 90)}, FOUR),
        ({ONE: ("illegal address", 1), TWO: (1, 1)}, ONE),  # nothing to compare with
        # The second time, beside the present choice, medians decide.
        ({ONE: (100, 100), TWO: ([90, 90, 300, 90], 90)}, TWO),
        ({ONE: (100, 100), TWO: ([90, 90, 99, 99], 99)}, ONE),
        ({ONE: (100, 100), TWO: ([80, 99, 99, 99], 99), FOUR: (90, 90)}, FOUR),
    ],
)
def test_what_is_kept(times: dict[Choice, tuple[Any, Any]], kept: Choice) -> None:
    """By its times in two settings: a number, or a list that is worked through. What gives wrong results is never timed."""

    def timed(setting: str, choices: Sequence[Choice]) -> list[float | str]:
        found = [times[choice]["AB".index(setting)] for choice in choices]
        return [time.pop(0) if isinstance(time, list) else time for time in found]

    wrong = Write(rows=64, warps=1, store_mma=0)
    outcome = select([*times, wrong], ["A", "B"], lambda choice: "read: wrong" if choice == wrong else "", timed)
    assert (outcome.kept.choice, outcome.changed, outcome.present.choice) == (kept, kept != ONE, ONE)
    assert outcome.trials[-1].fault == "read: wrong"


def test_the_doors_launch_what_the_table_of_their_gpu_says() -> None:
    """On the GPU that the table is for, and on no other."""
    read = Decode(keys=64, warps=1, stages=7, programs_per_sm=12, registers=168, min_keys=128, loops=1)
    entries: dict[str, Choice] = {"decode": read, "write": Write(rows=128, warps=16, store_mma=0)}
    path = lookup.own_folder() / "sm_90.json"
    path.parent.mkdir(parents=True)
    Table("sm_90", {kind: (tune.Entry({}, choice),) for kind, choice in entries.items()}).write(path)
    for arch, changed in (("sm_90", True), ("sm_80", False)):
        # An empty table has everything planned anew.
        with ops.planning_with(Table(arch, {})), offline.planning_for(replace(tune.ASSUMED, arch=arch)) as planned:
            precompile.call(get_backend("int4"), tune.shapes.HEADLINE[0])
            precompile.call(get_backend("int4"), tune.shapes.WRITE[0])
        attend, *_, write = (options for _, _, options in planned.launches)
        assert (attend["num_stages"] == 7, write["num_warps"] == 16, write["C"].rows == 128) == (changed,) * 3


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``gpu(time)``: a machine with a GPU on which ``time(setting, choice)`` is what a choice takes."""

    def install(time: Callable[[str, Choice], float | str], fault: Callable[[Choice], str] = lambda choice: "") -> None:
        for name, value in (("is_available", True), ("current_device", 0), ("get_device_name", "NVIDIA Test")):
            monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
        monkeypatch.setattr(tune.Device, "current", lambda: tune.ASSUMED)
        monkeypatch.setattr(tune, "Timer", lambda device: SimpleNamespace(device=torch.device("cpu")))
        monkeypatch.setattr(tune.precompile, "compile_all", lambda jobs, processes: ((job, "") for job in jobs))
        monkeypatch.setattr(tune.Bench, "fault", lambda self, one, choice: fault(choice))
        monkeypatch.setattr(tune.Bench, "measure", lambda self, backend, setting, choices: [time(setting.name, c) for c in choices])

    return install


def test_what_is_tuned_is_used_from_then_on(gpu: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    """With every measurement beside it; what cannot be measured is told and not written."""
    facts = {"variant": "", "ways": 4, "width": 128, "rows": 512, "store_mma": True}
    before = choose("sm_90", Write, facts)
    winner, path = replace(before, rows=8, warps=1), lookup.own_folder() / "sm_90.json"
    argv = ["--quick", "--modes", "int4", "--kinds", "write"]
    gpu(lambda setting, choice: 100.0, lambda choice: "write: wrong")
    assert tune.main(argv) == tune.UNMEASURED and not path.exists()
    assert "not measured: int4_per_token_head, write (w64)" in capsys.readouterr().out
    gpu(lambda setting, choice: 90.0 if choice == winner else 100.0, lambda choice: "read: wrong" if choice.warps == 4 else "")
    assert tune.main(argv) == tune.OK
    said = capsys.readouterr().out
    assert f"written: {path}" in said and "changed: int4_per_token_head, write (w64)" in said and "0.900 of the present" in said
    assert "out: read: wrong" in said
    lookup.forget()
    assert choose("sm_90", Write, facts) == winner != before == choose("sm_90", Write, facts | {"ways": 8})
    (w64, w8192) = Table.read(path).entries["write"]
    assert [one.setting for one in (*w64.measured, *w8192.measured)] == ["w64", "w8192"] and w8192.choice == winner
    ends = [(entry.where["width"], entry.where["rows"]) for entry in (w64, w8192)]
    assert ends == [(Range(65, 128), Range(65, 1024)), (Range(65, 128), Range(49152, None))], "what the settings stand for"
    right = [choice for choice in candidates(before, quick=True) if choice.warps != 4]
    assert len(w64.measured[0].alternatives) == len(right) - 1
    # Once more, with the table in use: now the winner is the present choice.
    assert tune.main(argv) == tune.OK
    assert "no candidate wins by more than 2%: the present choices are kept" in capsys.readouterr().out
    assert Table.read(path).entries["write"][0].choice == winner


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--kinds", "decode,speed"], "--kinds: got decode,speed, need some of decode, prefill, groups, write, combine"),
        (["--modes", "int9"], "int9"),
        (["--modes", "none", "--out", "other.json"], "a table for sm_80, need one for sm_90"),
    ],
)
def test_bad_input_is_refused(gpu: Any, given: list[str], said: str, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    gpu(lambda setting, choice: pytest.fail("measured"))
    monkeypatch.chdir(tmp_path)
    Table("sm_80", {}).write(tmp_path / "other.json")
    assert tune.main([*given, "--quick"]) == tune.CANNOT_RUN and said in capsys.readouterr().err


@pytest.mark.quick
def test_both_commands_need_a_gpu_but_for_the_list(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tune.main(["--quick"]) == tune.CANNOT_RUN and "--dry-run" in capsys.readouterr().err
    commands: list[list[str]] = []
    monkeypatch.setattr(suite.subprocess, "run", lambda command: commands.append(command) or SimpleNamespace(returncode=0))
    assert "kvq tune --dry-run" in refused("tune", "--quick") and refused("tune", "--modes", "int9") and not commands
    given = ("--dry-run", "--quick", "--modes", "int4,none", "--kinds", "write", "--out", "x", "--processes", "3")
    assert kvq("tune", *given).status == 0
    ((python, script, *handed_on),) = commands
    assert (python, Path(script)) == (sys.executable, ROOT / "benchmarks" / "tune.py")
    options = tune.arguments(handed_on)
    assert (options.quick, options.out, options.processes) == (True, Path("x"), 3)
    assert tune.main(handed_on) == tune.OK and "30 candidates in 4 classes" in capsys.readouterr().out


def test_a_candidate_is_judged_by_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """With it in force, on the class's own heads."""
    backend = get_backend("int4")
    (one,) = tune.classes(backend, "prefill", tune.ASSUMED, quick=True)
    small = tune.shapes.Read("small", (40,), query_len=40, query_heads=4, kv_heads=2, head_size=64)
    one, bar = replace(one, settings=(small,)), tune.tqdm(disable=True)
    bench = tune.Bench(SimpleNamespace(device=torch.device("cpu")), tune.ASSUMED, {("int4_per_token_head", one.choices[2]): "spills"}, bar)
    in_force = []
    read = type(backend).unified_attention

    def watched(self: Any, *arguments: Any, **named: Any) -> None:
        in_force.append(choose("sm_90", Prefill, {}))
        read(self, *arguments, **named)
        if in_force[-1] == one.choices[3]:
            named["out"][-1] = 0

    monkeypatch.setattr(type(backend), "unified_attention", watched)
    assert bench.fault(one, one.choices[1]) == "" and set(in_force) == {one.choices[1]}
    assert bench.fault(one, one.choices[2]) == "spills" and "relative error" in bench.fault(one, one.choices[3])
