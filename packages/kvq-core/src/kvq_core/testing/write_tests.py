"""The write door: the bytes are ``encode``'s, they go where ``slot_mapping`` says, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import strategies as st

from kvq_core.hadamard import block_of, single_rht
from kvq_core.testing import places, strategies
from kvq_core.testing.cases import QUICK, ROTARY, ROTARY_LARGE, SHAPES, SMOOTHED, Case
from kvq_core.testing.places import Place
from kvq_core.testing.scene import Scene
from kvq_core.testing.subject import Subject, assert_within

if TYPE_CHECKING:
    from kvq_core.backend import QuantKVBackend

_LARGE = (
    Case(query_lens=(1,), seq_lens=(3000,), num_kv_heads=8, head_size=128, dtype=torch.bfloat16),
    Case(query_lens=(1,), seq_lens=(700,), num_kv_heads=5, head_size=112, dtype=torch.float32, layout="interleaved"),
)
_SHAPES = tuple({str(replace(case, query_lens=case.seq_lens, queries_per_kv=1)): case for case in SHAPES}.values())
"""One of those that differ in queries alone, which a write does not see."""
_DTYPES = tuple(Case(dtype=dtype) for dtype in strategies.DTYPES[1:])


class WriteTests(Subject):
    @places.each(_SHAPES + _DTYPES + SMOOTHED[:3], large=_LARGE, quick=QUICK)
    def test_written_rows(self, backend: QuantKVBackend, place: Place, case: Case) -> None:
        built = self.build(backend, case, place)
        self.assert_write(built, str(built.case))

    @places.each(ROTARY, large=ROTARY_LARGE, quick=ROTARY[:1])
    def test_written_rows_less_a_rotary_mean(self, backend: QuantKVBackend, place: Place, case: Case) -> None:
        """No further off than ``encode`` leaves them, but for a rounding to the rows' dtype that may go the other way: the mean is of sines
        that hardware approximates."""
        built = self.build(backend, case, place)
        built.write()
        rows = built.stored_key
        codes, scales = built.encoded("key", rows)
        given = scales if backend.needs_scale_caches else built.given_scales.get("k_scale_cache")
        wanted = built.half("key").decode(codes, given).double()
        off, allowed = ((x - rows.double()).norm(dim=-1) for x in (built.decoded("key", built.slots), wanted))
        rounding = torch.finfo(case.dtype).eps * rows.double().norm(dim=-1) + 2.0**-16 * 30
        assert_within(off, torch.zeros_like(off), 1.1 * allowed + 4 * rounding, "distance of stored keys from rows [row, head]")

    def test_random_rows(self, backend: QuantKVBackend, place: Place) -> None:
        """Rows of every kind, in random layouts, some of them padding or out of the cache."""
        examples = st.tuples(
            strategies.cases(self.sizes(backend), place, plain=True),
            st.lists(st.sampled_from(strategies.KINDS), min_size=1, max_size=7),
            st.integers(0, 2**20),
        )

        def check(example: tuple[Case, list[str], int]) -> None:
            case, kinds, seed = example
            built = self.build(backend, case, place, seed)
            generator = torch.Generator().manual_seed(seed)
            for x in (built.key, built.value):
                for token in range(x.shape[0]):
                    for head in range(x.shape[1]):
                        kind = kinds[(token * x.shape[1] + head) % len(kinds)]
                        x[token, head] = strategies.row(kind, x.shape[2], x.dtype, generator).to(x.device, x.dtype)
            self.assert_write(built, f"{case}, {kinds}, seed {seed}", skip=seed % 5)

        self.for_all(place, examples, check, share=2)

    def assert_write(self, built: Scene, what: str, skip: int = 3) -> None:
        """Write all rows but every ``skip``-th (0: all), and compare with ``encode``. What lies outside is the scene's to watch."""
        slots = built.slots.clone()
        num_slots = built.num_blocks * built.case.block_size
        outside = built.tensor([-1, num_slots, -num_slots, num_slots + 5, -(2**40), 2**40], torch.int64)
        if skip:
            dropped = torch.arange(0, slots.shape[0], skip, device=slots.device)
            slots[dropped] = outside[torch.arange(dropped.shape[0], device=slots.device) % 6]
        kept = (slots >= 0) & (slots < num_slots)
        built.write(slot_mapping=slots)
        for half, x in (("key", built.stored_key), ("value", built.value)):
            self.assert_encoded(built, half, x[kept], slots[kept], what)

    @pytest.mark.quick
    def test_raw_byte_caches(self, backend: QuantKVBackend, place: Place) -> None:
        """Engines keep 8-bit caches as uint8: the same bytes arrive through either view."""
        built = self.build(backend, Case(), place)
        of_keys, of_values = (half.accepted_cache_dtypes(built.case.dtype) for half in (backend.key_half, backend.value_half))
        accepted = [(k, v) for k in of_keys for v in of_values if k == v or backend.key_half is not backend.value_half]
        bytes_of, outs = [], []
        for dtypes in accepted:
            built.pages.restore()
            views = {half: built.pages[f"{half}_cache"].view(dtype) for half, dtype in zip(("key", "value"), dtypes, strict=True)}
            built.write(key_cache=views["key"], value_cache=views["value"])
            bytes_of.append(built.pages.raw.clone())
            outs.append(built.read(None, **{name: views[half] for half, name in _CACHES}))
        assert all(torch.equal(b, bytes_of[0]) for b in bytes_of)
        assert all(torch.equal(out, outs[0]) for out in outs)

    @pytest.mark.parametrize("bad", [pytest.param(torch.nan, marks=pytest.mark.quick), torch.inf, -torch.inf])
    def test_bad_values_stay_in_their_row(self, backend: QuantKVBackend, place: Place, bad: float) -> None:
        def spoil(built: Scene) -> None:
            built.key[7, 1, -1] = bad
            built.value[9, 0, 0] = bad

        self.assert_others_unchanged(backend, place, spoil, f"{bad} in")

    @pytest.mark.parametrize("size", [0.0, 1e-30, 1e30])
    def test_extreme_rows_leave_the_others_alone(self, backend: QuantKVBackend, place: Place, size: float) -> None:
        """A row whose squares overflow or vanish may take another way, but not those beside it."""

        def spoil(built: Scene) -> None:
            built.key[7, 1] *= size
            built.value[9, 0] *= size

        self.assert_others_unchanged(backend, place, spoil, f"a row times {size} as")

    def test_rows_on_one_side_of_zero(self, backend: QuantKVBackend, place: Place) -> None:
        """After a rotation with signs: a range that ends at 0, above it or below, far from where its values lie."""
        built = self.build(backend, Case(head_size=128, num_kv_heads=3, dtype=torch.bfloat16), place)
        for x, seed in ((built.key, 1), (built.value, 2)):
            rotated = 1 + torch.rand(x.shape, generator=torch.Generator().manual_seed(seed))
            rotated[::2] *= -1
            x.copy_(single_rht(rotated, inverse=True) / block_of(built.case.head_size))
        self.assert_write(built, "rows on one side of zero")

    def assert_others_unchanged(self, backend: QuantKVBackend, place: Place, spoil: Callable[[Scene], None], what: str) -> None:
        """All stored rows are the same bytes after ``spoil`` has changed key (7, 1) and value (9, 0), but for those two."""
        built = self.build(backend, Case(query_lens=(1, 1), seq_lens=(20, 9), head_size=96, num_kv_heads=3), place)
        built.write()
        clean = {name: _bytes_of_rows(built, name).clone() for name in built.pages.fields}
        spoil(built)
        built.pages.restore()
        built.write()
        for name, before in clean.items():
            row = (7, 1) if name.startswith("k") else (9, 0)
            same = (_bytes_of_rows(built, name) == before).all(-1)
            same[row] = True
            assert bool(same.all()), f"{what} row {row} changed other rows of {name}"

    @pytest.mark.quick
    def test_nothing_to_write(self, backend: QuantKVBackend, place: Place) -> None:
        built = self.build(backend, Case(), place)
        built.write(key=built.key[:0], value=built.value[:0], slot_mapping=built.slots[:0])
        built.write(slot_mapping=torch.full_like(built.slots, -1))
        built.pages.assert_only_changed({}, "a write of nothing")

    def test_rewriting_a_slot(self, backend: QuantKVBackend, place: Place) -> None:
        """What a slot held before does not matter: the same rows leave the same bytes."""
        built = self.build(backend, replace(Case(), layout="interleaved"), place)
        built.write()
        once = built.pages.raw.clone()
        built.write(key=-3 * built.key.roll(1, 0), value=built.value.roll(1, 0))
        built.write()
        assert torch.equal(built.pages.raw, once)


def _bytes_of_rows(built: Scene, name: str) -> torch.Tensor:
    """[rows, heads, bytes] of what the pages hold."""
    return built.stored(name).reshape(*built.key.shape[:2], -1).view(torch.uint8)


_CACHES: tuple[tuple[str, Any], ...] = (("key", "k_cache"), ("value", "v_cache"))
