"""`headway simulate`: predict what clients of a server or fleet would see."""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass, field, fields, replace
from math import isfinite
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from headway.bench.load.options import DEFAULT_NUM_REQUESTS, parse_targets
from headway.bench.load.workload import WorkloadOptions, workload_of
from headway.bench.options import flag_of, option_about
from headway.cli.files import write_text
from headway.cli.options import with_options
from headway.cli.progress import progress_bar
from headway.core.terms import Targets
from headway.errors import ConfigError
from headway.record.reader import find_recordings
from headway.sim.figures import Prediction, Runs, predict
from headway.sim.fitting import profile_of
from headway.sim.observed import ObservedEngine, read_observed
from headway.sim.page import Chart, Curve, draw, heading, page, paragraph, table
from headway.sim.planning import LoadVerdict, judge
from headway.sim.profile import MachineProfile, find_profile
from headway.sim.recorded import load_of
from headway.sim.serving import Limits, Setup
from headway.sim.settings import change_settings, parse_term_changes
from headway.sim.tables import (
    COLUMNS,
    TENANT_COLUMNS,
    plain_of,
    rows_of,
    tenant_rows,
    tenants_of,
)
from headway.workload import Listed, Workload

ENGINES, RUN, RESULTS = "Engines", "Run", "Results"
MAX_TENANTS = 20
DEFAULT_RULE = "ttft"
NUM_CURVE_POINTS = 100


@dataclass(frozen=True)
class EngineOptions(WorkloadOptions):
    """Engines of a simulation, and the load on them."""

    set: list[str] | None = field(
        default=None,
        metadata=option_about(
            ENGINES,
            "KEY=VALUE: a setting of the scheduler or size of the KV cache, such as policy=fcfs, "
            "max_num_seqs=32 or num_blocks=500; repeatable; default: as profiled.",
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

    def change(self, setup: Setup) -> Setup:
        """Return the setup with the settings and terms of these options."""
        changed = change_settings(setup, self.set or [])
        return replace(changed, term_changes=parse_term_changes(self.tenant or []))


@dataclass(frozen=True)
class SimulateOptions(EngineOptions):
    """Options of `headway simulate`."""

    engines: int = field(default=1, metadata=option_about(ENGINES, "Number of engines."))
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
            "A recording of an engine (--record): its requests, with their outputs and tenants.",
            "--from",
        ),
    )
    num_requests: int | None = field(
        default=None,
        metadata=option_about(
            RUN, f"Number of requests; {DEFAULT_NUM_REQUESTS} without a duration."
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
        if self.from_recording is not None:
            self._refuse_other_loads()
        if self.engines == 1 and self.rule != DEFAULT_RULE:
            raise ConfigError("--rule needs --engines above 1: one engine has no router")

    def _refuse_other_loads(self) -> None:
        """Refuse options that would have no effect beside a recording."""
        names = [one.name for one in fields(WorkloadOptions) if one.name != "seed"]
        names += ["num_requests", "duration"]
        defaults = {one.name: one.default for one in fields(self)}
        given = [flag_of(name) for name in names if getattr(self, name) != defaults[name]]
        if given:
            raise ConfigError(f"--from excludes {', '.join(given)}: the recording has the load")


@dataclass(frozen=True, slots=True)
class _Case:
    """What a command simulates."""

    setup: Setup
    workload: Workload
    limits: Limits
    about: str


_PROFILE = inspect.Parameter(
    "profile",
    inspect.Parameter.KEYWORD_ONLY,
    annotation=Annotated[
        str | None,
        typer.Argument(
            help="File written by `headway profile`, or the name of a shipped profile; with --from "
            "it may be left out: the recording has the step times of its engine."
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
    _show(Console(), case, found, verdict)
    if options.json is not None:
        write_text(options.json, json.dumps(_document(case, options, found, verdict), indent=1))
    if options.html is not None:
        write_text(options.html, _page(case, found, verdict))
        typer.echo(f"page: {options.html}")


def _case_of(profile: str | None, options: SimulateOptions) -> _Case:
    observed: ObservedEngine | None = None
    if options.from_recording is not None:
        observed = _read_recording(options.from_recording)
    if profile is not None:
        found = find_profile(profile)
    elif observed is not None:
        found = profile_of(observed)
    else:
        raise ConfigError("a profile is needed: write one with `headway profile MODEL -o FILE`")
    setup = replace(
        options.change(Setup.of(found)),
        num_engines=options.engines,
        rule=options.rule,
        kill_every_s=options.kill_every,
    )
    engines = "1 engine" if options.engines == 1 else f"{options.engines} engines"
    about = f"{engines}, {found.model} on {found.machine}"
    if observed is not None:
        load = load_of(observed)
        left = f", {load.num_left_out} without an output left out" if load.num_left_out else ""
        num = len(load.workload.requests)
        return _Case(setup, load.workload, Limits(num), f"{about}; {num} recorded requests{left}")
    num_requests = options.num_requests
    if num_requests is None and options.duration is None:
        num_requests = DEFAULT_NUM_REQUESTS
    return _Case(setup, workload_of(options), Limits(num_requests, options.duration), about)


def _read_recording(path: Path) -> ObservedEngine:
    found = find_recordings([path])
    if len(found) != 1:
        raise ConfigError(f"{path} has {len(found)} recordings; name a file of one of them")
    return read_observed(found[0])


def _targets_of(options: SimulateOptions) -> Targets | None:
    if options.goodput is None:
        return None
    given = parse_targets(options.goodput)
    return Targets(given.ttft_s, given.tpot_s, given.e2e_s)


def warnings_of(profile: MachineProfile, found: Prediction) -> list[str]:
    """Return what makes a prediction doubtful."""
    warnings: list[str] = []
    if found.extrapolated_share > 0.01:
        warnings.append(
            f"extrapolated: {100 * found.extrapolated_share:.0f} % of the steps are larger than "
            "every step of the profile"
        )
    if profile.steal > 0.03:
        warnings.append(
            f"the host took {100 * profile.steal:.0f} % of the CPU time from the machine while it "
            "was profiled"
        )
    return warnings


def _show(console: Console, case: _Case, found: Prediction, verdict: LoadVerdict | None) -> None:
    console.print(f"{case.about}; {len(found.loads)} runs", highlight=False, soft_wrap=True)
    grid = Table(*COLUMNS, box=None)
    for column in grid.columns[1:]:
        column.justify = "right"
    for row in rows_of(found):
        grid.add_row(*row)
    console.print(grid)
    tenants = tenants_of(found)
    if tenants:
        of_tenants = Table(*TENANT_COLUMNS, box=None)
        for row in tenant_rows(tenants, MAX_TENANTS):
            of_tenants.add_row(*row)
        console.print(of_tenants)
        if len(tenants) > MAX_TENANTS:
            console.print(f"and {len(tenants) - MAX_TENANTS} more tenants")
    if verdict is not None:
        console.print(f"verdict: {verdict.text}", highlight=False, soft_wrap=True)
    for warning in warnings_of(case.setup.profile, found):
        console.print(warning, style="yellow", highlight=False, soft_wrap=True)


def _document(
    case: _Case, options: SimulateOptions, found: Prediction, verdict: LoadVerdict | None
) -> dict[str, object]:
    return {
        "about": case.about,
        "runs": len(found.loads),
        "requests_per_run": found.figures[0].num_requests,
        "settings": options.set or [],
        "kills": sum(one.num_kills for one in found.loads),
        "figures": plain_of(found.figures),
        "tenants": {name: plain_of(runs) for name, runs in tenants_of(found).items()},
        "verdict": None if verdict is None else verdict.text,
        "warnings": warnings_of(case.setup.profile, found),
    }


def _page(case: _Case, found: Prediction, verdict: LoadVerdict | None) -> str:
    parts = [paragraph(f"{case.about}; {len(found.loads)} runs")]
    if verdict is not None:
        parts.append(paragraph(f"Verdict: {verdict.text}", "verdict"))
    parts += [paragraph(text, "note") for text in warnings_of(case.setup.profile, found)]
    parts += [heading("Figures"), table(COLUMNS, rows_of(found))]
    for name, label in (("ttft_s", "time to first token, s"), ("e2e_s", "end to end, s")):
        lines = [_distribution(found, name)]
        parts += [heading(label.split(",", maxsplit=1)[0].capitalize())]
        parts += [draw(Chart(label, "share of the requests", lines, y_max=1.0, is_log_x=True))]
    tenants = tenants_of(found)
    if tenants:
        parts += [heading("Tenants"), table(TENANT_COLUMNS, tenant_rows(tenants, len(tenants)))]
    return page("Headway: simulated load", parts)


def _distribution(found: Prediction, name: str) -> Curve:
    """Return the share of all requests by their latency."""
    values = sorted(
        value
        for load in found.loads
        for one in load.requests
        if (value := getattr(one, name)) is not None and isfinite(value)
    )
    last = max(1, len(values) - 1)
    picked = [round(last * number / NUM_CURVE_POINTS) for number in range(NUM_CURVE_POINTS + 1)]
    return Curve(name, [(values[at], at / last) for at in picked if at < len(values)])
