"""Fault injection: a script writes the name of a fault to a file, the process reads and executes
it."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER_VARIABLE = "FAULTS_FOLDER"
"""Tells the processes of a battery where the files are."""


def folder() -> Path:
    return Path(os.environ[FOLDER_VARIABLE])


def inject(where: Path, process: str, fault: str) -> None:
    """Leave a fault for a process."""
    (where / f"{process}.new").write_text(fault)
    (where / f"{process}.new").rename(where / process)


def is_pending(where: Path, process: str) -> bool:
    return (where / process).exists()


class Inbox:
    """The faults left for this process."""

    def __init__(self, process: str) -> None:
        self._path = folder() / process

    def take(self, *faults: str) -> str:
        """The fault that is there, if it is one of these; it happens once."""
        try:
            fault = self._path.read_text()
            if fault not in faults:
                return ""
            self._path.unlink()
        except FileNotFoundError:
            return ""
        return fault
