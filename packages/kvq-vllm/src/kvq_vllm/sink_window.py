"""A sliding window's pages with those of a sequence's first tokens: what vLLM is told of them, and how it keeps them.

Registered where vLLM looks up the managers of its kinds of pages, whenever this module is imported: unpickling a spec imports it, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from vllm.v1.core.kv_cache_utils import resolve_block_hashes
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry


@dataclass(frozen=True, kw_only=True)
class SinkWindowSpec(SlidingWindowSpec):
    """The last ``sliding_window`` tokens and the first ``sink_tokens``, a multiple of ``block_size``."""

    sink_tokens: int

    @property
    def sink_blocks(self) -> int:
        return self.sink_tokens // self.block_size

    @property
    def num_retained_tokens(self) -> int:
        """0: the worker must not clear what lies before the window (vLLM 0.33 and later)."""
        return 0

    def max_admission_blocks_per_request(self, max_in_flight_tokens: int, max_model_len: int) -> int:
        """The window's and the sinks', which vLLM both sizes the pool and admits requests by; no more than a whole sequence's."""
        window: int = super().max_admission_blocks_per_request(max_in_flight_tokens, max_model_len)
        return min(window + self.sink_blocks, -(-max_model_len // self.block_size) + 1)

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, Any]) -> bool:
        alike: bool = super().is_uniform_with_collection(kv_cache_specs)
        return alike and {getattr(spec, "sink_tokens", 0) for spec in kv_cache_specs.values()} == {self.sink_tokens}


class SinkWindowManager(SlidingWindowManager):
    """Frees the blocks between sinks and window; finds a prefix in the cache only with its sinks."""

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """None: no block before a sequence's window may be taken for free."""
        return 0

    def remove_skipped_blocks(self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None) -> None:
        skipped = super().get_num_skipped_tokens(processed_computed_tokens) // self.block_size
        self._remove_blocks_in_range(request_id, self.kv_cache_spec.sink_blocks, skipped)

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: Any,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: Any,
        kv_cache_spec: SinkWindowSpec,
        **options: Any,
    ) -> tuple[tuple[list[Any], ...], int]:
        """The window's hit with the sinks in its first places; without all of the sinks, one among those that are there."""
        size = kv_cache_spec.block_size
        hashes = resolve_block_hashes(block_hashes, block_pool.hash_block_size, size)
        within = range(min(kv_cache_spec.sink_blocks, max_length // size))
        sinks = list(takewhile(bool, (block_pool.get_cached_block(hashes[number], kv_cache_group_ids) for number in within)))
        if len(sinks) < kv_cache_spec.sink_blocks:
            max_length = len(sinks) * size
        found, length = super().find_longest_cache_hit(
            block_hashes=block_hashes,
            max_length=max_length,
            kv_cache_group_ids=kv_cache_group_ids,
            block_pool=block_pool,
            kv_cache_spec=kv_cache_spec,
            **options,
        )
        for blocks, first in zip(found, zip(*sinks, strict=True), strict=False):
            blocks[: len(first)] = first[: len(blocks)]
        return found, length

    @classmethod
    def reachable_block_mask(
        cls, start_block: int, end_block: int, alignment_tokens: int | None, kv_cache_spec: SinkWindowSpec, *args: Any, **options: Any
    ) -> Sequence[bool] | None:
        """Which blocks to cache: those that a later window can begin in, and the sinks."""
        mask = super().reachable_block_mask(start_block, end_block, alignment_tokens, kv_cache_spec, *args, **options)
        sinks = max(kv_cache_spec.sink_blocks - start_block, 0)
        return mask if mask is None else [block < sinks or reached for block, reached in enumerate(mask)]


KVCacheSpecRegistry.check_kv_cache_spec_registry({})  # registers vLLM's own, which it does only while there are none
KVCacheSpecRegistry.register(SinkWindowSpec, SinkWindowManager)
