"""Bookkeeping of sequences: growth, sharing, copies before a write, and which steps are still good."""

import pytest

from kvq_core.cache.blocks import BlockPool
from kvq_core.cache.sequences import SequenceTable
from kvq_core.errors import ArgumentError, OutOfBlocksError

pytestmark = pytest.mark.quick


def table(num_blocks=8, block_size=8):
    return SequenceTable(BlockPool(num_blocks), block_size)


def grow(sequences, counts):
    growth = sequences.plan(counts)
    sequences.commit(growth)
    return growth


def blocks(sequences, sequence):
    return list(sequences.get(sequence).blocks)


def test_growth_takes_a_block_only_when_the_last_is_full():
    t = table()
    a = t.add()
    for count, held in ((1, 1), (7, 1), (1, 2), (15, 3)):
        grow(t, {a: count})
        assert len(blocks(t, a)) == held
    assert t.get(a).length == 24


def test_plan_changes_nothing():
    t = table()
    a = t.add()
    grow(t, {a: 5})
    before = (t.saved(), t.pool.num_free, t.clock)
    t.plan({a: 30})
    assert (t.saved(), t.pool.num_free, t.clock) == before


def test_fork_shares_and_the_first_to_append_gets_the_copy():
    t = table()
    a = t.add()
    grow(t, {a: 11})
    b = t.fork(a)
    assert blocks(t, a) == blocks(t, b)
    assert t.pool.num_free == 6
    old = blocks(t, a)
    growth = grow(t, {a: 1})
    assert growth.copies == ((old[1], blocks(t, a)[1]),)
    assert blocks(t, a)[0] == old[0] and blocks(t, b) == old
    assert grow(t, {b: 1}).copies == (), "b alone holds its last block by now"


def test_when_all_holders_append_at_once_the_last_keeps_the_original():
    t = table()
    a = t.add()
    grow(t, {a: 3})
    b, c = t.fork(a), t.fork(a)
    (original,) = blocks(t, a)
    growth = grow(t, {a: 1, b: 1, c: 1})
    assert [source for source, _ in growth.copies] == [original, original]
    assert blocks(t, c) == [original]
    assert len({*blocks(t, a), *blocks(t, b), *blocks(t, c)}) == 3
    assert t.pool.num_free == 5


def test_a_full_shared_block_is_not_copied():
    t = table()
    a = t.add()
    grow(t, {a: 8})
    b = t.fork(a)
    assert grow(t, {a: 1, b: 1}).copies == ()
    assert blocks(t, a)[0] == blocks(t, b)[0]


def test_truncating_into_a_shared_full_block_makes_it_partial_and_copied():
    t = table()
    a = t.add()
    grow(t, {a: 16})
    b = t.fork(a)
    t.truncate(a, 12)
    shared = blocks(t, b)
    assert blocks(t, a) == shared
    growth = grow(t, {a: 1})
    assert [source for source, _ in growth.copies] == [shared[1]]
    assert blocks(t, b) == shared


def test_truncate_gives_back_what_nobody_else_holds():
    t = table()
    a = t.add()
    grow(t, {a: 24})
    b = t.fork(a)
    t.truncate(a, 8)
    assert (len(blocks(t, a)), t.pool.num_free) == (1, 5)
    t.truncate(b, 0)
    assert (blocks(t, b), t.pool.num_free) == ([], 7)


def test_copies_count_as_blocks_needed():
    t = table(num_blocks=2)
    a = t.add()
    grow(t, {a: 12})
    b = t.fork(a)
    before = t.saved()
    with pytest.raises(OutOfBlocksError, match="need 1 free blocks, have 0 of 2"):
        t.plan({b: 1})
    assert t.saved() == before
    t.free(a)
    assert grow(t, {b: 1}).copies == ()


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


def test_ids_are_never_used_again():
    t = table()
    a = t.add()
    t.free(a)
    assert t.add() != a


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({}, "new_tokens: got no sequence"),
        ({0: 0}, r"new_tokens\[0\]: got 0, need a positive integer"),
        ({0: -3}, r"new_tokens\[0\]: got -3"),
        ({0: 1.5}, r"new_tokens\[0\]: got 1.5, need an integer"),
        ({0: 1, 7: 1}, "new_tokens: got sequence 7"),
        ({"a": 1}, "new_tokens: got 'a'"),
    ],
)
def test_bad_appends(counts, message):
    t = table()
    t.add()
    before = t.saved()
    with pytest.raises(ArgumentError, match=message):
        t.plan(counts)
    assert t.saved() == before


@pytest.mark.parametrize("length", [-1, 6, 1.0])
def test_bad_lengths(length):
    t = table()
    a = t.add()
    grow(t, {a: 5})
    with pytest.raises(ArgumentError, match="length: got"):
        t.truncate(a, length)
    assert t.get(a).length == 5


def saved_table():
    t = table()
    a = t.add()
    grow(t, {a: 11})
    b = t.fork(a)
    grow(t, {b: 9, t.add(): 1})
    t.free(a)
    return t


def test_saved_and_restored():
    t, again = saved_table(), table()
    again.restore(t.saved(), t.next_id)
    assert again.saved() == t.saved()
    assert (again.next_id, again.pool.num_free) == (t.next_id, t.pool.num_free)


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
    t = saved_table()
    saved = t.saved()
    saved[name] = change(saved[name])
    with pytest.raises(ArgumentError, match=message):
        table().restore(saved, t.next_id)
