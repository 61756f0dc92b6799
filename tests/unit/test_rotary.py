"""Rotary key means: what they take off keys, what is refused, and what a file keeps."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cache_checks import attention
from kvq_core import ArgumentError, PagedKVCache, get_backend
from kvq_core.smoothing.calibration import KeySmoothing, ModelSmoothing
from kvq_core.smoothing.rotary import RotaryMean, RotaryStatistics
from kvq_core.testing import places, scene
from kvq_core.testing.cases import Case

HEADS, SIZE = 2, 48
HALVES = torch.stack((torch.arange(20), torch.arange(20) + 20), 1)
"""Of a partial embedding: eight channels have none."""
RATES = 10_000.0 ** (-torch.arange(20, dtype=torch.float64) / 20)


def apply_rotary(rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """``rows`` [n, heads, size] behind a rotary embedding, float64: complex numbers times e^(i phase)."""
    out, angle = rows.double().clone(), positions.double()[:, None] * RATES
    numbers = torch.complex(out[..., HALVES[:, 0]], out[..., HALVES[:, 1]]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    out[..., HALVES[:, 0]], out[..., HALVES[:, 1]] = numbers.real, numbers.imag
    return out


def a_bias() -> torch.Tensor:
    """A bias in 16 of the pairs, others in each head."""
    bias = torch.zeros(HEADS, SIZE)
    for head in range(HEADS):
        pairs = torch.randperm(20, generator=torch.Generator().manual_seed(head))[:16]
        bias[head, HALVES[pairs].flatten()] = 30 * torch.randn(32, generator=torch.Generator().manual_seed(9 + head))
    return bias


def a_mean(**changes: Any) -> RotaryMean:
    mean = RotaryMean.of_bias(a_bias(), HALVES, RATES)
    return RotaryMean(**{name: getattr(mean, name) for name in ("channels", "steps", "bias", "head_size")} | changes)


def smoothing(heads: int = HEADS, size: int = SIZE) -> ModelSmoothing:
    return ModelSmoothing({0: KeySmoothing(torch.zeros(heads, size), None, a_mean())})


def cache(mode: str, **window: Any) -> PagedKVCache:
    options: dict[str, Any] = {"num_blocks": 40, "num_kv_heads": HEADS, "head_size": SIZE, "max_sequences": 4 if window else None}
    return PagedKVCache(mode, **options, dtype=torch.float32, smoothing=smoothing(), **window)


@pytest.mark.quick
def test_a_tracer_makes_one() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        mean = a_mean(**{name: mode.from_tensor(tensor) for name, tensor in a_mean().tensors.items()})
        assert mean.pair_table.shape == a_mean().pair_table.shape


@pytest.mark.quick
def test_it_is_the_bias_behind_the_embedding() -> None:
    """In the pairs that have most of it, of those that are there."""
    bias, positions = a_bias(), torch.tensor([0, 1, 2, 77, 4095, 131_071, -3])
    mean = RotaryMean.of_bias(bias, HALVES, RATES)
    wanted = apply_rotary(bias.expand(len(positions), -1, -1), positions)
    # A step is a whole number of 2^-32 turns: at the largest position, 2^-16 of a turn off at most.
    torch.testing.assert_close(mean.at(positions), wanted, rtol=0, atol=30 * 4 * 2 * torch.pi * 2.0**-16)
    torch.testing.assert_close(mean.at(positions[:4]), wanted[:4], rtol=0, atol=1e-4)
    rising = torch.linspace(1, 2, SIZE)[None]
    assert sorted(RotaryMean.of_bias(rising, HALVES, RATES).channels[0, :, 0].tolist()) == list(range(4, 20))
    assert (RotaryMean.of_bias(rising, HALVES[:3], RATES[:3]).bias[:, 3:] == 0).all()


@pytest.mark.quick
@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("steps", lambda: a_mean(steps=torch.zeros(HEADS, 12, dtype=torch.int32))),
        ("channels", lambda: a_mean(channels=torch.zeros(HEADS, 16, 2))),
        ("channels", lambda: a_mean(channels=torch.full((HEADS, 16, 2), SIZE, dtype=torch.int32))),
        ("channels", lambda: a_mean(channels=torch.zeros(HEADS, 16, 2, dtype=torch.int32))),
        ("bias", lambda: a_mean(bias=torch.zeros(1, 16, 2))),
        ("bias", lambda: a_mean(bias=torch.full((HEADS, 16, 2), torch.nan))),
        ("head_size", lambda: a_mean(head_size=0)),
        ("rates", lambda: RotaryMean.of_bias(a_bias(), HALVES, RATES[:-1])),
        ("rotary", lambda: smoothing(heads=HEADS + 1)),
        ("rotary", lambda: smoothing(size=SIZE + 8)),
        ("tensors", lambda: ModelSmoothing.of_tensors({name: x for name, x in smoothing().tensors().items() if "rotary.bias" not in name})),
        # Exact rows of sinks and of the newest tokens are read side by side: no first position tells both of theirs.
        ("residual_mode", lambda: cache("int4", residual_length=24, sink_tokens=4, residual_mode="int8")),
    ],
)
def test_what_is_none_or_does_not_fit_is_refused(argument: str, call: Callable[[], object]) -> None:
    with pytest.raises(ArgumentError, match=f"^{argument}: "):
        call()


@pytest.mark.parametrize("door", ["write", "read"])
def test_the_other_door_s_table_is_refused(door: str) -> None:
    """By the ops themselves, whose kernels would read past its end."""
    built = scene.build(Case(smoothing="rotary"), get_backend("int4"), torch.device("cpu"))
    one = RotaryMean.of_bias(torch.ones(2, 64), HALVES, RATES)
    swapped = replace(one)
    object.__setattr__(swapped, "channel_table", one.pair_table)
    object.__setattr__(swapped, "pair_table", one.channel_table)
    with pytest.raises(ArgumentError, match=r"^smoothing: got a rotary table of"):
        getattr(built, door)(smoothing=KeySmoothing(torch.zeros(2, 64), None, swapped))


def test_a_file_keeps_it_and_heads_are_cut_off(tmp_path: Path) -> None:
    rotary, positions = a_mean(), torch.arange(50)
    whole = KeySmoothing(torch.ones(HEADS, SIZE), torch.rand(HEADS, SIZE) + 0.5, rotary)
    given = ModelSmoothing({0: whole, 3: KeySmoothing(torch.ones(HEADS, SIZE))})
    given.save(tmp_path / "smoothing")
    found, part = ModelSmoothing.load(tmp_path / "smoothing"), whole.of_heads(slice(1, 2))
    assert found.fingerprint == given.fingerprint and found[3].rotary is None
    assert found[0].rotary is not None and torch.equal(found[0].rotary.at(positions), rotary.at(positions))
    assert replace(whole, rotary=a_mean(steps=rotary.steps + 1)).fingerprint != whole.fingerprint
    assert part.rotary is not None and torch.equal(part.rotary.at(positions), rotary.at(positions)[:, 1:])
    assert torch.equal(part.mean, whole.mean[1:]) and part.balance is not None and part.balance.shape == (1, SIZE)


@pytest.mark.quick
def test_rows_that_are_not_finite_do_not_count_for_their_head() -> None:
    keys, positions = a_bias() + torch.randn(30, HEADS, SIZE, generator=torch.Generator().manual_seed(4)), torch.arange(30)
    kept, spoilt = RotaryStatistics(HALVES, RATES), RotaryStatistics(HALVES, RATES)
    kept.add(keys[positions != 7], positions[positions != 7])
    keys[7, 0, 5], keys[:, 1, 9] = torch.nan, torch.inf
    for part in (slice(0, 15), slice(15, 30)):
        spoilt.add(keys[part], positions[part])
    torch.testing.assert_close(spoilt.mean().bias[0], kept.mean().bias[0])
    assert not spoilt.mean().bias[1].any()


@pytest.mark.parametrize(
    ("place", "mode", "window", "allowed"),
    [
        ("eager", "none", {}, 1e-3),
        ("eager", "int4", {"residual_length": 24, "sink_tokens": 4}, 0.35),
        ("eager", "none", {"residual_length": 24, "residual_mode": "int8"}, 0.03),
        ("interpret", "none", {"residual_length": 24, "residual_mode": "int8"}, 0.03),
    ],
    ids=str,
)
def test_a_cache_reads_keys_as_they_were(
    place: str, mode: str, window: dict[str, Any], allowed: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whatever became of its sequences. Keys in mode none are wrong by the whole bias where a position is."""
    places.enter(place, monkeypatch)
    held, rotary, generator = cache(mode, **window), a_mean(), torch.Generator().manual_seed(3)
    texts: dict[int, torch.Tensor] = {}

    def grow(counts: dict[int, int]) -> None:
        step, sizes = held.append(counts), list(counts.values())
        key, q = (torch.randn(step.num_tokens, HEADS, SIZE, generator=generator) for _ in range(2))
        for seq, new in zip(counts, key.split(sizes), strict=True):
            before = texts.get(seq, new[:0])
            new += rotary.at(torch.arange(len(before), len(before) + len(new))).float()
            texts[seq] = torch.cat((before, new))
        held.write(0, key, key, step)
        for seq, mine, found in zip(counts, q.split(sizes), held.attend(0, q, step).split(sizes), strict=True):
            wanted = attention(mine, texts[seq], texts[seq])
            assert float((found - wanted).norm() / wanted.norm()) < allowed, (seq, held.length(seq))

    first, second = held.allocate_sequence(), held.allocate_sequence()
    grow({first: 19, second: 40})
    grow({first: 1, second: 3})
    third = held.fork(second)
    texts[third] = texts[second]
    grow({third: 1, first: 30})
    held.truncate(second, 33)
    texts[second] = texts[second][:33]
    grow({second: 2, third: 1})
    held.save(tmp_path / "cache")
    held = PagedKVCache.load(tmp_path / "cache")
    grow({first: 1, second: 1, third: 9})
