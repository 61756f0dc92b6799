"""kvq-int4 installed by itself: the modes it brings, and one write and one read on the CPU against exact attention."""

import torch

from kvq_core import get_backend, list_backends

found = {entry.mode for entry in list_backends()}
if found != {"none", "int4_per_token_head"}:
    raise SystemExit(f"installed modes: {sorted(found)}")

torch.manual_seed(0)
backend = get_backend("int4")
tokens, heads, size, blocks, block_size = 40, 2, 64, 6, 16
key, value, q = torch.randn(tokens, heads, size), torch.randn(tokens, heads, size), torch.randn(1, 2 * heads, size)
pages = [torch.zeros(blocks, block_size, heads, backend.packed_head_size(size), dtype=backend.cache_dtype(q.dtype)) for _ in "kv"]
k_scales, v_scales = backend.allocate_scale_caches(blocks, block_size, heads, "cpu")
table = torch.tensor([[4, 1, 3]], dtype=torch.int32)
slots = table[0].long().repeat_interleave(block_size)[:tokens] * block_size + torch.arange(tokens) % block_size
backend.reshape_and_cache(key, value, *pages, slots, k_scale_cache=k_scales, v_scale_cache=v_scales)
out = torch.empty_like(q)
backend.unified_attention(
    q,
    *pages,
    out,
    cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
    max_seqlen_q=1,
    seqused_k=torch.tensor([tokens], dtype=torch.int32),
    max_seqlen_k=tokens,
    softmax_scale=size**-0.5,
    block_table=table,
    k_scale_cache=k_scales,
    v_scale_cache=v_scales,
)
exact = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, key, value)), enable_gqa=True).transpose(0, 1)
error = ((out - exact).norm() / exact.norm()).item()
print(f"modes {sorted(found)}; relative error of int4 attention {error:.3f}")
if not error < 0.2:
    raise SystemExit("int4 attention is far from exact attention")
