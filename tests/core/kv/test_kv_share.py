"""KV quotas of tenants, and the eviction of cached blocks by cache group."""

from __future__ import annotations

from typing import Any

import pytest

from headway.core.causes import WaitCause
from headway.core.events import Admitted, Preempted
from headway.core.executor import Capacity
from headway.core.kv.eviction import CachedBlocks
from headway.core.params import SamplingParams
from headway.core.running.admission import PeakDemand, max_tokens_for, refuse_if_never_fits
from headway.core.terms import Targets, Terms
from headway.engine.client.inputs import resolve_params
from headway.engine.process.messages import EngineInfo
from headway.errors import NeverFitsError
from tests.support.harness import Harness


def half(tenant: str = "t") -> Terms:
    return Terms(tenant, max_kv_share=0.5, cache_group=tenant)


def num_tenant_blocks(engine: Harness, tenant: str) -> int:
    return len(engine.scheduler.kv.blocks_by_tenant.get(tenant, ()))


def test_other_tenants_bypass_a_tenant_at_its_kv_quota():
    engine = Harness(num_blocks=16, block_size=4, max_wait_s=0.0)
    for at in range(4):
        engine.add(f"t{at}", 12, max_tokens=1, terms=half())
    engine.add("other", 12, max_tokens=1, terms=Terms("o"))
    engine.step()
    admitted = [event.request_id for event in engine.seen(Admitted)]
    assert sorted(admitted) == ["other", "t0", "t1"]
    engine.run()


def test_the_kv_quota_is_the_cause_before_the_running_limit():
    engine = Harness(num_blocks=16, block_size=4, max_num_seqs=2, max_wait_s=0.0)
    engine.add("t0", 24, max_tokens=8, terms=half())
    engine.step()
    engine.add("t1", 24, max_tokens=8, n=2, terms=half())
    engine.add("other", 12, max_tokens=1, terms=Terms("o"))
    engine.step()
    request = engine.scheduler.requests["t1"]
    assert engine.scheduler.waiting.cause_of(request) is WaitCause.KV_QUOTA
    assert engine.seen(Admitted, "other"), "the free sequence is not reserved for t1"
    engine.run()


def test_a_wait_at_the_kv_quota_has_that_cause():
    engine = Harness(num_blocks=16, block_size=4)
    engine.add("t0", 24, max_tokens=8, terms=half())
    engine.add("t1", 24, max_tokens=1, terms=half())
    engine.step()
    request = engine.scheduler.requests["t1"]
    assert engine.scheduler.waiting.cause_of(request) is WaitCause.KV_QUOTA
    while "t1" in engine.waiting:
        engine.advance(1.0)
        engine.step()
    (event,) = engine.seen(Admitted, "t1")
    causes = dict(event.causes)
    assert causes[WaitCause.KV_QUOTA] == pytest.approx(event.waited_s)
    engine.run()


def test_suspended_requests_resume_in_order_despite_aborts():
    engine = Harness(num_blocks=16, block_size=4)
    for at in range(6):
        engine.add(f"t{at}", 24, max_tokens=3, terms=half())
    engine.steps(2)
    engine.abort("t1")
    engine.abort("t3")
    engine.run()
    assert [event.request_id for event in engine.seen(Admitted)] == ["t0", "t2", "t4", "t5"]


def test_growth_beyond_the_kv_quota_preempts_the_same_tenant():
    engine = Harness(num_blocks=16, block_size=4, max_num_batched_tokens=64)
    engine.add("t0", 16, max_tokens=9, terms=half())
    engine.add("t1", 16, max_tokens=9, terms=half())
    engine.add("other", 16, max_tokens=9, terms=Terms("o"))
    while engine.core.has_work:
        engine.step()
        assert num_tenant_blocks(engine, "t") <= 8
    (event,) = engine.seen(Preempted)
    assert (event.request_id, event.by, event.cause) == ("t1", "t0", WaitCause.KV_QUOTA)


def test_shared_blocks_count_once():
    engine = Harness(num_blocks=16, block_size=4, max_num_batched_tokens=64)
    engine.add("p", 17, max_tokens=3, n=4, terms=half())
    engine.steps(2)
    assert num_tenant_blocks(engine, "t") == 8, "four of the prompt, and one for each sample"
    assert len(engine.running) == 4
    engine.run()


@pytest.mark.parametrize("policy", ["fair", "fcfs"])
def test_a_suspended_tenant_resumes_when_its_own_prefix_is_published(policy: str):
    engine = Harness(num_blocks=32, block_size=4, scheduling_policy=policy)
    prompt = list(range(32))
    engine.add("first", prompt, max_tokens=30, terms=half())
    engine.add("second", [*prompt, 99], max_tokens=2, terms=half())
    engine.step()
    assert engine.running == ["first"]
    engine.steps(2)
    assert engine.seen(Admitted, "second"), "it shares 8 of its 9 blocks"
    engine.run()


def test_blocks_that_the_first_request_cannot_share_resume_nothing(
    monkeypatch: pytest.MonkeyPatch,
):
    engine = Harness(num_blocks=32, block_size=4)
    engine.add("first", list(range(32)), max_tokens=30, terms=half())
    engine.add("second", [99, *range(40)], max_tokens=2, terms=half())
    engine.step()
    resumed = list[str]()
    monkeypatch.setattr(engine.scheduler.waiting, "resume", resumed.append)
    engine.steps(10)
    assert resumed == []
    assert engine.running == ["first"]


def test_a_request_above_the_kv_quota_is_refused_with_the_numbers():
    capacity = Capacity(num_blocks=10, block_size=4, max_model_len=100)
    refusal = refuse_if_never_fits(PeakDemand(12, 10, 1, max_kv_share=0.5), capacity, 8)
    assert refusal is not None
    assert "need 6 KV blocks of 4 tokens; this tenant may hold 5" in refusal.message
    assert refuse_if_never_fits(PeakDemand(12, 9, 1, max_kv_share=0.5), capacity, 8) is None


@pytest.mark.parametrize("policy", ["fair", "fcfs", "priority", "deadline"])
def test_a_backlog_at_the_kv_quota_does_not_block_other_tenants(policy: str):
    engine = Harness(num_blocks=64, block_size=4, max_num_seqs=8, scheduling_policy=policy)
    quota = Terms("q", max_kv_share=0.25, cache_group="q")
    for at in range(300):
        engine.add(f"q{at}", 32, max_tokens=30, terms=quota)
    for at in range(40):
        engine.add(f"o{at}", 4, max_tokens=3, terms=Terms("other"))
    engine.step()
    while any(name.startswith("o") for name in engine.waiting):
        num_left = sum(name.startswith("o") for name in engine.waiting)
        assert len(engine.step()) >= min(7, num_left), "requests of the other tenant are blocked"


@pytest.mark.parametrize("policy", ["fair", "fcfs", "priority", "deadline"])
def test_waits_at_the_kv_quota_are_attributed_to_it(policy: str):
    engine = Harness(num_blocks=32, block_size=4, scheduling_policy=policy)
    quota = Terms("t", max_kv_share=0.25, cache_group="t")
    engine.add("t0", 24, max_tokens=8, terms=quota)
    engine.step()
    for at in range(1, 4):
        engine.add(f"t{at}", 24, max_tokens=2, priority=at, terms=quota)
    engine.step()
    for at in range(5):
        engine.add(f"o{at}", 24, max_tokens=9, terms=Terms("o"))
    engine.advance(1.0)
    engine.step()
    last = engine.scheduler.requests["t3"]
    assert engine.scheduler.waiting.cause_of(last) is WaitCause.KV_QUOTA
    while engine.waiting:
        engine.advance(1.0)
        engine.step()
        engine.check()
    for at in range(1, 4):
        (event,) = engine.seen(Admitted, f"t{at}")
        causes = dict(event.causes)
        assert sum(causes.values()) == pytest.approx(event.waited_s)
        assert causes[WaitCause.KV_QUOTA] >= 0.6 * event.waited_s, causes
    engine.run()


def test_an_slo_backlog_at_the_kv_quota_does_not_block_other_slo_requests():
    soon = Targets(ttft_s=60.0)
    engine = Harness(num_blocks=64, block_size=4, max_num_seqs=2)
    quota = Terms("q", max_kv_share=0.25, cache_group="q", targets=soon)
    for at in range(9):
        engine.add(f"q{at}", 32, max_tokens=30, terms=quota)
    engine.step()
    engine.add("plain", 4, max_tokens=2, terms=Terms("plain"))
    engine.add("soon", 4, max_tokens=2, terms=Terms("slo", targets=soon))
    engine.step()
    assert "soon" in engine.running


# ------------------------------------------------------------------------- eviction


def cached(*groups: str) -> CachedBlocks:
    blocks = CachedBlocks()
    for block_id, group in enumerate(groups):
        blocks.add(block_id, group)
    return blocks


def test_the_least_recently_used_block_is_evicted_first():
    blocks = cached("a", "b", "c", "b")
    assert [blocks.pop() for _ in range(2)] == [0, 1]
    blocks.check()


def test_a_group_above_its_share_loses_its_own_blocks_first():
    blocks = cached("a", "b", *["flood"] * 6)
    assert [blocks.pop() for _ in range(4)] == [2, 3, 4, 5]
    # Two of four are no more than half: least recently used, until the group grows again.
    assert blocks.pop() == 0
    blocks.add(8, "flood")
    assert blocks.pop() == 6
    blocks.check()


def test_a_single_group_may_fill_the_cache():
    blocks = cached(*["a"] * 4)
    assert [blocks.pop() for _ in range(4)] == [0, 1, 2, 3]
    assert len(blocks) == 0


def test_a_block_in_use_again_is_not_evicted():
    blocks = cached("a", "b", "c")
    blocks.remove(0)
    assert 0 not in blocks
    assert blocks.pop() == 1


def run_one(engine: Harness, request_id: str, tenant: str, **fields: Any) -> int:
    fields.setdefault("prompt", 12)
    engine.add(request_id, max_tokens=1, terms=Terms(tenant, cache_group=tenant), **fields)
    engine.run()
    return engine.seen(Admitted, request_id)[0].num_cached_tokens


def test_a_flood_of_prompts_does_not_evict_blocks_of_other_tenants():
    engine = Harness(num_blocks=16, block_size=4)
    prompt = list(range(12))
    run_one(engine, "quiet", "q", prompt=prompt)
    for at in range(20):
        run_one(engine, f"f{at}", "flood")
    assert run_one(engine, "again", "q", prompt=prompt) == 8


# ---------------------------------------------------------------------- block-seconds


def test_block_seconds_cover_all_tables_of_a_request():
    engine = Harness(num_blocks=12, block_size=4, max_num_batched_tokens=64)
    for request_id in "abc":
        engine.add(request_id, 16, max_tokens=6)
    num_block_s = dict.fromkeys("abc", 0.0)
    while engine.core.has_work:
        engine.step()
        tables = engine.scheduler.kv.tables
        for request_id in set("abc") & tables.keys():
            num_block_s[request_id] += len(tables[request_id].block_ids)
        engine.advance(1.0)
    assert engine.seen(Preempted)
    for request_id, block_s in num_block_s.items():
        assert engine.finish(request_id).kv_block_s == pytest.approx(block_s, rel=0.01)


SPOT = Terms("t", max_kv_share=0.5, cache_group="t", is_spot=True)


@pytest.mark.parametrize(
    ("policy", "weak", "strong"),
    [
        ("priority", {"terms": half(), "priority": 1}, {"terms": half(), "priority": 0}),
        ("fair", {"terms": half(), "priority": 1}, {"terms": half(), "priority": 0}),
        ("fair", {"terms": SPOT}, {"terms": half()}),
    ],
)
def test_a_request_that_goes_first_preempts_its_tenant_at_the_kv_quota(
    policy: str, weak: dict[str, Any], strong: dict[str, Any]
):
    engine = Harness(num_blocks=16, block_size=4, scheduling_policy=policy)
    engine.add("t0", 24, max_tokens=8, **weak)
    engine.add("t1", 24, max_tokens=8, **weak)
    engine.steps(2)
    assert engine.running == ["t0"]
    engine.add("t2", 24, max_tokens=8, **strong)
    engine.step()
    assert engine.running == ["t2"]
    engine.run()


def test_unset_max_tokens_fills_the_kv_quota():
    capacity = Capacity(num_blocks=16, block_size=4, max_model_len=1000)
    info = EngineInfo(capacity, max_num_seqs=8, vocab_size=100)
    resolved = resolve_params(SamplingParams(max_tokens=None), [1] * 10, info, (), 0.5)
    assert resolved.max_tokens == 8 * 4 + 1 - 10
    engine = Harness(num_blocks=16, block_size=4)
    engine.add("a", 10, max_tokens=resolved.max_tokens, terms=half())
    engine.run()
    assert len(engine.output("a")) == resolved.max_tokens


def test_a_request_above_the_kv_quota_is_refused_before_it_is_sent():
    capacity = Capacity(num_blocks=16, block_size=4, max_model_len=1000)
    info = EngineInfo(capacity, max_num_seqs=8, vocab_size=100)
    with pytest.raises(NeverFitsError, match="this tenant may hold 8"):
        resolve_params(SamplingParams(max_tokens=40), [1] * 10, info, (), 0.5)
    with pytest.raises(NeverFitsError, match="exceeds the 33 tokens this tenant may hold"):
        max_tokens_for(40, capacity, 0.5)
    with pytest.raises(NeverFitsError, match="exceeds the 65 tokens this server can hold"):
        max_tokens_for(70, capacity)


def test_a_salt_divides_a_cache_group() -> None:
    """Blocks are found with the same salt only, and count as blocks of the whole group."""
    harness = Harness()
    prompt = list(range(12))
    first = Terms("a", cache_group="g", cache_salt="one")
    harness.add("x", prompt, max_tokens=1, terms=first)
    harness.run()
    for number, (terms, start) in enumerate(
        [
            (Terms("a", cache_group="g"), 0),
            (Terms("a", cache_group="g", cache_salt="two"), 0),
            (Terms("b", cache_group="h", cache_salt="one"), 0),
            (Terms("a", cache_group="g", cache_salt="one"), 8),
        ]
    ):
        harness.add(f"y{number}", prompt, max_tokens=1, terms=terms)
        assert harness.step()[f"y{number}"].start == start
        harness.run()
    assert set(harness.scheduler.kv.pool._groups) == {"", "g", "h"}
