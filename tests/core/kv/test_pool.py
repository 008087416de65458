"""BlockPool: allocation order, reference counts and eviction order."""

from __future__ import annotations

import pytest

from headway.core.executor import HashedBlock
from headway.core.kv.pool import BlockPool
from headway.core.kv.prefix import BlockHash


def hash_of(number: int) -> BlockHash:
    return BlockHash(bytes([number]) * 32)


def pool_with_cached(num_blocks: int, num_cached: int) -> tuple[BlockPool, list[int]]:
    """A pool in which a table of `num_cached` published blocks was freed."""
    pool = BlockPool(num_blocks)
    table = pool.allocate(num_cached)
    for at, block_id in enumerate(table):
        pool.publish(block_id, hash_of(at))
    pool.free(table)
    pool.check({})
    return pool, table


def test_all_blocks_can_be_allocated_once():
    pool = BlockPool(5)
    assert sorted(pool.allocate(5)) == [0, 1, 2, 3, 4]
    assert (pool.num_free, pool.num_used) == (0, 5)


def test_allocating_more_than_is_free_raises_and_allocates_nothing():
    pool = BlockPool(3)
    with pytest.raises(RuntimeError, match="cannot allocate 4 blocks, 3 are free"):
        pool.allocate(4)
    assert pool.num_free == 3
    pool.check({})


def test_a_pool_has_at_least_one_block():
    with pytest.raises(ValueError, match="at least 1"):
        BlockPool(0)


def test_a_block_is_free_without_its_last_owner():
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.add_references([block])
    pool.free([block])
    assert pool.num_used == 1
    pool.free([block])
    assert pool.num_used == 0
    pool.check({})


def test_freeing_a_block_without_an_owner_raises():
    pool = BlockPool(2)
    with pytest.raises(RuntimeError, match="has no owner"):
        pool.free([0])


def test_published_content_outlives_its_owner_and_can_be_shared_again():
    pool, table = pool_with_cached(4, 2)
    assert (pool.num_free, pool.num_cached) == (4, 2)
    assert pool.find(hash_of(1)) == table[1]
    pool.add_references(table)
    assert (pool.num_free, pool.num_cached) == (2, 0)
    pool.check(dict.fromkeys(table, 1))


def test_empty_blocks_are_allocated_before_cached_blocks():
    pool, table = pool_with_cached(4, 2)
    assert not set(pool.allocate(2)) & set(table)
    assert pool.num_cached == 2


def test_the_tail_of_a_freed_table_is_evicted_first():
    pool, table = pool_with_cached(3, 3)
    assert [pool.allocate(1)[0] for _ in range(3)] == table[::-1]


def test_an_evicted_block_is_no_longer_found():
    pool, _ = pool_with_cached(2, 2)
    pool.allocate(1)
    assert pool.find(hash_of(1)) is None
    assert pool.find(hash_of(0)) is not None


def test_the_least_recently_used_table_is_evicted_first():
    pool, table = pool_with_cached(2, 2)
    pool.add_references(table[1:])
    pool.free(table[1:])
    assert pool.allocate(1) == [table[0]]


def test_a_duplicate_is_not_indexed_and_is_empty_when_freed():
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.publish(first, hash_of(1))
    pool.publish(second, hash_of(1))
    pool.free([second])
    assert (pool.num_cached, pool.find(hash_of(1))) == (0, first)
    pool.check({first: 1})


def test_a_block_is_freeable_if_all_its_owners_free_it():
    pool = BlockPool(3)
    mine, shared = pool.allocate(2)
    pool.add_references([shared])
    assert pool.num_freeable([mine]) == 1
    assert pool.num_freeable([mine, shared]) == 1
    assert pool.num_freeable([mine, shared, shared]) == 2


def test_unowned_counts_blocks_that_sharing_would_use_up():
    pool, table = pool_with_cached(4, 2)
    pool.add_references(table[:1])
    assert pool.num_unowned(table) == 1


def test_check_sees_a_leak_and_a_block_without_an_owner():
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    with pytest.raises(AssertionError, match="1 references, 0 owners"):
        pool.check({})
    with pytest.raises(AssertionError, match="0 references, 1 owners"):
        pool.check({block: 1, 1 - block: 1})


def test_restored_blocks_are_cached_and_the_others_empty():
    pool = BlockPool(6)
    pool.restore([HashedBlock(4, hash_of(1), "a", 4), HashedBlock(2, hash_of(2), "b", 4)])
    pool.check({})
    assert (pool.num_free, pool.num_cached) == (6, 2)
    assert (pool.find(hash_of(1)), pool.find(hash_of(2))) == (4, 2)
    pool.add_references([4])
    assert set(pool.allocate(5)) == {0, 1, 2, 3, 5}
    pool.check(dict.fromkeys(range(6), 1))


def test_of_two_restored_blocks_with_one_hash_the_second_is_empty():
    pool = BlockPool(3)
    pool.restore([HashedBlock(0, hash_of(1), "", 4), HashedBlock(1, hash_of(1), "", 4)])
    pool.check({})
    assert pool.num_cached == 1


def test_a_withdrawn_block_is_not_found_and_empty_when_freed():
    pool = BlockPool(2)
    pool.restore([HashedBlock(1, hash_of(1), "", 2)])
    pool.add_references([1])
    pool.withdraw(1)
    pool.check({1: 1})
    assert pool.find(hash_of(1)) is None
    assert pool.publish(1, hash_of(2))
    pool.withdraw(1)
    pool.free([1])
    pool.check({})
    assert pool.num_cached == 0


def test_a_discarded_block_is_empty_and_not_found():
    pool = BlockPool(2)
    pool.restore([HashedBlock(1, hash_of(1), "", 4)])
    assert pool.is_cached(1)
    pool.discard(1)
    pool.check({})
    assert (pool.find(hash_of(1)), pool.num_cached, pool.num_free) == (None, 0, 2)
