"""An account as text: one paragraph and a timeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any

import msgspec

from headway.core.causes import PreemptionMethod, WaitCause
from headway.observe.trace.account import (
    ENGINE_RESTART,
    ROUTER,
    UNRECORDED,
    CauseShare,
    Entry,
    RequestAccount,
)

MIN_SHOWN_S = 0.0005
"""Shorter durations are left out."""
BAR_WIDTH = 40

CAUSES: dict[str, str] = {
    WaitCause.EXECUTOR_BUSY: "while the previous step was running",
    WaitCause.TOKEN_BUDGET: "because the token budget of each step was used up",
    WaitCause.PREFILL_CAP: "because of the cap on prompt tokens in a step",
    WaitCause.RUNNING_LIMIT: "for room in the running set",
    WaitCause.KV_BLOCKS: "for KV blocks",
    WaitCause.KV_QUOTA: "because its tenant was at its KV quota",
    WaitCause.TENANT_SHARE: "because its tenant had used its share",
    WaitCause.TIER_ORDER: "because requests of a higher tier went first",
    WaitCause.DEADLINE_ORDER: "because requests with less time left went first",
    ENGINE_RESTART: "for a new engine after one failed",
    ROUTER: "in the router, until an engine could begin it",
    UNRECORDED: "for a cause that was not recorded",
}
HOLDERS: dict[str, str] = {
    WaitCause.RUNNING_LIMIT: ", taken mostly by {}",
    WaitCause.KV_BLOCKS: " held mostly by {}",
}
NEEDS: dict[str, str] = {
    WaitCause.RUNNING_LIMIT: "needed room in the running set",
    WaitCause.KV_BLOCKS: "needed KV blocks",
    WaitCause.KV_QUOTA: "needed KV blocks of its tenant's quota",
    WaitCause.TENANT_SHARE: "had more of its share left",
    WaitCause.TIER_ORDER: "was of a higher tier",
    WaitCause.DEADLINE_ORDER: "had less time left",
}
_METHODS: dict[str, str] = {
    PreemptionMethod.TRIM: "the last {} computed tokens were dropped",
    PreemptionMethod.CHECKPOINT: "its blocks were offloaded, {} tokens lost",
    PreemptionMethod.RECOMPUTE: "all {} computed tokens were dropped",
}
_ENDS = {
    "stop": "It ended by itself",
    "length": "It reached its length",
    "abort": "Its client disconnected",
    "timeout": "It was refused after waiting",
    "error": "It failed",
}


def as_dict(account: RequestAccount) -> dict[str, Any]:
    """Return the account with its text, ready for JSON."""
    return {
        "object": "request.explanation",
        **msgspec.to_builtins(account),
        "text": paragraph(account),
        "timeline_text": timeline(account),
    }


def paragraph(account: RequestAccount) -> str:
    """Return what happened to a request and why it took as long as it did."""
    sentences = [_arrival(account), _wait(account)]
    if account.first_token_s is not None:
        sentences.append(f"Its first token came after {seconds(account.first_token_s)}.")
    sentences += _preemptions(account)
    sentences += _restarts(account)
    if account.num_recomputed_tokens:
        again = count(account.num_recomputed_tokens, "token")
        sentences.append(f"{again.capitalize()} had to be computed again, which is not billed.")
    sentences.append(_end(account))
    return " ".join(sentence for sentence in sentences if sentence)


def _arrival(account: RequestAccount) -> str:
    at = datetime.fromtimestamp(account.arrived_at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    whose = f" of tenant {account.tenant}" if account.tenant else ""
    tier = f" (tier {account.tier})" if account.tier else ""
    cached = f", {account.num_cached_tokens} of them cached" if account.num_cached_tokens else ""
    parts = f" in {account.num_parts} parts" if account.num_parts > 1 else ""
    prompt = count(account.num_prompt_tokens, "prompt token")
    return f"Request {account.id}{whose}{tier} arrived at {at} with {prompt}{cached}{parts}."


def _wait(account: RequestAccount) -> str:
    verb = "waits" if account.state == "waiting" else "waited"
    open_s = sum(entry.seconds or 0.0 for entry in account.timeline if entry.kind == "waiting")
    total_s = account.queue_s + open_s
    if total_s < MIN_SHOWN_S:
        return "It did not have to wait."
    all_parts = " in all its parts together" if account.num_parts > 1 else ""
    causes = [cause_text(share) for share in account.causes if share.seconds >= MIN_SHOWN_S]
    if open_s >= MIN_SHOWN_S:
        causes.append(f"{seconds(open_s)} so far, by causes known once it is admitted")
    return f"It {verb} {seconds(total_s)}{all_parts}: {', '.join(causes)}."


def cause_text(share: CauseShare) -> str:
    """Return the duration and the reason of one cause."""
    holder = HOLDERS.get(share.cause, "").format(_tenant(share.held_by)) if share.held_by else ""
    return f"{seconds(share.seconds)} {CAUSES.get(share.cause, share.cause)}{holder}"


def _preemptions(account: RequestAccount) -> Iterable[str]:
    for entry in account.timeline:
        if entry.kind == "preempted":
            yield f"{_subject(entry)} was preempted after {seconds(entry.at_s)} {_by(entry)}; " + (
                f"{_METHODS.get(entry.method, '{} tokens were lost').format(entry.num_tokens)}, "
                f"and it {_resumed(entry, 'resumed')}."
            )


def _by(entry: Entry) -> str:
    who = f"by request {entry.by}" if entry.by else "by a request"
    whose = f" of {_tenant(entry.by_tenant)}" if entry.by_tenant else ""
    return f"{who}{whose}, which {NEEDS.get(entry.cause, 'needed its place')}"


def _restarts(account: RequestAccount) -> Iterable[str]:
    for entry in account.timeline:
        if entry.kind == "engine_lost":
            yield (
                f"After {seconds(entry.at_s)} the engine failed under "
                f"{_subject(entry).lower()}, and it {_resumed(entry, 'went on')}."
            )


def _subject(entry: Entry) -> str:
    return entry.part.capitalize() if entry.part else "It"


def _resumed(entry: Entry, verb: str) -> str:
    return (
        "did not run again" if entry.seconds is None else f"{verb} {seconds(entry.seconds)} later"
    )


def _end(account: RequestAccount) -> str:
    output = count(account.num_output_tokens, "output token")
    if account.state != "finished":
        return f"It is {account.state}, {seconds(account.duration_s)} old, with {output} so far."
    end = _ENDS.get(account.finish_reason, "It ended")
    return f"{end} after {seconds(account.duration_s)} with {output}."


def timeline(account: RequestAccount) -> str:
    """Return one line per entry, with a bar that shows its time."""
    life_s = max(account.duration_s, 1e-9)
    lines = [
        f"{entry.at_s:9.3f} s  {_bar(entry, life_s)}  {_line(entry)}" for entry in account.timeline
    ]
    if account.num_entries_left_out:
        lines.append(f"... and {account.num_entries_left_out} more")
    return "\n".join(lines)


def _bar(entry: Entry, life_s: float) -> str:
    start = min(BAR_WIDTH - 1, max(0, int(BAR_WIDTH * entry.at_s / life_s)))
    if not entry.kind.startswith("wait") or not entry.seconds:
        return f"{'|':>{start + 1}}".ljust(BAR_WIDTH)
    width = max(1, round(BAR_WIDTH * entry.seconds / life_s))
    return (" " * start + "=" * width)[:BAR_WIDTH].ljust(BAR_WIDTH)


_LINES: dict[str, Callable[[Entry], str]] = {
    "arrived": lambda entry: f"arrived with {count(entry.num_tokens, 'token')}",
    "waited": lambda entry: (
        f"waited {seconds(entry.seconds or 0.0)}: {', '.join(map(cause_text, entry.causes))}"
    ),
    "waiting": lambda entry: f"has waited {seconds(entry.seconds or 0.0)} so far",
    "admitted": lambda entry: (
        f"admitted{f', {entry.num_tokens} tokens cached' if entry.num_tokens else ''}"
    ),
    "first_token": lambda _: "first token",
    "preempted": lambda entry: (
        f"preempted {_by(entry)} ({entry.method}, {entry.num_tokens} tokens lost)"
    ),
    "engine_lost": lambda _: "the engine failed",
    "adopted": lambda entry: (
        f"taken over from another frontend with {count(entry.num_tokens, 'token')}"
    ),
    "finished": lambda entry: f"ended ({entry.cause}) with {count(entry.num_tokens, 'token')}",
}


def _line(entry: Entry) -> str:
    part = f"{entry.part}: " if entry.part else ""
    return part + _LINES.get(entry.kind, lambda other: other.kind)(entry)


def _tenant(name: str) -> str:
    return name if " " in name else f"tenant {name}"


def seconds(value: float) -> str:
    """Format a duration with a sensible number of digits."""
    if value < 0.0995:
        return f"{value * 1000:.0f} ms" if value >= 0.0095 else f"{value * 1000:.1f} ms"
    return f"{value:.2f} s" if value < 0.995 else f"{value:.1f} s"


def count(number: int, noun: str) -> str:
    """Format a count with its noun: 1 token, 2 tokens."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
