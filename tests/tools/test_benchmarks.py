"""The benchmarks, but for the timing itself: what they count, print and compare, and what their gate catches. On the CPU, eagerly."""

import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import baselines
import bench_decode
import bench_prefill
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
from kvq_core import QuantKVBackend, __version__, get_backend, list_backends
from kvq_core.environment import source_version
from kvq_core.plan import Decode, choose, lookup
from rows import COPY, FLASHATTENTION, FLASHINFER, Row, brief, measured
from shapes import Read, Write
from timing import LEAST_REPEATS, MOST_REPEATS, Timing, repeats_for

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
    monkeypatch.setattr(problems, "_STEP", 96)  # several draws of pages, the last one short


@pytest.mark.quick
@pytest.mark.parametrize("mode", MODES)
def test_counted_bytes_are_allocated_bytes(mode: str) -> None:
    backend, setting = get_backend(mode), Read("full", (64, 32), **HEADS)
    arguments = problems.read(backend, setting, CPU)
    stored = [arguments["k_cache"], arguments["v_cache"]]
    stored += [arguments["k_scale_cache"], arguments["v_scale_cache"]] if backend.needs_scale_caches else []
    assert sum(t.numel() * t.element_size() for t in stored) == setting.bytes(backend)
    w64 = next(s for s in shapes.WRITE if s.name == "w64")
    assert w64.bytes(backend) == 64 * 8 * (2 * 256 + shapes.stored_bytes(backend, 128)) + 8 * 64, "rows read, rows written, slots"


@pytest.mark.quick
def test_work_is_counted_within_causality_and_windows() -> None:
    for setting in (Read("", (7, 9), query_len=3, query_heads=4, kv_heads=2, head_size=8), Read("", (5,), query_len=5)):
        pairs = sum(n - setting.query_len + i + 1 for n in setting.seq_lens for i in range(setting.query_len))
        assert setting.flops == 4 * setting.query_heads * setting.head_size * pairs
    windowed, shorter = Read("", (50, 3), window=7, **HEADS), Read("", (7, 3), **HEADS)
    assert (windowed.bytes(get_backend("int4")), windowed.flops) == (shorter.bytes(get_backend("int4")), shorter.flops)


@pytest.mark.quick
def test_settings_have_names_of_their_own_and_make_sense() -> None:
    found = [(op, [s.name for s in settings]) for op, settings in shapes.chosen(["w64", "A", "A-q4"])]
    assert found == [("decode", ["A", "A-q4"]), ("write", ["w64"])]
    names = [s.name for settings in (shapes.DECODE, shapes.PREFILL, shapes.WRITE, shapes.MORE) for s in settings]
    assert len(names) == len(set(names))
    for wrong in ({"seq_lens": ()}, {"seq_lens": (3,), "query_len": 4}, {"seq_lens": (3,), "query_heads": 9}):
        with pytest.raises(ValueError, match="not a setting"):
            Read("bad", **wrong)


def test_blocks_slots_and_layers_are_shuffled_and_owned_once() -> None:
    table = problems.block_table(setting := Read("same", (64,) * 9), CPU)
    owned = torch.cat([table[i, :n] for i, n in enumerate(setting.blocks)])
    assert sorted(owned.tolist()) == list(range(sum(setting.blocks))) != owned.tolist()
    for write in (Write("w", 53), Write("w", 53, scattered=True)):
        slots = problems.slots(write, CPU)
        assert len(set(slots.tolist())) == 53 and 0 <= int(slots.min()) <= int(slots.max()) < write.num_blocks * write.block_size
    assert len(set((slots // write.block_size).tolist())) == 53, "scattered: a block for each"
    three, seen = replace(TINY, layers=3), []
    assert three.bytes(get_backend("int4")) == 3 * TINY.bytes(get_backend("int4"))
    problems.write_call(broken("int4", reshape_and_cache=lambda _, **rows: seen.append(rows)), three, CPU)()
    for name in ("key", "value", "key_cache", "value_cache", "k_scale_cache"):
        assert len({rows[name].data_ptr() for rows in seen}) == 3
    baselines.copy(three, CPU)()


@pytest.mark.parametrize(
    "options", [{"window": 20}, {"softcap": 5.0}, {"sinks": True}, {"alibi": True}, {"layout": "token_major"}, {"layout": "interleaved"}]
)
def test_options_and_layouts_reach_the_door_and_the_gate(options: dict[str, Any]) -> None:
    """Each changes the result as it should (the gate's reference is told of it), a layout changes it not at all."""
    backend, setting = get_backend("int4"), replace(SMALL, **options)
    assert str(setting) != str(SMALL) and setting.plain == ("layout" in options)
    asked, (plain, *_) = gate.shapes_of([setting]), gate.shapes_of([SMALL])
    assert [p.options for p in asked] == [p.like(setting).options for p in gate.PROBLEMS[:2]]
    assert all(verdict.green for verdict in gate.check_all([gate.Check(backend, p) for p in asked], CPU))
    outs = []
    for one in (plain, asked[0]):
        torch.manual_seed(0)
        outs.append(problems.read(backend, one, CPU))
        backend.unified_attention(**outs[-1])
    assert torch.equal(outs[0]["out"], outs[1]["out"]) == ("layout" in options)


CASES = tuple(replace(p, **HEADS) for p in gate.PROBLEMS)


def broken(mode: str, **methods: Any) -> QuantKVBackend:
    """A backend of ``mode`` with other methods, which get the intact one first."""
    backend = get_backend(mode)
    bent = object.__new__(type(backend))  # a copy of a registered backend is that backend
    for name, method in methods.items():
        object.__setattr__(bent, name, lambda *args, _method=method, **kw: _method(backend, *args, **kw))
    return bent


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
    assert len(checks) == len(set(checks)) and {type(choice).kind for choice in large} == {"decode", "combine"}
    assert {check.problem.seq_lens for check in checks if check.choices == large} == {p.seq_lens for p in gate.PROBLEMS[:2]}
    assert all(large[0] not in precompile.choices_of(int4, check.problem, tune.ASSUMED) for check in checks)
    kinds = {type(choice).kind for check in checks for choice in check.choices}
    assert kinds == {"decode", "combine", "prefill", "write", *(["groups"] if known else [])}
    assert {check.choices for check in gate.checks_of([int4], shapes.HEADLINE, None)} == {()}


def test_a_check_is_run_with_its_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    """In force while the mode reads, so that a fault of theirs alone is seen, and said with their names."""
    backend, wide = get_backend("int4"), Decode(keys=128, warps=1, stages=2, programs_per_sm=8, registers=None, min_keys=128, loops=1)
    facts: dict[str, Any] = {"variant": "", "ways": 4, "width": 64, "lane_bytes": 2, "scaled": True, "side_bytes": False}
    facts |= {"rows": 8, "folded": False, "keys_per_sm": 0, "longest": 0}
    read = type(backend).unified_attention

    def wrong_when_wide(self: Any, **arguments: Any) -> None:
        read(self, **arguments)
        if choose("sm_90", Decode, facts) == wide:
            arguments["out"][-1] = 0

    monkeypatch.setattr(type(backend), "unified_attention", wrong_when_wide)
    plain, planned = gate.check_all([gate.Check(backend, CASES[0]), gate.Check(backend, CASES[0], (wide,))], CPU)
    assert plain.green and planned.fault.startswith("read: relative error")
    assert "planned with decode: keys 128, warps 1" in planned.problem


def lose_a_key(intact: QuantKVBackend, **arguments: Any) -> None:
    """The longest sequence ends one key early, which moves it least of all faults here."""
    lengths = arguments["seqused_k"].clone()
    lengths[lengths.argmax()] -= 1
    intact.unified_attention(**arguments | {"seqused_k": lengths})


def nine_tenths_of_the_scale(intact: QuantKVBackend, **arguments: Any) -> None:
    intact.unified_attention(**arguments | {"softmax_scale": arguments["softmax_scale"] * 0.9})


def leave_one_out(intact: QuantKVBackend, **arguments: Any) -> None:
    """One output row is not written."""
    intact.unified_attention(**arguments)
    arguments["out"][-1, 0] = torch.nan


def miss_a_slot(intact: QuantKVBackend, key: Any, value: Any, key_cache: Any, value_cache: Any, slots: Any, **scales: Any) -> None:
    slots = slots.clone()
    slots[-1] = -1
    intact.reshape_and_cache(key, value, key_cache, value_cache, slots, **scales)


def swap_keys(intact: QuantKVBackend, key: Any, *others: Any, **scales: Any) -> None:
    intact.reshape_and_cache(key.roll(1, 0), *others, **scales)


def swap_values(intact: QuantKVBackend, key: Any, value: Any, *others: Any, **scales: Any) -> None:
    intact.reshape_and_cache(key, value.roll(1, 0), *others, **scales)


def fail(intact: QuantKVBackend, *_: Any, **__: Any) -> None:
    raise RuntimeError("no kernel image\nand more")


READS, WRITES = (lose_a_key, nine_tenths_of_the_scale, leave_one_out), (miss_a_slot, swap_keys, swap_values)
MUTANTS = [
    *(("int4", "unified_attention", fault, "read: relative error") for fault in READS),
    *(("fp8_per_tensor", "reshape_and_cache", fault, "write: ") for fault in WRITES),
    pytest.param("none", "unified_attention", fail, "RuntimeError: no kernel image", marks=pytest.mark.quick),
]


@pytest.mark.parametrize(("mode", "door", "fault", "said"), MUTANTS)
def test_the_gate_catches_a_broken_kernel(mode: str, door: str, fault: Any, said: str) -> None:
    (verdict,) = gate.check_all([gate.Check(broken(mode, **{door: fault}), CASES[0])], CPU)
    assert not verdict.green and verdict.fault.startswith(said) and "\n" not in verdict.fault


def test_the_gate_s_kernels_compile_before_it_runs() -> None:
    """Without a GPU: what it writes and reads, in each way that the settings are planned. What does not compile says so."""
    checks = gate.checks_of([get_backend("none")], [SMALL, Write("w64", 64, scattered=True)], tune.ASSUMED)
    jobs = gate.jobs_of(checks, tune.ASSUMED)
    assert {(job.mode, job.choices) for job in jobs} == {("none", one.choices) for one in checks}
    assert {type(job.settings[0]) for job in jobs} == {Read, Write}
    write = next(job for job in jobs if isinstance(job.settings[0], Write))
    bad = replace(write, mode="int9")
    found = dict(precompile.compile_all([write, bad], 1))
    assert found[write] == "" and found[bad].startswith("UnknownModeError")


ROWS = [
    Row("decode", FLASHINFER, "A", us=500.0, host_us=20.0, bytes=2_000_000_000, flops=1, method="graph"),
    Row("decode", "none", "A", us=525.0, host_us=30.0, bytes=2_000_000_000, flops=1, method="graph"),
    Row("decode", "int4_per_token_head", "A", us=200.0, host_us=40.0, bytes=550_000_000, flops=1, method="eager"),
    Row("decode", "int2_per_token_head", "A", error="OutOfMemoryError: CUDA out of memory"),
    Row("prefill", "none", "P", us=1000.0, host_us=5.0, bytes=1, flops=400_000_000_000, method="graph"),
    Row("write", COPY, "w64", us=4.0, host_us=5.0, bytes=1000, method="graph"),
    Row("write", "none", "w64", us=5.0, host_us=5.0, bytes=1000, method="graph"),
]


@pytest.mark.quick
def test_table_lines_up() -> None:
    lines = report.lines(ROWS, 4e12)
    text, prefill = report.table("decode", lines).splitlines(), report.table("prefill", lines)
    cells = {r.mode: next(line for line in text if line.startswith("A ") and f" {r.mode} " in line).split() for r in ROWS[:4]}
    assert cells["none"][-5:] == ["525.0", "95", "1.00", "0.95", "30"]
    assert cells["int4_per_token_head"][-6:] == ["200.0", "(eager)", "69", "2.62", "2.50", "40"]
    assert cells["int2_per_token_head"][-1] == "error"
    assert text[-1] == "  A, int2_per_token_head: OutOfMemoryError: CUDA out of memory" and len(text[0]) == len(text[1])
    assert "TFLOP/s" in prefill and " 400 " in prefill and "TFLOP/s" not in "".join(text)
    assert report.table("write", lines).splitlines()[-1].split() == ["w64", "none", "5.0", "0", "1.00", "0.80", "5"]


@pytest.mark.quick
def test_compare_matches_rows_and_judges_them(tmp_path: Path) -> None:
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
    monkeypatch.setattr(torch, "device", lambda *args: CPU)
    monkeypatch.setattr(run, "Timer", lambda device: FakeTimer())
    monkeypatch.setattr(gate, "PROBLEMS", gate.PROBLEMS[::3])


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
def test_what_cannot_run_is_refused(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if argv[0] == "--compare":  # with a file of that content, or none
        old = tmp_path / "old.json"
        for content in argv[1:]:
            old.write_text(content)
        argv = ["--compare", str(old)]
    assert run.main(argv) == run.CANNOT_RUN == 2
    assert said in capsys.readouterr().err


@pytest.mark.quick
@pytest.mark.usefixtures("fresh_registry")
def test_which_modes_are_measured(install: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    """``none`` always; a broken one is left out unless it is asked for."""
    assert [b.mode for b in modes.backends_of(["int4,int8"], "none")] == ["none", "int4_per_token_head", "int8_per_token_head"]
    assert [b.mode for b in modes.backends_of(["int4,none"], "none")] == ["none", "int4_per_token_head"]
    install("kvq-int5", "int5", "raise ImportError('no libkvq5.so here')")
    everything = [b.mode for b in modes.backends_of(None, "none")]
    assert sorted(everything) == MODES and everything[0] == "none"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("broken, left out: mode 'int5' from kvq-int5 1.0") and "ImportError: no libkvq5.so here" in line
    assert run.main(["--modes", "int5"]) == run.CANNOT_RUN
    assert "no libkvq5.so here" in capsys.readouterr().err


@pytest.mark.quick
@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git here")
def test_the_commit_is_that_of_kvq_s_own_repository(tmp_path: Path) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@example.org"]
    inside = tmp_path / "site-packages" / "kvq_core"
    inside.mkdir(parents=True)
    for command in (["init", "--quiet"], ["commit", "--quiet", "--allow-empty", "--message", "one"]):
        subprocess.run([*git, *command], check=True)
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert source_version(tmp_path) == head
    assert source_version(inside) == source_version(tmp_path / "nowhere") == f"kvq {__version__}"


@pytest.mark.quick
def test_an_error_stays_in_its_row_and_replays_fit_the_time() -> None:
    def build() -> Any:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried\nto")

    row = measured(FakeTimer(), Row("decode", "none", "A", bytes=8), build)  # type: ignore[arg-type]
    assert (row.us, row.error, brief(RuntimeError())) == (None, "OutOfMemoryError: CUDA out of memory. Tried", "RuntimeError")
    assert (repeats_for(500.0), repeats_for(0.0), repeats_for(1e9)) == (100, MOST_REPEATS, LEAST_REPEATS)


@pytest.mark.parametrize(
    ("bench", "build", "setting", "peers"),
    [
        (bench_decode, baselines.decode, SMALL, []),
        (bench_prefill, baselines.prefill, SMALL, []),
        (bench_write, baselines.append, TINY, [COPY]),
    ],
)
def test_flashinfer_comes_first_and_may_fail(bench: Any, build: Any, setting: Any, peers: list[str], monkeypatch: Any) -> None:
    """Its line is there where it imports, of the same size as ours, and its errors cost nobody else."""
    backend = get_backend("none")
    arguments: Any = ([backend], [setting], FakeTimer())
    monkeypatch.setattr(baselines, "flashinfer", lambda: None)
    assert [row.mode for row in bench.run(*arguments)] == [*peers, "none"]
    with pytest.raises(ImportError, match="flashinfer"):
        build(setting, CPU)
    monkeypatch.setattr(baselines, "flashinfer", object)
    rows = list(bench.run(*arguments))
    assert [(row.mode, bool(row.error)) for row in rows] == [(FLASHINFER, True), *((mode, False) for mode in (*peers, "none"))]
    assert {(row.bytes, row.flops) for row in rows} == {(setting.bytes(backend), getattr(setting, "flops", 0))}
    assert [row.mode for row in bench.run(*arguments, peers=False)] == ["none"]
    if setting is SMALL:  # FlashInfer has no such kernels
        assert [row.mode for row in bench.run([backend], [replace(SMALL, head_size=96)], FakeTimer())] == ["none"]


@pytest.mark.usefixtures("gpu")
def test_a_red_gate_ends_the_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.setattr(modes, "backends_of", lambda *names: [broken("none", unified_attention=fail)])
    monkeypatch.setattr(run, "measure", fail)
    monkeypatch.setattr(shapes, "QUICK", (("decode", (SMALL,)),))
    assert run.main(["--quick", "--out", str(tmp_path / "out")]) == run.GATE_RED
    printed = capsys.readouterr()
    assert "RED  none" in printed.out and "no speed is reported" in printed.err and not (tmp_path / "out").exists()


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("stop", [KeyboardInterrupt(), RuntimeError("an illegal memory access was encountered")], ids=["ctrl-c", "fault"])
def test_a_run_that_is_cut_off_leaves_what_it_has(stop: BaseException, monkeypatch: Any, capsys: Any, tmp_path: Path) -> None:
    """By its user, or by a fault that loses the device: then the row says why. Nothing is tried after it."""
    monkeypatch.setattr(shapes, "DEFAULT", (("decode", (SMALL,)), ("write", (TINY, replace(TINY, name="never")))))
    stopped: list[bool] = []

    def store(backend: QuantKVBackend, setting: Write, timer: Any) -> Any:
        stopped.append(True)
        raise stop

    monkeypatch.setattr(bench_write, "store", store)
    monkeypatch.setattr("rows.is_lost", lambda device: bool(stopped))
    argv, kept = ["--modes", "none", "--no-peers", "--out", str(tmp_path)], [("decode", False)]
    if isinstance(stop, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            run.main(argv)
    else:
        assert run.main(argv) == run.ROW_ERROR
        said = capsys.readouterr().err
        assert "illegal memory access was encountered; no kernel runs on this device any more" in said and "never" not in said
        kept.append(("write", True))
    assert len(stopped) == 1
    assert [(row["op"], bool(row["error"])) for row in report.load(tmp_path / "benchmarks.json")["rows"]] == kept


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

    def one_fails(backend: QuantKVBackend, setting: Write, timer: Any) -> Any:
        if backend.mode == "none":
            raise RuntimeError("does not compile")
        return lambda: None

    monkeypatch.setattr(bench_write, "store", one_fails)
    monkeypatch.setattr(shapes, "DEFAULT", (plan[0], plan[2]))
    assert run.main(["--modes", "none", "--out", str(tmp_path / "again"), "--compare", str(tmp_path / "benchmarks.json")]) == run.ROW_ERROR
    printed = capsys.readouterr().out
    assert "tiny, none: RuntimeError: does not compile" in printed and "broke" in printed and "same" in printed


@pytest.mark.parametrize(("scale", "right"), [(1.0, True), (1.3, False)])
def test_flash_attention_is_timed_once_it_is_right(scale: float, right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in for its extension that takes the arguments where vLLM's interface has them."""

    def fwd(q: Any, k: Any, v: Any, k_new: None, v_new: None, q_v: None, out: Any, *more: Any) -> None:
        starts, _, _, _, used, max_q, max_k, table, *rest = more
        softmax_scale, causal, left, reach, softcap = rest[8:13]
        lengths = {"cu_seqlens_q": starts, "max_seqlen_q": max_q, "seqused_k": used, "max_seqlen_k": max_k, "block_table": table}
        scoring = {"softmax_scale": scale * softmax_scale, "window_size": (left, reach), "softcap": softcap}
        assert causal and len(more) == 30
        get_backend("none").unified_attention(q, k, v, out, **lengths, **scoring)

    monkeypatch.setitem(torch.ops.__dict__, "_vllm_fa3_C", SimpleNamespace(fwd=fwd))
    monkeypatch.setattr(torch.ops, "load_library", lambda file: None)
    monkeypatch.setattr(flash_attention, "extension", lambda: Path("fa3.so"))
    rows = list(bench_decode.run([get_backend("none")], [replace(SMALL, window=64)], FakeTimer()))  # type: ignore[arg-type]
    assert [row.mode for row in rows] == [FLASHATTENTION, "none"]
    assert (rows[0].us is not None) is right and ("from mode none's result" in rows[0].error) is not right
