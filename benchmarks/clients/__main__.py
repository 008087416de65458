"""Command line: run clients against a server, and print a table."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from benchmarks.clients.catalog import CLIENTS
from benchmarks.clients.report import as_markdown, as_text
from benchmarks.clients.runner import run_client
from benchmarks.support.commands import find_test_model, headway_cache


def main() -> None:
    # A signal ends server and client in the same way as an error.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    args = _parser().parse_args()
    unknown = [name for name in args.names if name not in CLIENTS]
    if unknown:
        raise SystemExit(f"error: unknown {', '.join(unknown)}; there are {', '.join(CLIENTS)}")
    outcomes = []
    for name in args.names or CLIENTS:
        outcome = run_client(CLIENTS[name], args.cache, args.model or find_test_model())
        print(as_text(outcome), flush=True)
        outcomes.append(outcome)
    if args.markdown is not None:
        args.markdown.write_text(as_markdown(outcomes) + "\n")
    if not all(outcome.is_expected for outcome in outcomes):
        raise SystemExit(1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.clients", description=__doc__)
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run", help="install clients if needed, and run their checks")
    run.add_argument("names", nargs="*", help=f"of {', '.join(CLIENTS)}; default: all")
    run.add_argument("--model", type=Path, help="GGUF file; default: that of the tests")
    run.add_argument("--cache", type=Path, default=headway_cache() / "clients")
    run.add_argument("--markdown", type=Path, help="write the table to this file")
    return parser


if __name__ == "__main__":
    main()
