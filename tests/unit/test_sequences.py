"""Bookkeeping of blocks and sequences: growth, sharing, copies before a write, and which steps are still good."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvq_core.cache.blocks import BlockPool
from kvq_core.cache.sequences import SequenceTable
from kvq_core.errors import ArgumentError, KVQError, OutOfBlocksError

pytestmark = pytest.mark.quick
BLOCK = 8
COUNTS = st.sampled_from([1, 3, BLOCK, BLOCK, 2 * BLOCK, 20])


def table(num_blocks=8):
    return SequenceTable(BlockPool(num_blocks), BLOCK)


def grow(sequences, counts):
    growth = sequences.plan(counts)
    sequences.commit(growth)
    return growth


def state(sequences):
    return sequences.saved(), list(sequences.pool.peek(sequences.pool.num_free)), sequences.clock, sequences.next_id


@given(st.data())
@settings(max_examples=100)
def test_tokens_stay_where_they_were_put(data):
    """Any order of operations over few blocks: tokens come back from their slots, blocks are counted, and no copy is made in vain."""
    t, memory, tokens, new, born = table(num_blocks=7), {}, {}, 0, []
    for _ in range(data.draw(st.integers(1, 25))):
        kind = data.draw(st.sampled_from(["add", "fork", "free", "truncate", "append", "append", "append"]))
        if kind == "add" or not tokens:
            born.append(t.add())
            tokens[born[-1]] = []
            continue
        seq = data.draw(st.sampled_from(sorted(tokens)))
        if kind == "fork":
            free = t.pool.num_free
            born.append(t.fork(seq))
            tokens[born[-1]] = tokens[seq]
            assert t.pool.num_free == free, "a fork takes no block"
        elif kind == "free":
            t.free(seq)
            del tokens[seq]
        elif kind == "truncate":
            length = data.draw(st.sampled_from([*range(len(tokens[seq]) + 1), len(tokens[seq]) // BLOCK * BLOCK]))
            t.truncate(seq, length)
            tokens[seq] = tokens[seq][:length]
        else:
            counts = data.draw(st.dictionaries(st.sampled_from(sorted(tokens)), COUNTS, min_size=1))
            # Of the holders of a block that is not full, each that appends needs a copy, but for the last if no other is left.
            last = {seq: t.get(seq).blocks[-1] for seq in counts if len(tokens[seq]) % BLOCK}
            copies = sum(min(n, t.pool.holders(block) - 1) for block, n in Counter(last.values()).items())
            fresh = sum(-(-(len(tokens[seq]) + n) // BLOCK) - -(-len(tokens[seq]) // BLOCK) for seq, n in counts.items())
            before, free = state(t), t.pool.num_free
            try:
                growth = t.plan(counts)
            except OutOfBlocksError as error:
                assert copies + fresh > free and isinstance(error, KVQError) and state(t) == before
                assert str(error) == f"need {copies + fresh} free blocks, have {free} of 7"
                continue
            assert state(t) == before, "a plan changes nothing"
            assert list(before[1][: growth.num_taken]) == list(t.pool.peek(growth.num_taken))
            t.commit(growth)
            assert (len(growth.copies), free - t.pool.num_free) == (copies, copies + fresh)
            for source, target in growth.copies:
                memory |= {(target, i): memory.get((source, i)) for i in range(BLOCK)}
            for row in growth.rows:
                written = list(range(new, new + row.end - row.start))
                new += len(written)
                tokens[row.sequence] = tokens[row.sequence] + written
                memory |= {(row.blocks[p // BLOCK], p % BLOCK): x for p, x in zip(range(row.start, row.end), written, strict=True)}
        for seq, kept in tokens.items():
            found = t.get(seq)
            assert (found.length, len(found.blocks)) == (len(kept), -(-len(kept) // BLOCK))
            assert [memory[found.blocks[p // BLOCK], p % BLOCK] for p in range(len(kept))] == kept
        assert born == list(range(t.next_id)), "ids are never used again"
        held = Counter(block for seq in tokens for block in t.get(seq).blocks)
        assert t.pool.counts() == [held[block] for block in range(7)]
        assert sorted([*t.pool.peek(t.pool.num_free), *held]) == list(range(7))
        again = table(num_blocks=7)
        again.restore(t.saved(), t.next_id)
        assert (again.saved(), again.next_id, again.pool.num_free) == (t.saved(), t.next_id, t.pool.num_free)


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
    b = t.fork(a)
    grow(t, {b: 9, t.add(): 1})
    t.free(a)
    saved = t.saved()
    saved[name] = change(saved[name])
    with pytest.raises(ArgumentError, match=message):
        table().restore(saved, t.next_id)
