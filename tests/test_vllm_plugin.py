"""kvq's offer to vLLM, to stand-ins of what it touches: real engines are checked by ``.ci/vllm``."""

from __future__ import annotations

import enum
import json
import subprocess
import sys
import types
from typing import Any

import pytest
import torch

from kvq_core import get_backend, list_backends
from kvq_core.errors import ArgumentError
from kvq_core.layout import cell_size, fields
from kvq_core.testing import places
from kvq_vllm import plugin, probe
from kvq_vllm.names import VLLM_NAMES, mode_of, own_names
from kvq_vllm.pages import content_bytes, layer_views
from kvq_vllm.plugin import CPU_PATH, PATH, Offer, offer
from kvq_vllm.refusals import check_layer, explained, head_size_reason
from kvq_vllm.settings import Settings

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def torch_path(monkeypatch: pytest.MonkeyPatch) -> None:
    places.enter("eager", monkeypatch)


class Slots(enum.Enum):
    """vLLM's backends, as far as the plug-in looks at them."""

    CUSTOM, CPU_ATTN = "", "vllm.cpu"

    def is_overridden(self) -> bool:
        return self in TAKEN

    def get_path(self) -> str:
        return TAKEN[self]


TAKEN: dict[Slots, str] = {}


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stand-ins for the modules of vLLM 0.33; without ``handlers`` in the answer, of 0.32."""
    TAKEN.clear()
    monkeypatch.setattr(plugin, "_MADE", [])
    registry, config = types.ModuleType("registry"), types.ModuleType("cache")
    added: dict[str, Any] = {}
    registry.AttentionBackendEnum = Slots  # type: ignore[attr-defined]
    registry.register_backend = TAKEN.__setitem__  # type: ignore[attr-defined]
    config.KV_CACHE_DTYPES = ["auto", *VLLM_NAMES]  # type: ignore[attr-defined]
    config.register_kv_cache_dtype = lambda name: lambda handler: added.__setitem__(name, handler())  # type: ignore[attr-defined]
    interface = types.ModuleType("interface")
    interface.KVQuantMode = types.SimpleNamespace(CUSTOM=12)  # type: ignore[attr-defined]
    modules = {"v1.attention.backends.registry": registry, "config.cache": config, "v1.kv_cache_interface": interface}
    for name in ("", "v1", "v1.attention", "v1.attention.backends", "config", *modules):
        full = f"vllm.{name}".rstrip(".")
        monkeypatch.setitem(sys.modules, full, modules.get(name, types.ModuleType(full)))
    return added


def test_every_installed_mode_gets_a_name(vllm: dict[str, Any]) -> None:
    made = offer()
    assert TAKEN == {Slots.CUSTOM: PATH}
    assert made.problem == "" and set(made.names) == {*VLLM_NAMES, *vllm}
    assert {mode_of(name) for name in vllm} == {entry.mode for entry in list_backends()}
    assert {"kvq_int4", "kvq_int2", "kvq_none", "kvq_fp8_per_tensor"} <= set(vllm)
    handler = vllm["kvq_int4"]
    assert (handler.name, handler.torch_dtype(), handler.quant_mode()) == ("kvq_int4", torch.uint8, 12)
    assert offer() is made


def test_an_older_vllm_keeps_its_names(vllm: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules["vllm.config.cache"], "register_kv_cache_dtype")
    monkeypatch.setenv("KVQ_VLLM_CPU", "1")
    assert offer().names == VLLM_NAMES and not vllm
    assert TAKEN == {Slots.CUSTOM: PATH, Slots.CPU_ATTN: CPU_PATH}


def test_somebody_elses_slot_stays_theirs(vllm: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    TAKEN[Slots.CUSTOM] = "other.Backend"
    assert offer() == Offer(problem="attention backend CUSTOM is taken by other.Backend")
    assert TAKEN == {Slots.CUSTOM: "other.Backend"} and not vllm
    assert [record.getMessage() for record in caplog.records] == ["kvq steps aside: attention backend CUSTOM is taken by other.Backend"]


@pytest.mark.parametrize("fault", ["no vllm", "no slot", "another register_backend"])
def test_it_never_raises(vllm: dict[str, Any], monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    registry = sys.modules["vllm.v1.attention.backends.registry"]
    if fault == "no vllm":
        monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.registry", None)
    elif fault == "no slot":
        monkeypatch.setattr(registry, "AttentionBackendEnum", enum.Enum("Slots", {"FLASH_ATTN": 1}))
    else:
        monkeypatch.setattr(registry, "register_backend", lambda: None)
    made = offer()
    assert made.problem and not made.names


def test_importing_it_is_cheap() -> None:
    clock = "time.perf_counter()"
    program = f"import sys, time; t = {clock}; import kvq_vllm; print({clock} - t, 'torch' in sys.modules)"
    seconds, torch_came = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert float(seconds) < 0.5 and torch_came == "False"


@pytest.mark.parametrize("in_cells", [True, False])
@pytest.mark.parametrize("heads_first", [True, False])
@pytest.mark.parametrize("mode", ["int8", "int4", "int2", "none"])
def test_rows_come_back_from_any_order_of_pages(mode: str, heads_first: bool, in_cells: bool) -> None:
    """Written and decoded through views of pages with padding between them."""
    backend, blocks, heads, slots, size = get_backend(mode), 3, 2, 16, 64
    content = content_bytes(backend, size, size, torch.bfloat16)
    assert content == cell_size(fields(backend, size, size, torch.bfloat16))
    memory = torch.full((blocks, heads * slots * content + 32), 255, dtype=torch.uint8)[:, : heads * slots * content]
    order = (heads, slots) if heads_first else (slots, heads)
    pages = memory.unflatten(1, (*order, content))
    pages = pages if heads_first else pages.transpose(1, 2)
    caches = layer_views(backend, pages, size, size, torch.bfloat16, in_cells)
    key, value = (torch.randn(5, heads, size, generator=torch.Generator().manual_seed(n)).bfloat16() for n in (1, 2))
    scales = {"k_scale_cache": caches.k_scale_cache, "v_scale_cache": caches.v_scale_cache}
    # Two rows more than slots: an engine's padding.
    backend.reshape_and_cache(key, value, caches.key_cache, caches.value_cache, torch.tensor([0, 17, 47]), **scales)
    for place, row in ((0, 0), (17, 1), (47, 2)):
        block, slot = divmod(place, slots)
        for rows, codes, scale, encode in (
            (key, caches.key_cache, caches.k_scale_cache, backend.encode),
            (value, caches.value_cache, caches.v_scale_cache, backend.encode_value),
        ):
            wanted, wanted_scale = encode(rows[row])
            assert torch.equal(codes[block, slot].view(torch.uint8), wanted.view(torch.uint8))
            assert scale is None or torch.equal(scale[block, slot], wanted_scale)


def test_pages_in_pieces_are_refused() -> None:
    pages = torch.zeros(2, 3, 16, 72, dtype=torch.uint8).transpose(0, 1)
    with pytest.raises(ArgumentError, match=r"kv_cache: got strides .*need pages whose bytes lie together"):
        layer_views(get_backend("int4"), pages, 64, 64, torch.bfloat16, False)


def config(dtype: str, section: object = None) -> Any:
    further = {} if section is None else {"kvq": section}
    space = types.SimpleNamespace
    return space(cache_config=space(cache_dtype=dtype), model_config=space(dtype=torch.float16), additional_config=further)


def test_the_configuration_says_the_mode() -> None:
    carried = Settings.of(config("int8_per_token_head", {"mode": "int2"}))
    assert carried.backend("int8_per_token_head").mode == "int2_per_token_head" and not carried.has_vllm_cells("int8_per_token_head")
    assert carried.backend("auto").mode == "none"
    plain = Settings.of(config("int8_per_token_head"))
    assert plain.backend("int8_per_token_head").mode == "int8_per_token_head" and plain.has_vllm_cells("int8_per_token_head")
    assert not plain.has_vllm_cells("auto") and not Settings.of(config("kvq_int4")).has_vllm_cells("kvq_int4")


@pytest.mark.parametrize(
    ("dtype", "section", "message"),
    [
        ("auto", {"mode": "int2"}, "need --kv-cache-dtype int8_per_token_head"),
        ("int8_per_token_head", {"mode": 2}, r"kvq\.mode: got 2, need a string"),
        ("int8_per_token_head", {"mod": "int2"}, "need a mapping"),
        ("int8_per_token_head", "int2", "need a mapping"),
        ("int8_per_token_head", {"mode": "int5"}, "no installed package provides mode"),
    ],
)
def test_what_the_configuration_has_wrong(dtype: str, section: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings.of(config(dtype, section))


@pytest.mark.parametrize(
    ("attn_type", "options", "message"),
    [
        ("encoder_only", {}, "attention type: got encoder_only, need decoder"),
        ("encoder_decoder", {}, "attention type: got encoder_decoder"),
        ("decoder", {"chunk_lookback": 2}, "chunk_lookback: got 2"),
        ("decoder", {"something_new": 3}, "something_new: got 3"),
    ],
)
def test_layers_that_are_refused(attn_type: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message + ".*use --kv-cache-dtype"):
        check_layer(attn_type, options)
    check_layer("decoder", {"chunk_lookback": -1, "something_new": None})


def test_reasons_say_what_would_work() -> None:
    assert "--kv-cache-dtype auto" in explained("MLA not supported") and explained("something else") == "something else"
    reason = head_size_reason("int2_per_token_head", 66)
    assert reason is not None and "kvq_none" in reason and "kvq_int2 " not in reason
    assert all(head_size_reason(mode, 128) is None for mode in own_names().values())


def test_the_doctor_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = types.SimpleNamespace(stdout='noise\nkvq {"names": ["kvq_int4"], "problem": "", "slot": "CUSTOM"}\n', stderr="", returncode=0)
    monkeypatch.setattr(probe.subprocess, "run", lambda *arguments, **options: answers)
    monkeypatch.setattr(probe, "_version", lambda name: None)
    assert probe.vllm_facts() == {"vLLM": "not installed"}
    monkeypatch.setattr(probe, "_version", lambda name: "0.33.0")
    assert probe.vllm_facts()["kvq in vLLM"] == "--attention-backend CUSTOM --kv-cache-dtype kvq_int4"
    answers.stdout = "kvq " + json.dumps({"names": [], "problem": "it is taken", "slot": "CUSTOM"})
    assert probe.vllm_facts()["kvq in vLLM"] == "steps aside: it is taken"
    answers.stdout, answers.stderr = "", "ImportError: no"
    assert probe.vllm_facts()["vLLM"].endswith("cannot be imported: ImportError: no")
