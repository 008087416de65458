"""A load on simulated engines, as its clients see it.

Requests reach an engine after a measured delay, and tokens reach the client after another. One
engine has no router, as in `headway serve`; several have the router of a frontend, or one that
several frontends share.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from math import inf

from headway.core.terms import NO_TERMS, Terms
from headway.errors import ConfigError
from headway.sim.fleet import FleetRecord
from headway.sim.prediction.pool import EnginePool
from headway.sim.prediction.served import ServedLoad, ServedRequest
from headway.sim.prediction.setup import Setup
from headway.sim.profile.machine import Delays
from headway.sim.recording.items import RecordedItem
from headway.workload import Listed, WorkItem, Workload

PAUSE_AFTER_REFUSAL_S = 0.1
"""A client of a closed loop whose request was refused sends the next one after this time."""
WATCH_EVERY = 500
Watch = Callable[[float], None]
"""Called after every so many requests with the share of the load that was sent."""


@dataclass(frozen=True, slots=True)
class Limits:
    """When a simulated load stops sending; requests in flight are served."""

    num_requests: int | None = None
    duration_s: float | None = None

    def __post_init__(self) -> None:
        if self.num_requests is None and self.duration_s is None:
            raise ConfigError("a load needs a number of requests, a duration, or both")
        if self.num_requests is not None and self.num_requests < 1:
            raise ConfigError(f"at least 1 request is needed, not {self.num_requests}")
        if self.duration_s is not None and not 0.0 < self.duration_s < inf:
            raise ConfigError(
                f"a duration must be a number above 0 and finite, not {self.duration_s:g}"
            )

    def share(self, num_sent: int, at: float) -> float:
        """Return how much of a load was sent, with this many requests at this time."""
        by_number = num_sent / self.num_requests if self.num_requests else 0.0
        by_time = at / self.duration_s if self.duration_s else 0.0
        return min(1.0, max(by_number, by_time))


def serve_load(
    setup: Setup,
    workload: Workload,
    limits: Limits,
    seed: int = 0,
    machine_seed: int | None = None,
    watch: Watch | None = None,
) -> ServedLoad:
    """Simulate a load until all its requests have ended.

    `seed` draws the requests, as in `headway bench serve`. `machine_seed` draws how fast the
    machine is; without one it has the expected speed, with residuals. `watch` is called now and
    then.
    """
    return _Clients(setup, workload, limits, seed, machine_seed, watch).run()


class _Clients:
    """The clients of a load, and the fleet that serves them."""

    def __init__(
        self,
        setup: Setup,
        workload: Workload,
        limits: Limits,
        seed: int,
        machine_seed: int | None,
        watch: Watch | None,
    ) -> None:
        self._setup = setup
        self._watch = watch
        self._limits = limits
        self._rng = random.Random(f"clients/{seed}/{machine_seed}")
        self._served = ServedLoad()
        self._requests: dict[str, ServedRequest] = {}
        self._numbers = count()
        self._num_in_flight = 0
        self._concurrency = workload.concurrency
        self._followers: dict[int | None, list[RecordedItem]] = {}
        """Requests that continue the answer to the one of this number."""
        self._num_following = 0
        """Those that have yet to be sent."""
        self._items: Iterator[WorkItem] = islice(workload.items(seed), limits.num_requests)
        if isinstance(workload, Listed):
            self._items = iter([item for item in self._items if not self._keep_if_following(item)])
        self._is_all_sent = False
        self._pool = EnginePool(setup, self._served, machine_seed)
        self._fleet = self._pool.fleet
        self._num_frontends = len(self._fleet.routers)
        self._fleet.on_finish = self._finish
        self._fleet.on_refuse = self._refuse

    def run(self) -> ServedLoad:
        self._pool.start()
        if self._concurrency is None:
            self._send_next()
        else:
            for _ in range(self._concurrency):
                self._send_now()
        self._fleet.run(inf)
        return self._served

    def _keep_if_following(self, item: WorkItem) -> bool:
        """Keep a request that continues another one; return whether it does."""
        if not isinstance(item, RecordedItem) or item.after is None:
            return False
        self._followers.setdefault(item.after, []).append(item)
        self._num_following += 1
        return True

    def _end_if_done(self) -> None:
        if self._is_all_sent and not self._num_in_flight and not self._num_following:
            self._pool.end()

    def _send_next(self) -> None:
        """Schedule the next request of an open loop at its time."""
        item = self._next_item()
        if item is None or self._is_over(item.at):
            self._is_all_sent = True
            self._end_if_done()
        else:
            self._fleet.at(item.at, self._send_open, item)

    def _send_open(self, item: WorkItem) -> None:
        self._send(item, item.at)
        self._send_next()

    def _send_followers(self, number: int | None, answered_at: float) -> None:
        """Schedule the requests that continue an answer."""
        for item in self._followers.pop(number, ()):
            at = answered_at + item.think_s
            self._fleet.at(at, self._send_following, item, at)

    def _send_following(self, item: RecordedItem, at: float) -> None:
        self._num_following -= 1
        self._send(item, at)

    def _refuse_followers(self, number: int | None, reason: str) -> None:
        """Count requests that continue an answer which was refused as refused too."""
        for item in self._followers.pop(number, ()):
            self._num_following -= 1
            now, num_prompt = self._fleet.clock.now(), len(item.prompt_token_ids)
            refused = ServedRequest(item.tenant, now, num_prompt, item.num_output_tokens)
            refused.refusal_reason = reason
            self._served.requests.append(refused)
            self._refuse_followers(item.number, reason)

    def _send_now(self) -> None:
        """Send the next request of a closed loop."""
        now = self._fleet.clock.now()
        item = None if self._is_over(now) else self._next_item()
        if item is None:
            self._is_all_sent = True
            self._end_if_done()
        else:
            self._send(item, now)

    def _next_item(self) -> WorkItem | None:
        return next(self._items, None)

    def _is_over(self, at: float) -> bool:
        return self._limits.duration_s is not None and at >= self._limits.duration_s

    def _send(self, item: WorkItem, at: float) -> None:
        self._num_in_flight += 1
        num_prompt, num_output = len(item.prompt_token_ids), item.num_output_tokens
        capacity = self._setup.spec.capacity
        if num_prompt + num_output > capacity.max_model_len:
            raise ConfigError(
                f"a request has {num_prompt} prompt and {num_output} output tokens; the longest "
                f"context is {capacity.max_model_len}: --max-prompt-tokens cuts those of a trace, "
                "--set max_model_len=N simulates a longer one"
            )
        delay_s = self._rng.choice(self._delays.to_engine_s)
        # A recording has the times of its engine, any other load those of its clients.
        is_recorded = isinstance(item, RecordedItem)
        sent_at, arrives_at = (at - delay_s, at) if is_recorded else (at, at + delay_s)
        request = ServedRequest(item.tenant, sent_at, num_prompt, num_output)
        self._served.requests.append(request)
        number = next(self._numbers)
        if self._watch is not None and number % WATCH_EVERY == 0:
            self._watch(self._limits.share(number, at))
        request_id = str(number)
        self._requests[request_id] = request
        record = FleetRecord(
            request_id,
            list(item.prompt_token_ids),
            num_output,
            self._terms_of(item),
            arrives_at,
            frontend=number % self._num_frontends,
        )
        if isinstance(item, RecordedItem):
            record.output_ids, record.max_tokens = item.output_ids, item.max_tokens
            record.priority, record.number = item.priority, item.number
        self._fleet.send(record)

    def _terms_of(self, item: WorkItem) -> Terms:
        if isinstance(item, RecordedItem):
            terms = item.terms
        elif item.tenant is None:
            return NO_TERMS
        else:
            terms = Terms(tenant=item.tenant, cache_group=item.tenant)
        change = self._setup.term_changes.get(terms.tenant)
        return terms if change is None else change.apply(terms)

    @property
    def _delays(self) -> Delays:
        return self._setup.profile.delays_with(self._num_in_flight // self._num_frontends)

    def _finish(self, record: FleetRecord) -> None:
        request, delays = self._requests.pop(record.id), self._delays
        self._num_in_flight -= 1
        self._fleet.records.pop(record.id)
        if record.first_token_at is not None:
            request.first_token_at = record.first_token_at + self._rng.choice(delays.to_client_s)
        finished_at = (record.finished_at or 0.0) + self._rng.choice(delays.to_client_s)
        request.finished_at = max(finished_at, request.first_token_at or 0.0)
        request.num_cached_tokens = record.num_cached
        request.num_preemptions = record.num_preemptions
        if self._concurrency is not None:
            self._fleet.at(request.finished_at, self._send_now)
        self._send_followers(record.number, record.finished_at or 0.0)
        self._end_if_done()

    def _refuse(self, record: FleetRecord) -> None:
        self._requests.pop(record.id).refusal_reason = record.refusal_reason
        self._fleet.records.pop(record.id)
        self._num_in_flight -= 1
        if self._concurrency is not None:
            self._fleet.at(self._fleet.clock.now() + PAUSE_AFTER_REFUSAL_S, self._send_now)
        self._refuse_followers(record.number, record.refusal_reason)
        self._end_if_done()
