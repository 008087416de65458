"""Sends the requests of sim/control.py and sim/deadlines.py to a real server.

Shared by the commands of benchmarks/live/served_pace.py. Prompts are random. Results are records of
headway.sim, with the times at which the client received each token, so that the same code judges
both kinds of benchmark.

One thing differs: an answer has exactly `max_tokens` tokens, because a real model cannot be made to
stop at a length that its server does not know. On the virtual clock `max_tokens` is up to three
times the output.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.live.account_clients import write_tenants
from benchmarks.live.overload import SMALL
from benchmarks.support import proc_stats
from benchmarks.support.servers import RunningServer
from headway.bench.load.openai import Access, Target
from headway.bench.load.records import LoadRecord, Outcome
from headway.bench.load.runner import LoadRun, RunLimits, run_load
from headway.core.terms import NO_TERMS, Targets, Terms
from headway.sim import Record
from headway.tenancy.keys import make_key
from headway.workload import Vocabulary, WorkItem

MODEL_ERROR = "headway_step_time_model_error"
REFUSED = "headway_requests_refused_total"
FAKE_STEP_S = 0.01
FAKE_SHRINK = 8
"""Divisor of lengths for the fake engine, which has few blocks."""
WARM_UP = 24
WARM_UP_CLIENTS = 8
MAX_CONCURRENCY = 8192


@dataclass(frozen=True, slots=True)
class Mix:
    """Requests drawn by a benchmark on the virtual clock, with random prompts."""

    draw: Callable[[int], Iterator[Record]]
    """Yields the requests of a seed."""
    vocabulary: Vocabulary
    shrink: int = 1
    concurrency: int | None = None

    def items(self, seed: int) -> Iterator[WorkItem]:
        prompts = Random(f"served prompts/{seed}")
        for one in self.draw(seed):
            prompt = self.vocabulary.token_ids(prompts, max(4, one.num_prompt // self.shrink))
            num_output = max(2, one.num_output // self.shrink)
            yield WorkItem(tuple(prompt), num_output, one.arrived_at, one.terms.tenant)


def record_of(record: LoadRecord, terms: Terms = NO_TERMS, later_s: float = 0.0) -> Record:
    """Return the record of a request; its run began `later_s` after time 0."""
    is_done = record.outcome is Outcome.COMPLETED and bool(record.chunk_times)
    first_at = record.first_token_at
    return Record(
        id=f"r{record.index}",
        arrived_at=record.scheduled_at + later_s,
        num_prompt=record.num_prompt_tokens,
        num_output=record.num_output_tokens,
        max_tokens=record.num_output_tokens,
        terms=terms,
        first_token_at=None if first_at is None else first_at + later_s,
        finished_at=record.chunk_times[-1] + later_s if is_done else None,
        is_refused=record.outcome is Outcome.REFUSED,
    )


def scaled(targets: Targets, factor: float) -> Targets:
    def times(value: float | None) -> float | None:
        return None if value is None else value * factor

    return Targets(times(targets.ttft_s), times(targets.tpot_s), times(targets.deadline_s))


def body_of(targets: Targets) -> dict[str, float]:
    """Return the fields of a body with these targets."""
    fields = {
        "ttft_ms": targets.ttft_s,
        "tpot_ms": targets.tpot_s,
        "deadline_ms": targets.deadline_s,
    }
    return {name: 1000 * value for name, value in fields.items() if value is not None}


AUDITOR = "auditor"
"""Tenant that may read the metrics."""


@dataclass(frozen=True, slots=True)
class RunningTarget:
    """A running server, and the keys and fields of each tenant's requests."""

    server: RunningServer
    target: Target
    key: str

    def with_fields(self, bodies: Mapping[str, Mapping[str, object]]) -> RunningTarget:
        """Return a copy that sends these fields with each tenant's requests."""
        access = {
            name: Access(self.target.access[name].api_key, body) for name, body in bodies.items()
        }
        return replace(self, target=replace(self.target, access=access))

    async def send(self, mix: Mix, duration_s: float, seed: int) -> LoadRun:
        limits = RunLimits(duration_s=duration_s, max_concurrency=MAX_CONCURRENCY)
        return await run_load(self.target, mix, limits, seed)

    async def scrape(self) -> proc_stats.Scrape:
        return await asyncio.to_thread(proc_stats.scrape, self.server, self.key)


@dataclass(frozen=True, slots=True)
class ServerFactory:
    """Starts servers with a model, or fake servers."""

    model: Path | None

    def mix(self, draw: Callable[[int], Iterator[Record]], concurrency: int | None = None) -> Mix:
        if self.model is None:
            return Mix(draw, proc_stats.LETTERS, FAKE_SHRINK, concurrency)
        return Mix(draw, Vocabulary(), 1, concurrency)

    @contextmanager
    def server(
        self,
        scheduler: Mapping[str, Any],
        tenants: tuple[str, ...],
        bounds: Mapping[str, object] | None = None,
    ) -> Iterator[RunningTarget]:
        """Yield a server; each tenant has a key and a tier of its name."""
        with TemporaryDirectory() as name:
            folder, secrets = Path(name), {one: make_key() for one in (*tenants, AUDITOR)}
            # Targets follow from what is measured, so that none is too tight.
            one = "{min_ttft_ms: 1, min_tpot_ms: 1}"
            tiers = f"tiers: {{{', '.join(f'{tenant}: {one}' for tenant in tenants)}}}"
            abouts = {tenant: f"{{keys: [%s], tier: {tenant}}}" for tenant in tenants}
            abouts[AUDITOR] = "{keys: [%s], admin: true}"
            path = write_tenants(folder, tiers, abouts, secrets)
            key = secrets[AUDITOR]
            with proc_stats.started(
                self.model,
                folder,
                {**(bounds or {}), "tenants_file": str(path)},
                {**SMALL, **scheduler},
                key=key,
                **{"step_s": FAKE_STEP_S, "scheduling_policy": "fair", **scheduler},
            ) as server:
                target = proc_stats.run_client(proc_stats.target_of(server, key))
                access = {tenant: Access(secrets[tenant]) for tenant in tenants}
                yield RunningTarget(server, replace(target, access=access), key)

    async def warm_up(self, served: RunningTarget, draw: Callable[[int], Iterator[Record]]) -> None:
        """Send a few requests without targets, to warm caches and the step-time model."""
        plain = served.with_fields({name: {} for name in served.target.access})
        mix = self.mix(draw, WARM_UP_CLIENTS)
        await run_load(plain.target, mix, RunLimits(num_requests=WARM_UP), -1000)
