"""The command line as a whole, and its short commands: list, calc, doctor, bench, tune. What they compute has tests of its own, and what
they print is compared with docs/command-line.md by test_docs.py."""

import csv
import io
import json
import os
import random
import re
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
import torch

import run as benchmarks
import tune
from command_line import CODE, CONFIGS, LLAMA, MODES, kvq, refused, row
from kvq_core import PagedKVCache, capacity
from kvq_core.cli import suite
from kvq_core.cli.app import app
from kvq_core.cli.list import FIRST_PARTY_BITS
from kvq_core.launch.families import Machine
from kvq_core.registry import FIRST_PARTY

ROOT = Path(__file__).parents[2]

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


def test_every_command_and_option_has_help_with_examples() -> None:
    for name, command in app.commands.items():
        ran = kvq(name, "--help")
        assert ran.status == 0 and f"kvq {name}" in ran.out.partition("Examples:")[2] and f"\n  {name} " in kvq("--help").out
        assert all(option.hidden or option.help for option in command.params if isinstance(option, click.Option))


def test_the_wheel_carries_the_command_with_benchmarks_and_plans(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(build, cwd=ROOT / "packages" / "kvq-core", check=True, capture_output=True, timeout=120)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as content:
        content.extractall(tmp_path)
    for carried, source in (("bench", ROOT / "benchmarks"), ("plan", ROOT / "packages" / "kvq-core" / "src" / "kvq_core" / "plan")):
        there = {file.name for file in (tmp_path / "kvq_core" / carried).iterdir()}
        assert there >= {file.name for file in source.glob("*.*") if file.suffix in (".py", ".json")}
    assert "kvq = kvq_core.cli:main" in next(tmp_path.glob("*.dist-info/entry_points.txt")).read_text()
    done = python(str(tmp_path / "kvq_core" / "bench" / "run.py"), "--help")
    assert done.returncode == 0 and "--settings" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["speed"], "No such command 'speed'"),
        (["list", "--fast"], "--fast"),
        (["list", "--csv", "--json"], "--json and --csv exclude each other"),
        (["calc", CONFIGS / "deepseek-v3.json"], "multi-head latent attention"),
        (["calc", LLAMA, "--block-size", "12"], "block_size: got 12, need a multiple of 8"),
        (["calc", LLAMA, "--context", "0"], "Invalid value for '--context'"),
        (["calc", LLAMA, "--gpu-gib", "nan"], "is not a number"),
        (["calc", LLAMA, "--mode", "int9"], "did you mean 'int8'?"),
        (["calc", LLAMA, "--mode", "kvq-int2:int4"], "takes mode 'int4_per_token_head' from kvq-int2, which does not provide it"),
        (["calc", LLAMA, "--sink-tokens", "4", "--residual-mode", "int9"], "Error: kvq calc: no installed package provides mode 'int9'"),
        (["calc", LLAMA, "--weights-gib", "10", "--reserve-gib", "5"], "--weights-gib, --reserve-gib: got no --gpu-gib, need"),
        (["calc", LLAMA, "--utilization", "0.9", "--json"], "--utilization: got no --gpu-gib, need --gpu-gib, too"),
        (["calc", LLAMA, "--mode", "none", "--sink-tokens", "4"], "--sink-tokens: got none, need a mode whose rows are less exact"),
        (["calc", LLAMA, "--residual-mode", "int8"], "residual_mode: got int8_per_token_head, need none: without residual_length"),
        *((["calc", LLAMA, "--gpus", gpus], f"gpus: got {gpus} for layers of ") for gpus in ("3", "12", "64")),
        (["calc", LLAMA, "--gpus", "3"], "need a divisor of the query heads that divides the kv heads, too, or is a multiple of them"),
        (["calc", {"num_hidden_layers": 10**9, "attn_layer_period": 2}], "num_hidden_layers: got 1000000000, need at most 4,096"),
        (["calc", {"num_attention_heads": 30}], "num_key_value_heads: got 8, need a divisor of num_attention_heads, 30"),
        (["calc", {"n_layer": 12}], "num_hidden_layers: got num_hidden_layers 32 and n_layer 12, need one value"),
        (["calc", {"head_dim": "128"}], "head_dim: got '128'"),
        (["calc", {"attn_layer_indices": [3, 32]}], "attn_layer_indices: got [3, 32], need indices of layers, 0 to 31"),
        (["calc", {"num_kv_shared_layers": 33}], "num_kv_shared_layers: got 33, need at most the 32 layers"),
        (["calc", {"num_hidden_layers": None}], "need the config.json of a decoder"),
        *((["calc", content], "config: got ") for content in (b"", b"null", b"NaN", b'{"a": "\\ud8', bytes(range(256)), b"[" * 100_000)),
        (["calc", b'{"num_hidden_layers": ' + b"9" * 10_000 + b"}"], "config: got "),
        *((["calc", place], "Error: kvq calc: ") for place in ("/", "/dev/null", "/dev/zero", "a" * 5000, "\udcff.json", "\0.json", "")),
        (["bench", "--quick"], "torch sees none here ("),
        (["bench", "--modes", "int9"], "int9"),
        (["bench", "--compare", "/no/such.json"], "'/no/such.json' does not exist"),
        (["tune", "--quick"], "kvq tune --dry-run"),
        (["tune", "--modes", "int9"], "int9"),
        (["tune", "--dry-run", "--out", "new", "--processes", "3"], "--out, --processes: got --dry-run beside it, need one or the other"),
        *(
            (["list", "--mode", name], f"mode: got {name!r}, need one mode, or that of K")
            for name in ("int4/", "/int4", "int4/int2/int8", "/")
        ),
        *((["list", "--modes", names], f"--mode: got {names!r}, need names of modes") for names in ("", " ", "int4,,int8", "int4,")),
        (["list", "--mode", "INT4"], "did you mean 'int4'?"),
        *(
            ([*given, "/no/such/file"], "need a file in a folder that exists")
            for given in (["calc", LLAMA, "--plot"], ["eval", "--resume"])
        ),
    ],
)
def test_bad_input_is_refused(arguments: list[Any], said: str) -> None:
    assert said in refused(*arguments)


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


@pytest.mark.usefixtures("fresh_registry")
def test_what_is_wrong_is_told_beside_every_form(install: Callable[..., Path], small_weights: Path, tmp_path: Path) -> None:
    """CSV has no place for it but standard error."""
    install("kvq-int7", "int7", "raise ImportError('no libkvq7.so here')")
    (text := tmp_path / "text.txt").write_text(CODE)
    given = ("eval", "--model", small_weights, "--text", text, "--length", "60", "--documents", "1", "--device", "cpu")
    for arguments in (("calc", {"head_dim": 512}), given):
        table, comma, content = (kvq(*arguments, *form) for form in ((), ("--csv",), ("--json",)))
        assert (table.status, comma.status, content.status) == (1, 1, 1)
        assert all("ImportError: no libkvq7.so here" in told for told in (table.out, comma.err, content.out))
        assert not any(line.startswith(("broken", "note")) for line in comma.out.splitlines())
        if arguments is not given:
            assert all("int4_per_token_head does not fit" in told for told in (table.out, comma.err, content.out)) and not content.err


def test_notes_and_wrong_switches_are_told_beside_every_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = ("calc", LLAMA, "--mode", "none", "--context", "200000", "--gpu-gib", "8")
    told = [kvq(*long).out, kvq(*long, "--csv").err, *["\n".join(kvq(*long, "--json").json["notes"])]]
    assert all("nothing fits: " in said and "attends over 131,072 tokens" in said for said in told)
    (table := tmp_path / "sm_75.json").write_text("{")
    monkeypatch.setenv("KVQ_DEBUG", "maybe")
    monkeypatch.setenv("KVQ_PLANS", str(table.parent))
    ran = kvq("doctor", "--csv")
    assert ran.status == 1 and "wrong: KVQ_DEBUG: got 'maybe'" in ran.err and f"broken: {table}: " in ran.err
    assert len(list(csv.DictReader(io.StringIO(ran.out)))) == len(MODES)
    content = kvq("doctor", "--json").json
    assert "maybe" in content["wrong_switches"]["KVQ_DEBUG"] and str(table) in content["wrong_plans"]


@pytest.mark.usefixtures("fresh_registry")
@pytest.mark.parametrize("mode", ["int4", "k8v4", "int-7"])
def test_a_mode_that_no_name_leads_to_is_told(mode: str, install: Callable[..., Path]) -> None:
    """Of the first two, the name is another mode's."""
    install("rival", mode)
    for command in (["list"], ["list", "--check"], ["doctor"]):
        ran = kvq(*command)
        assert (
            ran.status == 1 and row(ran.out, mode)[-1] == "broken" and f"its entry point is named {mode!r}, need letters, digits" in ran.out
        )


@pytest.mark.usefixtures("fresh_registry")
def test_which_of_two_providers_is_chosen_is_told(install: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    install("alpha", "int5")
    install("beta", "int5")
    monkeypatch.setenv("KVQ_BACKENDS", "int5=beta")
    ran = kvq("list", "--json")
    status = {line["package"]: (line["status"], line["error"]) for line in ran.json if line["mode"] == "int5"}
    assert ran.status == 0
    assert status == {"alpha": ("not chosen", "KVQ_BACKENDS takes the mode from beta"), "beta": ("installed", "")}


def test_a_mode_that_cannot_be_had_by_its_name_is_not_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVQ_BACKENDS", "int4=nope")
    for command, others in ((["list"], "installed"), (["list", "--check"], "ok"), (["doctor"], "ok")):
        ran = kvq(*command)
        assert ran.status == 1 and "unavailable" in row(ran.out, "int4_per_token_head") and others in row(ran.out, "int8_per_token_head")
        assert "takes mode 'int4_per_token_head' from nope, which does not provide it; kvq-int4" in ran.out
    assert kvq("list", "--check", "--mode", "kvq-int4:int4").status == 0
    assert "from nope, which does not provide it" in refused("list", "--mode", "int4")


def test_doctor_reads_tables_for_other_gpus_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVQ_PLANS", str(tmp_path))
    assert kvq("doctor").status == 0
    (tmp_path / "sm_75.json").write_text("{")
    done = kvq("doctor")
    assert done.status == 1 and f"kvq's generic; broken: {tmp_path / 'sm_75.json'}: " in done.out


def test_doctor_tells_machine_switches_and_the_path_of_every_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVQ_DEBUG", "1")
    for name in ("cuda", "hip"):
        monkeypatch.setattr(torch.version, name, None)
    ran, told = kvq("doctor"), kvq("doctor", "--json").json
    assert ran.status == 0 and all(row(ran.out, mode)[3:6] == ["ok", "plain", "torch"] for mode in MODES)
    for name in ("GPU", "driver", "torch", "triton", "transformers", "KVQ_DEBUG", "KVQ_BATCH_INVARIANT", "KVQ_BACKENDS"):
        assert f"\n{name} " in f"\n{ran.out}"
    assert f"\n{ran.out}".casefold().count("\nvllm ") == 1  # by kvq-vllm, or else by kvq
    assert f"none that torch can use: torch {torch.__version__} is a CPU build" in ran.out and told["switches"]["KVQ_DEBUG"] == "1"


@pytest.mark.parametrize(
    ("machine", "off", "reason"),
    [
        (("sm_90", True, False, True), 0, ""),
        (("sm_90", True, False, False), 5, "needs Triton 3.6 to 3.9 (here: sm_90, Triton "),
        (("sm_80", True, False, True), 4, "needs a GPU of architecture sm_90 (here: sm_80"),
    ],
)
def test_doctor_tells_which_kernels_are_off(machine: tuple[Any, ...], off: int, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvq_core.launch.dispatch.machine_of", lambda device: Machine(*machine))
    told = [line for line in kvq("doctor").out.splitlines() if ": off: " in line]
    assert len(told) == off and any(reason in line for line in told) == bool(off)


def test_calc_as_json_and_csv_agree_with_and_without_a_gpu(tmp_path: Path) -> None:
    given = ("calc", CONFIGS / "qwen3-8b.json", "--context", "32768", "--concurrency", "8", "--mode", "int4,none", "--mode", "int2")
    content = kvq(*given, "--gpu-gib", "80", "--json", "--plot", tmp_path / "fits.png").json
    assert [line["mode"] for line in content["modes"]] == ["none", "int4_per_token_head", "int2_per_token_head"]
    assert content["weights_from"].startswith("counted") and content["modes"][1]["total_bytes"] == 8 * 32768 * 39168
    rows = list(csv.DictReader(io.StringIO(kvq(*given, "--gpu-gib", "80", "--csv").out)))
    assert [{k: str(v) for k, v in line.items()} for line in content["modes"]] == rows
    assert (tmp_path / "fits.png").read_bytes().startswith(b"\x89PNG")
    content = kvq(*given, "--json").json
    assert content["cache_bytes"] is None and "sequences" not in content["modes"][0]
    for gpus, heads in ((2, 4), (8, 1), (32, 1)):
        content = kvq("calc", LLAMA, "--gpus", gpus, "--mode", "none", "--json", "--gpu-gib", "80").json
        assert content["layers"][0]["num_kv_heads"] == heads and content["modes"][0]["bytes_per_token"] == 32 * heads * 2 * 128 * 2
        assert content["weight_bytes"] == -(-2 * 8_029_995_008 // gpus)


def test_calc_tells_what_does_not_fit_in_letters_that_the_terminal_has(tmp_path: Path) -> None:
    (path := tmp_path / "modèle.json").write_text(json.dumps({**json.loads(LLAMA.read_text()), "head_dim": 512}))
    ran = kvq("calc", path, "--gpu-gib", "16", "--context", "200000", charset="ascii")
    assert ran.status == 0 and "mod\\xe8le.json" in ran.out and not ran.err and row(ran.out, "int8_per_token_head")
    assert "int4_per_token_head does not fit: config: got head size 512, need a multiple of 4 up to 256" in ran.out
    assert "note: nothing fits" in ran.out and "attends over 131,072 tokens" in ran.out
    assert "got head size 512" in refused("calc", path, "--gpu-gib", "200", "--mode", "int4")


@pytest.mark.parametrize(("exact", "noted"), [(("--residual-length", 1000), False), (("--residual-length", 997, "--sink-tokens", 4), True)])
def test_calc_notes_a_window_that_is_longer_than_the_context(exact: tuple[object, ...], noted: bool) -> None:
    given = ("calc", LLAMA, "--context", 1000, "--mode", "int4", *exact)
    ran, notes = kvq(*given), kvq(*given, "--json").json["notes"]
    told = "the window of 1,001 exact tokens is longer than the context of 1,000: a cache sets memory aside for all of them"
    assert ran.status == 0 and (f"note: {told}" in ran.out.splitlines()) == (told in notes) == noted


FIELDS = sorted({name for file in Path(capacity.__file__).parent.glob("*.py") for name in re.findall(r'"([a-z_]+)"', file.read_text())})
"""What the calculator looks for, and more."""
JUNK = [0, -1, 1, 2, 3, 1.5, float("nan"), float("inf"), True, False, None, "", "x", "128", [], [1], ["full_attention"], {}, {"a": 1}]
JUNK += [10**9, 10**30, 2**63, [True] * 3, ["mamba"] * 32, "M*", "LG", [[[]]], {"0": {"head_dim": 3}}, {"9" * 50: {}}, "\ud800"]
GIVEN = ["0", "1", "8", "24", "0.5", "-1", "nan", "inf", "1e-300", "1e308", "1048576", str(10**9), str(2**40), "9" * 5000]
GIVEN += ["", "x", ",", "a:b:c", "\udcff", "int4", "none,int2", "int9", "float32"]


def test_calc_answers_or_refuses_any_config_and_options() -> None:
    """With an exit status of 0, 1 or 2, no traceback, in bounded time."""
    rng, answered = random.Random(0), 0
    bases = [json.loads(path.read_text()) for path in sorted(CONFIGS.glob("*.json"))]
    options = [option.opts[0] for option in app.commands["calc"].params if getattr(option, "is_flag", None) is False]
    options.remove("--plot")
    for _ in range(300):
        config = json.loads(json.dumps(rng.choice(bases)))
        for _ in range(rng.randrange(4)):
            nested = config.get("text_config")
            target = nested if isinstance(nested, dict) and rng.random() < 0.5 else config
            target[rng.choice(FIELDS)] = rng.choice(JUNK)
        text = json.dumps(config).encode()
        text = text[: rng.randrange(len(text))] if rng.random() < 0.05 else text
        given = [part for name in options if rng.random() < 0.07 for part in (name, rng.choice(GIVEN))] + [
            "--gpu-gib",
            "80",
        ] * rng.randrange(2)
        begin, ran = time.perf_counter(), kvq("calc", text, *given, "--json")
        assert time.perf_counter() - begin < 10 and ran.status in (0, 1, 2) and (ran.status != 2 or "Error: " in ran.err), (text, given)
        answered += ran.status == 0
        assert ran.status or all(mode["bytes_per_token"] > 0 for mode in ran.json["modes"])
    assert answered >= 20


@pytest.mark.parametrize(
    ("command", "script", "given"),
    [
        ("bench", benchmarks, f"--modes int4,int8 --settings decode --out new --compare {LLAMA} --no-peers"),
        ("bench", benchmarks, "--quick"),
        ("tune", tune, "--quick --modes int4,none --kinds write --out new --processes 3"),
        ("tune", tune, "--dry-run"),
    ],
)
def test_bench_and_tune_hand_on_options_and_status(command: str, script: Any, given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: "--dry-run" not in given)
    monkeypatch.setattr(suite.subprocess, "run", lambda command: commands.append(command) or SimpleNamespace(returncode=3))
    assert kvq(command, *given.split()).status == 3
    ((interpreter, path, *handed_on),) = commands
    assert (interpreter, Path(path)) == (sys.executable, Path(script.__file__))
    named = ["--name", f"kvq {command}"]
    assert script.arguments(handed_on) == script.arguments([*given.replace(",", " ").split(), *named])
