"""What must hold between any two actions on the engine core. Violations raise AssertionError.

Tests call `check` after every action, and `check_plan` on every plan before it runs.
"""

from __future__ import annotations

from itertools import pairwise

from headway.core.plan import StepPlan
from headway.core.request import RequestState
from headway.core.scheduler import Scheduler


def check(scheduler: Scheduler) -> None:
    """Every block accounted for, every request in exactly one place."""
    running = {request.id: request for request in scheduler.running}
    waiting = {request.id: request for request in scheduler.waiting}
    _require(len(running) == len(scheduler.running), "a request runs twice")
    _require(len(waiting) == len(scheduler.waiting), "a request waits twice")
    _require(not running.keys() & waiting.keys(), "a request both waits and runs")
    _require(running.keys() | waiting.keys() == scheduler.requests.keys(), "a request is lost")
    for request in running.values():
        _require(request.state is RequestState.RUNNING, f"{request.id} runs as {request.state}")
    for request in waiting.values():
        _require(
            request.state in (RequestState.WAITING, RequestState.PREEMPTED),
            f"{request.id} waits as {request.state}",
        )
        _require(request.num_computed == 0, f"{request.id} waits with tokens computed")
    for request in scheduler.requests.values():
        request.check()
        _require(
            request.num_preemptions <= scheduler.config.max_preemptions,
            f"{request.id} was preempted {request.num_preemptions} times",
        )
    keys = [scheduler.waiting.effective_key(request) for request in scheduler.running]
    _require(all(a < b for a, b in pairwise(keys)), "running requests are out of order")
    _require(
        scheduler.num_seqs <= scheduler.config.max_num_seqs, "more sequences than max_num_seqs"
    )
    scheduler.kv.check(running)
    preempted = [it.id for it in waiting.values() if it.state is RequestState.PREEMPTED]
    scheduler.offload.check(preempted)
    scheduler.accounts.check(scheduler.running)
    scheduler.waiting.check()
    scheduler.pacer.check()
    for request in running.values():
        num_tenant_blocks = len(scheduler.kv.blocks_by_tenant[request.terms.tenant])
        max_tenant_blocks = scheduler.kv.max_quota_blocks(request.terms.max_kv_share)
        _require(
            num_tenant_blocks <= max_tenant_blocks,
            f"{request.terms.tenant} holds {num_tenant_blocks} of {max_tenant_blocks}",
        )


def check_plan(scheduler: Scheduler, plan: StepPlan) -> None:
    """A plan is within its budget, and continues each request exactly where it stands."""
    num_tokens = sum(len(item.token_ids) for item in plan.scheduled)
    _require(num_tokens == plan.num_tokens, "the plan miscounts its tokens")
    _require(num_tokens <= scheduler.pacer.limits.max_num_batched_tokens, "the plan is over budget")
    ids = [item.request_id for item in plan.scheduled]
    _require(len(set(ids)) == len(ids), "a request is scheduled twice")
    written: set[int] = set()
    for item in plan.scheduled:
        request = scheduler.requests[item.request_id]
        end = item.start + len(item.token_ids)
        _require(request.state is RequestState.RUNNING, f"{request.id} is scheduled, not running")
        _require(item.start == request.num_computed, f"{request.id} does not continue")
        _require(list(item.token_ids) == request.token_ids[item.start : end], "wrong tokens")
        _require(item.has_sample == (end == request.num_tokens), "sampling at the wrong place")
        blocks = scheduler.kv.tables[request.id].block_ids
        size = scheduler.kv.block_size
        target = set(blocks[item.start // size : -(-end // size)])
        _require(len(target) == -(-end // size) - item.start // size, "no block to write into")
        _require(not target & written, "two requests write into one block")
        written |= target


def check_drained(scheduler: Scheduler) -> None:
    """Nothing is left: no request anywhere, every block free."""
    check(scheduler)
    _require(not scheduler.requests, "requests are left")
    _require(scheduler.kv.pool.num_used == 0, "blocks are left")
    _require(scheduler.offload.slots.num_used == 0, "slots are left")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise AssertionError(message)
