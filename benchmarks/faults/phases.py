"""Runs the phases: corpus, requests from the OpenAPI document, mutated bodies.

A phase returns its findings. It does not start a server or judge the run.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from benchmarks.faults.cases import Case, Outcome, Target
from benchmarks.faults.client import Poster
from benchmarks.faults.exchange import FREE, Answer, PromptCost, exchange, problems_of
from benchmarks.faults.mutate import Mutant, is_busy, mutants, problems_of_mutant

MAX_LISTED = 100
BUSY_TRIES = 20
Progress = Callable[[str], None]


@dataclass(slots=True)
class Finding:
    """One wrong answer."""

    name: str
    problem: str
    body: str = ""


@dataclass(slots=True)
class Findings:
    """Results of one phase."""

    num_sent: int = 0
    num_500: int = 0
    num_busy: int = 0
    num_wrong: int = 0
    slowest_refusal_s: float = 0.0
    slowest_refusal: str = ""
    outcomes: dict[str, int] = field(default_factory=dict[str, int])
    wrong: list[Finding] = field(default_factory=list[Finding])

    def add(self, name: str, answer: Answer, problems: list[str], body: bytes = b"") -> None:
        self.num_sent += 1
        self.num_500 += answer.outcome == 500
        self.num_busy += is_busy(answer)
        outcome = str(answer.outcome)
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        if _is_refusal(answer.outcome) and answer.elapsed_s > self.slowest_refusal_s:
            self.slowest_refusal_s, self.slowest_refusal = answer.elapsed_s, name
        if problems:
            self.num_wrong += 1
            print(f"{name}: {problems[0][:300]}", file=sys.stderr)
            if len(self.wrong) < MAX_LISTED:
                self.wrong.append(Finding(name, "; ".join(problems), repr(body[:1000])))


def _is_refusal(outcome: Outcome) -> bool:
    return isinstance(outcome, int) and 400 <= outcome < 500


def run_corpus(
    cases: list[Case], target: Target, progress: Progress, cost: PromptCost = FREE
) -> Findings:
    """Send cases one after another, so that each refusal is timed alone."""
    findings = Findings()
    for place, case in enumerate(cases):
        progress(f"corpus {place + 1}/{len(cases)}, {findings.num_wrong} wrong")
        answer = until_not_busy(lambda case=case: exchange(case, target, cost))
        if case.pause_s:  # the pause would count
            answer = Answer(answer.outcome, answer.content_type, answer.body, 0.0)
        findings.add(case.name, answer, problems_of(case, answer))
    return findings


def run_mutants(
    count: int, seed: int, concurrency: int, target: Target, progress: Progress
) -> Findings:
    """Send mutated bodies concurrently; retry a busy server, up to a bound."""
    findings, lock = Findings(), threading.Lock()
    source, is_interrupted = mutants(count, seed), threading.Event()

    def take() -> Iterator[Mutant]:
        while not is_interrupted.is_set():
            with lock:
                batch = [*itertools.islice(source, 8)]
            if not batch:
                return
            yield from batch

    def work() -> None:
        with Poster(target) as poster:
            for mutant in take():
                answer = until_not_busy(lambda mutant=mutant: poster.post(mutant.path, mutant.body))
                problems = problems_of_mutant(answer)
                with lock:
                    findings.add(f"mutant {seed}/{mutant.place}", answer, problems, mutant.body)
                    progress(f"mutated {findings.num_sent}/{count}, {findings.num_wrong} wrong")

    with ThreadPoolExecutor(concurrency) as pool:
        futures = [pool.submit(work) for _ in range(concurrency)]
        try:
            for future in futures:
                future.result()
        except BaseException:
            is_interrupted.set()  # or the pool would wait for all of them
            raise
    return findings


def until_not_busy(send: Callable[[], Answer]) -> Answer:
    """Send until the server is not busy, up to a bound."""
    answer = send()
    for _ in range(BUSY_TRIES):
        if not is_busy(answer):
            break
        time.sleep(0.25)
        answer = send()
    return answer
