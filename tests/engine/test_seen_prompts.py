"""What the API process takes to be in the engine's prefix cache."""

from __future__ import annotations

from headway.engine.seen_prompts import MAX_FAMILIES, NUM_FIRST, SeenPrompts


def prompt(family: int, common: int, rest: int = 0, own: int = 0) -> list[int]:
    return [family] * NUM_FIRST + list(range(common)) + [100_000 + own] * rest


def test_what_two_prompts_have_in_common_is_expected_to_be_cached():
    seen = SeenPrompts()
    seen.note("a", prompt(1, 500, rest=20, own=1))
    for num_rest in (0, 1, 7, 300):
        asked = prompt(1, 500, rest=num_rest, own=2)
        assert seen.num_cached("a", asked) == NUM_FIRST + 500
    assert seen.num_cached("a", prompt(1, 77)) == NUM_FIRST + 77
    assert seen.num_cached("a", prompt(1, 500, rest=20, own=1)) == NUM_FIRST + 520
    assert seen.num_cached("a", prompt(1, 0)[:5]) == 0


def test_groups_and_families_are_apart():
    seen = SeenPrompts()
    seen.note("a", prompt(1, 50))
    assert seen.num_cached("b", prompt(1, 50)) == 0
    assert seen.num_cached("a", prompt(2, 50)) == 0


def test_families_that_nobody_asked_for_lately_are_forgotten():
    seen = SeenPrompts()
    for family in range(MAX_FAMILIES):
        seen.note("a", prompt(family, 1))
    seen.note("a", prompt(0, 2))
    seen.note("a", prompt(MAX_FAMILIES, 1))
    found = [bool(seen.num_cached("a", prompt(family, 1))) for family in (0, 1, MAX_FAMILIES)]
    assert found == [True, False, True]
