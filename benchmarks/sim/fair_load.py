"""Scenarios of benchmarks/sim/fairness.py and their requests.

The requests of a tenant depend on the scenario, the tenant and the seed, never on the policy: the
same lengths in the same order, and in an open loop at the same times.

A tenant is backlogged (a closed loop with a number of clients), or sends at a rate. Rates are given
as a load: 1.0 is the rate at which a full engine serves requests of this kind (`measure_capacity`
in benchmarks/sim/fair_rig.py). A tenant is well-behaved if its load is not above its fair share.

All requests of a tenant have the same priority. So priorities matter to the policy `priority` only:
`fair` compares them within a tenant. A client may choose any priority, so the greedy tenants choose
the best; among equal tenants every second one does.
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
MODEST_LOAD = 0.5
"""Load of a well-behaved tenant, as a part of its share."""
ZIPF, ZIPF_LOAD, SHARED_PREFIXES = 1.2, 1.5, 0.35
TRACE_SCALE = 8
"""Divisor of the lengths of public traces, for a small model on a CPU."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Length distributions and samples of a kind of request."""

    prompt: Lognormal
    output: Lognormal
    num_samples: int = 1


Mix = tuple[tuple[float, Kind], ...]
"""Kinds, each with its share of the requests."""


def around(prompt: int, output: int, num_samples: int = 1) -> Mix:
    """Return one kind, with lognormal lengths around these medians."""
    prompts = Lognormal(log(prompt), 0.6, PROMPT_BOUNDS)
    outputs = Lognormal(log(output), 0.6, OUTPUT_BOUNDS)
    return ((1.0, Kind(prompts, outputs, num_samples)),)


def traced(prompt: tuple[float, float], output: tuple[float, float]) -> Kind:
    """Return the scaled lognormal fit (mu, sigma) of a public trace."""
    prompts = Lognormal(prompt[0] - log(TRACE_SCALE), prompt[1], Bounds(1, 3000))
    outputs = Lognormal(output[0] - log(TRACE_SCALE), output[1], Bounds(1, 1000))
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
    """One tenant: kinds of requests, load, weight and priority."""

    name: str
    mix: Mix
    num_clients: int = 0
    """Clients of a backlogged tenant, with one request each; 0: sends at a rate."""
    load: float = 0.0
    cv: float = 1.0
    """Coefficient of variation of the gaps between arrivals; 1: Poisson, above: bursts."""
    weight: float = 1.0
    priority: int = 1
    prefix_share: float = 0.0
    """Share of the prompts that begin with the tenant's prefix."""

    @property
    def is_backlogged(self) -> bool:
        return self.num_clients > 0


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """Arrival time and lengths of one request."""

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
    """Whether the prefix cache is on."""

    def share(self, tenant: Tenant) -> float:
        return tenant.weight / sum(other.weight for other in self.tenants)

    @property
    def well_behaved(self) -> tuple[Tenant, ...]:
        """Tenants that send at a rate within their share."""
        return tuple(
            tenant
            for tenant in self.tenants
            if not tenant.is_backlogged and tenant.load <= self.share(tenant)
        )


def draw_requests(
    scenario: Scenario, tenant: Tenant, capacity: float, seed: int
) -> Iterator[RequestSpec]:
    """Yield requests of a tenant without end; `at` is unused for a backlogged tenant."""
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
        yield RequestSpec(next(times, 0.0), num_prompt, num_output, kind.num_samples, has_prefix)


def equal(num_tenants: int, num_clients: int) -> Scenario:
    tenants = [
        Tenant(f"t{number}", USUAL, num_clients, priority=number % 2)
        for number in range(num_tenants)
    ]
    return Scenario(f"{num_tenants} equal", tuple(tenants))


def flood(num_tenants: int, ratio: int) -> Scenario:
    """Return a scenario with one tenant of `ratio` times the load of all others."""
    modest = Tenant("", USUAL, load=MODEST_LOAD / num_tenants)
    others = [replace(modest, name=f"guest{number}") for number in range(1, num_tenants)]
    load = ratio * modest.load * len(others)
    return Scenario(
        f"{num_tenants}, {ratio}:1 flood",
        (Tenant("flood", USUAL, load=load, priority=0), *others),
    )


def short_against_long() -> Scenario:
    tenants = (Tenant("short", SHORT, 96), Tenant("long", LONG, 96, priority=0))
    return Scenario("short against long", tenants)


def many_samples() -> Scenario:
    """Return a scenario with n = 8 against n = 1, and eight well-behaved tenants."""
    others = [Tenant(f"guest{at}", USUAL, load=MODEST_LOAD / 10) for at in range(8)]
    greedy = Tenant("greedy", EIGHT_SAMPLES, 96, priority=0)
    return Scenario("n=8 abuse", (greedy, Tenant("plain", USUAL, 96), *others))


def unequal_weights() -> Scenario:
    """Return backlogged tenants with weights 4, 2 and 1, and a well-behaved tenant."""
    waiting = [Tenant(f"w{weight}", USUAL, 96, weight=weight) for weight in (4, 2, 1)]
    modest = Tenant("guest", USUAL, load=MODEST_LOAD / 8)
    greedy = replace(waiting[2], priority=0)
    return Scenario("weights 4:2:1", (*waiting[:2], greedy, modest))


def zipf(num_tenants: int) -> Scenario:
    """Return tenants with loads by Zipf's law, in bursts, with shared prefixes.

    Of ten tenants six are Poisson, three have twice its deviation and one six times. A third of
    the prompts begins with the tenant's prefix.
    """
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
