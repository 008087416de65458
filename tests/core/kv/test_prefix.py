"""The hash chain and the index over it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.kv import prefix
from headway.core.kv.prefix import BlockHash, PrefixIndex, chain_start, extend_chain

TOKENS = st.lists(st.integers(0, 3), max_size=24)
Extend = Callable[[list[BlockHash], Sequence[int], int, str], None]
both = pytest.mark.parametrize(
    "extend", [extend_chain, prefix._extend_keys], ids=["CPython", "PyPy"]
)


def chain(extend: Extend, token_ids: list[int], salt: str = "") -> list[BlockHash]:
    hashes: list[BlockHash] = []
    extend(hashes, token_ids, 4, salt)
    return hashes


@both
@given(one=TOKENS, two=TOKENS)
def test_hashes_are_equal_exactly_as_far_as_the_full_blocks_are(
    extend: Extend, one: list[int], two: list[int]
):
    chains = zip(chain(extend, one), chain(extend, two), strict=False)
    for at, (left, right) in enumerate(chains, start=1):
        assert (left == right) == (one[: at * 4] == two[: at * 4])


@both
@given(token_ids=TOKENS, cut=st.integers(0, 24))
def test_extending_bit_by_bit_gives_the_same_chain(extend: Extend, token_ids: list[int], cut: int):
    hashes = chain(extend, token_ids[:cut])
    extend(hashes, token_ids, 4, "")
    assert hashes == chain(extend, token_ids)


@both
def test_only_full_blocks_are_hashed(extend: Extend):
    lengths = [len(chain(extend, list(range(length)))) for length in (0, 3, 4, 7, 8)]
    assert lengths == [0, 0, 1, 1, 2]


@both
def test_another_salt_shares_no_hash(extend: Extend):
    token_ids = list(range(12))
    assert not set(chain(extend, token_ids, "a")) & set(chain(extend, token_ids, "b"))
    assert chain(extend, token_ids, "a") == chain(extend, token_ids, "a")


@both
def test_a_block_hashes_differently_after_another_parent(extend: Extend):
    assert chain(extend, [1, 1, 1, 1, 2, 2, 2, 2])[1] != chain(extend, [2, 2, 2, 2])[0]


@both
def test_large_token_ids_do_not_collide_with_small_ones(extend: Extend):
    assert chain(extend, [2**32, 0, 0, 0]) != chain(extend, [0, 0, 0, 0])


def test_the_first_block_of_equal_content_wins():
    index = PrefixIndex()
    assert index.insert(chain_start("x"), 1)
    assert not index.insert(chain_start("x"), 2)
    assert (index.find(chain_start("x")), 2 in index, len(index)) == (1, False, 1)


def test_a_block_is_indexed_under_one_hash():
    index = PrefixIndex()
    index.insert(chain_start("x"), 1)
    assert not index.insert(chain_start("y"), 1)
    index.check()


def test_remove_clears_both_maps_and_ignores_unknown_blocks():
    index = PrefixIndex()
    index.insert(chain_start("x"), 1)
    index.remove(1)
    index.remove(1)
    assert index.find(chain_start("x")) is None
    assert len(index) == 0
    index.check()


def test_check_finds_maps_that_differ():
    index = PrefixIndex()
    index.insert(chain_start("x"), 1)
    index._hash_of[2] = chain_start("y")
    with pytest.raises(AssertionError, match="differ"):
        index.check()
