"""`headway bench`: measure throughput and latency."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from headway._version import __version__
from headway.bench.load.measure import (
    Measurement,
    Plan,
    Sweep,
    measure,
    measure_sweep,
    name_model,
    warm_up,
)
from headway.bench.load.openai import Target
from headway.bench.load.options import LoadOptions, plan_of, sweep_of, target_of
from headway.bench.load.report import Report
from headway.bench.offline.modes import MODES, Bench, run_rounds, same_tokens, summarize
from headway.bench.offline.profile import profile_table, run_profile
from headway.bench.offline.report import as_json, as_table, compare, draw, steal_line
from headway.bench.options import SamplingOptions, option_about
from headway.build import load_model
from headway.cli.options import with_options, with_settings
from headway.cli.progress import progress_bar
from headway.clock import SystemClock
from headway.config import Config
from headway.errors import ConfigError
from headway.workload import WORKLOADS, parse_workload

_MAX_SEED = 2**32

app = typer.Typer(no_args_is_help=True, help="Measure throughput and latency.")


@app.callback()
def _root() -> None:
    pass


@dataclass(frozen=True)
class OfflineOptions(SamplingOptions):
    """Options of `bench offline` that are not settings."""

    workload: str = field(
        default="mixed-64",
        metadata=option_about(
            "Workload",
            f"One of: {', '.join(WORKLOADS)}. All requests arrive at once; with @R after the "
            "name (mixed-64@2) they arrive as a Poisson process of R per second.",
        ),
    )
    seed: int = field(
        default=0,
        metadata=option_about(
            "Sampling", "Seed of the first request; the next one has the next seed."
        ),
    )
    batching: str = field(
        default="continuous",
        metadata=option_about("Run", f"Modes, comma separated: {', '.join(MODES)}."),
    )
    rounds: int = field(default=3, metadata=option_about("Run", "Number of measured rounds."))
    profile: bool = field(
        default=False, metadata=option_about("Run", "Also show the time by part.", "--profile")
    )
    json_file: Path | None = field(
        default=None, metadata=option_about("Results", "Write all figures to this file.", "--json")
    )
    plot_file: Path | None = field(
        default=None,
        metadata=option_about("Results", "Draw a plot into this PNG file.", "--plot"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rounds < 1:
            raise ConfigError(f"--rounds must be at least 1, got {self.rounds}")
        if not 0 <= self.seed < _MAX_SEED:
            raise ConfigError(f"--seed must be from 0 to {_MAX_SEED - 1}, got {self.seed}")
        if self.seed and self.sampling_params().is_greedy:
            raise ConfigError("--seed needs --temperature above 0")


@app.command("offline")
@with_settings(
    "model",
    "cache",
    "scheduler",
    # What the mixed workloads are defined with.
    max_num_seqs=32,
    max_num_batched_tokens=512,
    enable_prefix_caching=False,
)
@with_options(OfflineOptions, inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY))
def offline(config: Config, options: OfflineOptions) -> None:
    """Run a fixed workload in this process, in one or several batching modes.

    A warm-up round runs first and is not counted. Rounds of several modes are interleaved.
    """
    modes = _parse_modes(options.batching)
    work = parse_workload(options.workload)
    console = Console()
    with progress_bar("loading weights") as progress:
        model = load_model(config, progress)
    for reason in model.resolved.reasons:
        console.print(f"[dim]{reason}[/dim]", soft_wrap=True)
    prefix_caching = config.cache.enable_prefix_caching
    bench = Bench(
        model.executor, config.scheduler, SystemClock(), prefix_caching, options, options.seed
    )
    with progress_bar("measuring") as progress:
        runs = run_rounds(bench, work, modes, options.rounds, progress)
    results = [summarize(mode, runs[mode]) for mode in modes]
    console.print(as_table(work, options, results))
    for line in compare(results):
        console.print(line)
    console.print(steal_line(results))
    all_runs = [run for mode in modes for run in runs[mode]]
    console.print(f"identical tokens in all {len(all_runs)} runs: {same_tokens(all_runs):.1%}")
    context: dict[str, object] = {
        "headway": __version__,
        "rounds": options.rounds,
        "sampling": {**options.sampling_fields(), "seed": options.seed},
        "resolved": asdict(model.resolved),
        "scheduler": asdict(bench.config),
    }
    if options.profile:
        taken_apart = run_profile(bench, work)
        console.print(profile_table(taken_apart))
        context["profile"] = asdict(taken_apart)
    if options.json_file is not None:
        options.json_file.write_bytes(as_json(work, results, context))
    if options.plot_file is not None:
        draw(options.plot_file, work, results)
        console.print(f"picture: {options.plot_file}")
    model.executor.close()


def _parse_modes(batching: str) -> list[str]:
    modes = [mode.strip() for mode in batching.split(",") if mode.strip()]
    unknown = [mode for mode in modes if mode not in MODES]
    if unknown or not modes:
        raise ConfigError(f"--batching takes {', '.join(MODES)}; got {batching!r}")
    return list(dict.fromkeys(modes))


_URL = inspect.Parameter(
    "url",
    inspect.Parameter.KEYWORD_ONLY,
    annotation=Annotated[
        str, typer.Argument(help="URL of the server, such as http://127.0.0.1:8000.")
    ],
)


@app.command("serve")
@with_options(LoadOptions, _URL)
def serve(url: str, options: LoadOptions) -> None:
    """Send requests to any server with the OpenAI API, and measure the responses.

    Requests are sent at their own times, whatever the server does, unless --arrivals is closed:N.
    Latencies count from those times. Ctrl-C ends the run and shows the results so far.
    """
    plan, target = plan_of(options), target_of(url, options)
    sweep = sweep_of(options, plan.workload)
    measured = Measurement()
    is_interrupted = False
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        model = runner.run(name_model(target.origin, target.api_keys, options.model))
        target = replace(target, model=model)
        try:
            runner.run(_measure(target, plan, sweep, measured))
        except KeyboardInterrupt:
            is_interrupted = True
    Report(target, plan, options, measured).show(Console())
    if is_interrupted:
        typer.echo("interrupted: these are the figures of a part of the run", err=True)
        raise typer.Exit(130)
    if not measured.has_completed:
        typer.echo("headway: error: no request was completed", err=True)
        raise typer.Exit(1)


async def _measure(target: Target, plan: Plan, sweep: Sweep | None, measured: Measurement) -> None:
    with progress_bar("warming up") as progress:
        await warm_up(target, plan, progress)
    with progress_bar("measuring") as progress:
        if sweep is None:
            await measure(target, plan, measured, progress)
        else:
            await measure_sweep(target, plan, sweep, measured, progress)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop, which halves the CPU time of the client, if installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
