"""Runs commands that must succeed, and finds the folders that scripts keep things in."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


class CommandFailed(Exception):
    """A command failed; the text has the end of its output."""


def call(
    command: Sequence[str],
    timeout_s: float,
    variables: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> str:
    """Run a command; return its output, or raise CommandFailed with its last lines."""
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            env={**os.environ, **(variables or {})},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise CommandFailed(f"{' '.join(command[:4])}: not done after {timeout_s:g} s") from error
    if done.returncode != 0:
        lines = (done.stdout + done.stderr).strip().splitlines()
        tail = "\n".join([line for line in lines if not line.startswith("WARNING")][-15:])
        raise CommandFailed(f"{' '.join(command)}: exit code {done.returncode}\n{tail}")
    return done.stdout


def headway_cache() -> Path:
    """Return the folder of the test model and of environments."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("HEADWAY_CACHE") or Path(base) / "headway")


def find_test_model() -> Path:
    """Return the path of the test model; fetch it if it is missing."""
    command = [str(ROOT / "scripts" / "get-test-model")]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Path(done.stdout.strip())
