"""Command line of the comparison: prepare, run, report, roofline."""

from __future__ import annotations

import argparse
import json
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks.peers import report, results, roofline
from benchmarks.peers.catalog import (
    DEFAULT_PEERS,
    PEERS,
    default_cache,
    parse_peers,
)
from benchmarks.peers.cold import LIBRARY, Starter, library_starter, run_cold, server_starter
from benchmarks.peers.compare import Comparison, Plan, say
from benchmarks.peers.contenders import headway_launch, parse_variant, peer_launch
from benchmarks.peers.host import Launch
from benchmarks.peers.prepare import prepare
from benchmarks.peers.runner import SAMPLINGS
from benchmarks.peers.workloads import COLD, make_workloads, write_workloads
from benchmarks.support.commands import find_test_model
from benchmarks.support.records import write_record
from headway.bench.steal import StealMeter


def main() -> None:
    # A signal ends the runner processes in the same way as an error.
    signal.signal(signal.SIGTERM, lambda *_: _leave())
    args = _parser().parse_args()
    try:
        args.command(args)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
    except KeyboardInterrupt:
        raise SystemExit("interrupted; `report` shows the results so far") from None


def _leave() -> None:
    raise SystemExit(143)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    commands = parser.add_subparsers(required=True)
    names = f"of {', '.join(PEERS)}, or all"

    made = commands.add_parser("prepare", help="install the peers, each in its own environment")
    made.add_argument("--peers", default="all", help=f"comma separated, {names}")
    made.add_argument("--model", type=Path, help="GGUF file; default: that of the tests")
    made.set_defaults(command=_prepare)

    run = commands.add_parser("run", help="measure, interleaved, and append to a results file")
    run.add_argument("model", type=Path, help="GGUF file")
    run.add_argument("--peers", default=",".join(DEFAULT_PEERS), help=f"comma separated, {names}")
    run.add_argument("--workloads", default="mixed-64,single,long", help="and cold")
    run.add_argument("--sampling", default=",".join(SAMPLINGS), help="comma separated")
    run.add_argument("--rounds", type=int, default=3)
    run.add_argument("--results", type=Path, help="file to append to; default: a new one")
    run.add_argument(
        "--headway-args",
        action="append",
        help="settings such as dtype=bf16,num_threads=2; may be repeated, for several variants",
    )
    run.add_argument("--no-headway", action="store_true", help="peers only")
    run.add_argument("--fresh", action="store_true", help="start a new process for every run")
    run.add_argument(
        "--timeout", type=float, default=1800.0, help="seconds per load, warm-up and run"
    )
    run.set_defaults(command=_run)

    shown = commands.add_parser("report", help="summarise a results file")
    shown.add_argument("results", type=Path)
    shown.set_defaults(command=_report)

    limits = commands.add_parser("roofline", help="measure the limits of this machine")
    limits.add_argument("--model", type=Path, help="GGUF file; default: that of the tests")
    limits.add_argument("--context", type=int, default=200, help="tokens in the KV cache per row")
    limits.set_defaults(command=_roofline)

    for command in (made, run):
        command.add_argument("--cache", type=Path, default=default_cache())
    for command in (run, shown, limits):
        command.add_argument("--json", type=Path, help="write the figures to this file")
    for command in (run, shown):
        command.add_argument("--plot", type=Path, help="draw a picture into this PNG file")
    return parser


def _prepare(args: argparse.Namespace) -> None:
    failures = prepare(parse_peers(args.peers), args.cache, args.model or find_test_model())
    if failures:
        raise SystemExit(f"not prepared: {', '.join(failures)}")


def _run(args: argparse.Namespace) -> None:
    if args.rounds < 1:
        raise ValueError("--rounds must be at least 1")
    if not args.model.exists():
        raise ValueError(f"there is no {args.model}; scripts/get-test-model prints a path")
    file: Path = args.results or _new_results(args.cache)
    file.parent.mkdir(parents=True, exist_ok=True)
    logs = args.cache / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    say(f"results: {file}, logs: {logs}")
    record = partial(results.append, file)
    with tempfile.TemporaryDirectory() as folder:
        _measure(args, Path(folder) / "workloads.json", logs, record)
    _show(results.read(file), args)


def _measure(
    args: argparse.Namespace, work: Path, logs: Path, record: Callable[[results.Result], None]
) -> None:
    workloads = make_workloads()
    names = _parse_names("workload", args.workloads, list(workloads))
    samplings = _parse_names("sampling", args.sampling, list(SAMPLINGS))
    write_workloads(work, workloads)
    model = args.model.resolve()
    variants = [] if args.no_headway else [parse_variant(v) for v in args.headway_args or [""]]
    ours = [headway_launch(variant, model, work) for variant in variants]
    theirs = [peer_launch(name, args.cache, model, work) for name in _peers(args.peers)]
    if not ours and not theirs:
        raise ValueError("there is no engine to measure")
    warm = tuple(name for name in names if name != COLD)
    if warm:
        contenders = (*ours, *theirs)
        plan = Plan(contenders, warm, tuple(samplings), args.rounds, logs, args.timeout, args.fresh)
        with Comparison(plan, record) as comparison:
            comparison.run()
    if COLD in names:
        prompt = workloads[COLD].items[0].prompt_token_ids
        servers = [server_starter(v, model, prompt, logs, args.timeout) for v in variants]
        starters = servers + _library_starters(ours, theirs, logs, args.timeout)
        run_cold(starters, args.rounds, record)


def _peers(text: str) -> list[str]:
    return [] if text in ("", "none") else parse_peers(text)


def _library_starters(
    ours: Sequence[Launch], theirs: Sequence[Launch], logs: Path, timeout_s: float
) -> list[Starter]:
    named = [(launch, f"{launch.name} {LIBRARY}") for launch in ours]
    named += [(launch, launch.name) for launch in theirs]
    return [library_starter(launch, name, logs, timeout_s) for launch, name in named]


def _parse_names(kind: str, text: str, known: list[str]) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise ValueError(f"unknown {kind} in {text!r}; there are {', '.join(known)}")
    return names


def _new_results(cache: Path) -> Path:
    return cache / "results" / time.strftime("%Y-%m-%d-%H%M%S.jsonl")


def _report(args: argparse.Namespace) -> None:
    if not args.results.exists():
        raise ValueError(f"there is no {args.results}; `run` writes such a file")
    _show(results.read(args.results), args)


def _show(found: list[results.Result], args: argparse.Namespace) -> None:
    print(report.as_text(found))
    if args.json is not None:
        args.json.write_text(json.dumps(report.as_plain(found), indent=2) + "\n")
    if args.plot is not None:
        report.draw(args.plot, found)
        print(f"picture: {args.plot}")


def _roofline(args: argparse.Namespace) -> None:
    meter = StealMeter()
    figures = roofline.measure(args.model or find_test_model(), args.context)
    print(roofline.as_text(figures))
    write_record(roofline.as_plain(figures), meter, args.json)


if __name__ == "__main__":
    main()
