"""Dense attention over a ragged paged batch, in plain torch. It knows no format: whoever calls it says how a page is decoded.

For query row i of a sequence (absolute position ``p = context_len + i``) and key j::

    s    = softmax_scale * q.k                    softcap: s = softcap * tanh(s / softcap)
    seen = j < seqused_k and j < key_stops and (j <= p and p - j <= window_left, or p and j in one range of mm_prefix_range)
    s   += slope * (j - p), or -slope * sqrt(p - j) for j <= p;  s += qq_bias[i, j - context_len]
    out  = sum_j softmax(s)_j v_j, with exp(sink) added to the denominator; 0 for a row that sees nothing
    lse  = ln of that denominator, sum_j exp(s_j) + exp(sink); -inf for a row that sees nothing
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvq_core.call.spec import Attention, Plane, Scoring
from kvq_core.smoothing.rotary import pair_scores

Gather = Callable[[Plane, torch.Tensor], torch.Tensor]


def attention(attn: Attention, gather: Gather, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Attention of every row of ``attn.q`` over its sequence's pages, computed in ``dtype``.

    ``gather(plane, blocks)`` returns the decoded rows [len(blocks) * block_size, num_kv_heads, head_size] of physical ``blocks``.
    Returns [num_tokens, num_query_heads, head_size_v] of ``dtype``; rows that belong to no sequence are 0.
    """
    return attention_and_lse(attn, gather, dtype)[0]


def attention_and_lse(attn: Attention, gather: Gather, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`attention`, and the rows' log-sum-exp [num_tokens, num_query_heads] of ``dtype``."""
    batch, keys = attn.batch, attn.keys
    out = torch.zeros(attn.out.shape, dtype=dtype, device=attn.q.device)
    lse = torch.full(attn.q.shape[:2], -torch.inf, dtype=dtype, device=attn.q.device)
    if attn.scoring.sinks is not None:
        lse[:] = attn.scoring.sinks  # all that a sequence without keys has
    q, shift = attn.q.to(dtype), attn.q.new_zeros(attn.q.shape[:2], dtype=dtype)
    if attn.smoothing is not None:
        q, shift = attn.smoothing.of_queries(q)
    starts, used = batch.cu_seqlens_q.tolist(), batch.seqused_k.tolist()
    for seq in range(batch.num_seqs):
        first, last, num_keys = starts[seq], starts[seq + 1], used[seq]
        # Of keys past the table's last column none is seen, but positions count them.
        held = min(num_keys, batch.block_table.shape[1] * keys.block_size)
        if last <= first or held <= 0 or keys.num_blocks == 0:
            continue
        blocks = batch.block_table[seq, : -(-held // keys.block_size)].long()
        inside = (blocks >= 0) & (blocks < keys.num_blocks)
        blocks = blocks.where(inside, 0)
        stored = inside.repeat_interleave(keys.block_size)[:held]
        k = gather(keys, blocks)[:held].to(dtype)
        v = gather(attn.values, blocks)[:held].to(dtype)
        if batch.key_stops is not None:
            stored[max(0, int(batch.key_stops[seq])) :] = False
        rows = slice(first, last)
        row_shift = shift[rows].t()[:, :, None]
        if attn.smoothing is not None and attn.smoothing.rotary is not None:
            start = 0 if batch.first_positions is None else int(batch.first_positions[seq])
            positions = torch.arange(start, start + held, device=q.device)
            row_shift = row_shift + pair_scores(attn.smoothing.rotary, attn.q[rows].to(dtype), positions)
        out[rows], lse[rows] = _one_sequence(q[rows], row_shift, k, v, stored, num_keys - (last - first), attn.scoring, seq)
    return out, lse


def _one_sequence(
    q: torch.Tensor,
    shift: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    stored: torch.Tensor,
    context: int,
    scoring: Scoring,
    seq: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``context``: the position of the first row."""
    num_rows, num_query_heads, _ = q.shape
    num_keys, num_kv_heads, _ = k.shape
    group = num_query_heads // num_kv_heads
    p = torch.arange(context, context + num_rows, device=q.device)[:, None]
    j = torch.arange(num_keys, device=q.device)[None, :]
    seen = _visible(p, j, scoring, seq) & stored

    grouped = q.view(num_rows, num_kv_heads, group, -1)
    s = torch.einsum("ihgd,jhd->hgij", grouped, k).reshape(num_query_heads, num_rows, num_keys)
    s = (s + shift) * scoring.softmax_scale
    if scoring.softcap > 0:
        s = scoring.softcap * torch.tanh(s / scoring.softcap)
    s = s.masked_fill(~seen, -torch.inf)
    if scoring.alibi_slopes is not None:
        slopes = scoring.alibi_slopes.to(s.dtype)[:, None, None]
        distance = (p - j).to(s.dtype)
        # Keys ahead of the row are only seen through mm_prefix_range; the sqrt variant leaves them alone.
        s = s - slopes * (distance.clamp(min=0).sqrt() if scoring.use_alibi_sqrt else distance)
    if scoring.qq_bias is not None:
        n = scoring.qq_bias.shape[0]
        bias = torch.zeros(num_rows, num_keys, dtype=s.dtype, device=s.device)
        rows, start = min(n, num_rows), max(context, 0)
        cols = max(0, min(rows, num_keys - start))
        bias[:rows, start : start + cols] = scoring.qq_bias[:rows, :cols].to(s.dtype)
        s = s + bias
    top = s.amax(-1, keepdim=True)
    if scoring.sinks is not None:
        sink = scoring.sinks.to(s.dtype)[:, None, None]
        top = torch.maximum(top, sink)
    top = top.masked_fill(top == -torch.inf, 0.0)
    weights = torch.exp(s - top)
    total = weights.sum(-1, keepdim=True)
    if scoring.sinks is not None:
        total = total + torch.exp(sink - top)
    # 0 * NaN is NaN: a key that no row sees must not reach the sum at all.
    v = v.masked_fill(~seen.any(0)[:, None, None], 0.0)
    mixed = torch.einsum("hgij,jhd->ihgd", weights.view(num_kv_heads, group, num_rows, num_keys), v).flatten(1, 2)
    lse = (top + total.log()).permute(1, 0, 2).squeeze(-1)
    total = total.permute(1, 0, 2)
    return torch.where(total > 0, mixed / total, torch.where(total == 0, 0.0, torch.nan)), lse


def _visible(p: torch.Tensor, j: torch.Tensor, scoring: Scoring, seq: int) -> torch.Tensor:
    seen = j <= p
    if scoring.window_left >= 0:
        seen = seen & (p - j <= scoring.window_left)
    if scoring.mm_prefix_range is not None:
        for start, end in scoring.mm_prefix_range[seq].tolist():
            if start < end:
                seen = seen | ((p >= start) & (p <= end) & (j >= start) & (j <= end))
    return seen


def joined(out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(float32 result [T, Hq, Dv], LSE [T, Hq]) over the keys of two reads of the same rows (cascade.py has the formula)."""
    total = torch.logaddexp(lse, other_lse)
    # Rows that saw nothing: -inf - -inf would be NaN.
    base = total.masked_fill(total == -torch.inf, 0.0)
    share, other_share = ((part - base).exp()[..., None] for part in (lse, other_lse))
    return out.float() * share + other.float() * other_share, total


def to_output_dtype(x: torch.Tensor, dtype: torch.dtype, output_scale: torch.Tensor | None) -> torch.Tensor:
    """Cast a result, a finite one to a finite one; with ``output_scale``, divide by it first and clamp into an fp8 ``dtype``."""
    if output_scale is None:
        limit = torch.finfo(dtype).max
        return torch.where(x.isfinite(), x.clamp(-limit, limit), x).to(dtype)
    x = x / output_scale.to(x.dtype)
    if dtype.itemsize == 1:
        limit = torch.finfo(dtype).max
        x = x.clamp(-limit, limit)
    return x.to(dtype)
