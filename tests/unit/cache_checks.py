"""What is always true of a PagedKVCache, and what two caches that hold the same have in common."""

import linecache
import sys
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

import torch

from kvq_core import PagedKVCache
from kvq_core.call import torch_path
from kvq_core.call.spec import Plane
from kvq_core.testing import oracle

MODES = ("none", "int8_per_token_head", "fp8_per_token_head", "fp8_per_tensor", "int4_per_token_head", "int2_per_token_head")


def shared_cache(mode: str = "int4", layout: str = "head_major", **options: Any) -> PagedKVCache:
    """Sequences 0 and 1 share two blocks, the second half full; 2 has one of its own."""
    given = {"k_scale": [0.02, 0.07], "v_scale": 0.03} if mode == "fp8_per_tensor" else {}
    given |= {"num_blocks": 12, "block_size": 8, "num_kv_heads": 2, "head_size": 32, "head_size_v": 16, "num_layers": 2, "layout": layout}
    cache = PagedKVCache(mode, **given | options)
    forward(cache, {cache.allocate_sequence(): 12})
    cache.fork(0)
    forward(cache, {cache.allocate_sequence(): 3})
    return cache


def assert_consistent(cache: PagedKVCache) -> None:
    """Blocks are held by as many sequences as list them, all others are free, and layers are views of the buffers without a graph."""
    table, pool = cache._table, cache._table.pool
    sequences = {seq: table.get(seq) for seq in cache.sequences}
    held = Counter(block for sequence in sequences.values() for block in sequence.blocks)
    assert {block: count for block, count in enumerate(pool.counts()) if count} == held
    free = list(pool.peek(pool.num_free))
    assert sorted([*free, *held]) == list(range(pool.num_blocks)) == list(range(cache.geometry.num_blocks))
    for seq, sequence in sequences.items():
        assert 0 <= seq < table.next_id and sequence.changed_at <= table.clock
        assert len({*sequence.blocks}) == len(sequence.blocks) == -(-sequence.length // cache.geometry.block_size)
    buffers = {tensor.untyped_storage().data_ptr() for tensor in cache._pages.tensors.values()}
    smoothing = (cache.smoothing or {}).values()
    views = [view for layer in range(cache.geometry.num_layers) for view in vars(cache.layer(layer)).values() if view is not None]
    assert {view.untyped_storage().data_ptr() for view in views} == buffers
    owned = [*cache._pages.tensors.values(), *views, *(one.mean for one in smoothing)]
    assert all(tensor.grad_fn is None and not tensor.requires_grad for tensor in owned)


def stored(cache: PagedKVCache, seq: int) -> list[torch.Tensor]:
    """The decoded K and V of a sequence in each layer, [length, heads, size]."""
    g, blocks = cache.geometry, cache.block_table([seq])[0].long()
    found = []
    for layer in range(g.num_layers):
        caches = cache.layer(layer)
        planes = Plane(caches.key_cache, caches.k_scale_cache, g.head_size), Plane(caches.value_cache, caches.v_scale_cache, g.head_size_v)
        for half, plane in zip((cache.backend.key_half, cache.backend.value_half), planes, strict=True):
            found.append(torch_path.gather(half, plane, blocks)[: cache.length(seq)])
    return found


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, position: int = 0, **options: Any) -> torch.Tensor:
    """The oracle's, float64, of the newest rows ``q`` [n, Hq, D] over ``k``, ``v`` [m, Hkv, D(v)], with the options of ``attend``."""
    arguments: dict[str, Any] = dict.fromkeys(("sinks", "alibi_slopes", "qq_bias", "mm_prefix_range"))
    arguments |= {"softmax_scale": q.shape[-1] ** -0.5, "softcap": 0.0, "window_size": (-1, -1), "use_alibi_sqrt": False} | options
    present = torch.ones(len(k), dtype=torch.bool, device=k.device)
    return oracle.attend(q, k.double(), v.double(), present, position, arguments).out.transpose(0, 1)


def forward(cache: PagedKVCache, new_tokens: dict[int, int], seed: int = 0) -> list[torch.Tensor]:
    """What attention gives, in each layer, in a step of random rows."""
    g, generator = cache.geometry, torch.Generator().manual_seed(seed)
    step, outs = cache.append(new_tokens), []
    for layer in range(g.num_layers):
        shapes = ((2 * g.num_kv_heads, g.head_size), (g.num_kv_heads, g.head_size), (g.num_kv_heads, g.head_size_v))
        q, key, value = (torch.randn(step.num_tokens, *shape, generator=generator).to(cache.device, g.dtype) for shape in shapes)
        cache.write(layer, key, value, step)
        outs.append(cache.attend(layer, q, step))
    return outs


def assert_goes_on_alike(one: PagedKVCache, other: PagedKVCache) -> None:
    """Both hold the same tokens, in whichever blocks, and the same steps, each appending to blocks that are shared, give the same."""
    for seed in range(3):
        assert one.sequences == other.sequences
        for seq in one.sequences:
            assert all(torch.equal(x, y) for x, y in zip(stored(one, seq), stored(other, seq), strict=True))
        if seed < 2:
            new_tokens = {seq: 1 + 7 * seed for seq in one.sequences}
            assert all(torch.equal(x, y) for x, y in zip(forward(one, new_tokens, seed), forward(other, new_tokens, seed), strict=True))
    assert_consistent(one)
    assert_consistent(other)


def interrupted(call: Callable[[], object], at: int | None, within: Callable[[str], bool], *, opcodes: bool = False) -> int:
    """Call, and raise KeyboardInterrupt at the line of number ``at`` that runs in the files ``within``; ``opcodes``: at the instruction.

    Returns how many began: more than ``at``, if the interrupt came.
    """
    begun, lines = 0, dict[FrameType, int]()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal begun
        if not within(frame.f_code.co_filename):
            return None
        frame.f_trace_opcodes = opcodes
        last_line, lines[frame] = lines.get(frame, 0), frame.f_lineno
        if event == ("opcode" if opcodes else "line") and (opcodes or not is_leaving_with(frame, last_line)):
            begun += 1
            if at is not None and begun > at:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return begun


def is_leaving_with(frame: FrameType, last_line: int) -> bool:
    """Whether ``frame``, after ``last_line``, is at a ``with`` statement again, to leave its block.

    No KeyboardInterrupt comes there: Python looks for signals after calls and at jumps, so that one comes within the block or once it is
    left. A tracer that raised one would leave a lock with its thread, and other threads waiting.
    """
    is_with = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with ")
    return is_with and last_line > frame.f_lineno


def go_on_elsewhere(cache: PagedKVCache, pipe: Connection) -> None:
    """What another process does with a cache it is handed. Here, since a process that is spawned can import no test module."""
    forward(cache, {0: 5, 2: 2})
    assert_consistent(cache)
    pipe.send(cache)
