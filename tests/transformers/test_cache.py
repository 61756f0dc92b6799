"""KVQCache as a container: rows, lengths, blocks and bytes; and everything it refuses."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, DynamicCache, StaticCache

from kvq_core import ArgumentError, KVQError, UnknownModeError
from kvq_transformers import KVQCache, enable
from kvq_transformers.attention import kvq_attention
from kvq_transformers.naming import GENERATE, cache_argument
from kvq_transformers.rows import RowTable, piece_length
from transformers_families import COMMON, eager_twin, logits_in_steps, make_config, make_model, prompts

pytestmark = pytest.mark.usefixtures("torch_path")


IDS = prompts(3, 60)["input_ids"]


@pytest.mark.parametrize(("columns", "capacity"), [(40, {}), (40, {"max_cache_len": 80}), (1100, {"max_cache_len": 1200})])
@pytest.mark.parametrize("family", ["Llama", "Mistral"])
def test_fewer_queries_than_keys_are_the_last(family: str, columns: int, capacity: dict[str, Any]) -> None:
    """As when another cache hands over all of its keys; behind a window a long prompt is written in pieces, some without a query."""
    model = make_model(family)
    generator = torch.Generator().manual_seed(0)
    size, mask = model.config.head_dim, torch.ones(2, 1, 1, columns, dtype=torch.bool)
    mask[1, ..., :5] = False
    query = torch.randn(2, 4, columns, size, generator=generator)
    rows = [torch.randn(2, 2, columns, size, generator=generator) for _ in range(2)]
    found = []
    for count in (columns, 3):
        cache = KVQCache(model.config, "none", **capacity)
        key, value = cache.update(*rows, 0)
        found.append(kvq_attention(model.model.layers[0].self_attn, query[:, :, -count:], key, value, mask)[0])
    assert found[1].shape == (2, 3, 4, size)
    torch.testing.assert_close(found[1], found[0][:, -3:], rtol=1e-5, atol=1e-6)


def test_a_forward_without_a_kvq_cache_is_plain_attention() -> None:
    model = make_model("Gemma2")
    twin = eager_twin(model)
    KVQCache(model.config)  # switches the model to kvq's attention
    inputs = prompts(2, 30, (0, 7))
    with torch.no_grad():
        torch.testing.assert_close(*(one(**inputs).logits[0] for one in (model, twin)), rtol=1e-4, atol=1e-4)
    found, expected = (logits_in_steps(one, inputs, DynamicCache(config=model.config), [20, 9, 1]) for one in (model, twin))
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(found[real], expected[real], rtol=1e-4, atol=1e-4)


def test_padding_takes_no_blocks_and_growth_wastes_little() -> None:
    model = make_model("Llama")
    cache = KVQCache(model.config, "none")
    mask = torch.ones(3, 60, dtype=torch.long)
    mask[:2, :50] = 0
    with torch.no_grad():
        model(IDS, attention_mask=mask, **{GENERATE: cache})
    assert cache.layers[0].table.lengths == [10, 10, 60]
    tokens = 10 + 10 + 60
    assert cache.bytes_per_token == 2 * 2 * 2 * 64 * 4
    # At most a started block and two to spare a row.
    assert tokens <= cache.nbytes / cache.bytes_per_token <= tokens + 3 * 3 * 16


def test_beams_share_what_they_have_in_common() -> None:
    table = RowTable(block_size=16)
    table.start(1)
    table.advance(160, None)
    table.select([0] * 8)
    held = {block for piece in table.pieces for row in piece.growth.rows for block in row.blocks}
    assert held == set()
    table.advance(1, None)
    (piece,) = table.pieces
    blocks = [set(row.blocks) for row in piece.growth.rows]
    assert len(set.intersection(*blocks)) == 10 and len(set.union(*blocks)) == 10 + 8
    table.advance(1, None)
    (piece,) = table.pieces
    assert piece.growth.copies == ()
    table.select([3, 3])
    table.advance(1, None)
    (piece,) = table.pieces
    assert len(piece.growth.copies) == 1  # one of the two keeps the original


def test_tokens_behind_a_window_take_no_space(capacity: dict[str, Any]) -> None:
    window, count = 40, 1500
    capacity = capacity and {"max_cache_len": count + 100}
    model = make_model("Mistral", sliding_window=window, num_hidden_layers=1, max_position_embeddings=4096)
    cache = KVQCache(model.config, "int4", **capacity)
    ids = torch.randint(3, 97, (1, count), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model(ids, **{GENERATE: cache})
        for step in range(60):
            model(ids[:, step : step + 1], **{GENERATE: cache})
    assert int(cache.get_seq_length()) == count + 60
    assert cache.nbytes / cache.bytes_per_token <= (window + piece_length(window) + 3 * 16) * 1.25


def test_long_prompts_behind_a_window_are_exact(capacity: dict[str, Any]) -> None:
    """Longer than several pieces, padded, then decoded on."""
    steps = [2 * piece_length(11) + 100, 1, 3]
    capacity = capacity and {"max_cache_len": sum(steps) + 4}
    model = make_model("Mistral", num_hidden_layers=1, max_position_embeddings=4096)
    inputs = prompts(2, sum(steps), (0, 700))
    found = logits_in_steps(model, inputs, KVQCache(model.config, "none", **capacity), steps)
    expected = logits_in_steps(eager_twin(model), inputs, DynamicCache(config=model.config), steps)
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(found[real], expected[real], rtol=1e-3, atol=1e-3)


def test_cropping_what_a_window_has_dropped_is_an_error() -> None:
    model = make_model("Mistral")
    cache = KVQCache(model.config, "none")
    with torch.no_grad():
        model(IDS, **{GENERATE: cache})
    with pytest.raises(RuntimeError, match=r"removing 20 tokens .* activate_past_recording"):
        cache.crop(-20)


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("deepseek_v3", {}, "multi-head latent attention"),
        ("llama4_text", {}, "chunked attention"),
        ("t5", {}, "an encoder-decoder model"),
        ("gemma3n_text", {}, "layers that read another layer's K and V"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "bidirectional attention"),
        ("falcon_h1", {}, "LinearAttentionAndFullAttentionLayer"),
        ("mamba2", {}, "whose layers keep no K and V"),
    ],
)
def test_models_that_cannot_be_served_are_refused_with_the_reason(model_type: str, changes: dict[str, Any], reason: str) -> None:
    config = AutoConfig.for_model(model_type, **changes)
    before = config.get_text_config()._attn_implementation
    with pytest.raises(ArgumentError, match=reason):
        KVQCache(config, "int8")
    assert config.get_text_config()._attn_implementation == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "int5"}, "mode 'int5'; installed: .*did you mean 'int"),
        ({"mode": ("int8", "none")}, "mode: got mode none, need a mode that stores a scale"),
        ({"mode": {0: "int4"}}, r"no mode for layers \[1\]"),
        ({"mode": {"default": "int4", 2: "none"}}, "layer 2, need .* from -2 to 1"),
        ({"mode": {"default": "int4", 1: "none", -1: "int8"}}, "two modes for layer 1"),
        ({"block_size": 12}, "block_size: got 12, need a positive multiple of 8"),
        ({"config": "llama"}, "config: got str, need a transformers config"),
        ({"config": "Lfm2", "mode": {"default": "int4", 0: "none"}}, r"layer 0, need a layer that keeps K and V: one of \[1\]"),
        ({"config": "telepathy"}, "llama with layers of type 'telepathy'"),
        ({"config": "head_dim", "mode": "int4"}, r"mode \(layer 0\): got head size 66, need a multiple of 4"),
    ],
)
def test_arguments(arguments: dict[str, Any], message: str) -> None:
    config = make_config("Llama")
    assert KVQCache(config, ("int4", "int4_per_token_head")).modes == dict.fromkeys(range(2), "int4_per_token_head")
    assert KVQCache(config, {np.int64(-1): "none", "default": "int4"}).modes == {0: "int4_per_token_head", 1: "none"}
    configs = {"Lfm2": make_config("Lfm2"), "telepathy": make_config("Llama"), "head_dim": make_config("Llama", head_dim=66)}
    configs["telepathy"].layer_types = ["full_attention", "telepathy"]
    KVQCache(configs["head_dim"], "int8")
    given = arguments.get("config")
    with pytest.raises(UnknownModeError if arguments.get("mode") == "int5" else ArgumentError, match=message):
        KVQCache(**{"config": config} | arguments | ({"config": configs.get(given, given)} if given else {}))


def test_what_a_hybrids_other_layers_cannot_do_is_refused_before_anything_changes() -> None:
    model = make_model("Lfm2")
    cache = KVQCache(model.config, "none")
    with torch.no_grad():
        model(IDS[:, :9], **{GENERATE: cache})
    with pytest.raises(KVQError, match="batch_repeat_interleave: layers of type LinearAttentionLayer"):
        cache.batch_repeat_interleave(2)
    assert cache.batch_size == 3


def test_a_composite_models_text_decoder_is_switched_alone() -> None:
    """Gemma 3 with its vision tower: text goes through kvq's pages, an image's tokens see each other and are refused."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = COMMON | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 64}
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
    torch.manual_seed(0)
    model = Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=text, vision_config=vision | {"patch_size": 14}, mm_tokens_per_image=4, image_token_index=5)
    )
    ids = prompts(2, 20)["input_ids"].clamp(min=6)
    options = {"max_new_tokens": 6, "do_sample": False}
    expected = model.eval().generate(ids, **options)
    tower = model.config.vision_config._attn_implementation
    assert torch.equal(enable(model, "none").generate(ids, **options), expected)
    assert model.config.text_config._attn_implementation == "kvq" and model.config.vision_config._attn_implementation == tower
    ids[:, 3:7] = 5
    image = {"pixel_values": torch.zeros(2, 3, 28, 28), "token_type_ids": (ids == 5).long()}
    with pytest.raises(ArgumentError, match="tokens that see later ones"):
        model.generate(ids, **image, **options)


def test_what_a_forward_cannot_do() -> None:
    model = make_model("Llama")
    ids = IDS[:, :6]
    square = torch.zeros(3, 1, 6, 6)
    for options, message in (
        ({"output_attentions": True}, "output_attentions: got True, need False"),
        ({"attention_mask": square}, "kvq takes no custom mask"),
        ({"attention_mask": torch.ones(3, 4)}, "attention_mask: got 4 columns, need 6"),
        ({GENERATE: StaticCache(model.config, max_cache_len=10)}, "in place of a static cache"),
    ):
        cache = {GENERATE: KVQCache(model.config)}
        with pytest.raises(ArgumentError, match=message), torch.no_grad():
            model(ids, **(cache | options))
    model.train()
    model.model.layers[0].self_attn.attention_dropout = 0.1
    with pytest.raises(ArgumentError, match=r"dropout: got 0\.1"):
        model(ids, **{GENERATE: KVQCache(model.config)})


def test_overlaid_masks_are_refused() -> None:
    from transformers.masking_utils import create_causal_mask

    config = make_config("Llama", attn_implementation="kvq")
    inputs = {"config": config, "inputs_embeds": torch.zeros(2, 5, 8), "attention_mask": None, cache_argument(create_causal_mask): None}
    assert create_causal_mask(**inputs) is None
    everything = {"or_mask_function": lambda *args: torch.tensor(True)}
    for overlay in (everything, {"allow_is_causal_skip": False}, {"block_sequence_ids": torch.zeros(2, 5, dtype=torch.long)}):
        with pytest.raises(ArgumentError, match="not plainly causal"):
            create_causal_mask(**inputs, **overlay)


@torch.no_grad()
def test_more_tokens_than_a_fixed_cache_holds() -> None:
    model = make_model("Llama")
    for mask in (None, torch.ones(3, 17, dtype=torch.long)):
        for first in (0, 16):
            cache = KVQCache(model.config, "none", max_cache_len=16)
            if first:
                model(IDS[:, :first], **{GENERATE: cache})
            with pytest.raises(ArgumentError, match="17 tokens, need at most the max_cache_len of 16"):
                model(IDS[:, first:17], attention_mask=mask, **{GENERATE: cache})


def test_another_number_of_rows() -> None:
    model = make_model("Llama")
    cache = KVQCache(model.config, max_cache_len=20)
    with torch.no_grad():
        model(IDS[:, :9], **{GENERATE: cache})
        with pytest.raises(ArgumentError, match="a batch of 2, need the 3 rows"):
            model(IDS[:2, :1], **{GENERATE: cache})
    for call in (lambda: cache.batch_repeat_interleave(2), lambda: cache.batch_select_indices(torch.tensor([0]))):
        with pytest.raises(ArgumentError, match="keeps its number of rows"):
            call()


def test_bloom_does_not_use_the_interface() -> None:
    from transformers import BloomConfig, BloomForCausalLM

    model = BloomForCausalLM(BloomConfig(vocab_size=COMMON["vocab_size"], hidden_size=64, n_layer=1, n_head=2))
    before = model.config._attn_implementation
    with pytest.raises(ArgumentError, match="need one that goes through transformers' AttentionInterface"):
        enable(model)
    assert model.config._attn_implementation == before
    with pytest.raises(ArgumentError, match="model: got LlamaConfig, need a transformers model with generate"):
        enable(make_config("Llama"))
