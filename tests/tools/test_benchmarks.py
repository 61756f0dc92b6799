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

ROOT = Path(__file__).parents[2]
import baselines  # noqa: E402
import bench_decode  # noqa: E402
import bench_prefill  # noqa: E402
import bench_write  # noqa: E402
import gate  # noqa: E402
import modes  # noqa: E402
import precompile  # noqa: E402
import problems  # noqa: E402
import report  # noqa: E402
import run  # noqa: E402
import shapes  # noqa: E402
import tune  # noqa: E402
from kvq_core import QuantKVBackend, __version__, get_backend, list_backends  # noqa: E402
from kvq_core.environment import source_version  # noqa: E402
from kvq_core.plan import Choice, Decode, choose, lookup  # noqa: E402
from rows import COPY, FLASHINFER, Row, brief, measured  # noqa: E402
from shapes import Read, Write  # noqa: E402
from timing import LEAST_REPEATS, MOST_REPEATS, repeats_for  # noqa: E402

CPU = torch.device("cpu")
MODES = sorted({entry.mode for entry in list_backends()})
SMALL = Read("small", (5, 37, 64), query_heads=4, kv_heads=2, head_size=64)
TINY = Write("tiny", 40, kv_heads=2, head_size=64)


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    torch.manual_seed(0)


# -- shapes -----------------------------------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize(
    ("mode", "per_row"), [("none", 256), ("int8", 132), ("fp8", 132), ("fp8_per_tensor", 128), ("int4", 68), ("int2", 36)]
)
def test_bytes_are_those_of_the_packed_cache(mode: str, per_row: int) -> None:
    backend = get_backend(mode)
    a, _, c = shapes.HEADLINE
    assert shapes.stored_bytes(backend, 128) == 2 * per_row
    assert a.bytes(backend) == 2 * 64 * 8192 * 8 * per_row
    assert c.bytes(backend) == 2 * 128 * 4096 * 8 * per_row
    w64 = next(s for s in shapes.WRITE if s.name == "w64")
    assert w64.bytes(backend) == 2 * 64 * 8 * (256 + per_row) + 8 * 64


@pytest.mark.quick
@pytest.mark.parametrize("mode", MODES)
def test_counted_bytes_are_allocated_bytes(mode: str) -> None:
    backend, setting = get_backend(mode), Read("full", (64, 32), query_heads=4, kv_heads=2, head_size=64)
    arguments = problems.read(backend, setting, CPU)
    stored = [arguments["k_cache"], arguments["v_cache"]]
    stored += [arguments["k_scale_cache"], arguments["v_scale_cache"]] if backend.needs_scale_caches else []
    assert sum(t.numel() * t.element_size() for t in stored) == setting.bytes(backend)


@pytest.mark.quick
def test_operations_count_what_causality_leaves() -> None:
    for setting in (Read("", (7, 9), query_len=3, query_heads=4, kv_heads=2, head_size=8), Read("", (5,), query_len=5)):
        pairs = sum(n - setting.query_len + i + 1 for n in setting.seq_lens for i in range(setting.query_len))
        assert setting.flops == 4 * setting.query_heads * setting.head_size * pairs


@pytest.mark.quick
def test_the_gate_checks_every_kind_that_is_timed() -> None:
    quick = gate.shapes_of(shapes.HEADLINE)
    assert {(p.query_heads, p.query_len) for p in quick} == {(32, 1), (64, 1)}
    everything = gate.shapes_of([s for _, settings in shapes.DEFAULT for s in settings])
    assert {(p.query_heads, p.query_len) for p in everything} == {(32, 1), (64, 1), (32, 200)}
    assert {p.query_len for p in gate.shapes_of(shapes.MORE) if p.head_size == 128} == {1, 4}
    assert {p.head_size for p in gate.shapes_of(shapes.MORE)} == {64, 96, 128, 192, 256}
    assert {p.kv_heads for p in gate.shapes_of([TINY])} == {TINY.kv_heads}


@pytest.mark.quick
def test_ragged_and_even_hold_the_same_keys() -> None:
    by_name = {s.name: s for s in shapes.DECODE}
    assert sum(by_name["ragged"].seq_lens) == sum(by_name["even"].seq_lens)


@pytest.mark.quick
def test_settings_are_chosen_by_name() -> None:
    assert [(op, [s.name for s in settings]) for op, settings in shapes.chosen(["w64", "A", "A-q4"])] == [
        ("decode", ["A", "A-q4"]),
        ("write", ["w64"]),
    ]
    assert dict(shapes.chosen(["decode"]))["decode"] == shapes.DECODE
    names = [s.name for settings in (shapes.DECODE, shapes.PREFILL, shapes.WRITE, shapes.MORE) for s in settings]
    assert len(names) == len(set(names))
    for bad in (["A", "nosuch"], []):
        with pytest.raises(ValueError, match="known: decode, prefill, write, more, A"):
            shapes.chosen(bad)
    for wrong in ({"seq_lens": ()}, {"seq_lens": (3,), "query_len": 4}, {"seq_lens": (3,), "query_heads": 9}):
        with pytest.raises(ValueError, match="not a setting"):
            Read("bad", **wrong)


# -- problems ---------------------------------------------------------------------------------------------------------------


def test_blocks_are_shuffled_and_owned_once() -> None:
    for setting in (SMALL, Read("same", (64,) * 9)):
        table = problems.block_table(setting, CPU)
        owned = torch.cat([table[i, :n] for i, n in enumerate(setting.blocks)])
        assert sorted(owned.tolist()) == list(range(sum(setting.blocks)))
    assert owned.tolist() != sorted(owned.tolist())


@pytest.mark.parametrize("scattered", [False, True])
def test_slots_are_distinct_and_inside(scattered: bool) -> None:
    setting = Write("w", 53, scattered=scattered)
    slots = problems.slots(setting, CPU)
    assert slots.shape == (53,)
    assert len(set(slots.tolist())) == 53
    assert 0 <= int(slots.min()) <= int(slots.max()) < setting.num_blocks * setting.block_size
    if scattered:
        assert len(set((slots // setting.block_size).tolist())) == 53


def test_layers_are_written_to_pages_of_their_own() -> None:
    backend, one = get_backend("int4"), TINY
    three = replace(one, layers=3)
    assert three.bytes(backend) == 3 * one.bytes(backend)
    assert str(three) == f"{one}, 3 layers one after the other"
    seen: list[dict[str, Any]] = []
    problems.write_call(broken("int4", reshape_and_cache=lambda _, **rows: seen.append(rows)), three, CPU)()
    for name in ("key", "value", "key_cache", "value_cache", "k_scale_cache"):
        assert len({rows[name].data_ptr() for rows in seen}) == 3
    baselines.copy(three, CPU)()


@pytest.mark.parametrize("setting", [replace(TINY, layers=2), replace(TINY, tokens=5, scattered=True)], ids=["whole blocks", "scattered"])
def test_flashinfer_writes_every_token_to_a_slot_of_its_own(setting: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in that goes by the page table as FlashInfer documents it."""
    written: list[torch.Tensor] = []

    def append(key: Any, value: Any, sequences: Any, positions: Any, pages: Any, blocks: Any, starts: Any, last: Any, layout: str) -> None:
        assert layout == "HND" and {x.dtype for x in (sequences, positions, blocks, starts, last)} == {torch.int32}
        size, used = pages.shape[3], starts.diff()
        ends = (used - 1) * size + last
        assert bool((last >= 1).all() & (last <= size).all() & (positions < ends[sequences]).all())
        entry = starts[sequences] + positions // size
        assert bool((entry < starts[sequences + 1]).all())
        at = (blocks[entry].long(), slice(None), (positions % size).long())
        pages[:, 0][at], pages[:, 1][at] = key, value
        assert torch.equal((pages[:, 0] != 0).any(-1).sum(), torch.tensor(key.shape[0] * key.shape[1]))
        written.append(pages)

    monkeypatch.setattr(baselines, "flashinfer", lambda: SimpleNamespace(append_paged_kv_cache=append))
    baselines.append(setting, CPU)()
    assert len({pages.data_ptr() for pages in written}) == setting.layers
    monkeypatch.setattr(baselines, "flashinfer", lambda: None)
    with pytest.raises(ImportError, match="flashinfer"):
        baselines.append(setting, CPU)


@pytest.mark.parametrize("mode", MODES)
def test_problems_go_through_the_doors(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random pages are like real ones: finite rows of unit variance, and results of the size that averaging leaves."""
    monkeypatch.setattr(problems, "_STEP", 96)  # several draws, the last one short
    backend = get_backend(mode)
    arguments = problems.read(backend, SMALL, CPU)
    backend.unified_attention(**arguments)
    out = arguments["out"].float()
    assert bool(out.isfinite().all())
    assert 0.1 < float(out.std()) < 1
    arguments = problems.write(backend, TINY, CPU)
    backend.reshape_and_cache(**arguments)
    block, offset = arguments["slot_mapping"] // 16, arguments["slot_mapping"] % 16
    scale = arguments["k_scale_cache"]
    stored = scale[block, offset] if backend.needs_scale_caches else scale
    rows = backend.decode(arguments["key_cache"][block, offset], stored)
    error = (rows - arguments["key"].float()).norm() / arguments["key"].float().norm()
    assert float(error) < 0.5


@pytest.mark.quick
def test_a_window_bounds_bytes_and_operations() -> None:
    """Those of the last keys alone; one that hides nothing changes neither."""
    backend, sizes = get_backend("int4"), {"query_heads": 4, "kv_heads": 2, "head_size": 64}
    windowed, short = Read("", (50, 3), window=7, **sizes), Read("", (7, 3), **sizes)
    assert (windowed.bytes(backend), windowed.flops) == (short.bytes(backend), short.flops)
    rows, wide = Read("", (50,), query_len=5, **sizes), Read("", (50,), query_len=5, window=50, **sizes)
    assert (rows.bytes(backend), rows.flops) == (wide.bytes(backend), wide.flops)
    by_name = {s.name: s for s in shapes.MORE if isinstance(s, Read)}
    assert by_name["B-window-1024"].bytes(backend) == by_name["b1-1024"].bytes(backend)


@pytest.mark.quick
@pytest.mark.parametrize("mode", MODES)
def test_a_windowed_read_is_planned_as_the_keys_that_its_window_leaves(mode: str) -> None:
    """A long sequence with a short window as a short one; a window that hides nothing changes no plan."""
    by_name = {s.name: s for s in (*shapes.DECODE, *shapes.MORE) if isinstance(s, Read)}

    def planned(name: str) -> tuple[Choice, ...]:
        return precompile.choices_of(get_backend(mode), by_name[name], tune.ASSUMED)

    assert planned("B-window-1024") == planned("b1-1024")
    assert planned("A-window") == planned("A")
    # A mode of a third party's may have no kernels, and nothing to plan.
    assert planned("b1-1024") != planned("B") or not planned("B")


OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"window": 20},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": True},
    "alibi": {"alibi": True},
    "token_major": {"layout": "token_major"},
    "interleaved": {"layout": "interleaved"},
}


@pytest.mark.parametrize("mode", ["none", "int4", "fp8_per_tensor"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_and_layouts_reach_the_door_and_the_gate(mode: str, options: dict[str, Any]) -> None:
    """Each changes the result as it should (the gate's reference is told of it), a layout changes it not at all."""
    backend, setting = get_backend(mode), replace(SMALL, **options)
    assert str(setting) != str(SMALL) and setting.plain == ("layout" in options)
    problems_, (plain, *_) = gate.shapes_of([setting]), gate.shapes_of([SMALL])
    assert [p.options for p in problems_] == [p.like(setting).options for p in gate.PROBLEMS[:2]]
    assert all(verdict.green for verdict in gate.check_all([gate.Check(backend, p) for p in problems_], CPU))
    outs = []
    for one in (plain, problems_[0]):
        torch.manual_seed(0)
        outs.append(problems.read(backend, one, CPU))
        backend.unified_attention(**outs[-1])
    assert torch.equal(outs[0]["out"], outs[1]["out"]) == ("layout" in options)


# -- the gate ---------------------------------------------------------------------------------------------------------------


def broken(mode: str, **methods: Any) -> QuantKVBackend:
    """A backend of ``mode`` with other methods, which get the intact one first."""
    backend = get_backend(mode)
    bent = object.__new__(type(backend))  # a copy of a registered backend is that backend
    for name, method in methods.items():
        object.__setattr__(bent, name, lambda *args, _method=method, **kw: _method(backend, *args, **kw))
    return bent


CASES = tuple(replace(p, query_heads=4, kv_heads=2, head_size=64) for p in gate.PROBLEMS)


@pytest.mark.parametrize("mode", MODES)
def test_gate_is_green_for_what_works(mode: str) -> None:
    verdicts = list(gate.check_all([gate.Check(get_backend(mode), problem) for problem in CASES], CPU))
    assert len(verdicts) == len(gate.PROBLEMS)
    assert all(v.green and v.read_error <= v.allowed for v in verdicts), verdicts


@pytest.mark.quick
@pytest.mark.parametrize("known", [True, False])
def test_the_gate_plans_its_problems_as_the_timed_settings_are_planned(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among them the tiles that only much to read is planned with, which none of the gate's own problems reaches. Warp groups take part
    under a Triton whose Gluon is ``known``, whichever is installed here."""
    monkeypatch.setenv(lookup.SWITCH, "")
    monkeypatch.setattr("kvq_core.launch.dispatch.triton_is_known", lambda: known)
    kinds = {"decode", "combine", "prefill", "write", *(["groups"] if known else [])}
    checks = gate.checks_of([get_backend("int4"), get_backend("int2")], [*shapes.HEADLINE, *shapes.PREFILL, *shapes.WRITE], tune.ASSUMED)
    assert len(checks) == len(set(checks))
    for mode in ("int4", "int2"):
        of_mode = [check for check in checks if check.backend is get_backend(mode)]
        large = precompile.choices_of(get_backend(mode), shapes.HEADLINE[0], tune.ASSUMED)
        assert {type(choice).kind for choice in large} == {"decode", "combine"}
        assert {check.problem.seq_lens for check in of_mode if check.choices == large} == {p.seq_lens for p in gate.PROBLEMS[:2]}
        small = [precompile.choices_of(get_backend(mode), check.problem, tune.ASSUMED) for check in of_mode]
        assert large[0] not in [choice for choices in small for choice in choices]
        assert {type(choice).kind for check in of_mode for choice in check.choices} == kinds
    (plain,) = {check.choices for check in gate.checks_of([get_backend("int4")], shapes.HEADLINE, None)}
    assert plain == ()


def test_a_check_is_run_with_its_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    """In force while the mode reads, so that a fault of theirs alone is seen, and said with their names."""
    backend, wide = get_backend("int4"), Decode(keys=128, warps=1, stages=2, programs_per_sm=8, registers=None, min_keys=128, loops=1)

    def wrong_when_wide(self: Any, **arguments: Any) -> None:
        read(self, **arguments)
        if choose("sm_90", Decode, facts) == wide:
            arguments["out"][-1] = 0

    read = type(backend).unified_attention
    facts = {"variant": "", "ways": 4, "width": 64, "lane_bytes": 2, "scaled": True, "side_bytes": False}
    facts |= {"rows": 8, "folded": False, "keys_per_sm": 0, "longest": 0}
    monkeypatch.setattr(type(backend), "unified_attention", wrong_when_wide)
    plain, planned = gate.check_all([gate.Check(backend, CASES[0]), gate.Check(backend, CASES[0], (wide,))], CPU)
    assert plain.green and planned.fault.startswith("read: relative error")
    assert "planned with decode: keys 128, warps 1" in planned.problem


def lose_a_key(intact: QuantKVBackend, **arguments: Any) -> None:
    """Each sequence ends one key early; queries keep their distance to what they see."""
    arguments["seqused_k"] = (arguments["seqused_k"] - 1).clamp(min=1)
    intact.unified_attention(**arguments)


def half_the_scale(intact: QuantKVBackend, **arguments: Any) -> None:
    intact.unified_attention(**arguments | {"softmax_scale": arguments["softmax_scale"] * 0.9})


def leave_one_out(intact: QuantKVBackend, **arguments: Any) -> None:
    """One output row is not written."""
    intact.unified_attention(**arguments)
    arguments["out"][-1, 0] = torch.nan


def miss_a_slot(intact: QuantKVBackend, key: Any, value: Any, key_cache: Any, value_cache: Any, slots: Any, **scales: Any) -> None:
    slots = slots.clone()
    slots[-1] = -1
    intact.reshape_and_cache(key, value, key_cache, value_cache, slots, **scales)


def swap_two_rows(intact: QuantKVBackend, key: Any, value: Any, key_cache: Any, value_cache: Any, slots: Any, **scales: Any) -> None:
    slots = slots.roll(1)
    intact.reshape_and_cache(key, value, key_cache, value_cache, slots, **scales)


def fail(intact: QuantKVBackend, *_: Any, **__: Any) -> None:
    raise RuntimeError("no kernel image\nand more")


@pytest.mark.parametrize("mode", ["none", "int4_per_token_head", "fp8_per_tensor"])
@pytest.mark.parametrize("fault", [lose_a_key, half_the_scale, leave_one_out])
def test_gate_catches_a_broken_read(mode: str, fault: Any) -> None:
    verdicts = list(gate.check_all([gate.Check(broken(mode, unified_attention=fault), CASES[0])], CPU))
    assert [v.fault.startswith("read: relative error") for v in verdicts] == [True]


@pytest.mark.parametrize("mode", ["none", "int8_per_token_head", "int4_per_token_head", "int2_per_token_head", "fp8_per_tensor"])
@pytest.mark.parametrize("fault", [miss_a_slot, swap_two_rows])
def test_gate_catches_a_broken_write(mode: str, fault: Any) -> None:
    verdict = gate.check(broken(mode, reshape_and_cache=fault), CASES[0], CPU)
    assert verdict.fault.startswith("write: ")


@pytest.mark.quick
def test_gate_is_red_where_a_kernel_fails() -> None:
    verdict = gate.check(broken("none", unified_attention=fail), CASES[0], CPU)
    assert verdict.fault == "RuntimeError: no kernel image"


def test_the_gate_s_kernels_compile_before_it_runs() -> None:
    """Without a GPU: what it writes and reads, in each way that the settings are planned."""
    checks = gate.checks_of([get_backend("none")], [SMALL, Write("w64", 64, scattered=True)], tune.ASSUMED)
    jobs = gate.jobs_of(checks, tune.ASSUMED)
    assert {(job.mode, job.choices) for job in jobs} == {("none", one.choices) for one in checks}
    assert {type(job.settings[0]) for job in jobs} == {Read, Write}
    assert dict(precompile.compile_all(jobs[:2], 2)) == dict.fromkeys(jobs[:2], "")


def test_a_red_gate_ends_the_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pretend_gpu(monkeypatch)
    monkeypatch.setattr(modes, "backends_of", lambda *names: [broken("none", unified_attention=fail)])
    monkeypatch.setattr(run, "measure", fail)
    monkeypatch.setattr(shapes, "QUICK", (("decode", (SMALL,)),))
    assert run.main(["--quick", "--out", str(tmp_path / "out")]) == run.GATE_RED
    printed = capsys.readouterr()
    assert "RED  none" in printed.out
    assert "no speed is reported" in printed.err
    assert not (tmp_path / "out").exists()


# -- the report -------------------------------------------------------------------------------------------------------------

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
    text = report.table("decode", lines)
    cells = {
        row.mode: next(line for line in text.splitlines() if line.startswith("A ") and f" {row.mode} " in line).split() for row in ROWS[:4]
    }
    assert cells["none"][-5:] == ["525.0", "95", "1.00", "0.95", "30"]
    assert cells["int4_per_token_head"][-6:] == ["200.0", "(eager)", "69", "2.62", "2.50", "40"]
    assert cells["int2_per_token_head"][-1] == "error"
    assert text.splitlines()[-1] == "  A, int2_per_token_head: OutOfMemoryError: CUDA out of memory"
    assert len({len(line) for line in text.splitlines()[:2]}) == 1
    prefill = report.table("prefill", lines)
    assert "TFLOP/s" in prefill and " 400 " in prefill
    assert "TFLOP/s" not in text
    assert report.table("write", lines).splitlines()[-1].split() == ["w64", "none", "5.0", "0", "1.00", "0.80", "5"]


@pytest.mark.quick
def test_compare_matches_rows_and_judges_them(tmp_path: Path) -> None:
    facts = {"gpu": "H200", "driver": "1", "torch": "2", "triton": "3", "commit": "abc"}
    path = tmp_path / "old.json"
    path.write_text(json.dumps(report.as_json(facts, ROWS, 4e12)))
    old = report.load(path)
    changed = [
        Row("decode", "none", "A", us=510.0),
        Row("decode", "int4_per_token_head", "A", us=250.0),
        Row("decode", "int2_per_token_head", "A", us=100.0),
        Row("prefill", "none", "P", us=800.0),
        Row("write", "none", "w64", error="broken"),
        Row("write", "int8_per_token_head", "w64", us=1.0),
    ]
    changes = report.compare(old, changed)
    assert [c.verdict for c in changes] == ["same", "SLOWER", "new", "faster", "broke", "new"]
    assert [c.ratio for c in changes[1:4]] == [0.8, None, 1.25]
    text = report.changes_table(old, facts | {"torch": "2.1"}, changes)
    assert "against commit abc" in text
    assert "torch: 2 then, 2.1 now" in text and "triton" not in text
    assert "SLOWER" in text


@pytest.mark.quick
@pytest.mark.parametrize("content", [None, "", "[]", '{"format": 99, "rows": []}', '{"format": 1, "rows": [{"op": "decode"}]}'])
def test_compare_refuses_what_is_no_run(content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "old.json"
    if content is not None:
        path.write_text(content)
    assert run.main(["--compare", str(path)]) == run.CANNOT_RUN
    assert str(path) in capsys.readouterr().err


@pytest.mark.filterwarnings("error")
def test_plot_is_written(tmp_path: Path) -> None:
    """Whatever is missing: peers altogether, the peer of a setting that it does not serve, all rows."""
    pytest.importorskip("matplotlib")
    alone = [replace(ROWS[1], setting="A-d96"), replace(ROWS[2], setting="A-d96")]
    for name, rows in (
        ("all", ROWS),
        ("no peers", [r for r in ROWS if r.mode not in (FLASHINFER, COPY)]),
        ("not served", ROWS + alone),
        ("none", []),
    ):
        report.plot(report.lines(rows, 4e12), "title", tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").exists() == bool(rows)


# -- rows and the command line ----------------------------------------------------------------------------------------------


class FakeTimer:
    """Calls once, on the CPU."""

    device = CPU

    def temporary(self, call: Any) -> int:
        return 3 << 20

    def measure(self, call: Any, working_set: int, *, allow_eager: bool = False) -> Any:
        from timing import Timing

        call()
        return Timing(10.0, 5.0, 7, "graph")

    def copy_bandwidth(self) -> float:
        return 4.2e12

    def floor(self) -> float:
        return 2.0


def pretend_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run on the CPU whose clock stands still."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch, "device", lambda *args: CPU)
    monkeypatch.setattr(run, "Timer", lambda device: FakeTimer())


@pytest.mark.quick
def test_without_cuda_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run.main(["--quick"]) == 2
    assert "torch sees none on this machine" in capsys.readouterr().err


@pytest.mark.quick
@pytest.mark.parametrize(("argv", "said"), [(["--settings", "A,Z"], "no such settings: Z"), (["--modes", "int3"], "int3")])
def test_wrong_names_are_refused(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(argv) == run.CANNOT_RUN
    assert said in capsys.readouterr().err


@pytest.mark.quick
def test_none_is_always_measured() -> None:
    assert [b.mode for b in modes.backends_of(["int4,int8"], "none")] == ["none", "int4_per_token_head", "int8_per_token_head"]
    assert [b.mode for b in modes.backends_of(["int4,none"], "none")] == ["none", "int4_per_token_head"]
    everything = [b.mode for b in modes.backends_of(None, "none")]
    assert sorted(everything) == MODES and everything[0] == "none"


@pytest.mark.quick
@pytest.mark.usefixtures("fresh_registry")
def test_a_broken_mode_is_left_out_unless_it_is_asked_for(install: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    install("kvq-int5", "int5", "raise ImportError('no libkvq5.so here')")
    assert sorted(b.mode for b in modes.backends_of(None, "none")) == MODES
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("broken, left out: mode 'int5' from kvq-int5 1.0") and "ImportError: no libkvq5.so here" in line
    assert run.main(["--modes", "int5"]) == run.CANNOT_RUN
    assert "no libkvq5.so here" in capsys.readouterr().err


@pytest.mark.quick
def test_the_commit_is_that_of_kvq_s_own_repository(tmp_path: Path) -> None:
    def git(*command: str) -> str:
        identity = ("-c", "user.name=n", "-c", "user.email=e@example.org")
        done = subprocess.run(["git", "-C", str(tmp_path), *identity, *command], check=True, capture_output=True, text=True)
        return done.stdout.strip()

    if shutil.which("git") is None:
        pytest.skip("there is no git here")
    git("init", "--quiet")
    inside = tmp_path / "site-packages" / "kvq_core"
    inside.mkdir(parents=True)
    git("commit", "--quiet", "--allow-empty", "--message", "one")
    assert source_version(inside) == f"kvq {__version__}"
    assert source_version(tmp_path) == git("rev-parse", "--short", "HEAD")
    assert source_version(tmp_path / "nowhere") == f"kvq {__version__}"


@pytest.mark.quick
def test_an_error_stays_in_its_row() -> None:
    known = Row("decode", "none", "A", bytes=8)

    def build() -> Any:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried\nto")

    row = measured(FakeTimer(), known, build)  # type: ignore[arg-type]
    assert row.us is None
    assert row.error == "OutOfMemoryError: CUDA out of memory. Tried"
    assert brief(RuntimeError()) == "RuntimeError"


@pytest.mark.parametrize("op", ["decode", "prefill"])
def test_flashinfer_comes_first_and_may_fail(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its line is there where it imports, of the same size as ours, and its errors cost nobody else."""
    bench: Any = {"decode": bench_decode, "prefill": bench_prefill}[op]
    arguments: Any = ([get_backend("none")], [SMALL], FakeTimer())
    monkeypatch.setattr(baselines, "flashinfer", lambda: None)
    assert [row.mode for row in bench.run(*arguments)] == ["none"]
    with pytest.raises(ImportError, match="flashinfer"):
        getattr(baselines, op)(SMALL, CPU)
    monkeypatch.setattr(baselines, "flashinfer", object)
    peer, ours = bench.run(*arguments)
    assert (peer.op, peer.mode, peer.us) == (op, FLASHINFER, None) and peer.error
    assert (ours.op, ours.mode, ours.us, ours.error) == (op, "none", 10.0, "")
    assert (peer.bytes, peer.flops) == (ours.bytes, ours.flops) == (SMALL.bytes(get_backend("none")), SMALL.flops)
    assert [row.mode for row in bench.run(*arguments, peers=False)] == ["none"]
    other: Any = ([get_backend("none")], [replace(SMALL, head_size=96)], FakeTimer())
    assert [row.mode for row in bench.run(*other)] == ["none"]  # FlashInfer has no such kernels


def test_writes_are_held_against_flashinfer_and_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments: Any = ([get_backend("none")], [TINY], FakeTimer())
    for module, names in ((None, [COPY, "none"]), (object(), [FLASHINFER, COPY, "none"])):
        monkeypatch.setattr(baselines, "flashinfer", lambda module=module: module)
        rows = list(bench_write.run(*arguments))
        assert [row.mode for row in rows] == names and len({row.bytes for row in rows}) == 1
        assert [bool(row.error) for row in rows] == [name == FLASHINFER for name in names]
    assert [row.mode for row in bench_write.run(*arguments, peers=False)] == ["none"]


def test_a_fault_that_loses_the_device_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """What was measured before it is kept, the row says why, and nothing is tried after it."""
    pretend_gpu(monkeypatch)
    monkeypatch.setattr(gate, "PROBLEMS", gate.PROBLEMS[:1])
    monkeypatch.setattr(shapes, "DEFAULT", (("decode", (SMALL,)), ("write", (TINY, replace(TINY, name="never")))))
    lost: list[bool] = []

    def fault(backend: QuantKVBackend, setting: Write, timer: Any) -> Any:
        lost.append(True)
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(bench_write, "store", fault)
    monkeypatch.setattr("rows.is_lost", lambda device: bool(lost))
    assert run.main(["--modes", "int4", "--no-peers", "--out", str(tmp_path)]) == run.ROW_ERROR
    assert len(lost) == 1
    said = capsys.readouterr()
    assert "illegal memory access was encountered; no kernel runs on this device any more" in said.err and "never" not in said.err
    kept = report.load(tmp_path / "benchmarks.json")["rows"]
    assert [(row["op"], row["mode"], bool(row["error"])) for row in kept] == [
        ("decode", "none", False),
        ("decode", "int4_per_token_head", False),
        ("write", "none", True),
    ]


@pytest.mark.quick
def test_replays_fit_the_time() -> None:
    assert repeats_for(500.0) == 100
    assert (repeats_for(0.0), repeats_for(1e9)) == (MOST_REPEATS, LEAST_REPEATS)


def test_whole_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Every operation in two modes; then again with an error in one row, compared with the first."""
    pretend_gpu(monkeypatch)
    monkeypatch.setattr(gate, "PROBLEMS", gate.PROBLEMS[::3])
    plan = (
        ("decode", (SMALL,)),
        ("prefill", (Read("p", (40,), query_len=33, query_heads=4, kv_heads=2, head_size=64),)),
        ("write", (TINY,)),
    )
    monkeypatch.setattr(shapes, "DEFAULT", plan)
    assert run.main(["--modes", "int4", "--out", str(tmp_path)]) == run.OK
    printed = capsys.readouterr().out
    assert "NVIDIA H200" in printed and "100 % HBM = 4.30 TB/s, of an H200" in printed and "gate: green" in printed
    kept = report.load(tmp_path / "benchmarks.json")
    assert len(kept["rows"]) == 3 * 2 + 1
    assert {row["mode"] for row in kept["rows"]} == {"none", "int4_per_token_head", COPY}
    assert all(row["x_none"] == 1 for row in kept["rows"])
    assert (tmp_path / "benchmarks.png").stat().st_size > 1000

    def one_fails(backend: QuantKVBackend, setting: Write, timer: Any) -> Any:
        if backend.mode == "none":
            raise RuntimeError("does not compile")
        return lambda: None

    monkeypatch.setattr(bench_write, "store", one_fails)
    assert run.main(["--modes", "int4", "--out", str(tmp_path / "again"), "--compare", str(tmp_path / "benchmarks.json")]) == run.ROW_ERROR
    printed = capsys.readouterr().out
    assert "tiny, none: RuntimeError: does not compile" in printed
    assert "broke" in printed and "same" in printed


def test_a_run_that_is_cut_off_leaves_what_it_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend_gpu(monkeypatch)
    monkeypatch.setattr(gate, "PROBLEMS", gate.PROBLEMS[:1])
    monkeypatch.setattr(shapes, "DEFAULT", (("decode", (SMALL,)), ("write", (TINY,))))

    def cut_off(backend: QuantKVBackend, setting: Write, timer: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_write, "store", cut_off)
    with pytest.raises(KeyboardInterrupt):
        run.main(["--modes", "int4", "--no-peers", "--out", str(tmp_path)])
    kept = report.load(tmp_path / "benchmarks.json")
    assert {(row["op"], row["mode"]) for row in kept["rows"]} == {("decode", "none"), ("decode", "int4_per_token_head")}
