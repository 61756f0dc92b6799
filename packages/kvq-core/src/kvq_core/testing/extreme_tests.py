"""No finite row may come back worse than zero would be, whatever it holds: ||x' - x|| <= ||x||, and every number of x' finite."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import pytest
import torch

from kvq_core.hadamard import block_hadamard, block_of, single_rht
from kvq_core.scales import LARGEST_CODE
from kvq_core.testing import budgets, strategies
from kvq_core.testing.cases import Case
from kvq_core.testing.places import Place, params
from kvq_core.testing.subject import Subject

if TYPE_CHECKING:
    from kvq_core.backend import QuantKVBackend

ROUNDING = 1e-3
"""What float32 sums, a 16-bit output and the levels of a read kernel may add to an error of 1."""


LEVELS_OF_NOISE = 3
"""How often :func:`rows` has each kind of row: as it is, and with two amounts of noise."""


@functools.cache
def rows(size: int) -> torch.Tensor:
    """Float64 rows [any, size] of magnitude 1 that put all they have into few numbers, before a rotation or after it; or nearly so."""
    generator = torch.Generator().manual_seed(size)

    def noise(count: int) -> torch.Tensor:
        return torch.randn(count, size, generator=generator, dtype=torch.float64)

    channel = torch.arange(size, dtype=torch.float64)
    some = torch.randint(size, (5,), generator=generator)
    one_hot = torch.eye(size, dtype=torch.float64)[some]
    patterns = [one_hot, block_hadamard(one_hot), single_rht(one_hot, inverse=True)]
    patterns += [torch.ones(1, size, dtype=torch.float64), (1 - 2 * (channel % 2))[None], (channel // 2 % 2 * 2 - 1)[None]]
    patterns += [(channel + 1)[None], (channel - size / 2)[None], channel.mul(6 / size).exp()[None]]
    patterns += [(channel < block_of(size)).double()[None], torch.where(channel < 3, 1.0, 0.01)[None]]
    few = noise(12) * (torch.rand(12, size, generator=generator) < 0.1)
    patterns += [few, block_hadamard(few), single_rht(few, inverse=True), noise(4), noise(4).pow(5)]
    found = torch.cat(patterns)
    mixed = [found / found.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-9) + share * noise(len(found)) for share in (0.1, 0.5)]
    every = torch.cat([found, *mixed])
    return every / every.abs().amax(-1, keepdim=True).clamp(min=1e-9)


def scaled_to(dtype: torch.dtype, size: int) -> dict[float, torch.Tensor]:
    """:func:`rows`, by their largest value: from the smallest that ``dtype`` has to its largest."""
    info = torch.finfo(dtype)
    peaks = (info.tiny * info.eps, info.tiny, 1e-6, 1.0, 6e4, info.max / 3, info.max)
    return {peak: (rows(size) * peak).to(dtype) for peak in peaks}


def assert_not_worse_than_zero(x: torch.Tensor, got: torch.Tensor, what: str) -> None:
    """Fail, naming the worst row, unless ``got`` is finite and no further from ``x`` [rows, size] than 0 is."""
    # ``got`` is rounded to its dtype's subnormal numbers, and below float32's smallest normal one hardware may give what it likes.
    smallest = max(budgets.SMALLEST, torch.finfo(got.dtype).smallest_normal * torch.finfo(got.dtype).eps / 2)
    x, got = x.double(), got.double()
    assert bool(got.isfinite().all()), f"{what}: {int((~got.isfinite()).any(-1).sum())} of {len(x)} rows came back not finite"
    lost = x.shape[-1] ** 0.5 * smallest
    error = ((got - x).norm(dim=-1) - lost).clamp(min=0) / x.norm(dim=-1).clamp(min=1e-300)
    worst = int(error.argmax())
    assert float(error[worst]) <= 1 + ROUNDING, f"{what}: row {worst} came back {float(error[worst]):.4g} of its length away, zero is 1"


class ExtremeTests(Subject):
    @pytest.mark.quick
    @pytest.mark.parametrize("dtype", strategies.DTYPES)
    def test_no_finite_row_comes_back_worse_than_zero(self, backend: QuantKVBackend, dtype: torch.dtype) -> None:
        for size in self.sizes(backend):
            by_peak = scaled_to(dtype, size)
            if backend.takes_scales:
                # As calibration takes it, from these rows.
                for peak, x in by_peak.items():
                    self.assert_encodes(backend, x, torch.tensor([max(peak / LARGEST_CODE, 1e-6)]), f"largest {peak:.3g}")
            else:
                self.assert_encodes(backend, torch.cat([*by_peak.values()]), None, f"largest {', '.join(f'{p:.3g}' for p in by_peak)}")

    def assert_encodes(self, backend: QuantKVBackend, x: torch.Tensor, scale: torch.Tensor | None, what: str) -> None:
        for half, encode in ((backend.key_half, backend.key_half.encode), (backend.value_half, backend.value_half.encode_value)):
            codes, scales = encode(x, scale=scale)
            decoded = half.decode(codes, scales if scale is None else scale)
            assert_not_worse_than_zero(x, decoded, f"{encode.__name__}, {x.dtype}, heads of {x.shape[-1]}, {what}")

    @pytest.mark.parametrize(("dtype", "size"), list(zip(strategies.DTYPES, (64, 80, 128), strict=True)))
    @pytest.mark.parametrize("place", params(), indirect=True)
    def test_no_finite_row_is_worse_than_zero_through_the_doors(
        self, backend: QuantKVBackend, place: Place, size: int, dtype: torch.dtype
    ) -> None:
        """A key is what its bytes decode to, a value what attention to it alone returns. A head for each magnitude."""
        by_peak = scaled_to(dtype, self.size(backend, size))
        x = torch.stack([*by_peak.values()], 1)
        if place.name != "gpu":
            # Of each magnitude three rows: of other kinds than of another one, or of another dtype, and each with another amount of noise.
            kinds, amount = len(x) // LEVELS_OF_NOISE, torch.arange(LEVELS_OF_NOISE)[:, None]
            head = torch.arange(len(by_peak)) + len(by_peak) * strategies.DTYPES.index(dtype)
            x = x[(LEVELS_OF_NOISE * head + amount) % kinds + kinds * amount, torch.arange(len(by_peak))]
        lengths = (1,) * len(x)
        case = Case(query_lens=lengths, seq_lens=lengths, num_kv_heads=len(by_peak), queries_per_kv=1, head_size=size, dtype=dtype)
        built = self.build(backend, case, place)
        built.key[:], built.value[:] = x.to(built.device), x.to(built.device)
        built.q.zero_()  # no score of the longest keys is a float32
        for scale in built.given_scales.values():
            scale.fill_(1.0)  # a larger value is clamped, a smaller one rounded: neither is worse than zero
        built.write()
        assert_not_worse_than_zero(x.flatten(0, 1), built.read()[: len(x)].cpu().flatten(0, 1), f"value, {dtype}")
        words = built.given_scales.get("k_scale_cache")
        if backend.needs_scale_caches:
            words = built.stored("k_scale_cache", built.slots)
        assert_not_worse_than_zero(
            x.flatten(0, 1), backend.key_half.decode(built.stored("key_cache", built.slots), words).cpu().flatten(0, 1), f"key, {dtype}"
        )
