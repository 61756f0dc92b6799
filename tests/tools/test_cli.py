"""The command line as a whole, and its short commands: list, calc, doctor, bench. What they compute has tests of its own."""

import csv
import io
import json
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
import torch

from command_line import Ran, kvq, refused, row
from kvq_core import PagedKVCache, environment, get_backend, list_backends
from kvq_core.cli import suite
from kvq_core.cli.app import app
from kvq_core.cli.doctor import _families
from kvq_core.cli.list import FIRST_PARTY_BITS
from kvq_core.registry import FIRST_PARTY

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "tests" / "data" / "configs"
LLAMA = str(CONFIGS / "llama-3.1-8b.json")
MODES = sorted({entry.mode for entry in list_backends()})

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def without_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU and its torch path, on machines with a GPU, too."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def columns_are_aligned(text: str) -> bool:
    """Whether every line of the (first) table keeps to the columns that its rule of dashes draws."""
    lines = text.splitlines()
    rule = next(i for i, line in enumerate(lines) if line.startswith("---"))
    gaps = [i for i in range(len(lines[rule])) if lines[rule][i] == " "]
    return all(line[i : i + 1] in ("", " ") for line in lines[rule + 1 : rule + 1 + len(MODES)] for i in gaps)


def python(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120)


def test_the_command_line_in_a_process_of_its_own() -> None:
    done = python("-m", "kvq_core", "calc", "/no/such.json", "--gpu-gib", "8")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        "Error: kvq calc: config: got /no/such.json: No such file or directory, need the config.json of a Hugging Face model, "
        "or the folder it lies in"
    ]
    project = tomllib.loads((ROOT / "packages" / "kvq-core" / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"kvq": "kvq_core.cli:main"}


def test_lists_and_help_import_nothing_heavy_and_a_missing_library_is_told_in_one_line() -> None:
    names = ["click", "tabulate", "tqdm"]
    done = python(
        "-c",
        f"""
import sys
from kvq_core.cli import main
from kvq_core.cli.app import app
for arguments in (["list"], ["--help"], ["eval", "--help"], ["calc", "--help"], ["bench", "--help"]):
    try:
        app(arguments, standalone_mode=False)
    except SystemExit:
        pass
    heavy = {{"torch", "triton", "numpy", "matplotlib", "kvq_int2", "kvq_int4", "kvq_int8fp8"}} & set(sys.modules)
    assert not heavy, (arguments, heavy)
sys.argv = ["kvq", "eval", "--modes", "x"]
for name in [*sys.modules]:
    if name.startswith("kvq_core.cli"):
        del sys.modules[name]
for name in {names}:
    before, sys.modules[name] = dict(sys.modules), None
    try:
        main()
    except SystemExit as ended:
        assert ended.code == 2
    sys.modules.clear(), sys.modules.update(before)
""",
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == [f"kvq: the command line needs {name}: pip install click tabulate tqdm" for name in names]


@pytest.mark.parametrize("name", sorted(app.commands))
def test_every_command_has_help_with_examples(name: str) -> None:
    ran = kvq(name, "--help")
    assert ran.status == 0 and f"kvq {name}" in ran.out.partition("Examples:")[2] and f"\n  {name} " in kvq("--help").out
    for parameter in app.commands[name].params:
        assert not isinstance(parameter, click.Option) or parameter.hidden or parameter.help, parameter.name


def test_unknown_commands_and_options_are_refused() -> None:
    assert "kvq" in kvq("--version").out
    assert "No such command 'speed'" in refused("speed")
    assert "--fast" in refused("list", "--fast")


def test_list_shows_every_mode() -> None:
    ran = kvq("list")
    assert ran.status == 0 and columns_are_aligned(ran.out)
    assert row(ran.out, "int4_per_token_head")[1:4] == ["int4", "4.25", "kvq-int4"]
    assert all(row(ran.out, mode)[-1] == "installed" for mode in MODES)
    lines, rows = kvq("list", "--json").json, list(csv.DictReader(io.StringIO(kvq("list", "--csv").out)))
    assert [line["mode"] for line in lines] == [line["mode"] for line in rows]
    int8 = next(line for line in lines if line["mode"] == "int8_per_token_head")
    assert (int8["bits_per_element"], int8["package"], int8["value"]) == (8.25, "kvq-int8fp8", "kvq_int8fp8.backend:Int8PerTokenHead")
    assert set(FIRST_PARTY_BITS) == set(FIRST_PARTY)
    for mode, bits in FIRST_PARTY_BITS.items():
        assert PagedKVCache(mode, num_blocks=1, num_kv_heads=1, head_size=128).bits_per_element == bits


@pytest.mark.usefixtures("fresh_registry")
def test_list_check_runs_every_mode_and_tells_broken_ones(install: Callable[..., Path]) -> None:
    lines = {line["mode"]: line for line in kvq("list", "--check", "--json").json}
    assert all(lines[mode]["status"] == "ok" for mode in MODES)
    for mode, error in (("none", 0), ("int4_per_token_head", 0.0101), ("int8_per_token_head", 0.000042)):
        assert lines[mode]["relative_mse"] == pytest.approx(error, rel=0.15)
    install("kvq-int7", "int7", "raise ImportError('no libkvq7.so here')")
    plain = kvq("list")
    assert plain.status == 0 and row(plain.out, "int7")[-1] == "installed" and "kvq_int7" not in sys.modules
    for command in (("list", "--check"), ("doctor",)):
        ran = kvq(*command)
        assert ran.status == 1 and "broken: int7 from kvq-int7: " in ran.out and "ImportError: no libkvq7.so here" in ran.out


@pytest.mark.usefixtures("fresh_registry")
def test_a_mode_claimed_twice_is_told(install: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    install("alpha", "int7")
    install("beta", "int7")
    ran = kvq("list")
    assert ran.out.count("duplicate: int7") == 2 and "alpha 1.0 and beta 1.0" in ran.out and "KVQ_BACKENDS=" in ran.out
    monkeypatch.setenv("KVQ_BACKENDS", "int7=beta")
    assert "duplicate" not in kvq("list").out and not {"alpha", "beta"} & set(sys.modules)


def calc(name: str, *arguments: str) -> Ran:
    return kvq("calc", str(CONFIGS / f"{name}.json"), *arguments)


def test_calc_as_json_and_csv_agree(tmp_path: Path) -> None:
    given = ("--gpu-gib", "80", "--context", "32768", "--concurrency", "8", "--mode", "int4,none", "--mode", "int2")
    content = calc("qwen3-8b", *given, "--json", "--plot", str(tmp_path / "fits.png")).json
    assert [line["mode"] for line in content["modes"]] == ["none", "int4_per_token_head", "int2_per_token_head"]
    assert content["weights_from"].startswith("counted") and content["layers"][0]["head_size"] == 128
    rows = list(csv.DictReader(io.StringIO(calc("qwen3-8b", *given, "--csv").out)))
    assert [{k: str(v) for k, v in line.items()} for line in content["modes"]] == rows
    assert content["modes"][1]["total_bytes"] == 8 * 32768 * 39168
    assert (tmp_path / "fits.png").read_bytes().startswith(b"\x89PNG") and (tmp_path / "fits.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("qwen3-next-80b-a3b", ["--gpu-gib", "180"], "36 of 48 layers keep no keys"),
        ("gemma-3-4b", ["--gpu-gib", "24"], "29 x 4 kv heads of 256, window 1,024; 5 x 4 kv heads of 256"),
        ("qwen3-8b", ["--gpu-gib", "80", "--context", "100000"], "attends over 40,960 tokens"),
        ("mistral-7b-v0.1", ["--gpu-gib", "24"], "no end"),
        ("mistral-7b-v0.1", ["--gpu-gib", "24", "--ignore-windows"], "not: no end"),
        ("llama-3.1-8b", ["--gpu-gib", "16", "--mode", "int4"], "more than 16.6 do"),
        ("gpt-oss-20b", ["--mode", "int4"], "not: weights"),  # which are not counted
    ],
)
def test_calc_notes_what_matters_about_a_model(name: str, arguments: list[str], said: str) -> None:
    ran = calc(name, *arguments)
    assert ran.status == 0 and (said.removeprefix("not: ") in ran.out) != said.startswith("not: ")


def test_calc_tells_bytes_without_a_gpu_and_beside_weights_that_do_not_fit() -> None:
    assert row(calc("llama-3.1-8b", "--gpu-gib", "16", "--mode", "int4").out, "int4_per_token_head")[1] == "34,816"
    content = calc("llama-3.1-8b", "--json").json
    assert content["cache_bytes"] is None and "sequences" not in content["modes"][0]


def test_calc_on_several_gpus() -> None:
    for gpus, heads in (("2", 4), ("8", 1), ("32", 1)):
        content = calc("llama-3.1-8b", "--gpus", gpus, "--mode", "none", "--json", "--gpu-gib", "80").json
        assert content["layers"][0]["num_kv_heads"] == heads and content["modes"][0]["bytes_per_token"] == 32 * heads * 2 * 128 * 2
        assert content["weight_bytes"] == -(-2 * 8_029_995_008 // int(gpus))
    for gpus in ("3", "12", "64"):
        assert f"gpus: got {gpus} for layers of " in refused("calc", LLAMA, "--gpus", gpus)


def changed(tmp_path: Path, **fields: Any) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(Path(LLAMA).read_text()), **fields}))
    return str(path)


def test_modes_that_do_not_fit_are_told_beside_those_that_do(tmp_path: Path) -> None:
    wide = changed(tmp_path, head_dim=512)
    ran = kvq("calc", wide, "--gpu-gib", "200")
    assert ran.status == 0 and row(ran.out, "int8_per_token_head")
    assert "int4_per_token_head does not fit: config: got head size 512, need a multiple of 4 up to 256" in ran.out
    assert "got head size 512" in refused("calc", wide, "--gpu-gib", "200", "--mode", "int4")


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("deepseek-v3", [], "multi-head latent attention"),
        ("gpt-oss-20b", [], "(--weights-gib"),
        ("llama-3.1-8b", ["--block-size", "12"], "block_size: got 12, need a multiple of 8"),
        ("llama-3.1-8b", ["--context", "0"], "Invalid value for '--context'"),
        ("llama-3.1-8b", ["--mode", "int9"], "did you mean 'int8'?"),
        ("llama-3.1-8b", ["--sink-tokens", "4", "--residual-mode", "int9"], "Error: kvq calc: no installed package provides mode 'int9'"),
        ("llama-3.1-8b", ["--residual-mode", "int8"], "residual_mode: got int8_per_token_head, need none: without residual_length"),
        ("llama-3.1-8b", ["--mode", "kvq-int2:int4"], "takes mode 'int4_per_token_head' from kvq-int2, which does not provide it"),
    ],
)
def test_calc_refuses_bad_input(name: str, arguments: list[str], said: str) -> None:
    assert said in refused("calc", str(CONFIGS / f"{name}.json"), "--gpu-gib", "80", *arguments)


def test_calc_refuses_bad_files(tmp_path: Path) -> None:
    assert "need the config.json of a decoder" in refused("calc", changed(tmp_path, num_hidden_layers=None), "--gpu-gib", "80")
    ran = kvq("calc", LLAMA, "--gpu-gib", "80", "--plot", "/dev/null/plot.png")  # after the table
    assert ran.status == 2 and "Error: " in ran.err and "/dev/null/plot.png" in ran.err


def test_doctor_tells_the_path_of_every_mode() -> None:
    ran = kvq("doctor")
    assert ran.status == 0 and all(row(ran.out, mode)[3:6] == ["ok", "plain", "torch"] for mode in MODES)
    for name in ("GPU", "driver", "torch", "triton", "transformers", "vllm", "KVQ_DEBUG", "KVQ_BATCH_INVARIANT", "KVQ_BACKENDS"):
        assert f"\n{name} " in f"\n{ran.out}"
    assert "none that torch can use: " in ran.out
    assert "\nsm_90 prefill kernels (prefill): off: needs a GPU of architecture sm_90" in ran.out


@pytest.mark.gpu
def test_doctor_runs_the_kernels_on_a_gpu() -> None:
    content = kvq("doctor", "--json").json
    assert torch.cuda.get_device_name() in content["machine"]["GPU"] and content["machine"]["driver"] != "none"
    assert {(mode["status"], mode["path"]) for mode in content["modes"]} == {("ok", "Triton kernels, compiled")}


@pytest.mark.parametrize(
    ("machine", "off", "reason"),
    [
        (("sm_90", True, False, True), 0, ""),
        (("sm_90", True, False, False), 4, "needs Triton 3.6 or 3.7 (here: sm_90, Triton "),
        (("sm_80", True, False, True), 3, "needs a GPU of architecture sm_90 (here: sm_80"),
        (("gfx942", False, False, True), 4, "NVIDIA's PTX"),
        (("", False, False, True), 5, "a GPU that torch can use"),
        (("", False, True, True), 4, "compiled kernels, not TRITON_INTERPRET"),
    ],
)
def test_doctor_tells_which_kernels_are_off_from_what_dispatch_asks(
    machine: tuple[str, bool, bool, bool], off: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvq_core.launch import dispatch, families

    monkeypatch.setattr(dispatch, "machine_of", lambda device: families.Machine(*machine))
    told = {family["family"]: family["why"] for family in _families(torch.device("cpu")) if not family["on"]}
    assert len(told) == off and any(reason in why for why in told.values()) == bool(off)
    rows = SimpleNamespace(key=torch.zeros(1, 1, 64, dtype=torch.half), value=torch.zeros(1, 1, 64, dtype=torch.half))
    assert (dispatch.sm90_write(get_backend("int4").kernels(), rows) is not None) == (families.STORE_MMA.name not in told)


def test_doctor_says_why_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for cuda, driver, said in (
        (None, None, "is a CPU build"),
        ("13.0", None, "no NVIDIA driver answers (nvidia-smi)"),
        ("13.0", "535.1", "(CUDA 13.0) cannot use driver 535.1"),
    ):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(environment, "nvidia_driver", lambda driver=driver: driver)
        assert environment.why_no_gpu().endswith(said)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert environment.why_no_gpu() == "CUDA_VISIBLE_DEVICES is ''"
    assert environment.first_line("kvq-no-such-program") is None and environment.installed("kvq-no-such-package") is None


def test_doctor_says_what_the_switches_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVQ_DEBUG", "1")
    switches = kvq("doctor", "--json").json["switches"]
    assert switches["KVQ_DEBUG"] == "1" and switches["KVQ_BATCH_INVARIANT"] is None
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    route = environment.path_of(get_backend("int4"), torch.device("cpu"))
    assert (route.name, route.why) == ("Triton kernels, interpreted", "TRITON_INTERPRET=1")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A machine that seems to have a GPU: the commands that would run there, each ending with status 3."""
    commands: list[list[str]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(suite.subprocess, "run", lambda command: commands.append(command) or SimpleNamespace(returncode=3))
    return commands


def test_bench_needs_a_gpu() -> None:
    said = refused("bench", "--quick")
    assert "torch sees none here (" in said and "kvq eval" in said


def test_bench_refuses_before_anything_runs(started: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert kvq("bench", "--modes", "int9").status == 2
    assert "'/no/such.json' does not exist" in refused("bench", "--compare", "/no/such.json")
    monkeypatch.setattr(suite, "__file__", str(tmp_path / "kvq_core" / "cli" / "suite.py"))
    assert "the benchmark suite is not beside" in refused("bench") and not started


def test_bench_hands_on_options_and_status(started: list[list[str]], tmp_path: Path) -> None:
    import run as benchmarks

    old = tmp_path / "old.json"
    old.write_text("{}")
    given = ("--modes", "int4,int8", "--settings", "decode", "--out", "new", "--compare", str(old), "--no-peers", "--quick")
    assert kvq("bench", *given).status == 3
    ((interpreter, script, *handed_on),) = started
    assert (interpreter, Path(script)) == (sys.executable, ROOT / "benchmarks" / "run.py")
    options = benchmarks.arguments(handed_on)
    assert (options.modes, options.settings, options.quick, options.no_peers) == (["int4", "int8"], "decode", True, True)
    assert (options.out, options.compare) == (Path("new"), old)


def test_the_wheel_carries_benchmarks_and_plans(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(build, cwd=ROOT / "packages" / "kvq-core", check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.stat().st_size < 1_000_000
    with zipfile.ZipFile(wheel) as content:
        content.extractall(tmp_path)
    carried, plans = tmp_path / "kvq_core" / "bench", ROOT / "packages" / "kvq-core" / "src" / "kvq_core" / "plan"
    assert {file.name for file in carried.glob("*.py")} == {file.name for file in (ROOT / "benchmarks").glob("*.py")}
    assert {file.name for file in (tmp_path / "kvq_core" / "plan").iterdir()} >= {file.name for file in plans.glob("*.*")}
    done = python(str(carried / "run.py"), "--help")
    assert done.returncode == 0 and "--settings" in done.stdout, done.stderr
