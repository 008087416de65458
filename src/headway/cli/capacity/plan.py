"""`headway plan`: how much load engines carry within a target, and how many a load needs."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from math import inf
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from headway.bench.load.workload import WorkloadOptions, workload_of
from headway.bench.options import option_about
from headway.cli.capacity.files import write_text
from headway.cli.capacity.simulate import ENGINES, RUN, EngineOptions
from headway.cli.options import with_options
from headway.errors import ConfigError
from headway.sim.prediction.figures import Runs
from headway.sim.prediction.page import Chart, Curve, draw, heading, page, paragraph, table
from headway.sim.prediction.planning import (
    CarriedRate,
    EnginesNeeded,
    Goal,
    Study,
    carried_rate,
    engines_needed,
)
from headway.sim.prediction.settings import convert_field
from headway.sim.prediction.setup import Setup
from headway.sim.prediction.tables import number
from headway.sim.prediction.verdict import KNEE_SHARE, STRETCH_S
from headway.sim.profile.catalog import HELP, find_profile

TARGETS = "Targets"
CURVE_MAX = 3.0
"""Largest latency relative to its target that the picture shows."""
PROFILE_KEY = "profile"
PLAN_KEYS = ("ttft", "tpot", "e2e", "percentile", "price", "spare")
"""Options of a plan itself that a what-if may change."""
COLUMNS = ("", "one engine carries", "likely", "saturates at", "engines", "per million tokens")


@dataclass(frozen=True)
class PlanOptions(EngineOptions):
    """Options of `headway plan`."""

    ttft: float = field(
        default=inf, metadata=option_about(TARGETS, "Target for the time to first token, seconds.")
    )
    tpot: float = field(
        default=inf,
        metadata=option_about(TARGETS, "Target for the time per output token, seconds."),
    )
    e2e: float = field(
        default=inf, metadata=option_about(TARGETS, "Target for the time to the end, seconds.")
    )
    percentile: int = field(
        default=99, metadata=option_about(TARGETS, "Percentile that must be within the targets.")
    )
    spare: int = field(
        default=1,
        metadata=option_about(ENGINES, "Engines that may be lost while the targets are kept."),
    )
    price: float | None = field(
        default=None, metadata=option_about(ENGINES, "Price of an engine for an hour.")
    )
    what_if: list[str] | None = field(
        default=None,
        metadata=option_about(
            ENGINES,
            "KEY=VALUE,...: plan again with other settings (as --set), another workload "
            "(output_tokens=fixed:64), target (ttft=0.5), price or profile (profile=FILE); "
            "repeatable. Parts of a value are separated by ';' instead of ','.",
        ),
    )
    num_requests: int = field(
        default=1000,
        metadata=option_about(RUN, "Requests of each run, per engine."),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.spare < 0:
            raise ConfigError(f"--spare must be at least 0, not {self.spare}")
        if self.price is not None and not self.price > 0:
            raise ConfigError(f"--price must be above 0, not {self.price:g}")
        if self.num_requests < 100:
            raise ConfigError(f"--num-requests must be at least 100, not {self.num_requests}")

    @property
    def goal(self) -> Goal:
        return Goal(self.percentile, self.ttft, self.tpot, self.e2e)


@dataclass(frozen=True, slots=True)
class _Case:
    """What one variant asks, with its load read once."""

    name: str
    options: PlanOptions
    study: Study
    rate: float
    """Requests per second that are planned: of a load that varies, in its busiest stretch."""
    mean_rate: float

    @property
    def settings(self) -> tuple[str, ...]:
        """Changed settings of the engines and tenants, as given."""
        return (*(self.options.set or ()), *(self.options.tenant or ()))


@dataclass(frozen=True, slots=True)
class _Plan:
    """What one variant of the engines and the load gives."""

    case: _Case
    carried: CarriedRate
    needed: EnginesNeeded

    @property
    def num_engines(self) -> int:
        return self.needed.num_engines + self.case.options.spare

    @property
    def price_per_million(self) -> float | None:
        price = self.case.options.price
        if price is None:
            return None
        tokens_per_s = self.case.mean_rate * self.needed.tokens_per_request
        return 1e6 * self.num_engines * price / 3600.0 / tokens_per_s

    def row(self) -> tuple[str, ...]:
        price = self.price_per_million
        return (
            self.case.name,
            number(self.carried.sure),
            number(self.carried.likely),
            number(self.carried.saturated.middle),
            f"{self.needed.num_engines} + {self.case.options.spare}",
            "-" if price is None else number(price),
        )


_PROFILE = inspect.Parameter(
    "profile",
    inspect.Parameter.KEYWORD_ONLY,
    annotation=Annotated[str, typer.Argument(help=f"{HELP}.")],
)


@with_options(PlanOptions, _PROFILE)
def plan(profile: str, options: PlanOptions) -> None:
    """Say how many engines a load needs within targets.

    Says also how much load one engine carries, and where it saturates. The load is given as for
    `headway bench serve`: --rate, lengths, tenants, prefixes or a trace. A target counts as kept if
    it is kept at the far end of the range of the runs. Three times as many runs are made at a rate
    where chance may decide.
    """
    console, errors = Console(), Console(stderr=True)
    variants = [("as given", profile, options)]
    variants += [_variant(text, profile, options) for text in options.what_if or []]
    # Mistakes in any of them are found before the first takes its minutes.
    cases = [_case_of(*variant) for variant in variants]
    plans: list[_Plan] = []
    for case in cases:
        errors.print(f"planning: {case.name}", highlight=False, style="dim")
        noted = replace(case.study, note=lambda text: errors.print(
            f"  {text}", highlight=False, style="dim", soft_wrap=True
        ))  # fmt: skip
        carried = carried_rate(noted)
        plans.append(_Plan(case, carried, engines_needed(noted, case.rate, carried)))
    lines = [*_describe(plans[0]), *_caveats(cases)]
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    if len(plans) > 1:
        console.print(_grid(plans))
    if options.json is not None:
        document = _document(plans) | {"warnings": _caveats(cases)}
        write_text(options.json, json.dumps(document, indent=1))
    if options.html is not None:
        write_text(options.html, _page(plans, lines))
        typer.echo(f"page: {options.html}")


def _case_of(name: str, profile: str, options: PlanOptions) -> _Case:
    load = workload_of(options)
    workload = load.busiest(STRETCH_S)
    rate, mean_rate = workload.mean_rate, load.mean_rate
    if rate is None or mean_rate is None:
        raise ConfigError("a plan needs arrivals with a rate: poisson, gamma, onoff or a trace")
    setup = options.change(Setup.of(find_profile(profile)), workload)
    runs = Runs(options.runs, options.seed)
    study = Study(setup, workload, options.goal, options.num_requests, runs)
    return _Case(name, options, study, rate, mean_rate)


def _variant(text: str, profile: str, options: PlanOptions) -> tuple[str, str, PlanOptions]:
    """Return the profile and options of a what-if."""
    changes: dict[str, Any] = {}
    settings = list(options.set or [])
    known = {*PLAN_KEYS, *(one.name for one in fields(WorkloadOptions))}
    for part in text.split(","):
        key, sign, value = part.strip().partition("=")
        if not sign:
            raise ConfigError(f"--what-if takes KEY=VALUE,..., not {text!r}")
        value = value.replace(";", ",")
        if key == PROFILE_KEY:
            profile = value
        elif key in known:
            changes[key] = convert_field(PlanOptions, key, value)
        else:
            settings.append(f"{key}={value}")
    return text, profile, replace(options, set=settings, **changes)


def _describe(found: _Plan) -> list[str]:
    case, carried, needed = found.case, found.carried, found.needed
    saturated, ratio = carried.saturated, needed.ratio
    rate, mean_rate, goal = case.rate, case.mean_rate, case.study.goal
    num_requests, num_spare = case.study.num_requests, case.options.spare
    lines = [
        f"One engine carries {carried.sure:.3g} requests/s with {goal.text}; likely "
        f"{carried.likely:.3g}. It saturates at {saturated.middle:.3g} ({saturated.low:.3g} - "
        f"{saturated.high:.3g}); above {KNEE_SHARE * saturated.low:.3g} latency rises steeply. "
        f"That is for runs of {num_requests:,} requests from an empty engine, "
        f"{_text_of(num_requests / carried.sure)}; a load near saturation that lasts "
        "longer waits longer (--num-requests).",
        f"{rate:.3g} requests/s need {needed.num_engines} "
        f"{'engine' if needed.num_engines == 1 else 'engines'}, {needed.regime}: "
        f"p{goal.percent} at {ratio.middle:.2f} ({ratio.low:.2f} - {ratio.high:.2f}) of the "
        f"target. With {num_spare} spare: {found.num_engines}.",
    ]
    if abs(mean_rate - rate) > 0.01 * rate:
        lines.append(
            f"The load varies: planned is what arrives when it is busiest, {rate:.3g} requests/s; "
            f"on average {mean_rate:.3g} arrive, by which the price is counted."
        )
    price = found.price_per_million
    if price is not None:
        lines.append(f"A million output tokens cost {number(price)}, spares included.")
    if case.settings:
        lines.append(f"Set: {', '.join(case.settings)}.")
    return lines


def _text_of(seconds: float) -> str:
    return f"{seconds:.0f} seconds" if seconds < 120 else f"{seconds / 60:.0f} minutes"


def _caveats(cases: Sequence[_Case]) -> list[str]:
    """Return what makes the plans doubtful, each once."""
    caveats = [one.study.setup.profile.caveat for one in cases]
    return list(dict.fromkeys(text for text in caveats if text))


def _grid(plans: Sequence[_Plan]) -> Table:
    grid = Table(*COLUMNS, box=None)
    for column in grid.columns[1:]:
        column.justify = "right"
    for one in plans:
        grid.add_row(*one.row())
    return grid


def _document(plans: Sequence[_Plan]) -> dict[str, object]:
    return {
        "goal": plans[0].case.study.goal.text,
        "requests_per_s": plans[0].case.rate,
        "plans": [
            {
                "name": one.case.name,
                "goal": one.case.study.goal.text,
                "requests_per_run": one.case.study.num_requests,
                "settings": one.case.settings,
                "carried_requests_per_s": one.carried.sure,
                "likely_requests_per_s": one.carried.likely,
                "saturated_requests_per_s": [
                    one.carried.saturated.low,
                    one.carried.saturated.middle,
                    one.carried.saturated.high,
                ],
                "engines": one.needed.num_engines,
                "spare_engines": one.case.options.spare,
                "regime": str(one.needed.regime),
                "price_per_million_output_tokens": one.price_per_million,
            }
            for one in plans
        ],
    }


def _page(plans: Sequence[_Plan], lines: Sequence[str]) -> str:
    parts = [paragraph(line, "verdict") for line in lines]
    parts.append(heading("Latency of one engine relative to its target"))
    curves = [
        Curve(
            one.case.name,
            [(rate, min(found.middle, 1e6)) for rate, found in one.carried.curve],
            [min(found.low, 1e6) for _, found in one.carried.curve],
            [min(found.high, 1e6) for _, found in one.carried.curve],
        )
        for one in plans
    ]
    saturated = plans[0].carried.saturated
    marks = [(plans[0].carried.sure, "carried"), (saturated.middle, "saturated")]
    chart = Chart(
        "requests/s",
        f"p{plans[0].case.study.goal.percent} over target",
        curves,
        marks,
        [(1.0, "target")],
        CURVE_MAX,
    )
    parts += [draw(chart), table(COLUMNS, [one.row() for one in plans])]
    parts.append(paragraph("Bands are the range of the runs. Engines: needed + spare.", "note"))
    return page("Headway: capacity plan", parts)
