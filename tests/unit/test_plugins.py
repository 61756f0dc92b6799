"""Broken plug-ins break only themselves: whatever their import raises, prints or offers, every command tells it and goes on."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from kvq_core import BrokenBackendError, get_backend, has_backend, list_backends
from kvq_core.cli.app import app

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("fresh_registry")]

CONFIG = Path(__file__).parents[1] / "data" / "configs" / "qwen3-8b.json"
HEAD = "from kvq_core.none import NoneBackend\n\nclass Backend(NoneBackend):\n    mode = 'int7'\n"
AT_IMPORT = {
    **dict.fromkeys(("raise SystemExit", "raise BaseException('x')", "\0", "import pytest\npytest.skip('x', allow_module_level=True)"), ""),
    "class E(Exception):\n    def __str__(self): raise OSError\nraise E": "",
    "class Backend:\n    def __repr__(self): raise SystemExit\nBackend = Backend()": "",
    "raise OSError('no such library')": "OSError: no such library",
    "import a_module_nobody_has": "ModuleNotFoundError.*a_module_nobody_has",
    "Other = 1": "AttributeError.*Backend",
    "Backend = 1": "1 is not a QuantKVBackend",
    "from kvq_core.backend import QuantKVBackend\nclass Backend(QuantKVBackend): mode = 'int7'": "TypeError.*abstract",
    HEAD.replace("int7", "other"): "mode attribute is 'other'",
    HEAD.replace("'int7'", "3"): "no mode attribute of type str",
    **dict.fromkeys((f"{HEAD}    {name} = None\n" for name in ("head_size_multiple", "max_head_size", "reads_scales", "read")), ""),
    f"{HEAD}    packing_factor = 2.0\n": "",
    f"{HEAD}    packing_factor = 3\n    head_size_multiple = 4\n": "",
    f"{HEAD}    read_level_errors = (float('nan'),)\n": "",
    f"{HEAD}    @property\n    def max_head_size(self): raise SystemExit(3)\n": "",
    f"{HEAD}    def __init__(self): raise SystemExit\n": "",
    f"{HEAD}    def __init__(self, bits): pass\n": "",
}
"""What is said of a module that reads so."""
AT_WORK = (
    *(f"{HEAD}    def {name}(self, *a, **k): raise SystemExit\n" for name in ("encode", "cache_dtype", "check_head_size")),
    f"{HEAD}    def decode(self, *a, **k): raise ValueError('x')\n",
    f"{HEAD}    def cache_dtype(self, dtype): return 'uint8'\n",
    f"{HEAD}    def encode(self, x, scale=None): return None\n    def __eq__(self, other): raise SystemExit\n",
)


@pytest.fixture(autouse=True)
def no_gpu(torch_path: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def told(*command: str) -> tuple[int, dict[str, str]]:
    """Exit status, and the modes that have a status (``list``, ``doctor``) or a figure (``calc``); the JSON is nobody else's."""
    done = CliRunner().invoke(app, [*command, "--json"])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    content = json.loads(done.stdout)
    lines = content if isinstance(content, list) else content["modes"]
    return done.exit_code, {line["mode"]: line.get("status", "ok") for line in lines}


def installed(install: Callable[..., Path], sources: Iterable[str]) -> dict[str, str]:
    """The sources by mode: ``b0``, ``b1`` ..., each of a distribution of its own."""
    modes = {f"b{i}": source for i, source in enumerate(sources)}
    for mode, source in modes.items():
        install(f"kvq-{mode}", mode, source.replace("int7", mode))
    return modes


def test_what_is_wrong_at_import_breaks_only_itself(install: Callable[..., Path]) -> None:
    first_party = {entry.mode for entry in list_backends()}
    broken = installed(install, AT_IMPORT)
    for mode, source in broken.items():
        told_of = rf"^mode '{mode}' from kvq-{mode} 1\.0 \(kvq_{mode}:Backend\) cannot be used: .*{AT_IMPORT[source]}"
        for _ in range(2):
            with pytest.raises(BrokenBackendError, match=told_of) as caught:
                get_backend(mode)
            assert caught.value.__cause__ is not None, source
        assert has_backend(mode)
    assert {entry.mode for entry in list_backends()} == first_party | broken.keys() and get_backend("none").mode == "none"
    status, modes = told("calc", str(CONFIG))
    assert status == 1 and modes.keys() == first_party


def test_what_is_wrong_at_work_is_told_by_check(install: Callable[..., Path]) -> None:
    broken = installed(install, AT_WORK)
    for command in (["list", "--check"], ["doctor"]):
        status, modes = told(*command)
        assert status == 1 and {mode for mode, found in modes.items() if found == "broken"} == broken.keys(), command
    for mode, source in broken.items():
        done = CliRunner().invoke(app, ["calc", str(CONFIG), "--mode", mode, "--gpu-gib", "80"])
        assert done.exit_code in (0, 2) and isinstance(done.exception, SystemExit | None), source


def test_doctor_and_eval_go_on(install: Callable[..., Path], small_weights: Path, tmp_path: Path) -> None:
    install("kvq-int5", "int5", "raise SystemExit")
    install("kvq-int6", "int6", AT_WORK[0].replace("int7", "int6"))
    status, modes = told("doctor")
    assert status == 1 and modes.pop("int5") == modes.pop("int6") == "broken" and modes["int4_per_token_head"] == "ok"
    (tmp_path / "text.txt").write_text("import os\n" * 20)
    given = ["--model", str(small_weights), "--text", str(tmp_path / "text.txt"), "--length", "40", "--documents", "2", "--device", "cpu"]
    done = CliRunner().invoke(app, ["eval", *given])
    assert done.exit_code == 1 and "broken: int6: SystemExit" in done.stdout and "from kvq-int5 1.0" in done.stdout
    assert "\nint4_per_token_head " in done.stdout


def test_keyboard_interrupt_is_the_users(install: Callable[..., Path]) -> None:
    install("kvq-int7", "int7", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        get_backend("int7")


PRINTS = f"""import os, sys
print("hello"); sys.stderr.write("hello"); os.write(1, b"from C"); os.system("echo from a shell")
{HEAD}
    def encode(self, x, scale=None):
        print("encoding"); os.write(1, b"encoding")
        return x, None
"""


def test_what_plugins_print_is_not_output(install: Callable[..., Path]) -> None:
    site = install("kvq-int7", "int7", PRINTS)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", "from kvq_core.cli import main; main()", "list", "--mode", "int7", "--check", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0 and json.loads(done.stdout) and "from C" in done.stderr and "from a shell" in done.stderr


@pytest.mark.parametrize("damaged", [None, b"\xff\xfe[kvq.backends", b"[kvq.backends]\nint7 = \n"])
def test_damaged_metadata_break_only_their_distribution(install: Callable[..., Path], damaged: bytes | None) -> None:
    info = install("kvq-int7", "int7") / "kvq_int7-1.0.dist-info"
    if damaged is None:
        (info / "METADATA").unlink()
    else:
        (info / "entry_points.txt").write_bytes(damaged)
    assert get_backend("int4").mode == "int4_per_token_head" and "none" in {entry.mode for entry in list_backends()}
