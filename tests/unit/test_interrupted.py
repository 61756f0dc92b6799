"""An exception at any point of an operation, Ctrl-C included, leaves the cache as before the operation or as after it."""

import copy
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import kvq_core
from cache_checks import assert_consistent, assert_goes_on_alike, interrupted, shared_cache
from kvq_core import PagedKVCache
from kvq_core.cache.blocks import BlockPool
from kvq_core.cache.sequences import SequenceTable
from kvq_core.none import NoneBackend

CORE = str(Path(kvq_core.__file__).parent)
BOOKKEEPING = ("sequences.py", "blocks.py", "contextlib.py")

pytestmark = pytest.mark.usefixtures("torch_path")


def points(make: Callable[[], Any], act: Callable[[Any], object], least: int, every: int = 1, opcodes: bool = False) -> Iterator[Any]:
    """For every ``every``-th line of the core that runs (``opcodes``: instruction of the bookkeeping): its number, and what ``make`` made
    after ``act`` on it was interrupted there. There are ``least`` lines or more."""

    def within(file: str) -> bool:
        return file.endswith(BOOKKEEPING) if opcodes else file.startswith(CORE)

    for point in itertools.count(0, every):
        made = make()
        if interrupted(lambda made=made: act(made), point, within, opcodes=opcodes) <= point:  # type: ignore[misc]
            assert point >= least
            return
        yield point, made


def small_cache() -> PagedKVCache:
    return shared_cache("int8", num_kv_heads=1, head_size=16, head_size_v=None, num_layers=1, dtype=torch.float32)


def shared_table() -> SequenceTable:
    """The sequences of ``small_cache``."""
    table = SequenceTable(BlockPool(12), 8)
    for count in (12, 3):
        seq = table.add()
        table.commit(table.plan({seq: count}))
        if seq == 0:
            table.fork(seq)
    return table


def append_and_write(cache: PagedKVCache, new_tokens: dict[int, int]) -> None:
    step = cache.append(new_tokens)
    cache.write(0, torch.ones(step.num_tokens, 1, 16), torch.ones(step.num_tokens, 1, 16), step)


OPERATIONS = {"append": lambda cache: cache.append({1: 6, 2: 9, 0: 1}), "write": lambda cache: append_and_write(cache, {2: 1})}


@pytest.mark.parametrize("name", OPERATIONS)
def test_interrupted_at_any_line(name):
    """Those that do more than bookkeeping; of saves: ``test_killed_saves.py``."""
    before = small_cache()
    for point, cache in points(lambda: copy.deepcopy(before), OPERATIONS[name], 5, 3 if name == "write" else 1):
        assert_consistent(cache)
        if point % 12 == 0:
            for seq in before.sequences:
                cache.truncate(seq, before.length(seq))
            assert_goes_on_alike(cache, copy.deepcopy(before))


def test_the_first_write_of_a_mode_interrupted_at_any_line():
    """It defines the mode's ops, which are the process's."""
    rows, numbers = torch.ones(2, 1, 16), itertools.count()

    def make() -> tuple[PagedKVCache, Any]:
        backend = type("Fresh", (NoneBackend,), {"mode": f"fresh_{next(numbers)}"})()
        cache = PagedKVCache(backend, num_blocks=1, num_kv_heads=1, head_size=16, dtype=torch.float32)
        return cache, cache.append({cache.allocate_sequence(): 2})

    for _, (cache, step) in points(make, lambda made: made[0].write(0, rows, rows, made[1]), 20, every=5):
        cache.write(0, rows, rows, step)
        assert torch.equal(cache.attend(0, rows, step), rows)


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
    before, after = shared_table().saved(), shared_table()
    TABLE_OPERATIONS[name](after)
    for _, table in points(shared_table, TABLE_OPERATIONS[name], 20, opcodes=True):
        assert table.saved() in (before, after.saved())
        assert len(table.pool.peek(table.pool.num_free)) == table.pool.counts().count(0)
        table.free(1)
        table.commit(table.plan({2: 9}))
        SequenceTable(BlockPool(12), 8).restore(table.saved(), table.next_id)
