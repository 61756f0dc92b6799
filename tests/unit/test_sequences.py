"""Bookkeeping of blocks and sequences: what is refused, and which steps are still good. Growth and sharing: test_any_order.py."""

import pytest

from kvq_core.cache.blocks import BlockPool
from kvq_core.cache.sequences import SequenceTable
from kvq_core.errors import ArgumentError

pytestmark = pytest.mark.quick


def table():
    return SequenceTable(BlockPool(8), 8)


def grow(sequences, counts):
    sequences.commit(sequences.plan(counts))


def state(sequences):
    return sequences.saved(), list(sequences.pool.peek(sequences.pool.num_free)), sequences.clock, sequences.next_id


def test_the_block_freed_last_goes_out_first():
    """It is the likeliest to be in a cache."""
    pool = BlockPool(5)
    assert list(pool.take(3)) == [0, 1, 2]
    pool.release([2])
    pool.release([0])
    assert list(pool.take(3)) == [0, 2, 3]


def test_a_step_is_stale_once_one_of_its_sequences_changed():
    t = table()
    a, b, c = t.add(), t.add(), t.add()
    for change in (lambda: grow(t, {a: 1}), lambda: t.truncate(a, 0), lambda: t.fork(a), lambda: t.free(a)):
        grow(t, {a: 1, b: 1})
        clock = t.clock
        grow(t, {c: 1})
        assert t.unchanged_since(clock, (a, b)), "another sequence's change does not matter"
        change()
        assert not t.unchanged_since(clock, (a, b))
        assert t.unchanged_since(clock, (b,))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: t.plan({}), "new_tokens: got no sequence"),
        (lambda t: t.plan({0: 0}), r"new_tokens\[0\]: got 0, need a positive integer"),
        (lambda t: t.plan({0: -3}), r"new_tokens\[0\]: got -3"),
        (lambda t: t.plan({0: 1.5}), r"new_tokens\[0\]: got 1.5, need an integer"),
        (lambda t: t.plan({0: 1, 7: 1}), "new_tokens: got sequence 7"),
        (lambda t: t.plan({"a": 1}), "new_tokens: got 'a'"),
        *((lambda t, length=length: t.truncate(0, length), "length: got") for length in (-1, 6, 1.0)),
    ],
)
def test_bad_calls_change_nothing(call, message):
    t = table()
    grow(t, {t.add(): 5})
    before = state(t)
    with pytest.raises(ArgumentError, match=message):
        call(t)
    assert state(t) == before


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("sequence_blocks", lambda x: [99, *x[1:]], r"sequence_blocks: got block 99, need 0 \.\. 7"),
        ("sequence_blocks", lambda x: [-1, *x[1:]], "sequence_blocks: got block -1"),
        ("sequence_blocks", lambda x: [x[0], x[0], *x[2:]], "sequence_blocks: got block .* again, in sequence 1"),
        ("sequence_blocks", lambda x: [*x[:-1], x[1]], "sequence_blocks: got block .* again, in sequence 2"),
        ("sequence_blocks", lambda x: x[1:], "sequence_blocks: got 3 blocks, need 4"),
        ("sequence_lengths", lambda x: x[1:], "got 1 lengths, need one of at least 0 for each of 2"),
        ("sequence_lengths", lambda x: [-1, *x[1:]], "sequence_lengths: got"),
        ("sequence_ids", lambda x: [x[0], x[0]], "sequence_ids: got .*, need unique ones below"),
        ("sequence_ids", lambda x: [x[0], 99], "sequence_ids: got"),
        ("block_holders", lambda x: [x[0] + 1, *x[1:]], "block_holders: got"),
        ("block_holders", lambda x: x[1:], "block_holders: got"),
    ],
)
def test_what_cannot_be_true_is_not_restored(name, change, message):
    t = table()
    a = t.add()
    grow(t, {a: 11})
    grow(t, {t.fork(a): 9, t.add(): 1})
    t.free(a)
    saved = t.saved()
    with pytest.raises(ArgumentError, match=message):
        table().restore(saved | {name: change(saved[name])}, t.next_id)
