"""Output of a load measurement: text, JSON, CSV, plot."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from headway._version import __version__
from headway.bench.load.measure import Measurement, Plan
from headway.bench.load.openai import Target
from headway.bench.load.options import LoadOptions, as_plain
from headway.bench.load.plot import draw_run, draw_sweep
from headway.bench.load.records import LoadRecord
from headway.bench.load.stats import PERCENTS, LoadSummary, by_tenant, summarize_load
from headway.bench.load.text import cpu_warning, knee_line, latency_table, lines_of, sweep_table
from headway.bench.steal import highest_steal, steal_plain, steal_text
from headway.errors import ConfigError

_WARNING = "yellow"


@dataclass(frozen=True, slots=True)
class Report:
    """Results of a measurement, with its endpoint and options."""

    target: Target
    plan: Plan
    options: LoadOptions
    measured: Measurement

    @property
    def title(self) -> str:
        return f"{self.target.origin.url}, {self.target.model}, {self.options.sampling_text()}"

    def show(self, console: Console) -> None:
        """Print the figures and write the requested files."""
        self._print(console)
        if self.options.json is not None:
            write_json(self.options.json, self.document())
        if self.options.csv is not None:
            runs = [(rate, run.records) for rate, run in self.measured.runs]
            write_csv(self.options.csv, runs)
        if self.options.plot is not None and self.measured.runs:
            self._draw(self.options.plot)
            console.print(f"picture: {self.options.plot}", markup=False, soft_wrap=True)

    def document(self) -> dict[str, object]:
        """Return all figures as plain values."""
        document: dict[str, object] = {
            "headway": __version__,
            "url": self.target.origin.url,
            "model": self.target.model,
            "options": as_plain(self.options),
            "runs": [
                {
                    "rate": rate,
                    "cpu_share": run.cpu_share,
                    "steal": steal_plain(run.steal),
                    "summary": self._figures(run.records),
                    "tenants": {
                        name: summary_dict(summary)
                        for name, summary in by_tenant(run.records, self.plan.targets).items()
                    },
                }
                for rate, run in self.measured.runs
            ],
        }
        if self.measured.points:
            document["knee"] = asdict(self.measured.knee(self.plan))
        return document

    def _figures(self, records: Sequence[LoadRecord]) -> dict[str, Any]:
        return summary_dict(summarize_load(records, self.plan.targets))

    def _print(self, console: Console) -> None:
        if self.measured.points:
            knee = self.measured.knee(self.plan)
            console.print(self.title, markup=False)
            console.print(sweep_table(self.measured.points, knee))
            console.print(knee_line(knee), markup=False, soft_wrap=True)
        else:
            for _, run in self.measured.runs:
                summary = summarize_load(run.records, self.plan.targets)
                console.print(latency_table(self.title, summary))
                for line in lines_of(summary, run.cpu_share):
                    console.print(line, markup=False, soft_wrap=True)
        if self.measured.runs:
            steal = highest_steal(run.steal for _, run in self.measured.runs)
            console.print(steal_text(steal), style=_WARNING if steal and steal.is_high else None)
        warning = cpu_warning(max((run.cpu_share for _, run in self.measured.runs), default=0.0))
        if warning is not None:
            console.print(warning, style=_WARNING, markup=False, soft_wrap=True)

    def _draw(self, path: Path) -> None:
        points = self.measured.points
        if points:
            draw_sweep(path, self.title, points, self.measured.knee(self.plan))
        else:
            draw_run(path, self.title, self.measured.runs[0][1].records)


def summary_dict(summary: LoadSummary) -> dict[str, Any]:
    """Return a summary as plain values; percentiles get names such as p95."""
    values = asdict(summary)
    for name, value in values.items():
        if isinstance(value, dict) and value and set(value) == set(PERCENTS):
            values[name] = {f"p{percent}": number for percent, number in value.items()}
    return values


def write_json(path: Path, document: dict[str, object]) -> None:
    """Write a document as JSON."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2))
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


_CSV_FIELDS = [spec.name for spec in fields(LoadRecord)]
_CSV_FIGURES = ("outcome", "num_output_tokens", "first_token_at", "lateness_s", "ttft_s", "tpot_s")


def write_csv(path: Path, runs: Iterable[tuple[float | None, Sequence[LoadRecord]]]) -> None:
    """Write one row per request, with the rate of its sweep point.

    Times and token counts of chunks are lists in one cell, separated by spaces.
    """
    try:
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["rate", *_CSV_FIELDS, *_CSV_FIGURES, "e2e_s"])
            for rate, records in runs:
                for record in records:
                    names = (*_CSV_FIELDS, *_CSV_FIGURES, "e2e_s")
                    writer.writerow([rate, *(_csv_cell(getattr(record, name)) for name in names)])
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def _csv_cell(value: object) -> object:
    if isinstance(value, list):
        return " ".join(str(_csv_cell(item)) for item in value)
    return round(value, 6) if isinstance(value, float) else value
