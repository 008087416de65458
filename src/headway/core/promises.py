"""Who may still be promised something: the memory that feasibility needs.

How long outputs turn out to be, and how much of the machine's time tighter requests have been
asking for. Kept by the scheduler, which decides, and in the same way by the API process, which
refuses at once what the scheduler would refuse at the end of a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import exp, inf

from headway.core.deadlines import Ahead, Feasible, Infeasible, Job, Pace, feasible
from headway.core.waiting.accounts import OUTPUT_COST, PROMPT_COST

RATE_WINDOW_S = 20.0
MIN_WINDOW_S = 2.0
LENGTH_SMOOTHING = 0.02
LENGTH_MARGIN = 1.2


class OutputLengths:
    """How long outputs turn out to be, as a share of what was allowed: most requests may have
    far more than they will come to. Kept by tier."""

    def __init__(self) -> None:
        self._shares: dict[str, float] = {}

    def observe(self, tier: str, num_tokens: int, max_tokens: int) -> None:
        seen = num_tokens / max(1, max_tokens)
        before = self._shares.get(tier, seen)
        self._shares[tier] = before + LENGTH_SMOOTHING * (seen - before)

    def expected_left(self, tier: str, num_output: int, max_tokens: int) -> int:
        """Tokens to come. One that has outlived the guess is taken to be half-way to the end."""
        guess = LENGTH_MARGIN * self._shares.get(tier, 1.0) * max_tokens
        num_left = guess - num_output
        if num_left < 1:
            num_left = (max_tokens - num_output) / 2
        return max(1, min(max_tokens - num_output, int(num_left)))


class TighterLoad:
    """The share of the machine's time asked for by requests of each tightness, lately: those of
    looser promises must count on as much being asked for again."""

    def __init__(self) -> None:
        self._work_s: dict[int, float] = {}
        self._seconds = 0.0
        """Those that the sums are over, with the same forgetting."""
        self._seen_at: float | None = None

    def add(self, horizon_s: float, work_s: float, now: float) -> None:
        self._decay(now)
        key = _tightness(horizon_s)
        self._work_s[key] = self._work_s.get(key, 0.0) + work_s

    def share(self, horizon_s: float, now: float) -> float:
        """Seconds of work per second that came with a clearly tighter promise than this."""
        self._decay(now)
        key = _tightness(horizon_s)
        work_s = sum([work_s for other, work_s in self._work_s.items() if other < key])
        return work_s / max(self._seconds, MIN_WINDOW_S)

    def _decay(self, now: float) -> None:
        passed_s = 0.0 if self._seen_at is None else max(0.0, now - self._seen_at)
        factor = exp(-passed_s / RATE_WINDOW_S)
        self._work_s = {key: work_s * factor for key, work_s in self._work_s.items()}
        self._seconds = self._seconds * factor + RATE_WINDOW_S * (1.0 - factor)
        self._seen_at = now if self._seen_at is None else max(self._seen_at, now)


def _tightness(horizon_s: float) -> int:
    """Promises within a factor of two of each other are about as tight."""
    return min(16, int(horizon_s).bit_length()) if horizon_s >= 1.0 else -1


class Promises:
    """Judges what is asked for by what the engine can do."""

    def __init__(self) -> None:
        self.lengths = OutputLengths()
        self._tighter = TighterLoad()

    def judge(
        self, job: Job, tenant: str, others: Iterable[tuple[str, Job]], pace: Pace, now: float
    ) -> Feasible | Infeasible:
        """Can what this request asks for be promised, beside what the others were? They come with
        their tenants. It counts as asked for either way."""
        cost = pace.cost
        horizon_s = min(job.next_due_at, job.last_due_at) - now
        if horizon_s == inf or not cost.is_known:
            return Feasible()
        reserved = self._tighter.share(horizon_s, now)
        self._tighter.add(horizon_s, job.prefill_s(cost) + job.decode_s(cost), now)
        jobs, num_ahead = list[Job](), 0.0
        for name, other in others:
            jobs.append(other)
            if name == tenant:
                num_ahead += other.num_prefill_left * PROMPT_COST
                num_ahead += other.num_samples * other.num_output_left * OUTPUT_COST
        owed_s = pace.shares.owed(tenant, num_ahead) * cost.per_prefill_token_s
        return feasible(job, jobs, pace, now, Ahead(reserved, owed_s))
