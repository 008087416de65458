"""The log on standard error: lines of text, or of JSON for programs to read."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any

TEXT = "%(asctime)s %(levelname)s %(message)s"


class JsonFormatter(logging.Formatter):
    """One JSON object per line; `extra={"fields": {...}}` of a record adds its own fields."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def set_up_logging(log_format: str, process: str) -> None:
    """Log to standard error from now on; lines of the engine process say so."""
    prefix = "engine: " if process == "engine" else ""
    text = logging.Formatter(TEXT.replace("%(message)s", f"{prefix}%(message)s"))
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(process) if log_format == "json" else text)
    logging.basicConfig(level=logging.INFO, handlers=[handler])
