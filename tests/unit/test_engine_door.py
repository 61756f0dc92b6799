"""All modes through the two flat doors, called as vLLM's model runner calls its own.

What is vLLM's here: interleaved cells in one raw buffer, pages padded; q, k and v as columns of one projection; slots
``block * block_size + offset``, -1 for the rows that pad a batch to the size of its CUDA graph; block 0 kept as the null block, which fills
the block table past a sequence's end and replaces blocks that have left the window; 16-segment scratch for batches of at most
``128 // num_kv_heads`` sequences. All that nobody wrote is 0xFF, which is NaN, and blocks are handed on with their last owner's rows in
them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from kvq_core import QuantKVBackend, get_backend
from kvq_core.registry import FIRST_PARTY
from kvq_core.testing import budgets, layouts, oracle, places
from kvq_core.testing.cases import Case
from kvq_core.testing.places import Place
from kvq_core.testing.subject import assert_within

SEGMENTS, NULL_BLOCK = 16, 0
# A step: (sequence, new tokens) pairs, then how many rows and sequences pad the batch.
Step = tuple[tuple[tuple[int, int], ...], int, int]


@dataclass(frozen=True)
class Served:
    """An attention layer of a served model (of ``case``, how it lies and scores), and the steps that it is served in."""

    case: Case
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        return str(self.case)


CELLS: dict[str, Any] = {"dtype": torch.bfloat16, "layout": "interleaved", "padding": 48}
# Prefill; a prefill chunk beside a decode row and a verified draft; decode alone, as a CUDA graph of a larger size has it. The first
# sequence ends in a second tile of keys, from where its window reaches just into the first.
SMALL = Served(
    Case(num_kv_heads=1, block_size=8, window=8, softcap=20.0, sinks=True, **CELLS),
    ((((0, 69), (1, 5)), 0, 0), (((0, 1), (1, 3), (2, 17)), 0, 0), (((0, 1), (1, 1), (2, 1)), 2, 1)),
)
PLAIN = Served(
    Case(queries_per_kv=4, head_size=128, **CELLS),
    (
        (((0, 150), (1, 7), (2, 64)), 0, 0),
        (((0, 1), (1, 4), (2, 1), (3, 90)), 3, 0),
        (((3, 33), (1, 60)), 0, 2),
        *((((0, 1), (1, 1), (2, 1), (3, 1)), 4, 4),) * 2,
    ),
)
WINDOWED = Served(
    Case(head_size=96, block_size=32, window=36, softcap=20.0, sinks=True, **CELLS),
    ((((0, 130), (1, 40)), 0, 0), (((0, 1), (1, 3)), 0, 0), (((2, 70), (0, 1)), 5, 1), *((((0, 1), (1, 1), (2, 1)), 1, 1),) * 18),
)


@dataclass
class Sequence:
    """What an engine knows of a request: how many of its keys are cached, and in which blocks. ``given``: their K and V rows."""

    length: int = 0
    blocks: list[int] = field(default_factory=list)
    given: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)


class Runner:
    """A model runner with one layer, whose pages ``backend`` keeps."""

    def __init__(self, backend: QuantKVBackend, served: Served, place: Place) -> None:
        self.backend, self.case, self.place, self.device = backend, served.case, place, place.device
        self.generator = torch.Generator().manual_seed(0)
        tokens = sum(count for work, _, _ in served.steps for _, count in work)
        num_blocks = 2 + -(-tokens // self.case.block_size) + len(served.steps[-1][0])
        self.free = random.Random(0).sample(range(NULL_BLOCK + 1, num_blocks), num_blocks - 1)
        self.sequences: dict[int, Sequence] = {}
        self.pages = layouts.pages(self.case, backend, num_blocks, self.device)
        self.scales: dict[str, Any] = dict.fromkeys(("k_scale_cache", "v_scale_cache"))
        for name, gain in zip(self.scales, (1.0, 1.25), strict=True):
            if backend.reads_scales:
                self.scales[name] = torch.tensor([6 / 448 * gain], device=self.device) if backend.takes_scales else self.pages[name]
        self.options = {
            "softmax_scale": self.case.head_size**-0.5,
            "window_size": (self.case.window, 0 if self.case.window >= 0 else -1),
            "softcap": self.case.softcap,
            "sinks": self.random(self.case.num_query_heads) if self.case.sinks else None,
            **dict.fromkeys(("alibi_slopes", "qq_bias", "mm_prefix_range")),
        }

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device, torch.bfloat16)

    def integers(self, values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def slots_of(self, seq: Sequence, positions: range) -> list[int]:
        size = self.case.block_size
        return [seq.blocks[p // size] * size + p % size for p in positions]

    def drop_what_left_the_window(self, seq: Sequence) -> None:
        """Give back the blocks of which no later query sees a key."""
        passed = max(seq.length - self.case.window, 0) // self.case.block_size if self.case.window >= 0 else 0
        for index in range(passed):
            if seq.blocks[index] != NULL_BLOCK:
                self.free.append(seq.blocks[index])
                seq.blocks[index] = NULL_BLOCK

    def step(self, work: tuple[tuple[int, int], ...], padding_rows: int, padding_seqs: int) -> None:
        size = self.case.head_size
        heads = (self.case.num_query_heads, self.case.num_kv_heads, self.case.num_kv_heads)
        projected = self.random(sum(count for _, count in work) + padding_rows, sum(heads) * size)
        projected[len(projected) - padding_rows :] = torch.nan
        q, key, value = (x.unflatten(-1, (-1, size)) for x in projected.split([n * size for n in heads], dim=-1))
        slots, starts = [], [0]
        for name, count in work:
            seq = self.sequences.setdefault(name, Sequence())
            span, rows = range(seq.length, seq.length + count), slice(starts[-1], starts[-1] + count)
            seq.blocks += [self.free.pop() for _ in range(-(-span.stop // self.case.block_size) - len(seq.blocks))]
            seq.given.append((key[rows], value[rows]))
            seq.length = span.stop
            slots += self.slots_of(seq, span)
            starts.append(rows.stop)
        self.write(key, value, slots, padding_rows)

        batch = [self.sequences[name] for name, _ in work]
        width = max(len(seq.blocks) for seq in batch) + 2
        table = [seq.blocks + [NULL_BLOCK] * (width - len(seq.blocks)) for seq in batch] + [[NULL_BLOCK] * width] * padding_seqs
        threshold = 128 // self.case.num_kv_heads
        scratch = torch.full((threshold, heads[0], SEGMENTS, 1 << (size - 1).bit_length()), torch.nan, device=self.device)
        arguments = {
            "q": q,
            "cu_seqlens_q": self.integers(starts + starts[-1:] * padding_seqs),
            "max_seqlen_q": max(count for _, count in work),
            "seqused_k": self.integers([seq.length for seq in batch] + [0] * padding_seqs),
            "max_seqlen_k": max(seq.length for seq in batch),
            "block_table": self.integers(table),
            "num_par_softmax_segments": SEGMENTS,
            "softmax_segm_output": scratch,
            "softmax_segm_max": scratch[..., 0].clone(),
            "softmax_segm_expsum": scratch[..., 0].clone(),
            **self.options,
            **self.scales,
        }
        # Split and not: the threshold is the engine's to choose.
        for chosen in (threshold, 0):
            out = torch.full_like(q, torch.nan)
            self.pages.settle()
            caches = {f"{half}_cache": self.pages[f"{name}_cache"] for half, name in (("k", "key"), ("v", "value"))}
            self.backend.unified_attention(out=out, seq_threshold_3D=chosen, **caches, **arguments)
            self.pages.assert_only_changed({}, "the read")
            for position, seq in enumerate(batch):
                self.check(seq, out[starts[position] : starts[position + 1]], arguments, position)
        for seq in batch:
            self.drop_what_left_the_window(seq)

    def write(self, key: torch.Tensor, value: torch.Tensor, slots: list[int], padding_rows: int) -> None:
        mapping = self.integers(slots + [-1] * padding_rows, torch.int64)
        self.pages.settle()
        self.backend.reshape_and_cache(key, value, self.pages["key_cache"], self.pages["value_cache"], mapping, **self.scales)
        where = (mapping[: len(slots)] // self.case.block_size, mapping[: len(slots)] % self.case.block_size)
        self.pages.assert_only_changed(dict.fromkeys(self.pages.fields, where), "the write")

    def decoded(self, half: str, slots: torch.Tensor) -> torch.Tensor:
        """What the pages hold at ``slots``, float64."""
        where = (slots // self.case.block_size, slots % self.case.block_size)
        codes = self.pages.integers(f"{half}_cache")[where].view(self.pages.fields[f"{half}_cache"].dtype)
        scales = self.scales[f"{half[0]}_scale_cache"]
        return self.backend.decode(codes, scales[where] if self.backend.needs_scale_caches else scales).double()

    def check(self, seq: Sequence, out: torch.Tensor, arguments: dict[str, Any], position: int) -> None:
        """Hold ``out`` to float64 attention over the decoded rows, and those to what was given: the suite compares them with ``encode``."""
        slots = self.integers(self.slots_of(seq, range(seq.length)), torch.int64)
        present = slots >= (NULL_BLOCK + 1) * self.case.block_size
        stored = [self.decoded(half, slots) for half in ("key", "value")]
        for got, rows in zip(stored, zip(*seq.given, strict=True), strict=True):
            given = torch.cat(rows)[present].double()
            assert float((got[present] - given).norm()) < 0.5 * float(given.norm()), "rows of another token would be off by more than 1"

        first = int(arguments["cu_seqlens_q"][position])
        exact = oracle.attend(arguments["q"][first : first + out.shape[0]], *stored, present, position, arguments)
        u, level_error = budgets.F32, budgets.NO_LEVEL_ERROR
        if self.place.kernels:
            operands = torch.bfloat16 if self.backend.mode == "none" else torch.float16
            u, level_error = self.place.unit_roundoff(operands), budgets.level_error(self.backend)
        bound = budgets.read(exact, arguments["softmax_scale"], arguments["softcap"], u, level_error)
        bound = budgets.stored(bound, exact.out, out.dtype, self.place.unit_roundoff(out.dtype))
        what = f"{self.backend.mode}, {self.case}: sequence of {seq.length}, [head, row, channel]"
        assert_within(out.double().transpose(0, 1), exact.out, bound, what)


@pytest.fixture
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Place:
    return places.enter(request.param, monkeypatch)


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
@pytest.mark.parametrize("mode", sorted(FIRST_PARTY))
@places.each((SMALL,), large=(PLAIN, WINDOWED))
def test_a_model_is_served(mode: str, place: Place, case: Served) -> None:
    runner = Runner(get_backend(mode), case, place)
    for step in case.steps:
        runner.step(*step)
    dropped = [seq.blocks.count(NULL_BLOCK) for seq in runner.sequences.values()]
    assert any(dropped) == (case.case.window >= 0), "a window must have given blocks back"
    assert all(seq.length % case.case.block_size for seq in runner.sequences.values()), "last blocks must have a rest"
