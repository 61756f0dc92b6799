"""Layers, their backends and their builders, over stand-ins for what vLLM gives them: real engines are checked by ``.ci/vllm``."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from kvq_core import get_backend
from kvq_core.errors import ArgumentError
from kvq_core.smoothing.calibration import KeySmoothing, KeyStatistics, ModelSmoothing
from kvq_core.smoothing.qk_norm import rows_of_heads
from kvq_vllm import smoothing
from kvq_vllm.demands import has_kernels
from kvq_vllm.log import warn_once
from kvq_vllm.sharing import share
from kvq_vllm.smoothing import check_smoothed, load, smooth_layers

pytestmark = pytest.mark.quick
space = types.SimpleNamespace
FIRST, SECOND, DRAFT = "model.layers.0.attn", "model.layers.1.attn", "draft_model.layers.0.attn"


@pytest.fixture(autouse=True)
def nothing_said() -> None:
    """Warnings of other tests do not count as said."""
    warn_once.cache_clear()


def config(dtype: str, **section: Any) -> Any:
    """A vLLM config without layers; ``section``: what ``--additional-config`` says of kvq."""
    return space(
        cache_config=space(cache_dtype=dtype),
        model_config=space(dtype=torch.bfloat16, get_head_size=lambda: 128, max_model_len=128),
        additional_config={"kvq": section},
        compilation_config=space(static_forward_context={}, max_cudagraph_capture_size=0),
        device_config=space(device=torch.device("cpu")),
        scheduler_config=space(max_num_batched_tokens=64),
        parallel_config=space(),
    )


def layer_of(
    kvq_in_vllm: Any, found: Any, name: str, dtype: str | None = None, target: str | None = None, heads: int = 2, head_size: int = 32
) -> Any:
    """A layer of 4 query heads and ``heads`` of K and V, made as vLLM makes it under ``found``; ``target``: whose pages it reads."""
    kvq_in_vllm.config[:] = [found]
    layer = torch.nn.Module()
    layer.layer_name, layer.kv_sharing_target_layer_name = name, target
    layer.impl = kvq_in_vllm.impl.KVQImpl(4, head_size, 1.0, heads, kv_cache_dtype=dtype or found.cache_config.cache_dtype)
    found.compilation_config.static_forward_context[name] = layer
    return layer


def builder_of(kvq_in_vllm: Any, found: Any) -> Any:
    """Of all layers, as vLLM makes it once it knows which layers share pages."""
    names = [name for name, layer in found.compilation_config.static_forward_context.items() if hasattr(layer, "impl")]
    return kvq_in_vllm.builder.KVQMetadataBuilder(type("FullAttentionSpec", (), {})(), names, found, torch.device("cpu"))


# -- what is asked before there are pages -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "own", "size"),
    [
        ("int8_per_token_head", {}, 32),
        ("int8_per_token_head", {"mode": "k8v4"}, 64),
        ("int8_per_token_head", {"mode": "int2"}, 128),
        ("int4_per_token_head", {}, 64),
        ("kvq_int2", {}, 128),
    ],
)
def test_a_window_asks_for_blocks_that_fit_it(kvq_in_vllm: Any, dtype: str, own: dict[str, Any], size: int) -> None:
    """``check_blocks.py`` shows which ones vLLM takes then."""
    packed, exact = kvq_in_vllm.backend.KVQBackend, kvq_in_vllm.residual.ResidualBackend
    for section, least in (({"residual_length": 64} | own, size), (own, 16)):
        kvq_in_vllm.config[:] = [config(dtype, **section)]
        assert [one.get_preferred_block_size(default) for one in (packed, exact) for default in (16, 128)] == [least, 128] * 2
        assert [one.base for one in exact.get_supported_kernel_block_sizes(None)] == [16, least]
        assert [exact.supports_block_size(asked) for asked in (None, least - 16, least, size + 8, size + 16)] == [
            True,
            False,
            True,
            False,
            True,
        ]
        assert packed.supports_block_size(16) and not packed.supports_block_size(24)


@pytest.mark.parametrize(("served", "draft"), [("kvq_int4", "auto"), ("kvq_int2", "kvq_int8"), ("auto", "kvq_int4")])
def test_a_draft_model_with_a_dtype_of_its_own_is_refused(kvq_in_vllm: Any, served: str, draft: str) -> None:
    target, other = config(served), config(draft)
    layer_of(kvq_in_vllm, target, FIRST)
    layer_of(kvq_in_vllm, target, SECOND, "auto")  # a skipped one
    other.compilation_config = target.compilation_config
    with pytest.raises(ArgumentError, match=f"--speculative-config kv_cache_dtype: got {draft}, need {served}, as the served model"):
        layer_of(kvq_in_vllm, other, DRAFT)
    other.cache_config.cache_dtype = served
    layer_of(kvq_in_vllm, other, DRAFT)


def test_bytes_of_a_draft_s_layers_are_not_priced_by_the_served_model_s_name(kvq_in_vllm: Any) -> None:
    """Of a served model whose layers are another backend's."""
    kvq_in_vllm.config[:] = [config("auto")]
    with pytest.raises(ArgumentError, match="--kv-cache-dtype: got auto, need a quantized name"):
        kvq_in_vllm.backend.KVQBackend.customize_spec(space(state_content_bytes=None, kv_quant_mode=12, head_size=32))


def test_slopes_survive_sleep(kvq_in_vllm: Any) -> None:
    """vLLM makes layers under their device, in memory of which its deepest sleep keeps parameters and buffers alone."""
    kvq_in_vllm.config[:] = [config("kvq_int4")]
    with torch.device("meta"):
        impl = kvq_in_vllm.impl.KVQImpl(4, 32, 1.0, 2, alibi_slopes=[1.0, 0.5, 0.25, 0.125], kv_cache_dtype="kvq_int4")
    assert impl.alibi_slopes.tolist() == [1.0, 0.5, 0.25, 0.125]
    rows = torch.empty(3, 4, 32, device="meta")
    moved = []
    for _ in range(2):
        impl.forward(None, rows, rows, rows, rows[:0], None, rows)
        moved.append(impl.alibi_slopes)
    assert moved[0].device == rows.device and moved[1] is moved[0]


# -- shared pages and exact rows --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "second"), [("auto", "kvq_int4"), ("kvq_int4", "auto"), (None, "kvq_int4"), ("kvq_int4", None)])
def test_layers_that_share_pages_have_one_mode(kvq_in_vllm: Any, first: str | None, second: str | None) -> None:
    """One of them is skipped, or another backend's."""
    found = config("kvq_int4")
    for name, dtype, target in ((FIRST, first, None), (SECOND, second, FIRST)):
        layer = layer_of(kvq_in_vllm, found, name, dtype or "auto", target)
        if dtype is None:
            del layer.impl
    message = f"layer {SECOND}: got .*, need .* as {FIRST}, whose pages it reads: --attention-backend CUSTOM"
    with pytest.raises(ArgumentError, match=message):
        builder_of(kvq_in_vllm, found)


def test_a_draft_that_reads_the_served_model_s_pages_reads_keys_as_they_were_stored(
    kvq_in_vllm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM says which pages those are when the draft is loaded."""
    own = {FIRST: KeySmoothing(torch.ones(2, 32)), DRAFT: KeySmoothing(torch.zeros(2, 32))}
    monkeypatch.setattr(smoothing, "_of_weights", lambda layer: own[layer.layer_name])
    found = config("kvq_int4")
    served, draft = (layer_of(kvq_in_vllm, found, name) for name in own)
    for layer in (served, draft):
        layer.impl.process_weights_after_loading(torch.bfloat16)
    assert draft.impl.smoothing is not served.impl.smoothing
    draft.kv_sharing_target_layer_name = FIRST
    builder_of(kvq_in_vllm, found)
    assert draft.impl.smoothing is served.impl.smoothing and bool((served.impl.smoothing.mean == 1).all())
    own[FIRST] = KeySmoothing(torch.full((2, 32), 3.0))
    draft.impl.process_weights_after_loading(torch.bfloat16)
    assert draft.impl.smoothing is served.impl.smoothing and bool((served.impl.smoothing.mean == 3).all())


@pytest.mark.parametrize("option", ["residual_length", "sink_tokens"])
def test_exact_rows_do_not_vanish(kvq_in_vllm: Any, option: str) -> None:
    """Where a loader does not call ``process_weights_after_loading``."""
    found = config("kvq_int4", **{option: 8})
    layer_of(kvq_in_vllm, found, FIRST)
    layer_of(kvq_in_vllm, found, SECOND, "auto")  # a skipped one, which has none
    with pytest.raises(
        ArgumentError, match=rf"kvq\.{option}: got 8, but layers without exact rows: {FIRST}, need .* not tensorizer, nor vLLM's"
    ):
        builder_of(kvq_in_vllm, found)
    kvq_in_vllm.residual.add_windows(found)
    builder_of(kvq_in_vllm, found)


# -- a file of smoothed keys ------------------------------------------------------------------------------------------------


@pytest.fixture
def calibrated(tmp_path: Path) -> Path:
    """Smoothing of layers 0 and 1, each of 4 heads of 16."""
    file, generator = tmp_path / "keys.safetensors", torch.Generator().manual_seed(0)
    keys = {layer: torch.randn(64, 4, 16, generator=generator) + layer for layer in (0, 1)}
    ModelSmoothing({layer: KeySmoothing.estimate(rows, rows) for layer, rows in keys.items()}).save(file)
    return file


def model_of(kvq_in_vllm: Any, file: object, heads: int = 4, head_size: int = 16, names: tuple[str, ...] = (FIRST, SECOND)) -> Any:
    """A vLLM config with attention layers, the last of which reads the first one's pages."""
    found = config("kvq_int4", smoothing=str(file))
    for name, target in (*((name, None) for name in names), ("model.layers.2.attn", FIRST)):
        layer_of(kvq_in_vllm, found, name, None, target, heads, head_size)
    found.compilation_config.static_forward_context["model.layers.3.mlp"] = torch.nn.Module()
    return found


@pytest.mark.parametrize(("heads", "world_size", "rank", "first"), [(4, 1, 0, 0), (2, 2, 1, 2), (1, 8, 5, 2)])
def test_layers_get_the_smoothing_of_their_heads(
    kvq_in_vllm: Any, calibrated: Path, heads: int, world_size: int, rank: int, first: int
) -> None:
    found, saved = model_of(kvq_in_vllm, calibrated, heads), ModelSmoothing.load(calibrated)
    layers = found.compilation_config.static_forward_context
    with pytest.raises(ArgumentError, match="layers without it, need a vLLM that calls process_weights_after_loading"):
        check_smoothed(found, [FIRST])
    smooth_layers(found, world_size, rank)
    share(found)
    check_smoothed(found, [FIRST])
    for name, number in ((FIRST, 0), (SECOND, 1)):
        given, layer = layers[name].impl.smoothing, layers[name]
        assert torch.equal(given.mean, saved[number].mean[first : first + heads])
        assert torch.equal(given.balance, saved[number].balance[first : first + heads])
        # Buffers: what vLLM keeps when it sleeps. No part of the model's state, which comes from a checkpoint.
        assert {id(buffer) for buffer in layer.buffers()} >= {id(given.mean), id(given.write_factor)} and not layer.state_dict()
    assert layers["model.layers.2.attn"].impl.smoothing is layers[FIRST].impl.smoothing


def test_a_file_is_the_served_model_s_alone(kvq_in_vllm: Any, calibrated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that come later are a draft's, whether they have numbers of the served model's layers or others."""
    found, own = model_of(kvq_in_vllm, calibrated), KeySmoothing(torch.ones(4, 16))
    smooth_layers(found, 1, 0)
    monkeypatch.setattr(smoothing, "_of_weights", lambda layer: own)
    drafts = [layer_of(kvq_in_vllm, found, name, None, None, 4, 16) for name in (DRAFT, "model.layers.7.attn")]
    smooth_layers(found, 1, 0)
    check_smoothed(found, [layer.layer_name for layer in drafts])
    assert all(torch.equal(layer.impl.smoothing.mean, own.mean) for layer in drafts)
    assert not torch.equal(found.compilation_config.static_forward_context[FIRST].impl.smoothing.mean, own.mean)


def test_keys_stay_as_they_are_where_that_is_asked_for(kvq_in_vllm: Any) -> None:
    found = model_of(kvq_in_vllm, "none")
    smooth_layers(found, 1, 0)
    check_smoothed(found, [FIRST])
    assert found.compilation_config.static_forward_context[FIRST].impl.smoothing is None


@pytest.mark.parametrize(
    ("further", "message"),
    [
        ({"heads": 2}, f"layer {FIRST}: got one for 4 heads of 16, need one for 2 kv heads of 16"),
        ({"head_size": 32}, f"layer {FIRST}: got one for 4 heads of 16, need one for 4 kv heads of 32: a file of ModelSmoothing"),
        ({"names": (FIRST, "model.layers.7.attn")}, r"layer model.layers.7.attn: got layers \[0, 1\], need one with layer 7"),
    ],
)
def test_a_file_of_another_model_is_refused(kvq_in_vllm: Any, calibrated: Path, further: dict[str, Any], message: str) -> None:
    found = model_of(kvq_in_vllm, calibrated, **further)
    with pytest.raises(ArgumentError, match=r"--additional-config kvq\.smoothing.*keys\.safetensors'.* " + message):
        smooth_layers(found, 1, 0)
    calibrated.write_bytes(b"nothing")
    with pytest.raises(ArgumentError, match=r"got '.*keys.safetensors' \(.*\), need a file of ModelSmoothing.save"):
        load(str(calibrated))


def test_a_file_with_an_order_of_channels_is_for_modes_that_take_one(kvq_in_vllm: Any, tmp_path: Path) -> None:
    keys = torch.randn(64, 4, 32, generator=torch.Generator().manual_seed(0))
    statistics = KeyStatistics()
    statistics.add(keys, keys)
    file = tmp_path / "keys.safetensors"
    ModelSmoothing(dict.fromkeys((0, 1), statistics.smoothing(ordered=True))).save(file)
    found = model_of(kvq_in_vllm, file, head_size=32)
    with pytest.raises(ArgumentError, match=f"layer {FIRST}: got an order of channels, for heads of 32, need one without: mode int4"):
        smooth_layers(found, 1, 0)


def test_layers_that_were_not_reached_are_told_of(kvq_in_vllm: Any, caplog: pytest.LogCaptureFixture) -> None:
    """vLLM's Transformers backend before 0.30 hides its attention layers."""
    found, said = config("kvq_int4"), f"kvq: keys of {FIRST} stay as they are: vLLM has not called process_weights_after_loading"
    layer_of(kvq_in_vllm, found, FIRST)
    layer_of(kvq_in_vllm, found, SECOND, "auto")  # a skipped one
    found.additional_config["kvq"] = {"smoothing": "none"}
    builder_of(kvq_in_vllm, found)
    assert not caplog.text
    found.additional_config["kvq"] = {}
    for _ in range(2):
        builder_of(kvq_in_vllm, found)
    assert caplog.text.count(said) == 1 and SECOND not in caplog.text


# -- what weights say -------------------------------------------------------------------------------------------------------


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
        assert found is wanted or (found is not None and wanted is not None and torch.equal(found, wanted))


class Method:
    """How a projection is computed, over a bias in ``order``; ``fault``: what its outputs are in place of right ones."""

    def __init__(self, order: torch.Tensor, fault: Any = None) -> None:
        self.order, self.fault = order, fault

    def apply(self, projection: Any, rows: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        if isinstance(self.fault, Exception):
            raise self.fault
        added = torch.empty_like(bias)
        added[self.order] = bias
        return rows.sum(-1, keepdim=True) + (added if self.fault is None else self.fault)


def attention(kvq_in_vllm: Any, bias: torch.Tensor | None, order: torch.Tensor, fault: Any = None) -> Any:
    """An attention layer of 4 query and 2 kv heads of 32 in its module, whose projection keeps ``bias`` [q|k|v] in ``order``."""
    linear, rotary = (sys.modules[f"vllm.model_executor.layers.{name}"] for name in ("linear", "rotary_embedding.base"))
    owner, layer = torch.nn.Module(), torch.nn.Module()
    kept = None if bias is None else bias[order]
    owner.qkv_proj = linear.QKVParallelLinear(4, 2, 32, kept, Method(order, fault))  # type: ignore[attr-defined]
    owner.rotary_emb = rotary.RotaryEmbedding(32)  # type: ignore[attr-defined]
    layer.layer_name, layer.owner = FIRST, [owner]
    layer.impl = space(kvq=get_backend("int4"))
    kvq_in_vllm.weights._remember(owner, "attn", layer)
    return layer


BIAS = torch.arange(256.0)
# vLLM's marlin_permute_bias of 0, 1, ...
MARLIN = torch.arange(256).view(-1, 32)[:, [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]].flatten()


@pytest.mark.parametrize("order", [torch.arange(256), MARLIN], ids=["plain", "marlin"])
def test_a_bias_is_read_in_the_channels_that_it_is_added_to(kvq_in_vllm: Any, order: torch.Tensor) -> None:
    found = kvq_in_vllm.weights.weights_smoothing(attention(kvq_in_vllm, BIAS, order))
    assert torch.equal(found.rotary.at(torch.tensor([0]))[0].float(), BIAS[128:192].view(2, 32))


@pytest.mark.parametrize("fault", [RuntimeError("no"), torch.nan, torch.zeros(100)])
def test_a_bias_whose_order_is_not_known_stays(kvq_in_vllm: Any, fault: Any, caplog: pytest.LogCaptureFixture) -> None:
    weights_smoothing = kvq_in_vllm.weights.weights_smoothing
    assert weights_smoothing(attention(kvq_in_vllm, None, MARLIN)) is None and not caplog.text
    assert weights_smoothing(attention(kvq_in_vllm, BIAS, MARLIN, fault)) is None
    assert f"key biases of {FIRST} stay in its keys: their order" in caplog.text


def test_a_module_without_one_projection_is_told_of(kvq_in_vllm: Any, caplog: pytest.LogCaptureFixture) -> None:
    """vLLM's Transformers backend does not fuse every model's."""
    layer = attention(kvq_in_vllm, BIAS, MARLIN)
    (owner,) = layer.owner
    del owner.qkv_proj
    for _ in range(2):
        assert kvq_in_vllm.weights.weights_smoothing(layer) is None
    assert caplog.text.count("kvq: keys of Module stay as they are: it has 0 QKVParallelLinear") == 1


def test_a_smoothing_follows_new_weights_in_its_tensors(kvq_in_vllm: Any, caplog: pytest.LogCaptureFixture) -> None:
    layer, found = attention(kvq_in_vllm, BIAS, MARLIN), config("kvq_int4")
    (owner,) = layer.owner
    impl = layer.impl = layer_of(kvq_in_vllm, found, FIRST).impl
    found.compilation_config.static_forward_context[FIRST] = layer
    impl.process_weights_after_loading(torch.bfloat16)
    operands = impl.smoothing.operands
    owner.qkv_proj.bias.data = (255 - BIAS)[MARLIN]
    kvq_in_vllm.config[:] = [None]  # vLLM 0.26 reloads without one
    impl.process_weights_after_loading(torch.bfloat16)
    assert all(one is other for one, other in zip(impl.smoothing.operands, operands, strict=True))
    new = kvq_in_vllm.weights.weights_smoothing(layer)
    assert impl.smoothing.fingerprint == new.fingerprint
    assert all(torch.equal(one.view(torch.int32), other.view(torch.int32)) for one, other in zip(operands, new.operands, strict=True))
    # Weights of another kind.
    del owner.rotary_emb
    impl.process_weights_after_loading(torch.bfloat16)
    assert impl.smoothing.fingerprint == new.fingerprint and f"keys of {layer.layer_name} keep the smoothing" in caplog.text


def test_only_modes_with_kernels_are_captured() -> None:
    """What runs in plain torch looks at values: a mode without ``kernels``, or one whose ``kernels`` returns None."""
    pytest.importorskip("triton")
    forgetful = type("Forgetful", (type(get_backend("int4")),), {"mode": "forgetful", "kernels": lambda self: None})()
    assert [has_kernels(backend) for backend in (get_backend("int4"), get_backend("int8/int4"), forgetful)] == [True, True, False]
