"""A plain model of a PagedKVCache, its residual window if it has one, and its live steps: what it must hold and what it must attend to."""

import contextlib
import copy
import pickle
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import note

import kvq_core
from cache_checks import assert_consistent, attention, interrupted, stored
from kvq_core import ArgumentError, KVQError, OutOfBlocksError, PagedKVCache, get_backend
from kvq_core.cache.sequences import SequenceTable
from kvq_core.cache.step import Step
from kvq_core.residual.table import ExactTable
from kvq_core.testing.places import Place

HEADS, SIZE, GROUP, LAYERS = 2, 32, 2, 2
TOLERANCE = {torch.float32: 1e-5, torch.float16: 8e-3, torch.bfloat16: 5e-2}
"""Kernels round queries, weights and keys to float16 at best. A key read exact that should be packed moves results by .05 and more."""
COPIES = (copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x, 0)), lambda x: pickle.loads(pickle.dumps(x, 5)))


def make(mode: str = "int4", **options: Any) -> PagedKVCache:
    given = {"num_blocks": 300, "num_kv_heads": HEADS, "head_size": SIZE, "num_layers": LAYERS, "dtype": torch.float32}
    given |= {"k_scale": [0.02, 0.03], "v_scale": 0.04} if mode == "fp8_per_tensor" else {}
    return PagedKVCache(mode, **given | options)


@dataclass(eq=False)
class Call:
    """A live step of ``counts``: its ``rows`` [K and V of each layer, tokens, heads, size], which layers were written, and which last."""

    step: Step
    counts: dict[int, int]
    rows: torch.Tensor
    written: set[int] = field(default_factory=set)
    last: int | None = None


class Model:
    """A cache, and the rows of its sequences: ``texts[seq]`` [2, K and V of each layer, tokens, heads, size], as pages hold them and as
    the window does. ``live`` steps are of different sequences."""

    def __init__(self, at: Place | torch.device, seed: int = 0, *, sequences: int = 1, **options: Any) -> None:
        self.device, self.kernels = (at.device, at.kernels) if isinstance(at, Place) else (at, at.type == "cuda")
        self.random, self.generator = Random(seed), torch.Generator().manual_seed(seed)
        self.dtype = options.get("dtype", torch.float32)
        self.has_window = bool(options.keys() & {"residual_length", "sink_tokens"})
        self.cache = make(device=self.device, **options, **{"max_sequences": 4} if self.has_window else {})
        for tensor in self.cache._pages._buffers.values():
            tensor.view(torch.uint8).fill_(255)
        self.texts: dict[int, torch.Tensor] = {}
        self.next_id = 0
        self.live: list[Call] = []
        self.left: Model | None = None
        """What was copied last: since then all happens to the copy."""
        for _ in range(sequences):
            self.take_in(self.cache.allocate_sequence(), self.draw(2, 2 * LAYERS, 0, HEADS, SIZE))

    def length(self, seq: int) -> int:
        return self.texts[seq].shape[2]

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.device)

    def some(self) -> dict[int, int]:
        """One or two sequences, and new tokens of each."""
        seqs = self.random.sample([*self.texts], self.random.randint(1, min(2, len(self.texts))))
        return {seq: self.random.choice([1, 3, 16, 17, 40, 70]) for seq in seqs}

    # -- what a cache does ------------------------------------------------------------------------------------------------

    def take_in(self, seq: int, text: torch.Tensor) -> None:
        assert seq == self.next_id, "ids are never used again"
        self.next_id += 1
        self.texts[seq] = text

    def grow(self, counts: dict[int, int]) -> Call:
        """A live step with its rows; an error if there are too few blocks, and then nothing has changed."""
        for seq in counts:
            self.settle(seq)
        # Of the holders of a block that is not full, each that appends needs a copy, but for the last if no other is left.
        size, blocks = self.cache.geometry.block_size, {seq: self.cache.block_table([seq])[0].tolist() for seq in self.texts}
        held = Counter(block for each in blocks.values() for block in each)
        writing = Counter(blocks[seq][-1] for seq in counts if self.length(seq) % size)
        needed = sum(min(n, held[block] - 1) for block, n in writing.items())
        needed += sum(-(-(self.length(seq) + n) // size) - -(-self.length(seq) // size) for seq, n in counts.items())
        free = self.cache.num_free_blocks
        if needed > free:
            message = f"^need {needed} free blocks, have {free} of {self.cache.geometry.num_blocks}$"
            self.refused(lambda: self.cache.append(counts), OutOfBlocksError, message)
            raise OutOfBlocksError(message)
        step = self.cache.append(counts)
        assert free - self.cache.num_free_blocks == needed, "a copy in vain, or too few"
        rows = self.draw(2 * LAYERS, step.num_tokens, HEADS, SIZE).to(self.dtype)
        window = self.cache.residual_window
        mode = get_backend("none" if window is None else window.mode)
        new = torch.stack((self.packed(rows), mode.decode(*mode.encode(rows)).float()))
        for seq, mine in zip(counts, new.split([*counts.values()], 2), strict=True):
            self.texts[seq] = torch.cat((self.texts[seq], mine), 2)
        self.live.append(Call(step, counts, rows))
        return self.live[-1]

    def packed(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows`` of a call as ``encode`` stores them."""
        backend, found = self.cache.backend, []
        for number, x in enumerate(rows):
            caches = self.cache.layer(number // 2)
            half, given = (backend.value_half, caches.v_scale_cache) if number % 2 else (backend.key_half, caches.k_scale_cache)
            codes, scales = (half.encode_value if number % 2 else half.encode)(x, scale=given if half.takes_scales else None)
            found.append(half.decode(codes, given if half.takes_scales else scales))
        return torch.stack(found)

    def write(self, call: Call, layer: int, interrupts: bool = False) -> None:
        rows = slice(2 * layer, 2 * layer + 2)
        call.last = None
        call.written.discard(layer)
        if interrupts and self.interrupted("write", layer, *call.rows[rows], call.step):
            return
        self.cache.write(layer, *call.rows[rows], call.step)
        call.last = layer
        call.written.add(layer)
        # A kernel may round a tie the other way than encode; what it wrote must stay.
        for seq, count in call.counts.items() if self.kernels else ():
            found, wanted = torch.stack(stored(self.cache, seq)[rows])[:, -count:], self.texts[seq][0, rows, -count:]
            assert (found - wanted).norm() < 0.1 * wanted.norm(), "rows of another token would be off by more than 1"
            wanted.copy_(found)

    def attend(self, call: Call, layer: int, **options: Any) -> None:
        q, sizes = self.draw(call.step.num_tokens, GROUP * HEADS, SIZE).to(self.dtype), list(call.counts.values())
        is_staged = call.step.residual is not None and call.step.residual.staging is not None
        try:
            found = self.cache.attend(layer, q, call.step, **options).split(sizes)
        except ArgumentError as refused:
            assert refused.argument == "layer" and (layer not in call.written or (is_staged and layer != call.last))
            return
        window = self.cache.residual_window
        for seq, mine, result in zip(call.counts, q.split(sizes), found, strict=True) if is_staged or layer in call.written else ():
            j = torch.arange(self.length(seq), device=q.device)
            exact = (j >= self.first(call.step, seq)) | (j < (0 if window is None else window.sinks))
            packed, held = self.texts[seq][:, 2 * layer : 2 * layer + 2]
            keys_and_values = torch.where(exact[:, None, None], held, packed)
            error = (result.double() - attention(mine, *keys_and_values, call.step.sequences.index(seq), **options)).abs().max()
            rounded = torch.float16 if self.kernels and self.dtype == torch.float32 else self.dtype
            assert error < TOLERANCE[rounded], f"sequence {seq}, {self.length(seq)} tokens: off by {error:.1e}"

    def first(self, step: Step, seq: int) -> int:
        """The first key behind the sinks that the call reads exact."""
        residual, at = step.residual, step.sequences.index(seq)
        if residual is None:
            return self.length(seq)
        stop = int(residual.key_stops[at])
        if residual.packed is None or not stop:
            return 0
        return stop + self.length(seq) - int(residual.packed.seqused_k[at])

    def finish(self, call: Call, **options: Any) -> Step:
        """Write and read every layer."""
        for layer in range(LAYERS):
            self.write(call, layer)
            self.attend(call, layer, **options)
        return call.step

    def append(self, counts: dict[int, int], **options: Any) -> Step:
        return self.finish(self.grow(counts), **options)

    def cut(self, seq: int, length: int) -> None:
        self.settle(seq)
        self.cache.truncate(seq, length)
        self.texts[seq] = self.texts[seq][:, :, :length]

    def settle(self, seq: int) -> None:
        """End the live step of ``seq``: written in all layers, or taken back."""
        for call in [call for call in self.live if seq in call.counts]:
            self.live.remove(call)
            for each, count in call.counts.items() if len(call.written) < LAYERS else ():
                self.cut(each, self.length(each) - count)

    # -- what must be refused, or may be interrupted ----------------------------------------------------------------------

    def refused(self, call: Callable[[], object], error: type[Exception] = KVQError, match: str | None = None) -> None:
        def facts() -> Any:
            cache = self.cache
            return [(seq, cache.length(seq), cache.block_table([seq]).tolist()) for seq in cache.sequences], cache.num_free_blocks

        before, pages = facts(), [tensor.clone() for tensor in self.cache._pages.tensors.values()]
        with pytest.raises(error, match=match):
            call()
        assert before == facts(), "an error changed the sequences"
        pairs = zip(pages, self.cache._pages.tensors.values(), strict=True)
        assert all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in pairs), "an error changed the pages"

    def misuse(self, seqs: list[int]) -> None:
        """Sequences that are not there, each beside some that are; lengths that are none; a layer that is none."""
        cache, some, beyond = self.cache, dict.fromkeys(seqs, 1), self.random.randint(1, 100)
        gone = self.random.choice([seq for seq in range(self.next_id + 2) if seq not in seqs])
        calls: list[Callable[[], object]] = [lambda: cache.fork(gone), lambda: cache.free(gone), lambda: cache.length(gone)]
        calls += [lambda: cache.append({**some, gone: 1}), lambda: cache.block_table([*seqs, gone])]
        if seqs:
            length = self.length(seqs[0])
            calls += [lambda: cache.truncate(seqs[0], length + beyond), lambda: cache.truncate(seqs[0], -beyond)]
            calls += [lambda: cache.append(some | {seqs[0]: -beyond})]
        for live in self.live:
            calls += [lambda live=live: cache.write(LAYERS, *live.rows[:2], live.step)]  # type: ignore[misc]
        for call in calls:
            self.refused(call)

    def interrupted(self, name: str, *arguments: Any) -> bool:
        """Call a method of the cache that may be interrupted at any line, on a GPU at none."""
        at = self.random.randrange(250)
        within = lambda file: not self.kernels and file.startswith(kvq_core.__path__[0])  # noqa: E731
        return interrupted(lambda: getattr(self.cache, name)(*arguments), at, within) > at

    def interrupted_append(self, counts: dict[int, int], table: type | None) -> None:
        """Interrupted at the change of ``table``, or at any line. What was live before still is, if nothing has happened."""
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(KeyboardInterrupt, OutOfBlocksError):
            if table is None:
                self.interrupted("append", counts)
            else:
                patch.setattr(table, "commit", Mock(side_effect=KeyboardInterrupt))
                self.cache.append(counts)
        if any(self.cache.length(seq) > self.length(seq) for seq in counts):
            for seq in counts:
                self.cache.truncate(seq, self.length(seq))
            for seq in counts:
                self.settle(seq)

    # -- any of that ------------------------------------------------------------------------------------------------------

    def act(self, file: Path) -> None:
        """One thing of all that may happen, most often a write, some of them repeated or interrupted, or a read."""
        seqs, live, random = list(self.texts), list(self.live), self.random
        weights = {"misuse": 1, "save": 1, "copy": 1, "allocate": len(seqs) < 4, "fork": 0 < len(seqs) < 4}
        weights |= {"cut": bool(seqs), "free": bool(seqs), "append": 8 * bool(seqs), "interrupt": 2 * bool(seqs), "write": 16 * bool(live)}
        weights |= {"attend": 16 * bool(live and (self.has_window or not self.kernels))}
        note(kind := random.choices([*weights], [*weights.values()])[0])
        seq = random.choice(seqs or [0])
        if kind in ("cut", "fork", "free"):
            self.settle(seq)
        match kind:
            case "misuse":
                self.misuse(seqs)
            case "save":
                for each in seqs:
                    self.settle(each)
                self.cache.save(file)
                old, self.cache = self.cache, PagedKVCache.load(file, device=self.device)
                assert self.cache.backend is old.backend and self.cache.geometry == old.geometry
                for mine, theirs in zip(vars(self.cache.layer(0)).values(), vars(old.layer(0)).values(), strict=True):
                    assert mine is theirs is None or mine.stride() == theirs.stride()
            case "copy":
                self.left = copy.copy(self)
                self.left.texts = dict(self.texts)
                with torch.inference_mode(random.random() < 0.5):
                    self.cache, self.live = random.choice(COPIES)((self.cache, self.live))
                for call in self.live:
                    call.last = None
            case "allocate":
                self.take_in(self.cache.allocate_sequence(), self.draw(2, 2 * LAYERS, 0, HEADS, SIZE))
            case "fork":
                self.take_in(self.cache.fork(seq), self.texts[seq])
            case "cut":
                self.cut(seq, random.randint(0, self.length(seq)))
            case "free":
                self.cache.free(seq)
                del self.texts[seq]
            case "append":
                with contextlib.suppress(OutOfBlocksError):
                    self.grow(self.some())
            case "interrupt":
                self.interrupted_append(self.some(), random.choice([None, SequenceTable, ExactTable]))
            case "write":
                self.write(random.choice(live), random.randrange(LAYERS), random.random() < 0.2)
            case "attend":
                self.attend(random.choice(live), random.randrange(LAYERS))
        for old in live if kind in ("cut", "fork", "free") else ():
            if old not in self.live and seq in old.counts:
                for use in (lambda: self.cache.write(0, *old.rows[:2], old.step), lambda: self.cache.attend(0, old.rows[0], old.step)):  # noqa: B023
                    self.refused(use, ArgumentError, "step: got one whose sequences were")

    def check(self) -> None:
        assert set(self.cache.sequences) == self.texts.keys()
        for seq, text in self.texts.items():
            for number, (found, wanted) in enumerate(zip(stored(self.cache, seq), text[0], strict=True)):
                sure = len(wanted) - sum(call.counts.get(seq, 0) for call in self.live if number // 2 not in call.written)
                assert torch.equal(found[:sure], wanted[:sure]), f"rows of sequence {seq} were lost"
        assert f"{self.cache.num_free_blocks} of {self.cache.geometry.num_blocks} blocks" in repr(self.cache)
        assert_consistent(self.cache)
