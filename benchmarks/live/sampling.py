"""Measures what sampling costs: decode steps with each setting against greedy ones.

python -m benchmarks.live.sampling MODEL [--streams 32 128] [--rounds 20] [--busy] [--json FILE]

Each round runs one step of every setting on one executor, with the same tokens and blocks. The
tokens are prose, so that probabilities are as in real requests; `hot` makes them nearly equal. A
figure is the time of the greedy step over that of the step with the setting, which is the ratio of
their rates; the table shows median and quartiles over the rounds. `mask` allows 4,000 tokens, as a
grammar may. `mixed` gives all settings to the streams in turn. With --busy another process keeps
one core busy. Rounds in which the host took more than 3 % of the busy time are left out; if fewer
than two remain, all count and rows are marked.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

from benchmarks.live.perplexity import TEXT
from headway.bench.steal import Steal, StealMeter, steal_plain, steal_text
from headway.clock import SystemClock
from headway.config import load_config
from headway.core.executor import Executor
from headway.core.params import SamplingParams
from headway.core.plan import Failure, NewRequest, ScheduledRequest, StepPlan
from headway.errors import HeadwayError
from headway.executors.hardware import probe_hardware
from headway.executors.load import facts_of, load_executor, open_checkpoint
from headway.executors.source import locate
from headway.resolve import Resolved, resolve
from headway.text import Tokenizer

GREEDY, MIXED = "greedy", "mixed"
SETTINGS: dict[str, dict[str, Any]] = {
    GREEDY: {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_p": {"temperature": 0.8, "top_p": 0.95},
    "top_k": {"temperature": 0.8, "top_k": 40},
    "min_p": {"temperature": 0.8, "min_p": 0.05},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.1, "presence_penalty": 0.5},
    "logprobs": {"temperature": 0.8, "top_p": 0.95, "logprobs": 5},
    "hot": {"temperature": 3.0, "top_p": 0.95},
    "mask": {"temperature": 0.0, "allowed_token_ids": tuple(range(2000, 6000))},
    "mask, drawn": {"temperature": 0.8, "allowed_token_ids": tuple(range(2000, 6000))},
}
BLOCK_SIZE = 16
CONTEXT = 256


def params_of(name: str, num_streams: int) -> list[SamplingParams]:
    """Return the parameters of each stream."""
    names = [*SETTINGS] if name == MIXED else [name]
    return [SamplingParams(**SETTINGS[names[at % len(names)]]) for at in range(num_streams)]


class Steps:
    """Steps of an executor; all settings share tokens and blocks."""

    def __init__(self, executor: Executor, contexts: Sequence[tuple[int, ...]]) -> None:
        self._executor = executor
        self._tokens = contexts
        per_stream = -(-len(contexts[0]) // BLOCK_SIZE)
        self._blocks = [
            tuple(range(at * per_stream, (at + 1) * per_stream)) for at in range(len(contexts))
        ]

    def write_blocks(self) -> None:
        """Compute all tokens of each stream but the last."""
        for at, (tokens, blocks) in enumerate(zip(self._tokens, self._blocks, strict=True)):
            prompt = tokens[:-1]
            new = NewRequest(SamplingParams(), 0, 0, prompt, CONTEXT)
            self._run(StepPlan(0, (ScheduledRequest(f"{at}", 0, prompt, blocks, False, new),)))

    def prefill(self) -> float:
        """Return the seconds of one step with the tokens of all streams as one prompt."""
        started_at = time.perf_counter()
        tokens = tuple(token for one in self._tokens for token in one[:CONTEXT])
        blocks = tuple(range(len(tokens) // BLOCK_SIZE))
        new = NewRequest(SamplingParams(temperature=0.0), 0, 0, tokens, len(tokens) + 1)
        self._run(StepPlan(0, (ScheduledRequest("prompt", 0, tokens, blocks, True, new),)))
        return time.perf_counter() - started_at

    def decode(self, name: str, is_first: bool = False) -> float:
        """Return the seconds of one step."""
        started_at = time.perf_counter()
        news: list[NewRequest | None] = [None] * len(self._tokens)
        if is_first:
            news = [
                NewRequest(params, at, 0, tokens, CONTEXT // 2)
                for at, (params, tokens) in enumerate(
                    zip(params_of(name, len(self._tokens)), self._tokens, strict=True)
                )
            ]
        scheduled = [
            ScheduledRequest(f"{name} {at}", CONTEXT, tokens[-1:], blocks if new else (), True, new)
            for at, (tokens, blocks, new) in enumerate(
                zip(self._tokens, self._blocks, news, strict=True)
            )
        ]
        self._run(StepPlan(0, tuple(scheduled)))
        return time.perf_counter() - started_at

    def _run(self, plan: StepPlan) -> None:
        for outcome in self._executor.collect(self._executor.submit(plan)).outcomes:
            if isinstance(outcome, Failure):
                raise RuntimeError(outcome.message)


@contextmanager
def busy_core(is_wanted: bool) -> Iterator[None]:
    """Keep one core busy with another process, if wanted."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if is_wanted else None
    try:
        yield
    finally:
        if process is not None:
            process.kill()
            process.wait()


def read_contexts(model: str, num_streams: int) -> list[tuple[int, ...]]:
    """Return tokens of another part of the same prose for each stream."""
    tokens = Tokenizer.from_path(locate(model).path).encode(TEXT.read_text(encoding="utf-8"))
    step = (len(tokens) - CONTEXT - 1) // num_streams
    return [tuple(tokens[at * step : at * step + CONTEXT + 1]) for at in range(num_streams)]


def measure(
    executor: Executor, contexts: Sequence[tuple[int, ...]], num_rounds: int
) -> list[dict[str, Any]]:
    """Return the seconds of every setting, and the steal, of every round."""
    num_streams, names = len(contexts), (*SETTINGS, MIXED)
    steps = Steps(executor, contexts)
    steps.write_blocks()
    for name in names:
        steps.decode(name, is_first=True)
    rounds: list[dict[str, Any]] = []
    for number in range(num_rounds):
        meter = StealMeter()
        # Another first one each time: whoever follows a pause is slower.
        order = [*names[number % len(names) :], *names[: number % len(names)]]
        seconds = {name: steps.decode(name) for name in order}
        rounds.append({"seconds": seconds, "steal": meter.read()})
        if number % 5 == 4:
            print(f"{num_streams} streams, {number + 1} rounds", file=sys.stderr, flush=True)
    return rounds


def summary(rounds: Sequence[dict[str, Any]]) -> tuple[dict[str, dict[str, Any]], Steal | None]:
    """Return the ratios to greedy over the rounds that count, and the steal of these."""
    quiet = [one for one in rounds if one["steal"] is None or not one["steal"].is_high]
    kept = quiet if len(quiet) > 1 else rounds
    counted = [one["seconds"] for one in kept]
    shares = [one["steal"].share for one in kept if one["steal"] is not None]
    steal = Steal.of(fmean(shares)) if shares else None
    rows: dict[str, dict[str, Any]] = {}
    for name in counted[0]:
        ratios = [seconds[GREEDY] / seconds[name] for seconds in counted]
        low, _, high = quantiles(ratios, n=4)
        rows[name] = {
            "median": median(ratios),
            "low": low,
            "high": high,
            "step_ms": 1000 * median(seconds[name] for seconds in counted),
            "num_rounds": len(counted),
        }
    return rows, steal


def make_executor(model: str, num_streams: int, num_threads: int | None = None) -> Executor:
    return resolve_executor(model, num_streams, num_threads)[0]


def resolve_executor(
    model: str, num_streams: int, num_threads: int | None = None
) -> tuple[Executor, Resolved]:
    """Return an executor for that many streams, and its settings."""
    settings = {
        "model": model,
        "num_threads": num_threads,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": num_streams,
        "kv_cache_memory_bytes": "2G",
    }
    try:
        checkpoint = open_checkpoint(locate(model))
        resolved = resolve(load_config(settings), facts_of(checkpoint), probe_hardware())
        return load_executor(checkpoint, resolved, SystemClock()), resolved
    except HeadwayError as error:
        raise SystemExit(f"error: {error}") from error


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--busy", action="store_true", help="beside one busy core")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    report: dict[str, Any] = {"is_busy": args.busy}
    for num_streams in args.streams:
        executor = make_executor(args.model, num_streams)
        with busy_core(args.busy):
            rounds = measure(executor, read_contexts(args.model, num_streams), args.rounds)
        executor.close()
        rows, steal = summary(rounds)
        plain = [{**one, "steal": steal_plain(one["steal"])} for one in rounds]
        report[f"{num_streams} streams"] = {
            "summary": rows,
            "steal": steal_plain(steal),
            "rounds": plain,
        }
        for name, row in rows.items():
            print(
                f"{num_streams:4d} streams  {name:12s} {row['step_ms']:7.1f} ms  "
                f"{row['median']:.3f} of greedy ({row['low']:.3f} - {row['high']:.3f}, "
                f"{row['num_rounds']} rounds), {steal_text(steal)}"
            )
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
