"""The registry, against made-up distributions: a dist-info folder on ``sys.path`` is all that discovery looks at."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import kvq_core
from kvq_core import (
    ArgumentError,
    BrokenBackendError,
    DuplicateModeError,
    UnknownModeError,
    get_backend,
    has_backend,
    list_backends,
    register_backend,
    registry,
    unregister_backend,
)

GOOD = """
from kvq_core.none import NoneBackend

class Backend(NoneBackend):
    mode = {mode!r}
"""

FIRST_PARTY_MODES = {
    "fp8_per_tensor": "kvq-int8fp8",
    "fp8_per_token_head": "kvq-int8fp8",
    "int2_per_token_head": "kvq-int2",
    "int4_per_token_head": "kvq-int4",
    "int8_per_token_head": "kvq-int8fp8",
    "none": "kvq-core",
}

Install = Callable[..., Path]


pytestmark = pytest.mark.usefixtures("fresh_registry")


def backend_class(mode: object) -> type:
    from kvq_core.none import NoneBackend

    return type("Mine", (NoneBackend,), {"mode": mode})


# -- listing ---------------------------------------------------------------------------------------------------------------


@pytest.mark.quick
def test_lists_the_first_party_modes_sorted() -> None:
    listed = {entry.mode: entry.distribution for entry in list_backends()}
    assert listed.items() >= FIRST_PARTY_MODES.items()
    assert list(list_backends()) == sorted(list_backends())


def test_a_record_says_who_offers_what(install: Install) -> None:
    install("kvq-int3", "int3_per_token_head")
    (entry,) = [entry for entry in list_backends() if entry.mode == "int3_per_token_head"]
    assert entry == registry.InstalledMode("int3_per_token_head", "kvq-int3", "1.0", "kvq_int3:Backend")
    with pytest.raises(AttributeError):
        entry.mode = "other"


def test_listing_imports_nothing(install: Install) -> None:
    site = install("kvq-int3", "int3_per_token_head", "raise RuntimeError('imported')")
    program = """
import json, sys
import kvq_core
modes = [entry.mode for entry in kvq_core.list_backends()]
assert kvq_core.has_backend("int4_per_token_head")
print(json.dumps([modes, sorted({name.partition(".")[0] for name in sys.modules})]))
"""
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(site)!r})\n{program}"]
    modes, imported = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert "int3_per_token_head" in modes
    assert not {"torch", "triton", "numpy", "kvq_int2", "kvq_int3", "kvq_int4", "kvq_int8fp8"} & set(imported)


def test_one_distribution_found_twice_is_one_offer(install: Install) -> None:
    install("kvq-int3", "int3", folder="wheel", version="1.0")
    install("KVQ.Int3", "int3", folder="editable", version="2.0")
    (entry,) = [entry for entry in list_backends() if entry.mode == "int3"]
    assert entry.version == "2.0", "the first folder on sys.path is what an import would find"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("int4_per_token_head", True),
        ("int4", True),
        ("kvq-int4:int4_per_token_head", True),
        ("KVQ_Int4:int4", True),
        ("kvq-int2:int4", False),
        ("int5", False),
        ("", False),
    ],
)
def test_has_backend(name: str, expected: bool) -> None:
    assert has_backend(name) is expected


# -- getting ---------------------------------------------------------------------------------------------------------------


def test_imports_at_first_use_and_caches(install: Install) -> None:
    install("kvq-int3", "int3_per_token_head")
    assert has_backend("int3_per_token_head")
    assert "kvq_int3" not in sys.modules
    backend = get_backend("int3_per_token_head")
    assert "kvq_int3" in sys.modules
    assert isinstance(backend, kvq_core.QuantKVBackend)
    assert backend.mode == "int3_per_token_head"
    assert get_backend("int3_per_token_head") is backend
    assert get_backend("kvq-int3:int3_per_token_head") is backend


@pytest.mark.parametrize(
    ("alias", "mode"),
    [("int8", "int8_per_token_head"), ("fp8", "fp8_per_token_head"), ("int4", "int4_per_token_head"), ("int2", "int2_per_token_head")],
)
def test_aliases(alias: str, mode: str) -> None:
    assert get_backend(alias) is get_backend(mode)
    assert get_backend(alias).mode == mode


def test_threads_get_one_instance(install: Install) -> None:
    install("kvq-int3", "int3", "import time; time.sleep(0.05)" + GOOD.format(mode="int3"))
    barrier, found = threading.Barrier(8), []

    def work() -> None:
        barrier.wait()
        found.append(get_backend("int3"))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(map(id, found))) == 1


def test_a_plugin_may_ask_the_registry_while_it_is_imported(install: Install) -> None:
    install("kvq-int3", "int3", "import kvq_core; BASE = kvq_core.get_backend('none')" + GOOD.format(mode="int3"))
    assert get_backend("int3").mode == "int3"


def test_unknown_mode_lists_what_is_installed() -> None:
    with pytest.raises(UnknownModeError, match="'int5'") as error:
        get_backend("int5")
    assert all(mode in str(error.value) for mode in FIRST_PARTY_MODES)
    assert "pip install" not in str(error.value)


@pytest.mark.parametrize(("mode", "distribution"), FIRST_PARTY_MODES.items())
def test_a_missing_first_party_mode_names_the_pip_command(mode: str, distribution: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "entry_points", lambda group: ())
    with pytest.raises(UnknownModeError, match=f"pip install {distribution}$"):
        get_backend(mode)


def test_an_alias_is_resolved_before_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "entry_points", lambda group: ())
    with pytest.raises(UnknownModeError, match=r"'int4_per_token_head'; installed: nothing; .*pip install kvq-int4"):
        get_backend("int4")


@pytest.mark.parametrize("name", [None, 4, ["int4"]])
def test_a_name_is_a_string(name: object) -> None:
    for ask in (get_backend, has_backend):
        with pytest.raises(ArgumentError, match=r"^mode: got"):
            ask(name)


# -- broken plug-ins -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("raise OSError('no such library')", "OSError: no such library"),
        ("import a_module_nobody_has", "ModuleNotFoundError.*a_module_nobody_has"),
        ("this is no Python", "SyntaxError"),
        ("Other = 1", "AttributeError.*Backend"),
        ("Backend = 1", "1 is not a QuantKVBackend"),
        ("class Backend: mode = 'int3'", "is not a QuantKVBackend"),
        ("from kvq_core.backend import QuantKVBackend\nclass Backend(QuantKVBackend): mode = 'int3'", "TypeError.*abstract"),
        (GOOD.format(mode="int33"), "mode attribute is 'int33'"),
        (GOOD.format(mode=3), "no mode attribute of type str"),
    ],
)
def test_a_broken_plugin_breaks_only_itself(install: Install, source: str, cause: str) -> None:
    install("kvq-int3", "int3", source)
    for _ in range(2):
        with pytest.raises(BrokenBackendError, match=rf"'int3' from kvq-int3 1\.0 \(kvq_int3:Backend\).*{cause}") as error:
            get_backend("int3")
        assert error.value.__cause__ is not None
    assert "int3" in {entry.mode for entry in list_backends()}
    assert has_backend("int3")
    assert get_backend("none").mode == "none"


# -- two distributions, one mode -------------------------------------------------------------------------------------------


@pytest.fixture
def rivals(install: Install) -> None:
    install("kvq-int4-turbo", "int4_per_token_head")


def test_rivals_are_an_error_that_shows_both_ways_out(rivals: None) -> None:
    with pytest.raises(DuplicateModeError) as error:
        get_backend("int4")
    message = str(error.value)
    assert "kvq-int4 0." in message
    assert "kvq-int4-turbo 1.0" in message
    assert 'KVQ_BACKENDS="int4_per_token_head=kvq-int4' in message
    assert 'get_backend("kvq-int4' in message
    assert [entry.distribution for entry in list_backends() if entry.mode == "int4_per_token_head"] == ["kvq-int4", "kvq-int4-turbo"]
    assert get_backend("int2").mode == "int2_per_token_head"


@pytest.mark.parametrize("name", ["int4", "int4_per_token_head"])
@pytest.mark.parametrize("key", ["int4", "int4_per_token_head"])
@pytest.mark.parametrize(("distribution", "module"), [("kvq-int4", "kvq_int4.backend"), ("KVQ_int4.turbo", "kvq_int4_turbo")])
def test_the_environment_chooses(
    rivals: None, monkeypatch: pytest.MonkeyPatch, name: str, key: str, distribution: str, module: str
) -> None:
    monkeypatch.setenv("KVQ_BACKENDS", f"int2=kvq-int2, {key} = {distribution} ,")
    assert type(get_backend(name)).__module__ == module


def test_the_environment_is_read_at_each_call(rivals: None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for distribution in ("kvq-int4", "kvq-int4-turbo", "kvq-int4"):
        monkeypatch.setenv("KVQ_BACKENDS", f"int4={distribution}")
        backend = get_backend("int4")
        assert found.setdefault(distribution, backend) is backend
    assert len(set(map(id, found.values()))) == 2
    monkeypatch.delenv("KVQ_BACKENDS")
    with pytest.raises(DuplicateModeError):
        get_backend("int4")


def test_the_qualified_name_chooses_over_the_environment(rivals: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVQ_BACKENDS", "int4=kvq-int4")
    assert type(get_backend("kvq-int4-turbo:int4")).__module__ == "kvq_int4_turbo"
    assert type(get_backend("kvq-int4:int4_per_token_head")).__module__ == "kvq_int4.backend"


def test_choosing_a_distribution_that_does_not_provide_the_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownModeError, match=r"the name asked for takes mode 'int4_per_token_head' from kvq-int2.*kvq-int4 0\..* does"):
        get_backend("kvq-int2:int4")
    monkeypatch.setenv("KVQ_BACKENDS", "int4=kvq-int2")
    with pytest.raises(UnknownModeError, match="KVQ_BACKENDS='int4=kvq-int2' takes mode 'int4_per_token_head' from kvq-int2"):
        get_backend("int4")
    assert get_backend("int8").mode == "int8_per_token_head"


@pytest.mark.parametrize("text", ["int4", "=kvq-int4", "int4=", "int4=kvq-int4,int4_per_token_head=kvq-int2"])
def test_a_malformed_environment(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("KVQ_BACKENDS", text)
    with pytest.raises(ArgumentError, match=r"^KVQ_BACKENDS: got"):
        get_backend("int4")
    assert list_backends()


# -- in-process modes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_instance", [False, True])
def test_register_and_unregister(as_instance: bool) -> None:
    offered = backend_class("mine")() if as_instance else backend_class("mine")
    assert register_backend(offered) is offered
    assert has_backend("mine")
    backend = get_backend("mine")
    assert backend is offered if as_instance else type(backend) is offered
    assert get_backend("mine") is backend
    (entry,) = [entry for entry in list_backends() if entry.mode == "mine"]
    assert entry.distribution == "in-process"
    assert entry.value.endswith(":Mine")
    unregister_backend("mine")
    assert not has_backend("mine")
    with pytest.raises(UnknownModeError):
        get_backend("mine")
    with pytest.raises(UnknownModeError, match="not registered"):
        unregister_backend("mine")


def test_registering_twice_needs_replace() -> None:
    first, second = backend_class("mine"), backend_class("mine")
    register_backend(first)
    with pytest.raises(DuplicateModeError, match="'mine' is already provided by in-process"):
        register_backend(second)
    assert type(get_backend("mine")) is first
    register_backend(second, replace=True)
    assert type(get_backend("mine")) is second


def test_replacing_an_installed_mode_and_going_back(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = get_backend("int4")
    mine = backend_class("int4_per_token_head")
    with pytest.raises(DuplicateModeError, match=r"kvq-int4 0\."):
        register_backend(mine)
    register_backend(mine, replace=True)
    monkeypatch.setenv("KVQ_BACKENDS", "int4=kvq-int4")
    assert type(get_backend("int4")) is mine
    assert [entry.distribution for entry in list_backends() if entry.mode == "int4_per_token_head"] == ["in-process"]
    assert get_backend("kvq-int4:int4") is installed
    unregister_backend("int4_per_token_head")
    assert get_backend("int4") is installed


@pytest.mark.parametrize("mode", ["", "int4", "a:b", "a=b", "a,b", "a b", "a-b"])
def test_a_registered_mode_needs_a_usable_name(mode: str) -> None:
    with pytest.raises(ArgumentError, match=r"^backend: got mode"):
        register_backend(backend_class(mode))


@pytest.mark.parametrize("backend", [None, "int4", int, SimpleNamespace(mode="mine")])
def test_only_backends_register(backend: object) -> None:
    with pytest.raises(ArgumentError, match=r"^backend: got .* is not a QuantKVBackend"):
        register_backend(backend)


def test_an_abstract_or_nameless_class_does_not_register() -> None:
    with pytest.raises(ArgumentError, match="abstract"):
        register_backend(type("Half", (kvq_core.QuantKVBackend,), {"mode": "half"}))
    with pytest.raises(ArgumentError, match="no mode attribute"):
        register_backend(backend_class(None))
    assert not has_backend("half")
