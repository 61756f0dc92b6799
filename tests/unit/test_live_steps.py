"""Steps of different sequences that are live at a time, under a residual window: each reads and writes its own exact rows."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import kvq_core
from cache_checks import assert_consistent, attention, interrupted
from kvq_core import ArgumentError, PagedKVCache
from kvq_core.cache.sequences import SequenceTable
from kvq_core.cache.step import Step

pytestmark = pytest.mark.usefixtures("torch_path")
HEADS, SIZE, LAYERS = 2, 32, 2


@dataclass(eq=False)
class Call:
    """A live step of ``counts``: its ``rows`` [K and V of each layer, tokens, heads, size], which layers were written, and which last."""

    step: Step
    counts: dict[int, int]
    rows: torch.Tensor
    written: set[int] = field(default_factory=set)
    last: int | None = None


class Calls:
    """A cache in mode ``none``, where attention is over exact keys wherever they are read, with several live steps at a time."""

    def __init__(self, seed: int, **options: Any) -> None:
        self.random, self.generator = Random(seed), torch.Generator().manual_seed(seed)
        shape = {"num_kv_heads": HEADS, "head_size": SIZE, "num_layers": LAYERS, "dtype": torch.float32}
        self.cache = PagedKVCache("none", num_blocks=200, max_sequences=4, **shape, **options)
        self.texts = {self.cache.allocate_sequence(): torch.zeros(2 * LAYERS, 0, HEADS, SIZE) for _ in range(3)}
        self.live: list[Call] = []

    def interrupted(self, act: Callable[[], object]) -> bool:
        at = self.random.randrange(250)
        return interrupted(act, at, lambda file: file.startswith(kvq_core.__path__[0])) > at

    def settle(self, seq: int) -> None:
        """End the live step of ``seq``: written in all layers, or taken back."""
        for call in [call for call in self.live if seq in call.counts]:
            self.live.remove(call)
            if len(call.written) < LAYERS:
                for each, count in call.counts.items():
                    self.cut(each, self.texts[each].shape[1] - count)

    def cut(self, seq: int, length: int) -> None:
        self.settle(seq)
        self.cache.truncate(seq, length)
        self.texts[seq] = self.texts[seq][:, :length]

    def append(self) -> None:
        seqs = self.random.sample(list(self.texts), self.random.randint(1, 2))
        counts = {seq: self.random.choice([1, 3, 16, 17, 40, 70]) for seq in seqs}
        if self.random.random() < 0.2:
            lengths = {seq: self.cache.length(seq) for seq in seqs}
            self.interrupted(lambda: self.cache.append(counts))
            if any(self.cache.length(seq) > length for seq, length in lengths.items()):
                for seq, length in lengths.items():
                    self.cache.truncate(seq, length)
                    self.settle(seq)
            return  # what was live before is, still, if nothing has happened
        for seq in seqs:
            self.settle(seq)
        self.grow(counts, writes=False)

    def grow(self, counts: dict[int, int], *, writes: bool = True) -> Call:
        step = self.cache.append(counts)
        rows = torch.randn(2 * LAYERS, step.num_tokens, HEADS, SIZE, generator=self.generator)
        for seq, new in zip(counts, rows.split(list(counts.values()), 1), strict=True):
            self.texts[seq] = torch.cat((self.texts[seq], new), 1)
        self.live.append(Call(step, counts, rows))
        for layer in range(LAYERS if writes else 0):
            self.write(self.live[-1], layer, may_end=False)
        return self.live[-1]

    def write(self, call: Call, layer: int, *, may_end: bool = True) -> None:
        def act() -> None:
            self.cache.write(layer, *call.rows[2 * layer :][:2], call.step)

        call.last = None
        call.written.discard(layer)
        if may_end and self.random.random() < 0.2 and self.interrupted(act):
            return
        act()
        call.last = layer
        call.written.add(layer)

    def attend(self, call: Call, layer: int) -> None:
        q = torch.randn(call.step.num_tokens, 2 * HEADS, SIZE, generator=self.generator)
        is_staged, sizes = call.step.residual is not None and call.step.residual.staging is not None, list(call.counts.values())
        try:
            found = self.cache.attend(layer, q, call.step).split(sizes)
        except ArgumentError as refused:
            assert is_staged and layer != call.last and refused.argument == "layer"
            return
        if is_staged or layer in call.written:
            for seq, mine, result in zip(call.counts, q.split(sizes), found, strict=True):
                error = (result.double() - attention(mine, *self.texts[seq][2 * layer :][:2])).abs().max()
                assert error < 1e-5, f"sequence {seq}, {self.texts[seq].shape[1]} tokens: off by {error:.1e}"

    def change(self) -> None:
        """Fork, free, roll back or copy."""
        seq, kind = self.random.choice(list(self.texts)), self.random.randrange(4)
        if kind == 0:
            self.settle(seq)
            self.cut(seq, self.random.randint(0, self.texts[seq].shape[1]))
        elif kind == 1:
            self.cache, self.live = self.random.choice([copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])((self.cache, self.live))
            for call in self.live:
                call.last = None
        elif len(self.texts) == 4:
            self.settle(seq)
            self.cache.free(seq)
            del self.texts[seq]
        else:
            self.settle(seq)
            self.texts[self.cache.fork(seq)] = self.texts[seq]


@pytest.mark.parametrize("interrupts", [False, True])
def test_a_live_step_keeps_its_rows(interrupts: bool) -> None:
    """From a fork that has its last block alone now; from an append of its own sequence that did not happen."""
    calls = Calls(0, residual_length=16)
    first, other, third = calls.texts
    calls.grow({first: 40, third: 5})
    calls.texts[calls.cache.fork(first)] = calls.texts[first]
    fork = max(calls.texts)
    calls.cut(fork, 37)
    call = calls.grow({first: 3, third: 30}, writes=False)
    if interrupts:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(SequenceTable, "commit", Mock(side_effect=KeyboardInterrupt))
            calls.cache.append({first: 70, third: 70})
    for count in (3, 60):
        calls.grow({fork: count, other: 60})
    for layer in range(LAYERS):
        calls.write(call, layer, may_end=False)
        calls.attend(call, layer)


@settings(max_examples=100, deadline=None, phases=[Phase.generate], suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10**6), st.integers(1, 100), st.sampled_from([0, 20]))
def test_steps_of_different_sequences_in_any_order(seed: int, length: int, sinks: int) -> None:
    """Writes, repeated and interrupted ones among them, and reads of several live steps: one is as right as if it were alone."""
    calls = Calls(seed, residual_length=length, sink_tokens=sinks)
    for _ in range(50):
        act = calls.random.choices([calls.append, calls.change, calls.write, calls.attend], [4, 1, 8, 8])[0]
        if act in (calls.append, calls.change):
            act()
        elif calls.live:
            act(calls.random.choice(calls.live), calls.random.randrange(LAYERS))
        assert_consistent(calls.cache)
    for call in calls.random.sample(calls.live, len(calls.live)):
        for layer in range(LAYERS):
            calls.write(call, layer, may_end=False)
            calls.attend(call, layer)
    for seq in calls.texts:
        calls.cache.free(seq)
    assert calls.cache._exact is not None
    assert calls.cache.num_free_blocks == 200 and calls.cache._exact.table.end_block == 0
