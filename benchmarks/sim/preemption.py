"""Measures the cost of a small KV cache, by preemption method.

    python -m benchmarks.sim.preemption [--requests 2000] [--json FILE] [--plot FILE]
    python -m benchmarks.sim.preemption --model "$(scripts/get-test-model)" [--requests 48]

Without a model: a virtual engine (headway.sim) whose executor stores token ids in place of keys and
values, so that a misplaced block shows as a wrong token. All requests arrive at the start. Demand
is the blocks that `max_num_seqs` requests of mean length need at their end, in percent of the pool.
With a model: the model's executor and the machine's clock; the methods take turns in each round.

Every token is compared with that of a run with enough blocks.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path

from headway.clock import SystemClock
from headway.config import SchedulerConfig, load_config
from headway.core.engine import EngineCore
from headway.core.events import Admitted, Event, Finished, Preempted, Stepped, TokensEmitted
from headway.core.executor import Capacity, Executor
from headway.core.params import SamplingParams
from headway.core.plan import StepPlan
from headway.core.request import FinishReason, Request
from headway.core.scheduler import Scheduler
from headway.core.slo.steptime import StepCost
from headway.executors.fake import FakeExecutor
from headway.sim import StepProfile, TimedExecutor, VirtualEngine
from headway.workload import Bounds, ClosedLoop, Content, Lognormal, Prefixes, Synthetic, WorkItem

METHODS = ("auto", "trim", "checkpoint", "recompute")
DEMANDS = (1.1, 1.5, 2.0, 3.0)
BLOCK_SIZE = 16
MAX_PREEMPTIONS = 4
MAX_RECOMPUTED = 0.10
NOISE = 0.01
"""Relative difference below which two methods count as equally fast on the virtual clock.

The order of the same work alone changes the end a little."""
NO_PREFIXES = Prefixes()
URGENT_EVERY = 8
"""Steps between two requests of a higher priority."""


SMALL_MODEL = StepProfile(
    StepCost(
        constant_s=8e-3,
        per_decode_s=0.4e-3,
        per_prefill_token_s=0.3e-3,
        per_context_token_s=0.6e-6,
        per_attended_s=0.6e-6,
    )
)
"""Steps of about the figures of live/growth.py."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """A mix of requests, and the sizes of KV cache and offload store."""

    name: str
    prompts: Lognormal
    outputs: Lognormal
    demand: float = 2.0
    prefixes: Prefixes = NO_PREFIXES
    block_copy_s: float = 60e-6
    store_share: float = 0.25
    """Slots of the offload store per block of the pool."""
    max_num_seqs: int = 64
    has_priorities: bool = False
    """Every fourth request has a higher priority, and arrives while the others run."""

    def items(self, count: int) -> list[WorkItem]:
        content = Content(prefixes=self.prefixes)
        stream = Synthetic(ClosedLoop(1), self.prompts, self.outputs, content).items(seed=1)
        return [next(stream) for _ in range(count)]

    def capacity(self, items: Sequence[WorkItem]) -> Capacity:
        sizes = [len(item.prompt_token_ids) + item.num_output_tokens for item in items]
        blocks = [-(-size // BLOCK_SIZE) for size in sizes]
        num_blocks = max(*blocks, round(self.max_num_seqs * statistics.mean(blocks) / self.demand))
        num_slots = int(num_blocks * self.store_share)
        return Capacity(num_blocks, BLOCK_SIZE, 10_000, num_slots, self.block_copy_s)


def lengths(median: int, most: int, sigma: float = 0.5) -> Lognormal:
    return Lognormal(math.log(median), sigma, Bounds(4, most))


CHAT = Scenario("chat", lengths(100, 512), lengths(100, 512))
REAL = replace(CHAT, name="chat, real model", max_num_seqs=16)
SCENARIOS = (
    Scenario("long outputs", lengths(40, 256), lengths(300, 1024)),
    # Demand counts a shared prefix once for each request.
    Scenario("shared prefixes", lengths(400, 1024), lengths(120, 512), 4.0, Prefixes(0.8, 8)),
    replace(CHAT, name="ranks", has_priorities=True),
    # Copying a block takes longer than computing it.
    replace(CHAT, name="slow store", block_copy_s=12e-3),
)


@dataclass(slots=True)
class RunOutcome:
    """Sink of events: tokens, preemptions and end of each request."""

    tokens: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    preemptions: Counter[str] = field(default_factory=Counter[str])
    methods: Counter[str] = field(default_factory=Counter[str])
    num_recomputed: int = 0
    num_computed: int = 0
    finished_at: dict[str, float] = field(default_factory=dict[str, float])

    def __call__(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, TokensEmitted):
                self.tokens.setdefault(event.request_id, []).extend(event.token_ids)
            elif isinstance(event, Preempted):
                self.preemptions[event.request_id] += 1
                self.methods[event.method] += 1
            elif isinstance(event, Admitted):
                self.num_recomputed += event.num_recomputed
            elif isinstance(event, Stepped):
                self.num_computed += event.num_tokens
            elif isinstance(event, Finished):
                if event.reason is not FinishReason.LENGTH:
                    raise SystemExit(f"{event.request_id} ended by {event.reason}")
                self.finished_at[event.request_id] = event.at


@dataclass(frozen=True, slots=True)
class Row:
    """Result of one run."""

    scenario: str
    demand: float
    method: str
    num_requests: int
    num_blocks: int
    num_slots: int
    seconds: float
    mean_s: float
    """Mean time from the start to the end of a request."""
    num_preemptions: int
    most_preemptions: int
    methods: Mapping[str, int]
    recomputed: float
    """Share of the computed tokens that had been computed before."""
    num_wrong: int
    """Requests with a token that differs from the run with enough blocks."""


def request_of(index: int, item: WorkItem, priority: int, now: float) -> Request:
    params = SamplingParams(max_tokens=item.num_output_tokens, temperature=0.0, ignore_eos=True)
    return Request(
        id=str(index),
        token_ids=list(item.prompt_token_ids),
        params=params,
        seed=index,
        arrived_at=now,
        priority=priority,
    )


def simulate(
    scenario: Scenario, items: Sequence[WorkItem], method: str, is_ample: bool
) -> RunOutcome:
    """Run once on the virtual clock; an ample pool has blocks for all requests."""
    capacity = scenario.capacity(items)
    if is_ample:
        sizes = [len(item.prompt_token_ids) + item.num_output_tokens for item in items]
        capacity = replace(
            capacity, num_blocks=scenario.max_num_seqs * -(-max(sizes) // BLOCK_SIZE) * 2
        )
    outcome = RunOutcome()
    executor = TimedExecutor(FakeExecutor(capacity), SMALL_MODEL)
    engine = VirtualEngine(settings(scenario, method), executor, outcome)
    is_urgent = [scenario.has_priorities and index % 4 == 3 for index in range(len(items))]
    engine.send(
        request_of(index, item, 0, 0.0) for index, item in enumerate(items) if not is_urgent[index]
    )
    urgent = [(index, item) for index, item in enumerate(items) if is_urgent[index]][::-1]
    num_steps = count()

    def send_urgent(_plan: StepPlan | None = None) -> None:
        """Send a request of higher priority every few steps."""
        if urgent and (next(num_steps) % URGENT_EVERY == 0 or not engine.core.has_work):
            engine.send([request_of(*urgent.pop(), -1, engine.clock.now())])

    engine.on_step = send_urgent
    send_urgent()
    engine.run()
    return outcome


def settings(scenario: Scenario, method: str) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_seqs=scenario.max_num_seqs,
        preemption_method=method,
        max_preemptions=MAX_PREEMPTIONS,
        scheduling_policy="priority" if scenario.has_priorities else "fcfs",
    )


def row_of(
    scenario: Scenario,
    method: str,
    capacity: Capacity,
    outcome: RunOutcome,
    expected: RunOutcome,
) -> Row:
    finished = outcome.finished_at
    return Row(
        scenario=scenario.name,
        demand=scenario.demand,
        method=method,
        num_requests=len(finished),
        num_blocks=capacity.num_blocks,
        num_slots=capacity.num_slots,
        seconds=max(finished.values()),
        mean_s=statistics.mean(finished.values()),
        num_preemptions=outcome.preemptions.total(),
        most_preemptions=max(outcome.preemptions.values(), default=0),
        methods=dict(outcome.methods),
        recomputed=outcome.num_recomputed / outcome.num_computed,
        num_wrong=sum(outcome.tokens[key] != tokens for key, tokens in expected.tokens.items()),
    )


def battery(num_requests: int) -> list[Row]:
    """Run every demand and scenario with every method."""
    rows: list[Row] = []
    print(HEADER, flush=True)
    for scenario in (*(replace(CHAT, demand=demand) for demand in DEMANDS), *SCENARIOS):
        items = scenario.items(num_requests)
        without_priorities = replace(scenario, has_priorities=False)
        expected = simulate(without_priorities, items, "recompute", is_ample=True)
        if expected.preemptions:
            raise SystemExit("the run with enough blocks had preemptions")
        for method in METHODS:
            outcome = simulate(scenario, items, method, is_ample=False)
            rows.append(row_of(scenario, method, scenario.capacity(items), outcome, expected))
            print(line(rows[-1]), flush=True)
    return rows


# ------------------------------------------------------------------ on a real model


def measure(model: str, num_requests: int, rounds: int) -> list[Row]:
    """Run the chat mix on the model's executor; return the median round of each method."""
    items = REAL.items(num_requests)
    capacity = REAL.capacity(items)
    ample_executor = load_executor(
        model, replace(capacity, num_blocks=8 * capacity.num_blocks, num_slots=0)
    )
    expected = run_on(ample_executor, "recompute", items)
    ample_executor.close()
    executor = load_executor(model, capacity)
    taken: dict[str, list[Row]] = {method: [] for method in METHODS}
    print(HEADER, flush=True)
    for _ in range(rounds):
        for method in METHODS:
            outcome = run_on(executor, method, items)
            taken[method].append(row_of(REAL, method, executor.capacity(), outcome, expected))
            print(line(taken[method][-1]), flush=True)
    executor.close()
    return [sorted(rows, key=lambda row: row.seconds)[len(rows) // 2] for rows in taken.values()]


def run_on(executor: Executor, method: str, items: Sequence[WorkItem]) -> RunOutcome:
    """Run once on the machine's clock, counted from the start."""
    outcome, clock = RunOutcome(), StartedClock()
    scheduler = Scheduler(settings(REAL, method), executor.capacity())
    core = EngineCore(scheduler, executor, clock, outcome)
    for index, item in enumerate(items):
        core.add(request_of(index, item, 0, clock.now()))
    while core.has_work:
        core.step()
    return outcome


class StartedClock:
    """Clock that counts seconds from its creation."""

    def __init__(self) -> None:
        self._clock = SystemClock()
        self._started_at = self._clock.now()

    def now(self) -> float:
        return self._clock.now() - self._started_at


def load_executor(model: str, capacity: Capacity) -> Executor:
    """Load the model with a KV cache and an offload store of these sizes."""
    from headway.build import load_model, model_facts
    from headway.executors.hardware import probe_hardware
    from headway.resolve import resolve

    flags: dict[str, object] = {"model": model, "block_size": BLOCK_SIZE, "max_model_len": 1024}
    config = load_config({**flags, "kv_cache_memory_bytes": "64M"})
    sized = resolve(config, model_facts(config), probe_hardware())
    block_bytes = sized.kv_cache_bytes // sized.num_blocks
    flags["kv_cache_memory_bytes"] = block_bytes * capacity.num_blocks
    flags["preemption_store_bytes"] = block_bytes * capacity.num_slots
    return load_model(load_config(flags)).executor


# ---------------------------------------------------------------------- the report

HEADER = (
    f"{'scenario':16} {'demand':>6} {'method':10} {'seconds':>8} {'mean s':>7} "
    f"{'preempted':>9} {'most':>4} {'recomputed':>10} {'wrong':>5}  by method"
)


def line(row: Row) -> str:
    by_method = " ".join(f"{name} {count}" for name, count in sorted(row.methods.items()))
    return (
        f"{row.scenario:16} {row.demand:6.0%} {row.method:10} {row.seconds:8.1f} {row.mean_s:7.1f} "
        f"{row.num_preemptions:9} {row.most_preemptions:4} {row.recomputed:10.2%} "
        f"{row.num_wrong:5}  {by_method}"
    )


def failures_in(rows: Sequence[Row], noise: float) -> list[str]:
    """Return the failures that the rows show."""
    found: list[str] = []
    for row in rows:
        name = f"{row.scenario} at {row.demand:.0%} by {row.method}"
        if row.num_wrong:
            found.append(f"{name}: {row.num_wrong} requests have wrong tokens")
        if row.most_preemptions > MAX_PREEMPTIONS:
            found.append(f"{name}: a request was preempted {row.most_preemptions} times")
        if row.method != "auto":
            continue
        if row.recomputed > MAX_RECOMPUTED:
            found.append(f"{name}: {row.recomputed:.1%} of the tokens were computed again")
        peers = [it for it in rows if (it.scenario, it.demand) == (row.scenario, row.demand)]
        for peer in peers:
            if row.seconds > peer.seconds * (1.0 + noise):
                slower = row.seconds / peer.seconds - 1.0
                found.append(f"{name}: {slower:.1%} slower than {peer.method}")
    return found


def draw(path: Path, rows: Sequence[Row]) -> None:
    """Draw time and tokens computed again, by method and case."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cases = list(dict.fromkeys((row.scenario, row.demand) for row in rows))
    figure = Figure(figsize=(12, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    times, again = figure.subplots(1, 2)
    colors = ("#2a7f62", "#d9a441", "#4c72b0", "#b0413e")
    for place, (method, color) in enumerate(zip(METHODS, colors, strict=True)):
        of_method = {(row.scenario, row.demand): row for row in rows if row.method == method}
        fastest = [min(r.seconds for r in rows if (r.scenario, r.demand) == it) for it in cases]
        at = [index + 0.2 * (place - 1.5) for index in range(len(cases))]
        slower = [of_method[it].seconds / low for it, low in zip(cases, fastest, strict=True)]
        times.bar(at, slower, 0.2, label=method, color=color)
        again.bar(at, [100 * of_method[it].recomputed for it in cases], 0.2, color=color)
    times.set(title="time, the fastest method = 1", ylim=(0.9, None))
    times.legend()
    again.axhline(100 * MAX_RECOMPUTED, color="#888888", linestyle="--")
    again.set(title="tokens computed again, % of all computed")
    for panel in (times, again):
        names = [f"{name}\n{demand:.0%}".replace(" ", "\n") for name, demand in cases]
        panel.set_xticks(range(len(cases)), names, fontsize=8)
        panel.grid(alpha=0.3, axis="y")
    figure.savefig(path, dpi=120, format="png")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model")
    parser.add_argument("--requests", type=int)
    parser.add_argument("--rounds", type=int, default=3, help="rounds with a model")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    if args.model:
        rows, noise = measure(args.model, args.requests or 48, args.rounds), 0.05
    else:
        rows, noise = battery(args.requests or 2000), NOISE
    failures = failures_in(rows, noise)
    if args.json:
        document = {"rows": [asdict(row) for row in rows], "failures": failures}
        args.json.write_text(json.dumps(document, indent=2) + "\n")
    if args.plot:
        draw(args.plot, rows)
    print("\n".join(failures) if failures else "no failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
