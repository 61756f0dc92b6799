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


ROWS = torch.ones(1, 1, 16)


@pytest.mark.parametrize(
    ("act", "every"),
    [(lambda cache: cache.append({1: 6, 2: 9, 0: 1}), 1), (lambda cache: cache.write(0, ROWS, ROWS, cache.append({2: 1})), 3)],
    ids=["append", "write"],
)
def test_interrupted_at_any_line(act, every):
    """Those that do more than bookkeeping; of saves: ``test_snapshot.py``."""
    before = small_cache()
    for point, cache in points(lambda: copy.deepcopy(before), act, 5, every):
        assert_consistent(cache)
        if point % 12 == 0:
            for seq in before.sequences:
                cache.truncate(seq, before.length(seq))
            assert_goes_on_alike(cache, copy.deepcopy(before))


def test_the_first_write_of_a_mode_interrupted_at_any_line():
    """It defines the mode's ops, which are the process's."""
    numbers = itertools.count()

    def make() -> tuple[PagedKVCache, Any]:
        backend = type("Fresh", (NoneBackend,), {"mode": f"fresh_{next(numbers)}"})()
        cache = PagedKVCache(backend, num_blocks=1, num_kv_heads=1, head_size=16, dtype=torch.float32)
        return cache, cache.append({cache.allocate_sequence(): 1})

    for _, (cache, step) in points(make, lambda made: made[0].write(0, ROWS, ROWS, made[1]), 20, every=5):
        cache.write(0, ROWS, ROWS, step)
        assert torch.equal(cache.attend(0, ROWS, step), ROWS)


@pytest.mark.parametrize(
    "act",
    [
        lambda table: table.commit(table.plan({1: 6, 2: 9, 0: 1})),
        SequenceTable.add,
        lambda table: table.fork(1),
        lambda table: table.free(0),
        lambda table: table.truncate(1, 5),
    ],
    ids=["append", "allocate", "fork", "free", "truncate"],
)
def test_interrupted_at_any_instruction_of_the_bookkeeping(act):
    """Between two instructions of one line, too: what comes out is the table before, or the one after."""
    before = small_cache()._table
    act(after := copy.deepcopy(before))
    for _, table in points(lambda: copy.deepcopy(before), act, 20, opcodes=True):
        assert table.saved() in (before.saved(), after.saved())
        assert len(table.pool.peek(table.pool.num_free)) == table.pool.counts().count(0)
        table.free(1)
        table.commit(table.plan({2: 9}))
        SequenceTable(BlockPool(12), 8).restore(table.saved(), table.next_id)
