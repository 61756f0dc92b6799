"""How vLLM keeps the blocks of a window with sinks, by its bookkeeping over a stand-in for its pool: ``tests/vllm/check_blocks.py``.

Blocks have 16 tokens, sinks 64, the window 40 and the next one. And the block size that vLLM takes where the user asks for none.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from vllm.platforms.interface import Platform
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager, get_manager_for_kv_cache_spec
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from kvq_vllm.backend import KVQBackend
from kvq_vllm.residual import ResidualBackend
from kvq_vllm.sink_window import SinkWindowManager, SinkWindowSpec

SHAPE: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16, "sliding_window": 41}
SPEC = SinkWindowSpec(**SHAPE, sink_tokens=64)
IN_FLIGHT = {"max_in_flight_tokens": 64, "max_model_len": 4096}
NULL = SimpleNamespace(is_null=True, ref_cnt=0, name="null")
BLOCKS = [SimpleNamespace(is_null=False, ref_cnt=0, name=number) for number in range(21)]


class Pool:
    """Blocks, of which those in ``cached`` are found by their hash, a number."""

    null_block, hash_block_size = NULL, 16

    def __init__(self, *cached: int) -> None:
        self.cached, self.freed = cached, list[Any]()

    def get_cached_block(self, block_hash: int, group_ids: list[int]) -> list[Any] | None:
        return [BLOCKS[block_hash]] * len(group_ids) if block_hash in self.cached else None

    def free_blocks(self, blocks: Any) -> None:
        self.freed.extend(block.name for block in blocks)


def manager_of(spec: Any, pool: Pool) -> Any:
    options = {"block_pool": pool, "enable_caching": True, "kv_cache_group_id": 0, "scheduler_block_size": 128}
    return get_manager_for_kv_cache_spec(spec, **IN_FLIGHT, **options)


def expect(what: str, found: object, wanted: object) -> None:
    assert found == wanted, f"{what}: {found}, need {wanted}"


def names(blocks: Any) -> list[Any]:
    return [block.name for block in blocks]


def hit(pool: Pool, tokens: int) -> list[Any]:
    """Of a prefix of ``tokens``."""
    numbers = list(range(21))
    options = {"drop_eagle_block": False, "alignment_tokens": 16}
    asked: dict[str, Any] = {"block_hashes": numbers, "max_length": tokens, "kv_cache_group_ids": [0], "block_pool": pool}
    (found,), length = SinkWindowManager.find_longest_cache_hit(**asked, kv_cache_spec=SPEC, **options)
    expect(f"tokens found of {tokens} with {pool.cached} cached", length, 16 * len(found))
    return found


def check_block_sizes() -> None:
    """Of packed layers of heads of 128, alone and beside those of exact rows, from vLLM's two defaults."""
    model = SimpleNamespace(dtype=torch.bfloat16, get_head_size=lambda: 128)
    for mode, size in (("int8", 32), ("int4", 64), ("fp8", 32)):
        cache, section = SimpleNamespace(cache_dtype=f"{mode}_per_token_head"), {"kvq": {"residual_length": 64}}
        config: Any = SimpleNamespace(cache_config=cache, model_config=model, additional_config=section)
        for default, wanted in ((16, size), (128, 128)):
            both = ([KVQBackend], [KVQBackend, ResidualBackend], [ResidualBackend, KVQBackend])
            found = [Platform._preferred_block_size_for_backends(backends, default, config) for backends in both]
            expect(f"block size with a window over {mode}, not {default}", found, [wanted] * 3)


def main() -> None:
    check_block_sizes()
    window = SlidingWindowSpec(**SHAPE)
    pool = Pool()
    manager = manager_of(SPEC, pool)
    expect("managers", [type(each) for each in (manager, manager_of(window, pool))], [SinkWindowManager, SlidingWindowManager])

    expect(
        "blocks of a request", SPEC.max_admission_blocks_per_request(**IN_FLIGHT), window.max_admission_blocks_per_request(**IN_FLIGHT) + 4
    )
    short = IN_FLIGHT | {"max_model_len": 112}
    expect("blocks of a request of up to 112 tokens", SPEC.max_admission_blocks_per_request(**short), 8)

    manager.req_to_blocks["one"] = list(BLOCKS)
    for tokens, freed in ((60, []), (120, [4]), (330, [*range(17, 4, -1)]), (330, [])):
        pool.freed.clear()
        manager.remove_skipped_blocks("one", tokens)
        expect(f"freed after {tokens} tokens", pool.freed, freed)
    expect("left", names(manager.req_to_blocks["one"]), [0, 1, 2, 3, *["null"] * 14, 18, 19, 20])

    found = hit(Pool(0, 1, 2, 3, 17, 18, 19), 330)
    expect("hit", names(found), [0, 1, 2, 3, *["null"] * 13, 17, 18, 19])
    expect("hit without the third sink", names(hit(Pool(0, 1, 3, 17, 18, 19), 330)), [0, 1])
    expect("hit without the window", names(hit(Pool(0, 1, 2, 3), 330)), [0, 1, 2, 3])
    expect("hit among the sinks", names(hit(Pool(0, 1, 2, 3), 40)), [0, 1])
    expect("hit of nothing", names(hit(Pool(17, 18, 19), 330)), [])
    # One more for the new tokens, and seven that are free so far.
    expect("blocks to allocate", manager.get_num_blocks_to_allocate("two", 336, found, 320, 320, 336), 1 + 7)

    mask = SinkWindowManager.reachable_block_mask(
        start_block=2, end_block=16, alignment_tokens=128, kv_cache_spec=SPEC, use_eagle=False, retention_interval=None
    )
    expect("blocks to cache", [number for number, cached in enumerate(mask or (), start=2) if cached], [2, 3, 5, 6, 7, 13, 14, 15])


if __name__ == "__main__":
    main()
