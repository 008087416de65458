"""`headway profile`: measure what steps and requests take on this machine."""

from __future__ import annotations

import asyncio
import platform
import tempfile
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from headway._version import __version__
from headway.bench.load.measure import name_model
from headway.bench.load.openai import Target
from headway.bench.load.own_server import OwnServer
from headway.bench.load.records import LoadRecord, Outcome
from headway.bench.load.runner import LoadRun, RunLimits, run_load
from headway.bench.steal import StealMeter
from headway.cli.progress import progress_bar
from headway.errors import ConfigError
from headway.executors.hardware import probe_hardware
from headway.record.reader import find_recordings
from headway.sim.profile.fitting import (
    MeasuredDelay,
    Provenance,
    fit_profile,
    group_delays,
)
from headway.sim.profile.machine import MachineProfile, write_profile
from headway.sim.recording.observed import ObservedEngine, ObservedStep, read_observed
from headway.workload import Bounds, ClosedLoop, Lognormal, Poisson, Synthetic

NUM_CLIENTS = (1, 3, 8, 20, 48, 80)
"""Clients of the closed loops; the last one more than run at once by default."""
OPEN_SHARES = (0.3, 0.6, 0.85)
"""Rates of the open loops, relative to what the last closed loop was served."""
PROMPTS = Lognormal(4.8, 1.0, Bounds(8, 1500))
OUTPUTS = Lognormal(3.7, 0.7, Bounds(8, 160))
NUM_PASSES = 3
MIN_SECONDS = 30.0
MAX_DRIFT, MAX_STEAL = 0.03, 0.02
"""Beyond, the machine had other work: a quiet one differs by about 1 % between passes."""


def profile(
    model: Annotated[str, typer.Argument(help="A GGUF file, a folder, or a Hugging Face id.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Write the profile here.")],
    seconds: Annotated[
        float, typer.Option(help="Time to send requests; their answers take half as long again.")
    ] = 180.0,
    serve_flag: Annotated[
        list[str] | None,
        typer.Option(help="Flag for `headway serve`, such as --max-num-seqs=32; repeatable."),
    ] = None,
) -> None:
    """Measure what steps and requests take on this machine with a model.

    Starts a server on a free port, sends loads of several sizes in turn, and fits step times,
    overhead and delays to what it did. Nothing else should run meanwhile.
    """
    if seconds < MIN_SECONDS:
        raise ConfigError(f"--seconds must be at least {MIN_SECONDS:.0f}, not {seconds:g}")
    if not output.parent.is_dir():
        raise ConfigError(f"{output.parent} is not a folder")
    flags = serve_flag or []
    with tempfile.TemporaryDirectory(prefix="headway-profile-") as name:
        folder = Path(name)
        meter = StealMeter()
        server = OwnServer.start(model, folder, ["--record", str(folder), *flags])
        try:
            with progress_bar("measuring, seconds") as progress:
                passes = asyncio.run(_run_passes(server, seconds, progress))
        finally:
            server.stop()
        steal = meter.read()
        typer.echo("fitting", err=True)
        observed = [read_observed(path) for path in find_recordings([folder])]
    if len(observed) != 1:
        raise ConfigError(
            "the engine was restarted during the measurement: the profile would have a pause in it"
        )
    origin = Provenance(
        model=Path(model).name,
        machine=_describe_machine(),
        headway=__version__,
        command=" ".join(["headway profile", Path(model).name, *flags]),
        date=datetime.now(UTC).date().isoformat(),
        start_s=server.start_s,
        steal=0.0 if steal is None else steal.share,
    )
    (engine,) = observed
    steps = [[steps_in(engine, run) for run in runs] for runs in passes]
    # Clients of a closed loop send when the server is busy with the answers of others.
    open_runs = [run for runs in passes for run in runs[len(NUM_CLIENTS) :]]
    all_runs = [run for runs in passes for run in runs]
    delays = _all_delays(engine, open_runs) or _all_delays(engine, all_runs)
    found = fit_profile(engine.header, steps, group_delays(delays), origin, len(NUM_CLIENTS))
    write_profile(output, found)
    typer.echo(describe(found))
    typer.echo(f"written: {output}")


async def _run_passes(
    server: OwnServer, seconds: float, progress: Callable[[int, int], None]
) -> list[list[LoadRun]]:
    """Run every load in every pass: closed loops, then open ones."""
    target = Target(server.origin, await name_model(server.origin, (), None))
    num_loads = len(NUM_CLIENTS) + len(OPEN_SHARES)
    each_s = seconds / (NUM_PASSES * num_loads)
    numbers = count()

    async def run(arrivals: ClosedLoop | Poisson) -> LoadRun:
        number = next(numbers)
        progress(int(number * each_s), int(seconds))
        load = Synthetic(arrivals, PROMPTS, OUTPUTS)
        return await run_load(target, load, RunLimits(duration_s=each_s), number)

    # The first requests find cold caches.
    await run_load(target, Synthetic(ClosedLoop(4), PROMPTS, OUTPUTS), RunLimits(8), -1)
    passes: list[list[LoadRun]] = []
    for _ in range(NUM_PASSES):
        runs = [await run(ClosedLoop(num_clients)) for num_clients in NUM_CLIENTS]
        rate = len(runs[-1].records) / runs[-1].elapsed_s
        runs += [await run(Poisson(share * rate)) for share in OPEN_SHARES]
        passes.append(runs)
    return passes


def steps_in(observed: ObservedEngine, run: LoadRun) -> list[ObservedStep]:
    """Return the steps of an engine that began during a run."""
    end = run.started_at + run.elapsed_s
    return [one for one in observed.steps if run.started_at <= one.began_at < end]


def _all_delays(observed: ObservedEngine, runs: Sequence[LoadRun]) -> list[MeasuredDelay]:
    return [one for run in runs for one in _delays(observed, run)]


def _delays(observed: ObservedEngine, run: LoadRun) -> list[MeasuredDelay]:
    """Return the delays of the completed requests of a run.

    When the engine is busy it takes a request at the end of its step. Its wait for that is part of
    the simulation, so the way from the API process to the engine is taken from idle moments.
    """
    completed = [one for one in run.records if one.outcome is Outcome.COMPLETED]
    pairs = [
        (record, observed.requests[record.request_id])
        for record in completed
        if record.request_id in observed.requests
    ]
    idle = [seen.entry.now - seen.entry.arrived_at for _, seen in pairs if seen.is_added_idle]
    usual_s = median(idle) if idle else 0.0
    delays: list[MeasuredDelay] = []
    for record, seen in pairs:
        if record.first_token_at is None or seen.first_token_at is None:
            continue
        sent_at = run.started_at + record.scheduled_at
        handed_over_s = seen.entry.now - seen.entry.arrived_at if seen.is_added_idle else usual_s
        delays.append(
            MeasuredDelay(
                _num_in_flight(run.records, record.scheduled_at),
                max(0.0, seen.entry.arrived_at - sent_at + handed_over_s),
                max(0.0, run.started_at + record.first_token_at - seen.first_token_at),
            )
        )
    return delays


def _num_in_flight(records: Sequence[LoadRecord], at: float) -> int:
    return sum(
        one.scheduled_at <= at and (one.ended_at is None or one.ended_at > at) for one in records
    )


def _describe_machine() -> str:
    hardware = probe_hardware()
    return f"{hardware.num_cores} cores, kernels {hardware.kernels}, {platform.machine()}"


def describe(found: MachineProfile) -> str:
    """Return the main figures of a profile as text."""
    fit = found.fit
    at_knots = ", ".join(
        f"{knot}: {1e3 * fit.coefficients[number]:.1f}" for number, knot in enumerate(fit.knots)
    )
    per_decode_s, per_context_s, per_attended_s = fit.coefficients[len(fit.knots) :]
    is_busy = found.drift > MAX_DRIFT or found.steal > MAX_STEAL
    advice = ["the machine had other work: ranges will be wide; profile again when it is quiet"]
    return "\n".join(
        [
            f"{found.model} on {found.machine}: {found.num_steps} steps",
            f"a step by rows, ms: {at_knots}",
            f"and {1e6 * per_decode_s:.0f} us a decode, {1e6 * per_context_s:.2f} us a context "
            f"token, {1e9 * per_attended_s:.0f} ns an attended token",
            f"overhead {1e3 * found.overhead_s:.2f} ms a step and "
            f"{1e6 * found.overhead_per_row_s:.0f} us a request in it, "
            f"{1e3 * found.per_request_s:.1f} ms for each request that ends",
            f"speed differs by {100 * found.drift:.1f} % between passes; "
            f"steal {100 * found.steal:.1f} %; ready after {found.start_s:.1f} s",
            *(advice if is_busy else []),
        ]
    )
