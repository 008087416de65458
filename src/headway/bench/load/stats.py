"""Figures of a load run: latencies, throughput, refusals, goodput.

TTFT and E2E count from the scheduled arrival to the first token and to the end. TPOT is the time
per output token after the first, per request, exact where the server sends usage. ITL (inter-token
latency) is over the gaps between chunks of all requests; a server that puts several tokens into a
chunk has longer gaps and the same TPOT.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from headway.bench.load.records import LoadRecord, Outcome
from headway.core import terms as slo
from headway.core.slo.targets import met
from headway.errors import ConfigError
from headway.percentiles import percentile
from headway.workload.spec import Form, check_positive, parse_parts

PERCENTS = (50, 95, 99)

Percentiles = dict[int, float]
"""Values by percent; empty without data."""


@dataclass(frozen=True, slots=True)
class LoadTargets:
    """Targets of goodput in seconds; None for no target."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def are_met_by(self, record: LoadRecord) -> bool:
        """Whether a request completed within every target."""
        targets = slo.Targets(self.ttft_s, self.tpot_s, self.e2e_s)
        is_met = met(targets, record.ttft_s, record.tpot_s, record.e2e_s)
        return record.outcome is Outcome.COMPLETED and is_met


def parse_targets(text: str) -> LoadTargets:
    """Parse targets such as `ttft=2.0,tpot=0.2,e2e=30`."""

    def make(**given: float) -> LoadTargets:
        check_positive(**given)
        if not given:
            raise ConfigError("at least one target is needed")
        return LoadTargets(**{f"{name}_s": value for name, value in given.items()})

    form = Form("ttft=SECONDS,tpot=SECONDS,e2e=SECONDS", make, 0, optional=("ttft", "tpot", "e2e"))
    return parse_parts(text, text, form)


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests that met all targets: share of all that ended, and per second."""

    share: float
    requests_per_s: float


@dataclass(frozen=True, slots=True)
class LoadSummary:
    """Figures of one run.

    Throughput counts completed requests and their tokens, from the first scheduled arrival to the
    last end.
    """

    num_requests: int
    outcomes: dict[str, int]
    elapsed_s: float
    requests_per_s: float
    output_tokens_per_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    ttft_s: Percentiles
    itl_s: Percentiles
    tpot_s: Percentiles
    e2e_s: Percentiles
    lateness_s: Percentiles
    refusal_s: Percentiles
    refusals: dict[int, int] = field(default_factory=dict)
    """Refused requests by status."""
    retry_after_share: float | None = None
    errors: dict[str, int] = field(default_factory=dict)
    """Failed requests by message, most frequent first."""
    cached_share: float | None = None
    """Share of prompt tokens in prefix hits, if the server reports it."""
    num_without_usage: int = 0
    goodput: Goodput | None = None

    @property
    def unserved_share(self) -> float:
        """Share of ended requests that were refused or failed."""
        unserved = self.outcomes[Outcome.REFUSED] + self.outcomes[Outcome.FAILED]
        return unserved / max(1, unserved + self.outcomes[Outcome.COMPLETED])


def summarize_load(
    records: Sequence[LoadRecord], targets: LoadTargets | None = None
) -> LoadSummary:
    """Return the figures of these records, possibly of one tenant or none."""
    completed = [record for record in records if record.outcome is Outcome.COMPLETED]
    refused = [record for record in records if record.outcome is Outcome.REFUSED]
    failed = [record for record in records if record.outcome is Outcome.FAILED]
    outcomes = Counter(str(record.outcome) for record in records)
    elapsed_s = _elapsed_s(records)
    num_output_tokens = sum(record.num_output_tokens for record in completed)
    errors = Counter(record.error or "unknown" for record in failed)
    num_ended = len(completed) + len(refused) + len(failed)
    return LoadSummary(
        num_requests=len(records),
        outcomes={str(outcome): outcomes[outcome] for outcome in Outcome},
        elapsed_s=elapsed_s,
        requests_per_s=_per(len(completed), elapsed_s),
        output_tokens_per_s=_per(num_output_tokens, elapsed_s),
        num_prompt_tokens=sum(record.num_prompt_tokens for record in completed),
        num_output_tokens=num_output_tokens,
        ttft_s=percentiles(record.ttft_s for record in completed),
        itl_s=percentiles(gap for record in completed for gap in record.gaps_s()),
        tpot_s=percentiles(record.tpot_s for record in completed),
        e2e_s=percentiles(record.e2e_s for record in completed),
        lateness_s=percentiles(record.lateness_s for record in records),
        refusal_s=percentiles(record.e2e_s for record in refused),
        refusals=dict(sorted(Counter(record.status or 0 for record in refused).items())),
        retry_after_share=_share([record.retry_after is not None for record in refused]),
        errors=dict(errors.most_common()),
        cached_share=_cached_share(completed),
        num_without_usage=sum(not record.has_usage for record in completed),
        goodput=_goodput(records, targets, num_ended, elapsed_s),
    )


def by_tenant(
    records: Sequence[LoadRecord], targets: LoadTargets | None = None
) -> dict[str, LoadSummary]:
    """Return a summary per tenant; empty without tenants."""
    names = sorted({record.tenant for record in records if record.tenant is not None})
    return {
        name: summarize_load([record for record in records if record.tenant == name], targets)
        for name in names
    }


def percentiles(values: Iterable[float | None]) -> Percentiles:
    """Return the percentiles of the values."""
    present = sorted(value for value in values if value is not None)
    return {percent: percentile(present, percent) for percent in PERCENTS} if present else {}


def _elapsed_s(records: Sequence[LoadRecord]) -> float:
    ends = [record.ended_at for record in records if record.ended_at is not None]
    return max(ends) - min(record.scheduled_at for record in records) if ends else 0.0


def _per(amount: float, elapsed_s: float) -> float:
    return amount / elapsed_s if elapsed_s > 0 else 0.0


def _share(flags: Sequence[bool]) -> float | None:
    return sum(flags) / len(flags) if flags else None


def _cached_share(completed: Sequence[LoadRecord]) -> float | None:
    known = [record for record in completed if record.num_cached_tokens is not None]
    num_tokens = sum(record.num_prompt_tokens for record in known)
    return sum(record.num_cached_tokens or 0 for record in known) / num_tokens if known else None


def _goodput(
    records: Sequence[LoadRecord], targets: LoadTargets | None, num_ended: int, elapsed_s: float
) -> Goodput | None:
    if targets is None:
        return None
    num_good = sum(targets.are_met_by(record) for record in records)
    return Goodput(num_good / max(1, num_ended), _per(num_good, elapsed_s))
