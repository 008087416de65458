"""One prompt or sample of a request: its waits, times, tokens and timeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from headway.core.causes import CauseTime, WaitCause
from headway.core.events import Admitted, Adopted, Arrived, Finished, Forked, Preempted, Routed
from headway.core.request import FinishReason
from headway.core.terms import Terms
from headway.observe.trace.account import (
    ENGINE_RESTART,
    ROUTER,
    UNRECORDED,
    CauseShare,
    Entry,
    RequestAccount,
    add_up,
    cause_shares,
)
from headway.observe.trace.names import part_name

MAX_ENTRIES = 64
"""Most timeline entries of a part; further entries are counted and still summed."""
MAX_TIMELINE = 256
"""Most timeline entries of a request."""
NEGLIGIBLE_S = 1e-6
_WORST_FIRST = (
    FinishReason.ERROR,
    FinishReason.TIMEOUT,
    FinishReason.ABORT,
    FinishReason.LENGTH,
    FinishReason.STOP,
)


@dataclass(slots=True)
class RequestPart:
    """State of a part after its events so far; times are event times."""

    id: str
    arrived_at: float
    """Arrival of the prompt in the API process, also for a forked sample."""
    num_prompt_tokens: int
    waiting_since: float | None = None
    """Start of the current wait; None while the part runs."""
    is_fork: bool = False
    unexplained_since: float | None = None
    """Start of the time that the current engine accounts for; None without an engine or a wait."""
    lost_at: float | None = None
    """When the engine was lost; None while the part has an engine."""
    explained: list[tuple[str, float]] = field(default_factory=list[tuple[str, float]])
    """Known causes of the current wait."""
    num_to_recompute: int = 0
    """Tokens computed in an engine that failed."""
    admitted_at: float | None = None
    """First admission of the prompt, also for a forked sample."""
    num_cached_tokens: int | None = None
    """Prefix hit of the first admission; None before."""
    num_output_tokens: int = 0
    num_recomputed_tokens: int = 0
    first_token_at: float | None = None
    last_token_at: float | None = None
    finished_at: float | None = None
    reason: FinishReason | None = None
    kv_block_s: float = 0.0
    shares: list[CauseShare] = field(default_factory=list[CauseShare])
    entries: list[Entry] = field(default_factory=list[Entry])
    num_left_out: int = 0
    num_preemptions: int = 0
    num_engines_lost: int = 0
    open_interruptions: list[int] = field(default_factory=list[int])
    """Indices of entries of interruptions that have not ended."""
    early_preemption: tuple[Preempted, str] | None = None
    max_tokens: int = 0
    n: int = 1
    priority: int = 0

    @property
    def is_live(self) -> bool:
        return self.reason is None

    @property
    def is_billed(self) -> bool:
        """Whether the prompt is billed: admitted, and not failed before its first token."""
        if self.num_cached_tokens is None or self.is_fork:
            return False
        failed = self.reason in (FinishReason.ERROR, FinishReason.TIMEOUT)
        return self.num_output_tokens > 0 or not failed

    @classmethod
    def arrive(cls, event: Arrived) -> RequestPart:
        """Return a part that waits since its arrival."""
        return cls(
            event.request_id,
            event.at,
            event.num_prompt_tokens,
            waiting_since=event.at,
            max_tokens=event.max_tokens,
            n=event.n,
            priority=event.priority,
        )

    @classmethod
    def adopt(cls, event: Adopted) -> RequestPart:
        """Return a part of a request that another frontend had; its earlier times are unknown."""
        has_waited = event.num_cached_tokens is not None
        part = cls(
            event.request_id,
            event.arrived_at,
            event.num_prompt_tokens,
            waiting_since=None if has_waited else event.arrived_at,
            is_fork=event.is_fork,
            num_cached_tokens=0 if event.is_fork else event.num_cached_tokens,
            num_output_tokens=event.num_output_tokens,
            last_token_at=event.at if event.num_output_tokens else None,
            max_tokens=event.max_tokens,
            n=event.n,
            priority=event.priority,
        )
        part._add_entry(Entry(event.at, "adopted", num_tokens=event.num_output_tokens))
        return part

    # ---------------------------------- durations; None for a stage not reached

    @property
    def first_wait_s(self) -> float | None:
        """Time from arrival to the first admission.

        `Admitted.waited_s` excludes time without an engine.
        """
        return _between(self.arrived_at, self.admitted_at)

    @property
    def ttft_s(self) -> float | None:
        return _between(self.arrived_at, self.first_token_at)

    @property
    def prefill_s(self) -> float | None:
        """Time from the first admission to the first token."""
        return _between(self.admitted_at, self.first_token_at)

    @property
    def decode_s(self) -> float | None:
        """Time from the first token to the last."""
        return _between(self.first_token_at, self.last_token_at)

    @property
    def tpot_s(self) -> float | None:
        """TPOT; None with fewer than two output tokens."""
        if self.decode_s is None or self.num_output_tokens < 2:
            return None
        return self.decode_s / (self.num_output_tokens - 1)

    @property
    def e2e_s(self) -> float | None:
        """Time from arrival to the end."""
        return _between(self.arrived_at, self.finished_at)

    # ------------------------------------------------------------------ events

    def emit(self, num_tokens: int, at: float) -> float | None:
        """Record the tokens of a step; return the time since the previous tokens, if any."""
        before, self.last_token_at = self.last_token_at, at
        self.num_output_tokens += num_tokens
        if before is not None:
            return at - before
        self.first_token_at = at
        self._add_entry(Entry(at, "first_token"))
        return None

    def admit(self, event: Admitted) -> tuple[CauseShare, ...]:
        """End the wait; return its causes."""
        if self.waiting_since is None:  # a sample without a block at its fork
            self.waiting_since = event.at - event.waited_s
        shares = self._close_wait(event.at, event.causes, event.held_by)
        for index in self.open_interruptions:
            self.entries[index] = replace(
                self.entries[index], seconds=event.at - self.entries[index].at_s
            )
        self.open_interruptions.clear()
        self._add_entry(Entry(event.at, "admitted", num_tokens=event.num_cached_tokens))
        if self.admitted_at is None:
            self.admitted_at = event.at
        if self.num_cached_tokens is None:
            self.num_cached_tokens = event.num_cached_tokens
        self.num_recomputed_tokens += event.num_recomputed
        self.num_recomputed_tokens += max(0, self.num_to_recompute - event.num_cached_tokens)
        self.num_to_recompute = 0
        if self.early_preemption is not None:
            (preempted, by_tenant), self.early_preemption = self.early_preemption, None
            self.preempt(preempted, by_tenant)
        return shares

    def fork(self, event: Forked) -> RequestPart:
        """Return a further sample of the same prompt; the sample runs."""
        return RequestPart(
            event.request_id,
            self.arrived_at,
            self.num_prompt_tokens,
            is_fork=True,
            admitted_at=self.admitted_at,
            num_cached_tokens=0,
            max_tokens=self.max_tokens,
            n=self.n,
            priority=self.priority,
        )

    def preempt(self, event: Preempted, by_tenant: str) -> None:
        if self.waiting_since is not None:
            # Admitted and preempted in one step: a batch groups events by kind.
            self.early_preemption = (event, by_tenant)
            return
        self.waiting_since = self.unexplained_since = event.at
        self.num_preemptions += 1
        self._interrupt(
            Entry(
                event.at,
                "preempted",
                num_tokens=event.num_tokens_lost,
                by=event.by,
                by_tenant=by_tenant,
                cause=str(event.cause),
                method=str(event.method),
            )
        )

    def lose_engine(self, at: float) -> None:
        """Start a wait without an engine; its knowledge of the current wait is lost."""
        if self.lost_at is not None:
            return
        # The last token known is yet to be computed; and no event says how far a prompt had come
        # before its first token.
        has_output = self.num_output_tokens > 0
        num_known = self.num_prompt_tokens + self.num_output_tokens
        self.num_to_recompute = num_known - 1 if has_output else 0
        if self.waiting_since is None:
            self.waiting_since = at
        else:
            since = self.unexplained_since
            self.explained.append(
                (UNRECORDED, at - (self.waiting_since if since is None else since))
            )
        self.lost_at, self.unexplained_since = at, None
        self.num_engines_lost += 1
        self._interrupt(Entry(at, "engine_lost"))

    def resend(self, at: float) -> None:
        if self.waiting_since is None:
            return
        lost_at = self.waiting_since if self.lost_at is None else self.lost_at
        self.explained.append((ENGINE_RESTART, at - lost_at))
        self.lost_at, self.unexplained_since = None, at

    def route(self, event: Routed) -> None:
        """Record the time in the router; a wait for a lost engine is counted by `resend`."""
        if self.waiting_since is not None and self.lost_at is None and not self.explained:
            self.explained.append((ROUTER, min(event.waited_s, event.at - self.waiting_since)))

    def finish(self, event: Finished) -> tuple[CauseShare, ...]:
        """End the part; return the causes of its wait, if it waited."""
        shares: tuple[CauseShare, ...] = ()
        if self.waiting_since is None and event.causes:
            self.waiting_since = event.at - sum(one.seconds for one in event.causes)
        if self.waiting_since is not None:
            if self.lost_at is not None:
                self.resend(event.at)
            shares = self._close_wait(event.at, event.causes, "")
        self.finished_at, self.reason = event.at, event.reason
        self.kv_block_s += event.kv_block_s
        self._add_entry(
            Entry(event.at, "finished", num_tokens=self.num_output_tokens, cause=str(event.reason))
        )
        return shares

    # ------------------------------------------------------------------- waits

    def _close_wait(
        self, until: float, causes: Sequence[CauseTime], held_by: str
    ) -> tuple[CauseShare, ...]:
        since = until if self.waiting_since is None else self.waiting_since
        unexplained_s = (until - since) - sum(seconds for _, seconds in self.explained)
        attributed = fit_causes(causes, unexplained_s)
        rest = unexplained_s - sum(seconds for _, seconds in attributed)
        if rest > NEGLIGIBLE_S:
            attributed.append((UNRECORDED, rest))
        shares = add_up(cause_shares([*self.explained, *attributed], held_by))
        self.waiting_since = self.unexplained_since = None
        self.explained.clear()
        self.shares = list(add_up([*self.shares, *shares]))
        if until > since:
            self._add_entry(Entry(since, "waited", seconds=until - since, causes=shares))
        return shares

    def _interrupt(self, entry: Entry) -> None:
        if len(self.entries) < MAX_ENTRIES:
            self.open_interruptions.append(len(self.entries))
        self._add_entry(entry)

    def _add_entry(self, entry: Entry) -> None:
        if len(self.entries) < MAX_ENTRIES or entry.kind == "finished":
            self.entries.append(replace(entry, part=part_name(self.id)))
        else:
            self.num_left_out += 1

    def timeline(self, now: float) -> Iterator[Entry]:
        """Return the timeline in event times; for a live part, up to now."""
        if not self.is_fork:
            tokens = self.num_prompt_tokens
            yield Entry(self.arrived_at, "arrived", part_name(self.id), num_tokens=tokens)
        yield from self.entries
        if self.is_live and self.waiting_since is not None:
            waited_s = max(0.0, now - self.waiting_since)
            yield Entry(self.waiting_since, "waiting", part_name(self.id), seconds=waited_s)


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


def fit_causes(causes: Sequence[CauseTime], seconds: float) -> list[tuple[str, float]]:
    """Return causes that add up to at most `seconds`.

    An engine counts from the arrival of a request, and takes time in another engine for time before
    its first scheduling pass.
    """
    excess = sum(one.seconds for one in causes) - seconds
    kept: list[tuple[str, float]] = []
    first = WaitCause.EXECUTOR_BUSY
    for cause, value in sorted(causes, key=lambda one: one.cause != first):
        cut = min(value, max(0.0, excess))
        excess -= cut
        if value - cut > 0.0:
            kept.append((cause, value - cut))
    return kept


def account_of(
    request_id: str,
    terms: Terms,
    parts: Sequence[RequestPart],
    *,
    client_id: str,
    now: float,
    wall_offset_s: float,
) -> RequestAccount:
    """Return the account over all parts of a request, as of `now`."""
    arrived_at = min(part.arrived_at for part in parts)
    is_live = any(part.is_live for part in parts)
    until = now if is_live else max(part.finished_at or now for part in parts)
    first_tokens = [part.first_token_at for part in parts if part.first_token_at is not None]
    causes = add_up(share for part in parts for share in part.shares)
    entries = [
        replace(entry, at_s=entry.at_s - arrived_at)
        for part in parts
        for entry in part.timeline(now)
    ]
    entries.sort(key=lambda entry: entry.at_s)
    num_left_out = sum(part.num_left_out for part in parts) + max(0, len(entries) - MAX_TIMELINE)
    own = [part for part in parts if not part.is_fork]
    billed = [part for part in own if part.is_billed]
    return RequestAccount(
        id=request_id,
        state=_state(parts) if is_live else "finished",
        arrived_at=arrived_at + wall_offset_s,
        duration_s=until - arrived_at,
        tenant=terms.tenant,
        tier=terms.tier,
        client_id=client_id,
        max_tokens=max(part.max_tokens for part in parts),
        n=parts[0].n,
        priority=parts[0].priority,
        weight=terms.weight,
        max_kv_share=terms.max_kv_share,
        is_spot=terms.is_spot,
        target_ttft_s=terms.targets.ttft_s,
        target_tpot_s=terms.targets.tpot_s,
        deadline_s=terms.targets.deadline_s,
        finish_reason="" if is_live else _reason(parts),
        num_parts=len(parts),
        num_prompt_tokens=sum(part.num_prompt_tokens for part in own),
        num_cached_tokens=sum(part.num_cached_tokens or 0 for part in own),
        num_output_tokens=sum(part.num_output_tokens for part in parts),
        num_recomputed_tokens=sum(part.num_recomputed_tokens for part in parts),
        num_billed_prompt_tokens=sum(part.num_prompt_tokens for part in billed),
        num_billed_cached_tokens=sum(part.num_cached_tokens or 0 for part in billed),
        first_token_s=min(first_tokens) - arrived_at if first_tokens else None,
        queue_s=sum(share.seconds for share in causes),
        kv_block_s=sum(part.kv_block_s for part in parts),
        causes=causes,
        num_preemptions=sum(part.num_preemptions for part in parts),
        num_engines_lost=max(part.num_engines_lost for part in parts),
        timeline=tuple(entries[:MAX_TIMELINE]),
        num_entries_left_out=num_left_out,
    )


def _state(parts: Sequence[RequestPart]) -> str:
    runs = any(part.is_live and part.waiting_since is None for part in parts)
    return "running" if runs else "waiting"


def _reason(parts: Sequence[RequestPart]) -> str:
    """Return the worst finish reason of the parts."""
    reasons = {part.reason for part in parts}
    return str(next(reason for reason in _WORST_FIRST if reason in reasons))
