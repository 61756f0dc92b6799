"""KVQCache as a container: rows, lengths, blocks and bytes; and everything it refuses."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, DynamicCache, Gemma3Config, Gemma3ForConditionalGeneration, StaticCache, cache_utils
from transformers.masking_utils import create_causal_mask

import tiny_models
from kvq_core import ArgumentError, KVQError, UnknownModeError
from kvq_core.smoothing.calibration import ModelSmoothing
from kvq_transformers import KVQCache, calibrate, enable
from kvq_transformers.attention import kvq_attention, switch_off, switch_on
from kvq_transformers.naming import GENERATE, cache_argument
from kvq_transformers.rows import chunk_length
from transformers_families import (
    COMMON,
    MIXED,
    begun,
    biased,
    eager_twin,
    logits_in_steps,
    make_config,
    make_model,
    prompts,
    whole_text,
    worst,
)

pytestmark = pytest.mark.usefixtures("torch_path")
IDS = prompts(2, 40)["input_ids"]


def test_fewer_queries_than_keys_are_the_last() -> None:
    """As when another cache hands over all of its keys. Pages of a fixed size never hold such."""
    model, columns = make_model("Mistral"), 40
    generator = torch.Generator().manual_seed(0)
    size, mask = model.config.head_dim, torch.ones(2, 1, 1, columns, dtype=torch.bool)
    mask[1, ..., :5] = False
    query = torch.randn(2, 4, columns, size, generator=generator)
    rows = [torch.randn(2, 2, columns, size, generator=generator) for _ in range(2)]
    found = []
    for count in (columns, 3):
        cache = KVQCache(model.config, "none")
        key, value = cache.update(*rows, 0)
        found.append(kvq_attention(model.model.layers[0].self_attn, query[:, :, -count:], key, value, mask)[0])
    key, value = KVQCache(model.config, "none", max_cache_len=columns).update(*rows, 0)
    with pytest.raises(ArgumentError, match=r"^query: got 3 columns, need 40, as keys"):
        kvq_attention(model.model.layers[0].self_attn, query[:, :, -3:], key, value, mask)
    assert found[1].shape == (2, 3, 4, size)
    torch.testing.assert_close(found[1], found[0][:, -3:], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("with_cache", [False, True])
@torch.no_grad()
def test_a_forward_without_a_kvq_cache_is_plain_attention(with_cache: bool) -> None:
    """Padding between tokens in a window is refused there, too."""
    model, inputs = make_model("Gemma2"), prompts(2, 40, (0, 7))
    mask, gold, columns = inputs["attention_mask"], whole_text(model, inputs), [20, 19, 1] if with_cache else [40]
    KVQCache(model.config)  # switches the model to kvq's attention

    def found() -> torch.Tensor:
        return logits_in_steps(model, inputs, DynamicCache(config=model.config) if with_cache else None, columns)

    assert worst(found(), gold, mask) < 1e-3
    mask[1, 16:19] = 0
    with pytest.raises(ArgumentError, match="padding between tokens, within the window"):
        found()


@torch.no_grad()
def test_bytes_are_of_tokens_and_of_exact_rows() -> None:
    """Padding takes no blocks, growth wastes at most a started block and two to spare a row, and beams share what they have in common."""
    model, inputs = make_model("Llama"), prompts(3, 160, (150, 150, 0))
    cache, packed, windowed = (KVQCache(model.config, mode, residual_length=n) for mode, n in (("none", 0), ("int4", 0), ("int4", 16)))
    for one in (cache, packed, windowed):
        model(**inputs, **{GENERATE: one})
    assert cache.bytes_per_token == 2 * 2 * 2 * 64 * 4 and packed.bytes_per_token == 2 * 2 * 2 * (64 // 2 + 4)
    assert windowed.nbytes - packed.nbytes >= (10 + 10 + 16) * cache.bytes_per_token
    tokens = cache.nbytes / cache.bytes_per_token
    assert 180 <= tokens <= 180 + 3 * 3 * 16
    cache.batch_select_indices(torch.tensor([2] * 8))
    model(inputs["input_ids"][:1, :1].expand(8, 1), **{GENERATE: cache})
    assert cache.nbytes / cache.bytes_per_token <= tokens + 8 * 3 * 16


def test_long_prompts_behind_a_window_are_exact_and_take_its_space(capacity: dict[str, Any]) -> None:
    """Longer than several chunks, padded, then decoded on."""
    window = 11
    steps = [2 * chunk_length(window) + 100, 1, 3]
    model = make_model("Mistral", num_hidden_layers=1, max_position_embeddings=4096)
    inputs, cache = prompts(2, sum(steps), (0, 700)), KVQCache(model.config, "none", **{name: sum(steps) for name in capacity})
    found = logits_in_steps(model, inputs, cache, steps)
    expected = logits_in_steps(eager_twin(model), inputs, DynamicCache(config=model.config), steps)
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(found[real], expected[real], rtol=1e-3, atol=1e-3)
    assert int(cache.get_seq_length()) == sum(steps)
    assert cache.nbytes / cache.bytes_per_token <= 2 * (window + chunk_length(window) + 3 * 16) * 1.25


def test_a_composite_models_text_decoder_is_switched_alone() -> None:
    """Gemma 3 with its vision tower: text goes through kvq's pages, an image's tokens see each other and are refused."""
    text = COMMON | MIXED | {"head_dim": 64}
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
    config = Gemma3Config(text_config=text, vision_config=vision | {"patch_size": 14}, mm_tokens_per_image=4, image_token_index=5)
    torch.manual_seed(0)
    model, ids = Gemma3ForConditionalGeneration(config).eval(), IDS[:, :20].clamp(min=6)
    options = {"max_new_tokens": 6, "do_sample": False}
    expected, tower = model.generate(ids, **options), config.vision_config._attn_implementation
    assert torch.equal(enable(model, "none").generate(ids, **options), expected)
    assert config.text_config._attn_implementation == "kvq" and config.vision_config._attn_implementation == tower
    ids[:, 3:7] = 5
    image = {"pixel_values": torch.zeros(2, 3, 28, 28), "token_type_ids": (ids == 5).long()}
    with pytest.raises(ArgumentError, match="tokens that see later ones"):
        model.generate(ids, **image, **options)


def test_towers_of_a_config_that_is_its_own_text_decoder_s_stay_as_they_are() -> None:
    config = tiny_models.tiny_config("phi4_multimodal")
    config._attn_implementation = {"": "sdpa", "vision_config": "eager", "audio_config": "sdpa"}
    for use, name in ((switch_on, "kvq"), (switch_off, "sdpa")):
        use(config)
        found = [one._attn_implementation for one in (config, config.vision_config, config.audio_config)]
        assert found == [name, "eager", "sdpa"]


@pytest.mark.skipif(not hasattr(cache_utils, "DummyLayer"), reason="this transformers has no layer that caches nothing")
@torch.no_grad()
def test_layers_that_cache_nothing_are_copied_and_cropped() -> None:
    model = tiny_models.tiny_model(tiny_models.tiny_config("nemotron_h", layer_types=["attention", "mlp"], num_hidden_layers=2))
    cache = KVQCache(model, "none")
    model(IDS[:, :20], **{GENERATE: cache})
    wanted = model(IDS[:, 20:21], **{GENERATE: copy.copy(cache)}).logits
    for twin in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        model(IDS[:, 25:27], **{GENERATE: twin})
        twin.crop(-2)
        torch.testing.assert_close(model(IDS[:, 20:21], **{GENERATE: twin}).logits, wanted)


WRONG: list[Any] = [[], "a", {}, object(), [5], [-3], [2**70], [0.5], np.array([0.5]), torch.eye(2).to_sparse(), torch.tensor([[0]])]
WRONG += [torch.tensor([0, 1], dtype=torch.uint8)]
"""What no argument may be."""
NUMBERS: list[Any] = [1.5, True, torch.tensor([True]), torch.tensor([0.5])]
"""What only scales may be."""
BAD: dict[str, list[Any]] = {
    "mode": [None, *NUMBERS, 3, "", ("int4",), ("int4", 3), {0: None}, {"x": "int4"}, {True: "int4"}, {0: []}, b"int4"],
    "max_cache_len": [*NUMBERS, 2**70, 0, -1, "8"],
    "block_size": [None, *NUMBERS, 2**70, 0, 7, 8.0, "16"],
    "smoothing": [*NUMBERS, 3, "mean", torch.ones(2)],
    "k_scale": [0, -1.0, float("nan"), {9: 1.0}, {0: None, 1: 1.0}, torch.ones(3)],
    "v_scale": [0.0, {0: 1.0}],
    "residual_length": [None, *NUMBERS, 2**70, -1],
    "sink_tokens": [None, *NUMBERS, 2**70, -1],
}


@pytest.mark.parametrize("argument", BAD)
def test_wrong_arguments_are_named_and_leave_the_model_as_it_was(argument: str) -> None:
    model = make_model("Llama")
    before = model.config._attn_implementation
    for wrong in WRONG + BAD[argument]:
        for call in (KVQCache, enable):
            with pytest.raises(KVQError, match=argument):
                call(model, **{"mode": "fp8_per_tensor"} | {argument: wrong})
    assert model.config._attn_implementation == before and "generate" not in model.__dict__


MIXED_UP = make_config("Llama")
MIXED_UP.layer_types = ["full_attention", "telepathy"]
LLAMA, GEMMA, HYBRID = make_config("Llama"), make_config("Gemma2"), make_config("Lfm2")
FP8 = {"mode": "fp8_per_tensor"}
INT8_ROWS = {"residual_mode": "int8"}
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    ("llama", {}, "config: got str, need a transformers config"),
    (MIXED_UP, {}, "llama with layers of type 'telepathy'"),
    (make_config("Llama", head_dim=66), {"mode": "int4"}, r"mode \(layer 0\): got head size 66, need a multiple of 4"),
    (LLAMA, {"mode": "int5"}, "mode 'int5'; installed: .*did you mean 'int"),
    (LLAMA, {"mode": ("int8", "none")}, "mode: got mode none, need a mode that stores a scale"),
    (LLAMA, {"mode": {0: "int4"}}, r"no mode for layers \[1\]"),
    (LLAMA, {"mode": {"default": "int4", 2: "none"}}, "layer 2, need .* from -2 to 1"),
    (LLAMA, {"mode": {"default": "int4", 1: "none", -1: "int8"}}, "two modes for layer 1"),
    (HYBRID, {"mode": {"default": "int4", 0: "none"}}, r"layer 0, need a layer that keeps K and V: one of \[1\]"),
    (LLAMA, {"block_size": 12}, "block_size: got 12, need a positive multiple of 8"),
    (LLAMA, FP8 | {"k_scale": 0.0}, r"k_scale: got 0.0 for layer 0, need a positive, finite float32"),
    (LLAMA, FP8 | {"v_scale": {0: 1.0, 1: torch.ones(2)}}, r"v_scale: got .* for layer 1, need a number"),
    (LLAMA, FP8 | {"v_scale": {0: 1.0}}, r"v_scale: got none for layers \[1\], need one for each of \[0, 1\]: .*calibrate"),
    (LLAMA, FP8 | {"k_scale": {0: 1.0, 1: 1.0, 2: 1.0}}, r"k_scale: got one for layers \[2\]"),
    (LLAMA, {"k_scale": 1.0}, r"k_scale: got a scale, need None: no layer's mode takes one .*\(int4_per_token_head\)"),
    (LLAMA, {"smoothing": ModelSmoothing({})}, r"smoothing: got none for layers \[0, 1\]"),
    (LLAMA, INT8_ROWS, "residual_mode: got int8_per_token_head, need none: without"),
    (LLAMA, {"residual_length": 8, "residual_mode": "fp8_per_tensor"}, "residual_mode: got fp8_per_tensor"),
    (GEMMA, {"residual_length": 64, "sink_tokens": 4}, "sink_tokens: got 4 in a model with sliding windows"),
    (biased("Qwen2"), INT8_ROWS | {"sink_tokens": 4}, "residual_mode: got int8_per_token_head, need none with sink_tokens"),
    (AutoConfig.for_model("deepseek_v3"), {}, "multi-head latent attention"),
    (AutoConfig.for_model("llama4_text"), {}, "chunked attention"),
    (AutoConfig.for_model("t5"), {}, "an encoder-decoder model"),
    (AutoConfig.for_model("gemma3n_text"), {}, "layers that read another layer's K and V"),
    (AutoConfig.for_model("gemma3_text", use_bidirectional_attention=True), {}, "bidirectional attention"),
    (AutoConfig.for_model("falcon_h1"), {}, "LinearAttentionAndFullAttentionLayer"),
    (AutoConfig.for_model("mamba2"), {}, "whose layers keep no K and V"),
    (AutoConfig.for_model("diffllama"), {}, "differential attention"),
    (AutoConfig.for_model("mllama_text_model"), {}, "cross-attention layers"),
    (AutoConfig.for_model("hrm_text"), {}, "prefixes that see later tokens"),
    (AutoConfig.for_model("bloom"), {}, "need one that goes through transformers' AttentionInterface"),
]


@pytest.mark.quick
@pytest.mark.parametrize(("model", "arguments", "message"), REFUSED, ids=[row[-1] for row in REFUSED])
def test_what_cannot_be_served_is_refused_with_the_reason(model: Any, arguments: dict[str, Any], message: str) -> None:
    text = model if isinstance(model, str) else getattr(model, "config", model).get_text_config()
    before = getattr(text, "_attn_implementation", None)
    with pytest.raises(UnknownModeError if arguments.get("mode") == "int5" else ArgumentError, match=message):
        KVQCache(model, **arguments)
    assert getattr(text, "_attn_implementation", None) == before


@pytest.mark.parametrize("removed", [0, 1, 2])
def test_a_model_that_has_lost_layers_is_refused(removed: int, capacity: dict[str, Any]) -> None:
    model = make_model("Llama", num_hidden_layers=3)
    del model.model.layers[removed]
    for use in (lambda: KVQCache(model, "none", **capacity), lambda: enable(model, **capacity), lambda: calibrate(model, IDS)):
        with pytest.raises(ArgumentError, match=rf"num_hidden_layers: got 3, but the model has no layers \[{removed}\]"):
            use()


CALLS: dict[str, tuple[str, list[Any]]] = {
    "indices": ("batch_select_indices", [1, torch.tensor(0)]),
    "beam_idx": ("reorder_cache", [1, torch.tensor(0)]),
    "repeats": ("batch_repeat_interleave", [2**70, 0, -1]),
    "tokens_to_remove": ("crop", [2**70, 1]),
    "layer_idx": ("get_seq_length", [2**70, 7]),
    "key_states": ("update", []),
}


@torch.no_grad()
def test_wrong_arguments_of_methods_change_nothing(capacity: dict[str, Any]) -> None:
    model, cache = begun("Llama", "int4", capacity)
    twin, rows = copy.deepcopy(cache), torch.zeros(2, 2, 1, 64)
    for argument, (method, wrongs) in CALLS.items():
        for wrong in [None, *WRONG, *NUMBERS, *wrongs]:
            with pytest.raises(KVQError, match=f"{argument}: got"):
                getattr(cache, method)(wrong, *((rows, 0) if method == "update" else ()))
    for argument, given in (("value_states", (rows, None, 0)), ("layer_idx", (rows, rows, 2))):
        with pytest.raises(KVQError, match=f"{argument}: got"):
            cache.update(*given)
    assert int(cache.get_seq_length()) == 20 and cache.batch_size == 2
    assert torch.equal(*(model(IDS[:, 20:22], **{GENERATE: one}).logits for one in (cache, twin)))


def dropping(model: Any) -> dict[str, Any]:
    model.train()
    model.model.layers[0].self_attn.attention_dropout = 0.1
    return {}


FIXED: dict[str, Any] = {"max_cache_len": 24}
CANNOT: list[tuple[str, dict[str, Any], Callable[[Any, KVQCache], object], str]] = [
    ("Llama", {}, lambda model, cache: {"output_attentions": True}, "output_attentions: got True, need False"),
    ("Llama", {}, lambda model, cache: {"return_shared_kv_states": True}, "return_shared_kv_states: got True, need False"),
    ("Llama", {}, lambda model, cache: {"block_indices": IDS}, "block_indices: got a value, need None"),
    ("Llama", {}, lambda model, cache: {"sinks": IDS}, "sinks: got a value, need None"),
    ("Llama", {}, lambda model, cache: {"attention_mask": torch.zeros(2, 1, 5, 25)}, "kvq takes no custom mask"),
    ("Llama", {}, lambda model, cache: {"attention_mask": torch.ones(2, 4)}, "attention_mask: got 4 columns, need 25"),
    ("Llama", {}, lambda model, cache: {GENERATE: StaticCache(model.config, max_cache_len=10)}, "in place of a static cache"),
    ("Llama", {}, lambda model, cache: dropping(model), r"dropout: got 0\.1"),
    ("Llama", FIXED, lambda model, cache: {}, "25 tokens, need at most the max_cache_len of 24"),
    ("Llama", FIXED, lambda model, cache: {"attention_mask": torch.ones(2, 25, dtype=torch.long)}, "at most the max_cache_len of 24"),
    ("Llama", FIXED, lambda model, cache: {"input_ids": IDS[:1, :1]}, "a batch of 1, need the 2 rows"),
    ("Llama", FIXED, lambda model, cache: cache.batch_repeat_interleave(2), "keeps its number of rows"),
    ("Llama", FIXED, lambda model, cache: cache.batch_select_indices(torch.tensor([0])), "keeps its number of rows"),
    ("Mistral", {"block_size": 8}, lambda model, cache: cache.crop(-15), r"removing 15 tokens .* activate_past_recording"),
    ("Lfm2", {}, lambda model, cache: cache.batch_repeat_interleave(2), "batch_repeat_interleave: layers of type LinearAttentionLayer"),
]
"""Of two rows of 20 tokens: a method, or the arguments of a forward of 5."""


@pytest.mark.parametrize(("family", "capacity", "ask", "message"), CANNOT, ids=[row[-1] for row in CANNOT])
@torch.no_grad()
def test_what_a_filled_cache_cannot_do(family: str, capacity: dict[str, Any], ask: Callable[..., Any], message: str) -> None:
    model, cache = begun(family, "none", capacity)
    with pytest.raises(KVQError, match=message):
        model(**{"input_ids": IDS[:, 20:25], GENERATE: cache} | (ask(model, cache) or {}))
    assert cache.batch_size == 2


def test_overlaid_masks_are_refused() -> None:
    config = make_config("Llama", attn_implementation="kvq")
    inputs = {"config": config, "inputs_embeds": torch.zeros(2, 5, 8), "attention_mask": None, cache_argument(create_causal_mask): None}
    assert create_causal_mask(**inputs) is None
    everything = {"or_mask_function": lambda *args: torch.tensor(True)}
    for overlay in (everything, {"allow_is_causal_skip": False}, {"block_sequence_ids": torch.zeros(2, 5, dtype=torch.long)}):
        with pytest.raises(ArgumentError, match="not plainly causal"):
            create_causal_mask(**inputs, **overlay)
