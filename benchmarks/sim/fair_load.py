"""Scenarios of benchmarks/sim/fairness.py and their requests.

What a tenant sends depends on the scenario, the tenant and the seed, never on the policy: the same
lengths in the same order, and in an open loop at the same times.

A tenant either always has a number of requests in the engine (a closed loop: it is backlogged), or
sends at a rate. Rates are given as a load: 1.0 is as many requests of its kind as the whole engine
serves when it is full of them (`measure_capacity` in benchmarks/sim/fair_rig.py). A tenant behaves
well if its load is not above its share, its weight among those of all tenants.

Priorities matter to the policy `priority` only, where a tenant's requests all have the same one:
fair shares heed them among requests of one tenant. Nothing keeps a client from claiming a good
one, so the greedy tenants claim the best; among equals every second tenant does.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import log

from headway.workload import Bounds, Lognormal
from headway.workload.arrivals import Gamma

PROMPT_BOUNDS, OUTPUT_BOUNDS = Bounds(8, 2000), Bounds(2, 400)
PREFIX_TOKENS = 128
GUEST_LOAD = 0.5
"""Of its share, what a tenant sends that stays well within it."""
ZIPF, ZIPF_LOAD, SHARED_PREFIXES = 1.2, 1.5, 0.35
SCALE = 8
"""Lengths of public traces are divided by this, for a small model on a processor."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What a request is like."""

    prompt: Lognormal
    output: Lognormal
    num_samples: int = 1


Mix = tuple[tuple[float, Kind], ...]
"""Kinds, each with its share of the requests."""


def around(prompt: int, output: int, num_samples: int = 1) -> Mix:
    """Lengths that are lognormal around these medians."""
    prompts = Lognormal(log(prompt), 0.6, PROMPT_BOUNDS)
    outputs = Lognormal(log(output), 0.6, OUTPUT_BOUNDS)
    return ((1.0, Kind(prompts, outputs, num_samples)),)


def traced(prompt: tuple[float, float], output: tuple[float, float]) -> Kind:
    """The lognormal fit (mu, sigma) of a public trace, scaled."""
    prompts = Lognormal(prompt[0] - log(SCALE), prompt[1], Bounds(1, 3000))
    outputs = Lognormal(output[0] - log(SCALE), output[1], Bounds(1, 1000))
    return Kind(prompts, outputs)


USUAL = around(160, 80)
SHORT, LONG = around(32, 32), around(1000, 200)
EIGHT_SAMPLES = around(160, 80, num_samples=8)
TRACES: Mix = (
    (0.60, traced((6.63, 0.99), (5.02, 0.86))),  # chat: Azure 2023, conversations
    (0.20, traced((7.00, 1.36), (2.79, 0.85))),  # code: Azure 2023, code
    (0.15, traced((5.23, 1.84), (6.77, 0.97))),  # reasoning: ServeGen, DeepSeek-R1
    (0.05, traced((8.74, 1.20), (5.62, 0.65))),  # long: Mooncake, conversations
)


@dataclass(frozen=True, slots=True)
class Tenant:
    """One tenant: what it asks for, and how much of it."""

    name: str
    mix: Mix
    num_callers: int = 0
    """Requests it always has in the engine; 0: it sends at a rate."""
    load: float = 0.0
    cv: float = 1.0
    """Of the gaps between arrivals: 1 is Poisson, more comes in bursts."""
    weight: float = 1.0
    priority: int = 1
    prefix_share: float = 0.0
    """Of its prompts, how many begin with the tenant's prefix."""

    @property
    def is_backlogged(self) -> bool:
        return self.num_callers > 0


@dataclass(frozen=True, slots=True)
class Ask:
    """A request as a tenant makes it."""

    at: float
    num_prompt: int
    num_output: int
    num_samples: int
    has_prefix: bool


@dataclass(frozen=True, slots=True)
class Scenario:
    """Tenants that share an engine."""

    name: str
    tenants: tuple[Tenant, ...]
    has_cache: bool = False
    """Whether prefixes are cached."""

    def share(self, tenant: Tenant) -> float:
        return tenant.weight / sum(other.weight for other in self.tenants)

    @property
    def guests(self) -> tuple[Tenant, ...]:
        """The tenants that behave well."""
        return tuple(
            tenant
            for tenant in self.tenants
            if not tenant.is_backlogged and tenant.load <= self.share(tenant)
        )


def asks(scenario: Scenario, tenant: Tenant, capacity: float, seed: int) -> Iterator[Ask]:
    """Without end. A backlogged tenant's come when an earlier one is answered, not `at`."""
    draw = random.Random(f"{scenario.name}/{tenant.name}/{seed}")
    shares = [share for share, _ in tenant.mix]
    kinds = [kind for _, kind in tenant.mix]
    rate = tenant.load * capacity
    times = iter(()) if tenant.is_backlogged else Gamma(rate, tenant.cv).times(draw)
    while True:
        (kind,) = draw.choices(kinds, shares)
        num_prompt, num_output = kind.prompt.draw(draw), kind.output.draw(draw)
        has_prefix = draw.random() < tenant.prefix_share
        if has_prefix:
            num_prompt = max(num_prompt, PREFIX_TOKENS + 1)
        yield Ask(next(times, 0.0), num_prompt, num_output, kind.num_samples, has_prefix)


def equal(num_tenants: int, num_callers: int) -> Scenario:
    tenants = [
        Tenant(f"t{number}", USUAL, num_callers, priority=number % 2)
        for number in range(num_tenants)
    ]
    return Scenario(f"{num_tenants} equal", tuple(tenants))


def flood(num_tenants: int, ratio: int) -> Scenario:
    """One sends `ratio` times what all the others send together."""
    guest = Tenant("", USUAL, load=GUEST_LOAD / num_tenants)
    guests = [replace(guest, name=f"guest{number}") for number in range(1, num_tenants)]
    load = ratio * guest.load * len(guests)
    return Scenario(
        f"{num_tenants}, {ratio}:1 flood",
        (Tenant("flood", USUAL, load=load, priority=0), *guests),
    )


def short_against_long() -> Scenario:
    tenants = (Tenant("short", SHORT, 96), Tenant("long", LONG, 96, priority=0))
    return Scenario("short against long", tenants)


def many_samples() -> Scenario:
    """One asks for eight samples of everything, another for one, and eight are guests."""
    guests = [Tenant(f"guest{at}", USUAL, load=GUEST_LOAD / 10) for at in range(8)]
    greedy = Tenant("greedy", EIGHT_SAMPLES, 96, priority=0)
    return Scenario("n=8 abuse", (greedy, Tenant("plain", USUAL, 96), *guests))


def unequal_weights() -> Scenario:
    """Four, two and one parts for tenants that always wait, and one for a guest."""
    waiting = [Tenant(f"w{weight}", USUAL, 96, weight=weight) for weight in (4, 2, 1)]
    guest = Tenant("guest", USUAL, load=GUEST_LOAD / 8)
    greedy = replace(waiting[2], priority=0)
    return Scenario("weights 4:2:1", (*waiting[:2], greedy, guest))


def zipf(num_tenants: int) -> Scenario:
    """Loads by Zipf's law, in bursts: of ten tenants six are Poisson, three have twice its
    deviation and one six times. A third of the prompts begins as others of the tenant."""
    weights = [rank**-ZIPF for rank in range(1, num_tenants + 1)]
    draw = random.Random("burstiness")
    cvs = [cv for cv, tenths in ((1.0, 6), (2.0, 3), (6.0, 1)) for _ in range(tenths)]
    drawn = [cvs[at % len(cvs)] for at in range(num_tenants)]
    draw.shuffle(drawn)
    tenants = [
        Tenant(
            f"t{rank}",
            TRACES,
            load=ZIPF_LOAD * weight / sum(weights),
            cv=cv,
            priority=0 if rank == 0 else 1,
            prefix_share=SHARED_PREFIXES,
        )
        for rank, (weight, cv) in enumerate(zip(weights, drawn, strict=True))
    ]
    return Scenario(f"{num_tenants}, Zipf {ZIPF:g}, bursts", tuple(tenants), has_cache=True)


SCENARIOS = (
    equal(2, 96),
    equal(10, 16),
    equal(30, 8),
    flood(2, 10),
    flood(2, 100),
    flood(10, 10),
    flood(10, 100),
    flood(30, 10),
    flood(30, 100),
    short_against_long(),
    many_samples(),
    unequal_weights(),
    zipf(30),
)
