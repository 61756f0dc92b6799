"""An exception at any point of an operation, Ctrl-C included, leaves the cache as before the operation or as after it."""

import copy
import itertools
import pickle
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import kvq_core
from cache_checks import assert_consistent, assert_goes_on_alike, forward, is_leaving_with
from kvq_core import PagedKVCache
from kvq_core.cache.blocks import BlockPool
from kvq_core.cache.sequences import SequenceTable
from kvq_core.none import NoneBackend

CORE = str(Path(kvq_core.__file__).parent)
BOOKKEEPING = ("sequences.py", "blocks.py", "contextlib.py")


@pytest.fixture(autouse=True)
def torch_path(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


class InterruptAt:
    """Raises KeyboardInterrupt at the nth line of kvq_core, or, with ``opcodes``, at the nth instruction of the bookkeeping."""

    def __init__(self, moment: int, *, opcodes: bool = False) -> None:
        self.left, self.opcodes = moment, opcodes
        self.lines: dict[FrameType, int] = {}

    def __enter__(self) -> None:
        sys.settrace(self)

    def __exit__(self, *raised: object) -> None:
        sys.settrace(None)

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        if not (name.endswith(BOOKKEEPING) if self.opcodes else name.startswith(CORE)):
            return None
        frame.f_trace_opcodes = self.opcodes
        last_line, self.lines[frame] = self.lines.get(frame, 0), frame.f_lineno
        if event == ("opcode" if self.opcodes else "line") and (self.opcodes or not is_leaving_with(frame, last_line)):
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
        return self


def shared_cache(smoothing: str | None = None) -> PagedKVCache:
    """Sequences 0 and 1 share two blocks, the second half full; 2 has one of its own."""
    cache = PagedKVCache(
        "int8", num_blocks=12, block_size=8, num_kv_heads=1, head_size=16, num_layers=1, dtype=torch.float32, smoothing=smoothing
    )
    forward(cache, {cache.allocate_sequence(): 12})
    cache.fork(0)
    forward(cache, {cache.allocate_sequence(): 3})
    return cache


def shared_table() -> SequenceTable:
    """The same sequences."""
    table = SequenceTable(BlockPool(12), 8)
    for count in (12, 3):
        seq = table.add()
        table.commit(table.plan({seq: count}))
        if seq == 0:
            table.fork(seq)
    return table


def meet(cache: PagedKVCache, twin: PagedKVCache) -> None:
    """Undo in ``cache`` what an operation added, and do in ``twin`` what it took away."""
    for one, other in ((cache, twin), (twin, cache)):
        for seq in set(one.sequences) - set(other.sequences):
            one.free(seq)
    for seq in cache.sequences:
        kept = min(cache.length(seq), twin.length(seq))
        cache.truncate(seq, kept)
        twin.truncate(seq, kept)


def append_and_write(cache: PagedKVCache, new_tokens: dict[int, int]) -> None:
    step = cache.append(new_tokens)
    cache.write(0, torch.ones(step.num_tokens, 1, 16), torch.ones(step.num_tokens, 1, 16), step)


OPERATIONS = {
    "append": lambda cache, path: cache.append({1: 6, 2: 9, 0: 1}),
    "write": lambda cache, path: append_and_write(cache, {2: 1}),
    "allocate": lambda cache, path: cache.allocate_sequence(),
    "fork": lambda cache, path: cache.fork(1),
    "free": lambda cache, path: cache.free(0),
    "truncate": lambda cache, path: cache.truncate(1, 5),
    "roll back": lambda cache, path: (cache.append({1: 20}), cache.truncate(1, 12)),
    "save": lambda cache, path: cache.save(path),
    "load": lambda cache, path: PagedKVCache.load(path),
    "copy": lambda cache, path: copy.copy(cache),
    "pickle": lambda cache, path: pickle.loads(pickle.dumps(cache)),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_interrupted_at_any_line(name, tmp_path):
    path, before, operation = tmp_path / "kv", shared_cache(), OPERATIONS[name]
    before.save(path)
    old, points = path.read_bytes(), 0
    while True:
        cache = copy.deepcopy(before)
        try:
            with InterruptAt(points):
                operation(cache, path)
            break
        except KeyboardInterrupt:
            points += 1
        assert_consistent(cache)
        assert path.read_bytes() == old
        assert all(file == path or file.match(".kv.*.part") for file in tmp_path.iterdir())
        if points % 8 == 1:
            twin = copy.deepcopy(before)
            meet(cache, twin)
            assert_goes_on_alike(cache, twin)
    assert points >= 5


def test_the_first_write_of_a_mode_interrupted_at_any_line():
    """It defines the mode's ops, which are the process's."""
    for point in itertools.count():
        backend = type("Fresh", (NoneBackend,), {"mode": f"fresh_{point}"})()
        cache = PagedKVCache(backend, num_blocks=1, num_kv_heads=1, head_size=16, dtype=torch.float32)
        step, rows = cache.append({cache.allocate_sequence(): 2}), torch.ones(2, 1, 16)
        try:
            with InterruptAt(point):
                cache.write(0, rows, rows, step)
            break
        except KeyboardInterrupt:
            cache.write(0, rows, rows, step)
        assert torch.equal(cache.attend(0, rows, step), rows)
    assert point > 50


TABLE_OPERATIONS = {
    "append": lambda table: table.commit(table.plan({1: 6, 2: 9, 0: 1})),
    "allocate": SequenceTable.add,
    "fork": lambda table: table.fork(1),
    "free": lambda table: table.free(0),
    "truncate": lambda table: table.truncate(1, 5),
}


@pytest.mark.parametrize("name", TABLE_OPERATIONS)
def test_interrupted_at_any_instruction_of_the_bookkeeping(name):
    """Between two instructions of one line, too: what comes out is the table before, or the one after."""
    points, operation = 0, TABLE_OPERATIONS[name]
    while True:
        table = shared_table()
        before, after = table.saved(), copy.deepcopy(table)
        operation(after)
        try:
            with InterruptAt(points, opcodes=True):
                operation(table)
            break
        except KeyboardInterrupt:
            points += 1
        assert table.saved() in (before, after.saved())
        assert len(table.pool.peek(table.pool.num_free)) == table.pool.counts().count(0)
        table.free(1)
        table.commit(table.plan({2: 9}))
        again = SequenceTable(BlockPool(12), 8)
        again.restore(table.saved(), table.next_id)
    assert points >= 20


@pytest.mark.parametrize("failing", range(4))
def test_no_memory_for_a_copied_block(failing, monkeypatch):
    cache = shared_cache()
    twin, calls = copy.deepcopy(cache), iter(range(9))

    def copied(*arguments: Any) -> torch.Tensor:
        if next(calls) == failing:
            raise torch.OutOfMemoryError("no memory")
        return real(*arguments)

    real = torch.Tensor.index_copy_
    monkeypatch.setattr(torch.Tensor, "index_copy_", copied)
    with pytest.raises(torch.OutOfMemoryError):
        forward(cache, {1: 6, 2: 9})
    monkeypatch.undo()
    assert_consistent(cache)
    meet(cache, twin)
    assert_goes_on_alike(cache, twin)
