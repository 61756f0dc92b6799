"""kvq's offer to vLLM, to stand-ins of what it touches: real engines are checked by ``.ci/vllm``."""

from __future__ import annotations

import enum
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvq_core import get_backend, list_backends
from kvq_core.errors import ArgumentError
from kvq_core.registry import short_pairs
from kvq_core.smoothing.calibration import KeySmoothing, ModelSmoothing
from kvq_core.smoothing.qk_norm import rows_of_heads
from kvq_core.testing import places
from kvq_vllm import plugin, probe, smoothing
from kvq_vllm.names import VLLM_NAMES, mode_of, own_names
from kvq_vllm.pages import content_bytes, layer_views
from kvq_vllm.plugin import CPU_PATH, PATH, Offer, offer
from kvq_vllm.refusals import EXPLANATIONS, check_group, check_layer, check_residual, check_sinks, explained, head_size_reason
from kvq_vllm.settings import Settings, smallest_window_block
from kvq_vllm.sharing import share
from kvq_vllm.smoothing import check_smoothed, load, smooth_layers

pytestmark = pytest.mark.quick
space = types.SimpleNamespace


@pytest.fixture(autouse=True)
def torch_path(monkeypatch: pytest.MonkeyPatch) -> None:
    places.enter("eager", monkeypatch)


# -- the offer ------------------------------------------------------------------------------------------------------------


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
    """Stand-ins for the modules of vLLM 0.33: the names that it was given, with what handles them."""
    TAKEN.clear()
    monkeypatch.setattr(plugin, "_MADE", [])
    registry, config = types.ModuleType("registry"), types.ModuleType("cache")
    added: dict[str, Any] = {}
    registry.AttentionBackendEnum = Slots  # type: ignore[attr-defined]
    registry.register_backend = TAKEN.__setitem__  # type: ignore[attr-defined]
    config.KV_CACHE_DTYPES = ["auto", *VLLM_NAMES]  # type: ignore[attr-defined]
    config.register_kv_cache_dtype = lambda name: lambda handler: added.__setitem__(name, handler())  # type: ignore[attr-defined]
    interface = types.ModuleType("interface")
    interface.KVQuantMode = space(CUSTOM=12)  # type: ignore[attr-defined]
    modules = {"v1.attention.backends.registry": registry, "config.cache": config, "v1.kv_cache_interface": interface}
    for name in ("", "v1", "v1.attention", "v1.attention.backends", "config", *modules):
        full = f"vllm.{name}".rstrip(".")
        monkeypatch.setitem(sys.modules, full, modules.get(name, types.ModuleType(full)))
    return added


def test_every_installed_mode_gets_a_name(vllm: dict[str, Any]) -> None:
    made = offer()
    assert TAKEN == {Slots.CUSTOM: PATH}
    assert made.problem == "" and set(made.names) == {*VLLM_NAMES, *vllm}
    assert {mode_of(name) for name in vllm} == {*(entry.mode for entry in list_backends()), *short_pairs()}
    assert {"kvq_int4", "kvq_int2", "kvq_none", "kvq_fp8_per_tensor", "kvq_k8v4", "kvq_k4v2"} <= set(vllm)
    assert (vllm["kvq_int4"].name, vllm["kvq_int4"].torch_dtype(), vllm["kvq_int4"].quant_mode()) == ("kvq_int4", torch.uint8, 12)
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


@pytest.mark.parametrize("changes", [None, {"AttentionBackendEnum": enum.Enum("Slots", {"FLASH_ATTN": 1})}, {"register_backend": max}])
def test_it_never_raises(vllm: dict[str, Any], monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any] | None) -> None:
    """Without vLLM, in one without the slot, in one whose functions take other arguments."""
    registry = sys.modules["vllm.v1.attention.backends.registry"]
    for name, value in (changes or {}).items():
        monkeypatch.setattr(registry, name, value)
    if changes is None:
        monkeypatch.setitem(sys.modules, registry.__name__, None)
        monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.registry", None)
    made = offer()
    assert made.problem and not made.names


def test_the_doctor_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = space(stdout='noise\nkvq {"names": ["kvq_int4"], "problem": "", "slot": "CUSTOM"}\n', stderr="", returncode=0)
    monkeypatch.setattr(probe.subprocess, "run", lambda *arguments, **options: answers)
    monkeypatch.setattr(probe, "_version", lambda name: None)
    assert probe.vllm_facts() == {"vLLM": "not installed"}
    monkeypatch.setattr(probe, "_version", lambda name: "0.33.0")
    assert probe.vllm_facts()["kvq in vLLM"] == "--attention-backend CUSTOM --kv-cache-dtype kvq_int4"
    answers.stdout = "kvq " + json.dumps({"names": [], "problem": "it is taken", "slot": "CUSTOM"})
    assert probe.vllm_facts()["kvq in vLLM"] == "steps aside: it is taken"
    answers.stdout, answers.stderr = "", "ImportError: no"
    assert probe.vllm_facts()["vLLM"].endswith("cannot be imported: ImportError: no")


# -- settings and refusals ------------------------------------------------------------------------------------------------


def config(dtype: str, section: object = None) -> Any:
    further = {} if section is None else {"kvq": section}
    return space(cache_config=space(cache_dtype=dtype), model_config=space(dtype=torch.float16), additional_config=further)


def test_the_configuration_says_the_mode() -> None:
    carried, plain = (Settings.of(config("int8_per_token_head", section)) for section in ({"mode": "int2"}, None))
    assert carried.backend("int8_per_token_head").mode == "int2_per_token_head" and carried.backend("auto").mode == "none"
    assert plain.backend("int8_per_token_head").mode == "int8_per_token_head"
    # Blocks of a window fit its pages.
    for dtype, mode, size in (("int8_per_token_head", "int8", 32), ("int4_per_token_head", "int4", 64), ("kvq_int2", "int2", 128)):
        pages = {n: n * content_bytes(get_backend(mode), 128, 128, torch.float16) for n in (size // 2, size)}
        exact = 16 * content_bytes(get_backend("none"), 128, 128, torch.float16)
        assert smallest_window_block(Settings.of(config(dtype, {"residual_length": 40})), 128) == size
        assert pages[size // 2] < exact <= pages[size]


@pytest.mark.parametrize(
    ("dtype", "section", "message"),
    [
        ("auto", {"mode": "int2"}, "need --kv-cache-dtype int8_per_token_head"),
        ("int8_per_token_head", {"mode": 2}, r"kvq\.mode: got 2, need a string"),
        ("int8_per_token_head", {"mod": "int2"}, "need a mapping"),
        ("int8_per_token_head", "int2", "need a mapping"),
        ("int8_per_token_head", {"mode": "int5"}, "no installed package provides mode"),
        ("int8_per_token_head", {"residual_length": "64"}, r"kvq\.residual_length: got '64', need a whole number"),
        ("int8_per_token_head", {"residual_length": True}, r"kvq\.residual_length: got True, need a whole number"),
        ("auto", {"residual_length": 64}, r"kvq\.residual_length: got 64 with --kv-cache-dtype auto, need a quantized"),
        ("int8_per_token_head", {"sink_tokens": -1}, r"kvq\.sink_tokens: got -1, need 0 or more tokens"),
        ("auto", {"smoothing": "f"}, r"kvq\.smoothing: got 'f' with --kv-cache-dtype auto, need a quantized --kv-cache-dtype: mode none"),
        ("kvq_fp8_per_tensor", {"smoothing": "f"}, r"kvq\.smoothing: got 'f'.*need a mode that finds its own scales"),
    ],
)
def test_what_the_configuration_has_wrong(dtype: str, section: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings.of(config(dtype, section))


def group(kind: str, *, rswa_window: int | None = None, kv_transfer_config: Any = None, **ranks: int) -> None:
    parallel = space(**{"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1} | ranks)
    whole = space(model_config=space(rswa_window=rswa_window), kv_transfer_config=kv_transfer_config, parallel_config=parallel)
    check_group(type(kind, (), {})(), whole)


def window(off: bool, method: str, skipped: tuple[str, ...] = ()) -> None:
    scheduler, cache = space(disable_hybrid_kv_cache_manager=off), space(kv_cache_dtype_skip_layers=list(skipped))
    check_residual(space(scheduler_config=scheduler, cache_config=cache, speculative_config=space(method=method)))


def sinks(window_left: int, slopes: torch.Tensor | None, tokens: int) -> None:
    asked = config("int4_per_token_head", {"sink_tokens": 4})
    asked.model_config.max_model_len = 128
    check_sinks(space(window=(window_left, 0), alibi_slopes=slopes), tokens, asked)


PIECES = torch.zeros(2, 3, 16, 72, dtype=torch.uint8).transpose(0, 1)
WITHOUT_KVQ = ".*; use --kv-cache-dtype auto or fp8 without"
FULL, SINKS, WINDOW = "FullAttentionSpec", r"--additional-config kvq\.sink_tokens: ", r".*--additional-config kvq\.residual_length"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: check_layer("encoder_only", {}), "attention type: got encoder_only, need decoder: kvq serves causal" + WITHOUT_KVQ),
        (lambda: check_layer("decoder", {"chunk_lookback": 2}), "chunk_lookback: got 2, need no chunked attention" + WITHOUT_KVQ),
        (lambda: check_layer("decoder", {"new": 3}), "new: got 3, need an attention layer without this option" + WITHOUT_KVQ),
        (lambda: check_layer("decoder", {"new": 0}), "new: got 0, need an attention layer without this option"),
        (
            lambda: check_layer("decoder", {"new": torch.zeros(2)}),
            r"new: got torch.Tensor of shape \(2,\), need an attention layer without",
        ),
        (lambda: group("ChunkedLocalAttentionSpec"), "attention: got chunked local attention, need full attention" + WITHOUT_KVQ),
        (lambda: group("MLAAttentionSpec"), "attention: got MLAAttentionSpec, need FullAttentionSpec or SlidingWindowSpec" + WITHOUT_KVQ),
        (lambda: group("LaterSpec"), "attention: got LaterSpec, need FullAttentionSpec or SlidingWindowSpec" + WITHOUT_KVQ),
        (lambda: group(FULL, rswa_window=64), "rswa_window: got 64, need None: kvq's window has no prefix" + WITHOUT_KVQ),
        (lambda: group(FULL, kv_transfer_config=space(kv_connector="Nixl")), "--kv-transfer-config: got Nixl, need no KV" + WITHOUT_KVQ),
        (lambda: group(FULL, decode_context_parallel_size=2), "--decode-context-parallel-size: got 2, need 1: each" + WITHOUT_KVQ),
        (lambda: group(FULL, prefill_context_parallel_size=2), "--prefill-context-parallel-size: got 2, need 1: each" + WITHOUT_KVQ),
        (lambda: window(True, "ngram"), "--disable-hybrid-kv-cache-manager: got True, need vLLM's manager of several kinds" + WINDOW),
        (lambda: window(False, "eagle3"), "--speculative-config: got eagle3, need ngram or suffix, which have no layers" + WINDOW),
        (lambda: window(False, "ngram", ("0", "5")), "--kv-cache-dtype-skip-layers: got 0, 5, need none with" + WINDOW),
        (lambda: sinks(31, None, 64), SINKS + "got 4 in a model with sliding windows of 32 tokens, need 0"),
        (lambda: sinks(-1, torch.ones(4), 64), SINKS + "got 4 in a model with ALiBi, need 0"),
        (lambda: sinks(-1, None, 128), SINKS + "got 4, which is 128 in whole blocks, need fewer than the 128 tokens of --max-model-len"),
        (lambda: layer_views(get_backend("int4"), PIECES, 64, 64, torch.bfloat16), "kv_cache: got strides .*need pages whose bytes lie"),
    ],
)
def test_what_is_not_served_is_refused_at_start_up(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call()


def test_what_is_served_is_not_refused() -> None:
    check_layer("decoder", {"chunk_lookback": -1, "something_new": None, "flag": False})
    group(FULL)
    group("SlidingWindowSpec")
    window(False, "ngram_gpu")
    sinks(-1, None, 64)


def test_reasons_say_why_and_what_would_work() -> None:
    for reason, why in EXPLANATIONS.items():
        assert explained(reason).startswith(f"{reason}: {why}; ") and "--kv-cache-dtype" in explained(reason)
    assert explained("something else") == "something else"
    said = explained("kv_cache_dtype not supported")
    assert "--kv-cache-dtype auto or float16 or" in said and "kvq_int4" in said
    reason = head_size_reason("int2_per_token_head", 66)
    assert reason is not None and "need a multiple of 8" in reason and "kvq_none" in reason and "kvq_int2 " not in reason
    # No mode packs this one.
    reason = head_size_reason("int8_per_token_head", 4096)
    assert reason is not None and reason.endswith("use --kv-cache-dtype auto or fp8 without --attention-backend CUSTOM")
    assert all(head_size_reason(mode, 128) is None for mode in own_names().values())


@pytest.mark.parametrize("heads_first", [True, False])
def test_a_layer_s_caches_are_its_pages_without_the_padding(heads_first: bool) -> None:
    backend = get_backend("int4")
    content = content_bytes(backend, 64, 64, torch.bfloat16)
    memory = torch.zeros(3, 2 * 16 * content + 32, dtype=torch.uint8)
    pages = memory[:, :-32].unflatten(1, (2, 16, content) if heads_first else (16, 2, content))
    caches = layer_views(backend, pages if heads_first else pages.transpose(1, 2), 64, 64, torch.bfloat16)
    for cache in vars(caches).values():
        assert cache.shape[:3] == (3, 16, 2)
        cache.fill_(3)
    assert bool((memory[:, :-32] != 0).sum() == 3 * 2 * 16 * (64 + 2 * 2)) and not memory[:, -32:].any()  # 3.0 has two bytes of zeros


# -- smoothed keys --------------------------------------------------------------------------------------------------------


@pytest.fixture
def calibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Smoothing of layers 0 and 1, each of 4 heads of 16; and a stand-in of what tells vLLM's layers' numbers."""
    utils = types.ModuleType("vllm.model_executor.models.utils")
    utils.extract_layer_index = lambda name: int(name.split(".")[2])  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.model_executor", "vllm.model_executor.models"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, utils.__name__, utils)
    generator = torch.Generator().manual_seed(0)
    keys = {layer: torch.randn(64, 4, 16, generator=generator) + layer for layer in (0, 1)}
    ModelSmoothing({layer: KeySmoothing.estimate(rows, rows) for layer, rows in keys.items()}).save(tmp_path / "keys.safetensors")
    return tmp_path / "keys.safetensors"


FIRST = "model.layers.0.attn"


def layers(file: Path, heads: int = 4, head_size: int = 16, names: tuple[str, ...] = (FIRST, "model.layers.1.attn")) -> Any:
    """A vLLM config with attention layers, the last of which reads the first one's pages."""
    found = config("int4_per_token_head", {"smoothing": str(file)})
    built = {}
    for name in (*names, "model.layers.2.attn"):
        built[name] = torch.nn.Module()
        smoothed = {"smoothing": None, "smoothed_by": None, "residual": None}
        built[name].impl = space(kvq=get_backend("int4"), num_kv_heads=heads, head_size=head_size, **smoothed)
        built[name].kv_sharing_target_layer_name = None if name in names else names[0]
    found.compilation_config = space(static_forward_context={**built, "model.layers.3.mlp": torch.nn.Module()})
    found.device_config = space(device=torch.device("cpu"))
    return found


@pytest.mark.parametrize(("heads", "world_size", "rank", "first"), [(4, 1, 0, 0), (2, 2, 1, 2), (1, 8, 5, 2)])
def test_layers_get_the_smoothing_of_their_heads(calibrated: Path, heads: int, world_size: int, rank: int, first: int) -> None:
    found, saved = layers(calibrated, heads), ModelSmoothing.load(calibrated)
    with pytest.raises(ArgumentError, match="layers without it, need a vLLM that calls process_weights_after_loading"):
        check_smoothed(found, [FIRST])
    smooth_layers(found, world_size, rank)
    share(found)
    check_smoothed(found, [FIRST])
    for name, of in ((FIRST, 0), ("model.layers.1.attn", 1), ("model.layers.2.attn", 0)):
        layer = found.compilation_config.static_forward_context[name]
        assert torch.equal(layer.impl.smoothing.mean, saved[of].mean[first : first + heads])
        assert torch.equal(layer.impl.smoothing.balance, saved[of].balance[first : first + heads])
        assert not layer.state_dict()
        if name == "model.layers.2.attn":
            assert layer.impl.smoothing is found.compilation_config.static_forward_context[FIRST].impl.smoothing
            continue
        # Buffers: what vLLM keeps when it sleeps. No part of the model's state, which comes from a checkpoint.
        assert {id(buffer) for buffer in layer.buffers()} >= {id(layer.impl.smoothing.mean), id(layer.impl.smoothing.inverse)}


def test_a_file_is_the_served_model_s_alone(calibrated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that come later are a draft's, whether they have numbers of the served model's layers or others."""
    found, own = layers(calibrated), KeySmoothing(torch.ones(4, 16))
    smooth_layers(found, 1, 0)
    monkeypatch.setattr(smoothing, "_of_weights", lambda layer: own)
    drafts = layers(calibrated, names=("draft_model.layers.0.attn", "model.layers.7.attn")).compilation_config.static_forward_context
    for name in ("draft_model.layers.0.attn", "model.layers.7.attn"):
        found.compilation_config.static_forward_context[name] = drafts[name]
    smooth_layers(found, 1, 0)
    check_smoothed(found, list(drafts)[:2])
    assert all(torch.equal(drafts[name].impl.smoothing.mean, own.mean) for name in list(drafts)[:2])
    assert not torch.equal(found.compilation_config.static_forward_context[FIRST].impl.smoothing.mean, own.mean)


def test_rows_of_norms_are_those_of_a_rank() -> None:
    """A norm's weight may be for each head or one for all, and that of all ranks or of this one."""
    every = torch.arange(24.0).view(6, 4)
    for rows, num_heads, total, place, wanted in (
        (every, 3, 6, 1, every[3:]),
        (every, 6, 6, 0, every),
        (every[:2], 1, 2, 1, every[1:2]),
        (every[:1], 3, 6, 1, every[:1].expand(3, 4)),
        (every[:3], 3, 6, 1, every[:3]),
        (every[:2], 3, 6, 1, None),
        (None, 3, 6, 1, None),
    ):
        found = rows_of_heads(rows, num_heads, total, place)
        assert found is None if wanted is None else found is not None and torch.equal(found, wanted)


def test_keys_stay_as_they_are_where_that_is_asked_for(calibrated: Path) -> None:
    found = layers(Path("none"))
    smooth_layers(found, 1, 0)
    check_smoothed(found, [FIRST])
    assert found.compilation_config.static_forward_context[FIRST].impl.smoothing is None


@pytest.mark.parametrize(
    ("further", "message"),
    [
        ({"heads": 2}, f"layer {FIRST}: got one for 4 heads of 16, need one for 2 kv heads of 16"),
        ({"head_size": 32}, f"layer {FIRST}: got one for 4 heads of 16, need one for 4 kv heads of 32: a file of ModelSmoothing"),
        ({"names": (FIRST, "model.layers.7.attn")}, r"layer model.layers.7.attn: got layers \[0, 1\], need one with layer 7"),
        (None, r"got '.*keys.safetensors' \(.*\), need a file of ModelSmoothing.save"),
    ],
)
def test_a_file_of_another_model_is_refused(calibrated: Path, further: dict[str, Any] | None, message: str) -> None:
    if further is None:
        calibrated.write_bytes(b"nothing")
    with pytest.raises(ArgumentError, match=r"--additional-config kvq\.smoothing.*keys\.safetensors'.* " + message if further else message):
        smooth_layers(layers(calibrated, **further), 1, 0) if further else load(str(calibrated))
