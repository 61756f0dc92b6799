"""Modes with one mistake each, for test_suite_catches.py: the suite must see every one of them. Their kernels are torch code.

``caught_by`` of a mode has the words in the id of a test that must fail. Controls make no mistake, and must pass all of these tests.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch

from exact_reads import SUITES
from kvq_core.backend import QuantKVBackend
from kvq_core.call import reference, torch_path
from kvq_core.call.spec import Attention, NewRows
from kvq_core.hadamard import single_rht
from kvq_core.launch.workspace import kept_buffer, workspace
from kvq_core.none import NoneBackend
from kvq_core.testing import BackendTests
from kvq_int2 import Int2PerTokenHead
from kvq_int2 import codec as int2
from kvq_int4 import Int4PerTokenHead
from kvq_int4 import codec as int4
from kvq_int8fp8 import FP8PerTokenHead, Int8PerTokenHead
from kvq_int8fp8 import codec as int8fp8

Encoded = tuple[torch.Tensor, torch.Tensor | None]
Read, Write = Callable[[Any, Attention], None], Callable[[Any, NewRows], None]
BACKENDS: dict[str, type[QuantKVBackend]] = {}


class TorchKernels:
    """Torch code in place of a mode's kernels."""

    caught_by: ClassVar[tuple[str, ...]] = ()

    def write(self, rows: NewRows) -> None:
        torch_path.write(self, rows)  # type: ignore[arg-type]

    def read(self, attention: Attention) -> None:
        torch_path.read(self, attention)  # type: ignore[arg-type]


class Int8(TorchKernels, Int8PerTokenHead): ...


class Int4(TorchKernels, Int4PerTokenHead): ...


def mutant(name: str, caught_by: str, base: type = Int8, **methods: Any) -> None:
    """A mode with ``methods``. What stands for kernels shows its mistakes where these would run: no test of plain torch is tried first."""
    words = (*caught_by.split(), *(["interpret"] if caught_by and methods.keys() & {"read", "write"} else []))
    BACKENDS[name] = type(name, (base,), {"caught_by": words, **methods})


def call(change: Callable[[Attention], Attention]) -> Read:
    """Reads a changed call."""
    return lambda self, attention: torch_path.read(self, change(attention))


def scoring(**changes: Callable[[Any], Any]) -> Read:
    """Reads with options changed: by name, of their values."""

    def bent(attention: Attention) -> Attention:
        new = {name: change(getattr(attention.scoring, name)) for name, change in changes.items()}
        return replace(attention, scoring=replace(attention.scoring, **new))

    return call(bent)


ENDS = torch.tensor([0, 1], dtype=torch.int32)


def unless_none(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], Any]:
    return lambda x: None if x is None else change(x)


def batch(attention: Attention, **changes: Any) -> Attention:
    return replace(attention, batch=replace(attention.batch, **changes))


def rows_of_sequences(attention: Attention) -> slice:
    """The rows that a read may write."""
    return slice(int(attention.batch.cu_seqlens_q[-1]))


def lengths(change: Callable[[torch.Tensor, Attention], torch.Tensor]) -> Read:
    """Reads other numbers of keys."""
    return call(lambda of: batch(of, seqused_k=change(of.batch.seqused_k, of)))


def table(change: Callable[[torch.Tensor, Attention], torch.Tensor]) -> Read:
    """Reads other blocks."""
    return call(lambda of: batch(of, block_table=change(of.batch.block_table.clone(), of)))


def and_then(effect: Callable[[Attention], Any]) -> Read:
    """Reads, and does something more."""

    def read(self: Any, attention: Attention) -> None:
        torch_path.read(self, attention)
        effect(attention)

    return read


def result(change: Callable[[torch.Tensor, Attention], torch.Tensor]) -> Read:
    """Reads, and changes the result (the rows of sequences, as float32)."""

    def effect(attention: Attention) -> None:
        rows = attention.out[rows_of_sequences(attention)]
        rows.copy_(change(rows.float(), attention).to(rows.dtype))

    return and_then(effect)


def scaled(excess: Callable[[Attention], Any]) -> Read:
    """Reads, and changes the result by a unit in the last place of float16, or two."""
    return result(lambda out, of: out * (1 + 2.0**-10 * excess(of)))


# -- reads ---------------------------------------------------------------------------------------------------------------

mutant("WindowTooWide", "test_attention window=", read=scoring(window_left=lambda left: left + 1 if left >= 0 else -1))
mutant("WindowTooNarrow", "test_attention window=16", read=scoring(window_left=lambda left: max(left - 1, 0) if left >= 0 else -1))
mutant("NoSoftcap", "test_attention softcap=", read=scoring(softcap=lambda softcap: 0.0))
mutant("SinksTwice", "test_attention sinks=", read=scoring(sinks=unless_none(lambda sinks: sinks.float() + torch.tensor(2.0).log())))
mutant("AlibiWithoutSqrt", "test_attention alibi_sqrt=", read=scoring(use_alibi_sqrt=lambda use: False))
mutant("BiasTransposed", "test_attention qq_bias=", read=scoring(qq_bias=unless_none(lambda bias: bias.T)))
mutant("RangesExclusive", "test_attention mm_prefix=", read=scoring(mm_prefix_range=unless_none(lambda ranges: ranges - ENDS)))
mutant("ForgetsNewestKey", "test_attention query_lens=1x1x1,seq_lens=1x16x17", read=lengths(lambda used, _: (used - 1).clamp(min=1)))
mutant("ReadsPastTheEnd", "test_attention query_lens=2x8x5", read=lengths(lambda used, _: used + 1))
mutant("TrustsTheHint", "test_longest_sequence_is_a_hint", read=lengths(lambda used, of: used.clamp(max=of.batch.max_seqlen_k)))
mutant("SortsLengths", "test_order_of_sequences_does_not_matter", read=lengths(lambda used, _: used.sort(descending=True).values))
mutant("ClampsBlockIds", "test_blocks_outside_the_cache", read=table(lambda ids, of: ids.clamp(0, of.keys.num_blocks - 1)))
mutant(
    "NoOutputScale", "test_attention output=", read=call(lambda of: replace(of, output_scale=unless_none(torch.ones_like)(of.output_scale)))
)
mutant("KeyScalesForValues", "test_attention layout=", read=call(lambda of: replace(of, values=replace(of.values, scales=of.keys.scales))))
mutant("RoundsResultToBfloat16", "test_attention rows=", read=result(lambda out, _: out.to(torch.bfloat16).float()))
mutant("OneInFiveHundredTooMuch", "test_attention query_lens=33,seq_lens=33", read=result(lambda out, _: out * 1.002))
mutant("NotUnrotated", "test_attention head_size=128", Int4, read=result(lambda out, _: single_rht(out) / out.shape[-1] ** 0.5))
mutant("DependsOnTheBatch", "test_batch_invariance", read=scaled(lambda of: of.batch.num_seqs > 1))
mutant("DependsOnPlacement", "test_placement_does_not_matter", read=scaled(lambda of: of.batch.block_table[0, 0] % 3))
mutant("LooksAtUnusedBytes", "test_unused_bytes_do_not_matter", read=scaled(lambda of: of.keys.codes.float().sum() % 7))
# Takes its workspace for zeroed.
mutant("UsesLeftovers", "test_leftovers_do_not_matter", read=result(lambda out, _: out + workspace(out.device, 1, 1, 8)[1][:1]))
# Plans by the width of the block table.
mutant("DependsOnTheTable", "test_results_in_random_batches", read=scaled(lambda of: of.batch.block_table.shape[1] > 2))
# The fifth sequence and later ones are computed in another order.
mutant(
    "DependsOnItsIndex",
    "test_results_in_random_batches",
    read=result(lambda out, of: torch.cat([out[: (cut := int(of.batch.cu_seqlens_q[:5][-1]))], out[cut:] * (1 + 2.0**-9)])),
)
mutant("SpreadsBadRows", "test_bad_query_row_stays_alone", read=result(lambda out, _: out.where(~out.isnan().any((1, 2), True), torch.nan)))
# What an earlier call left there is taken for its own.
mutant("TrustsItsWorkspace", "test_attention", read=result(lambda out, _: out + kept_buffer(out.device, 100)[0]))
mutant("WritesRowsOfNoSequence", "test_attention", read=and_then(lambda of: of.out[int(of.batch.cu_seqlens_q[-1]) :].zero_()))


def after(x: torch.Tensor) -> torch.Tensor:
    """The element [1] of the memory after ``x``."""
    return x.as_strided((1,), (1,), x.storage_offset() + x.numel())


mutant("LeavesItsWorkspace", "test_attention", read=and_then(lambda of: after(kept_buffer(of.q.device, 100)).zero_()))
mutant("LeavesItsScratch", "test_engine_splits", read=and_then(lambda of: of.scratch and after(of.scratch.max).zero_()))


def overflow_everywhere(attention: Attention) -> None:
    """A key that overflows spoils a sequence that does not hold it."""
    if not attention.out.float().isfinite().all():
        attention.out[int(attention.batch.cu_seqlens_q[-1]) - 1] = torch.nan


def interleaved_heads(self: QuantKVBackend, attention: Attention) -> None:
    heads = torch.arange(attention.q.shape[1]).view(attention.queries_per_kv, -1).T.flatten()
    out, owned = torch.empty_like(attention.out), rows_of_sequences(attention)
    torch_path.read(self, replace(attention, q=attention.q[:, heads], out=out))
    attention.out[owned, heads] = out[owned]


def blocks_once(ids: torch.Tensor, attention: Attention) -> torch.Tensor:
    """Each block is taken for one sequence's alone: the second one that names it does not see it."""
    seen: set[int] = set()
    for row, used in zip(ids, attention.batch.seqused_k.tolist(), strict=False):
        for column, block in enumerate(row[: -(-used // attention.keys.block_size)].tolist()):
            row[column] = -1 if block in seen else block
            seen.add(block)
    return ids


def divided_by_peak(attention: Attention) -> Attention:
    """A query is divided by its peak, however small that is."""
    q = attention.q.float()
    peak = q.abs().amax(-1, keepdim=True)
    return replace(attention, q=torch.where(peak > 0, q * (64.0 / peak) * (peak / 64.0), q))


def mean_of_halves(self: QuantKVBackend, attention: Attention) -> None:
    """With an engine's scratch, combines two halves without their maxima."""
    torch_path.read(self, attention)
    if attention.scratch is not None and attention.scratch.num_segments > 1:
        half, owned = torch.empty_like(attention.out), rows_of_sequences(attention)
        torch_path.read(self, replace(batch(attention, seqused_k=(attention.batch.seqused_k + 1) // 2), out=half))
        attention.out[owned] = ((attention.out[owned].float() + half[owned].float()) / 2).to(half.dtype)


mutant("HeadsInterleaved", "test_attention layout=token_major", read=interleaved_heads)
mutant("SpreadsOverflow", "test_fuzz", read=and_then(overflow_everywhere))
mutant("ForgetsSharedBlocks", "test_attention shared=True", read=table(blocks_once))
mutant("SubnormalQueriesOverflow", "test_tiny_queries", read=call(divided_by_peak))
mutant("IgnoresScratchSegments", "test_engine_splits", read=mean_of_halves)

# -- writes --------------------------------------------------------------------------------------------------------------


def rows_of(change: Callable[[NewRows], NewRows]) -> Write:
    """Writes changed rows."""
    return lambda self, rows: torch_path.write(self, change(rows))


def keys(change: Callable[[torch.Tensor], torch.Tensor]) -> Write:
    """Writes changed keys."""
    return rows_of(lambda rows: replace(rows, key=change(rows.key)))


def and_after(effect: Callable[[NewRows, torch.Tensor | None, torch.Tensor], Any]) -> Write:
    """Writes, and does something more, which may know the value scales and key codes from before."""

    def write(self: Any, rows: NewRows) -> None:
        scales, codes = rows.values.scales, rows.keys.codes.clone()
        scales = None if scales is None else scales.clone()
        torch_path.write(self, rows)
        effect(rows, scales, codes)

    return write


def as_another(mode: Callable[[Any, NewRows], Any]) -> Write:
    return lambda self, rows: torch_path.write(mode(self, rows), rows)


CALLS = itertools.count(1)


def bump_the_gap(rows: NewRows, *before: Any) -> None:
    """A byte between two blocks."""
    block = rows.keys.codes[0]
    if len(rows.slot_mapping) and rows.keys.codes.stride()[0] > block.numel():
        after(block).add_(1)


def write_the_time(rows: NewRows, *before: Any) -> None:
    slot, size = rows.slot_mapping[0], rows.keys.block_size
    rows.keys.codes[slot // size, slot % size, 0, 0] = next(CALLS) % 100


class Truncating(Int8):
    def encode(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> Encoded:
        _, scales = int8fp8.quantize_int8(x)
        return (x.float() / scales[..., None]).trunc().nan_to_num(0).to(torch.int8), scales


class Bfloat16Rotation(Int4):
    def encode(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> Encoded:
        return int4.quantize(single_rht(single_rht(x.float()).to(torch.bfloat16).float(), inverse=True) / (x.shape[-1] & -x.shape[-1]))


mutant(
    "WritesPaddingRows",
    "test_written_rows",
    write=rows_of(lambda rows: replace(rows, slot_mapping=rows.slot_mapping % (rows.keys.num_blocks * rows.keys.block_size))),
)
mutant("IgnoresStrides", "test_written_rows rows=", write=keys(lambda key: key.as_strided(key.shape, torch.empty(key.shape).stride())))
mutant("OneBadRowSpoilsAll", "test_bad_values_stay_in_their_row", write=keys(lambda key: key.where(key.isfinite().all(), 0)))
mutant("AddsOneUlp", "test_written_rows", NoneBackend, write=keys(lambda key: (key.float() * (1 + 2.0**-10)).to(key.dtype)))
mutant("Unsteady", "test_leftovers_do_not_matter", write=and_after(write_the_time))
mutant("TouchesTheNextSlot", "test_written_rows", write=and_after(lambda rows, *_: rows.keys.codes[-1, -1, -1, -1].add_(1)))
mutant("WritesBetweenBlocks", "test_written_rows", write=and_after(bump_the_gap))
mutant("TouchesItsInput", "test_written_rows", write=and_after(lambda rows, *_: rows.value.nan_to_num_(0.0).mul_(2)))
mutant("ScalesLeftOut", "test_written_rows", write=and_after(lambda rows, scales, _: scales is None or rows.values.scales.copy_(scales)))
mutant(
    "DependsOnOldBytes",
    "test_rewriting_a_slot",
    write=and_after(lambda rows, _, old: rows.keys.codes.bitwise_xor_((old ^ rows.keys.codes) & 1 & (old != -1))),
)
# Rounds otherwise where there are many rows.
mutant("WritesByTheBatch", "test_bytes_in_random_writes", write=as_another(lambda self, rows: self if len(rows.key) < 50 else Truncating()))
mutant("TruncatesInTheKernel", "test_written_rows", write=as_another(lambda self, rows: Truncating()))
mutant("RotatesInBfloat16", "test_written_rows", Int4, write=as_another(lambda self, rows: Bfloat16Rotation()))

# -- codecs --------------------------------------------------------------------------------------------------------------


def fp8_rounded_down(self: FP8PerTokenHead, x: torch.Tensor, scale: torch.Tensor | None = None) -> Encoded:
    codes, scales = FP8PerTokenHead.encode(self, x)
    assert scales is not None
    higher = codes.float().abs() * scales[..., None] > x.float().abs()
    bits = codes.view(torch.uint8)
    return torch.where(higher & (bits & 0x7F != 0), bits - 1, bits).view(codes.dtype), scales


def zero_points_of_8(self: Int4PerTokenHead, codes: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    return int4.dequantize(codes, int4.join_scale(self.required(scales), torch.full_like(self.required(scales), 8.0)))


def scales_over_themselves(self: Any, x: torch.Tensor, scale: torch.Tensor | None = None) -> Encoded:
    codes, scales = int2.quantize(x, unbiased=False)
    return codes, scales / scales * scales


def scale_of_the_whole_tensor(self: Any, x: torch.Tensor, scale: torch.Tensor | None = None) -> Encoded:
    _, scales = int8fp8.quantize_int8(x)
    shared = scales.amax() if scales.numel() else scales.new_tensor(1.0)
    return (x.float() / shared).round().nan_to_num(0).clamp(-128, 127).to(torch.int8), shared.expand(scales.shape)


def unchecked_door(self: Any, *args: Any, **kwargs: Any) -> None:
    """Skips the checks."""


mutant("TruncatesInEncode", "test_round_trip", Truncating)
mutant("RoundsFP8Down", "test_round_trip", FP8PerTokenHead, encode=fp8_rounded_down)
mutant("ForgetsTheZeroPoint", "test_round_trip", Int4, decode=zero_points_of_8)
mutant("ZeroRowsAreNaN", "test_zero_rows", Int2PerTokenHead, encode=scales_over_themselves)
mutant("ScaleOfTheWholeTensor", "test_rows_are_independent", encode=scale_of_the_whole_tensor)
mutant("OverridesADoor", "test_contract", reshape_and_cache=unchecked_door)

# -- controls ------------------------------------------------------------------------------------------------------------


def dense_reference(self: QuantKVBackend, attention: Attention) -> None:
    dense, lse = reference.attention_and_lse(attention, lambda plane, blocks: torch_path.gather(self, plane, blocks))
    if attention.other is not None and attention.other_lse is not None:
        dense, _ = reference.joined(dense, lse, attention.other, attention.other_lse)
    owned = rows_of_sequences(attention)
    attention.out[owned] = reference.to_output_dtype(dense[owned], attention.out.dtype, attention.output_scale)


mutant("Control", "")
mutant("Int4Control", "", Int4)
mutant("ReferenceItself", "", read=dense_reference)


def suite_of(cls: type[QuantKVBackend]) -> type[BackendTests]:
    """The suite of the mode that a mutant spoils."""

    class Suite(SUITES[cls.mode]):  # type: ignore[misc]
        mode = f"{cls.__name__.lower()}_test"

        def make_backend(self) -> QuantKVBackend:
            made = cls()
            type(made).mode = self.mode
            return made

    return Suite


globals().update({f"Test{name}": suite_of(cls) for name, cls in BACKENDS.items()})
