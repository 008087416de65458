"""What the router knows of the engines' prefix caches."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.core.kv.prefix import BlockHash, extend_chain
from headway.core.terms import Terms
from headway.routing.prefixes import AssignedPrefixes
from headway.routing.requests import RoutedRequest
from tests.support.harness import make_request


def chain(*parts: int, salt: str = "") -> list[BlockHash]:
    hashes: list[BlockHash] = []
    extend_chain(hashes, parts, 1, salt)
    return hashes


def prefixes(num_engines: int = 2, max_blocks: int = 8) -> AssignedPrefixes:
    made = AssignedPrefixes()
    for number in range(num_engines):
        made.add_engine(number, max_blocks)
    return made


def test_a_match_counts_from_the_root():
    known = prefixes()
    known.note(0, chain(1, 2, 3), 1)
    known.note(1, chain(1, 2), 2)
    match = known.match(chain(1, 2, 3, 4))
    assert (match.num_blocks(0), match.num_blocks(1)) == (3, 2)
    assert known.match(chain(2, 3)).levels == ()
    assert known.match([]).levels == ()


def test_cache_groups_share_nothing():
    known = prefixes()
    known.note(0, chain(1, 2, salt="a"), 1)
    assert known.match(chain(1, 2, salt="b")).levels == ()


def test_the_last_blocks_of_the_oldest_chain_go_first():
    known = prefixes(1, max_blocks=4)
    known.note(0, chain(1, 2, 3), 1)
    known.note(0, chain(1, 9, 8), 2)
    assert known.match(chain(1, 2, 3)).num_blocks(0) == 2
    assert known.match(chain(1, 9, 8)).num_blocks(0) == 3
    known.check()


def test_a_chain_longer_than_the_cache_keeps_its_start():
    known = prefixes(1, max_blocks=2)
    known.note(0, chain(1, 2, 3, 4), 1)
    assert known.match(chain(1, 2, 3, 4)).num_blocks(0) == 2


def test_a_retracted_note_leaves_what_others_noted():
    known = prefixes(1)
    known.note(0, chain(1, 2), 1)
    known.note(0, chain(1, 3, 4), 2)
    known.retract(0, chain(1, 3, 4)[1:], 2)
    assert known.match(chain(1, 3, 4)).num_blocks(0) == 1
    assert known.match(chain(1, 2)).num_blocks(0) == 2


def test_a_removed_engine_is_forgotten():
    known = prefixes()
    known.note(0, chain(1, 2), 1)
    known.note(1, chain(1), 2)
    known.remove_engine(0)
    assert known.match(chain(1, 2)).num_blocks(0) == 0
    assert known.match(chain(1, 2)).num_blocks(1) == 1
    known.check()


CHAINS = st.lists(st.integers(0, 2), min_size=1, max_size=6)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.integers(0, 2), CHAINS, st.sampled_from("nrd")), max_size=40))
def test_a_block_is_never_there_without_those_before_it(actions):
    known = prefixes(3, max_blocks=5)
    for order, (number, parts, action) in enumerate(actions, 1):
        hashes = chain(*parts)
        if action == "n":
            known.note(number, hashes, order)
        elif action == "d":
            known.drop_older(number, order - 3)
        known.check()
        for end in range(1, len(hashes) + 1):
            holders = known.match(hashes[:end])
            for level in holders.levels:
                assert level.num_blocks <= end
        # Every block that an engine has is found from the root.
        for one in range(3):
            depth = known.match(hashes).num_blocks(one)
            rest = known._blocks[one].keys() & set(hashes[depth:])
            assert not rest


def test_the_router_hashes_as_the_engine_does():
    """With a salt too; a request that is scored matches nothing."""
    for salt in ("", "s"):
        terms = Terms("t", cache_group="g", cache_salt=salt)
        request = make_request("a", list(range(40)), terms=terms)
        extend_chain(request.block_hashes, request.token_ids, 4, terms.prefix_salt)
        routed = RoutedRequest(request, 0.0)
        assert routed.hashes(4) == request.block_hashes
        assert routed.matchable(4) == request.block_hashes[:9]
    assert Terms(cache_group="g", cache_salt="s").prefix_salt != "g"
    scored = make_request("b", list(range(40)), prompt_logprobs=0)
    assert RoutedRequest(scored, 0.0).matchable(4) == []
