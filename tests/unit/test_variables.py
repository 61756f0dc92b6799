"""The environment variables: what each takes, that nothing else is believed, and that doors, caches and commands say so."""

import os
from pathlib import Path

import pytest
import torch

from command_line import kvq, refused
from kvq_core import ArgumentError, PagedKVCache, get_backend, variables
from kvq_core.call import debug
from kvq_core.none import NoneBackend
from kvq_core.plan import invariance

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
CONFIG = str(ROOT / "tests" / "data" / "configs" / "qwen3-8b.json")
FLAGS = ("KVQ_DEBUG", "KVQ_BATCH_INVARIANT")
ON = ("1", "true", "True", "ON", "yes", " 1 ")
OFF = ("0", "false", "OFF", "no", "")
MALFORMED = [
    *((name, text) for name in FLAGS for text in ("2", "tru")),
    ("KVQ_PLANS", "/nope"),
    *(("KVQ_BACKENDS", text) for text in ("int4", "=kvq-int4", "int4=kvq-int4,int2")),
    *((name, "1") for name in ("KVQ_BATCHINVARIANT", "KVQ_PLAN", "KVQ_FOO")),
]


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in variables.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    # Whatever an earlier test of this process has set.
    monkeypatch.setattr(invariance._SWITCH, "value", None)


def test_flags_take_the_usual_words(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in (*ON, *OFF):
        for name in FLAGS:
            monkeypatch.setenv(name, text)
        with monkeypatch.context() as another:
            for environ in (os.environ, dict(os.environ)):
                another.setattr(os, "environ", environ)
                assert debug.enabled() == invariance.is_batch_invariant() == (text in ON), text
        assert not variables.faults()


@pytest.mark.parametrize(("name", "text"), MALFORMED)
def test_what_cannot_be_meant_is_an_error_at_first_use(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, text)
    for call in (lambda: get_backend("none"), lambda: PagedKVCache("none", num_blocks=1, num_kv_heads=1, head_size=64)):
        with pytest.raises(ArgumentError, match=f"^{name}: got "):
            call()
    for command in (["calc", CONFIG], ["list"], ["list", "--check"]):
        assert f"{name}: got " in refused(*command)


def test_a_door_without_the_registry_looks_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = type("Own", (NoneBackend,), {"mode": "variables_test"})()
    monkeypatch.setenv("KVQ_BATCHINVARIANT", "1")
    k, pages, slots = torch.zeros(1, 1, 64), torch.zeros(1, 8, 1, 64), torch.zeros(1, dtype=torch.long)
    with pytest.raises(ArgumentError, match=r"^KVQ_BATCHINVARIANT: .*did you mean KVQ_BATCH_INVARIANT"):
        backend.reshape_and_cache(k, k, pages, pages.clone(), slots)


def test_the_interpreter_is_asked_for_as_triton_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    for text in (*ON, *OFF, "y", "2"):
        monkeypatch.setenv("TRITON_INTERPRET", text)
        assert variables.interpreting() == knobs.getenv_bool("TRITON_INTERPRET", False), text


def test_doctor_tells_all_of_them_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    wrong = {"KVQ_DEBUG": "maybe", "KVQ_PLANS": "/nope", "KVQ_BATCHINVARIANT": "1", "KVQ_BACKENDS": "int4"}
    for name, text in wrong.items():
        monkeypatch.setenv(name, text)
    done = kvq("doctor", "--json")
    assert done.status == 1 and done.json["wrong_switches"].keys() == wrong.keys() and done.json["switches"]["KVQ_DEBUG"] == "maybe"
    assert {mode["status"] for mode in done.json["modes"]} == {"ok"}


def test_the_guide_lists_every_variable() -> None:
    text = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    for name, variable in variables.VARIABLES.items():
        assert f"| `{name}` | {variable.takes} | {variable.does} |" in text
