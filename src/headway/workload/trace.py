"""Reads public trace files: arrival times, lengths and shared prefixes.

Two formats, recognized by content: the Azure LLM inference traces (CSV with TIMESTAMP,
ContextTokens, GeneratedTokens) and the Mooncake traces (JSON lines with timestamp in milliseconds,
input_length, output_length, and hash_ids that name prefix blocks of 512 tokens).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from random import Random

from headway.errors import ConfigError

MOONCAKE_BUCKET_S = 3.0
MOONCAKE_BLOCK_TOKENS = 512
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request, `at` seconds after the first.

    Prompts with the same leading hash ids start with the same tokens.
    """

    at: float
    num_prompt_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival; times have a resolution of `bucket_s` (0: exact)."""

    rows: tuple[TraceRow, ...]
    bucket_s: float = 0.0
    silent_s: float = 0.0
    """Seconds without a request after the last one."""

    @property
    def span_s(self) -> float:
        """Seconds up to the end of the last bucket, and of the silence after it."""
        return self.rows[-1].at + self.bucket_s + self.silent_s

    @property
    def mean_rate(self) -> float:
        """Requests per second."""
        if self.span_s <= 0.0:
            raise ConfigError("all requests of the trace come at once, so it has no rate")
        return len(self.rows) / self.span_s

    def busiest(self, stretch_s: float, num_tokens_of: Callable[[TraceRow], int]) -> Trace:
        """Return the requests of the stretch of so many seconds that has the most tokens."""
        rows = self.rows
        if self.span_s <= stretch_s:
            return self
        first = num_tokens = most_tokens = 0
        best = (0, 1)
        for number, row in enumerate(rows):
            num_tokens += num_tokens_of(row)
            while first < number and row.at + self.bucket_s - rows[first].at > stretch_s:
                num_tokens -= num_tokens_of(rows[first])
                first += 1
            if num_tokens > most_tokens:
                most_tokens, best = num_tokens, (first, number + 1)
        picked = rows[best[0] : best[1]]
        moved = tuple(replace(row, at=row.at - picked[0].at) for row in picked)
        return Trace(moved, self.bucket_s, max(0.0, stretch_s - moved[-1].at - self.bucket_s))

    def begun_at(self, share: float) -> Trace:
        """Return the same requests, begun after this share of them and then from the first."""
        first = int(share * len(self.rows))
        late, early = self.rows[first:], self.rows[:first]
        moved = [replace(row, at=row.at - late[0].at) for row in late]
        moved += [replace(row, at=row.at + self.span_s - late[0].at) for row in early]
        silent_s = self.span_s - moved[-1].at - self.bucket_s
        return Trace(tuple(moved), self.bucket_s, max(0.0, silent_s))

    def jittered(self, draw: Random) -> Trace:
        """Return times spread evenly within their buckets; otherwise each bucket is a burst."""
        if not self.bucket_s:
            return self
        moved = [replace(row, at=row.at + draw.uniform(0.0, self.bucket_s)) for row in self.rows]
        return replace(self, rows=tuple(sorted(moved, key=lambda row: row.at)), bucket_s=0.0)


def read_text(path: Path) -> str:
    """Return the contents of a text file."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def read_trace(path: Path) -> Trace:
    """Return the trace of a file in either format."""
    lines = read_text(path).splitlines()
    first = lines[0] if lines else ""
    if first.startswith("{"):
        rows, bucket_s = _read_rows(path, enumerate(lines, 1), _mooncake_row), MOONCAKE_BUCKET_S
    elif all(column in first for column in _AZURE_COLUMNS):
        named = enumerate(csv.DictReader(lines), 2)
        rows, bucket_s = _read_rows(path, named, _azure_row), 0.0
    else:
        raise ConfigError(
            f"{path} is not a trace; accepted: CSV with the columns {', '.join(_AZURE_COLUMNS)}, "
            "or JSON lines with timestamp, input_length, output_length and hash_ids"
        )
    if not rows:
        raise ConfigError(f"the trace {path} has no requests")
    rows.sort(key=lambda row: row.at)
    start = rows[0].at
    return Trace(tuple(replace(row, at=row.at - start) for row in rows), bucket_s)


def _read_rows(
    path: Path, numbered: Iterator[tuple[int, object]], read: Callable[..., TraceRow]
) -> list[TraceRow]:
    rows: list[TraceRow] = []
    for number, line in numbered:
        if line == "":
            continue
        try:
            row = read(line)
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}, line {number}: {error!r}") from error
        if row.num_prompt_tokens < 0 or row.num_output_tokens < 0:
            raise ConfigError(f"{path}, line {number}: a length is below 0")
        rows.append(row)
    return rows


def _azure_row(row: dict[str, str]) -> TraceRow:
    at = datetime.fromisoformat(row["TIMESTAMP"])
    if at.tzinfo is None:
        at = at.replace(tzinfo=UTC)
    return TraceRow(at.timestamp(), int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _mooncake_row(line: str) -> TraceRow:
    row = json.loads(line)
    return TraceRow(
        float(row["timestamp"]) / 1000.0,
        int(row["input_length"]),
        int(row["output_length"]),
        tuple(int(number) for number in row.get("hash_ids", ())),
    )
