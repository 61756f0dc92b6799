"""Key smoothing as an object: estimated in one pass, saved, and the same for all keys of a cache."""

import copy
import dataclasses
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kvq_core import ArgumentError, PagedKVCache, SnapshotError
from kvq_core.smoothing.calibration import FIRST_PREFILL, KeySmoothing, KeyStatistics, ModelSmoothing
from kvq_core.smoothing.rotary import NUM_PAIRS, RotaryMean

pytestmark = pytest.mark.usefixtures("torch_path")
HEADS, GROUP, SIZE = 2, 3, 64
NOT_FINITE = (torch.nan, torch.inf, -torch.inf)


def keys_and_queries(tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys with a mean of ten in one channel and unequal spread, and queries of unequal size."""
    g = torch.Generator().manual_seed(seed)
    keys = torch.randn(tokens, HEADS, SIZE, generator=g) * torch.logspace(-1, 1, SIZE)
    keys[:, 0, 5] += 10
    return keys, torch.randn(tokens, HEADS * GROUP, SIZE, generator=g) * torch.logspace(0.5, -0.5, SIZE)


def model_smoothing(layers: int = 2, balanced: bool = True) -> ModelSmoothing:
    given = [keys_and_queries(50, layer) for layer in range(layers)]
    return ModelSmoothing(
        {layer: KeySmoothing.estimate(keys, queries if balanced else None) for layer, (keys, queries) in enumerate(given)}
    )


def test_the_mean_and_the_balance_are_what_they_say() -> None:
    """In one part or several, with padding that does not count."""
    keys, queries = keys_and_queries(90)
    statistics = KeyStatistics()
    for part in (slice(0, 40), slice(40, 41), slice(41, 90)):
        spoilt = torch.cat((keys[part], torch.full((3, HEADS, SIZE), torch.nan)))
        statistics.add(spoilt, queries[part], real=torch.arange(len(spoilt)) < len(spoilt) - 3)
    ratio = (keys.std(0, unbiased=False) / queries.unflatten(1, (HEADS, GROUP)).square().mean((0, 2)).sqrt()).sqrt()
    for found in (KeySmoothing.estimate(keys, queries), statistics.smoothing(balanced=True)):
        torch.testing.assert_close(found.mean, keys.mean(0))
        assert found.balance is not None and found.write_factor is not None
        torch.testing.assert_close(found.balance, ratio / ratio.log().mean(-1, keepdim=True).exp(), rtol=1e-4, atol=0)
        torch.testing.assert_close(found.write_factor * found.balance, torch.ones(HEADS, SIZE))
    assert KeySmoothing.estimate(keys).balance is None


def with_one(value: float) -> torch.Tensor:
    """Ones, but for one ``value``."""
    found = torch.ones(2, 64)
    found[1, 3] = value
    return found


def spoilt(given: ModelSmoothing) -> ModelSmoothing:
    """``given``, whose last mean was written to since it was made."""
    given[len(given) - 1].mean[0, 0] = torch.nan
    return given


@pytest.mark.parametrize("value", NOT_FINITE)
def test_rows_that_are_not_finite_do_not_count_for_their_head(value: float) -> None:
    keys, queries = keys_and_queries(20)
    spoilt, asked = keys.clone(), queries.clone()
    spoilt[3, 0, 7] = spoilt[:, 1, 2] = asked[4, 1, 0] = value
    found = KeySmoothing.estimate(spoilt, asked)
    torch.testing.assert_close(found.mean[0], keys[torch.arange(20) != 3, 0].mean(0))
    assert not found.mean[1].any() and found.balance is not None and bool(found.balance.isfinite().all())


@pytest.mark.parametrize(
    ("argument", "make"),
    [
        ("mean", lambda: KeySmoothing(torch.zeros(2, 3, 4))),
        ("balance", lambda: KeySmoothing(torch.zeros(2, 64), torch.ones(2, 32))),
        *(("mean", lambda x=x: KeySmoothing(with_one(x))) for x in NOT_FINITE),
        *(("balance", lambda x=x: KeySmoothing(torch.zeros(2, 64), with_one(x))) for x in (*NOT_FINITE, 0.0, -1.0, 1e-42, 3e38)),
        ("keys", lambda: KeyStatistics().smoothing()),
        ("keys", lambda: KeySmoothing.estimate(torch.zeros(2, 64))),
        ("queries", lambda: KeySmoothing.estimate(torch.zeros(5, 2, 64), torch.zeros(5, 3, 64))),
        ("smoothing", lambda: cache(smoothing="second_prefill")),
        ("smoothing", lambda: cache(smoothing=model_smoothing(1))),
        ("smoothing[1].mean", lambda: cache(smoothing=spoilt(model_smoothing()))),
        ("smoothing (layer 0)", lambda: cache(smoothing=ModelSmoothing({i: KeySmoothing(torch.zeros(2, 32)) for i in range(2)}))),
    ],
)
def test_what_does_not_fit_is_named(argument: str, make: Callable[[], object]) -> None:
    with pytest.raises(ArgumentError) as caught:
        make()
    assert caught.value.argument == argument, str(caught.value)


def test_tensors_without_values_are_not_asked_for_any() -> None:
    with FakeTensorMode():
        fake = KeySmoothing(torch.ones(HEADS, SIZE), torch.ones(HEADS, SIZE))
    for one in (fake, KeySmoothing(*(torch.ones(HEADS, SIZE, device="meta") for _ in range(2)))):
        assert ModelSmoothing({0: one}).for_layers([0]) == [one]


def test_layers_that_are_missing_are_named_and_so_are_those_that_came() -> None:
    with pytest.raises(ArgumentError, match=r"^smoothing: got none for layers \[0, 1\], but for \[3\], need one for each of \[0, 1\]: "):
        cache(smoothing=ModelSmoothing({3: model_smoothing()[0]}))


@pytest.mark.parametrize("inference", [False, True])
def test_smoothings_keep_no_tensor_of_the_caller_s(inference: bool) -> None:
    pairs = torch.arange(2 * NUM_PAIRS, dtype=torch.int32).view(1, NUM_PAIRS, 2).expand(HEADS, -1, -1)
    with torch.inference_mode(inference):
        given = [torch.rand(HEADS, SIZE) + 0.5 for _ in range(2)]
        rotary = [pairs.clone(), torch.ones(HEADS, NUM_PAIRS, dtype=torch.int32), torch.ones(HEADS, NUM_PAIRS, 2)]
        found = KeySmoothing(*given, RotaryMean(*rotary, SIZE))
        before, moved = found.fingerprint, found.to("cpu")
        for tensor in (*given, *rotary):
            tensor.zero_()
    assert found.fingerprint == moved.fingerprint == before and found.balance is not None and found.write_factor is not None
    torch.testing.assert_close(found.balance * found.write_factor, torch.ones(HEADS, SIZE))
    assert not any(tensor.is_inference() for tensor in (*found.operands, *moved.operands))
    moved.mean.zero_()
    assert found.fingerprint == before


def test_a_file_brings_back_the_same_and_its_fingerprint_tells_what(tmp_path: Path) -> None:
    """test_snapshot.py: no other file is taken for one."""
    one, path = model_smoothing(2), tmp_path / "s.safetensors"
    nudged = {layer: dataclasses.replace(s, mean=s.mean + (layer == 1) * 1e-3) for layer, s in one.items()}
    every = [one, ModelSmoothing(nudged), ModelSmoothing({0: one[1], 1: one[0]}), model_smoothing(2, balanced=False), model_smoothing(1)]
    assert len({s.fingerprint for s in every}) == 5
    for smoothing in every:
        smoothing.save(path)
        assert ModelSmoothing.load(path).fingerprint == smoothing.fingerprint
    data = bytearray(path.read_bytes())
    data[-5] ^= 0x40
    path.write_bytes(data)
    with pytest.raises(SnapshotError, match="damaged"):
        ModelSmoothing.load(path)


def cache(mode: str = "int4", **options: Any) -> PagedKVCache:
    return PagedKVCache(mode, num_blocks=8, num_kv_heads=HEADS, head_size=SIZE, num_layers=2, dtype=torch.float32, **options)


def fed(into: PagedKVCache, *counts: int, **options: Any) -> list[torch.Tensor]:
    """Attention of a new sequence that grows by ``counts``, in layer 1."""
    seq, outs = into.allocate_sequence(), []
    for i, count in enumerate(counts):
        step = into.append({seq: count})
        for layer in range(2):
            keys, queries = keys_and_queries(count, 10 * layer + i)
            into.write(layer, keys, keys.flip(-1), step)
        outs.append(into.attend(1, queries, step, **options))
    return outs


def test_the_first_keys_decide_for_good() -> None:
    """And attention is the same: mode none loses nothing that would be in the way."""
    found, options = cache("none", smoothing=FIRST_PREFILL), {"softcap": 5.0, "sinks": torch.linspace(-2, 9, HEADS * GROUP)}
    assert found.smoothing is None
    outs = fed(found, 30, 7, **options)
    assert found.smoothing is not None and list(found.smoothing) == [0, 1]
    for layer in range(2):
        torch.testing.assert_close(found.smoothing[layer].mean, keys_and_queries(30, 10 * layer)[0].mean(0))
    torch.testing.assert_close(outs, fed(cache("none"), 30, 7, **options), rtol=2e-4, atol=2e-4)


def test_a_nan_among_the_first_keys_spoils_no_other_row_and_a_refused_write_decides_nothing() -> None:
    found = cache(smoothing=FIRST_PREFILL)
    for seq in (found.allocate_sequence(), found.allocate_sequence()):
        step = found.append({seq: 9})
        keys, queries = keys_and_queries(9, seq)
        with pytest.raises(ArgumentError, match=r"^value: "):
            found.write(0, keys + 100, keys.bfloat16(), step)
        assert (found.smoothing is None) == (seq == 0)
        keys[8, 0, 3] = torch.nan if seq == 0 else 0.0
        found.write(0, keys, keys.nan_to_num(), step)
        assert found.smoothing is not None
        torch.testing.assert_close(found.smoothing[0].mean[1], keys_and_queries(9, 0)[0].mean(0)[1])
        rows = found.attend(0, queries, step).isnan().any(-1).nonzero().tolist()
        assert rows == [[8, head] for head in range(GROUP) if seq == 0]


def test_a_saved_cache_has_its_smoothing_and_no_other(tmp_path: Path) -> None:
    path, smoothing = tmp_path / "cache.safetensors", model_smoothing()
    cache(smoothing=smoothing).save(path)
    back = PagedKVCache.load(path, smoothing=smoothing)
    assert back.smoothing is not None and back.smoothing.fingerprint == smoothing.fingerprint
    with pytest.raises(SnapshotError, match=f"smoothed with {smoothing.fingerprint}, not with"):
        PagedKVCache.load(path, smoothing=model_smoothing(balanced=False))
    cache().save(path)
    assert PagedKVCache.load(path).smoothing is None
    with pytest.raises(SnapshotError, match="smoothed with nothing"):
        PagedKVCache.load(path, smoothing=smoothing)


@pytest.mark.parametrize("window", [{}, {"residual_length": 8, "max_sequences": 2}])
@pytest.mark.parametrize("written", [0, 1, 2])
def test_layers_of_a_saved_or_copied_cache_still_wait_for_their_first_keys(written: int, window: dict[str, Any], tmp_path: Path) -> None:
    path, saved = tmp_path / "cache.safetensors", cache(smoothing=FIRST_PREFILL, **window)
    step, (keys, _) = saved.append({saved.allocate_sequence(): 5}), keys_and_queries(5)
    for layer in range(written):
        saved.write(layer, keys + layer, keys, step)
    saved.save(path)
    twins = [PagedKVCache.load(path, smoothing=saved.smoothing), copy.deepcopy(saved), pickle.loads(pickle.dumps(saved))]
    assert all(list(twin.smoothing or {}) == list(range(written)) for twin in twins)
    wanted = fed(saved, 9)
    for twin in twins:
        assert torch.equal(fed(twin, 9)[0], wanted[0]) and twin.smoothing is not None and saved.smoothing is not None
        assert twin.smoothing.fingerprint == saved.smoothing.fingerprint and len(twin.smoothing) == 2
