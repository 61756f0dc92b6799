"""The dense attention, and the suite's oracle beside it, against loops over single elements."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvq_core import ArgumentError, get_backend
from kvq_core.call import reference
from kvq_core.call.spec import Attention, Batch, Plane, Scoring
from kvq_core.call.torch_path import gather
from kvq_core.checks import window_left
from kvq_core.testing import oracle, places, scene
from kvq_core.testing.cases import OPTIONS, Case

CPU = torch.device("cpu")
# Small ones, in the dtype that stores rows exactly.
SMALL: dict[str, Any] = {"head_size": 16, "dtype": torch.float32}
EVERY: dict[str, Any] = {"sinks": True, "alibi": True, "alibi_sqrt": True, "mm_prefix": (((0, 3),), ((0, 0),), ((1, 2),))}
TRIED = [
    Case(query_lens=(1, 4), seq_lens=(9, 7), num_kv_heads=1, **SMALL),
    *(
        replace(
            case,
            query_lens=tuple(min(q, 6) for q in case.query_lens),
            seq_lens=tuple(min(k, 20) for k in case.seq_lens),
            mm_prefix=tuple(tuple((min(a, 14), min(b, 19)) for a, b in ranges) for ranges in case.mm_prefix),
            num_kv_heads=2,
            queries_per_kv=Case.queries_per_kv,
            head_size_v=None,
            **SMALL,
        )
        for case in OPTIONS
        if case.output is None and case.dtype == torch.float16
    ),
    Case(query_lens=(5, 0, 3), seq_lens=(12, 4, 3), head_size_v=24, window=2, softcap=2.0, qq_bias=2, **EVERY, **SMALL),
]


def attention_of(built: scene.Scene) -> Attention:
    a = built.read_arguments()
    names = ("sinks", "alibi_slopes", "use_alibi_sqrt", "qq_bias", "mm_prefix_range")
    scoring = Scoring(a["softmax_scale"], window_left(a["window_size"]), a["softcap"], *(a[name] for name in names))
    batch = Batch(a["cu_seqlens_q"], a["seqused_k"], a["block_table"], a["max_seqlen_q"], a["max_seqlen_k"], a["key_stops"])
    planes = Plane(a["k_cache"], None, built.case.head_size), Plane(a["v_cache"], None, built.case.value_size)
    return Attention(a["q"], built.fresh_out()["rows"], *planes, batch, scoring)


def one_element(built: scene.Scene, seq: int, row: int, head: int) -> list[float]:
    """One row of one head, a key at a time, in Python's floats: the specification, spelled out."""
    case, a = built.case, built.read_arguments()
    kv_head, first = head // case.queries_per_kv, built.first_key(seq)
    num_keys, context = case.seq_lens[seq], case.seq_lens[seq] - case.query_lens[seq]
    p = context + row
    q = a["q"][built.first_row(seq) + row, head].tolist()
    ranges = a["mm_prefix_range"][seq].tolist() if a["mm_prefix_range"] is not None else []
    scores: list[tuple[float, int]] = []
    for j in range(num_keys):
        k = built.key[first + j, kv_head].tolist()
        s = a["softmax_scale"] * math.fsum(x * y for x, y in zip(q, k, strict=True))
        if case.softcap > 0:
            s = case.softcap * math.tanh(s / case.softcap)
        in_window = j <= p and (case.window < 0 or p - j < 1 + case.window)
        if case.key_stops and j >= case.key_stops[seq]:
            continue
        if not in_window and not any(lo < hi and lo <= p <= hi and lo <= j <= hi for lo, hi in ranges):
            continue
        if case.alibi:
            slope = float(a["alibi_slopes"][head])
            if not case.alibi_sqrt:
                s += slope * (j - p)
            elif j <= p:
                s -= slope * math.sqrt(p - j)
        if 0 <= j - context < case.qq_bias and row < case.qq_bias:
            s += float(a["qq_bias"][row, j - context])
        scores.append((s, j))
    if not scores:
        return [0.0] * case.value_size
    top = max(s for s, _ in scores)
    total = math.fsum(math.exp(s - top) for s, _ in scores)
    if case.sinks:
        total += math.exp(float(a["sinks"][head]) - top)
    out = [0.0] * case.value_size
    for s, j in scores:
        weight = math.exp(s - top) / total
        for c, x in enumerate(built.value[first + j, kv_head].tolist()):
            out[c] += weight * x
    return out


@pytest.mark.parametrize("case", TRIED, ids=str)
def test_against_single_elements(case: Case) -> None:
    built = scene.build(case, get_backend("none"), CPU).fill()
    attention, arguments = attention_of(built), built.read_arguments()
    dense = reference.attention(attention, lambda plane, blocks: gather(built.backend, plane, blocks), torch.float64)
    for seq in range(case.num_seqs):
        exact = oracle.of_sequence(built, seq, arguments, seq) if case.query_lens[seq] else None
        for row in range(case.query_lens[seq]):
            for head in range(case.num_query_heads):
                wanted = torch.tensor(one_element(built, seq, row, head), dtype=torch.float64)
                torch.testing.assert_close(dense[built.first_row(seq) + row, head], wanted, rtol=1e-9, atol=1e-11)
                assert exact is not None
                torch.testing.assert_close(exact.out[head, row], wanted, rtol=1e-9, atol=1e-11)


@pytest.fixture(params=places.params("eager", "interpret"))
def built(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> scene.Scene:
    case = Case(query_lens=(3, 1), seq_lens=(20, 9), **SMALL)
    return scene.build(case, get_backend("none"), places.enter(request.param, monkeypatch).device).fill()


@pytest.mark.parametrize("left", [2**31 - 1, 2**31, 2**62, 2**63 - 1])
def test_a_window_wider_than_any_sequence_is_none(left: int, built: scene.Scene) -> None:
    outs = [built.fresh_out()["rows"] for _ in range(2)]
    for out, window in zip(outs, ((-1, -1), (left, 0)), strict=True):
        built.backend.unified_attention(out=out, **built.read_arguments() | {"window_size": window})
    assert torch.equal(outs[0][:4], outs[1][:4]) and outs[0][:4].any()
    p, j = torch.arange(17, 20)[:, None], torch.arange(20)
    assert torch.equal(reference._visible(p, j, Scoring(1.0, left), 0), j <= p)


def test_rows_before_the_first_sequence_and_past_the_last_are_not_written(built: scene.Scene) -> None:
    arguments = built.read_arguments()
    q = torch.cat([arguments["q"][:4]] * 2)
    given = arguments | {"q": q, "cu_seqlens_q": arguments["cu_seqlens_q"] + 2}
    out, lse = torch.full_like(q, 7.0), torch.full(q.shape[:2], 7.0)
    built.backend.unified_attention(out=out, **given | {"lse": lse})
    for rows in (out, lse):
        assert bool((rows[[0, 1, 6, 7]] == 7).all()) and bool((rows[2:6] != 7).any(-1).all())


@pytest.mark.quick
def test_output_scale_clamps() -> None:
    x = torch.tensor([0.0, 1.0, -3.0, 1e9, -1e9])
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        largest = torch.finfo(dtype).max
        assert reference.to_output_dtype(x, dtype, torch.tensor(2.0)).tolist() == [0.0, 0.5, -1.5, largest, -largest]


@pytest.mark.quick
def test_a_bias_of_offsets_beyond_32_bits_is_refused() -> None:
    """Kernels count them in 32 bits."""
    meta = torch.device("meta")
    Scoring(1.0, qq_bias=torch.empty(46340, 46340, device=meta)).validate(8, 1, meta)
    with pytest.raises(ArgumentError, match="46342"):
        Scoring(1.0, qq_bias=torch.empty(46342, 46342, device=meta)).validate(8, 1, meta)
