"""kvq's offer to vLLM, to stand-ins of what it touches: real engines are checked by ``.ci/vllm``."""

from __future__ import annotations

import enum
import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from kvq_core import get_backend, list_backends
from kvq_core.cache.layout import cell_size, fields
from kvq_core.errors import ArgumentError
from kvq_core.registry import short_pairs
from kvq_core.smoothing.calibration import KeySmoothing, ModelSmoothing
from kvq_core.smoothing.rotary import RotaryMean
from kvq_core.testing import places
from kvq_vllm import plugin, probe
from kvq_vllm.demands import demands_of, window_demands_of
from kvq_vllm.names import VLLM_NAMES, mode_of, own_names
from kvq_vllm.pages import content_bytes, layer_views
from kvq_vllm.plugin import CPU_PATH, PATH, Offer, offer
from kvq_vllm.refusals import EXPLANATIONS, check_group, check_layer, check_residual, check_sinks, explained, head_size_reason
from kvq_vllm.settings import Settings, smallest_window_block
from kvq_vllm.smoothing import check_smoothed, lacks_smoothing, load, smooth_layers

pytestmark = pytest.mark.quick
space = types.SimpleNamespace


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


@pytest.mark.parametrize("heads_first", [True, False])
@pytest.mark.parametrize("mode", ["int8", "int4", "int2", "none"])
def test_rows_come_back_from_any_order_of_pages(mode: str, heads_first: bool) -> None:
    """Written and decoded through views of pages with padding between them."""
    backend, blocks, heads, slots, size = get_backend(mode), 3, 2, 16, 64
    content = content_bytes(backend, size, size, torch.bfloat16)
    assert content == cell_size(fields(backend, size, size, torch.bfloat16))
    memory = torch.full((blocks, heads * slots * content + 32), 255, dtype=torch.uint8)[:, : heads * slots * content]
    order = (heads, slots) if heads_first else (slots, heads)
    pages = memory.unflatten(1, (*order, content))
    pages = pages if heads_first else pages.transpose(1, 2)
    caches = layer_views(backend, pages, size, size, torch.bfloat16)
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
        layer_views(get_backend("int4"), pages, 64, 64, torch.bfloat16)


def config(dtype: str, section: object = None) -> Any:
    further = {} if section is None else {"kvq": section}
    return space(cache_config=space(cache_dtype=dtype), model_config=space(dtype=torch.float16), additional_config=further)


def test_the_configuration_says_the_mode() -> None:
    carried = Settings.of(config("int8_per_token_head", {"mode": "int2"}))
    assert carried.backend("int8_per_token_head").mode == "int2_per_token_head"
    assert carried.backend("auto").mode == "none"
    plain = Settings.of(config("int8_per_token_head"))
    assert plain.backend("int8_per_token_head").mode == "int8_per_token_head"


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
        ("int8_per_token_head", {"residual_length": -1}, r"kvq\.residual_length: got -1, need 0 or more tokens"),
        ("auto", {"residual_length": 64}, r"kvq\.residual_length: got 64 with --kv-cache-dtype auto, need a quantized"),
        ("int8_per_token_head", {"sink_tokens": -1}, r"kvq\.sink_tokens: got -1, need 0 or more tokens"),
        ("auto", {"sink_tokens": 4}, r"kvq\.sink_tokens: got 4 with --kv-cache-dtype auto, need a quantized"),
        ("auto", {"smoothing": "f"}, r"kvq\.smoothing: got 'f' with --kv-cache-dtype auto, need a quantized --kv-cache-dtype: mode none"),
        ("kvq_fp8_per_tensor", {"smoothing": "f"}, r"kvq\.smoothing: got 'f'.*need a mode that finds its own scales"),
    ],
)
def test_what_the_configuration_has_wrong(dtype: str, section: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings.of(config(dtype, section))


@pytest.mark.parametrize(
    ("attn_type", "options", "message"),
    [
        ("encoder_only", {}, "attention type: got encoder_only, need decoder: kvq serves causal attention over a cache"),
        ("encoder_decoder", {}, "attention type: got encoder_decoder, need decoder: kvq serves causal attention over a cache"),
        ("decoder", {"chunk_lookback": 2}, "chunk_lookback: got 2, need no chunked attention with a look-back: its keys are no window"),
        ("decoder", {"something_new": 3}, "something_new: got 3, need an attention layer without this option, which kvq does not know"),
    ],
)
def test_layers_that_are_refused(attn_type: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message + ".*; use --kv-cache-dtype auto or fp8 without"):
        check_layer(attn_type, options)
    check_layer("decoder", {"chunk_lookback": -1, "something_new": None})


def group(**further: object) -> Any:
    """A vLLM config, as far as groups of layers look at it."""
    parallel = space(decode_context_parallel_size=1, prefill_context_parallel_size=1)
    found = space(model_config=space(rswa_window=None), kv_transfer_config=None, parallel_config=parallel)
    for name, value in further.items():
        for part in (found.parallel_config, found.model_config, found):
            if hasattr(part, name):
                setattr(part, name, value)
    return found


def spec(kind: str) -> Any:
    return type(kind, (), {})()


NIXL = space(kv_connector="NixlConnector")
OTHERS = ("CrossAttentionSpec", "EncoderOnlyAttentionSpec", "MLAAttentionSpec", "SlidingWindowMLASpec", "RSWASpec", "LaterSpec")


@pytest.mark.parametrize(
    ("kind", "further", "message"),
    [
        (
            "ChunkedLocalAttentionSpec",
            {},
            "attention: got chunked local attention, need full attention or a sliding window: a chunk's keys",
        ),
        *(
            (kind, {}, f"attention: got {kind}, need FullAttentionSpec or SlidingWindowSpec: kvq serves causal attention")
            for kind in OTHERS
        ),
        ("", {"rswa_window": 64}, "rswa_window: got 64, need None: kvq's window has no prefix that stays visible"),
        ("", {"kv_transfer_config": NIXL}, "--kv-transfer-config: got NixlConnector, need no KV connector: a page also holds its scales"),
        ("", {"decode_context_parallel_size": 2}, "--decode-context-parallel-size: got 2, need 1: each rank would hold"),
        ("", {"prefill_context_parallel_size": 2}, "--prefill-context-parallel-size: got 2, need 1: each rank would hold"),
    ],
)
def test_groups_that_are_refused(kind: str, further: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message + ".*; use --kv-cache-dtype auto or fp8 without"):
        check_group(spec(kind or "FullAttentionSpec"), group(**further))
    for served in ("FullAttentionSpec", "SlidingWindowSpec"):
        check_group(spec(served), group())


@pytest.mark.parametrize(
    ("off", "method", "message"),
    [
        (True, None, "--disable-hybrid-kv-cache-manager: got True, need vLLM's manager of several kinds of pages"),
        (False, "eagle3", "--speculative-config: got eagle3, need ngram or suffix, which have no layers of their own"),
    ],
)
def test_windows_that_are_refused(off: bool, method: str | None, message: str) -> None:
    drafts = None if method is None else space(method=method)
    with pytest.raises(ArgumentError, match=message + r".*--additional-config kvq\.residual_length"):
        check_residual(space(scheduler_config=space(disable_hybrid_kv_cache_manager=off), speculative_config=drafts))
    check_residual(space(scheduler_config=space(disable_hybrid_kv_cache_manager=False), speculative_config=space(method="ngram_gpu")))


@pytest.mark.parametrize(
    ("window", "slopes", "sinks", "message"),
    [
        ((31, 0), None, 64, "got 4 in a model with sliding windows of 32 tokens, need 0: a sliding window does not see"),
        ((-1, -1), torch.ones(4), 64, "got 4 in a model with ALiBi, need 0: exact rows do not tell"),
        ((-1, -1), None, 128, "got 4, which is 128 in whole blocks, need fewer than the 128 tokens of --max-model-len"),
    ],
)
def test_sinks_that_are_refused(window: tuple[int, int], slopes: torch.Tensor | None, sinks: int, message: str) -> None:
    space = types.SimpleNamespace
    asked = config("int4_per_token_head", {"sink_tokens": 4})
    asked.model_config.max_model_len = 128
    with pytest.raises(ArgumentError, match=r"--additional-config kvq\.sink_tokens: " + message):
        check_sinks(space(window=window, alibi_slopes=slopes), sinks, asked)
    check_sinks(space(window=(-1, -1), alibi_slopes=None), 64, asked)


@pytest.mark.parametrize("reason", sorted(EXPLANATIONS))
def test_reasons_say_why_and_what_would_work(reason: str) -> None:
    what, why, instead = explained(reason).replace(f"{reason}: ", "WHAT|").replace("; ", "|").split("|")
    assert what == "WHAT" and why == EXPLANATIONS[reason] and "--kv-cache-dtype" in instead


def test_reasons_name_what_fits() -> None:
    assert explained("something else") == "something else"
    said = explained("kv_cache_dtype not supported")
    assert "--kv-cache-dtype auto or float16 or" in said and "kvq_int4" in said
    reason = head_size_reason("int2_per_token_head", 66)
    assert reason is not None and "need a multiple of 8" in reason and "kvq_none" in reason and "kvq_int2 " not in reason
    # No mode packs this one.
    reason = head_size_reason("int8_per_token_head", 4096)
    assert reason is not None and reason.endswith("use --kv-cache-dtype auto or fp8 without --attention-backend CUSTOM")
    assert all(head_size_reason(mode, 128) is None for mode in own_names().values())


@pytest.fixture
def calibrated(tmp_path: Path) -> Path:
    """Smoothing of layers 0 and 1, each of 4 heads of 16."""
    generator = torch.Generator().manual_seed(0)
    keys = {layer: torch.randn(64, 4, 16, generator=generator) + layer for layer in (0, 1)}
    ModelSmoothing({layer: KeySmoothing.estimate(rows, rows) for layer, rows in keys.items()}).save(tmp_path / "keys.safetensors")
    return tmp_path / "keys.safetensors"


def layers(file: Path, heads: int = 4, head_size: int = 16, names: tuple[str, ...] = ("model.layers.0.attn", "model.layers.1.attn")) -> Any:
    """A vLLM config with attention layers, the last of which reads the first one's pages."""
    found = config("int4_per_token_head", {"smoothing": str(file)})
    built = {}
    for name in (*names, "model.layers.2.attn"):
        built[name] = torch.nn.Module()
        built[name].impl = space(kvq=get_backend("int4"), smoothing=None, num_kv_heads=heads, head_size=head_size)
        built[name].impl.kv_sharing_target_layer_name = None if name in names else names[0]
    found.compilation_config = space(static_forward_context={**built, "model.layers.3.mlp": torch.nn.Module()})
    found.device_config = space(device=torch.device("cpu"))
    return found


@pytest.fixture
def layer_index(monkeypatch: pytest.MonkeyPatch) -> None:
    utils = types.ModuleType("vllm.model_executor.models.utils")
    utils.extract_layer_index = lambda name: int(name.split(".")[2])  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.model_executor", "vllm.model_executor.models"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.model_executor.models.utils", utils)


@pytest.mark.usefixtures("layer_index")
@pytest.mark.parametrize(("heads", "world_size", "rank", "first"), [(4, 1, 0, 0), (2, 2, 1, 2), (1, 8, 5, 2)])
def test_layers_get_the_smoothing_of_their_heads(calibrated: Path, heads: int, world_size: int, rank: int, first: int) -> None:
    found, saved = layers(calibrated, heads), ModelSmoothing.load(calibrated)
    with pytest.raises(ArgumentError, match="layers without it, need a vLLM that calls process_weights_after_loading"):
        check_smoothed(found, ["model.layers.0.attn"])
    smooth_layers(found, world_size, rank)
    check_smoothed(found, ["model.layers.0.attn"])
    for name, of in (("model.layers.0.attn", 0), ("model.layers.1.attn", 1), ("model.layers.2.attn", 0)):
        layer = found.compilation_config.static_forward_context[name]
        assert torch.equal(layer.impl.smoothing.mean, saved[of].mean[first : first + heads])
        assert torch.equal(layer.impl.smoothing.balance, saved[of].balance[first : first + heads])
        # Buffers: what vLLM keeps when it sleeps. No part of the model's state, which comes from a checkpoint.
        assert {id(buffer) for buffer in layer.buffers()} >= {id(layer.impl.smoothing.mean), id(layer.impl.smoothing.inverse)}
        assert not layer.state_dict()


@pytest.mark.usefixtures("layer_index")
@pytest.mark.parametrize(
    ("further", "message"),
    [
        ({"heads": 2}, "layer model.layers.0.attn: got one for 4 heads of 16, need one for 2 kv heads of 16"),
        (
            {"head_size": 32},
            "layer model.layers.0.attn: got one for 4 heads of 16, need one for 4 kv heads of 32: a file of ModelSmoothing",
        ),
        (
            {"names": ("model.layers.0.attn", "model.layers.7.attn")},
            r"layer model.layers.7.attn: got layers \[0, 1\], need one with layer 7",
        ),
    ],
)
def test_a_file_of_another_model_is_refused(calibrated: Path, further: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=r"--additional-config kvq\.smoothing.*keys\.safetensors'.* " + message):
        smooth_layers(layers(calibrated, **further), 1, 0)


@pytest.mark.usefixtures("layer_index")
def test_keys_stay_as_they_are_where_that_is_asked_for() -> None:
    found = layers(Path("none"))
    smooth_layers(found, 1, 0)
    check_smoothed(found, ["model.layers.0.attn"])
    assert all(lacks_smoothing(layer) for name, layer in found.compilation_config.static_forward_context.items() if "attn" in name)


def test_a_file_that_holds_no_smoothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.safetensors").write_bytes(b"nothing")
    for name in ("other.safetensors", "absent.safetensors"):
        said = rf"--additional-config kvq.smoothing: got '.*{name}' \(.*\), need a file of ModelSmoothing.save"
        with pytest.raises(ArgumentError, match=said):
            load(str(tmp_path / name))


def test_what_the_warm_up_is_told(calibrated: Path) -> None:
    """It compiles kernels for smoothed keys where keys are smoothed."""
    impl = space(kvq=get_backend("int4"), num_kv_heads=4, num_heads=8, head_size=16, window=(-1, -1), smoothing=None)
    impl.softcap, impl.sinks, impl.alibi_slopes, impl.use_alibi_sqrt, impl.residual = 0.0, None, None, False, None
    impl.content_bytes = lambda dtype: content_bytes(impl.kvq, 16, 16, dtype)
    limits = {"scheduler_config": space(max_num_seqs=8, max_num_batched_tokens=64), "model_config": space(max_model_len=128)}
    asked = space(**limits, speculative_config=space(num_speculative_tokens=3))
    (plain,) = demands_of(impl, asked, 4, 16, torch.bfloat16)
    assert (plain.smoothed, plain.balanced, plain.query_rows) == (False, False, (1, 4))
    impl.smoothing = ModelSmoothing.load(calibrated)[0]
    (smoothed,) = demands_of(impl, asked, 4, 16, torch.bfloat16)
    assert (smoothed.smoothed, smoothed.balanced) == (True, True)
    impl.smoothing = KeySmoothing(impl.smoothing.mean)
    assert not demands_of(impl, asked, 4, 16, torch.bfloat16)[0].balanced
    rotary = RotaryMean.of_bias(torch.ones(4, 16), torch.arange(16).view(8, 2), torch.rand(8))
    impl.smoothing = KeySmoothing(impl.smoothing.mean, None, rotary)
    assert demands_of(impl, asked, 4, 16, torch.bfloat16)[0].rotary_pairs == 16


def test_what_the_warm_up_is_told_of_windows() -> None:
    """Both reads return log-sum-exps, and logits of sinks are the exact one's."""
    impl = space(kvq=get_backend("int4"), num_kv_heads=4, num_heads=8, head_size=16, window=(-1, -1), smoothing=None)
    impl.residual = space(sink_blocks=lambda block_size: 128 // block_size)
    impl.softcap, impl.sinks, impl.alibi_slopes, impl.use_alibi_sqrt = 0.0, torch.zeros(8), None, False
    asked = config("int4_per_token_head", {"residual_length": 40})
    asked.scheduler_config, asked.model_config.max_model_len = space(max_num_seqs=8, max_num_batched_tokens=64), 128
    packed, exact, alone = *demands_of(impl, asked, 4, 128, torch.bfloat16), *window_demands_of(impl, asked, 4, 16, torch.bfloat16)
    assert (packed.partial, packed.key_stops, packed.sinks, packed.longest_keys(1)) == (True, True, None, 128)
    assert (packed.first_block, exact.first_block) == (1, 0)
    assert (exact.mode, exact.partial, exact.key_stops, exact.sinks) == ("none", True, False, torch.float32)
    # The sinks, a block more than 40 keys, and the step's own, fill.
    assert (exact.longest_keys(1), exact.longest_keys(16), exact.longest_keys(17)) == (208, 208, 256)
    # One sequence's whole prompt has no packed keys, so its read is the layer's result.
    assert (alone.partial, alone.max_num_seqs, alone.longest_keys(17)) == (False, 1, 256)


def test_blocks_of_a_window_fit_its_pages() -> None:
    for dtype, mode, size in (("int8_per_token_head", "int8", 32), ("int4_per_token_head", "int4", 64), ("kvq_int2", "int2", 128)):
        settings = Settings.of(config(dtype, {"residual_length": 40}))
        pages = {n: n * content_bytes(get_backend(mode), 128, 128, torch.float16) for n in (size // 2, size)}
        exact = 16 * content_bytes(get_backend("none"), 128, 128, torch.float16)
        assert smallest_window_block(settings, 128) == size and pages[size // 2] < exact <= pages[size]


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
