"""What is simulated: engines of one profile, their settings, tenants, frontends and failures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from headway.core.terms import Terms
from headway.errors import ConfigError
from headway.routing import RULES, Router
from headway.sim.fleet import EngineSpec, VirtualFleet
from headway.sim.profile.machine import MachineProfile

MAX_ENGINES = 4096


@dataclass(frozen=True, slots=True)
class TermChange:
    """Fields of a tenant's terms and targets that a simulation sets."""

    terms: Mapping[str, Any] = field(default_factory=dict[str, Any])
    targets: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def apply(self, terms: Terms) -> Terms:
        return replace(terms, **self.terms, targets=replace(terms.targets, **self.targets))


class Frontends(Protocol):
    """The routers of several frontends, and what passes between them."""

    @property
    def routers(self) -> Sequence[Router]: ...

    def connect(self, fleet: VirtualFleet) -> None:
        """Have the routers decide for a fleet, which has its first engines."""
        ...


@dataclass(frozen=True, slots=True)
class Setup:
    """Engines, how many there are, and who decides which of them gets a request."""

    profile: MachineProfile
    spec: EngineSpec
    num_engines: int = 1
    max_engines: int | None = None
    """Most engines, with an autoscaler; `num_engines` is the fewest then."""
    rule: str = "ttft"
    """How a router chooses an engine; one engine has no router."""
    make_frontends: Callable[[str], Frontends] | None = None
    """Makes several frontends with a rule; None: one frontend with a router of its own."""
    term_changes: Mapping[str, TermChange] = field(default_factory=dict[str, TermChange])
    """By tenant; drawn tenants have weight 1 and no targets, recorded ones their own."""
    kill_every_s: float | None = None
    """An engine is killed as often, and another one is there after the start-up time."""

    def __post_init__(self) -> None:
        if self.num_engines < 1:
            raise ConfigError(f"at least 1 engine is needed, not {self.num_engines}")
        if not self.num_engines <= self.most_engines <= MAX_ENGINES:
            raise ConfigError(
                f"{self.num_engines}..{self.most_engines} engines: the first number is the "
                f"smaller one, and there are at most {MAX_ENGINES}"
            )
        if self.rule not in RULES:
            raise ConfigError(f"unknown routing rule {self.rule!r}; one of {', '.join(RULES)}")
        if self.kill_every_s is not None and not self.kill_every_s > 0:
            raise ConfigError(f"seconds between kills must be above 0, not {self.kill_every_s:g}")
        least_s = self.profile.start_s / self.num_engines
        if self.kill_every_s is not None and self.kill_every_s <= least_s:
            raise ConfigError(
                f"an engine takes {self.profile.start_s:g} s to start: with one killed every "
                f"{self.kill_every_s:g} s none of {self.num_engines} would be left; kill every "
                f"{2 * least_s:.2g} s, or less often"
            )

    @staticmethod
    def of(profile: MachineProfile) -> Setup:
        """Return one engine with the settings under which the profile was measured."""
        spec = EngineSpec(profile.scheduler, profile.capacity, profile.enable_prefix_caching)
        return Setup(profile, spec)

    @property
    def most_engines(self) -> int:
        return self.num_engines if self.max_engines is None else self.max_engines

    @property
    def is_alone(self) -> bool:
        """Whether one engine serves all, without a router, as in `headway serve`."""
        return self.most_engines == 1 and self.make_frontends is None

    def fixed(self, num_engines: int) -> Setup:
        """Return the setup with so many engines all the time."""
        return replace(self, num_engines=num_engines, max_engines=None)
