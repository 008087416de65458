"""Sends all bad inputs beside a bystander, which they must not delay.

Many of the corpus are accepted and computed, and a long prompt delays the streams beside it: by how
much depends on the machine and on the prompt. So the bystander is measured alone, then beside good
inputs, prompts as long as the server accepts, then beside each phase. What the good inputs took
says how long to wait for the answer to a case of the corpus. A refusal is timed until its head.

python -m benchmarks.faults.run_bad_inputs [--url URL | --model GGUF | --fake] [--mutated N]
    [--schemathesis-examples N] [--json FILE]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.faults.bad_inputs import corpus
from benchmarks.faults.bystander import Bystander, Watch
from benchmarks.faults.cases import COMPLETIONS, MAX_TOKENS, Target
from benchmarks.faults.client import Poster
from benchmarks.faults.exchange import FREE, PromptCost
from benchmarks.faults.phases import (
    Findings,
    Progress,
    run_corpus,
    run_mutants,
    until_not_busy,
)
from benchmarks.faults.schema_fuzz import NoDocument, SchemaResult, fetch_document, fuzz
from benchmarks.faults.servers import Subject, subject
from benchmarks.support.records import write_record
from headway.bench.steal import StealMeter

PROGRESS_S = 0.5
MAX_RATIO_TO_GOOD = 1.5
"""Largest allowed ratio of the gap beside bad inputs to the gap beside good ones."""
NUM_GOOD = 2
BASELINES = ("undisturbed", "good inputs")


def main() -> int:
    args, meter = _arguments(), StealMeter()
    with subject(args.url, args.admin_url, args.model) as under_test:
        report = run(under_test, args)
    _print(report)
    write_record(report, meter, args.json)
    return 1 if report["failures"] else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--url", help="a running server")
    where.add_argument("--model", help="start a server with this model file")
    where.add_argument("--fake", action="store_true", help="start the fake server (the default)")
    parser.add_argument("--admin-url", help="admin address of the server at --url")
    parser.add_argument("--mutated", type=int, default=50_000, help="mutated bodies")
    parser.add_argument("--schemathesis-examples", type=int, default=500, help="per operation")
    parser.add_argument("--concurrency", type=int, default=8, help="mutated bodies at a time")
    parser.add_argument("--seed", type=int, default=0, help="seed of the mutated bodies")
    parser.add_argument(
        "--undisturbed-s",
        type=float,
        default=20.0,
        help="seconds of measuring the bystander before the first phase",
    )
    parser.add_argument(
        "--max-gap-ratio",
        type=float,
        default=3.0,
        help="largest allowed ratio of disturbed to undisturbed gap",
    )
    parser.add_argument(
        "--min-gap-s", type=float, default=0.1, help="gaps below this pass at any ratio"
    )
    parser.add_argument(
        "--max-refusal-s", type=float, default=0.25, help="longest refusal of the corpus"
    )
    parser.add_argument("--json", type=Path, help="write the result here")
    return parser.parse_args()


def run(under_test: Subject, args: argparse.Namespace) -> dict[str, Any]:
    """Run every phase beside the bystander; return the report with its failures."""
    target, progress, cases = under_test.target, _progress_line(), corpus()
    before, started_at = under_test.health(), time.monotonic()
    cost = FREE
    phases: dict[str, Callable[[], Findings | SchemaResult]] = {
        "corpus": lambda: run_corpus(cases, target, progress, cost),
        "schema": lambda: _run_schema(target, args.schemathesis_examples, progress),
        "mutated": lambda: run_mutants(args.mutated, args.seed, args.concurrency, target, progress),
    }
    results: dict[str, Any] = {}
    watches: dict[str, Watch] = {}
    failures: list[str] = []
    with Bystander(target) as bystander:
        time.sleep(1.0)  # the first streams of a new server are slower
        with bystander.measure() as watches["undisturbed"]:
            progress("undisturbed")
            time.sleep(args.undisturbed_s)
        with bystander.measure() as watches["good inputs"]:
            progress("good inputs")
            cost = send_good(target)
        for name, phase in phases.items():
            with bystander.measure() as watches[name]:
                try:
                    results[name] = phase()
                except NoDocument as error:
                    failures.append(f"no document to make requests from: {error}")
    progress("")
    failures += _failures_of(results, args) + failures_of_watches(watches, args)
    failures += under_test.health().problems_since(before)
    return {
        "failures": failures,
        "elapsed_s": time.monotonic() - started_at,
        "phases": {name: dataclasses.asdict(result) for name, result in results.items()},
        "bystander": {name: dataclasses.asdict(watch) for name, watch in watches.items()},
        "gap_ratio": _gap_ratio(watches),
        "health": dataclasses.asdict(under_test.health()),
    }


def send_good(target: Target) -> PromptCost:
    """Send prompts as long as the server accepts, one after another; return the slowest."""
    with urllib.request.urlopen(f"{target.url}/v1/models", timeout=10) as answer:
        num_tokens = json.load(answer)["data"][0]["max_model_len"] - MAX_TOKENS
    elapsed_s = 0.0
    with Poster(target) as poster:
        for number in range(1, NUM_GOOD + 1):  # other tokens: no prompt has a cached prefix
            content = {"prompt": [number] * num_tokens, "max_tokens": MAX_TOKENS}
            body = json.dumps(content).encode()
            found = until_not_busy(lambda body=body: poster.post(COMPLETIONS, body))
            if found.outcome != 200:
                raise RuntimeError(f"a good input was answered {found.outcome}: {found.body!r}")
            elapsed_s = max(elapsed_s, found.elapsed_s)
    return PromptCost(num_tokens, elapsed_s)


def _run_schema(target: Target, num_examples: int, progress: Progress) -> SchemaResult:
    document = fetch_document(target)
    return fuzz(target, document, num_examples, lambda line: progress(f"schema: {line}"))


def _failures_of(results: dict[str, Any], args: argparse.Namespace) -> list[str]:
    failures = []
    for name, result in results.items():
        num_wrong = result.num_failures if isinstance(result, SchemaResult) else result.num_wrong
        if num_wrong:
            failures.append(f"{name}: {num_wrong} wrong answers")
    slowest = results["corpus"]
    if slowest.slowest_refusal_s > args.max_refusal_s:
        took = f"{slowest.slowest_refusal_s * 1000:.0f} ms"
        failures.append(f"corpus: refusing {slowest.slowest_refusal} took {took}")
    return failures


def failures_of_watches(watches: dict[str, Watch], args: argparse.Namespace) -> list[str]:
    failures = []
    allowed_s = max(
        args.min_gap_s,
        args.max_gap_ratio * watches["undisturbed"].worst_gap_s,
        MAX_RATIO_TO_GOOD * watches["good inputs"].worst_gap_s,
    )
    for name, watch in watches.items():
        if watch.failures:
            failures.append(f"bystander, {name}: {len(watch.failures)} streams failed")
        if watch.worst_gap_s > allowed_s:
            failures.append(f"bystander, {name}: a gap of {watch.worst_gap_s * 1000:.0f} ms")
        if not watch.num_gaps:
            failures.append(f"bystander, {name}: no stream, {watch.num_busy} times refused")
    return failures


def _gap_ratio(watches: dict[str, Watch]) -> float | None:
    good = watches["good inputs"].worst_gap_s
    worst = max(watch.worst_gap_s for name, watch in watches.items() if name not in BASELINES)
    return worst / good if good else None


def _progress_line() -> Progress:
    shown_at = 0.0

    def show(line: str) -> None:
        nonlocal shown_at
        if time.monotonic() - shown_at >= PROGRESS_S or not line:
            shown_at = time.monotonic()
            end = "" if sys.stderr.isatty() and line else "\n"
            print(f"\r\x1b[K{line}" if sys.stderr.isatty() else line, end=end, file=sys.stderr)

    return show


def _print(report: dict[str, Any]) -> None:
    for name, result in report["phases"].items():
        if "wrong" in result:
            refusal_ms = result["slowest_refusal_s"] * 1000
            print(
                f"{name}: {result['num_sent']} sent, {result['num_wrong']} wrong, "
                f"{result['num_500']} of them 500, {result['num_busy']} busy, slowest refusal "
                f"{refusal_ms:.0f} ms ({result['slowest_refusal']})"
            )
            for one in result["wrong"]:
                print(f"  {one['name']}: {one['problem'][:300]}")
        else:
            print(
                f"{name}: {result['num_requests']} requests to {result['num_operations']} "
                f"operations, {result['num_failures']} wrong, {result['num_busy']} busy"
            )
            for one in result["failures"]:
                print(f"  {one['operation']} {one['mode']}: {one['problem'][:300]}")
    for name, watch in report["bystander"].items():
        print(
            f"bystander, {name}: worst gap {watch['worst_gap_s'] * 1000:.1f} ms "
            f"over {watch['num_gaps']} gaps of {watch['num_streams']} streams"
        )
    if report["gap_ratio"] is not None:
        print(f"worst gap beside bad inputs : beside good ones = {report['gap_ratio']:.2f}")
    print(f"health: {report['health']}")
    for failure in report["failures"]:
        print(f"FAILED {failure}")
    print("failed" if report["failures"] else "passed", f"in {report['elapsed_s']:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
