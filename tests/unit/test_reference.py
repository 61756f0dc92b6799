"""The dense attention, and the suite's oracle beside it, against loops over single elements."""

import math
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from kvq_core import ArgumentError, get_backend
from kvq_core.call import reference, torch_path
from kvq_core.call.spec import Scoring
from kvq_core.testing import oracle, places, scene
from kvq_core.testing.cases import OPTIONS, Case

CPU = torch.device("cpu")
# Small ones, in the dtype that stores rows exactly.
SMALL: dict[str, Any] = {"head_size": 16, "dtype": torch.float32}
EVERY: dict[str, Any] = {"sinks": True, "alibi": True, "alibi_sqrt": True, "mm_prefix": (((0, 3),), ((0, 0),), ((1, 2),))}


def small(case: Case) -> Case:
    lengths: dict[str, Any] = {
        "query_lens": tuple(min(q, 6) for q in case.query_lens),
        "seq_lens": tuple(min(k, 20) for k in case.seq_lens),
    }
    ranges = tuple(tuple((min(a, 14), min(b, 19)) for a, b in ranges) for ranges in case.mm_prefix)
    return replace(case, **lengths, mm_prefix=ranges, num_kv_heads=2, queries_per_kv=Case.queries_per_kv, head_size_v=None, **SMALL)


TRIED = [
    Case(query_lens=(1, 4), seq_lens=(9, 7), num_kv_heads=1, **SMALL),
    *(small(case) for case in OPTIONS if case.output is None and case.dtype == torch.float16),
    Case(query_lens=(5, 0, 3), seq_lens=(12, 4, 3), head_size_v=24, window=2, softcap=2.0, qq_bias=2, **EVERY, **SMALL),
]


def one_element(built: scene.Scene, seq: int, row: int, head: int) -> list[float]:
    """One row of one head, a key at a time, in Python's floats: the specification, spelled out."""
    case, a = built.case, built.read_arguments()
    kv_head, first = head // case.queries_per_kv, built.first_key(seq)
    context, q = case.seq_lens[seq] - case.query_lens[seq], a["q"][built.first_row(seq) + row, head].tolist()
    p = context + row
    ranges = a["mm_prefix_range"][seq].tolist() if a["mm_prefix_range"] is not None else []
    scores: list[tuple[float, int]] = []
    for j in range(case.seq_lens[seq]):
        s = a["softmax_scale"] * math.fsum(x * y for x, y in zip(q, built.key[first + j, kv_head].tolist(), strict=True))
        if case.softcap > 0:
            s = case.softcap * math.tanh(s / case.softcap)
        in_window = j <= p and (case.window < 0 or p - j < 1 + case.window)
        in_range = any(lo < hi and lo <= p <= hi and lo <= j <= hi for lo, hi in ranges)
        if not (in_window or in_range) or (case.key_stops and j >= case.key_stops[seq]):
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
    top = max((s for s, _ in scores), default=0.0)
    total = math.fsum(math.exp(s - top) for s, _ in scores) + (math.exp(float(a["sinks"][head]) - top) if case.sinks else 0.0)
    values = [(math.exp(s - top) / total, built.value[first + j, kv_head].tolist()) for s, j in scores]
    return [math.fsum(weight * value[c] for weight, value in values) for c in range(case.value_size)]


@pytest.mark.usefixtures("torch_path")
@pytest.mark.parametrize("case", TRIED, ids=str)
def test_against_single_elements(case: Case) -> None:
    built = scene.build(case, get_backend("none"), CPU).fill()
    arguments = built.read_arguments()
    with patch.object(torch_path, "read") as read:
        built.backend.unified_attention(out=built.fresh_out()["rows"], **arguments)
    _, attention = read.call_args.args
    dense = reference.attention(attention, torch_path.gathering(*read.call_args.args), torch.float64)
    for seq in (seq for seq in range(case.num_seqs) if case.query_lens[seq]):
        rows = [[one_element(built, seq, row, head) for head in range(case.num_query_heads)] for row in range(case.query_lens[seq])]
        exact = oracle.of_sequence(built, seq, arguments, seq).out.transpose(0, 1)
        for found in (dense[built.first_row(seq) :][: len(rows)], exact):
            torch.testing.assert_close(found, torch.tensor(rows, dtype=torch.float64), rtol=1e-9, atol=1e-11)


@pytest.fixture(params=places.params("eager", "interpret"))
def built(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> scene.Scene:
    case = Case(query_lens=(3, 1), seq_lens=(20, 9), **SMALL)
    return scene.build(case, get_backend("none"), places.enter(request.param, monkeypatch).device).fill()


def test_a_window_wider_than_any_sequence_is_none(built: scene.Scene) -> None:
    whole, *others = (built.read(window_size=window) for window in ((-1, -1), *((left, 0) for left in (2**31 - 1, 2**31, 2**63 - 1))))
    assert whole.any() and all(torch.equal(whole, other) for other in others)


def test_rows_before_the_first_sequence_and_past_the_last_are_not_written(built: scene.Scene) -> None:
    arguments, q = built.read_arguments(), torch.cat([built.q[:4]] * 2)
    out, lse = torch.full_like(q, 7.0), torch.full(q.shape[:2], 7.0)
    built.backend.unified_attention(out=out, lse=lse, **arguments | {"q": q, "cu_seqlens_q": arguments["cu_seqlens_q"] + 2})
    for rows in (out, lse):
        assert bool((rows[[0, 1, 6, 7]] == 7).all()) and bool((rows[2:6] != 7).any(-1).all())


@pytest.mark.parametrize("place", places.params("eager", "interpret", "gpu"))
@pytest.mark.parametrize("sinks", [False, True])
def test_of_a_cache_without_blocks_nothing_is_seen(place: str, sinks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    built = scene.build(
        Case(query_lens=(3, 1), seq_lens=(20, 9), sinks=sinks, **SMALL), get_backend("int4"), places.enter(place, monkeypatch).device
    )
    arguments = built.read_arguments()
    arguments |= {name: arguments[name][:0] for name in ("k_cache", "v_cache", "k_scale_cache", "v_scale_cache")}
    out, lse = torch.full_like(built.q, 7.0), torch.full(built.q.shape[:2], 7.0, device=built.q.device)
    built.backend.unified_attention(out=out, lse=lse, **arguments)
    rows = sum(built.case.query_lens)
    nothing = arguments["sinks"].float() if sinks else torch.full_like(lse[0], -torch.inf)
    assert not out[:rows].any() and torch.equal(lse[:rows], nothing.expand(rows, -1))


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
