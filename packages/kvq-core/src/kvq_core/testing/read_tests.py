"""The read door: attention over the decoded rows, whatever the options, the batch, the pages and the plan."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kvq_core.plan.invariance import batch_invariant
from kvq_core.plan.planner import INVARIANT_CHUNK
from kvq_core.testing import budgets, oracle, places, strategies
from kvq_core.testing.cases import LARGE, OPTIONS, QUICK, SHAPES, SMOOTHED, Case, Range
from kvq_core.testing.places import Place
from kvq_core.testing.scene import Scene
from kvq_core.testing.subject import Subject, assert_within

if TYPE_CHECKING:
    from kvq_core.backend import QuantKVBackend

_DECODE = Case(query_lens=(1, 1, 1), seq_lens=(64, 1, 33))
_ROWS = Case(query_lens=(3, 1, 8), seq_lens=(65, 48, 32), queries_per_kv=3)
_ALIKE = Case(query_lens=(3, 1), seq_lens=(30, 41), head_size=256, softcap=0.5)
_MANY_KEYS = 150
"""More than that are written by ``encode`` where kernels are interpreted: theirs takes longer than the read, row by row the same."""
_SPLIT = (
    # A program takes 128 keys: sequences end where its share does, a key after that, and a key before it.
    Case(query_lens=(1, 1), seq_lens=(512, 385), num_kv_heads=1),
    Case(query_lens=(4,), seq_lens=(385,), num_kv_heads=1, queries_per_kv=3, sinks=True, window=300),
    Case(query_lens=(2, 20, 0), seq_lens=(255, 280, 300), num_kv_heads=1, queries_per_kv=1, softcap=9.0, head_size=96),
)
_MANY_SPLITS = Case(query_lens=(1, 1), seq_lens=(1500, 200), num_kv_heads=1, queries_per_kv=3, dtype=torch.bfloat16)
"""Their rows are combined one by one, where those of few splits are combined eight at a time."""
_WINDOWED = Case(query_lens=(1, 1), seq_lens=(70, 45), window=9)
_ROWS_WINDOWED = Case(query_lens=(4, 20), seq_lens=(70, 65), window=9)
_BIASED = Case(query_lens=(3, 8), seq_lens=(65, 48), alibi=True, qq_bias=8, sinks=True)
_ROTARY = Case(query_lens=(2, 20), seq_lens=(40, 45), smoothing="rotary")
_RANGES = replace(_ROWS_WINDOWED, mm_prefix=(((12, 69), (0, 1)), ((2, 9), (48, 60))), seq_lens=(90, 65))


class ReadTests(Subject):
    @places.each(SMOOTHED, quick=(SMOOTHED[4], SMOOTHED[9]))
    def test_smoothed_attention(self, backend: QuantKVBackend, place: Place, case: Case) -> None:
        """As over the keys that the pages stand for, mean and all: to rounding of what is stored, not of the mean."""
        built = self.build(backend, case, place)
        if place.name == "interpret" and sum(case.seq_lens) > _MANY_KEYS:
            built.fill()
        else:
            built.write()
        self.assert_read(backend, built, place)
        arguments = built.read_arguments()
        for seq in range(case.num_seqs):
            exact = oracle.of_sequence(built, seq, arguments, seq)
            assert built.smoothing is not None
            mean, balance = built.smoothing.mean.double(), built.smoothing.balance
            group = case.queries_per_kv
            keys = exact.k[::group].transpose(0, 1) * (1.0 if balance is None else balance.double()) + mean
            if built.smoothing.rotary is not None:
                keys = keys + built.smoothing.rotary.at(built.positions[built.first_key(seq) :][: case.seq_lens[seq]])
            first = built.first_row(seq)
            q = built.q[first : first + case.query_lens[seq]]
            present = torch.ones(case.seq_lens[seq], dtype=torch.bool, device=place.device)
            plain = oracle.attend(q, keys, exact.v[::group].transpose(0, 1), present, seq, arguments | {"smoothing": None})
            torch.testing.assert_close(exact.out, plain.out, rtol=1e-9, atol=1e-9)

    @places.each(OPTIONS + SHAPES, large=LARGE, quick=QUICK)
    def test_attention(self, backend: QuantKVBackend, place: Place, case: Case) -> None:
        self.assert_read(backend, self.build(backend, case, place).fill(), place)

    def test_random_attention(self, backend: QuantKVBackend, place: Place) -> None:
        def check(case: Case) -> None:
            self.assert_read(backend, self.build(backend, case, place, seed=len(str(case))).fill(), place)

        # On a GPU an example costs about two kernels, five seconds; the cases above hold each option and geometry, the fuzzer draws more.
        share = {"eager": 1, "interpret": 1.5, "gpu": 0.4}[place.name]
        self.for_all(place, strategies.cases(self.sizes(backend), place), check, share)

    @places.each((_ROWS, _DECODE), large=LARGE[:4])
    def test_what_was_written_is_read(self, backend: QuantKVBackend, place: Place, case: Case) -> None:
        """Through both doors, with no ``encode`` between."""
        built = self.build(backend, case, place)
        built.write()
        self.assert_read(backend, built, place)

    # -- what must not matter -------------------------------------------------------------------------------------------

    @places.each((_DECODE, _ROWS))
    def test_unused_bytes_do_not_matter(self, backend: QuantKVBackend, place: Place, case: Case) -> None:
        """Not one bit of the result may come from a slot that is not in use, whatever lies there."""
        built = self.build(backend, case, place).fill()
        used = built.pages.raw.clone()
        wanted = built.read()
        owned = _bytes_in_use(built)
        noise = torch.randint(256, used.shape, generator=torch.Generator().manual_seed(5), dtype=torch.uint8).to(used.device)
        for filling in (torch.zeros_like(used), torch.full_like(used, 0x7F), noise):
            built.pages.raw.copy_(torch.where(owned, used, filling))
            assert torch.equal(built.read(), wanted)

    @places.each((_DECODE,))
    def test_lengths_beyond_the_table(self, backend: QuantKVBackend, place: Place, case: Case) -> None:
        """A length that the block table has no columns for sees what it has columns for, and reads nothing beside it."""
        built = self.build(backend, case, place).fill()
        arguments = built.read_arguments()
        narrow = arguments["block_table"][:, :2].contiguous()
        held = arguments["seqused_k"].clamp(max=2 * case.block_size)
        whole = {"block_table": narrow, "seq_threshold_3D": 0}
        wanted = built.read(**whole, seqused_k=held)
        assert not torch.equal(wanted, built.read())
        assert torch.equal(built.read(**whole), wanted)
        # Where keys may be split, lengths decide how, and a combine kernel rounds otherwise than a program that has all of a row's keys.
        torch.testing.assert_close(built.read(block_table=narrow), wanted)
        with batch_invariant():
            wanted = built.read(block_table=narrow, seqused_k=held)
            for far in (3 * INVARIANT_CHUNK, 2**31 - 1):
                lens = held.masked_fill(arguments["seqused_k"] > held, far)
                assert torch.equal(built.read(block_table=narrow, seqused_k=lens), wanted)

    @places.each((_ROWS, _ROWS_WINDOWED, _BIASED, _ROTARY))
    def test_columns_that_the_table_lacks(self, backend: QuantKVBackend, place: Place, case: Case) -> None:
        """Rows are where their sequence's length says, whether the blocks of its newest keys are missing or have no column."""
        built = self.build(backend, case, place).fill()
        missing = built.read_arguments()["block_table"].clone()
        missing[:, 2:] = -1
        wanted = built.read(block_table=missing)
        assert not torch.equal(wanted, built.read())
        torch.testing.assert_close(built.read(block_table=missing[:, :2].contiguous()), wanted)

    @places.each((_DECODE, _ROWS), large=LARGE[3:4])
    def test_placement_does_not_matter(self, backend: QuantKVBackend, place: Place, case: Case) -> None:
        outs = [self.build(backend, case, place, block_seed=seed).fill().read() for seed in (1, 2)]
        assert torch.equal(*outs)

    @places.each((_DECODE, _ROWS), large=LARGE[3:4])
    def test_order_of_sequences_does_not_matter(self, backend: QuantKVBackend, place: Place, case: Case) -> None:
        built = self.build(backend, case, place).fill()
        order = list(range(case.num_seqs))[::-1]
        self.assert_read(backend, built, place, order)
        self.assert_read(backend, built, place, order[:1])

    @places.each((_DECODE, _ROWS), large=LARGE[:2])
    def test_engine_splits(self, backend: QuantKVBackend, place: Place, case: Case) -> None:
        """With an engine's scratch and segment counts, 3D and 2D: always the same result."""
        built = self.build(backend, case, place).fill()
        for segments in (1, 3, 16):
            self.assert_read(backend, built, place, seq_threshold_3D=128, **built.scratch(segments))
        self.assert_read(backend, built, place, seq_threshold_3D=0, **built.scratch(2))

    def test_engine_scratch_too_small(self, backend: QuantKVBackend, place: Place) -> None:
        """Scratch of fewer rows than the queries have is left alone, and the result is right all the same."""
        built = self.build(backend, _DECODE, place).fill()
        scratch: dict[str, Any] = {name: x[:2] if isinstance(x, torch.Tensor) else x for name, x in built.scratch(4).items()}
        self.assert_read(backend, built, place, seq_threshold_3D=128, **scratch)
        for name, x in scratch.items():
            assert not isinstance(x, torch.Tensor) or bool(x.isnan().all()), f"{name} was written"

    @places.each((*_SPLIT, _MANY_SPLITS), large=LARGE[:4], quick=(_MANY_SPLITS,))
    def test_planned_splits(self, backend: QuantKVBackend, place: Place, case: Case) -> None:
        """kvq's own plan."""
        self.assert_read(backend, self.build(backend, case, place).fill(), place)

    @places.each((_DECODE, _SPLIT[1]), large=LARGE[:4])
    def test_longest_sequence_is_a_hint(self, backend: QuantKVBackend, place: Place, case: Case) -> None:
        """``max_seqlen_k`` steers the plan only: too small or too large, the result is the same."""
        built = self.build(backend, case, place).fill()
        for hint in (1, 100_000, 1 << 19):
            self.assert_read(backend, built, place, max_seqlen_k=hint)

    def test_query_lengths_are_bounded_from_above(self, backend: QuantKVBackend, place: Place) -> None:
        built = self.build(backend, _ROWS, place).fill()
        self.assert_read(backend, built, place, max_seqlen_q=50)

    # -- what must not spread -------------------------------------------------------------------------------------------

    @places.each((_ALIKE,))
    def test_rows_of_one_value(self, backend: QuantKVBackend, place: Place, case: Case) -> None:
        """All rows are the same, so that nothing else hides what a level is off by; rotated, all channels but one have the same code."""
        built = self.build(backend, case, place)
        built.key.fill_(1.7)
        built.value.fill_(1.7)
        self.assert_read(backend, built.fill(), place)

    def test_bad_query_row_stays_alone(self, backend: QuantKVBackend, place: Place) -> None:
        built = self.build(backend, _ROWS, place).fill()
        wanted = built.read().clone()
        built.q[2, 1, -1] = torch.nan
        got = built.read()
        same = torch.ones(wanted.shape[:2], dtype=torch.bool, device=place.device)
        same[2, 1] = False
        assert torch.equal(got[same], wanted[same])
        assert bool(got[2, 1].isnan().all()), "a NaN query gives a NaN result"

    @pytest.mark.quick
    def test_bad_key_stays_in_its_head_and_sequence(self, backend: QuantKVBackend, place: Place) -> None:
        built = self.build(backend, _ROWS, place).fill()
        wanted = built.read().clone()
        # The newest key of sequence 1, key/value head 0.
        at = built.first_key(2) - 1
        built.key[at, 0, 0] = built.value[at, 0, 0] = torch.nan
        got = built.fill().read()
        row, group = built.first_row(1), built.case.queries_per_kv
        same = torch.ones(wanted.shape[:2], dtype=torch.bool, device=place.device)
        same[row, :group] = False
        assert torch.equal(got[same], wanted[same])
        if backend.needs_scale_caches or not backend.reads_scales:
            assert bool(got[row, :group].isnan().any()), "what sees a NaN row is NaN"

    @places.each((_WINDOWED, _ROWS_WINDOWED, _RANGES))
    def test_hidden_keys_do_not_matter(self, backend: QuantKVBackend, place: Place, case: Case) -> None:
        """Keys that no row of the call sees may hold anything: an engine has given their blocks back."""
        built = self.build(backend, case, place).fill()
        wanted = built.read()
        for seq in range(case.num_seqs):
            seen = oracle.visible(case.query_lens[seq], case.seq_lens[seq], case.window, [list(r) for r in _ranges(case, seq)]).any(0)
            hidden = (~seen).nonzero().flatten() + built.first_key(seq)
            assert len(hidden) > case.block_size, "a case for this test hides keys"
            built.key[hidden] = built.value[hidden] = torch.nan
        assert torch.equal(built.fill().read(), wanted)

    @pytest.mark.parametrize("size", [1e-45, 1e-40, 1e-36, 1e-20])
    def test_tiny_queries(self, backend: QuantKVBackend, place: Place, size: float) -> None:
        """The reciprocal of a subnormal number overflows: kernels that scale queries must not take it."""
        built = self.build(backend, replace(_ROWS, dtype=torch.float32), place).fill()
        built.q[::2] = built.q[::2].sign() * size
        self.assert_read(backend, built, place)

    @pytest.mark.parametrize("size", [1e-40, 1e-36])
    def test_tiny_values(self, backend: QuantKVBackend, place: Place, size: float) -> None:
        """Where all values lie below what a product's operands can hold, the result is as good as zero, and not beside it.

        Codes may be summed with an offset as large as their largest, which comes off again but for its rounding: next to codes as small as
        a scale's lower limit leaves them, that rounding shows.
        """
        built = self.build(backend, replace(_ROWS, dtype=torch.float32), place)
        built.value.mul_(size)
        built.fill()
        rounding = 0.0
        if backend.needs_scale_caches:
            codes, scales = built.stored("value_cache"), built.stored("v_scale_cache")
            any_codes = torch.randint(256, codes.view(torch.uint8).shape, generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
            largest = backend.value_half.decode(any_codes.to(codes.device).view(codes.dtype), scales).nan_to_num().abs().amax()
            rounding = 4 * budgets.F32 * float(largest)
        for judged in self.judge(backend, built, place, built.read()):
            assert_within(judged.got, judged.wanted, judged.bound + rounding, f"sequence {judged.seq}")

    @pytest.mark.parametrize("sinks", [False, True])
    def test_the_largest_of_huge_scores_wins(self, backend: QuantKVBackend, sinks: bool, place: Place) -> None:
        """Keys of one direction, as long as can be: the rounding of a product of such a score is itself beyond every exponent."""
        built = self.build(backend, replace(_ROWS, dtype=torch.bfloat16, sinks=sinks), place)
        group, direction = built.case.queries_per_kv, built.key[0].clone()
        order = torch.randperm(built.key.shape[0], generator=torch.Generator().manual_seed(0)).to(built.device)
        built.key[:] = (1e22 * 1.1 ** order[:, None, None].double() * direction.double()).to(built.key.dtype)
        built.q[:] = direction.repeat_interleave(group, 0)
        lse = torch.zeros(built.q.shape[:2], device=built.device)
        for judged in self.judge(backend, built, place, built.fill().read(lse=lse), lse=lse):
            assert bool(judged.got.isfinite().all())
            if not backend.takes_scales:  # a scale of the whole tensor clamps such keys to one length
                assert float((judged.got - judged.wanted).abs().max()) <= 2.0**-6 * float(judged.wanted.abs().max())
            assert float((judged.rows_of(lse, built) / judged.lse - 1).abs().max()) <= 2.0**-7

    def test_weights_below_float16(self, backend: QuantKVBackend, place: Place) -> None:
        """One key has next to no weight, and its value is all there is: it may be lost, which the budget knows."""
        built = self.build(backend, Case(query_lens=(1,), seq_lens=(2,), dtype=torch.bfloat16), place)
        direction = built.key[0].clone()
        built.q[:] = direction.repeat_interleave(built.case.queries_per_kv, 0)
        built.key[1] = direction * (24 * direction.shape[-1] ** 0.5 / direction.float().square().sum(-1, keepdim=True)).to(direction.dtype)
        built.key[0] = 0
        built.value[1] = 0
        self.assert_read(backend, built.fill(), place)

    @pytest.mark.parametrize("bad", [-1, -(2**31), 2**31 - 1, pytest.param("first", marks=pytest.mark.quick), "last"])
    def test_blocks_outside_the_cache(self, backend: QuantKVBackend, place: Place, bad: int | str) -> None:
        """Keys in such a block are not seen. The blocks just before and after the cache hold NaN here."""
        built = self.build(backend, _ROWS, place).fill()
        table = built.block_table.clone()
        table[0, 1] = {"first": built.num_blocks, "last": -1}.get(str(bad), bad)  # type: ignore[arg-type]
        table[2, 0] = built.num_blocks + 1
        self.assert_read(backend, built, place, block_table=table)

    def test_row_that_sees_nothing(self, backend: QuantKVBackend, place: Place) -> None:
        """All its keys lie outside the cache: zeros, with sinks too."""
        for sinks in (False, True):
            built = self.build(backend, Case(query_lens=(1, 2), seq_lens=(9, 20), sinks=sinks), place).fill()
            table = built.block_table.clone()
            table[0] = -1
            out = built.read(block_table=table)
            assert torch.equal(out[0], torch.zeros_like(out[0]))
            self.assert_exact(backend, built, place, out, block_table=table)

    @pytest.mark.quick
    def test_nothing_to_read(self, backend: QuantKVBackend, place: Place) -> None:
        built = self.build(backend, Case(query_lens=(0, 0), seq_lens=(20, 0)), place).fill()
        assert built.read().shape[0] == 0
        assert built.read([]).shape[0] == 0

    @pytest.mark.quick
    def test_rows_of_no_sequence(self, backend: QuantKVBackend, place: Place) -> None:
        """Padding alone, of sequences that a launch plan would split."""
        built = self.build(backend, Case(query_lens=(1, 1), seq_lens=(20, 9)), place).fill()
        lengths = torch.zeros_like(built.read_arguments()["cu_seqlens_q"])
        buffer = built.fresh_out()
        backend.unified_attention(
            out=buffer["rows"], **built.read_arguments() | {"cu_seqlens_q": lengths, "max_seqlen_q": 0, "max_seqlen_k": 1 << 20}
        )
        assert not buffer.changed()


def _ranges(case: Case, seq: int) -> tuple[Range, ...]:
    return case.mm_prefix[seq] if case.mm_prefix else ()


def _bytes_in_use(built: Scene) -> torch.Tensor:
    """Which bytes of the pages' buffer belong to slots in use."""
    marked = copy.copy(built.pages)
    marked.raw = torch.zeros_like(built.pages.raw)
    for name in marked.fields:
        marked.spoil(name, (built.slots // built.case.block_size, built.slots % built.case.block_size))
    return marked.raw != 0
