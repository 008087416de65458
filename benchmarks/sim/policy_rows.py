"""The table of benchmarks/sim/policies.py: rows, their file, and what differs between two."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import zip_longest
from math import isfinite

ALL = "all"
DIGITS = 4
KEYS = ("load", "policy", "tenant")
RowKey = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Row:
    """Figures of one tenant, or of all, under one policy."""

    load: str
    policy: str
    tenant: str
    requests: int
    refused: int
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    tpot_p50_ms: float | None
    tpot_p99_ms: float | None
    tokens_per_s: float | None
    good: float | None
    jain: float | None
    preemptions: int

    @property
    def key(self) -> RowKey:
        return self.load, self.policy, self.tenant

    @property
    def figures(self) -> tuple[float | None, ...]:
        return tuple(getattr(self, name) for name in FIGURES)


FIGURES = tuple(one.name for one in fields(Row) if one.name not in KEYS)
NO_FIGURES = (None,) * len(FIGURES)


def rounded(value: float | None) -> float | None:
    """Return the first digits of a figure; None if there is none."""
    return None if value is None or not isfinite(value) else float(f"{value:.{DIGITS}g}")


def read_rows(text: str) -> dict[RowKey, Row]:
    rows = [Row(**one) for one in json.loads(text)["rows"]]
    return {row.key: row for row in rows}


def write_rows(rows: Sequence[Row], command: str) -> str:
    """Return rows as JSON, one per line, so that a difference of two files is readable."""
    lines = ",\n".join(json.dumps(asdict(row)) for row in rows)
    return f'{{"command": "{command}", "rows": [\n{lines}\n]}}\n'


def compare(old: Mapping[RowKey, Row], new: Sequence[Row], name: str) -> str:
    """Return the rows that differ, with old and new figures; empty if none does."""
    found: list[tuple[str, ...]] = []
    for row in new:
        before = old.get(row.key)
        if before != row:
            figures = NO_FIGURES if before is None else before.figures
            found.append((*row.key, *map(_cell, figures, row.figures)))
    gone = sorted(old.keys() - {row.key for row in new})
    found += [(*key, "no longer there") for key in gone]
    if not found:
        return ""
    title = f"{len(found)} of {len(new)} rows differ from {name} (old > new, times in ms):"
    return f"{title}\n{_table(found)}"


def show(rows: Sequence[Row]) -> str:
    """Return the table of all rows."""
    return _table([(*row.key, *map(_text, row.figures)) for row in rows])


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def _cell(old: float | None, new: float | None) -> str:
    return _text(new) if old == new else f"{_text(old)} > {_text(new)}"


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    heads = tuple(name.removesuffix("_ms") for name in (*KEYS, *FIGURES))
    every = [heads, *rows]
    widths = [max(map(len, column)) for column in zip_longest(*every, fillvalue="")]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in every]
    return "\n".join(lines)
