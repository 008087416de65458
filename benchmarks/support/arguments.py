"""Arguments of benchmarks, and how a benchmark ends."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

INTERRUPTED = 130


def at_least_one(text: str) -> int:
    """Parse a whole number above 0, for `type=` of an argument."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return value


def run(main: Callable[[], int | None]) -> NoReturn:
    """Run a benchmark and leave with its exit code; Ctrl-C leaves a word, not a traceback."""
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
