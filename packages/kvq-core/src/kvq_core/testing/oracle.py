"""Attention of one sequence in float64, keeping what an error analysis needs. It shares no code with :mod:`kvq_core.call.reference`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvq_core.testing.scene import Scene


@dataclass(frozen=True)
class Exact:
    """One sequence: ``q`` [Hq, n, D], ``k`` [Hq, m, D], ``v`` [Hq, m, Dv] (kv heads repeated); ``raw`` scores before the softcap and
    ``capped`` ones after it [Hq, n, m]; ``shift`` [Hq, n, 1 or m], the part of ``raw`` that is the smoothed keys' mean's, where a softcap,
    a sink or an LSE sees it, or a rotary mean's, which all see, and ``shift_terms``, ``rotary_terms`` [Hq, n, 1], the sums of their terms'
    magnitudes;
    ``final`` ones, -inf where unseen; ``weights`` [Hq, n, m], which sum to 1 less the sink's
    share; ``out`` [Hq, n, Dv]; ``lse`` [Hq, n], the logarithm of the softmax denominator."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    raw: torch.Tensor
    capped: torch.Tensor
    final: torch.Tensor
    weights: torch.Tensor
    out: torch.Tensor
    shift: torch.Tensor
    shift_terms: torch.Tensor
    rotary_terms: torch.Tensor
    lse: torch.Tensor


def visible(num_rows: int, num_keys: int, window: int, ranges: list[list[int]]) -> torch.Tensor:
    """[num_rows, num_keys] bool on the CPU: which keys each of the newest ``num_rows`` positions sees."""
    seen = torch.zeros(num_rows, num_keys, dtype=torch.bool)
    for i in range(num_rows):
        p = num_keys - num_rows + i
        first = 0 if window < 0 else max(0, p - window)
        seen[i, first : p + 1] = True
        for start, end in ranges:
            if start < end and start <= p <= end:
                seen[i, start : end + 1] = True
    return seen


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, present: torch.Tensor, seq: int, arguments: dict[str, Any]) -> Exact:
    """Attention of ``q`` [n, Hq, D] over ``k``, ``v`` [m, Hkv, D(v)] float64; ``present`` [m]: which keys exist.

    ``arguments`` are the read door's, ``seq`` this sequence's place among them.
    """
    num_rows, num_keys, heads = q.shape[0], k.shape[0], q.shape[1]
    group = heads // k.shape[1]
    q = q.double().transpose(0, 1)
    k, v = (x.masked_fill(~present[:, None, None], 0.0).repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    context = num_keys - num_rows

    rotary, rotary_terms = _rotary_scores(q, num_keys, group, seq, arguments)
    q, shift, shift_terms = _smoothed(q, group, arguments)
    shift = shift + rotary
    raw = q @ k.transpose(1, 2) * arguments["softmax_scale"] + shift
    cap = arguments["softcap"]
    capped = cap * torch.tanh(raw / cap) if cap else raw
    final = capped.clone()
    if arguments["alibi_slopes"] is not None:
        p = torch.arange(context, num_keys, device=q.device, dtype=torch.float64)[:, None]
        j = torch.arange(num_keys, device=q.device, dtype=torch.float64)[None, :]
        behind = -torch.sqrt((p - j).clamp(min=0)) if arguments["use_alibi_sqrt"] else j - p
        final += arguments["alibi_slopes"].double()[:, None, None] * behind
    if arguments["qq_bias"] is not None:
        rows = min(arguments["qq_bias"].shape[0], num_rows)
        final[:, :rows, context : context + rows] += arguments["qq_bias"][:rows, :rows].double()
    ranges = [] if arguments["mm_prefix_range"] is None else arguments["mm_prefix_range"][seq].tolist()
    seen = visible(num_rows, num_keys, arguments["window_size"][0], ranges).to(q.device) & present
    if arguments.get("key_stops") is not None:
        seen[:, max(0, int(arguments["key_stops"][seq])) :] = False
    final = final.masked_fill(~seen, -math.inf)

    logits = final
    if arguments["sinks"] is not None:
        logits = torch.cat([final, arguments["sinks"].double()[:, None, None].expand(heads, num_rows, 1)], -1)
    weights = torch.softmax(logits, -1)[..., :num_keys].nan_to_num(0.0).masked_fill(~seen, 0.0)
    return Exact(q, k, v, raw, capped, final, weights, weights @ v, shift, shift_terms, rotary_terms, torch.logsumexp(logits, -1))


def joined(exact: Exact, other: torch.Tensor, other_lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(result [Hq, n, Dv], LSE [Hq, n]) of ``exact`` and another read that found ``other`` and ``other_lse`` in other keys."""
    lses = torch.stack((exact.lse, other_lse))
    shares = torch.softmax(lses, 0).nan_to_num(0.0)[..., None]
    return shares[0] * exact.out + shares[1] * other, torch.logsumexp(lses, 0)


def _smoothed(q: torch.Tensor, group: int, arguments: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``q`` [Hq, n, D] as smoothed keys need it, and the shift of the scores with its terms' magnitudes."""
    smoothing = arguments.get("smoothing")
    none = q.new_zeros(*q.shape[:2], 1)
    if smoothing is None:
        return q, none, none
    mean = smoothing.mean.double().repeat_interleave(group, 0)[:, None]
    terms = q * mean * arguments["softmax_scale"]
    if smoothing.order is not None:
        q = _in_places(q, smoothing.balance, smoothing.order, group)
    elif smoothing.balance is not None:
        q = q * smoothing.balance.double().repeat_interleave(group, 0)[:, None]
    if not arguments["softcap"] and all(arguments.get(name) is None for name in ("sinks", "lse", "other")):
        return q, none, none  # a softmax does not see it
    return q, terms.sum(-1, keepdim=True), terms.abs().sum(-1, keepdim=True)


def _in_places(q: torch.Tensor, balance: torch.Tensor, order: torch.Tensor, group: int) -> torch.Tensor:
    """``q`` [Hq, n, D] as ordered keys need it: of each head 3/4 of the channels in order, the first quarter once more, over 4."""
    rows = []
    for head, row in enumerate(q):
        own = (row * balance[head // group].double())[:, order[head // group].long()]
        whole, quarter = own.shape[1], own.shape[1] // 4
        rows.append(torch.cat((own[:, : whole - quarter], own[:, :quarter] / 4), 1))
    return torch.stack(rows)


def _rotary_scores(q: torch.Tensor, num_keys: int, group: int, seq: int, arguments: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """What a rotary mean adds to the scores of ``q`` [Hq, n, D], [Hq, n, m], and its terms' magnitudes. 0 without one."""
    none = q.new_zeros(*q.shape[:2], 1)
    smoothing = arguments.get("smoothing")
    if smoothing is None or smoothing.rotary is None:
        return none, none
    first = 0 if arguments["first_positions"] is None else int(arguments["first_positions"][seq])
    rotary, scale = smoothing.rotary, arguments["softmax_scale"]
    # Pair by pair, as complex numbers: q.R b is the real part of q conj(e^(i phase) b).
    x, y = (rotary.channels[..., half].long().repeat_interleave(group, 0)[:, None].expand(-1, q.shape[1], -1) for half in range(2))
    rows = torch.complex(q.gather(2, x), q.gather(2, y))
    bias = torch.complex(*rotary.bias.double().unbind(-1)).repeat_interleave(group, 0)
    positions = torch.arange(first, first + num_keys, device=q.device, dtype=torch.int64)
    turns = rotary.steps.long().repeat_interleave(group, 0)[..., None] * positions % 2**32
    rotary_bias = torch.polar(torch.ones_like(turns, dtype=torch.float64), turns.double() * (2 * math.pi / 2**32)) * bias[..., None]
    terms = (rows.abs() * bias.abs()[:, None]).sum(-1, keepdim=True) * scale
    return (rows @ rotary_bias.conj()).real * scale, terms


def slots_of(scene: Scene, seq: int, arguments: dict[str, Any], position: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(slots [m] of the keys of sequence ``seq``, whether each exists): 0 for those in blocks outside the cache."""
    case = scene.case
    keys = torch.arange(case.seq_lens[seq], device=scene.device)
    blocks = arguments["block_table"][position].long()[keys // case.block_size]
    present = (blocks >= 0) & (blocks < scene.num_blocks)
    return torch.where(present, blocks * case.block_size + keys % case.block_size, 0), present


def of_sequence(
    scene: Scene, seq: int, arguments: dict[str, Any], position: int, damaged: Mapping[str, torch.Tensor] | None = None
) -> Exact:
    """The exact result for sequence ``seq`` of ``scene``, which is number ``position`` in ``arguments``.

    The pages' decoded rows are taken at face value, but for those of ``damaged`` (``key`` and ``value`` -> [num_slots, Hkv] bool), which
    are taken for 0. Keys in blocks outside the cache do not exist.
    """
    slots, present = slots_of(scene, seq, arguments, position)
    first = int(arguments["cu_seqlens_q"][position])
    q = arguments["q"][first : first + scene.case.query_lens[seq]]

    def decoded(half: str) -> torch.Tensor:
        rows = scene.decoded(half, slots)
        return rows if damaged is None else rows.masked_fill(damaged[half][slots][..., None], 0.0)

    return attend(q, decoded("key"), decoded("value"), present, position, arguments)
