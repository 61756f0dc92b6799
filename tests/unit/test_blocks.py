"""The pool hands out each block once, counts its holders, and hands out nothing when it has too little."""

from array import array

import pytest

from kvq_core.cache.blocks import BlockPool
from kvq_core.errors import KVQError, OutOfBlocksError

pytestmark = pytest.mark.quick


def test_hands_out_each_block_once():
    pool = BlockPool(5)
    assert list(pool.take(2)) == [0, 1]
    assert list(pool.take(3)) == [2, 3, 4]
    assert pool.num_free == 0
    assert list(pool.take(0)) == []


def test_peek_foretells_take_and_changes_nothing():
    pool = BlockPool(4)
    foretold = pool.peek(3)
    assert pool.num_free == 4
    assert pool.take(3) == foretold


def test_too_many_leaves_everything_as_it_was():
    pool = BlockPool(3)
    pool.take(1)
    with pytest.raises(OutOfBlocksError, match=r"need 3 free blocks, have 2 of 3") as caught:
        pool.take(3)
    assert isinstance(caught.value, KVQError)
    assert pool.num_free == 2
    assert list(pool.take(2)) == [1, 2]


def test_a_block_is_free_when_its_last_holder_lets_go():
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.hold([block])
    assert pool.holders(block) == 2
    pool.release([block])
    assert (pool.holders(block), pool.num_free) == (1, 1)
    pool.release([block])
    assert (pool.holders(block), pool.num_free) == (0, 2)
    assert list(pool.take(1)) == [block], "the block freed last goes out first: it is the likeliest to be in a cache"


def test_adopt_takes_blocks_wherever_they_lie():
    pool = BlockPool(4)
    pool.adopt(array("i", [2, 0, 2]))
    assert [pool.holders(block) for block in range(4)] == [1, 0, 2, 0]
    assert sorted(pool.take(2)) == [1, 3]
