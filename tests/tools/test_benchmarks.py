"""``kvq bench`` and ``kvq tune`` but for the timing: what is counted, printed, compared, written, and what the gate catches. On the CPU, in
plain torch."""

import ctypes
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

import attention
import bench_prefill
import bench_write
import flash_attention
import flashinfer_kernels
import gate
import modes
import precompile
import problems
import report
import rows
import run
import shapes
import tune
import turbomind
import vllm_gpu
from kvq_core import QuantKVBackend, get_backend, list_backends, plan
from kvq_core.call import ops
from kvq_core.launch import offline
from kvq_core.launch.replay import triton_is_known
from kvq_core.plan import Choice, Decode, Prefill, Range, Table, choose, lookup
from kvq_core.plan.candidates import candidates
from kvq_core.plan.selection import select
from rows import COPY, Row
from shapes import Read, Write
from timing import Timing

CPU = torch.device("cpu")
HEADS: dict[str, Any] = {"query_heads": 4, "kv_heads": 2, "head_size": 64}
SMALL = Read("small", (5, 37, 64), **HEADS)
TINY = Write("tiny", 40, kv_heads=2, head_size=64)
ONE, TWO, FOUR, WIDE = (plan.Write(rows=rows, warps=1, store_mma=0) for rows in (8, 16, 32, 64))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The same draws every time, nobody's tables; and no collection of garbage, which takes longer than all else."""
    torch.manual_seed(0)
    monkeypatch.delenv(lookup.SWITCH, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(lookup, "_TABLES", lookup._Tables())
    for module in (gate, rows, tune):
        monkeypatch.setattr(module, "release", lambda device: None)


class FakeTimer:
    """Calls once, on the CPU."""

    device = CPU
    temporary, read_bandwidth, floor = (lambda self, *_, x=x: x for x in (3 << 20, 4.2e12, 2.0))

    def measure(self, call: Any, working_set: int, *, allow_eager: bool = False) -> Timing:
        call()
        return Timing(10.0, 5.0, 7, "graph")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU, as far as torch says; runs on the CPU, whose clock stands still."""
    for name, value in (("is_available", True), ("current_device", 0), ("get_device_name", "NVIDIA H200")):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    for module in (run, tune):
        monkeypatch.setattr(module, "Timer", lambda device: FakeTimer())
    monkeypatch.setattr(tune.Device, "current", lambda: tune.ASSUMED)
    monkeypatch.setattr(precompile, "compile_all", lambda jobs, processes: ((job, "") for job in jobs))
    for module in (flash_attention, turbomind):
        monkeypatch.setattr(module, "extension", lambda: None)
    monkeypatch.setattr(gate, "PROBLEMS", gate.PROBLEMS[::3])


@pytest.mark.quick
@pytest.mark.parametrize(
    ("program", "argv", "said"),
    [
        (run, "--settings A,Z", "no such settings: Z"),
        (run, "--quick --settings prefill", "--quick: got --settings prefill beside it, need one or the other"),
        (run, "--settings=", "no such settings: none named"),
        (run, "--modes int7", "int7"),
        (run, "--compare old.json", "old.json"),
        (tune, "--kinds decode,speed", "--kinds: got 'decode,speed', need some of decode, prefill, groups, write, combine"),
        (tune, "--kinds ,", "--kinds: got ',', need some of decode, prefill, groups, write, combine"),
        (tune, "--modes int9", "int9"),
        (tune, "--modes none --out sm_80.json", "a table for sm_80, need one for sm_90"),
        (tune, "--modes none --out old.json", "old.json: "),
    ],
)
@pytest.mark.usefixtures("gpu")
def test_what_cannot_run_is_refused(program: Any, argv: str, said: str, capsys: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.json").write_text('{"format": 1, "rows": [{}]}')
    Table("sm_80", {}).write(tmp_path / "sm_80.json")
    assert program.main([*argv.split(), "--name", "kvq it"]) == program.CANNOT_RUN == 2
    told = capsys.readouterr().err
    assert said in told and told.startswith("Error: kvq it: ")


@pytest.mark.quick
@pytest.mark.parametrize(("found", "said"), [(False, "run: vLLM: got none in "), (True, "run: no configuration was measured")])
def test_vllm_that_is_not_there_is_one_error(found: bool, said: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    def start(command: list[str], **options: Any) -> SimpleNamespace:
        asked.append(command)
        return SimpleNamespace(returncode=int(not found))

    asked: list[list[str]] = []
    monkeypatch.setattr(vllm_gpu, "HOME", tmp_path / "home")
    monkeypatch.setattr(vllm_gpu.subprocess, "run", start)
    monkeypatch.setattr(vllm_gpu, "run", lambda *arguments: [{"dtype": "auto", "backend": "CUSTOM", "runs": [], "error": "killed"}])
    monkeypatch.setattr(sys, "argv", ["vllm_gpu.py", "run", "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as ended:
        vllm_gpu.main()
    assert said in str(ended.value.code) and len(asked) == 1  # a text: exit status 1


@pytest.mark.quick
def test_counted_bytes_are_allocated_bytes_and_work_lies_within_causality_and_windows() -> None:
    setting, windowed, shorter = Read("", (64, 32), **HEADS), Read("", (50, 3), window=7, **HEADS), Read("", (7, 3), **HEADS)
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


def without_a_key(arguments: dict[str, Any]) -> dict[str, Any]:
    """The longest sequence ends one key early, which moves it least of all faults here."""
    lengths = arguments["seqused_k"]
    return arguments | {"seqused_k": lengths - (lengths == lengths.max()).int()}


@pytest.mark.quick
@pytest.mark.parametrize(
    ("mode", "door", "fault", "said"),
    [
        ("int4", "unified_attention", lambda attend, **kw: (attend(**kw), kw["out"][-1, 0].fill_(torch.nan)), "read: relative error"),
        ("int4", "unified_attention", lambda attend, **kw: attend(**without_a_key(kw)), "read: relative error"),
        ("fp8_per_tensor", "reshape_and_cache", lambda store, k, v, *more, **kw: store(k, v.roll(1, 0), *more, **kw), "write: "),
        ("none", "unified_attention", fail, "RuntimeError: no kernel image"),
    ],
)
def test_the_gate_catches_a_broken_kernel(mode: str, door: str, fault: Any, said: str) -> None:
    (verdict,) = gate.check_all([gate.Check(broken(mode, door, fault), replace(gate.PROBLEMS[0], **HEADS))], CPU)
    assert not verdict.green and verdict.fault.startswith(said) and "\n" not in verdict.fault


def test_the_gate_judges_a_choice_with_it_in_force() -> None:
    """A candidate on the heads of its class, and the choices of a check."""
    (one,) = tune.classes(get_backend("int4"), "prefill", tune.ASSUMED, quick=True)
    _, good, spills, wrong, *_ = one.choices
    asked: type[Choice] = Prefill
    in_force: list[Choice] = []

    def attend(intact: Any, **arguments: Any) -> None:
        in_force.append(choose("sm_90", asked, {}))
        intact(**arguments)
        arguments["out"][-1] *= in_force[-1] != wrong

    backend = broken("int4", "unified_attention", attend)
    one = replace(one, backend=backend, settings=(Read("small", (40,), query_len=40, **HEADS),))
    bench = tune.Bench(FakeTimer(), tune.ASSUMED, {(backend.mode, spills): "spills"}, tune.tqdm(disable=True))
    assert [bench.fault(one, choice) for choice in (good, spills)] == ["", "spills"] and "relative error" in bench.fault(one, wrong)
    asked = plan.Write
    (verdict,) = gate.check_all([gate.Check(backend, replace(gate.PROBLEMS[0], **HEADS), (WIDE,))], CPU)
    assert verdict.green and "planned with write: rows 64, warps 1" in verdict.problem
    assert list(dict.fromkeys(in_force)) == [good, wrong, WIDE]


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


@pytest.mark.usefixtures("gpu")
def test_whole_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Every operation in two modes; then again, compared with the first, until a fault loses the device: what there is by then is kept; and
    no speed under a red gate."""
    plan = (("decode", (SMALL,)), ("prefill", (Read("p", (40,), query_len=33, **HEADS),)), ("write", (TINY,)))
    monkeypatch.setattr(torch, "device", lambda *args: CPU)
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
    monkeypatch.setattr(modes, "backends_of", lambda *names: [broken("none", "unified_attention", fail)])
    monkeypatch.setattr(run, "measure", fail)
    monkeypatch.setattr(shapes, "QUICK", (("decode", (SMALL,)),))
    assert run.main(["--quick", "--out", str(tmp_path / "red")]) == run.GATE_RED
    printed = capsys.readouterr()
    assert "RED  none" in printed.out and "no speed is reported" in printed.err and not (tmp_path / "red").exists()


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

    outcome = select([*times, WIDE], ["A", "B"], lambda choice: "read: wrong" if choice == WIDE else "", timed)
    assert (outcome.kept.choice, outcome.changed, outcome.present.choice) == (kept, kept != ONE, ONE)
    assert outcome.trials[-1].fault == "read: wrong"


def test_the_doors_launch_what_the_table_of_their_gpu_says() -> None:
    """On the GPU that the table is for, and on no other."""
    read = Decode(keys=64, warps=1, stages=7, programs_per_sm=12, registers=168, min_keys=128, loops=1)
    entries: dict[str, Choice] = {"decode": read, "write": plan.Write(rows=128, warps=16, store_mma=0)}
    path = lookup.own_folder() / "sm_90.json"
    path.parent.mkdir(parents=True)
    Table("sm_90", {kind: (tune.Entry({}, choice),) for kind, choice in entries.items()}).write(path)
    for arch, changed in (("sm_90", True), ("sm_80", False)):
        # An empty table has everything planned again.
        with ops.planning_with(Table(arch, {})), offline.planning_for(replace(tune.ASSUMED, arch=arch)) as planned:
            precompile.call(get_backend("int4"), tune.shapes.HEADLINE[0])
            precompile.call(get_backend("int4"), tune.shapes.WRITE[0])
        attend, *_, write = (options for _, _, options in planned.launches)
        assert (attend["num_stages"] == 7, write["num_warps"] == 16, write["C"].rows == 128) == (changed,) * 3


@pytest.mark.skipif(not triton_is_known(), reason="this Triton has no kernel that stores from the MMA layout")
@pytest.mark.usefixtures("gpu")
def test_what_is_tuned_is_used_from_then_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With every measurement beside it; what cannot be measured is told and not written."""
    facts = {"variant": "", "ways": 4, "width": 128, "rows": 512, "side_bytes": False, "store_mma": True}
    before = choose("sm_90", plan.Write, facts)
    winner, path = replace(before, rows=8, warps=1), lookup.own_folder() / "sm_90.json"
    argv = ["--quick", "--modes", "int4", "--kinds", "write"]

    def with_gpu(time: Callable[[Choice], float], fault: Callable[[Choice], str]) -> None:
        monkeypatch.setattr(tune.Bench, "fault", lambda self, one, choice: fault(choice))
        monkeypatch.setattr(tune.Bench, "measure", lambda self, backend, setting, choices: list(map(time, choices)))

    with_gpu(lambda choice: 100.0, lambda choice: "write: wrong")
    assert tune.main(argv) == tune.UNMEASURED and not path.exists()
    assert "not measured: int4_per_token_head, write (w64)" in capsys.readouterr().out
    with_gpu(lambda choice: 90.0 if choice == winner else 100.0, lambda choice: "read: wrong" if choice.warps == 4 else "")
    assert tune.main(argv) == tune.OK
    said = capsys.readouterr().out
    assert f"written: {path}" in said and "changed: int4_per_token_head, write (w64)" in said and "0.900 of the present" in said
    assert "out: read: wrong" in said
    lookup.forget()
    assert choose("sm_90", plan.Write, facts) == winner != before == choose("sm_90", plan.Write, facts | {"ways": 8})
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


@pytest.mark.quick
def test_without_a_gpu_candidates_are_listed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tune.main(["--quick"]) == tune.CANNOT_RUN and "--dry-run" in capsys.readouterr().err
    monkeypatch.setattr("kvq_core.launch.dispatch.triton_is_known", lambda: True)
    given = "--dry-run --quick --modes int4 none --kinds write"
    assert tune.main(given.split()) == tune.OK and "30 candidates in 4 classes" in capsys.readouterr().out


@pytest.mark.quick
def test_dense_is_torchs_attention_of_the_last_rows() -> None:
    q, k, v = (torch.randn(count, heads, 16) for count, heads in ((5, 4), (70, 2), (70, 2)))
    seen = causal_lower_right(5, 70)
    expected = scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), attn_mask=seen, enable_gqa=True)[0]
    problems.hold("dense", problems.dense(q, k, v), expected.transpose(0, 1), 1e-5)
    # A row of many keys is shorter than one of few.
    with pytest.raises(ArithmeticError, match=r"a row of it is 1\.0e\+00 from"):
        problems.hold("it", torch.stack((q[0], 0 * q[1])), torch.stack((q[0], 1e-3 * q[1])))


@pytest.mark.quick
@pytest.mark.parametrize(("op", "query_len"), [(flashinfer_kernels.decode, 1), (flashinfer_kernels.prefill, 130)])
@pytest.mark.parametrize("error", [0.0, 0.02])
def test_peers_are_checked_before_they_are_timed(op: Any, query_len: int, error: float, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrapper:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def plan(self, rows: torch.Tensor, *_: Any, **__: Any) -> None:
            if op is flashinfer_kernels.prefill:
                assert rows[-1] == made[-1].q.shape[0] and len(rows) == made[-1].setting.num_seqs + 1

        def run(self, q: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
            return made[-1].expected() * (1 + error)

    made: list[Any] = []
    paged = flashinfer_kernels._Paged
    monkeypatch.setattr(flashinfer_kernels, "_Paged", lambda *args: made.append(paged(*args)) or made[-1])
    monkeypatch.setattr(flashinfer_kernels, "WORKSPACE_BYTES", 1)
    names = ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper")
    monkeypatch.setattr(flashinfer_kernels, "flashinfer", lambda: SimpleNamespace(**dict.fromkeys(names, Wrapper)))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    setting = Read("s", (query_len, query_len + 37), query_len=query_len, **HEADS)
    with pytest.raises(ArithmeticError, match=r"a row of FlashInfer is 2\.0e-02") if error else nullcontext():
        op(setting, CPU)
    assert len(made) == (1 if error else 2)


@pytest.mark.quick
def test_prefill_is_timed_there_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that falls with each measurement is the same for all on average."""
    order: list[str] = []

    def measured(_: object, row: Row, build: object, *, allow_eager: bool) -> Row:
        order.append(row.mode)
        return (
            replace(row, error="broken")
            if row.mode == "fp8_per_tensor" and len(order) > 3
            else replace(row, us=len(order), host_us=1.0, repeats=5)
        )

    monkeypatch.setattr(attention, "measured", measured)
    backends = [get_backend(mode) for mode in ("none", "fp8_per_tensor", "int4")]
    timer: Any = SimpleNamespace(device=CPU)
    found = list(bench_prefill.run(backends, [Read("s", (8,), query_len=8, **HEADS)], timer, with_peers=False))
    assert order == [backend.mode for backend in (*backends, *reversed(backends))]
    assert [(row.us, row.repeats, row.error) for row in found] == [(3.5, 10, ""), (None, 0, "broken"), (3.5, 10, "")]


@pytest.mark.quick
@pytest.mark.parametrize("scattered", [True, False])
@pytest.mark.parametrize("wrong", [False, True])
def test_a_peers_write_is_checked_before_it_is_timed(scattered: bool, wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def append(*arguments: Any) -> None:
        *rows, sequence, position, pages, blocks, first_block, _, layout = arguments
        assert layout == "HND"
        for token in range(len(sequence)):
            at = int(position[token])
            block = blocks[first_block[sequence[token]] + at // pages.shape[3]]
            for half, each in enumerate(rows):
                pages[block, half, :, at % pages.shape[3]] = each[token - (wrong and token == 1)]

    monkeypatch.setattr(flashinfer_kernels, "flashinfer", lambda: SimpleNamespace(append_paged_kv_cache=append))
    setting = Write("s", 19, kv_heads=2, head_size=8, block_size=4, scattered=scattered, layers=2)
    with pytest.raises(ArithmeticError, match="FlashInfer wrote other rows") if wrong else nullcontext():
        flashinfer_kernels.append(setting, CPU)()


@pytest.mark.quick
def test_turbomind_arguments_have_the_size_of_its_structure() -> None:
    assert ctypes.sizeof(turbomind.AttentionParams) == 440
