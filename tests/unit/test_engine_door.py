"""All modes through the two flat doors, called as vLLM's model runner calls its own.

What is vLLM's here: every argument by its keyword; one raw buffer a layer, of pages ``[block_size, num_kv_heads]`` of cells
``[K codes | K scale | V codes | V scale]``, a page padded to the size that another layer needs; q, k and v as columns of one projection;
slots ``block * block_size + offset``, -1 for the rows that pad a batch to the size of its CUDA graph; block 0 kept as the null block, which
fills the block table past a sequence's end and replaces blocks that have left the window; 16-segment scratch for batches of at most
``128 // num_kv_heads`` sequences. All that nobody wrote is 0xFF, which is NaN, and blocks are handed on with their last owner's rows in
them, so that the rest of a sequence's last block is full of one or the other.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from kvq_core import QuantKVBackend, get_backend
from kvq_core.registry import FIRST_PARTY
from kvq_core.testing import budgets, oracle, places
from kvq_core.testing.places import Place
from kvq_core.testing.poison import Field, Poisoned
from kvq_core.testing.subject import assert_within

SEGMENTS = 16
NULL_BLOCK = 0
PAGE_PADDING = 48
"""Bytes at the end of each page that belong to nobody."""
# A step: (sequence, new tokens) pairs, then how many rows and sequences pad the batch.
Step = tuple[tuple[tuple[int, int], ...], int, int]


@dataclass(frozen=True)
class Layer:
    """An attention layer of a served model, and the steps that it is served in. Rows are bf16."""

    steps: tuple[Step, ...]
    num_query_heads: int = 2
    num_kv_heads: int = 1
    head_size: int = 64
    block_size: int = 16
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False

    def __str__(self) -> str:
        return f"heads={self.num_query_heads}x{self.head_size}" + (f",window={self.window}" if self.window else "")


# Prefill; a prefill chunk beside a decode row and a verified draft; decode alone, as a CUDA graph of a larger size has it. The first
# sequence ends in a second tile of keys, from where its window reaches just into the first.
SMALL = Layer(steps=((((0, 69), (1, 5)), 0, 0), (((0, 1), (1, 3), (2, 17)), 0, 0), (((0, 1), (1, 1), (2, 1)), 2, 1)))
SMALL_WINDOWED = replace(SMALL, block_size=8, window=9, softcap=20.0, sinks=True)
PLAIN = Layer(
    steps=(
        (((0, 150), (1, 7), (2, 64)), 0, 0),
        (((0, 1), (1, 4), (2, 1), (3, 90)), 3, 0),
        (((3, 33), (1, 60)), 0, 2),
        *((((0, 1), (1, 1), (2, 1), (3, 1)), 4, 4),) * 2,
    ),
    num_query_heads=8,
    num_kv_heads=2,
    head_size=128,
)
WINDOWED = Layer(
    steps=((((0, 130), (1, 40)), 0, 0), (((0, 1), (1, 3)), 0, 0), (((2, 70), (0, 1)), 5, 1), *((((0, 1), (1, 1), (2, 1)), 1, 1),) * 18),
    num_query_heads=4,
    num_kv_heads=2,
    head_size=96,
    block_size=32,
    window=37,
    softcap=20.0,
    sinks=True,
)


@dataclass
class Sequence:
    """What an engine knows of a request: how many of its keys are cached, and in which blocks. ``given``: their K and V rows."""

    length: int = 0
    blocks: list[int] = field(default_factory=list)
    given: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)


class Runner:
    """A model runner with one layer, whose pages ``backend`` keeps."""

    def __init__(self, backend: QuantKVBackend, layer: Layer, place: Place) -> None:
        self.backend, self.layer, self.place = backend, layer, place
        self.generator = torch.Generator().manual_seed(0)
        tokens = sum(count for work, _, _ in layer.steps for _, count in work)
        self.num_blocks = 2 + -(-tokens // layer.block_size) + len(layer.steps[-1][0])
        self.free = list(range(NULL_BLOCK + 1, self.num_blocks))
        random.Random(0).shuffle(self.free)
        self.sequences: dict[int, Sequence] = {}
        self.pages = self._pages()
        given = backend.takes_scales
        scales = [torch.tensor([6 / 448 * gain], device=place.device) for gain in (1.0, 1.25)] if given else [None, None]
        if backend.needs_scale_caches:
            scales = [self.pages["k_scale_cache"], self.pages["v_scale_cache"]]
        self.scales = dict(zip(("k_scale_cache", "v_scale_cache"), scales, strict=True))
        sinks = torch.randn(layer.num_query_heads, generator=self.generator).to(place.device, torch.bfloat16)
        self.options = {
            "softmax_scale": layer.head_size**-0.5,
            "window_size": (layer.window - 1, 0) if layer.window else (-1, -1),
            "softcap": layer.softcap,
            "sinks": sinks if layer.sinks else None,
            **dict.fromkeys(("alibi_slopes", "qq_bias", "mm_prefix_range")),
        }

    def _pages(self) -> Poisoned:
        """The layer's buffer, with a page of guard on either side."""
        layer, backend = self.layer, self.backend
        codes, width = backend.cache_dtype(torch.bfloat16), backend.packed_head_size(layer.head_size)
        cell: list[tuple[str, torch.dtype, int]] = []
        for half in ("key", "value"):
            cell.append((f"{half}_cache", codes, width))
            if backend.needs_scale_caches:
                cell.append((f"{half[0]}_scale_cache", torch.float32, 0))
        cell_size = sum(dtype.itemsize * max(n, 1) for _, dtype, n in cell)
        page = layer.block_size * layer.num_kv_heads * cell_size + PAGE_PADDING
        fields, offset = {}, page
        for name, dtype, n in cell:
            shape = (self.num_blocks, layer.block_size, layer.num_kv_heads) + ((n,) if n else ())
            steps = tuple(step // dtype.itemsize for step in (page, layer.num_kv_heads * cell_size, cell_size))
            fields[name] = Field(dtype, shape, steps + ((1,) if n else ()), offset)
            offset += dtype.itemsize * max(n, 1)
        return Poisoned(page * (self.num_blocks + 2), fields, self.place.device)

    # -- the bookkeeping of an engine -----------------------------------------------------------------------------------

    def slots_of(self, seq: Sequence, positions: range) -> list[int]:
        size = self.layer.block_size
        return [seq.blocks[p // size] * size + p % size for p in positions]

    def drop_what_left_the_window(self, seq: Sequence) -> None:
        """Give back the blocks of which no later query sees a key."""
        passed = max(seq.length - self.layer.window + 1, 0) // self.layer.block_size if self.layer.window else 0
        for index in range(passed):
            if seq.blocks[index] != NULL_BLOCK:
                self.free.append(seq.blocks[index])
                seq.blocks[index] = NULL_BLOCK

    def scratch(self) -> dict[str, Any]:
        layer = self.layer
        threshold = 128 // layer.num_kv_heads
        shape = (threshold, layer.num_query_heads, SEGMENTS)
        nan = torch.full((*shape, 1 << (layer.head_size - 1).bit_length()), torch.nan, device=self.place.device)
        return {
            "seq_threshold_3D": threshold,
            "num_par_softmax_segments": SEGMENTS,
            "softmax_segm_output": nan,
            "softmax_segm_max": nan[..., 0].clone(),
            "softmax_segm_expsum": nan[..., 0].clone(),
        }

    # -- a step ---------------------------------------------------------------------------------------------------------

    def step(self, work: tuple[tuple[int, int], ...], padding_rows: int, padding_seqs: int) -> None:
        layer, device = self.layer, self.place.device
        tokens = sum(count for _, count in work)
        heads = (layer.num_query_heads, layer.num_kv_heads, layer.num_kv_heads)
        projected = torch.randn(tokens + padding_rows, sum(heads) * layer.head_size, generator=self.generator)
        projected[tokens:] = torch.nan
        columns = projected.to(device, torch.bfloat16).split([n * layer.head_size for n in heads], dim=-1)
        q, key, value = (x.unflatten(-1, (-1, layer.head_size)) for x in columns)

        slots, starts = [], [0]
        for name, count in work:
            seq = self.sequences.setdefault(name, Sequence())
            span, rows = range(seq.length, seq.length + count), slice(starts[-1], starts[-1] + count)
            seq.blocks += [self.free.pop() for _ in range(-(-span.stop // layer.block_size) - len(seq.blocks))]
            seq.given.append((key[rows], value[rows]))
            seq.length = span.stop
            slots += self.slots_of(seq, span)
            starts.append(rows.stop)
        self.write(key, value, slots, padding_rows)

        batch = [self.sequences[name] for name, _ in work]
        width = max(len(seq.blocks) for seq in batch) + 2
        table = [seq.blocks + [NULL_BLOCK] * (width - len(seq.blocks)) for seq in batch] + [[NULL_BLOCK] * width] * padding_seqs
        arguments = {
            "q": q,
            "cu_seqlens_q": torch.tensor(starts + starts[-1:] * padding_seqs, dtype=torch.int32, device=device),
            "max_seqlen_q": max(count for _, count in work),
            "seqused_k": torch.tensor([seq.length for seq in batch] + [0] * padding_seqs, dtype=torch.int32, device=device),
            "max_seqlen_k": max(seq.length for seq in batch),
            "block_table": torch.tensor(table, dtype=torch.int32, device=device),
            **self.options,
            **self.scales,
            **self.scratch(),
        }
        # Split and not: the threshold is the engine's to choose.
        for threshold in (arguments["seq_threshold_3D"], 0):
            out = self.read(arguments | {"seq_threshold_3D": threshold})
            for position, seq in enumerate(batch):
                self.check(seq, out[starts[position] : starts[position + 1]], arguments, position)
        for seq in batch:
            self.drop_what_left_the_window(seq)

    def write(self, key: torch.Tensor, value: torch.Tensor, slots: list[int], padding_rows: int) -> None:
        mapping = torch.tensor(slots + [-1] * padding_rows, dtype=torch.int64, device=self.place.device)
        caches = {name: self.pages[name] for name in ("key_cache", "value_cache")}
        self.pages.settle()
        self.backend.reshape_and_cache(key=key, value=value, **caches, slot_mapping=mapping, **self.scales)
        where = (mapping[: len(slots)] // self.layer.block_size, mapping[: len(slots)] % self.layer.block_size)
        self.pages.assert_only_changed(dict.fromkeys(self.pages.fields, where), "the write")

    def read(self, arguments: dict[str, Any]) -> torch.Tensor:
        q = arguments["q"]
        out = torch.full(q.shape, torch.nan, dtype=q.dtype, device=q.device)
        self.pages.settle()
        self.backend.unified_attention(k_cache=self.pages["key_cache"], v_cache=self.pages["value_cache"], out=out, **arguments)
        self.pages.assert_only_changed({}, "the read")
        return out

    # -- what is right --------------------------------------------------------------------------------------------------

    def decoded(self, half: str, slots: torch.Tensor) -> torch.Tensor:
        """What the pages hold at ``slots``, float64."""
        where = (slots // self.layer.block_size, slots % self.layer.block_size)
        name, scale_name = f"{half}_cache", f"{half[0]}_scale_cache"
        codes = self.pages.integers(name)[where].view(self.pages.fields[name].dtype)
        scales = self.scales[scale_name]
        return self.backend.decode(codes, scales[where] if scales is not None and self.backend.needs_scale_caches else scales).double()

    def check(self, seq: Sequence, out: torch.Tensor, arguments: dict[str, Any], position: int) -> None:
        """Hold ``out`` to float64 attention over the decoded rows, and those to what was given."""
        slots = torch.tensor(self.slots_of(seq, range(seq.length)), device=self.place.device)
        present = slots >= (NULL_BLOCK + 1) * self.layer.block_size
        stored = [self.decoded(half, slots) for half in ("key", "value")]
        given = [torch.cat(rows) for rows in zip(*seq.given, strict=True)]
        for half, got, rows in zip(("key", "value"), stored, given, strict=True):
            scale = self.scales[f"{half[0]}_scale_cache"]
            encode = self.backend.encode if half == "key" else self.backend.encode_value
            encoded, scales = encode(rows[present], scale=None if self.backend.needs_scale_caches else scale)
            wanted = self.backend.decode(encoded, scales if self.backend.needs_scale_caches else scale).double()
            # Kernels may round a tie to the other level, a step of about the row's rms, in one of a thousand places.
            allowed = math.sqrt(1e-3) if self.place.kernels else 0.0
            assert float((got[present] - wanted).norm()) <= allowed * float(wanted.norm()), f"{half}s of {self.backend.mode}"

        first = int(arguments["cu_seqlens_q"][position])
        exact = oracle.attend(arguments["q"][first : first + out.shape[0]], *stored, present, position, arguments)
        operands = torch.bfloat16 if self.backend.mode == "none" else torch.float16
        u, level_error = budgets.F32, budgets.NO_LEVEL_ERROR
        if self.place.kernels:
            u, level_error = self.place.unit_roundoff(operands), budgets.level_error(self.backend)
        bound = budgets.read(exact, arguments["softmax_scale"], arguments["softcap"], u, level_error)
        bound = budgets.stored(bound, exact.out, out.dtype, self.place.unit_roundoff(out.dtype))
        what = f"{self.backend.mode}, {self.layer}: sequence of {seq.length}, [head, row, channel]"
        assert_within(out.double().transpose(0, 1), exact.out, bound, what)


@pytest.fixture
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Place:
    return places.enter(request.param, monkeypatch)


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
@pytest.mark.parametrize("mode", sorted(FIRST_PARTY))
@places.each((SMALL, SMALL_WINDOWED), large=(PLAIN, WINDOWED))
def test_a_model_is_served(mode: str, place: Place, case: Layer) -> None:
    runner = Runner(get_backend(mode), case, place)
    for step in case.steps:
        runner.step(*step)
    dropped = [seq.blocks.count(NULL_BLOCK) for seq in runner.sequences.values()]
    assert any(dropped) == bool(case.window), "a window must have given blocks back"
    assert all(seq.length % case.block_size for seq in runner.sequences.values()), "last blocks must have a rest"
