"""Layers of exact rows: the blocks that vLLM gives them, and what a step reads of them."""

from __future__ import annotations

import random
import types
from typing import Any

import pytest
import torch

from kvq_core import get_backend
from kvq_core.errors import ArgumentError
from kvq_vllm.pages import content_bytes
from kvq_vllm.window import WindowShape, blocks_read, window_step

pytestmark = pytest.mark.quick
space = types.SimpleNamespace


def packed_layer(window: tuple[int, int], block_size: int) -> Any:
    """An int4 layer of 2 kv heads of 128, whose pages have ``block_size`` tokens."""
    kvq = get_backend("int4")
    spec = space(block_size=block_size, page_size_bytes=2 * block_size * content_bytes(kvq, 128, 128, torch.bfloat16))
    impl = space(kvq=kvq, num_kv_heads=2, head_size=128, window=window, alibi_slopes=None)
    return space(impl=impl, get_kv_cache_spec=lambda config: spec)


@pytest.mark.parametrize(
    ("asked", "given", "message"),
    [
        (16, 16, "--block-size: got 16, need at least 64"),
        (128, 16, r"kvq.residual_length: got 64 over blocks of 16 tokens, need vLLM 0.30 or later, .*--block-size, here 128"),
    ],
)
def test_too_small_a_block_is_whose_it_is(kvq_in_vllm: Any, asked: int, given: int, message: str) -> None:
    """Before 0.30 layers with sliding windows have the smallest blocks that there are, whatever was asked for."""
    config = space(
        cache_config=space(cache_dtype="int4_per_token_head", block_size=asked),
        model_config=space(dtype=torch.bfloat16),
        scheduler_config=space(disable_hybrid_kv_cache_manager=False),
        additional_config={"kvq": {"residual_length": 64}},
    )
    layer = kvq_in_vllm.residual.ResidualLayer("exact", packed_layer((31, 0) if given < asked else (-1, -1), given))
    with pytest.raises(ArgumentError, match=message):
        layer.get_kv_cache_spec(config)


def test_a_decode_step_is_where_captured_graphs_read(kvq_in_vllm: Any) -> None:
    """A longer one has tensors of its own."""
    config = space(
        cache_config=space(cache_dtype="int4_per_token_head"),
        model_config=space(dtype=torch.bfloat16, max_model_len=512),
        scheduler_config=space(max_num_seqs=4, max_num_batched_tokens=256),
        additional_config={"kvq": {"residual_length": 40, "sink_tokens": 4}},
        compilation_config=space(static_forward_context={"exact": space(sink_tokens=64, sink_blocks=lambda size: 64 // size, packed=None)}),
    )
    builder = kvq_in_vllm.residual.ResidualBuilder(space(block_size=16), ["exact"], config, torch.device("cpu"))

    def build(rows: int, *lengths: int) -> Any:
        """Of sequences with ``rows`` new tokens each."""
        starts = torch.arange(len(lengths) + 1, dtype=torch.int32) * rows
        table = torch.arange(32 * len(lengths), dtype=torch.int32).view(-1, 32)
        most = {"max_query_len": rows, "max_seq_len": max(lengths)}
        batch = space(query_start_loc=starts, seq_lens=torch.tensor(lengths, dtype=torch.int32), block_table_tensor=table, **most)
        found = builder.build(0, batch)
        step = window_step(WindowShape(16, 40, 64), starts, batch.seq_lens, table, found.block_table.shape[1])
        assert torch.equal(found.block_table, step.table) and torch.equal(found.seqused_k, step.seqused_k)
        assert found.packed.keys() == step.packed.keys() and all(torch.equal(found.packed[name], step.packed[name]) for name in step.packed)
        return found

    def tensors(found: Any) -> list[int]:
        return [one.data_ptr() for one in (found.block_table, found.seqused_k, *found.packed.values())]

    first, later, prompt = build(1, 300, 20, 150), build(1, 301, 21), build(200, 200)
    assert tensors(first) == tensors(later) and not {*tensors(first)} & {*tensors(prompt)}
    assert prompt.nothing_packed and not first.nothing_packed


def test_a_step_reads_each_key_once() -> None:
    """Of sequences of drawn lengths: exact rows and packed ones are those that a plain count finds."""
    draw = random.Random(0)
    for _ in range(300):
        size, count = draw.choice((16, 32)), draw.randint(1, 4)
        shape = WindowShape(size, draw.choice((0, 1, 16, 40, 64)), draw.choice((0, size, 3 * size)))
        rows = [draw.randint(1, 40) for _ in range(count)]
        lengths = [new + draw.choice((0, 0, draw.randint(0, 300))) for new in rows]
        table = torch.tensor([draw.sample(range(1000), -(-400 // size)) for _ in range(count)], dtype=torch.int32)
        width = shape.sink_blocks + blocks_read(shape.length, size, max(rows))
        starts = torch.tensor([0, *rows]).cumsum(0).to(torch.int32)
        step = window_step(shape, starts, torch.tensor(lengths, dtype=torch.int32), table, width)
        assert step.table.shape == (count, width)
        for one, (new, length) in enumerate(zip(rows, lengths, strict=True)):
            window = max(length - new - shape.length, 0) // size * size
            exact = [position for position in range(length) if position < shape.sink_tokens or position >= window]
            places = [int(table[one, position // size]) * size + position % size for position in exact]
            read = range(int(step.seqused_k[one]))
            assert [int(step.table[one, row // size]) * size + row % size for row in read] == places
            packed = range(int(step.packed["key_stops"][one]))
            assert [position + shape.sink_tokens for position in packed] == sorted({*range(length)} - {*exact})
            behind = {"seqused_k": max(length - shape.sink_tokens, 0), "first_positions": shape.sink_tokens} if shape.sink_tokens else {}
            assert {name: int(found[one]) for name, found in step.packed.items()} == {"key_stops": len(packed), **behind}
