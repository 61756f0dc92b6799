"""The environment variables: what each takes, that nothing else is believed, and that doors, caches and commands say so."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from kvq_core import ArgumentError, PagedKVCache, get_backend, variables
from kvq_core.call import debug
from kvq_core.cli.app import app
from kvq_core.none import NoneBackend
from kvq_core.plan import planner

pytestmark = pytest.mark.quick

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


def test_flags_take_the_usual_words(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in (*ON, *OFF):
        for name in FLAGS:
            monkeypatch.setenv(name, text)
        assert debug.enabled() == planner.is_batch_invariant() == (text in ON), text
        assert not variables.faults()


@pytest.mark.parametrize(("name", "text"), MALFORMED)
def test_what_cannot_be_meant_is_an_error_at_first_use(name: str, text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(name, text)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "llama", "hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}))
    for call in (lambda: get_backend("none"), lambda: PagedKVCache("none", num_blocks=1, num_kv_heads=1, head_size=64)):
        with pytest.raises(ArgumentError, match=f"^{name}: got "):
            call()
    for command in (["calc", str(config)], ["list"], ["list", "--check"]):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 2 and not done.stdout and f"{name}: got " in done.stderr, command


def test_a_door_without_the_registry_looks_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(NoneBackend):
        mode = "variables_test"

    monkeypatch.setenv("KVQ_BATCHINVARIANT", "1")
    k, pages, slots = torch.zeros(1, 1, 64), torch.zeros(1, 8, 1, 64), torch.zeros(1, dtype=torch.long)
    with pytest.raises(ArgumentError, match=r"^KVQ_BATCHINVARIANT: .*did you mean KVQ_BATCH_INVARIANT"):
        Own().reshape_and_cache(k, k, pages, pages.clone(), slots)


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
    done = CliRunner().invoke(app, ["doctor", "--json"])
    content = json.loads(done.stdout)
    assert done.exit_code == 1 and content["wrong_switches"].keys() == wrong.keys()
    assert {mode["status"] for mode in content["modes"]} == {"ok"}
    assert content["switches"]["KVQ_DEBUG"] == "maybe"


def test_the_guide_lists_every_variable() -> None:
    text = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text(encoding="utf-8")
    for name, variable in variables.VARIABLES.items():
        assert f"| `{name}` | {variable.takes} | {variable.does} |" in text
