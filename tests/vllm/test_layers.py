"""Layers, their backends and their builders, over stand-ins for what vLLM gives them: real engines are checked by ``.ci/vllm``."""

from __future__ import annotations

import itertools
import math
import sys
import types
from typing import Any

import pytest
import torch

from kvq_core import get_backend
from kvq_core.errors import ArgumentError
from kvq_core.smoothing.calibration import KeySmoothing
from kvq_core.testing import places
from kvq_vllm import smoothing

pytestmark = pytest.mark.quick
space = types.SimpleNamespace


@pytest.fixture(autouse=True)
def torch_path(monkeypatch: pytest.MonkeyPatch) -> None:
    places.enter("eager", monkeypatch)


def config(dtype: str, **section: Any) -> Any:
    """A vLLM config without layers; ``section``: what ``--additional-config`` says of kvq."""
    return space(
        cache_config=space(cache_dtype=dtype),
        model_config=space(dtype=torch.bfloat16, get_head_size=lambda: 128),
        additional_config={"kvq": section},
        compilation_config=space(static_forward_context={}),
        device_config=space(device=torch.device("cpu")),
    )


def layer_of(kvq_in_vllm: Any, found: Any, name: str, kv_cache_dtype: str | None = None, target: str | None = None) -> Any:
    """A layer of 4 query and 2 kv heads of 32, made as vLLM makes it under ``found``; ``target``: whose pages it reads."""
    kvq_in_vllm.config[:] = [found]
    layer = torch.nn.Module()
    layer.layer_name, layer.kv_sharing_target_layer_name = name, target
    layer.impl = kvq_in_vllm.impl.KVQImpl(4, 32, 1.0, 2, kv_cache_dtype=kv_cache_dtype or found.cache_config.cache_dtype)
    found.compilation_config.static_forward_context[name] = layer
    return layer


# -- block sizes ----------------------------------------------------------------------------------------------------------


def chosen(backends: list[Any], default: int) -> int:
    """The block size that vLLM takes where the user asks for none: until 0.31 that of the first backend, later one that fits all."""
    if len(backends) == 1:
        return int(backends[0].get_preferred_block_size(default))
    if all(backend.supports_block_size(default) for backend in backends):
        return default
    sizes = [[size.base for size in backend.get_supported_kernel_block_sizes()] for backend in backends]
    candidates = sorted({math.lcm(*each) for each in itertools.product(*sizes)})
    return next(size for size in candidates if all(backend.supports_block_size(size) for backend in backends))


@pytest.mark.parametrize(("dtype", "size"), [("int8_per_token_head", 32), ("int4_per_token_head", 64), ("kvq_int2", 128)])
def test_every_vllm_finds_blocks_that_a_window_fits(kvq_in_vllm: Any, dtype: str, size: int) -> None:
    packed, exact = kvq_in_vllm.backend.KVQBackend, kvq_in_vllm.residual.ResidualBackend
    kvq_in_vllm.config[:] = [config(dtype, residual_length=64)]
    assert chosen([packed], 16) == chosen([packed, exact], 16) == chosen([exact, packed], 16) == size
    assert chosen([packed, exact], 128) == 128
    # A size that the user asks for, and the exact rows' own blocks.
    assert packed.supports_block_size(size + 16) and exact.supports_block_size(size + 16)
    assert {size.base for size in exact.get_supported_kernel_block_sizes(None)} >= {16}
    kvq_in_vllm.config[:] = [config(dtype)]
    assert chosen([packed], 16) == 16


# -- draft models ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("served", "draft"), [("kvq_int4", "auto"), ("kvq_int2", "kvq_int8"), ("auto", "kvq_int4")])
def test_a_draft_model_with_a_dtype_of_its_own_is_refused(kvq_in_vllm: Any, served: str, draft: str) -> None:
    target, other = config(served), config(draft)
    layer_of(kvq_in_vllm, target, "model.layers.0.attn")
    layer_of(kvq_in_vllm, target, "model.layers.1.attn", "auto")  # a skipped one
    other.compilation_config = target.compilation_config
    with pytest.raises(ArgumentError, match=f"--speculative-config kv_cache_dtype: got {draft}, need {served}, as the served model"):
        layer_of(kvq_in_vllm, other, "draft_model.layers.0.attn")
    other.cache_config.cache_dtype = served
    layer_of(kvq_in_vllm, other, "draft_model.layers.0.attn")


def test_bytes_of_a_draft_s_layers_are_not_priced_by_the_served_model_s_name(kvq_in_vllm: Any) -> None:
    """Of a served model whose layers are another backend's."""
    kvq_in_vllm.config[:] = [config("auto")]
    with pytest.raises(ArgumentError, match="--kv-cache-dtype: got auto, need a quantized name"):
        kvq_in_vllm.backend.KVQBackend.customize_spec(space(state_content_bytes=None, kv_quant_mode=12, head_size=32))


# -- shared pages ---------------------------------------------------------------------------------------------------------

FIRST, SECOND = "model.layers.0.attn", "model.layers.1.attn"


def builder_of(kvq_in_vllm: Any, found: Any) -> Any:
    """Of all layers, as vLLM makes it once it knows which layers share pages."""
    found.scheduler_config, found.model_config.max_model_len = space(max_num_batched_tokens=64), 128
    found.compilation_config.max_cudagraph_capture_size, found.parallel_config = 0, space()
    names = [name for name, layer in found.compilation_config.static_forward_context.items() if hasattr(layer, "impl")]
    return kvq_in_vllm.builder.KVQMetadataBuilder(type("FullAttentionSpec", (), {})(), names, found, torch.device("cpu"))


@pytest.mark.parametrize(("first", "second"), [("auto", "kvq_int4"), ("kvq_int4", "auto"), (None, "kvq_int4"), ("kvq_int4", None)])
def test_layers_that_share_pages_have_one_mode(kvq_in_vllm: Any, first: str | None, second: str | None) -> None:
    """One of them is skipped, or another backend's."""
    found = config("kvq_int4")
    for name, dtype, target in ((FIRST, first, None), (SECOND, second, FIRST)):
        layer = layer_of(kvq_in_vllm, found, name, dtype or "auto", target)
        if dtype is None:
            del layer.impl
    with pytest.raises(
        ArgumentError, match=f"layer {SECOND}: got .*, need .* as {FIRST}, whose pages it reads: --attention-backend CUSTOM"
    ):
        builder_of(kvq_in_vllm, found)


def test_a_draft_that_reads_the_served_model_s_pages_reads_keys_as_they_were_stored(
    kvq_in_vllm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM says which pages those are when the draft is loaded."""
    own = {FIRST: KeySmoothing(torch.ones(2, 32)), "draft.layers.0.attn": KeySmoothing(torch.zeros(2, 32))}
    monkeypatch.setattr(smoothing, "_of_weights", lambda layer: own[layer.layer_name])
    found = config("kvq_int4")
    served, draft = (layer_of(kvq_in_vllm, found, name) for name in own)
    for layer in (served, draft):
        layer.impl.process_weights_after_loading(torch.bfloat16)
    assert draft.impl.smoothing is not served.impl.smoothing
    draft.kv_sharing_target_layer_name = FIRST
    builder_of(kvq_in_vllm, found)
    assert draft.impl.smoothing is served.impl.smoothing and bool(served.impl.smoothing.mean.all())
    own[FIRST] = KeySmoothing(torch.full((2, 32), 3.0))
    draft.impl.process_weights_after_loading(torch.bfloat16)
    assert draft.impl.smoothing is served.impl.smoothing and bool((served.impl.smoothing.mean == 3).all())


@pytest.mark.parametrize("option", ["residual_length", "sink_tokens"])
def test_exact_rows_do_not_vanish(kvq_in_vllm: Any, option: str) -> None:
    """Where a loader does not call ``process_weights_after_loading``."""
    found = config("kvq_int4", **{option: 8})
    layer_of(kvq_in_vllm, found, FIRST)
    layer_of(kvq_in_vllm, found, SECOND, "auto")  # a skipped one, which has none
    with pytest.raises(ArgumentError, match=rf"kvq\.{option}: got 8, but layers without exact rows: {FIRST}, need a --load-format"):
        builder_of(kvq_in_vllm, found)
    kvq_in_vllm.residual.add_windows(found)
    builder_of(kvq_in_vllm, found)


# -- what weights say -----------------------------------------------------------------------------------------------------


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


def marlin_order(size: int) -> torch.Tensor:
    """vLLM's ``marlin_permute_bias`` of 0, 1, ..."""
    column = torch.tensor([2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)])
    return torch.arange(size).view(-1, 32)[:, column].flatten()


def attention(kvq_in_vllm: Any, bias: torch.Tensor | None, order: torch.Tensor, fault: Any = None) -> Any:
    """An attention layer of 4 query and 2 kv heads of 32 in its module, whose projection keeps ``bias`` [q|k|v] in ``order``."""
    linear, rotary = (sys.modules[f"vllm.model_executor.layers.{name}"] for name in ("linear", "rotary_embedding.base"))
    owner, layer = torch.nn.Module(), torch.nn.Module()
    kept = None if bias is None else bias[order]
    owner.qkv_proj = linear.QKVParallelLinear(4, 2, 32, kept, Method(order, fault))  # type: ignore[attr-defined]
    owner.rotary_emb = rotary.RotaryEmbedding(32)  # type: ignore[attr-defined]
    layer.layer_name, layer.owner = "model.layers.0.attn", [owner]
    layer.impl = space(kvq=get_backend("int4"))
    kvq_in_vllm.weights._remember(owner, "attn", layer)
    return layer


BIAS = torch.arange(256.0)


@pytest.mark.parametrize("order", [torch.arange(256), marlin_order(256)], ids=["plain", "marlin"])
def test_a_bias_is_read_in_the_channels_that_it_is_added_to(kvq_in_vllm: Any, order: torch.Tensor) -> None:
    found = kvq_in_vllm.weights.weights_smoothing(attention(kvq_in_vllm, BIAS, order))
    assert torch.equal(found.rotary.at(torch.tensor([0]))[0].float(), BIAS[128:192].view(2, 32))


@pytest.mark.parametrize("fault", [RuntimeError("no"), torch.nan, torch.zeros(100)])
def test_a_bias_whose_order_is_not_known_stays(kvq_in_vllm: Any, fault: Any, caplog: pytest.LogCaptureFixture) -> None:
    layer = attention(kvq_in_vllm, BIAS, marlin_order(256), fault)
    assert kvq_in_vllm.weights.weights_smoothing(layer) is None
    assert "key biases of model.layers.0.attn stay in its keys: their order" in caplog.text
    caplog.clear()
    assert kvq_in_vllm.weights.weights_smoothing(attention(kvq_in_vllm, None, torch.arange(256))) is None and not caplog.text


def test_a_smoothing_follows_new_weights_in_its_tensors(kvq_in_vllm: Any, caplog: pytest.LogCaptureFixture) -> None:
    layer, found = attention(kvq_in_vllm, BIAS, marlin_order(256)), config("kvq_int4")
    (owner,) = layer.owner
    impl = layer.impl = layer_of(kvq_in_vllm, found, FIRST).impl
    found.compilation_config.static_forward_context[FIRST] = layer
    impl.process_weights_after_loading(torch.bfloat16)
    operands = impl.smoothing.operands
    owner.qkv_proj.bias.data = (255 - BIAS)[marlin_order(256)]
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
