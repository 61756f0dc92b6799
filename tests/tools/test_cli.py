"""The command line as a whole, and its short commands: list, calc, doctor, bench. What they compute has tests of its own, and what they
print is compared with docs/command-line.md by test_docs.py."""

import csv
import io
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner

from command_line import kvq, refused, row
from kvq_core import PagedKVCache, list_backends
from kvq_core.cli import suite
from kvq_core.cli.app import app
from kvq_core.cli.list import FIRST_PARTY_BITS
from kvq_core.launch.families import Machine
from kvq_core.registry import FIRST_PARTY

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "tests" / "data" / "configs"
LLAMA = str(CONFIGS / "llama-3.1-8b.json")
MODES = sorted({entry.mode for entry in list_backends()})

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU and its torch path, on machines with a GPU, too."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def python(*arguments: str, stdout: Any = subprocess.PIPE) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, *arguments], stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=120)


def test_the_command_line_in_a_process_of_its_own() -> None:
    """A mistake, a reader that has seen enough, a full disk: one line on stderr, or none."""
    done = python("-m", "kvq_core", "calc", "/no/such.json", "--gpu-gib", "8")
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert done.stderr.startswith("Error: kvq calc: config: got /no/such.json: No such file or directory, need the config.json of a")
    read, write = os.pipe()
    os.close(read)
    with open(write, "w", closefd=False) as closed:
        done = python("-m", "kvq_core", "list", stdout=closed)
    assert (done.returncode, done.stderr) == (141, "")
    if Path("/dev/full").exists():
        with open("/dev/full", "w") as full:
            done = python("-m", "kvq_core", "list", stdout=full)
        assert done.returncode == 2 and "No space left" in done.stderr and "Traceback" not in done.stderr


def test_lists_and_help_import_nothing_heavy_and_a_missing_library_is_told_in_one_line() -> None:
    program = """
import sys
from kvq_core.cli import main
from kvq_core.cli.app import app
for arguments in (["list"], ["--help"], ["eval", "--help"], ["calc", "--help"], ["bench", "--help"]):
    try:
        app(arguments, standalone_mode=False)
    except SystemExit:
        pass
    heavy = {"torch", "triton", "numpy", "matplotlib", "kvq_int2", "kvq_int4", "kvq_int8fp8"} & set(sys.modules)
    assert not heavy, (arguments, heavy)
for name in [*sys.modules]:
    if name.startswith("kvq_core.cli"):
        del sys.modules[name]
sys.argv, sys.modules["tabulate"] = ["kvq", "eval", "--modes", "x"], None
main()
"""
    done = python("-c", program)
    assert (done.returncode, done.stderr) == (2, "kvq: the command line needs tabulate: pip install click tabulate tqdm\n")


@pytest.mark.parametrize("name", sorted(app.commands))
def test_every_command_has_help_with_examples(name: str) -> None:
    ran = kvq(name, "--help")
    assert ran.status == 0 and f"kvq {name}" in ran.out.partition("Examples:")[2] and f"\n  {name} " in kvq("--help").out
    for parameter in app.commands[name].params:
        assert not isinstance(parameter, click.Option) or parameter.hidden or parameter.help, parameter.name


def test_list_says_the_same_in_every_form_as_the_packages_do() -> None:
    lines, rows = kvq("list", "--json").json, list(csv.DictReader(io.StringIO(kvq("list", "--csv").out)))
    assert [line["mode"] for line in lines] == [line["mode"] for line in rows] and set(FIRST_PARTY_BITS) == set(FIRST_PARTY)
    for mode, bits in FIRST_PARTY_BITS.items():
        assert PagedKVCache(mode, num_blocks=1, num_kv_heads=1, head_size=128).bits_per_element == bits


@pytest.mark.usefixtures("fresh_registry")
def test_modes_that_are_broken_or_claimed_twice_are_told(install: Callable[..., Path]) -> None:
    """Without importing any but to check them."""
    install("kvq-int7", "int7", "raise ImportError('no libkvq7.so here')")
    install("alpha", "int5")
    install("beta", "int5")
    plain, checked = kvq("list"), kvq("list", "--check")
    assert (plain.status, checked.status) == (0, 1) and row(plain.out, "int7")[-1] == "installed"
    assert plain.out.count("duplicate: int5") == 2 and "alpha 1.0 and beta 1.0" in plain.out and "KVQ_BACKENDS=" in plain.out
    assert "broken: int7 from kvq-int7: " in checked.out and "ImportError: no libkvq7.so here" in checked.out


def test_a_mode_that_cannot_be_had_by_its_name_is_not_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVQ_BACKENDS", "int4=nope")
    for command in (["list"], ["list", "--check"], ["doctor"]):
        ran = kvq(*command)
        assert ran.status == 1 and "unavailable" in row(ran.out, "int4_per_token_head")
        assert "takes mode 'int4_per_token_head' from nope, which does not provide it; kvq-int4" in ran.out
        assert ("ok" if len(command) > 1 or command == ["doctor"] else "installed") in row(ran.out, "int8_per_token_head")
    assert kvq("list", "--check", "--mode", "kvq-int4:int4").status == 0
    assert "from nope, which does not provide it" in refused("list", "--mode", "int4")


def test_calc_as_json_and_csv_agree_with_and_without_a_gpu(tmp_path: Path) -> None:
    given = ("calc", str(CONFIGS / "qwen3-8b.json"), "--context", "32768", "--concurrency", "8", "--mode", "int4,none", "--mode", "int2")
    content = kvq(*given, "--gpu-gib", "80", "--json", "--plot", str(tmp_path / "fits.png")).json
    assert [line["mode"] for line in content["modes"]] == ["none", "int4_per_token_head", "int2_per_token_head"]
    assert content["weights_from"].startswith("counted") and content["modes"][1]["total_bytes"] == 8 * 32768 * 39168
    rows = list(csv.DictReader(io.StringIO(kvq(*given, "--gpu-gib", "80", "--csv").out)))
    assert [{k: str(v) for k, v in line.items()} for line in content["modes"]] == rows
    assert (tmp_path / "fits.png").read_bytes().startswith(b"\x89PNG")
    content = kvq(*given, "--json").json
    assert content["cache_bytes"] is None and "sequences" not in content["modes"][0]
    for gpus, heads in (("2", 4), ("8", 1), ("32", 1)):
        content = kvq("calc", LLAMA, "--gpus", gpus, "--mode", "none", "--json", "--gpu-gib", "80").json
        assert content["layers"][0]["num_kv_heads"] == heads and content["modes"][0]["bytes_per_token"] == 32 * heads * 2 * 128 * 2
        assert content["weight_bytes"] == -(-2 * 8_029_995_008 // int(gpus))


def test_calc_tells_what_does_not_fit_in_letters_that_the_terminal_has(tmp_path: Path) -> None:
    (path := tmp_path / "modèle.json").write_text(json.dumps({**json.loads(Path(LLAMA).read_text()), "head_dim": 512}))
    done = CliRunner(charset="ascii").invoke(app, ["calc", str(path), "--gpu-gib", "16", "--context", "200000"])
    assert done.exit_code == 0 and "mod\\xe8le.json" in done.stdout and not done.stderr and row(done.stdout, "int8_per_token_head")
    assert "int4_per_token_head does not fit: config: got head size 512, need a multiple of 4 up to 256" in done.stdout
    assert "note: nothing fits" in done.stdout and "attends over 131,072 tokens" in done.stdout
    assert "got head size 512" in refused("calc", str(path), "--gpu-gib", "200", "--mode", "int4")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["speed"], "No such command 'speed'"),
        (["list", "--fast"], "--fast"),
        (["list", "--csv", "--json"], "--json and --csv exclude each other"),
        (["calc", str(CONFIGS / "deepseek-v3.json")], "multi-head latent attention"),
        (["calc", LLAMA, "--block-size", "12"], "block_size: got 12, need a multiple of 8"),
        (["calc", LLAMA, "--context", "0"], "Invalid value for '--context'"),
        (["calc", LLAMA, "--mode", "int9"], "did you mean 'int8'?"),
        (["calc", LLAMA, "--mode", "kvq-int2:int4"], "takes mode 'int4_per_token_head' from kvq-int2, which does not provide it"),
        (["calc", LLAMA, "--sink-tokens", "4", "--residual-mode", "int9"], "Error: kvq calc: no installed package provides mode 'int9'"),
        (["calc", LLAMA, "--residual-mode", "int8"], "residual_mode: got int8_per_token_head, need none: without residual_length"),
        *((["calc", LLAMA, "--gpus", gpus], f"gpus: got {gpus} for layers of ") for gpus in ("3", "12", "64")),
        (["bench", "--quick"], "torch sees none here ("),
        (["bench", "--modes", "int9"], "int9"),
        (["bench", "--compare", "/no/such.json"], "'/no/such.json' does not exist"),
    ],
)
def test_bad_input_is_refused(arguments: list[str], said: str) -> None:
    assert said in refused(*arguments)


def test_doctor_tells_machine_switches_and_the_path_of_every_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVQ_DEBUG", "1")
    for name in ("cuda", "hip"):
        monkeypatch.setattr(torch.version, name, None)
    ran, told = kvq("doctor"), kvq("doctor", "--json").json
    assert ran.status == 0 and all(row(ran.out, mode)[3:6] == ["ok", "plain", "torch"] for mode in MODES)
    for name in ("GPU", "driver", "torch", "triton", "transformers", "vllm", "KVQ_DEBUG", "KVQ_BATCH_INVARIANT", "KVQ_BACKENDS"):
        assert f"\n{name} " in f"\n{ran.out}"
    assert f"none that torch can use: torch {torch.__version__} is a CPU build" in ran.out and told["switches"]["KVQ_DEBUG"] == "1"


@pytest.mark.parametrize(
    ("machine", "off", "reason"),
    [
        (("sm_90", True, False, True), 0, ""),
        (("sm_90", True, False, False), 5, "needs Triton 3.6 or 3.7 (here: sm_90, Triton "),
        (("sm_80", True, False, True), 4, "needs a GPU of architecture sm_90 (here: sm_80"),
    ],
)
def test_doctor_tells_which_kernels_are_off(machine: tuple[Any, ...], off: int, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvq_core.launch.dispatch.machine_of", lambda device: Machine(*machine))
    told = [line for line in kvq("doctor").out.splitlines() if ": off: " in line]
    assert len(told) == off and any(reason in line for line in told) == bool(off)


def test_bench_hands_on_options_and_status(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import run as benchmarks

    commands: list[list[str]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(suite.subprocess, "run", lambda command: commands.append(command) or SimpleNamespace(returncode=3))
    (old := tmp_path / "old.json").write_text("{}")
    given = ("--modes", "int4,int8", "--settings", "decode", "--out", "new", "--compare", str(old), "--no-peers", "--quick")
    assert kvq("bench", *given).status == 3
    ((interpreter, script, *handed_on),) = commands
    assert (interpreter, Path(script)) == (sys.executable, ROOT / "benchmarks" / "run.py")
    options = {"settings": "decode", "out": Path("new"), "compare": old, "no_peers": True, "quick": True}
    assert vars(benchmarks.arguments(handed_on)) == options | {"modes": ["int4", "int8"]}


def test_the_wheel_carries_the_command_with_benchmarks_and_plans(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(build, cwd=ROOT / "packages" / "kvq-core", check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as content:
        content.extractall(tmp_path)
    benchmarks, plans = ROOT / "benchmarks", ROOT / "packages" / "kvq-core" / "src" / "kvq_core" / "plan"
    for carried, source in (("bench", benchmarks), ("plan", plans)):
        there = {file.name for file in (tmp_path / "kvq_core" / carried).iterdir()}
        assert there >= {file.name for file in source.glob("*.*") if file.suffix in (".py", ".json")}
    assert "kvq = kvq_core.cli:main" in next(tmp_path.glob("*.dist-info/entry_points.txt")).read_text()
    done = python(str(tmp_path / "kvq_core" / "bench" / "run.py"), "--help")
    assert done.returncode == 0 and "--settings" in done.stdout, done.stderr
