from __future__ import annotations

import subprocess
import sys
from collections import Counter
from itertools import islice

import pytest

from headway.errors import ConfigError
from headway.workload import (
    ClosedLoop,
    Content,
    Fixed,
    Gamma,
    Poisson,
    Prefixes,
    Synthetic,
    Tenants,
    Uniform,
    Vocabulary,
    WorkItem,
    parse_prefixes,
    parse_tenants,
    parse_vocabulary,
)


def first(workload: Synthetic, num: int, seed: int = 0) -> list[WorkItem]:
    return list(islice(workload.items(seed), num))


BASIC = Synthetic(Poisson(2.0), Uniform(10, 50), Uniform(1, 9))


def test_a_seed_fixes_everything():
    assert first(BASIC, 50) == first(BASIC, 50)
    assert first(BASIC, 50) != first(BASIC, 50, seed=1)


def test_the_rate_moves_only_the_times():
    slow, fast = first(BASIC, 50), first(BASIC.with_rate(20.0), 50)
    assert [item.prompt_token_ids for item in slow] == [item.prompt_token_ids for item in fast]
    assert [item.num_output_tokens for item in slow] == [item.num_output_tokens for item in fast]
    assert [item.at / 10 for item in slow] == pytest.approx([item.at for item in fast])


def test_a_closed_loop_has_callers_and_no_rate():
    closed = Synthetic(ClosedLoop(8), Fixed(5), Fixed(5))
    assert (closed.concurrency, closed.mean_rate) == (8, None)
    assert (BASIC.concurrency, BASIC.mean_rate) == (None, 2.0)
    assert {item.at for item in first(closed, 10)} == {0.0}
    with pytest.raises(ConfigError, match="closed loop has no rate"):
        closed.with_rate(2.0)


def test_token_ids_stay_in_the_vocabulary():
    content = Content(Vocabulary(7, 11))
    items = first(Synthetic(Poisson(1), Fixed(50), Fixed(1), content), 20)
    assert {number for item in items for number in item.prompt_token_ids} == {7, 8, 9, 10}


def test_tenants_ask_by_zipf_weights():
    content = Content(tenants=Tenants(5, 1.0))
    items = first(Synthetic(Gamma(1, 2), Fixed(1), Fixed(1), content), 20_000)
    counts = Counter(item.tenant for item in items)
    assert set(counts) == set(content.tenants.names)
    for name, share in zip(content.tenants.names, content.tenants.shares, strict=True):
        assert counts[name] / 20_000 == pytest.approx(share, abs=0.01)
    assert content.tenants.shares[0] == pytest.approx(5 * content.tenants.shares[4])


def test_one_tenant_needs_no_name():
    assert {item.tenant for item in first(BASIC, 10)} == {None}


def test_a_share_of_prompts_begins_with_a_prefix_of_its_tenant():
    content = Content(tenants=Tenants(2, 0.0), prefixes=Prefixes(0.35, num=3, num_tokens=40))
    items = first(Synthetic(Poisson(1), Fixed(60), Fixed(1), content), 6000)
    assert {len(item.prompt_token_ids) for item in items} == {60}
    starts = Counter((item.tenant, item.prompt_token_ids[:40]) for item in items)
    shared = {start: count for start, count in starts.items() if count > 1}
    assert len(shared) == 2 * 3
    assert sum(shared.values()) / 6000 == pytest.approx(0.35, abs=0.03)
    assert len({tokens for _, tokens in shared}) == 6
    assert len({item.prompt_token_ids for item in items}) == 6000


def test_a_prompt_too_short_for_its_prefix_is_made_longer():
    content = Content(prefixes=Prefixes(1.0, num_tokens=40))
    items = first(Synthetic(Poisson(1), Fixed(5), Fixed(1), content), 10)
    assert {len(item.prompt_token_ids) for item in items} == {41}
    assert len({item.prompt_token_ids[:40] for item in items}) == 1


def test_what_is_written_is_what_is_meant():
    assert parse_tenants("30,zipf=0.5") == Tenants(30, 0.5)
    assert parse_tenants("4") == Tenants(4)
    assert parse_prefixes("0.35,count=4,tokens=128") == Prefixes(0.35, 4, 128)
    assert parse_prefixes("0") == Prefixes()
    assert parse_vocabulary("5,9") == Vocabulary(5, 9)


def test_what_is_wrong_is_answered_with_what_is_right():
    for text in ("", "0", "1.5", "3,slope=2", "3,zipf=-1"):
        with pytest.raises(ConfigError, match="zipf=EXPONENT"):
            parse_tenants(text)
    for text in ("", "2", "-0.1", "0.5,count=0", "0.5,tokens=0", "0.5,length=3"):
        with pytest.raises(ConfigError, match="SHARE"):
            parse_prefixes(text)
    for text in ("", "5", "9,5", "5,5", "-1,5", "a,b"):
        with pytest.raises(ConfigError, match="LOW,HIGH"):
            parse_vocabulary(text)


def test_only_the_standard_library_is_needed():
    code = (
        "import sys, headway.workload as w; "
        "heavy = {'numpy', 'torch', 'msgspec', 'rich', 'httpx', 'headway.bench', 'headway.server'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
