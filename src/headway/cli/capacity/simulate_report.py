"""What `headway simulate` prints and writes."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite
from statistics import median

from rich.console import Console
from rich.table import Table

from headway.config import ServerConfig
from headway.sim.prediction.figures import Prediction
from headway.sim.prediction.page import Chart, Curve, draw, heading, page, paragraph, table
from headway.sim.prediction.serving import Limits
from headway.sim.prediction.setup import Setup
from headway.sim.prediction.tables import (
    COLUMNS,
    TENANT_COLUMNS,
    plain_of,
    plain_scaling,
    rows_of,
    scaling_rows,
    tenant_rows,
    tenants_of,
)
from headway.sim.prediction.verdict import LoadVerdict
from headway.sim.profile.machine import MachineProfile
from headway.workload import Workload

MAX_TENANTS = 20
NUM_CURVE_POINTS = 100


@dataclass(frozen=True, slots=True)
class SimulatedCase:
    """What a command simulates."""

    setup: Setup
    workload: Workload
    limits: Limits
    about: str


def warnings_of(profile: MachineProfile, found: Prediction) -> list[str]:
    """Return what makes a prediction doubtful."""
    warnings = [profile.caveat] if profile.caveat else []
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
    wait_s = ServerConfig().max_queue_wait_s
    if wait_s < median(one.ttft_s[99] for one in found.figures) < inf:
        warnings.append(
            f"p99 TTFT is above {wait_s:g} s: requests wait here as long as it takes; a server "
            "refuses those that would wait so long or are too many (--max-queue-wait-s, "
            "--max-num-queued-reqs), and the others wait less"
        )
    return warnings


def show(
    console: Console, case: SimulatedCase, found: Prediction, verdict: LoadVerdict | None
) -> None:
    """Print the figures and the verdict."""
    console.print(_about(case, found), highlight=False, soft_wrap=True)
    grid = Table(*COLUMNS, box=None)
    for column in grid.columns[1:]:
        column.justify = "right"
    for row in _rows_of(case, found):
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


def _about(case: SimulatedCase, found: Prediction) -> str:
    """Return what was simulated, and how often."""
    counts = sorted(one.num_requests for one in found.figures)
    runs = "1 run" if len(counts) == 1 else f"{len(counts)} runs"
    number = f"{counts[0]:,}" if counts[0] == counts[-1] else f"{counts[0]:,} to {counts[-1]:,}"
    return f"{case.about}; {runs} of {number} requests"


def _rows_of(case: SimulatedCase, found: Prediction) -> list[tuple[str, ...]]:
    rows = rows_of(found)
    return rows if case.setup.max_engines is None else [*rows, *scaling_rows(found.loads)]


def document_of(
    case: SimulatedCase, found: Prediction, verdict: LoadVerdict | None
) -> dict[str, object]:
    """Return all figures as plain values."""
    return {
        "about": case.about,
        "runs": len(found.loads),
        "requests_per_run": found.figures[0].num_requests,
        "kills": sum(one.num_kills for one in found.loads),
        "engines": plain_scaling(found.loads),
        "figures": plain_of(found.figures),
        "tenants": {name: plain_of(runs) for name, runs in tenants_of(found).items()},
        "verdict": None if verdict is None else verdict.text,
        "warnings": warnings_of(case.setup.profile, found),
    }


def page_of(case: SimulatedCase, found: Prediction, verdict: LoadVerdict | None) -> str:
    """Return a page with tables and pictures."""
    parts = [paragraph(_about(case, found))]
    if verdict is not None:
        parts.append(paragraph(f"Verdict: {verdict.text}", "verdict"))
    parts += [paragraph(text, "note") for text in warnings_of(case.setup.profile, found)]
    parts += [heading("Figures"), table(COLUMNS, _rows_of(case, found))]
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
