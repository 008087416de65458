"""Writes the record of a benchmark run, with the steal of the run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from headway.bench.steal import StealMeter, steal_plain, steal_text


def write_record(report: Mapping[str, object], meter: StealMeter, path: Path | None) -> None:
    """Print the steal of the run; write the report with it, if a path is given."""
    steal = meter.read()
    print(steal_text(steal))
    if path is not None:
        record = {**report, "steal": steal_plain(steal)}
        path.write_text(json.dumps(record, indent=2) + "\n")
