"""An order of channels (kvq_core.smoothing.order): what a smoothing makes of it, what keys lose, and who refuses it. What kernels make of
it is in the conformance suite."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvq_core import ArgumentError, PagedKVCache, get_backend
from kvq_core.call.smoothed import Smoothing
from kvq_core.hadamard import block_of
from kvq_core.smoothing import order
from kvq_core.smoothing.calibration import KeySmoothing, KeyStatistics, ModelSmoothing
from kvq_int2.ordered import dequantize, quantize, rotated

HEADS, GROUP = 2, 3


def rows(size: int, seed: int, tokens: int = 300) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys with a mean, and queries, whose channels differ in size by a factor of three, rms."""
    generator = torch.Generator().manual_seed(seed)

    def some(heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, size, generator=generator)

    sizes = torch.randn(2, HEADS, size, generator=generator).exp()
    return some(HEADS) * sizes[0] + some(HEADS)[:1], some(HEADS * GROUP) * sizes[1].repeat_interleave(GROUP, 0)


def counted(keys: torch.Tensor, queries: torch.Tensor) -> KeyStatistics:
    statistics = KeyStatistics()
    statistics.add(keys, queries)
    return statistics


def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return torch.einsum("ihgd,jhd->hgij", q.unflatten(1, (HEADS, GROUP)).double(), k.double())


@pytest.mark.quick
@pytest.mark.parametrize("size", [32, 64, 96, 256])
def test_places_and_factors_leave_scores_as_they_are(size: int) -> None:
    keys, queries = rows(size, size)
    found = counted(keys, queries).smoothing(ordered=True)
    assert found.order is not None
    sizes = keys.std(0, unbiased=False) * queries.unflatten(1, (HEADS, GROUP)).square().mean((0, 2)).sqrt()
    in_order = sizes.gather(-1, found.order.long())
    assert (in_order[:, 1:] <= in_order[:, :-1] * 1.0001).all()
    write, read = (Smoothing(found.mean, factor) for factor in (found.write_factor, found.read_factor))
    stored, (asking, shift) = write.smooth(keys, None), read.of_queries(queries)
    part = size // 4
    # The last part has the first one's channels once more, four times as large, and queries a quarter as large.
    assert torch.equal(stored[..., 3 * part :], 4 * stored[..., :part]) and torch.equal(asking[..., 3 * part :] * 4, asking[..., :part])
    kept = torch.zeros_like(keys).scatter_(-1, found.order.long()[:, : 3 * part].expand(len(keys), -1, -1), 1.0)
    wanted = scores(queries, (keys - found.mean) * kept)
    torch.testing.assert_close(scores(asking[..., : 3 * part], stored[..., : 3 * part]), wanted, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(shift, (queries * found.mean.repeat_interleave(GROUP, 0)).sum(-1), rtol=1e-4, atol=1e-3)
    squares = stored.square().mean(0)
    first, others = squares[:, :part].mean(-1), squares[:, part : 3 * part].mean(-1)
    torch.testing.assert_close(first, others * order.FIRST**2, rtol=1e-3, atol=0)


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("seed", range(3))
def test_scores_of_uneven_channels_lose_half(size: int, seed: int) -> None:
    """Of rows that were not counted, beside balanced channels: at most .65 of the squared error."""
    backend, errors = get_backend("int2"), {}
    statistics = counted(*(x[:150] for x in rows(size, seed)))
    keys, queries = (x[150:] for x in rows(size, seed))
    for kind in ("balanced", "ordered"):
        found = statistics.smoothing(**{kind: True})
        stored = Smoothing(found.mean, found.write_factor).smooth(keys, None)
        encode, decode = (backend.encode_ordered, backend.decode_ordered) if found.order is not None else (backend.encode, backend.decode)
        asking, _ = Smoothing(found.mean, found.read_factor).of_queries(queries)
        wanted = scores(queries, keys - found.mean)
        errors[kind] = float((scores(asking, decode(*encode(stored))) - wanted).square().mean() / wanted.square().mean())
    assert errors["ordered"] < 0.65 * errors["balanced"], errors


@pytest.mark.parametrize("size", range(32, 257, 32))
def test_no_row_comes_back_further_than_zero_is(size: int) -> None:
    """A few large numbers in a rotated row, which is what levels fit worst."""
    generator, part = torch.Generator().manual_seed(size), size // 4
    kept = 3 * part
    wanted = []
    for many in (1, 2, 3, 5, 9, 20):
        for places in (range(part), range(part, kept), range(kept)):
            large = torch.rand(200, len(places), generator=generator).argsort(-1) < many
            numbers = torch.zeros(200, kept)
            numbers[:, places.start : places.stop] = torch.where(large, torch.randn(200, len(places), generator=generator).sign(), 0.0)
            wanted.append(numbers * (1 + torch.rand(200, kept, generator=generator)))
    rows = torch.cat(wanted)
    given = rotated(torch.cat((rows, order.FINER * rows[:, :part]), -1)) / block_of(part)
    found = rotated(dequantize(*quantize(given))) / block_of(part)
    found = torch.cat((found[:, :part] + found[:, kept:] / order.FINER, found[:, part:kept]), -1)
    assert ((found - rows).square().sum(-1) < rows.square().sum(-1)).all()


@pytest.mark.quick
def test_saved_moved_and_cut(tmp_path: Path) -> None:
    found = counted(*rows(64, 1)).smoothing(ordered=True)
    model = ModelSmoothing({0: found, 3: replace(found, order=found.order.flip(-1))})
    model.save(tmp_path / "smoothing")
    loaded = ModelSmoothing.load(tmp_path / "smoothing")
    cache = PagedKVCache("int2", num_blocks=2, num_kv_heads=HEADS, head_size=64, smoothing=ModelSmoothing({0: found}))
    cache.save(tmp_path / "cache")
    assert PagedKVCache.load(tmp_path / "cache").smoothing.fingerprint == cache.smoothing.fingerprint
    assert loaded.fingerprint == model.fingerprint and model[0].fingerprint != model[3].fingerprint
    assert found.unordered.fingerprint != found.fingerprint and found.unordered.unordered is found.unordered
    for one, heads in ((loaded[0], slice(0, 2)), (found.to("cpu"), slice(0, 2)), (found.of_heads(slice(1, 2)), slice(1, 2))):
        assert one.order is not None and one.read_factor is not None and found.read_factor is not None
        assert torch.equal(one.order, found.order[heads])
        # Places are bits of integers, some of which are NaN.
        assert torch.equal(one.read_factor.view(torch.int32), found.read_factor[heads].view(torch.int32))


@pytest.mark.quick
def test_orders_that_are_none() -> None:
    mean, order_of_64 = torch.zeros(2, 64), torch.arange(64, dtype=torch.int32).expand(2, -1)
    wrong = {
        "balance": (mean, None, order_of_64),
        "int32": (mean, mean + 1, order_of_64.long()),
        "each channel of a head once": (mean, mean + 1, torch.zeros_like(order_of_64)),
        "that 4 divides": (mean[:, :6], mean[:, :6] + 1, order_of_64[:, :6]),
        "(2, 64)": (mean, mean + 1, order_of_64[:1]),
    }
    for need, (of_mean, balance, given) in wrong.items():
        with pytest.raises(ArgumentError, match=re.escape(need)) as caught:
            KeySmoothing(of_mean, balance, None, given)
        assert caught.value.argument == "order"


@pytest.mark.quick
@pytest.mark.parametrize(("mode", "size"), [("int4", 64), ("none", 64), ("int4/int2", 64), ("int2", 48)])
def test_a_mode_that_takes_none_says_so(mode: str, size: int) -> None:
    smoothing = ModelSmoothing({0: counted(*rows(size, 1)).smoothing(ordered=True)})
    with pytest.raises(ArgumentError, match=r"smoothing \(layer 0\): got an order of channels"):
        PagedKVCache(mode, num_blocks=4, num_kv_heads=HEADS, head_size=size, smoothing=smoothing)
    with pytest.raises(NotImplementedError, match="takes no order"):
        get_backend("int4").encode_ordered(torch.zeros(1, 64))


@pytest.mark.parametrize(
    "options", [{}, {"residual_length": 16, "sink_tokens": 4}, {"residual_length": 16, "residual_mode": "int8"}], ids=str
)
@pytest.mark.parametrize("mode", ["int2", "int2/int4"])
def test_a_cache_attends_as_over_dense_keys(mode: str, options: dict) -> None:
    keys, queries = rows(64, 5, 150)
    smoothing = counted(keys, queries).smoothing(ordered=True)
    values = torch.randn(150, HEADS, 64)
    sizes = {"num_blocks": 20, "num_kv_heads": HEADS, "head_size": 64, "dtype": torch.float32}
    wanted = _attended(PagedKVCache("none", **sizes), keys, values, queries / 30)
    more = {"max_sequences": 1} if options else {}
    errors = [
        float((_attended(PagedKVCache(mode, smoothing=given, **sizes, **options, **more), keys, values, queries / 30) - wanted).norm())
        for given in (ModelSmoothing({0: smoothing}), ModelSmoothing({0: smoothing.unordered}))
    ]
    assert errors[0] < errors[1] and errors[0] < (0.25 if mode == "int2/int4" else 0.45) * float(wanted.norm())


def _attended(cache: PagedKVCache, keys: torch.Tensor, values: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    sequence = cache.allocate_sequence()
    parts = []
    for first in range(0, len(keys), 50):
        part = slice(first, first + 50)
        step = cache.append({sequence: 50})
        cache.write(0, keys[part], values[part], step)
        parts.append(cache.attend(0, queries[part], step))
    return torch.cat(parts)
