"""`headway simulate`: predict what clients of a server or fleet would see."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from headway.bench.load.stats import parse_targets
from headway.bench.load.workload import DEFAULT_NUM_REQUESTS, WorkloadOptions, workload_of
from headway.bench.options import flag_of, option_about
from headway.cli.capacity.files import write_text
from headway.cli.capacity.simulate_report import SimulatedCase, document_of, page_of, show
from headway.cli.options import with_options
from headway.cli.progress import progress_bar
from headway.core.terms import Targets
from headway.errors import ConfigError
from headway.sim.prediction.figures import Runs, predict
from headway.sim.prediction.serving import Limits
from headway.sim.prediction.settings import change_settings, check_tenants, parse_term_changes
from headway.sim.prediction.setup import Frontends, Setup
from headway.sim.prediction.verdict import judge
from headway.sim.profile.catalog import HELP, find_profile
from headway.workload import Listed, Replay, Workload

if TYPE_CHECKING:
    from headway.cli.capacity.recording import Recorded
    from headway.core.executor import Capacity
    from headway.sim.profile.machine import MachineProfile

ENGINES, RUN, RESULTS = "Engines", "Run", "Results"
MAX_FRONTENDS = 64
DEFAULT_RULE = "ttft"


@dataclass(frozen=True)
class EngineOptions(WorkloadOptions):
    """Engines of a simulation, and the load on them."""

    set: list[str] | None = field(
        default=None,
        metadata=option_about(
            ENGINES,
            "KEY=VALUE: a setting of the scheduler or size of the KV cache, such as policy=fcfs, "
            "max_num_seqs=32 or num_blocks=500, or drift=0.05 for engines whose speed differs "
            "by 5 %, or slowness=1.3 for steps 1.3 times as long; repeatable; default: as "
            "profiled.",
        ),
    )
    tenant: list[str] | None = field(
        default=None,
        metadata=option_about(
            ENGINES, "TENANT.FIELD=VALUE, such as b.weight=2 or b.ttft_s=0.5; repeatable."
        ),
    )
    runs: int = field(
        default=19,
        metadata=option_about(
            RUN,
            "Runs, each on a machine drawn from the profile's spread; the range of 19 has 90 %.",
        ),
    )
    json: Path | None = field(
        default=None, metadata=option_about(RESULTS, "Write all figures to this file.")
    )
    html: Path | None = field(
        default=None, metadata=option_about(RESULTS, "Write a page with pictures to this file.")
    )

    def __post_init__(self) -> None:
        for path in (self.json, self.html):
            if path is not None and not path.parent.is_dir():
                raise ConfigError(f"{path.parent} is not a folder")

    def change(self, setup: Setup, workload: Workload) -> Setup:
        """Return the setup with the settings and terms of these options."""
        changed = change_settings(setup, self.set or [])
        term_changes = parse_term_changes(self.tenant or [])
        check_tenants(term_changes, workload)
        return replace(changed, term_changes=term_changes)


@dataclass(frozen=True)
class SimulateOptions(EngineOptions):
    """Options of `headway simulate`."""

    engines: str = field(
        default="1",
        metadata=option_about(ENGINES, "Number of engines; with --autoscale FEWEST..MOST."),
    )
    autoscale: bool = field(
        default=False,
        metadata=option_about(
            ENGINES,
            "Start and drain engines by the work that arrives and waits, as a fleet does; one more "
            "is there after the start-up time of the profile.",
        ),
    )
    frontends: int = field(
        default=1,
        metadata=option_about(
            ENGINES, "Frontends; several of them share a router process, and tell it what happens."
        ),
    )
    rule: str = field(
        default=DEFAULT_RULE,
        metadata=option_about(ENGINES, "How the router chooses an engine; one of several."),
    )
    kill_every: float | None = field(
        default=None,
        metadata=option_about(
            ENGINES,
            "Seconds after which an engine is killed, again and again; another one is there after "
            "the start-up time, and no request is lost.",
        ),
    )
    from_recording: Path | None = field(
        default=None,
        metadata=option_about(
            "Replay",
            "A recording (--record) of an engine, or of the router of a fleet: its requests, with "
            "their outputs and tenants.",
            "--from",
        ),
    )
    closed_loop: bool = field(
        default=False,
        metadata=option_about(
            "Replay",
            "With --from: a request that continues an answer is sent as long after that answer as "
            "it was; without, every request is sent when it was.",
        ),
    )
    from_ledger: str | None = field(
        default=None,
        metadata=option_about(
            "Replay",
            "URL of a ledger, or auto for that of `headway serve`: its requests, at their times, "
            "with their lengths, tenants and terms; shared prefixes are assumed.",
        ),
    )
    since: str | None = field(
        default=None,
        metadata=option_about(
            "Replay", "With --from-ledger: from this day or time on (UTC), ISO 8601, by arrival."
        ),
    )
    until: str | None = field(
        default=None,
        metadata=option_about(
            "Replay", "With --from-ledger: before this day or time (UTC), ISO 8601, by arrival."
        ),
    )
    num_requests: int | None = field(
        default=None,
        metadata=option_about(
            RUN,
            f"Number of requests; without a duration all of a trace, or {DEFAULT_NUM_REQUESTS}.",
        ),
    )
    duration: float | None = field(
        default=None, metadata=option_about(RUN, "Seconds after which no request is sent.")
    )
    goodput: str | None = field(
        default=None,
        metadata=option_about(RESULTS, "Targets in seconds, such as ttft=2.0,tpot=0.2,e2e=30."),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.from_ledger is not None:
            self._refuse_other_loads("--from-ledger", "ledger")
        elif self.since is not None or self.until is not None:
            raise ConfigError("--since and --until need --from-ledger")
        elif self.from_recording is not None:
            self._refuse_other_loads("--from", "recording")
        elif self.closed_loop:
            raise ConfigError("--closed-loop needs --from: conversations are in a recording")
        if self.num_engines == (1, None) and self.frontends == 1 and self.rule != DEFAULT_RULE:
            raise ConfigError("--rule needs --engines above 1: one engine has no router")
        if not 1 <= self.frontends <= MAX_FRONTENDS:
            raise ConfigError(f"--frontends is 1 to {MAX_FRONTENDS}, not {self.frontends}")

    @property
    def num_engines(self) -> tuple[int, int | None]:
        """The number of engines; with an autoscaler the fewest and the most."""
        found = re.fullmatch(r"(\d{1,6})(?:\.\.(\d{1,6}))?", self.engines)
        if found is None:
            raise ConfigError(f"--engines {self.engines}: a number such as 4, or 2..8")
        low, high = found.groups()
        if self.autoscale != (high is not None):
            raise ConfigError("--autoscale needs a range of engines, such as 2..8, and the reverse")
        return int(low), None if high is None else int(high)

    def _refuse_other_loads(self, flag: str, source: str) -> None:
        """Refuse options that would have no effect beside a recording or a ledger."""
        if self.from_ledger is not None and (self.from_recording or self.closed_loop):
            raise ConfigError("--from-ledger excludes --from and --closed-loop: name one source")
        names = [one.name for one in fields(WorkloadOptions) if one.name != "seed"]
        names += ["num_requests", "duration"]
        defaults = {one.name: one.default for one in fields(self)}
        given = [flag_of(name) for name in names if getattr(self, name) != defaults[name]]
        if given:
            raise ConfigError(f"{flag} excludes {', '.join(given)}: the {source} has the load")


_PROFILE = inspect.Parameter(
    "profile",
    inspect.Parameter.KEYWORD_ONLY,
    annotation=Annotated[
        str | None,
        typer.Argument(
            help=f"{HELP}. With --from it may be left out: the recording of an engine has its step "
            "times."
        ),
    ],
    default=None,
)


@with_options(SimulateOptions, _PROFILE)
def simulate(profile: str | None, options: SimulateOptions) -> None:
    """Predict what clients of a server or fleet would see.

    Real schedulers and the real router run on a virtual clock; a step takes as long as the profile
    says. Figures have the range of 90 % of the runs.
    """
    case = _case_of(profile, options)
    runs = Runs(options.runs, options.seed, not isinstance(case.workload, Listed))
    targets = _targets_of(options)
    with progress_bar("simulating, runs") as progress:
        found = predict(case.setup, case.workload, case.limits, runs, targets, progress)
    verdict = judge(case.setup, case.workload, found, runs)
    # Names of tenants come from clients: they are no markup.
    show(Console(markup=False, emoji=False), case, found, verdict)
    if options.json is not None:
        document = {"settings": options.set or [], **document_of(case, found, verdict)}
        write_text(options.json, json.dumps(document, indent=1))
    if options.html is not None:
        write_text(options.html, page_of(case, found, verdict))
        typer.echo(f"page: {options.html}")


def _case_of(profile: str | None, options: SimulateOptions) -> SimulatedCase:
    recorded = _recorded_of(options)
    if profile is not None:
        found = find_profile(profile)
    elif recorded is not None:
        found = recorded.profile()
        if options.autoscale or options.kill_every is not None:
            raise ConfigError(
                "a recording does not have the time that an engine takes to start: name a profile"
            )
    else:
        why = ", as a ledger has no step times" if options.from_ledger is not None else ""
        raise ConfigError(
            f"a profile is needed{why}: write one with `headway profile MODEL -o FILE`"
        )
    workload, limits, about_load = _load_of(options, recorded, found)
    num_engines, max_engines = options.num_engines
    setup = replace(
        options.change(Setup.of(found), workload),
        num_engines=num_engines,
        max_engines=max_engines,
        rule=options.rule,
        make_frontends=_frontends_of(options),
        kill_every_s=options.kill_every,
    )
    _check_frontends(options, setup)
    engines = "1 engine" if options.engines == "1" else f"{options.engines} engines"
    frontends = f", {options.frontends} frontends" if options.frontends > 1 else ""
    about = f"{engines}{frontends}, {found.model} on {found.machine}{about_load}"
    return SimulatedCase(setup, workload, limits, about)


def _load_of(
    options: SimulateOptions, recorded: Recorded | None, profile: MachineProfile
) -> tuple[Workload, Limits, str]:
    """Return the load, its limits, and what to say of one that was served before."""
    served = None
    if recorded is not None:
        served = recorded.load(options.closed_loop)
    elif options.from_ledger is not None:
        spec = change_settings(Setup.of(profile), options.set or []).spec
        served = _ledger_load(options, options.from_ledger, spec.capacity)
    if served is not None:
        load, about = served
        return load, Limits(len(load.requests)), f"; {about}"
    load, num_requests = workload_of(options), options.num_requests
    if num_requests is None and options.duration is None:
        is_trace = isinstance(load, Replay)
        num_requests = len(load.trace.rows) if is_trace else DEFAULT_NUM_REQUESTS
    return load, Limits(num_requests, options.duration), ""


def _check_frontends(options: SimulateOptions, setup: Setup) -> None:
    """Check that full engines have no more requests than a router process takes."""
    if setup.make_frontends is None:
        return
    from headway.fleet.router.frontends import MAX_REQUESTS
    from headway.fleet.router.messages import MAX_ASKED

    most = setup.most_engines * setup.spec.scheduler.max_num_seqs
    least = ceil(most / (MAX_REQUESTS - MAX_ASKED))
    if options.frontends < least:
        raise ConfigError(
            f"a router takes {MAX_REQUESTS} requests of a frontend: --frontends must be at least "
            f"{least} with {setup.most_engines} engines"
        )


def _frontends_of(options: SimulateOptions) -> Callable[[str], Frontends] | None:
    if options.frontends == 1:
        return None
    from headway.fleet.router.simulated import SharedFrontends

    return partial(SharedFrontends.make, options.frontends)


def _recorded_of(options: SimulateOptions) -> Recorded | None:
    if options.from_recording is None:
        return None
    with _only_cpython("--from"):
        from headway.cli.capacity.recording import Recorded
    return Recorded(options.from_recording)


def _ledger_load(options: SimulateOptions, url: str, capacity: Capacity) -> tuple[Listed, str]:
    with _only_cpython("--from-ledger"):
        from headway.cli.capacity.ledger import ledger_load
    return ledger_load(url, options.since, options.until, capacity)


@contextmanager
def _only_cpython(flag: str) -> Generator[None, None, None]:
    """Have an import that fails on PyPy say which flag needs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(f"{flag} needs {error.name}: run it with CPython, not PyPy") from error


def _targets_of(options: SimulateOptions) -> Targets | None:
    if options.goodput is None:
        return None
    given = parse_targets(options.goodput)
    return Targets(given.ttft_s, given.tpot_s, given.e2e_s)
