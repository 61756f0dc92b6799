"""The command line as a whole, and its short commands: list, calc, doctor. What they compute has tests of its own."""

import csv
import io
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner

from kvq_core import PagedKVCache, get_backend, list_backends
from kvq_core.cli.app import app
from kvq_core.cli.doctor import _families
from kvq_core.cli.list import FIRST_PARTY_BITS
from kvq_core.registry import FIRST_PARTY

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
MODES = sorted({entry.mode for entry in list_backends()})

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def plain_torch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU and its torch path, on machines with a GPU, too."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("KVQ_BACKENDS", raising=False)


@dataclass(frozen=True)
class Ran:
    status: int
    out: str
    err: str


def kvq(*arguments: str) -> Ran:
    """Run the command line in this process. Anything that would be a traceback is raised here."""
    done = CliRunner().invoke(app, list(arguments), prog_name="kvq")
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return Ran(done.exit_code, done.stdout, done.stderr)


def refused(*arguments: str) -> str:
    """What is said of bad input: exit status 2, nothing on stdout, no traceback."""
    ran = kvq(*arguments)
    assert (ran.status, ran.out) == (2, ""), ran
    assert "Error: " in ran.err and "Traceback" not in ran.err
    return ran.err


def row(text: str, mode: str) -> list[str]:
    return next(line for line in text.splitlines() if line.startswith(f"{mode} ")).split()


def columns_are_aligned(text: str) -> bool:
    """Whether every line of the (first) table keeps to the columns that its rule of dashes draws."""
    lines = text.splitlines()
    rule = next(i for i, line in enumerate(lines) if line.startswith("---"))
    gaps = [i for i in range(len(lines[rule])) if lines[rule][i] == " "]
    body = [line for line in lines[rule + 1 : rule + 1 + len(MODES)]]
    return all(line[i : i + 1] in ("", " ") for line in body for i in gaps)


# -- the whole --------------------------------------------------------------------------------------------------------------


def test_python_m_runs_the_command_line() -> None:
    """A process of its own, from a folder of its own, as a user starts it."""
    command = [sys.executable, "-m", "kvq_core"]
    done = subprocess.run([*command, "list", "--json"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert {line["mode"] for line in json.loads(done.stdout)} >= set(MODES)
    done = subprocess.run([*command, "calc", "/no/such.json", "--gpu-gib", "8"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        "Error: kvq calc: config: got /no/such.json: No such file or directory, need the config.json of a Hugging Face model, "
        "or the folder it lies in"
    ]


@pytest.mark.parametrize("arguments", [["list"], ["--help"], ["eval", "--help"], ["calc", "--help"], ["bench", "--help"]])
def test_what_imports_nothing_heavy(arguments: list[str]) -> None:
    program = f"""
import sys
from kvq_core.cli.app import app
app({arguments!r}, standalone_mode=False)
heavy = {{"torch", "triton", "numpy", "matplotlib", "kvq_int2", "kvq_int4", "kvq_int8fp8"}} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["click", "tabulate", "tqdm"])
def test_a_missing_library_is_told_in_one_line(name: str) -> None:
    program = f"import sys; sys.modules[{name!r}] = None; from kvq_core.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", program, "eval", "--modes", "x"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line == f"kvq: the command line needs {name}: pip install click tabulate tqdm"


def test_the_console_script_is_the_command_line() -> None:
    import tomllib

    file = Path(__file__).parents[2] / "packages" / "kvq-core" / "pyproject.toml"
    assert tomllib.loads(file.read_text())["project"]["scripts"] == {"kvq": "kvq_core.cli:main"}


@pytest.mark.parametrize("name", sorted(app.commands))
def test_every_command_has_help_with_examples(name: str) -> None:
    ran = kvq(name, "--help")
    assert ran.status == 0 and f"kvq {name}" in ran.out.partition("Examples:")[2]
    for parameter in app.commands[name].params:
        assert not isinstance(parameter, click.Option) or parameter.hidden or parameter.help, parameter.name


def test_help_names_every_command() -> None:
    ran = kvq("--help")
    assert ran.status == 0
    for name in ("list", "calc", "eval", "bench", "doctor"):
        assert f"\n  {name} " in ran.out
    assert "kvq" in kvq("--version").out


def test_unknown_commands_and_options_are_refused() -> None:
    assert "No such command 'speed'" in refused("speed")
    assert "--fast" in refused("list", "--fast")


# -- list -------------------------------------------------------------------------------------------------------------------


def test_list_shows_every_mode() -> None:
    ran = kvq("list")
    assert ran.status == 0 and columns_are_aligned(ran.out)
    assert row(ran.out, "int4_per_token_head")[1:4] == ["int4", "4.25", "kvq-int4"]
    assert all(row(ran.out, mode)[-1] == "installed" for mode in MODES)


def test_bits_of_the_first_party_modes_are_those_of_their_caches() -> None:
    assert set(FIRST_PARTY_BITS) == set(FIRST_PARTY)
    for mode, bits in FIRST_PARTY_BITS.items():
        assert PagedKVCache(mode, num_blocks=1, num_kv_heads=1, head_size=128).bits_per_element == bits


def test_list_as_json_and_csv() -> None:
    lines = json.loads(kvq("list", "--json").out)
    rows = list(csv.DictReader(io.StringIO(kvq("list", "--csv").out)))
    assert [line["mode"] for line in lines] == [line["mode"] for line in rows]
    int8 = next(line for line in lines if line["mode"] == "int8_per_token_head")
    assert (int8["bits_per_element"], int8["package"], int8["value"]) == (8.25, "kvq-int8fp8", "kvq_int8fp8.backend:Int8PerTokenHead")


def test_list_check_runs_every_mode() -> None:
    lines = {line["mode"]: line for line in json.loads(kvq("list", "--check", "--json").out)}
    assert all(lines[mode]["status"] == "ok" for mode in MODES)
    assert lines["none"]["relative_mse"] == 0
    assert lines["int4_per_token_head"]["relative_mse"] == pytest.approx(0.0101, rel=0.15)
    assert lines["int8_per_token_head"]["relative_mse"] == pytest.approx(0.000042, rel=0.15)


@pytest.mark.usefixtures("fresh_registry")
def test_broken_modes_are_listed_and_told_by_check(install: Callable[..., Path]) -> None:
    install("kvq-int3", "int3", "raise ImportError('no libkvq3.so here')")
    install("kvq-int6", "int6", "from kvq_core.none import NoneBackend\nclass Backend(NoneBackend):\n    mode = 'int7'\n")
    install("kvq-off", "off", OFF)
    install("kvq-fine", "fine")
    plain = kvq("list")
    assert plain.status == 0 and row(plain.out, "int3")[-1] == "installed" and "kvq_int3" not in sys.modules
    ran = kvq("list", "--check")
    assert ran.status == 1
    assert [row(ran.out, mode)[-1] for mode in ("int3", "int6", "off")] == ["broken"] * 3
    assert "broken: int3 from kvq-int3: " in ran.out and "ImportError: no libkvq3.so here" in ran.out
    assert "mode attribute is 'int7'" in ran.out
    assert "mode off: stored rows are off by" in ran.out
    assert row(ran.out, "fine")[-2:] == ["ok", "exact"] and row(ran.out, "int4_per_token_head")[-2] == "ok"


OFF = """
from kvq_core.none import NoneBackend

class Backend(NoneBackend):
    mode = "off"
    def decode(self, codes, scales):
        return -codes.float()
"""


@pytest.mark.usefixtures("fresh_registry")
def test_a_mode_claimed_twice_is_told(install: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    install("alpha", "int3")
    install("beta", "int3")
    ran = kvq("list")
    assert ran.out.count("duplicate: int3") == 2 and "alpha 1.0 and beta 1.0" in ran.out and "KVQ_BACKENDS=" in ran.out
    assert not {"alpha", "beta"} & set(sys.modules)
    monkeypatch.setenv("KVQ_BACKENDS", "int3=beta")
    assert "duplicate" not in kvq("list").out and not {"alpha", "beta"} & set(sys.modules)


# -- calc -------------------------------------------------------------------------------------------------------------------


def calc(name: str, *arguments: str) -> Ran:
    return kvq("calc", str(CONFIGS / f"{name}.json"), *arguments)


def test_calc_prints_a_line_for_every_mode() -> None:
    ran = calc("llama-3.1-8b", "--gpu-gib", "24")
    assert ran.status == 0 and columns_are_aligned(ran.out)
    assert set(MODES) <= {line.split()[0] for line in ran.out.splitlines() if line}
    # mode, bytes a token, bits, times smaller, GiB of one sequence of 8192, fits, longest, sequences
    assert row(ran.out, "int4_per_token_head") == ["int4_per_token_head", "34,816", "4.25", "3.76", "0.266", "yes", "204,864", "25"]
    assert "32 x 8 kv heads of 128" in ran.out and "8.03 G parameters of 2 bytes" in ran.out


def test_calc_as_json_and_csv_agree() -> None:
    given = ("--gpu-gib", "80", "--context", "32768", "--concurrency", "8", "--mode", "int4,none", "--mode", "int2")
    content = json.loads(calc("qwen3-8b", *given, "--json").out)
    assert [line["mode"] for line in content["modes"]] == ["none", "int4_per_token_head", "int2_per_token_head"]
    assert content["weights_from"].startswith("counted") and content["layers"][0]["head_size"] == 128
    rows = list(csv.DictReader(io.StringIO(calc("qwen3-8b", *given, "--csv").out)))
    assert [{k: str(v) for k, v in line.items()} for line in content["modes"]] == rows
    assert content["modes"][1]["total_bytes"] == 8 * 32768 * 39168


def test_calc_notes_what_matters_about_a_model() -> None:
    assert "36 of 48 layers keep no keys" in calc("qwen3-next-80b-a3b", "--gpu-gib", "180").out
    gemma = calc("gemma-3-4b", "--gpu-gib", "24")
    assert "its text model is counted" in gemma.out and "29 x 4 kv heads of 256, window 1,024; 5 x 4 kv heads of 256" in gemma.out
    assert "attends over 40,960 tokens" in calc("qwen3-8b", "--gpu-gib", "80", "--context", "100000").out
    assert "no end" in calc("mistral-7b-v0.1", "--gpu-gib", "24").out
    assert "no end" not in calc("mistral-7b-v0.1", "--gpu-gib", "24", "--ignore-windows").out


def test_calc_takes_a_folder_and_the_weights_in_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((CONFIGS / "gpt-oss-20b.json").read_text())
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 13 * 2**30}}))
    ran = kvq("calc", str(tmp_path), "--gpu-gib", "16")
    assert ran.status == 0 and "weights 13.00 GiB (the files beside the config)" in ran.out
    assert "weights 12.00 GiB (given)" in kvq("calc", str(tmp_path), "--gpu-gib", "16", "--weights-gib", "12").out


def test_calc_draws(tmp_path: Path) -> None:
    path = tmp_path / "fits.png"
    assert calc("llama-3.1-8b", "--gpu-gib", "24", "--plot", str(path)).status == 0
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


def changed(tmp_path: Path, **fields: Any) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads((CONFIGS / "llama-3.1-8b.json").read_text()), **fields}))
    return str(path)


def test_modes_that_do_not_fit_are_told_beside_those_that_do(tmp_path: Path) -> None:
    wide = changed(tmp_path, head_dim=512)
    ran = kvq("calc", wide, "--gpu-gib", "200")
    assert ran.status == 0 and row(ran.out, "int8_per_token_head")
    assert "int4_per_token_head does not fit: config: got head size 512, need a multiple of 4 up to 256" in ran.out
    assert "got head size 512" in refused("calc", wide, "--gpu-gib", "200", "--mode", "int4")


def test_calc_refuses_bad_input(tmp_path: Path) -> None:
    llama = str(CONFIGS / "llama-3.1-8b.json")
    assert "multi-head latent attention" in refused("calc", str(CONFIGS / "deepseek-v3.json"), "--gpu-gib", "80")
    assert "(--weights-gib" in refused("calc", str(CONFIGS / "gpt-oss-20b.json"), "--gpu-gib", "80")
    assert "need the config.json of a decoder" in refused("calc", changed(tmp_path, num_hidden_layers=None), "--gpu-gib", "80")
    assert "block_size: got 12, need a multiple of 8" in refused("calc", llama, "--gpu-gib", "80", "--block-size", "12")
    assert "Invalid value for '--context'" in refused("calc", llama, "--gpu-gib", "80", "--context", "0")
    unwritable = refused_after_output("calc", llama, "--gpu-gib", "80", "--plot", "/dev/null/plot.png")
    assert "/dev/null/plot.png" in unwritable


def refused_after_output(*arguments: str) -> str:
    ran = kvq(*arguments)
    assert ran.status == 2 and "Error: " in ran.err and "Traceback" not in ran.err
    return ran.err


@pytest.mark.parametrize(
    ("mode", "answer"),
    [
        ("int9", "installed: fp8_per_tensor"),
        ("int9", "did you mean 'int8'?"),
        ("kvq-int2:int4", "takes mode 'int4_per_token_head' from kvq-int2, which does not provide it"),
    ],
)
def test_unknown_modes_answer_with_what_is_installed(mode: str, answer: str) -> None:
    assert answer in refused("calc", str(CONFIGS / "llama-3.1-8b.json"), "--gpu-gib", "80", "--mode", mode)


def test_modes_that_are_not_installed_answer_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvq_core import registry

    everything = registry._installed()
    monkeypatch.setattr(registry, "_REGISTRY", registry._Registry())
    monkeypatch.setattr(registry, "_installed", lambda: [entry for entry in everything if entry.mode == "none"])
    llama = str(CONFIGS / "llama-3.1-8b.json")
    assert "installed: none; to get it: pip install kvq-int4" in refused("calc", llama, "--gpu-gib", "80", "--mode", "int4")
    assert "more modes: pip install kvq-int2 kvq-int4 kvq-int8fp8" in refused("calc", llama, "--gpu-gib", "80", "--mode", "q5")


# -- doctor -----------------------------------------------------------------------------------------------------------------


def test_doctor_tells_the_path_of_every_mode() -> None:
    ran = kvq("doctor")
    assert ran.status == 0
    for mode in MODES:
        assert row(ran.out, mode)[3:6] == ["ok", "plain", "torch"]
    for name in ("GPU", "driver", "torch", "triton", "transformers", "vllm", "KVQ_DEBUG", "KVQ_BATCH_INVARIANT", "KVQ_BACKENDS"):
        assert f"\n{name} " in f"\n{ran.out}"
    assert "none that torch can use: " in ran.out
    assert "\nsm_90 prefill kernels (prefill): off: needs a GPU of architecture sm_90" in ran.out


@pytest.mark.gpu
def test_doctor_runs_the_kernels_on_a_gpu() -> None:
    content = json.loads(kvq("doctor", "--json").out)
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
    assert dispatch.store_mma_fits(rows) == (families.STORE_MMA.name not in told)


def test_calc_on_several_gpus(tmp_path: Path) -> None:
    for gpus, heads in (("1", 8), ("2", 4), ("8", 1), ("16", 1), ("32", 1)):
        content = json.loads(calc("llama-3.1-8b", "--gpus", gpus, "--mode", "none", "--json", "--gpu-gib", "80").out)
        assert content["layers"][0]["num_kv_heads"] == heads and content["modes"][0]["bytes_per_token"] == 32 * heads * 2 * 128 * 2
        assert content["weight_bytes"] == -(-2 * 8_029_995_008 // int(gpus))
    for gpus in ("3", "5", "12", "64"):
        assert f"gpus: got {gpus} for layers of " in refused("calc", str(CONFIGS / "llama-3.1-8b.json"), "--gpus", gpus)


def test_calc_tells_bytes_without_a_gpu_and_beside_weights_that_do_not_fit() -> None:
    plain = calc("gpt-oss-20b", "--mode", "int4")  # whose weights are not counted
    assert plain.status == 0 and row(plain.out, "int4_per_token_head")[1] == "13,824" and "weights" not in plain.out
    content = json.loads(calc("llama-3.1-8b", "--json").out)
    assert content["cache_bytes"] is None and "sequences" not in content["modes"][0]
    tight = calc("llama-3.1-8b", "--gpu-gib", "16", "--mode", "int4")
    assert tight.status == 0 and row(tight.out, "int4_per_token_head")[1] == "34,816" and "more than 16.6 do" in tight.out


def test_doctor_says_why_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvq_core import environment

    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    assert environment.why_no_gpu().endswith("is a CPU build")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(environment, "nvidia_driver", lambda: None)
    assert environment.why_no_gpu() == "no NVIDIA driver answers (nvidia-smi)"
    monkeypatch.setattr(environment, "nvidia_driver", lambda: "535.1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert environment.why_no_gpu() == "CUDA_VISIBLE_DEVICES is ''"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert environment.why_no_gpu().endswith("(CUDA 13.0) cannot use driver 535.1")
    assert environment.first_line("kvq-no-such-program") is None and environment.installed("kvq-no-such-package") is None


def test_doctor_says_what_the_switches_change(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvq_core import environment

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    route = environment.path_of(get_backend("int4"), torch.device("cpu"))
    assert (route.name, route.why) == ("Triton kernels, interpreted", "TRITON_INTERPRET=1")
    monkeypatch.setenv("KVQ_DEBUG", "1")
    monkeypatch.delenv("TRITON_INTERPRET")
    content = json.loads(kvq("doctor", "--json").out)
    assert content["switches"]["KVQ_DEBUG"] == "1" and content["switches"]["KVQ_BATCH_INVARIANT"] is None
    assert {mode["mode"] for mode in content["modes"]} >= set(MODES)


@pytest.mark.usefixtures("fresh_registry")
def test_doctor_finds_broken_modes_and_goes_on(install: Callable[..., Path]) -> None:
    install("kvq-int3", "int3", "1 / 0")
    ran = kvq("doctor")
    assert ran.status == 1
    assert "broken: int3 from kvq-int3: " in ran.out and "ZeroDivisionError" in ran.out
    assert row(ran.out, "int4_per_token_head")[3] == "ok"
