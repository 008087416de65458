"""Invariants of the engine core. A violation raises AssertionError.

Tests call `check` after every action, and `check_plan` on every plan before it runs.
"""

from __future__ import annotations

from itertools import pairwise

from headway.core.plan import StepPlan
from headway.core.request import RequestState
from headway.core.scheduler import Scheduler


def check(scheduler: Scheduler) -> None:
    """Check that each request is in one state and that all block counts agree."""
    running = {request.id: request for request in scheduler.running}
    waiting = {request.id: request for request in scheduler.waiting}
    _require(len(running) == len(scheduler.running), "a request is in the running set twice")
    _require(len(waiting) == len(scheduler.waiting), "a request is in the waiting queue twice")
    _require(not running.keys() & waiting.keys(), "a request is both waiting and running")
    _require(
        running.keys() | waiting.keys() == scheduler.requests.keys(),
        "requests differ from running + waiting",
    )
    for request in running.values():
        _require(
            request.state is RequestState.RUNNING,
            f"{request.id} is running in state {request.state}",
        )
    for request in waiting.values():
        _require(
            request.state in (RequestState.WAITING, RequestState.PREEMPTED),
            f"{request.id} is waiting in state {request.state}",
        )
        _require(request.num_computed == 0, f"{request.id} is waiting with num_computed > 0")
    for request in scheduler.requests.values():
        request.check()
        _require(
            request.num_preemptions <= scheduler.config.max_preemptions
            or scheduler.waiting.is_spot(request),
            f"{request.id}: {request.num_preemptions} preemptions exceed max_preemptions",
        )
    keys = [scheduler.waiting.effective_key(request) for request in scheduler.running]
    _require(
        all(a < b for a, b in pairwise(keys)), "the running set is not sorted by effective key"
    )
    _require(
        scheduler.num_seqs <= scheduler.config.max_num_seqs, "more sequences than max_num_seqs"
    )
    scheduler.kv.check(running)
    preempted_ids = [one.id for one in waiting.values() if one.state is RequestState.PREEMPTED]
    scheduler.offload.check(preempted_ids)
    scheduler.accounts.check(scheduler.running)
    scheduler.waiting.check()
    scheduler.pacer.open_requests.check()
    for request in running.values():
        num_tenant_blocks = len(scheduler.kv.blocks_by_tenant[request.terms.tenant])
        max_tenant_blocks = scheduler.kv.max_quota_blocks(request.terms.max_kv_share)
        _require(
            num_tenant_blocks <= max_tenant_blocks,
            f"tenant {request.terms.tenant} has {num_tenant_blocks} blocks; "
            f"its KV quota is {max_tenant_blocks}",
        )


def check_plan(scheduler: Scheduler, plan: StepPlan) -> None:
    """Check that a plan is within its budget and continues each request."""
    num_tokens = sum(len(item.token_ids) for item in plan.scheduled)
    _require(num_tokens == plan.num_tokens, "the num_tokens of the plan is wrong")
    _require(num_tokens <= scheduler.pacer.limits.max_num_batched_tokens, "the plan is over budget")
    ids = [item.request_id for item in plan.scheduled]
    _require(len(set(ids)) == len(ids), "a request is scheduled twice")
    written: set[int] = set()
    for item in plan.scheduled:
        request = scheduler.requests[item.request_id]
        end = item.start + len(item.token_ids)
        _require(
            request.state is RequestState.RUNNING, f"{request.id} is scheduled but not running"
        )
        _require(item.start == request.num_computed, f"{request.id}: start is not num_computed")
        _require(
            list(item.token_ids) == request.token_ids[item.start : end],
            "token_ids are not those of the request",
        )
        is_sampled = end == request.num_tokens and request.params.max_tokens != 0
        _require(item.has_sample == is_sampled, "has_sample is wrong")
        blocks = scheduler.kv.tables[request.id].block_ids
        size = scheduler.kv.block_size
        target = set(blocks[item.start // size : -(-end // size)])
        _require(len(target) == -(-end // size) - item.start // size, "no block to write into")
        _require(not target & written, "two requests write into one block")
        written |= target


def check_drained(scheduler: Scheduler) -> None:
    """Check that no request is left and every block and slot is free."""
    check(scheduler)
    _require(not scheduler.requests, "requests are left after the drain")
    _require(scheduler.kv.pool.num_used == 0, "blocks are in use after the drain")
    _require(scheduler.offload.slots.num_used == 0, "slots are in use after the drain")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise AssertionError(message)
