"""Modes with one mistake each, for test_suite_catches.py: the suite must see every one of them. Their kernels are torch code.

``caught_by`` says what the id of a test that has to fail contains. ``Control`` makes no mistake, and has to pass them all.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from kvq_core.backend import QuantKVBackend
from kvq_core.call import reference, torch_path
from kvq_core.call.spec import Attention, NewRows
from kvq_core.hadamard import block_hadamard, single_rht
from kvq_core.launch.workspace import kept_buffer, workspace
from kvq_core.none import NoneBackend
from kvq_core.testing import BackendTests, budgets
from kvq_int2 import Int2PerTokenHead
from kvq_int2 import codec as int2
from kvq_int4 import Int4PerTokenHead
from kvq_int4 import codec as int4
from kvq_int8fp8 import FP8PerTokenHead, Int8PerTokenHead
from kvq_int8fp8 import codec as int8fp8
from mode_bounds import Int2Bounds, Int4Bounds


def bent(attention: Attention, **scoring: Any) -> Attention:
    return dataclasses.replace(attention, scoring=dataclasses.replace(attention.scoring, **scoring))


def lengths(attention: Attention, change: Callable[[torch.Tensor], torch.Tensor]) -> Attention:
    batch = dataclasses.replace(attention.batch, seqused_k=change(attention.batch.seqused_k))
    return dataclasses.replace(attention, batch=batch)


def result(attention: Attention, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    attention.out.copy_(change(attention.out.float()).to(attention.out.dtype))


class Control(Int8PerTokenHead):
    """int8 with torch code for kernels, and no mistake."""

    caught_by: ClassVar[tuple[str, ...]] = ()
    space = staticmethod(lambda x: x.double())

    def write(self, rows: NewRows) -> None:
        torch_path.write(self, rows)

    def read(self, attention: Attention) -> None:
        torch_path.read(self, attention)


class Int4Control(Int4PerTokenHead):
    caught_by: ClassVar[tuple[str, ...]] = ()
    write = Control.write
    read = Control.read
    space = staticmethod(lambda x: single_rht(x.double()))


# -- reads ---------------------------------------------------------------------------------------------------------------


class WindowTooWide(Control):
    caught_by = ("test_attention", "window=")

    def read(self, attention: Attention) -> None:
        left = attention.scoring.window_left
        torch_path.read(self, bent(attention, window_left=left + 1 if left >= 0 else -1))


class WindowTooNarrow(Control):
    caught_by = ("test_attention", "window=16")

    def read(self, attention: Attention) -> None:
        left = attention.scoring.window_left
        torch_path.read(self, bent(attention, window_left=max(left - 1, 0) if left >= 0 else -1))


class NoSoftcap(Control):
    caught_by = ("test_attention", "softcap=")

    def read(self, attention: Attention) -> None:
        torch_path.read(self, bent(attention, softcap=0.0))


class SinksTwice(Control):
    caught_by = ("test_attention", "sinks=")

    def read(self, attention: Attention) -> None:
        sinks = attention.scoring.sinks
        torch_path.read(self, bent(attention, sinks=None if sinks is None else sinks.float() + torch.log(torch.tensor(2.0))))


class AlibiWithoutSqrt(Control):
    caught_by = ("test_attention", "alibi_sqrt=")

    def read(self, attention: Attention) -> None:
        torch_path.read(self, bent(attention, use_alibi_sqrt=False))


class BiasTransposed(Control):
    caught_by = ("test_attention", "qq_bias=")

    def read(self, attention: Attention) -> None:
        bias = attention.scoring.qq_bias
        torch_path.read(self, bent(attention, qq_bias=None if bias is None else bias.T))


class RangesExclusive(Control):
    caught_by = ("test_attention", "mm_prefix=")

    def read(self, attention: Attention) -> None:
        ranges = attention.scoring.mm_prefix_range
        torch_path.read(self, bent(attention, mm_prefix_range=None if ranges is None else ranges - torch.tensor([0, 1], dtype=torch.int32)))


class ForgetsNewestKey(Control):
    caught_by = ("test_attention", "query_lens=1x1x1,seq_lens=1x16x17")

    def read(self, attention: Attention) -> None:
        torch_path.read(self, lengths(attention, lambda used: (used - 1).clamp(min=1)))


class ReadsPastTheEnd(Control):
    caught_by = ("test_attention", "query_lens=2x8x5")

    def read(self, attention: Attention) -> None:
        torch_path.read(self, lengths(attention, lambda used: used + 1))


class TrustsTheHint(Control):
    caught_by = ("test_longest_sequence_is_a_hint",)

    def read(self, attention: Attention) -> None:
        torch_path.read(self, lengths(attention, lambda used: used.clamp(max=attention.batch.max_seqlen_k)))


class ClampsBlockIds(Control):
    caught_by = ("test_blocks_outside_the_cache",)

    def read(self, attention: Attention) -> None:
        table = attention.batch.block_table.clamp(0, attention.keys.num_blocks - 1)
        torch_path.read(self, dataclasses.replace(attention, batch=dataclasses.replace(attention.batch, block_table=table)))


class NoOutputScale(Control):
    caught_by = ("test_attention", "output=")

    def read(self, attention: Attention) -> None:
        scale = attention.output_scale
        torch_path.read(self, dataclasses.replace(attention, output_scale=None if scale is None else torch.ones_like(scale)))


class HeadsInterleaved(Control):
    caught_by = ("test_attention", "layout=token_major")

    def read(self, attention: Attention) -> None:
        heads = torch.arange(attention.q.shape[1]).view(attention.queries_per_kv, -1).T.flatten()
        out = torch.empty_like(attention.out)
        torch_path.read(self, dataclasses.replace(attention, q=attention.q[:, heads], out=out))
        attention.out[:, heads] = out


class KeyScalesForValues(Control):
    caught_by = ("test_attention", "layout=")

    def read(self, attention: Attention) -> None:
        values = dataclasses.replace(attention.values, scales=attention.keys.scales)
        torch_path.read(self, dataclasses.replace(attention, values=values))


class RoundsResultToBfloat16(Control):
    caught_by = ("test_attention", "rows=")

    def read(self, attention: Attention) -> None:
        torch_path.read(self, attention)
        result(attention, lambda out: out.to(torch.bfloat16).float())


class OneInFiveHundredTooMuch(Control):
    caught_by = ("test_attention", "query_lens=33,seq_lens=33")

    def read(self, attention: Attention) -> None:
        torch_path.read(self, attention)
        result(attention, lambda out: out * 1.002)


class NotUnrotated(Int4Control):
    caught_by = ("test_attention", "head_size=128")

    def read(self, attention: Attention) -> None:
        torch_path.read(self, attention)
        result(attention, lambda out: single_rht(out) / out.shape[-1] ** 0.5)


class DependsOnTheBatch(Control):
    caught_by = ("test_batch_invariance",)

    def read(self, attention: Attention) -> None:
        torch_path.read(self, attention)
        if attention.batch.num_seqs > 1:
            result(attention, lambda out: out * (1 + 2.0**-10))


class DependsOnPlacement(Control):
    caught_by = ("test_placement_does_not_matter",)

    def read(self, attention: Attention) -> None:
        torch_path.read(self, attention)
        result(attention, lambda out: out * (1 + 2.0**-10 * (attention.batch.block_table[0, 0] % 3)))


class LooksAtUnusedBytes(Control):
    caught_by = ("test_unused_bytes_do_not_matter",)

    def read(self, attention: Attention) -> None:
        torch_path.read(self, attention)
        peek = attention.keys.codes.float().sum() % 7
        result(attention, lambda out: out * (1 + 2.0**-9 * peek))


class UsesLeftovers(Control):
    """Takes its workspace for zeroed."""

    caught_by = ("test_leftovers_do_not_matter",)

    def read(self, attention: Attention) -> None:
        torch_path.read(self, attention)
        _, acc, _, _ = workspace(attention.q.device, 1, 1, 8)
        result(attention, lambda out: out + acc[:1])


class Unsteady(Control):
    caught_by = ("test_leftovers_do_not_matter",)
    calls = 0

    def write(self, rows: NewRows) -> None:
        torch_path.write(self, rows)
        Unsteady.calls += 1
        rows.keys.codes[rows.slot_mapping[0] // rows.keys.block_size, rows.slot_mapping[0] % rows.keys.block_size, 0, 0] = Unsteady.calls


class DependsOnTheTable(Control):
    """Plans by the width of the block table."""

    caught_by = ("test_results_in_random_batches",)

    def read(self, attention: Attention) -> None:
        torch_path.read(self, attention)
        result(attention, lambda out: out * (1 + 2.0**-9 * (attention.batch.block_table.shape[1] > 2)))


class DependsOnItsPlace(Control):
    """The fifth sequence and later ones are computed in another order."""

    caught_by = ("test_results_in_random_batches",)

    def read(self, attention: Attention) -> None:
        torch_path.read(self, attention)
        if attention.batch.num_seqs > 4:
            attention.out[attention.batch.cu_seqlens_q[4] :] *= 1 + 2.0**-9


class SpreadsBadRows(Control):
    caught_by = ("test_bad_query_row_stays_alone",)

    def read(self, attention: Attention) -> None:
        torch_path.read(self, attention)
        bad = attention.out.isnan().any(-1).any(-1)
        attention.out[bad] = torch.nan


class UnderestimatesOrder(Control):
    """Takes every sequence for the longest's query length."""

    caught_by = ("test_order_of_sequences_does_not_matter",)

    def read(self, attention: Attention) -> None:
        torch_path.read(self, lengths(attention, lambda used: used.sort(descending=True).values))


class WritesRowsOfNoSequence(Control):
    caught_by = ("test_attention",)

    def read(self, attention: Attention) -> None:
        torch_path.read(self, attention)
        attention.out[int(attention.batch.cu_seqlens_q[-1]) :] = 0


class LeavesItsWorkspace(Control):
    caught_by = ("test_attention",)

    def read(self, attention: Attention) -> None:
        torch_path.read(self, attention)
        space = kept_buffer(attention.q.device, 100)
        space.as_strided((1,), (1,), space.storage_offset() + 100)[0] = 0.0


class TrustsItsWorkspace(Control):
    """What an earlier call left there is taken for its own."""

    caught_by = ("test_attention",)

    def read(self, attention: Attention) -> None:
        torch_path.read(self, attention)
        result(attention, lambda out: out + kept_buffer(out.device, 100)[0])


class LeavesItsScratch(Control):
    caught_by = ("test_engine_splits",)

    def read(self, attention: Attention) -> None:
        torch_path.read(self, attention)
        if attention.scratch is not None:
            top = attention.scratch.max
            top.as_strided((1,), (1,), top.storage_offset() + top.numel())[0] = 0.0


class SpreadsOverflow(Control):
    """A key that overflows spoils a sequence that does not hold it."""

    caught_by = ("test_fuzz", "interpret")

    def read(self, attention: Attention) -> None:
        torch_path.read(self, attention)
        if not attention.out.float().isfinite().all():
            attention.out[int(attention.batch.cu_seqlens_q[-1]) - 1] = torch.nan


class ForgetsSharedBlocks(Control):
    """Each block is taken for one sequence's alone: the second one that names it does not see it."""

    caught_by = ("test_fuzz", "interpret")

    def read(self, attention: Attention) -> None:
        table, seen = attention.batch.block_table.clone(), set()
        for seq, used in enumerate(attention.batch.seqused_k.tolist()):
            for column in range(-(-used // attention.keys.block_size)):
                block = int(table[seq, column])
                table[seq, column] = -1 if block in seen else block
                seen.add(block)
        batch = dataclasses.replace(attention.batch, block_table=table)
        torch_path.read(self, dataclasses.replace(attention, batch=batch))


class SubnormalQueriesOverflow(Control):
    """A query is divided by its peak, however small that is."""

    caught_by = ("test_tiny_queries",)

    def read(self, attention: Attention) -> None:
        q = attention.q.float()
        peak = q.abs().amax(-1, keepdim=True)
        torch_path.read(self, dataclasses.replace(attention, q=torch.where(peak > 0, q * (64.0 / peak) * (peak / 64.0), q)))


class IgnoresScratchSegments(Control):
    """With an engine's scratch, combines two halves without their maxima."""

    caught_by = ("test_engine_splits",)

    def read(self, attention: Attention) -> None:
        torch_path.read(self, attention)
        if attention.scratch is not None and attention.scratch.num_segments > 1:
            half = torch.empty_like(attention.out)
            torch_path.read(self, dataclasses.replace(lengths(attention, lambda used: (used + 1) // 2), out=half))
            result(attention, lambda out: (out + half.float()) / 2)


# -- writes --------------------------------------------------------------------------------------------------------------


class WritesPaddingRows(Control):
    caught_by = ("test_written_rows",)

    def write(self, rows: NewRows) -> None:
        num_slots = rows.keys.num_blocks * rows.keys.block_size
        torch_path.write(self, dataclasses.replace(rows, slot_mapping=rows.slot_mapping % num_slots))


class WritesByTheBatch(Control):
    """Rounds otherwise where there are many rows."""

    caught_by = ("test_bytes_in_random_writes",)

    def write(self, rows: NewRows) -> None:
        torch_path.write(self if rows.key.shape[0] < 50 else _Truncating(), rows)


class IgnoresStrides(Control):
    caught_by = ("test_written_rows", "rows=")

    def write(self, rows: NewRows) -> None:
        key = rows.key.as_strided(rows.key.shape, (rows.key.shape[1] * rows.key.shape[2], rows.key.shape[2], 1))
        torch_path.write(self, dataclasses.replace(rows, key=key))


class TouchesTheNextSlot(Control):
    caught_by = ("test_written_rows",)

    def write(self, rows: NewRows) -> None:
        torch_path.write(self, rows)
        rows.keys.codes[rows.keys.num_blocks - 1, -1, -1, -1] += 1


class WritesBetweenBlocks(Control):
    caught_by = ("test_written_rows",)

    def write(self, rows: NewRows) -> None:
        torch_path.write(self, rows)
        block, _, _, size = rows.keys.codes.stride()[0], *rows.keys.codes.shape[1:]
        used = rows.keys.block_size * rows.keys.num_kv_heads * size
        if len(rows.slot_mapping) and block > used:
            rows.keys.codes.as_strided((1,), (1,), rows.keys.codes.storage_offset() + used)[0] += 1


class TouchesItsInput(Control):
    caught_by = ("test_written_rows",)

    def write(self, rows: NewRows) -> None:
        torch_path.write(self, rows)
        rows.value.nan_to_num_(0.0).mul_(2)


class ScalesLeftOut(Control):
    caught_by = ("test_written_rows",)

    def write(self, rows: NewRows) -> None:
        scales = rows.values.scales.clone() if rows.values.scales is not None else None
        torch_path.write(self, rows)
        if rows.values.scales is not None:
            rows.values.scales.copy_(scales)


class TruncatesInTheKernel(Control):
    caught_by = ("test_written_rows",)

    def write(self, rows: NewRows) -> None:
        _Truncating().write(rows)


class _Truncating(Control):
    def encode(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        _, scales = int8fp8.encode_int8(x)
        return (x.float() / scales[..., None]).trunc().nan_to_num(0).to(torch.int8), scales


class RotatesInBfloat16(Int4Control):
    caught_by = ("test_written_rows",)

    def write(self, rows: NewRows) -> None:
        _Coarse().write(rows)


class _Coarse(Int4Control):
    def encode(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        return int4.encode(single_rht(single_rht(x.float()).to(torch.bfloat16).float(), inverse=True) / (x.shape[-1] & -x.shape[-1]))


class OneBadRowSpoilsAll(Control):
    caught_by = ("test_bad_values_stay_in_their_row",)

    def write(self, rows: NewRows) -> None:
        key = rows.key if bool(rows.key.isfinite().all()) else torch.zeros_like(rows.key)
        torch_path.write(self, dataclasses.replace(rows, key=key))


class DependsOnOldBytes(Control):
    caught_by = ("test_rewriting_a_slot",)

    def write(self, rows: NewRows) -> None:
        old = rows.keys.codes.clone()
        torch_path.write(self, rows)
        rows.keys.codes.bitwise_xor_((old ^ rows.keys.codes) & 1 & (old != -1))


# -- codecs --------------------------------------------------------------------------------------------------------------


class TruncatesInEncode(_Truncating):
    caught_by = ("test_round_trip",)


class RoundsFP8Down(FP8PerTokenHead):
    caught_by = ("test_round_trip",)
    space = staticmethod(lambda x: x.double())

    def encode(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        codes, scales = super().encode(x)
        higher = codes.float().abs() * scales[..., None] > x.float().abs()  # type: ignore[index]
        bits = codes.view(torch.uint8)
        return torch.where(higher & (bits & 0x7F != 0), bits - 1, bits).view(codes.dtype), scales


class ForgetsTheZeroPoint(Int4Control):
    caught_by = ("test_round_trip",)

    def decode(self, codes: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        return int4.decode(codes, int4.join_scale(self.required(scales), torch.full_like(self.required(scales), 8.0)))


class ZeroRowsAreNaN(Int2PerTokenHead):
    caught_by = ("test_zero_rows",)
    space = staticmethod(lambda x: block_hadamard(x.double()))

    def encode(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        codes, scales = int2.encode(x, unbiased=False)
        return codes, scales / scales * scales


class ScaleOfTheWholeTensor(Control):
    caught_by = ("test_rows_are_independent",)

    def encode(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        _, scales = int8fp8.encode_int8(x)
        shared = scales.amax() if scales.numel() else scales.new_tensor(1.0)
        return (x.float() / shared).round().nan_to_num(0).clamp(-128, 127).to(torch.int8), shared.expand(scales.shape)


class AddsOneUlp(NoneBackend):
    caught_by = ("test_written_rows",)
    space = staticmethod(lambda x: x.double())

    def write(self, rows: NewRows) -> None:
        torch_path.write(self, dataclasses.replace(rows, key=(rows.key.float() * (1 + 2.0**-10)).to(rows.key.dtype)))


class OverridesADoor(Control):
    caught_by = ("test_contract",)

    def reshape_and_cache(self, *args: Any, **kwargs: Any) -> None:
        """Skips the checks."""


class ReferenceItself(Control):
    """A second control: the dense reference called by hand."""

    def read(self, attention: Attention) -> None:
        dense = reference.attention(attention, lambda plane, blocks: torch_path.gather(self, plane, blocks))
        owned = slice(int(attention.batch.cu_seqlens_q[-1]))
        attention.out[owned] = reference.to_output_dtype(dense[owned], attention.out.dtype, attention.output_scale)


def _all(base: type) -> list[type[QuantKVBackend]]:
    return [found for cls in base.__subclasses__() for found in (cls, *_all(cls))]


def _tried(cls: type) -> bool:
    return cls.__module__ == __name__ and not cls.__name__.startswith("_")


BACKENDS = {cls.__name__: cls for cls in _all(QuantKVBackend) if _tried(cls)}


def _suite(cls: type[QuantKVBackend]) -> type[BackendTests]:
    """The suite for a mutant, in the terms of the mode it spoils."""

    bounds: tuple[type, ...] = ()
    if issubclass(cls, Int4PerTokenHead | Int2PerTokenHead):
        bounds = (Int4Bounds if issubclass(cls, Int4PerTokenHead) else Int2Bounds,)

    class Suite(*bounds, BackendTests):  # type: ignore[misc]
        mode = f"{cls.__name__.lower()}_test"

        def make_backend(self) -> QuantKVBackend:
            made = cls()
            type(made).mode = self.mode
            return made

        def space(self, x: torch.Tensor) -> torch.Tensor:
            return cls.space(x)

        def operand_dtype(self, dtype: torch.dtype) -> torch.dtype:
            return dtype if issubclass(cls, NoneBackend) else torch.float16

        def round_trip_bound(self, x: torch.Tensor, given: torch.Tensor | None) -> torch.Tensor:
            if bounds:
                return super().round_trip_bound(x, given)
            y = self.space(x)
            if issubclass(cls, FP8PerTokenHead):
                return budgets.minifloat(y, (y.abs().amax(-1, keepdim=True) / 448).clamp(min=1e-6), torch.float8_e4m3fn)
            return budgets.symmetric_levels(y, 127, 1e-6) if issubclass(cls, Int8PerTokenHead) else torch.zeros_like(y)

    Suite.__name__ = Suite.__qualname__ = f"Test{cls.__name__}"
    return Suite


for _name, _cls in BACKENDS.items():
    globals()[f"Test{_name}"] = _suite(_cls)
