"""The running requests: the one place where a request gets a seat and blocks, and where it gives
them up, for good or for now.

What was decided elsewhere is made true here, in the books of every part: the waiting line, the
blocks, the accounts of the tenants, and the events.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import replace

from headway.core import events
from headway.core.causes import WaitCause
from headway.core.kv.cache import KVCache
from headway.core.kv.offload import Offload
from headway.core.request import FinishReason, Request, RequestState
from headway.core.running.admission import Admit
from headway.core.waiting.accounts import Accounts
from headway.core.waiting.queue import WaitingQueue

RUNNING = RequestState.RUNNING


class RunningSet:
    """Who runs."""

    def __init__(
        self, kv: KVCache, offload: Offload, waiting: WaitingQueue, accounts: Accounts
    ) -> None:
        self.running: list[Request] = []
        """Sorted by standing, strongest first."""
        self.requests: dict[str, Request] = {}
        """Every live request by id, waiting or running."""
        self.events: list[events.Event] = []
        self.released_ids: list[str] = []
        """Those whose state the executor can forget."""
        self.offload = offload
        self._kv = kv
        self._waiting = waiting
        self._accounts = accounts

    def take_released(self) -> tuple[str, ...]:
        taken = tuple(self.released_ids)
        self.released_ids.clear()
        return taken

    def wait(self, request: Request) -> None:
        """A new request takes its place in the waiting line."""
        self.requests[request.id] = request
        self._accounts.open(request)
        self._waiting.join(request)

    def admit(self, request: Request, decision: Admit, now: float) -> None:
        """A request taken from the waiting line gets a seat and the blocks it was granted."""
        self._kv.allocate(request, decision.match, decision.num_tokens, now)
        had = self.offload.num_computed(request)
        table = self._kv.tables[request.id]
        request.num_computed = self.offload.restore(request, table, decision.match)
        self._accounts.charge_prompt(request, request.num_computed)
        causes, held_by = self._waiting.leave(request, now)
        is_resumed = request.state is RequestState.PREEMPTED
        waited_s = now - request.state_since
        self._start_running(request, now)
        self.events.append(
            events.Admitted(
                request.id,
                now,
                waited_s,
                request.num_computed,
                request.num_tokens,
                is_resumed,
                causes,
                held_by,
                num_recomputed=max(0, had - request.num_computed),
            )
        )

    def preempt(self, victim: Request, now: float) -> None:
        """Preempt a running request; it keeps its place in the waiting queue, and its blocks
        until another request needs them."""
        self.running.remove(victim)
        self._accounts.mark_charged(victim, victim.num_computed)
        self._stop_running(victim, now)
        self.offload.keep(victim)
        victim.num_computed = 0
        victim.num_preemptions += 1
        victim.set_state(RequestState.PREEMPTED, now)
        self._waiting.join(victim)

    def emit_preempted(self, victim: Request, by: Request, cause: WaitCause, now: float) -> None:
        """A preemption, once what was needed has been taken. `cause` is what the other was in
        need of."""
        method, num_lost = self.offload.method_of(victim), self.offload.num_lost(victim)
        self.events.append(events.Preempted(victim.id, now, by.id, num_lost, method, cause))

    def extend(self, request: Request, now: float) -> None:
        """One more block for a running request; one is free."""
        self._accounts.charge_blocks(request, self._kv.extend(request, now))

    def fork(self, parent: Request, now: float) -> list[Request]:
        """The prompt is computed: its other samples begin, sharing the prompt's blocks.

        Each starts at the prompt's last token, so that it samples from logits of its own. One
        for which no block is free joins the waiting line instead, at its parent's place.
        """
        num_samples = parent.params.n
        self._accounts.stop(parent, num_samples - 1)
        parent.params = replace(parent.params, n=1)
        children = [parent.fork(index, now) for index in range(1, num_samples)]
        for child in children:
            self.requests[child.id] = child
            self._accounts.open(child)
            self._accounts.mark_charged(child, child.num_prompt_tokens)
            self.events.append(events.Forked(child.id, now, parent.id))
            if self._kv.pool.num_free == 0 or self._kv.is_at_kv_quota(child):
                self._waiting.join(child)
                continue
            self._kv.fork(parent, child, now)
            self._start_running(child, now)
        return children

    def abort(self, request: Request, reason: FinishReason, now: float) -> None:
        """End a request in whatever state it is."""
        if request.state is RUNNING:
            self.running.remove(request)
        else:
            self._waiting.take(request)
        self.leave(request, reason, now)

    def leave(self, request: Request, reason: FinishReason, now: float, message: str = "") -> None:
        """A request ends. One that runs is taken out of `running` by the caller."""
        causes = ()
        if request.state is RUNNING:
            self._stop_running(request, now)
            self._kv.release(request.id)
        else:
            self.offload.discard(request)
            causes, _ = self._waiting.leave(request, now)
        self._accounts.forget_charged(request)
        self._accounts.close(request)
        del self.requests[request.id]
        request.finish_reason = reason
        request.set_state(RequestState.FINISHED, now)
        block_s = self._kv.take_block_s(request)
        num_output = request.num_output_tokens
        self.events.append(
            events.Finished(request.id, now, reason, num_output, message, causes, block_s)
        )

    def largest_holder(self, cause: WaitCause) -> str:
        """The tenant with the most of what somebody waits for: blocks, or else seats."""
        if cause is WaitCause.KV_BLOCKS:
            tenant_blocks = self._kv.blocks_by_tenant
            return max(tenant_blocks, key=lambda tenant: len(tenant_blocks[tenant]), default="")
        running = self._accounts.running
        return max(running, key=lambda tenant: running[tenant].num_running, default="")

    def _start_running(self, request: Request, now: float) -> None:
        request.set_state(RUNNING, now)
        self._accounts.start(request, request.params.n)
        insort(self.running, request, key=self._waiting.effective_key)

    def _stop_running(self, request: Request, now: float) -> None:
        """Let go of a seat; what becomes of the blocks is the caller's business."""
        self._accounts.charge_blocks(request, self._kv.detach(request, now))
        self._accounts.refund_prompt(request)
        self._accounts.stop(request, request.params.n)
        self._waiting.resume(request.terms.tenant)
        self.released_ids.append(request.id)
