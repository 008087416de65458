"""Fault injection: a script writes a fault to a file, and the process executes it."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER_VARIABLE = "FAULTS_FOLDER"
"""Environment variable with the folder of these files."""


def folder() -> Path:
    return Path(os.environ[FOLDER_VARIABLE])


def inject(where: Path, process: str, fault: str) -> None:
    """Write a fault for a process."""
    (where / f"{process}.new").write_text(fault)
    (where / f"{process}.new").rename(where / process)


def is_pending(where: Path, process: str) -> bool:
    return (where / process).exists()


class Inbox:
    """The faults injected into this process."""

    def __init__(self, process: str) -> None:
        self._path = folder() / process

    def take(self, *faults: str) -> str:
        """Remove and return the pending fault, if it is one of these."""
        try:
            fault = self._path.read_text()
            if fault not in faults:
                return ""
            self._path.unlink()
        except FileNotFoundError:
            return ""
        return fault
