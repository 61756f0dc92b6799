"""The contract's attributes, and what ``encode`` and ``decode`` promise."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from kvq_core.backend import QuantKVBackend as Contract
from kvq_core.errors import ArgumentError
from kvq_core.testing import budgets, places, strategies
from kvq_core.testing.places import Place
from kvq_core.testing.strategies import Rows
from kvq_core.testing.subject import Subject, assert_within

if TYPE_CHECKING:
    from kvq_core.backend import QuantKVBackend

on_one_path = pytest.mark.parametrize("place", places.params("eager", "gpu"), indirect=True)


def given_scale(backend: QuantKVBackend, x: torch.Tensor) -> torch.Tensor | None:
    """The scale a caller would give, for modes that are given one: nothing is clamped."""
    if backend.needs_scale_caches or not backend.reads_scales:
        return None
    peak = x.float().abs().amax() if x.numel() else x.new_tensor(1.0).float()
    return (peak / 300.0).clamp(min=1e-6).reshape(1)


class CodecTests(Subject):
    @pytest.mark.quick
    def test_contract(self, backend: QuantKVBackend) -> None:
        assert isinstance(backend, Contract)
        assert backend.mode == self.mode
        assert backend.packing_factor >= 1 and backend.head_size_multiple % backend.packing_factor == 0
        assert backend.reads_scales or not backend.needs_scale_caches
        for door in ("reshape_and_cache", "unified_attention"):
            assert getattr(type(backend), door) is getattr(Contract, door), f"{door} is the contract's: a mode implements write and read"

    @pytest.mark.quick
    def test_packed_head_size(self, backend: QuantKVBackend) -> None:
        for size in self.sizes(backend):
            assert backend.packed_head_size(size) * backend.packing_factor == size
        for size in (0, -backend.head_size_multiple, backend.max_head_size + backend.head_size_multiple):
            with pytest.raises(ArgumentError, match="head_size"):
                backend.packed_head_size(size)
        if backend.head_size_multiple > 1:
            with pytest.raises(ArgumentError, match=f"multiple of {backend.head_size_multiple}"):
                backend.packed_head_size(2 * backend.head_size_multiple - 1)

    @pytest.mark.quick
    def test_scale_caches(self, backend: QuantKVBackend) -> None:
        pair = backend.allocate_scale_caches(3, 16, 2, "cpu")
        if not backend.needs_scale_caches:
            assert pair == (None, None)
            return
        k, v = pair
        assert k is not None and v is not None
        assert k.shape == v.shape == (3, 16, 2) and k.dtype == v.dtype == torch.float32 and k.data_ptr() != v.data_ptr()

    @pytest.mark.quick
    @on_one_path
    def test_round_trip(self, backend: QuantKVBackend, place: Place) -> None:
        def check(example: Rows) -> None:
            x = example.tensor(place.device)
            scale = given_scale(backend, x)
            codes, scales = backend.encode(x, scale=scale)
            assert codes.shape == (*x.shape[:-1], backend.packed_head_size(x.shape[-1]))
            assert codes.dtype == backend.cache_dtype(x.dtype)
            if backend.needs_scale_caches:
                assert scales is not None and scales.shape == x.shape[:-1] and scales.dtype == torch.float32
            else:
                assert scales is None
            decoded = backend.decode(codes, scales if backend.needs_scale_caches else scale)
            assert decoded.shape == x.shape and decoded.dtype == torch.float32
            self.assert_round_trip(x, decoded, scale, str(example))

        self.for_all(place, strategies.rows(self.sizes(backend)), check, share=4)

    def assert_round_trip(self, x: torch.Tensor, decoded: torch.Tensor, scale: torch.Tensor | None, what: str) -> None:
        """Fail unless ``decoded`` is ``x`` to within the mode's quantization error."""
        rounding = budgets.rotation(x.double()) + budgets.rotation(decoded.double()) + x.shape[-1] * budgets.SMALLEST
        assert_within(self.space(decoded), self.space(x), self.round_trip_bound(x, scale) + rounding, what)

    @pytest.mark.quick
    @on_one_path
    def test_zero_rows(self, backend: QuantKVBackend, place: Place) -> None:
        x = torch.zeros(3, 2, self.size(backend), device=place.device)
        scale = None if given_scale(backend, x) is None else torch.full((1,), 0.5, device=place.device)
        codes, scales = backend.encode(x, scale=scale)
        assert torch.equal(backend.decode(codes, scales if backend.needs_scale_caches else scale), x)

    @pytest.mark.quick
    @on_one_path
    def test_rows_are_independent(self, backend: QuantKVBackend, place: Place) -> None:
        """A row's bytes do not depend on the rows beside it, its strides, or the shape it came in."""
        size = self.size(backend, 96)
        wide = torch.randn(5, 3, size + 64, generator=torch.Generator().manual_seed(1)).to(place.device)
        x = wide[..., 16 : 16 + size]
        scale = given_scale(backend, x)
        codes, scales = backend.encode(x, scale=scale)
        alone = backend.encode(x[2, 1].contiguous(), scale=scale)
        assert torch.equal(codes[2, 1].view(torch.uint8), alone[0].view(torch.uint8))
        if scales is not None and alone[1] is not None:
            assert torch.equal(scales[2, 1], alone[1])
        empty, _ = backend.encode(x[:0], scale=scale)
        assert empty.shape[:2] == (0, 3)

    @pytest.mark.quick
    @on_one_path
    @pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
    def test_bad_values_encode_alone(self, backend: QuantKVBackend, place: Place, bad: float) -> None:
        x = torch.randn(4, 2, self.size(backend), generator=torch.Generator().manual_seed(2)).to(place.device)
        scale = given_scale(backend, x)
        wanted = backend.decode(*_encoded(backend, x, scale))
        x[1, 1, -1] = bad
        got = backend.decode(*_encoded(backend, x, scale))
        others = torch.ones(4, 2, dtype=torch.bool)
        others[1, 1] = False
        assert torch.equal(got[others], wanted[others])

    @pytest.mark.quick
    @on_one_path
    def test_decode_takes_raw_bytes(self, backend: QuantKVBackend, place: Place) -> None:
        x = torch.randn(4, 2, self.size(backend), generator=torch.Generator().manual_seed(3)).to(place.device)
        codes, scales = _encoded(backend, x, given_scale(backend, x))
        for dtype in backend.accepted_cache_dtypes(x.dtype):
            same = torch.equal(backend.decode(codes.view(dtype), scales), backend.decode(codes, scales))
            assert same, f"decode must take codes as {dtype}, too: raw bytes, to be viewed as what encode returned"


def _encoded(backend: QuantKVBackend, x: torch.Tensor, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    codes, scales = backend.encode(x, scale=scale)
    return codes, scales if backend.needs_scale_caches else scale
