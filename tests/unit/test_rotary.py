"""Rotary key means: what they take off keys, what is refused, and what a file keeps."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cache_checks import attention
from kvq_core import ArgumentError, PagedKVCache, get_backend
from kvq_core.smoothing.calibration import KeySmoothing, ModelSmoothing
from kvq_core.smoothing.rotary import RotaryMean, RotaryStatistics
from kvq_core.testing import places, scene
from kvq_core.testing.cases import Case
from kvq_core.testing.places import Place

HEADS, SIZE = 2, 48
HALVES = torch.stack((torch.arange(20), torch.arange(20) + 20), 1)
"""Of a partial embedding: eight channels have none."""
RATES = 10_000.0 ** (-torch.arange(20, dtype=torch.float64) / 20)


def apply_rotary(rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """``rows`` [n, heads, size] behind a rotary embedding, float64: complex numbers times e^(i phase)."""
    out = rows.double().clone()
    numbers = torch.complex(out[..., HALVES[:, 0]], out[..., HALVES[:, 1]])
    angle = positions.double()[:, None] * RATES
    numbers = numbers * torch.polar(torch.ones_like(angle), angle)[:, None]
    out[..., HALVES[:, 0]], out[..., HALVES[:, 1]] = numbers.real, numbers.imag
    return out


def a_bias() -> torch.Tensor:
    """A bias in 16 of the pairs, others in each head."""
    bias = torch.zeros(HEADS, SIZE)
    for head in range(HEADS):
        pairs = torch.randperm(20, generator=torch.Generator().manual_seed(head))[:16]
        bias[head, HALVES[pairs].flatten()] = 30 * torch.randn(32, generator=torch.Generator().manual_seed(9 + head))
    return bias


def tensors(**changes: Any) -> dict[str, Any]:
    mean = RotaryMean.of_bias(a_bias(), HALVES, RATES)
    return {"channels": mean.channels, "steps": mean.steps, "bias": mean.bias, "head_size": SIZE} | changes


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
    ("argument", "wrong"),
    [
        ("steps", torch.zeros(HEADS, 12, dtype=torch.int32)),
        ("channels", torch.zeros(HEADS, 16, 2)),
        ("channels", torch.full((HEADS, 16, 2), SIZE, dtype=torch.int32)),
        ("channels", torch.zeros(HEADS, 16, 2, dtype=torch.int32)),
        ("bias", torch.zeros(1, 16, 2)),
        ("head_size", 0),
    ],
)
def test_what_is_none_is_refused(argument: str, wrong: object) -> None:
    with pytest.raises(ArgumentError, match=rf"^{argument}: "):
        RotaryMean(**tensors(**{argument: wrong}))


def test_what_does_not_fit_is_refused() -> None:
    rotary = RotaryMean(**tensors())
    for shape in ((HEADS + 1, SIZE), (HEADS, SIZE + 8)):
        with pytest.raises(ArgumentError, match=r"^rotary: "):
            KeySmoothing(torch.zeros(shape), None, rotary)
    with pytest.raises(ArgumentError, match=r"^rates: "):
        RotaryMean.of_bias(a_bias(), HALVES, RATES[:-1])
    # Exact rows of sinks and of the newest tokens are read side by side: no first position tells both of theirs.
    given = ModelSmoothing({0: KeySmoothing(torch.zeros(HEADS, SIZE), None, rotary)})
    options: dict[str, Any] = {"num_blocks": 40, "num_kv_heads": HEADS, "head_size": SIZE, "smoothing": given, "max_sequences": 1}
    with pytest.raises(ArgumentError, match="residual_mode: got int8_per_token_head, need none with sink_tokens and a rotary mean"):
        PagedKVCache("int4", **options, residual_length=24, sink_tokens=4, residual_mode="int8")


@pytest.mark.parametrize("door", ["write", "read"])
def test_the_other_door_s_table_is_refused(door: str) -> None:
    """By the ops themselves, whose kernels would read past its end."""
    backend, one = get_backend("int4"), KeySmoothing(torch.zeros(2, 64), None, RotaryMean.of_bias(torch.ones(2, 64), HALVES, RATES))
    built = scene.build(Case(smoothing="rotary"), backend, torch.device("cpu"))
    assert one.rotary is not None
    swapped = replace(one.rotary)
    for name, table in (("channel_table", one.rotary.pair_table), ("pair_table", one.rotary.channel_table)):
        object.__setattr__(swapped, name, table)
    arguments = built.write_arguments() if door == "write" else built.read_arguments() | {"out": built.fresh_out()["rows"]}
    call = backend.reshape_and_cache if door == "write" else backend.unified_attention
    with pytest.raises(ArgumentError, match=r"^smoothing: got a rotary table of"):
        call(**arguments | {"smoothing": KeySmoothing(one.mean, None, swapped)})


def test_a_file_keeps_it_and_heads_are_cut_off(tmp_path: Path) -> None:
    whole = KeySmoothing(torch.ones(HEADS, SIZE), torch.rand(HEADS, SIZE) + 0.5, RotaryMean(**tensors()))
    given, positions = ModelSmoothing({0: whole, 3: KeySmoothing(torch.ones(HEADS, SIZE))}), torch.arange(50)
    given.save(tmp_path / "smoothing")
    found = ModelSmoothing.load(tmp_path / "smoothing")
    part = whole.of_heads(slice(1, 2))
    assert found[0].rotary is not None and whole.rotary is not None and part.rotary is not None and part.balance is not None
    assert found.fingerprint == given.fingerprint and found[3].rotary is None
    assert torch.equal(found[0].rotary.at(positions), whole.rotary.at(positions))
    assert replace(whole, rotary=RotaryMean(**tensors(steps=whole.rotary.steps + 1))).fingerprint != whole.fingerprint
    assert torch.equal(part.rotary.at(positions), whole.rotary.at(positions)[:, 1:])
    assert torch.equal(part.mean, whole.mean[1:]) and part.balance.shape == (1, SIZE)
    missing = {name: tensor for name, tensor in given.tensors().items() if not name.endswith("rotary.bias")}
    with pytest.raises(ArgumentError, match=r"^tensors: "):
        ModelSmoothing.of_tensors(missing)


@pytest.mark.quick
def test_rows_that_are_not_finite_do_not_count_for_their_head() -> None:
    generator = torch.Generator().manual_seed(4)
    keys = a_bias() + torch.randn(30, HEADS, SIZE, generator=generator)
    kept, spoilt = RotaryStatistics(HALVES, RATES), RotaryStatistics(HALVES, RATES)
    given = keys.clone()
    given[7, 0, 5], given[:, 1, 9] = torch.nan, torch.inf
    for first in (0, 15):
        spoilt.add(given[first : first + 15], torch.arange(first, first + 15))
    others = torch.arange(30)[torch.arange(30) != 7]
    kept.add(keys[others], others)
    torch.testing.assert_close(spoilt.mean().bias[0], kept.mean().bias[0])
    assert not spoilt.mean().bias[1].any()


ALLOWED = {"none": 1e-3, "int8": 0.03, "int4": 0.35}


@pytest.fixture
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Place:
    return places.enter(request.param, monkeypatch)


@pytest.mark.parametrize(
    ("place", "mode", "window"),
    [
        ("eager", "none", {}),
        ("eager", "int4", {"residual_length": 24, "sink_tokens": 4, "max_sequences": 4}),
        ("eager", "none", {"residual_length": 24, "residual_mode": "int8", "max_sequences": 4}),
        ("interpret", "none", {"residual_length": 24, "residual_mode": "int8", "max_sequences": 4}),
    ],
    indirect=["place"],
    ids=str,
)
def test_a_cache_reads_keys_as_they_were(mode: str, window: dict[str, Any], place: Place, tmp_path: Path) -> None:
    """Whatever became of its sequences. Keys in mode none are wrong by the whole bias where a position is."""
    rotary, generator = RotaryMean(**tensors()), torch.Generator().manual_seed(3)
    given = ModelSmoothing({0: KeySmoothing(torch.zeros(HEADS, SIZE), None, rotary)})
    cache = PagedKVCache(mode, num_blocks=40, num_kv_heads=HEADS, head_size=SIZE, dtype=torch.float32, smoothing=given, **window)
    texts: dict[int, torch.Tensor] = {}
    allowed = ALLOWED["int8" if mode == "none" and "residual_mode" in window else mode]

    def grow(counts: dict[int, int]) -> None:
        step = cache.append(counts)
        rows = []
        for seq, count in counts.items():
            start = len(texts.get(seq, ()))
            rows.append(torch.randn(count, HEADS, SIZE, generator=generator) + rotary.at(torch.arange(start, start + count)).float())
            texts[seq] = torch.cat((texts.get(seq, rows[-1][:0]), rows[-1]))
        key, q = torch.cat(rows), torch.randn(step.num_tokens, HEADS, SIZE, generator=generator)
        cache.write(0, key, key, step)
        out = cache.attend(0, q, step)
        for seq, mine, found in zip(counts, *(x.split(list(counts.values())) for x in (q, out)), strict=True):
            wanted = attention(mine, texts[seq], texts[seq])
            assert float((found - wanted).norm() / wanted.norm()) < allowed, (seq, cache.length(seq))

    first, second = cache.allocate_sequence(), cache.allocate_sequence()
    grow({first: 19, second: 40})
    grow({first: 1, second: 3})
    third = cache.fork(second)
    texts[third] = texts[second]
    grow({third: 1, first: 30})
    cache.truncate(second, 33)
    texts[second] = texts[second][:33]
    grow({second: 2, third: 1})
    cache.save(tmp_path / "cache")
    cache = PagedKVCache.load(tmp_path / "cache")
    grow({first: 1, second: 1, third: 9})
