"""The registry, against made-up distributions: a dist-info folder on ``sys.path`` is all that discovery looks at.

Broken plug-ins break only themselves: whatever their import raises, prints or offers, every command tells it and goes on.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from command_line import kvq, row
from elsewhere import in_threads
from kvq_core import ArgumentError, BrokenBackendError, DuplicateModeError, QuantKVBackend, UnknownModeError, registry
from kvq_core.none import NoneBackend
from kvq_core.registry import get_backend, has_backend, list_backends, register_backend, unregister_backend

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("fresh_registry")]

Install = Callable[..., Path]
FIRST_PARTY_MODES = {
    **{f"int{bits}_per_token_head": f"kvq-int{bits}" for bits in (2, 3, 4)},
    **dict.fromkeys(("fp8_per_tensor", "fp8_per_token_head", "int8_per_token_head"), "kvq-int8fp8"),
    "none": "kvq-core",
}
SLOW = "import time\ntime.sleep(0.05)\nimport kvq_core\nBASE = kvq_core.get_backend('none')\nclass Backend(type(BASE)): mode = 'int7'\n"


def backend_class(mode: object) -> type:
    return type("Mine", (NoneBackend,), {"mode": mode})


def offers_of(mode: str) -> list[registry.InstalledMode]:
    return [entry for entry in list_backends() if entry.mode == mode]


def test_lists_the_first_party_modes_sorted() -> None:
    listed = {entry.mode: entry.distribution for entry in list_backends()}
    assert listed.items() >= FIRST_PARTY_MODES.items() and list(list_backends()) == sorted(list_backends())


def test_a_distribution_that_is_there_twice_counts_once(install: Install) -> None:
    """The first folder on ``sys.path`` is what an import would find."""
    for distribution, version in (("kvq-int7", "1.0"), ("KVQ.Int7", "2.0")):
        install(distribution, "int7", folder=version, version=version)
        assert offers_of("int7") == [registry.InstalledMode("int7", distribution, version, f"{distribution.replace('-', '_')}:Backend")]


def test_names_are_full_or_aliases_or_of_a_distribution() -> None:
    for alias in ("int8", "fp8", "int4", "int3", "int2"):
        assert has_backend(alias) and get_backend(alias) is get_backend(f"{alias}_per_token_head")
    assert get_backend("KVQ_Int4:int4") is get_backend("kvq-int4:int4_per_token_head") is get_backend("int4")


def test_imports_at_first_use_and_threads_get_one_instance(install: Install) -> None:
    install("kvq-int7", "int7", SLOW)
    assert has_backend("int7") and "kvq_int7" not in sys.modules
    found = in_threads([lambda: get_backend("int7")] * 8)
    assert isinstance(found[0], QuantKVBackend) and found[0].mode == "int7"
    assert all(backend is get_backend("kvq-int7:int7") for backend in found)


@pytest.mark.parametrize(
    ("override", "name", "said"),
    [
        ("", "int5", f"'int5'; installed: .*{'.*'.join(sorted(FIRST_PARTY_MODES))}.*; did you mean 'int.'"),
        ("", "", "''; installed: "),
        ("", "kvq-int2:int4", r"the name asked for takes mode 'int4_per_token_head' from kvq-int2.*kvq-int4 0\..* does"),
        ("int4=kvq-int2", "int4", "KVQ_BACKENDS='int4=kvq-int2' takes mode 'int4_per_token_head' from kvq-int2"),
        ("int4=kvq-int4,int4_per_token_head=kvq-int2", "int4", r"^KVQ_BACKENDS: got"),
        # Composed modes: K's, then V's.
        ("", "int8/int5", "'int5'"),
        ("", "k8v7", "'int7_per_token_head'"),
        ("", "int8/none", "^value_half: got mode none"),
        ("", "fp8_per_tensor/int4", "^key_half: got mode fp8_per_tensor"),
        *(
            ("", name, f"^mode: got {name!r}, need one mode, or that of K and that of V")
            for name in ("int8/int4/int2", "/int4", "int8/", "/")
        ),
    ],
)
def test_what_cannot_be_had_by_its_name(override: str, name: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVQ_BACKENDS", override)
    with pytest.raises(ArgumentError if ": got" in said else UnknownModeError, match=said) as error:
        get_backend(name)
    assert "pip install" not in str(error.value) and list_backends() and has_backend(name) == (override != "")


def test_of_modes_that_are_not_installed_the_pip_command_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "entry_points", lambda group: ())
    for name, distribution in (*FIRST_PARTY_MODES.items(), ("int4", "kvq-int4")):
        commands = f"pip install {distribution}, or, from a checkout, ./packages/{distribution}"
        with pytest.raises(UnknownModeError, match=rf"'{name}.*'; installed: nothing; .*{commands}$"):
            get_backend(name)


def test_a_mode_keeps_the_scales_that_its_ops_were_defined_with() -> None:
    """torch's ops say which arguments they change, for as long as the process lives."""
    stored, given = (
        type("Swapped", (NoneBackend,), {"mode": "swapped", "reads_scales": True, "needs_scale_caches": stores}) for stores in (True, False)
    )
    register_backend(given)
    get_backend("swapped")
    register_backend(stored, replace=True)
    with pytest.raises(ArgumentError, match=r"^backend: got mode swapped with needs_scale_caches True.*before in this process"):
        get_backend("swapped")


def test_rivals_are_an_error_until_one_is_chosen(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each call, by ``KVQ_BACKENDS`` or by a qualified name, which goes first."""
    install("kvq-int4-turbo", "int4_per_token_head")
    found: dict[str, object] = {}
    for distribution, module in (("kvq-int4", "kvq_int4.backend"), ("KVQ_int4.turbo", "kvq_int4_turbo")) * 2:
        for key, name in (("int4", "int4_per_token_head"), ("int4_per_token_head", "int4")):
            monkeypatch.setenv("KVQ_BACKENDS", f"int2=kvq-int2, {key} = {distribution} ,")
            backend = get_backend(name)
            assert type(backend).__module__ == module and found.setdefault(module, backend) is backend
            assert type(get_backend("kvq-int4-turbo:int4")).__module__ == "kvq_int4_turbo"
            assert get_backend("int8").mode == "int8_per_token_head"
    monkeypatch.delenv("KVQ_BACKENDS")
    choices = r'with KVQ_BACKENDS="int4_per_token_head=(kvq-int4.*)" or get_backend\("\1:int4_per_token_head"\)$'
    with pytest.raises(DuplicateModeError, match=rf"kvq-int4 0\..* and kvq-int4-turbo 1\.0; .*{choices}"):
        get_backend("int4")


def test_register_replace_and_unregister(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class or an instance, of a new mode or of one that is installed, which comes back."""
    installed, instance = get_backend("int4"), backend_class("mine")()
    second, mine = backend_class("mine"), backend_class("int4_per_token_head")
    assert register_backend(instance) is get_backend("mine") is instance
    (entry,) = offers_of("mine")
    assert has_backend("mine") and entry.distribution == "in-process" and entry.value.endswith(":Mine")
    for rival, said in ((second, "'mine' is already provided by in-process"), (mine, r"kvq-int4 0\.")):
        with pytest.raises(DuplicateModeError, match=said):
            register_backend(rival)
    assert get_backend("mine") is instance
    register_backend(second, replace=True)
    assert type(get_backend("mine")) is second
    unregister_backend("mine")
    for use in (get_backend, unregister_backend):
        with pytest.raises(UnknownModeError):
            use("mine")
    register_backend(mine, replace=True)
    monkeypatch.setenv("KVQ_BACKENDS", "int4=kvq-int4")
    assert type(get_backend("int4")) is mine and get_backend("kvq-int4:int4") is installed
    assert [entry.distribution for entry in offers_of("int4_per_token_head")] == ["in-process"]
    unregister_backend("int4_per_token_head")
    assert get_backend("int4") is installed


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        *((backend_class(mode), "^backend: got mode") for mode in ("", "int4", "k8v4", "a:b", "a=b", "a-b")),
        (type("Half", (QuantKVBackend,), {"mode": "half"}), "abstract"),
        (backend_class(None), "no mode attribute"),
        (type("Stranger", (), {"mode": "mine"})(), "^backend: got .* is not a QuantKVBackend"),
    ],
)
def test_what_does_not_register(backend: object, message: str) -> None:
    before = list_backends()
    with pytest.raises(ArgumentError, match=message):
        register_backend(backend)
    assert list_backends() == before


CONFIG = str(Path(__file__).parents[1] / "data" / "configs" / "qwen3-8b.json")
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
    **dict.fromkeys(
        (f"{HEAD}    {name} = None\n" for name in ("head_size_multiple", "max_head_size", "order_multiple", "reads_scales", "read")), ""
    ),
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
PRINTS = f"""import os, sys
print("hello"); sys.stderr.write("hello"); os.write(1, b"from C"); os.system("echo from a shell")
{HEAD}
    def encode(self, x, scale=None):
        print("encoding"); os.write(1, b"encoding")
        return x, None
"""


@pytest.fixture(autouse=True)
def no_gpu(torch_path: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def told(*command: str) -> tuple[int, dict[str, str]]:
    """Exit status, and the modes that have a status (``list``, ``doctor``) or a figure (``calc``); the JSON is nobody else's."""
    done = kvq(*command, "--json")
    lines = done.json if isinstance(done.json, list) else done.json["modes"]
    return done.status, {line["mode"]: line.get("status", "ok") for line in lines}


def installed(install: Install, *sources: str) -> list[str]:
    """The modes of these sources, ``b0``, ``b1`` ..., each of a distribution of its own."""
    for i, source in enumerate(sources):
        install(f"kvq-b{i}", f"b{i}", source.replace("int7", f"b{i}"))
    return [f"b{i}" for i in range(len(sources))]


def test_what_is_wrong_at_import_breaks_only_itself(install: Install) -> None:
    first_party = {entry.mode for entry in list_backends()}
    broken = installed(install, *AT_IMPORT)
    for mode, said in zip(broken, AT_IMPORT.values(), strict=True):
        for _ in range(2):
            whole = rf"^mode '{mode}' from kvq-{mode} 1\.0 \(kvq_{mode}:Backend\) cannot be used: .*{said}"
            with pytest.raises(BrokenBackendError, match=whole) as caught:
                get_backend(mode)
            assert caught.value.__cause__ is not None, mode
        assert has_backend(mode)
    assert {entry.mode for entry in list_backends()} == first_party.union(broken) and get_backend("none").mode == "none"
    status, modes = told("calc", CONFIG)
    assert status == 1 and modes.keys() == first_party


def test_what_is_wrong_at_work_is_told_by_check(install: Install) -> None:
    broken = installed(install, *AT_WORK)
    for command in (["list", "--check"], ["doctor"]):
        status, modes = told(*command)
        assert status == 1 and [mode for mode, found in modes.items() if found == "broken"] == broken, command
    for mode in broken:
        assert kvq("calc", CONFIG, "--mode", mode, "--gpu-gib", "80").status in (0, 2)


def test_doctor_and_eval_go_on(install: Install, small_weights: Path, tmp_path: Path) -> None:
    installed(install, "raise SystemExit", AT_WORK[0])
    status, modes = told("doctor")
    assert status == 1 and modes.pop("b0") == modes.pop("b1") == "broken" and modes["int4_per_token_head"] == "ok"
    (tmp_path / "text.txt").write_text("import os\n" * 20)
    given = ("--model", str(small_weights), "--text", str(tmp_path / "text.txt"), "--length", "40", "--documents", "2", "--device", "cpu")
    done = kvq("eval", *given)
    assert done.status == 1 and row(done.out, "int4_per_token_head")
    assert "broken: b1: SystemExit" in done.out and "from kvq-b0 1.0" in done.out


def test_keyboard_interrupt_is_the_users(install: Install) -> None:
    install("kvq-int7", "int7", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        get_backend("int7")


def test_what_plugins_print_is_not_output(install: Install) -> None:
    site = install("kvq-int7", "int7", PRINTS)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "kvq_core", "list", "--mode", "int7", "--check", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0 and json.loads(done.stdout) and "from C" in done.stderr and "from a shell" in done.stderr


@pytest.mark.parametrize("damaged", [None, b"\xff\xfe[kvq.backends", b"[kvq.backends]\nint7 = \n"])
def test_damaged_metadata_break_only_their_distribution(install: Install, damaged: bytes | None) -> None:
    info = install("kvq-int7", "int7") / "kvq_int7-1.0.dist-info"
    if damaged is None:
        (info / "METADATA").unlink()
    else:
        (info / "entry_points.txt").write_bytes(damaged)
    assert get_backend("int4").mode == "int4_per_token_head" and "none" in {entry.mode for entry in list_backends()}
