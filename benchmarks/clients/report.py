"""Tables of the outcomes: for the terminal, and for docs/clients.md."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.clients.runner import Outcome
from benchmarks.clients.uses.checks import Result


def as_text(outcome: Outcome) -> str:
    """Return one line per check, and a line for the client."""
    lines = [
        f"  {_verdict(result):<11} {result.name}: {_why(result)}" for result in outcome.results
    ]
    return "\n".join([f"{outcome.client.name} {_versions(outcome)}: {_count(outcome)}", *lines])


def as_markdown(outcomes: Sequence[Outcome]) -> str:
    """Return a row per client, then what failed and why."""
    lines = ["| client | version | what was run | passed |", "|---|---|---|---|"]
    lines += [
        f"| {one.client.title} | {_versions(one)} | {one.client.about} | {_count(one)} |"
        for one in outcomes
    ]
    lines.append("")
    for one in outcomes:
        failed = [result for result in one.results if not result.is_ok]
        lines += [f"- {one.client.title}, {result.name}: {_why(result)}" for result in failed]
    return "\n".join(lines)


def _versions(outcome: Outcome) -> str:
    return ", ".join(outcome.versions.values())


def _count(outcome: Outcome) -> str:
    if outcome.problem:
        return f"not run: {outcome.problem}"
    num_passed = sum(result.is_ok for result in outcome.results)
    return f"{num_passed} of {len(outcome.results)}"


def _verdict(result: Result) -> str:
    if result.is_expected:
        return "ok" if result.is_ok else "known"
    return "NOW PASSES" if result.is_ok else "FAILED"


def _why(result: Result) -> str:
    return result.known_reason or result.detail
