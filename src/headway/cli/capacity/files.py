"""Files that commands write."""

from __future__ import annotations

from pathlib import Path

from headway.errors import ConfigError


def write_text(path: Path, text: str) -> None:
    """Write a text file; ConfigError if it cannot be written."""
    try:
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
