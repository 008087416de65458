"""Results of a comparison of batching modes: table, JSON, plot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import msgspec
from rich.table import Table

from headway.bench.offline.modes import PERCENTS, ModeResult, Spread
from headway.bench.options import SamplingOptions
from headway.bench.steal import highest_steal, steal_text
from headway.errors import ConfigError
from headway.workload import OfflineWorkload


def as_table(
    workload: OfflineWorkload, sampling: SamplingOptions, results: Sequence[ModeResult]
) -> Table:
    """Return one column per mode: medians over the rounds, with the throughput spread."""
    table = Table(
        title=f"{workload.name}: {len(workload.items)} requests, "
        f"{workload.num_prompt_tokens:,} prompt and {workload.num_output_tokens:,} output tokens, "
        f"{sampling.sampling_text()}"
    )
    table.add_column("batching")
    for result in results:
        table.add_column(result.mode, justify="right")
    rows: dict[str, Callable[[ModeResult], str]] = {
        "output tokens/s": lambda r: f"{r.output_tokens_per_s.median:.1f}",
        "  least - most": lambda r: (
            f"{r.output_tokens_per_s.low:.1f} - {r.output_tokens_per_s.high:.1f}"
        ),
        **{f"TTFT p{p}, s": lambda r, p=p: f"{r.ttft_s[p].median:.2f}" for p in PERCENTS},
        **{f"end-to-end p{p}, s": lambda r, p=p: f"{r.e2e_s[p].median:.2f}" for p in PERCENTS},
        "slot occupancy": lambda r: f"{r.slot_occupancy.median:.1%}",
        "padding waste": lambda r: f"{r.padding_waste.median:.1%}",
        "time in the executor": lambda r: f"{r.executor_share.median:.1%}",
        "steps": lambda r: str(r.num_steps),
        "preemptions": lambda r: str(r.num_preemptions),
    }
    for name, cell in rows.items():
        table.add_row(name, *(cell(result) for result in results))
    return table


def as_json(
    workload: OfflineWorkload, results: Sequence[ModeResult], context: dict[str, object]
) -> bytes:
    """Return all figures as a JSON document."""
    document = {
        "workload": {
            "name": workload.name,
            "num_requests": len(workload.items),
            "num_prompt_tokens": workload.num_prompt_tokens,
            "num_output_tokens": workload.num_output_tokens,
        },
        **context,
        "modes": {result.mode: asdict(result) for result in results},
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=2)


def steal_line(results: Sequence[ModeResult]) -> str:
    """Return the steal of the round with the most, marked if it is high."""
    return steal_text(highest_steal(steal for result in results for steal in result.steal))


def compare(results: Sequence[ModeResult]) -> list[str]:
    """Return continuous batching against each other mode, as text."""
    by_mode = {result.mode: result for result in results}
    ours = by_mode.pop("continuous", None)
    if ours is None:
        return []
    lines: list[str] = []
    for mode, theirs in by_mode.items():
        speedup = ours.output_tokens_per_s.median / theirs.output_tokens_per_s.median
        shorter = 1 - ours.e2e_s[50].median / theirs.e2e_s[50].median
        lines.append(
            f"continuous / {mode}: {speedup:.2f}x output tokens/s, "
            f"p50 end-to-end {shorter:.0%} lower"
        )
    return lines


def draw(path: Path, workload: OfflineWorkload, results: Sequence[ModeResult]) -> None:
    """Plot throughput, latency, slot occupancy and token waste."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("pictures need matplotlib: pip install 'headway[plot]'") from error

    figure = Figure(figsize=(12, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    speed, latency, use = figure.subplots(1, 3)
    names = [result.mode for result in results]
    colors = [_COLORS[name] for name in names]

    speeds = [result.output_tokens_per_s for result in results]
    bars = speed.bar(names, [s.median for s in speeds], color=colors, yerr=_errors(speeds))
    speed.bar_label(bars, fmt="%.0f", padding=3)
    speed.set(title="output tokens/s (median, min-max)")
    speed.margins(y=0.12)

    width = 0.8 / len(results)
    for offset, result in enumerate(results):
        spreads = [result.e2e_s[p] for p in PERCENTS]
        places = [index + offset * width for index in range(len(PERCENTS))]
        latency.bar(
            places, [s.median for s in spreads], width, color=_COLORS[result.mode],
            yerr=_errors(spreads), label=result.mode,
        )  # fmt: skip
    middle = (len(results) - 1) * width / 2
    latency.set_xticks([i + middle for i in range(len(PERCENTS))], [f"p{p}" for p in PERCENTS])
    latency.set(title="end-to-end latency, seconds")
    figure.legend(*latency.get_legend_handles_labels(), loc="outside lower center", ncols=3)

    for offset, result in enumerate(results):
        shares = (result.slot_occupancy.median * 100, result.padding_waste.median * 100)
        drawn = use.bar(
            [place + offset * width for place in (0, 1)], shares, width, color=_COLORS[result.mode]
        )
        use.bar_label(drawn, fmt="%.0f%%", padding=2)
    use.set_xticks([middle, 1 + middle], ["slot occupancy", "padding waste"])
    use.set(title="% of sequence slots, % of computed tokens", ylim=(0, 110))
    figure.suptitle(f"{workload.name}, same executor, {len(names)} batching modes")
    figure.savefig(path, dpi=120)


_COLORS = {"static": "#b0413e", "dynamic": "#e0a030", "continuous": "#2a7f62"}


def _errors(spreads: Sequence[Spread]) -> list[list[float]]:
    return [[s.median - s.low for s in spreads], [s.high - s.median for s in spreads]]
