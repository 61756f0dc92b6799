"""``kvq bench`` but for the timing: what is counted, printed and compared, and what its gate catches. On the CPU, in plain torch."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import baselines
import bench_decode
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
from kvq_core import QuantKVBackend, get_backend, list_backends
from kvq_core.plan import lookup
from rows import COPY, FLASHATTENTION, FLASHINFER, Row
from shapes import Read, Write
from timing import Timing

CPU = torch.device("cpu")
MODES = sorted({entry.mode for entry in list_backends()})
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
    setting = Read("full", (64, 32), **HEADS)
    for backend in map(get_backend, MODES):
        arguments = problems.read(backend, setting, CPU)
        names = ["k_cache", "v_cache", *(["k_scale_cache", "v_scale_cache"] if backend.needs_scale_caches else [])]
        assert sum(arguments[name].nbytes for name in names) == setting.bytes(backend)
        assert TINY.bytes(backend) == 40 * 2 * (2 * 128 + shapes.stored_bytes(backend, 64)) + 8 * 40, "rows read, rows written, slots"
    few = Read("", (7, 9), query_len=3, **HEADS)
    assert few.flops == 4 * few.query_heads * few.head_size * sum(n - 3 + i + 1 for n in (7, 9) for i in range(3))
    windowed, shorter = Read("", (50, 3), window=7, **HEADS), Read("", (7, 3), **HEADS)
    assert (windowed.bytes(get_backend("int4")), windowed.flops) == (shorter.bytes(get_backend("int4")), shorter.flops)


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


def broken(mode: str, **methods: Any) -> QuantKVBackend:
    """A backend of ``mode`` with other methods, which get the intact one first."""
    backend = get_backend(mode)
    bent = object.__new__(type(backend))  # a copy of a registered backend is that backend
    for name, method in methods.items():
        object.__setattr__(bent, name, lambda *args, _method=method, **kw: _method(backend, *args, **kw))
    return bent


def lose_a_key(intact: QuantKVBackend, **arguments: Any) -> None:
    """The longest sequence ends one key early, which moves it least of all faults here."""
    lengths = arguments["seqused_k"].clone()
    lengths[lengths.argmax()] -= 1
    intact.unified_attention(**arguments | {"seqused_k": lengths})


def swap_values(intact: QuantKVBackend, key: Any, value: Any, *others: Any, **scales: Any) -> None:
    intact.reshape_and_cache(key, value.roll(1, 0), *others, **scales)


def fail(intact: QuantKVBackend, *_: Any, **__: Any) -> None:
    raise RuntimeError("no kernel image\nand more")


@pytest.mark.parametrize(
    ("mode", "door", "fault", "said"),
    [
        ("int4", "unified_attention", lose_a_key, "read: relative error"),
        ("fp8_per_tensor", "reshape_and_cache", swap_values, "write: "),
        pytest.param("none", "unified_attention", fail, "RuntimeError: no kernel image", marks=pytest.mark.quick),
    ],
)
def test_the_gate_catches_a_broken_kernel(mode: str, door: str, fault: Any, said: str) -> None:
    (verdict,) = gate.check_all([gate.Check(broken(mode, **{door: fault}), replace(gate.PROBLEMS[0], **HEADS))], CPU)
    assert not verdict.green and verdict.fault.startswith(said) and "\n" not in verdict.fault


ROWS = [
    Row("decode", FLASHINFER, "A", us=500.0, host_us=20.0, bytes=2_000_000_000, flops=1, method="graph"),
    Row("decode", "none", "A", us=525.0, host_us=30.0, bytes=2_000_000_000, flops=1, method="graph"),
    Row("decode", "int4_per_token_head", "A", us=200.0, host_us=40.0, bytes=550_000_000, flops=1, method="eager"),
    Row("decode", "int2_per_token_head", "A", error="OutOfMemoryError: CUDA out of memory"),
    Row("prefill", "none", "P", us=1000.0, host_us=5.0, bytes=1, flops=400_000_000_000, method="graph"),
    Row("write", "none", "w64", us=5.0, host_us=5.0, bytes=1000, method="graph"),
]


@pytest.mark.quick
def test_tables_and_what_changed_since_an_earlier_run(tmp_path: Path) -> None:
    lines = report.lines(ROWS, 4e12)
    cells = {line.split()[1]: line.split()[2:] for line in report.table("decode", lines).splitlines() if line.startswith("A ")}
    assert cells["none"] == ["525.0", "95", "1.00", "0.95", "30"] and cells["int2_per_token_head"][-1] == "error"
    assert cells["int4_per_token_head"] == ["200.0", "(eager)", "69", "2.62", "2.50", "40"]
    prefill = report.table("prefill", lines)
    assert "TFLOP/s" in prefill and " 400 " in prefill
    facts = {"gpu": "H200", "driver": "1", "torch": "2", "triton": "3", "commit": "abc"}
    (tmp_path / "old.json").write_text(json.dumps(report.as_json(facts, ROWS, 4e12)))
    old = report.load(tmp_path / "old.json")
    now = [("none", 510.0, "same", 525 / 510), ("int4_per_token_head", 250.0, "SLOWER", 0.8), ("int2_per_token_head", 100.0, "new", None)]
    changed = [*(Row("decode", mode, "A", us=us) for mode, us, *_ in now), Row("prefill", "none", "P", us=800.0)]
    changes = report.compare(old, [*changed, Row("write", "none", "w64", error="broken")])
    expected = [*((verdict, ratio) for *_, verdict, ratio in now), ("faster", 1.25), ("broke", None)]
    assert [(c.verdict, c.ratio) for c in changes] == expected
    text = report.changes_table(old, facts | {"torch": "2.1"}, changes)
    assert "against commit abc" in text and "torch: 2 then, 2.1 now" in text and "triton" not in text and "SLOWER" in text


@pytest.mark.quick
@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--quick"], "torch sees none on this machine"),
        (["--settings", "A,Z"], "no such settings: Z"),
        (["--modes", "int7"], "int7"),
        *((["--compare", content], "old.json") for content in ("", "[]", '{"format": 99, "rows": []}', '{"format": 1, "rows": [{}]}')),
        (["--compare"], "old.json"),
    ],
)
def test_what_cannot_run_is_refused(argv: list[str], said: str, capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if argv[0] == "--compare":  # with a file of that content, or none
        old = tmp_path / "old.json"
        for content in argv[1:]:
            old.write_text(content)
        argv = ["--compare", str(old)]
    assert run.main(argv) == run.CANNOT_RUN == 2 and said in capsys.readouterr().err


@pytest.mark.quick
@pytest.mark.usefixtures("fresh_registry")
def test_a_broken_mode_is_left_out_unless_it_is_asked_for(install: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    install("kvq-int5", "int5", "raise ImportError('no libkvq5.so here')")
    found = [b.mode for b in modes.backends_of(None, "none")]
    assert sorted(found) == MODES and found[0] == "none"
    said = capsys.readouterr().err
    assert said.startswith("broken, left out: mode 'int5' from kvq-int5 1.0") and "no libkvq5.so here" in said
    assert run.main(["--modes", "int5"]) == run.CANNOT_RUN and "no libkvq5.so here" in capsys.readouterr().err


class FakeTimer:
    """Calls once, on the CPU."""

    device = CPU

    def temporary(self, call: Any) -> int:
        return 3 << 20

    def measure(self, call: Any, working_set: int, *, allow_eager: bool = False) -> Timing:
        call()
        return Timing(10.0, 5.0, 7, "graph")

    def read_bandwidth(self) -> float:
        return 4.2e12

    def floor(self) -> float:
        return 2.0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run on the CPU whose clock stands still."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(flash_attention, "extension", lambda: None)
    monkeypatch.setattr(torch, "device", lambda *args: CPU)
    monkeypatch.setattr(run, "Timer", lambda device: FakeTimer())
    monkeypatch.setattr(gate, "PROBLEMS", gate.PROBLEMS[::3])


def test_peers_are_timed_once_they_are_right_and_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer, which does not import here, costs nobody else a row; a FlashAttention that is not causal has no time."""
    none: Any = get_backend("none")

    def fwd(q: Any, k: Any, v: Any, *more: Any) -> None:
        more[3].zero_()

    monkeypatch.setattr(baselines, "flashinfer", object)
    monkeypatch.setitem(torch.ops.__dict__, "_vllm_fa3_C", SimpleNamespace(fwd=fwd))
    monkeypatch.setattr(torch.ops, "load_library", lambda file: None)
    monkeypatch.setattr(flash_attention, "extension", lambda: Path("fa3.so"))
    found = {row.mode: row for row in bench_decode.run([none], [SMALL], FakeTimer())}  # type: ignore[arg-type]
    assert set(found) == {FLASHATTENTION, FLASHINFER, "none"} and found[FLASHINFER].error and found["none"].us
    assert found[FLASHATTENTION].us is None and "from mode none's result" in found[FLASHATTENTION].error
    assert len({(row.bytes, row.flops) for row in found.values()}) == 1
    assert [row.mode for row in bench_decode.run([none], [SMALL], FakeTimer(), peers=False)] == ["none"]  # type: ignore[arg-type]


@pytest.mark.usefixtures("gpu")
def test_a_red_gate_ends_the_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.setattr(modes, "backends_of", lambda *names: [broken("none", unified_attention=fail)])
    monkeypatch.setattr(run, "measure", fail)
    monkeypatch.setattr(shapes, "QUICK", (("decode", (SMALL,)),))
    assert run.main(["--quick", "--out", str(tmp_path / "out")]) == run.GATE_RED
    printed = capsys.readouterr()
    assert "RED  none" in printed.out and "no speed is reported" in printed.err and not (tmp_path / "out").exists()


@pytest.mark.usefixtures("gpu")
def test_a_fault_that_loses_the_device_ends_the_run_and_leaves_what_it_has(monkeypatch: Any, capsys: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(shapes, "DEFAULT", (("decode", (SMALL,)), ("write", (TINY, replace(TINY, name="never")))))
    stopped: list[bool] = []

    def store(*given: Any) -> Any:
        stopped.append(True)
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(bench_write, "store", store)
    monkeypatch.setattr("rows.is_lost", lambda device: bool(stopped))
    assert run.main(["--modes", "none", "--no-peers", "--out", str(tmp_path)]) == run.ROW_ERROR and len(stopped) == 1
    assert "no kernel runs on this device any more" in capsys.readouterr().err
    kept = report.load(tmp_path / "benchmarks.json")["rows"]
    assert [(row["op"], bool(row["error"])) for row in kept] == [("decode", False), ("write", True)]


@pytest.mark.usefixtures("gpu")
def test_whole_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Every operation in two modes; then again with an error in one row, compared with the first."""
    plan = (("decode", (SMALL,)), ("prefill", (Read("p", (40,), query_len=33, **HEADS),)), ("write", (TINY,)))
    monkeypatch.setattr(shapes, "DEFAULT", plan)
    assert run.main(["--modes", "int4", "--out", str(tmp_path)]) == run.OK
    printed = capsys.readouterr().out
    assert "NVIDIA H200" in printed and "100 % HBM = 4.20 TB/s, a pure read measured here" in printed and "gate: green" in printed
    kept = report.load(tmp_path / "benchmarks.json")["rows"]
    assert len(kept) == 3 * 2 + 1 and {row["mode"] for row in kept} == {"none", "int4_per_token_head", COPY}
    assert all(row["x_none"] == 1 for row in kept) and (tmp_path / "benchmarks.png").stat().st_size > 1000

    monkeypatch.setattr(bench_write, "store", fail)
    monkeypatch.setattr(shapes, "DEFAULT", (plan[0], plan[2]))
    assert run.main(["--modes", "none", "--out", str(tmp_path / "again"), "--compare", str(tmp_path / "benchmarks.json")]) == run.ROW_ERROR
    printed = capsys.readouterr().out
    assert "tiny, none: RuntimeError: no kernel image" in printed and "broke" in printed and "same" in printed
