"""``kvq bench`` but for the timing: what is counted, printed and compared, and what its gate catches. On the CPU, in plain torch."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import bench_write
import flash_attention
import gate
import modes
import precompile
import problems
import report
import rows
import run
import shapes
import tune
from kvq_core import QuantKVBackend, get_backend, list_backends, plan
from kvq_core.plan import choose, lookup
from rows import COPY, Row
from shapes import Read, Write
from timing import Timing

CPU = torch.device("cpu")
HEADS: dict[str, Any] = {"query_heads": 4, "kv_heads": 2, "head_size": 64}
SMALL = Read("small", (5, 37, 64), **HEADS)
TINY = Write("tiny", 40, kv_heads=2, head_size=64)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same draws every time; and no collection of garbage, which takes longer than all else."""
    torch.manual_seed(0)
    for module in (gate, rows):
        monkeypatch.setattr(module, "release", lambda device: None)


@pytest.mark.quick
def test_counted_bytes_are_allocated_bytes_and_work_lies_within_causality_and_windows() -> None:
    setting, windowed, shorter = (
        Read("", lengths, **HEADS | more) for lengths, more in (((64, 32), {}), ((50, 3), {"window": 7}), ((7, 3), {}))
    )
    for backend in (get_backend(entry.mode) for entry in list_backends()):
        arguments = problems.read(backend, setting, CPU)
        names = ["k_cache", "v_cache", *(["k_scale_cache", "v_scale_cache"] if backend.needs_scale_caches else [])]
        assert sum(arguments[name].nbytes for name in names) == setting.bytes(backend)
        assert TINY.bytes(backend) == 40 * 2 * (2 * 128 + shapes.stored_bytes(backend, 64)) + 8 * 40, "rows read, rows written, slots"
        assert windowed.bytes(backend) == shorter.bytes(backend)
    few = Read("", (7, 9), query_len=3, **HEADS)
    assert few.flops == 4 * few.query_heads * few.head_size * sum(n - 3 + i + 1 for n in (7, 9) for i in range(3))
    assert windowed.flops == shorter.flops


@pytest.mark.quick
@pytest.mark.parametrize("known", [True, False])
def test_the_gate_plans_its_problems_as_the_timed_settings_are_planned(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among them the tiles that only much to read is planned with, which none of the gate's own problems reaches. Warp groups take part
    under a Triton whose Gluon is ``known``, whichever is installed here."""
    monkeypatch.setenv(lookup.SWITCH, "")
    monkeypatch.setattr("kvq_core.launch.dispatch.triton_is_known", lambda: known)
    int4 = get_backend("int4")
    checks = gate.checks_of([int4], [*shapes.HEADLINE, *shapes.PREFILL, *shapes.WRITE], tune.ASSUMED)
    large = precompile.choices_of(int4, shapes.HEADLINE[0], tune.ASSUMED)
    assert {check.problem.seq_lens for check in checks if check.choices == large} == {p.seq_lens for p in gate.PROBLEMS[:2]}
    assert all(large[0] not in precompile.choices_of(int4, check.problem, tune.ASSUMED) for check in checks)
    kinds = {type(choice).kind for check in checks for choice in check.choices}
    assert kinds == {"decode", "combine", "prefill", "write", *(["groups"] if known else [])}


def broken(mode: str, door: str, fault: Any) -> QuantKVBackend:
    """A backend of ``mode`` with another method, which gets the intact one first."""
    backend = get_backend(mode)
    bent = object.__new__(type(backend))  # a copy of a registered backend is that backend
    object.__setattr__(bent, door, lambda *args, **kw: fault(getattr(backend, door), *args, **kw))
    return bent


def fail(*_: Any, **__: Any) -> None:
    raise RuntimeError("no kernel image\nand more")


def lose_a_key(attend: Any, **arguments: Any) -> None:
    """The longest sequence ends one key early, which moves it least of all faults here."""
    lengths = arguments["seqused_k"].clone()
    lengths[lengths.argmax()] -= 1
    attend(**arguments | {"seqused_k": lengths})


def leave_one_out(attend: Any, **arguments: Any) -> None:
    attend(**arguments)
    arguments["out"][-1, 0] = torch.nan


@pytest.mark.quick
@pytest.mark.parametrize(
    ("mode", "door", "fault", "said"),
    [
        ("int4", "unified_attention", leave_one_out, "read: relative error"),
        ("int4", "unified_attention", lose_a_key, "read: relative error"),
        ("fp8_per_tensor", "reshape_and_cache", lambda store, k, v, *more, **kw: store(k, v.roll(1, 0), *more, **kw), "write: "),
        ("none", "unified_attention", fail, "RuntimeError: no kernel image"),
    ],
)
def test_the_gate_catches_a_broken_kernel(mode: str, door: str, fault: Any, said: str) -> None:
    (verdict,) = gate.check_all([gate.Check(broken(mode, door, fault), replace(gate.PROBLEMS[0], **HEADS))], CPU)
    assert not verdict.green and verdict.fault.startswith(said) and "\n" not in verdict.fault


def test_a_check_is_run_with_its_choices() -> None:
    seen, wide = [], plan.Write(rows=64, warps=1, store_mma=0)
    backend = broken("int4", "unified_attention", lambda attend, **given: (seen.append(choose("sm_90", plan.Write, {})), attend(**given)))
    (verdict,) = gate.check_all([gate.Check(backend, replace(gate.PROBLEMS[0], **HEADS), (wide,))], CPU)
    assert verdict.green and "planned with write: rows 64, warps 1" in verdict.problem and seen == [wide]


@pytest.mark.quick
def test_what_changed_since_an_earlier_run_is_judged(tmp_path: Path) -> None:
    then = {"none": 525.0, "int8_per_token_head": 500.0, "int4_per_token_head": 200.0}
    now = {"none": 510.0, "int8_per_token_head": 400.0, "int4_per_token_head": 250.0, "int2_per_token_head": 100.0}
    before, after = ([Row("decode", mode, "A", us=us, bytes=8, flops=1) for mode, us in run.items()] for run in (then, now))
    facts = {"gpu": "H200", "driver": "1", "torch": "2", "triton": "3", "commit": "abc"}
    (tmp_path / "old.json").write_text(json.dumps(report.as_json(facts, before, 4e12)))
    old = report.load(tmp_path / "old.json")
    assert [row["x_none"] for row in old["rows"]] == pytest.approx([1, 1.05, 2.625])
    changes = report.compare(old, after)
    assert [(c.verdict, c.ratio) for c in changes] == [("same", 525 / 510), ("faster", 1.25), ("SLOWER", 0.8), ("new", None)]
    text = report.changes_table(old, facts | {"torch": "2.1"}, changes)
    assert "against commit abc" in text and "torch: 2 then, 2.1 now" in text and "triton" not in text


@pytest.mark.quick
@pytest.mark.parametrize(
    ("argv", "said"),
    [(["--settings", "A,Z"], "no such settings: Z"), (["--modes", "int7"], "int7"), (["--compare", "old.json"], "old.json")],
)
def test_what_cannot_run_is_refused(argv: list[str], said: str, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.json").write_text('{"format": 1, "rows": [{}]}')
    assert run.main(argv) == run.CANNOT_RUN == 2 and said in capsys.readouterr().err


class FakeTimer:
    """Calls once, on the CPU."""

    device = CPU
    temporary, read_bandwidth, floor = (lambda self, *_, x=x: x for x in (3 << 20, 4.2e12, 2.0))

    def measure(self, call: Any, working_set: int, *, allow_eager: bool = False) -> Timing:
        call()
        return Timing(10.0, 5.0, 7, "graph")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run on the CPU whose clock stands still."""
    for name, value in (("is_available", True), ("current_device", 0), ("get_device_name", "NVIDIA H200")):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch, "device", lambda *args: CPU)
    monkeypatch.setattr(run, "Timer", lambda device: FakeTimer())
    monkeypatch.setattr(flash_attention, "extension", lambda: None)
    monkeypatch.setattr(gate, "PROBLEMS", gate.PROBLEMS[::3])


@pytest.mark.usefixtures("gpu")
def test_a_red_gate_ends_the_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.setattr(modes, "backends_of", lambda *names: [broken("none", "unified_attention", fail)])
    monkeypatch.setattr(run, "measure", fail)
    monkeypatch.setattr(shapes, "QUICK", (("decode", (SMALL,)),))
    assert run.main(["--quick", "--out", str(tmp_path / "out")]) == run.GATE_RED
    printed = capsys.readouterr()
    assert "RED  none" in printed.out and "no speed is reported" in printed.err and not (tmp_path / "out").exists()


@pytest.mark.usefixtures("gpu")
def test_whole_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Every operation in two modes; then again, compared with the first, until a fault loses the device: what there is by then is kept."""
    plan = (("decode", (SMALL,)), ("prefill", (Read("p", (40,), query_len=33, **HEADS),)), ("write", (TINY,)))
    monkeypatch.setattr(shapes, "DEFAULT", plan)
    assert run.main(["--modes", "int4", "--out", str(tmp_path)]) == run.OK
    printed = capsys.readouterr().out
    assert "NVIDIA H200" in printed and "100 % HBM = 4.20 TB/s, a pure read measured here" in printed and "gate: green" in printed
    kept = report.load(tmp_path / "benchmarks.json")["rows"]
    assert len(kept) == 3 * 2 + 1 and {row["mode"] for row in kept} == {"none", "int4_per_token_head", COPY}
    assert all(row["x_none"] == 1 for row in kept) and (tmp_path / "benchmarks.png").stat().st_size > 1000
    monkeypatch.setattr(bench_write, "store", fail)
    monkeypatch.setattr(rows, "is_lost", lambda device: True)
    monkeypatch.setattr(shapes, "DEFAULT", (plan[0], ("write", (TINY, replace(TINY, name="never")))))
    again = ["--modes", "none", "--no-peers", "--out", str(tmp_path / "again"), "--compare", str(tmp_path / "benchmarks.json")]
    assert run.main(again) == run.ROW_ERROR
    printed = capsys.readouterr()
    assert "tiny, none: RuntimeError: no kernel image" in printed.out and "broke" in printed.out and "same" in printed.out
    assert "no kernel runs on this device any more" in printed.err
    kept = report.load(tmp_path / "again" / "benchmarks.json")["rows"]
    assert [(row["op"], bool(row["error"])) for row in kept] == [("decode", False), ("write", True)]
