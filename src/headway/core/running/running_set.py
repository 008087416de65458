"""The running set: admits, preempts, forks and finishes requests.

RunningSet applies decisions that are made elsewhere. It is the only writer of request state, and
updates the waiting queue, the KV cache, the tenant accounts and the events together.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import replace

from headway.core import events
from headway.core.causes import WaitCause
from headway.core.kv.cache import KVCache
from headway.core.kv.offload import Offload
from headway.core.plan import Failure
from headway.core.request import FinishReason, Request, RequestState
from headway.core.running.admission import Admit
from headway.core.waiting.accounts import Accounts
from headway.core.waiting.queue import WaitingQueue

RUNNING = RequestState.RUNNING


class RunningSet:
    """The running requests, and every live request by id."""

    def __init__(
        self, kv: KVCache, offload: Offload, waiting: WaitingQueue, accounts: Accounts
    ) -> None:
        self.running: list[Request] = []
        """Sorted by effective key, lowest first."""
        self.requests: dict[str, Request] = {}
        """Every live request by id, waiting or running."""
        self.events: list[events.Event] = []
        self.released_ids: list[str] = []
        """Requests whose executor state the next plan releases."""
        self.offload = offload
        self._kv = kv
        self._waiting = waiting
        self._accounts = accounts

    @property
    def has_ordinary(self) -> bool:
        """Whether a request that is not spot runs; these come first."""
        return bool(self.running) and not self._waiting.is_spot(self.running[0])

    def divide(self) -> tuple[list[Request], list[Request]]:
        """Return the requests that may have all of a step, and spot requests beside them.

        Spot requests may have all of it if no ordinary request runs or is next.
        """
        running, is_spot = self.running, self._waiting.is_spot
        if not running or not is_spot(running[-1]):
            return running, []
        num_ordinary, head = len(running), self._waiting.peek()
        while num_ordinary and is_spot(running[num_ordinary - 1]):
            num_ordinary -= 1
        if not num_ordinary and (head is None or is_spot(head)):
            return running, []
        return running[:num_ordinary], running[num_ordinary:]

    def take_released(self) -> tuple[str, ...]:
        """Return and clear the released ids."""
        released_ids = tuple(self.released_ids)
        self.released_ids.clear()
        return released_ids

    def wait(self, request: Request) -> None:
        """Add a new request to the waiting queue."""
        self.requests[request.id] = request
        self._accounts.open(request)
        self._waiting.join(request)

    def admit(self, request: Request, decision: Admit, now: float) -> None:
        """Add a request to the running set and allocate its blocks.

        The caller has removed the request from the waiting queue.
        """
        self._kv.allocate(request, decision.match, decision.num_tokens, now)
        num_computed_before = self.offload.num_computed(request)
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
                num_recomputed=max(0, num_computed_before - request.num_computed),
            )
        )

    def preempt(self, victim: Request, now: float) -> None:
        """Move a running request back to the waiting queue, with its arrival order.

        The request keeps its blocks until another request needs them.
        """
        self.running.remove(victim)
        self._accounts.mark_charged(victim, victim.num_computed)
        self._stop_running(victim, now)
        self.offload.keep(victim)
        victim.num_computed = 0
        victim.num_preemptions += 1
        victim.set_state(RequestState.PREEMPTED, now)
        self._waiting.join(victim)

    def emit_preempted(self, victim: Request, by: Request, cause: WaitCause, now: float) -> None:
        """Emit a Preempted event; `cause` is what the requester `by` needed.

        Called after blocks of the victim were freed, so that the event has the tokens lost.
        """
        method, num_lost = self.offload.method_of(victim), self.offload.num_lost(victim)
        self.events.append(events.Preempted(victim.id, now, by.id, num_lost, method, cause))

    def extend(self, request: Request, now: float) -> None:
        """Allocate one more block to a running request; the caller has checked that one is free."""
        self._accounts.charge_blocks(request, self._kv.extend(request, now))

    def publish(self, request: Request) -> None:
        """Publish full blocks; try a suspended tenant again if its first request shares them."""
        num_published = self._kv.tables[request.id].num_published
        if self._kv.publish(request):
            self._waiting.resume_if_shared(request, num_published)

    def fork(self, parent: Request, now: float) -> list[Request]:
        """Start the other samples of a computed prompt, sharing its blocks; return them.

        Each sample starts at the last prompt token, so that it samples from its own logits. A
        sample without a free block joins the waiting queue with the arrival order of its parent.
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
        """End a request in any state."""
        if request.state is RUNNING:
            self.running.remove(request)
        else:
            self._waiting.take(request)
        self.leave(request, reason, now)

    def leave(
        self, request: Request, reason: FinishReason, now: float, failure: Failure | None = None
    ) -> None:
        """Finish a request; the caller removes a running request from `running`."""
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
        message, cause = ("", None) if failure is None else (failure.message, failure.cause)
        self.events.append(
            events.Finished(request.id, now, reason, num_output, message, causes, block_s, cause)
        )

    def largest_holder(self, cause: WaitCause) -> str:
        """Return the tenant with the most blocks, or sequences, depending on `cause`."""
        if cause is WaitCause.KV_BLOCKS:
            tenant_blocks = self._kv.blocks_by_tenant
            return max(tenant_blocks, key=lambda tenant: len(tenant_blocks[tenant]), default="")
        running = self._accounts.running
        return max(running, key=running.__getitem__, default="")

    def _start_running(self, request: Request, now: float) -> None:
        request.set_state(RUNNING, now)
        self._accounts.start(request, request.params.n)
        insort(self.running, request, key=self._waiting.effective_key)

    def _stop_running(self, request: Request, now: float) -> None:
        """Release the sequences of a request; its blocks become kept blocks."""
        self._accounts.charge_blocks(request, self._kv.detach(request, now))
        self._accounts.refund_prompt(request)
        self._accounts.stop(request, request.params.n)
        self._waiting.resume(request.terms.tenant)
        self.released_ids.append(request.id)
