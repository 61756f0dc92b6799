"""The registry, against made-up distributions: a dist-info folder on ``sys.path`` is all that discovery looks at."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import kvq_core
from in_threads import in_threads
from kvq_core import (
    ArgumentError,
    DuplicateModeError,
    UnknownModeError,
    get_backend,
    has_backend,
    list_backends,
    register_backend,
    registry,
    unregister_backend,
)
from kvq_core.none import NoneBackend

Install = Callable[..., Path]
FIRST_PARTY_MODES = {
    "fp8_per_tensor": "kvq-int8fp8",
    "fp8_per_token_head": "kvq-int8fp8",
    "int2_per_token_head": "kvq-int2",
    "int3_per_token_head": "kvq-int3",
    "int4_per_token_head": "kvq-int4",
    "int8_per_token_head": "kvq-int8fp8",
    "none": "kvq-core",
}
GOOD = "from kvq_core.none import NoneBackend\n\nclass Backend(NoneBackend):\n    mode = 'int7'\n"
pytestmark = pytest.mark.usefixtures("fresh_registry")


def backend_class(mode: object) -> type:
    return type("Mine", (NoneBackend,), {"mode": mode})


def offers_of(mode: str) -> list[registry.InstalledMode]:
    return [entry for entry in list_backends() if entry.mode == mode]


# -- listing ---------------------------------------------------------------------------------------------------------------


@pytest.mark.quick
def test_lists_the_first_party_modes_sorted() -> None:
    listed = {entry.mode: entry.distribution for entry in list_backends()}
    assert listed.items() >= FIRST_PARTY_MODES.items()
    assert list(list_backends()) == sorted(list_backends())


def test_a_distribution_that_is_there_twice_counts_once(install: Install) -> None:
    install("kvq-int7", "int7", folder="wheel", version="1.0")
    assert offers_of("int7") == [registry.InstalledMode("int7", "kvq-int7", "1.0", "kvq_int7:Backend")]
    install("KVQ.Int7", "int7", folder="editable", version="2.0")
    (entry,) = offers_of("int7")
    assert entry.version == "2.0", "the first folder on sys.path is what an import would find"


# -- getting ---------------------------------------------------------------------------------------------------------------


def test_names() -> None:
    for alias in ("int8", "fp8", "int4", "int3", "int2"):
        assert has_backend(alias) and get_backend(alias) is get_backend(f"{alias}_per_token_head")
    assert get_backend("KVQ_Int4:int4") is get_backend("kvq-int4:int4_per_token_head") is get_backend("int4")
    for name in ("kvq-int2:int4", "int5", ""):
        assert not has_backend(name)
        with pytest.raises(UnknownModeError):
            get_backend(name)


def test_imports_at_first_use_and_threads_get_one_instance(install: Install) -> None:
    install("kvq-int7", "int7", "import time; time.sleep(0.05); import kvq_core; BASE = kvq_core.get_backend('none')\n" + GOOD)
    assert has_backend("int7") and "kvq_int7" not in sys.modules
    found = in_threads([lambda: get_backend("int7")] * 8)
    assert isinstance(found[0], kvq_core.QuantKVBackend) and found[0].mode == "int7"
    assert all(backend is get_backend("kvq-int7:int7") for backend in found)


def test_unknown_modes_list_what_is_installed_or_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownModeError, match="'int5'") as error:
        get_backend("int5")
    assert all(mode in str(error.value) for mode in FIRST_PARTY_MODES) and "pip install" not in str(error.value)
    monkeypatch.setattr(registry, "entry_points", lambda group: ())
    for name, distribution in (*FIRST_PARTY_MODES.items(), ("int4", "kvq-int4")):
        with pytest.raises(UnknownModeError, match=rf"'{name}.*'; installed: nothing; .*pip install {distribution}$"):
            get_backend(name)


# -- two distributions, one mode -------------------------------------------------------------------------------------------


def test_rivals_are_an_error_until_one_is_chosen(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each call, by ``KVQ_BACKENDS`` or by a qualified name, which goes first."""
    install("kvq-int4-turbo", "int4_per_token_head")
    with pytest.raises(DuplicateModeError) as error:
        get_backend("int4")
    for part in ("kvq-int4 0.", "kvq-int4-turbo 1.0", 'KVQ_BACKENDS="int4_per_token_head=kvq-int4', 'get_backend("kvq-int4'):
        assert part in str(error.value)
    found: dict[str, object] = {}
    for distribution, module in (("kvq-int4", "kvq_int4.backend"), ("KVQ_int4.turbo", "kvq_int4_turbo")) * 2:
        for key, name in (("int4", "int4_per_token_head"), ("int4_per_token_head", "int4")):
            monkeypatch.setenv("KVQ_BACKENDS", f"int2=kvq-int2, {key} = {distribution} ,")
            backend = get_backend(name)
            assert type(backend).__module__ == module and found.setdefault(module, backend) is backend
            assert type(get_backend("kvq-int4-turbo:int4")).__module__ == "kvq_int4_turbo"
            assert get_backend("int8").mode == "int8_per_token_head"
    monkeypatch.delenv("KVQ_BACKENDS")
    with pytest.raises(DuplicateModeError):
        get_backend("int4")


@pytest.mark.parametrize(
    ("override", "name", "message"),
    [
        ("", "kvq-int2:int4", r"the name asked for takes mode 'int4_per_token_head' from kvq-int2.*kvq-int4 0\..* does"),
        ("int4=kvq-int2", "int4", "KVQ_BACKENDS='int4=kvq-int2' takes mode 'int4_per_token_head' from kvq-int2"),
        ("int4=kvq-int4,int4_per_token_head=kvq-int2", "int4", r"^KVQ_BACKENDS: got"),
    ],
)
def test_choosing_what_is_not_there(override: str, name: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVQ_BACKENDS", override)
    with pytest.raises((UnknownModeError, ArgumentError), match=message):
        get_backend(name)
    assert list_backends()


# -- in-process modes ------------------------------------------------------------------------------------------------------


def test_register_replace_and_unregister(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class or an instance, of a new mode or of one that is installed, which comes back."""
    installed, instance, second = get_backend("int4"), backend_class("mine")(), backend_class("mine")
    assert register_backend(instance) is get_backend("mine") is instance
    (entry,) = offers_of("mine")
    assert has_backend("mine") and entry.distribution == "in-process" and entry.value.endswith(":Mine")
    with pytest.raises(DuplicateModeError, match="'mine' is already provided by in-process"):
        register_backend(second)
    assert get_backend("mine") is instance
    register_backend(second, replace=True)
    assert type(get_backend("mine")) is second
    unregister_backend("mine")
    for use in (get_backend, unregister_backend):
        with pytest.raises(UnknownModeError):
            use("mine")
    mine = backend_class("int4_per_token_head")
    with pytest.raises(DuplicateModeError, match=r"kvq-int4 0\."):
        register_backend(mine)
    register_backend(mine, replace=True)
    monkeypatch.setenv("KVQ_BACKENDS", "int4=kvq-int4")
    assert type(get_backend("int4")) is mine and get_backend("kvq-int4:int4") is installed
    assert [entry.distribution for entry in offers_of("int4_per_token_head")] == ["in-process"]
    unregister_backend("int4_per_token_head")
    assert get_backend("int4") is installed


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        *((backend_class(mode), "^backend: got mode") for mode in ("", "int4", "a:b", "a=b", "a-b")),
        (type("Half", (kvq_core.QuantKVBackend,), {"mode": "half"}), "abstract"),
        (backend_class(None), "no mode attribute"),
        (type("Stranger", (), {"mode": "mine"})(), "^backend: got .* is not a QuantKVBackend"),
    ],
)
def test_what_does_not_register(backend: object, message: str) -> None:
    before = list_backends()
    with pytest.raises(ArgumentError, match=message):
        register_backend(backend)
    assert list_backends() == before
