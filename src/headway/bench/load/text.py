"""Results of load runs as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.table import Table

from headway.bench.load.stats import PERCENTS, LoadSummary, Percentiles
from headway.bench.load.sweep import Knee, SweepPoint

CPU_WARNING_SHARE = 0.8
_MAX_ERROR_LINES = 5

_LATENCIES: dict[str, Callable[[LoadSummary], Percentiles]] = {
    "time to first token": lambda s: s.ttft_s,
    "time per output token": lambda s: s.tpot_s,
    "inter-token latency": lambda s: s.itl_s,
    "end to end": lambda s: s.e2e_s,
    "until refused": lambda s: s.refusal_s,
    "client's lateness": lambda s: s.lateness_s,
}


def latency_table(title: str, summary: LoadSummary) -> Table:
    """Return percentiles, one line per kind of latency."""
    table = Table("", *(f"p{percent}" for percent in PERCENTS), title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, choose in _LATENCIES.items():
        values = choose(summary)
        if values:
            table.add_row(name, *(_seconds(values[percent]) for percent in PERCENTS))
    return table


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.1f} ms"


def lines_of(summary: LoadSummary, cpu_share: float) -> list[str]:
    """Return the figures other than percentiles."""
    outcomes = ", ".join(f"{count} {name}" for name, count in summary.outcomes.items() if count)
    lines = [
        f"{summary.num_requests} requests in {summary.elapsed_s:.1f} s: {outcomes or 'none sent'}",
        f"{summary.requests_per_s:.2f} requests/s, {summary.output_tokens_per_s:.1f} output "
        f"tokens/s ({summary.num_prompt_tokens:,} prompt and {summary.num_output_tokens:,} output "
        "tokens)",
    ]
    if summary.goodput is not None:
        lines.append(
            f"goodput: {summary.goodput.share:.1%} of the requests met all targets, "
            f"{summary.goodput.requests_per_s:.2f} per second"
        )
    if summary.refusals:
        by_status = ", ".join(f"{count} x {status}" for status, count in summary.refusals.items())
        share = summary.retry_after_share or 0.0
        lines.append(f"refused: {by_status}; {share:.0%} with Retry-After")
    for error, count in list(summary.errors.items())[:_MAX_ERROR_LINES]:
        lines.append(f"failed: {count} x {error}")
    if summary.cached_share is not None:
        lines.append(f"prompt tokens from the server's prefix cache: {summary.cached_share:.1%}")
    if summary.num_without_usage:
        lines.append(
            f"{summary.num_without_usage} answers came without usage; their tokens are counted "
            "as events, which may be too few"
        )
    lines.append(f"the client used {cpu_share:.0%} of a core")
    return lines


def cpu_warning(cpu_share: float) -> str | None:
    """Return a warning if the client is the bottleneck."""
    if cpu_share <= CPU_WARNING_SHARE:
        return None
    return (
        f"warning: the client used {cpu_share:.0%} of a core, so it may have measured itself; "
        "lower the rate or run several clients"
    )


def sweep_table(points: Sequence[SweepPoint], knee: Knee) -> Table:
    """Return the sweep as a table with the knee marked."""
    table = Table(title="throughput and latency by arrival rate", padding=(0, 0))
    for name in (
        "requests\n/s",
        "done\n/s",
        "output\ntok/s",
        "TTFT\np50",
        "TTFT\np95",
        "TPOT\np50",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("E2E\np95", "not\nserved", "client\nCPU", ""):
        table.add_column(name, justify="right", no_wrap=True)
    for point in points:
        s = point.summary
        table.add_row(
            f"{point.rate:g}",
            f"{s.requests_per_s:.2f}",
            f"{s.output_tokens_per_s:.1f}",
            _cell(s.ttft_s, 50),
            _cell(s.ttft_s, 95),
            _cell(s.tpot_s, 50),
            _cell(s.e2e_s, 95),
            f"{s.unserved_share:.1%}",
            f"{point.cpu_share:.0%}",
            "knee" if point.rate == knee.rate and knee.why else "",
        )
    return table


def _cell(values: Percentiles, percent: int) -> str:
    return _seconds(values[percent]) if values else "-"


def knee_line(knee: Knee) -> str:
    """Return the rate of the knee and the reason, or that there is none."""
    if knee.rate is None:
        return f"no knee: the lowest rate is already saturated ({knee.why})"
    if knee.why is None:
        return f"no knee up to {knee.rate:g} requests/s: no rate was saturated"
    return f"knee: {knee.rate:g} requests/s; the next rate is saturated ({knee.why})"
