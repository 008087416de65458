"""`headway bench`: measure."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from rich.console import Console

from headway._version import __version__
from headway.bench.load_report import Report
from headway.bench.measure import Measured, Plan, Sweep, measure, measure_sweep, name_model, warm_up
from headway.bench.modes import MODES, Bench, run_rounds, same_tokens, summarize
from headway.bench.openai import Target
from headway.bench.options import LoadOptions, plan_of, sweep_of, target_of
from headway.bench.report import as_json, as_table, compare, draw
from headway.build import load_model
from headway.cli.options import with_settings
from headway.cli.progress import progress_bar
from headway.clock import SystemClock
from headway.config import Config
from headway.errors import ConfigError
from headway.workload import WORKLOADS, parse_workload

app = typer.Typer(no_args_is_help=True, help="Measure throughput and latency.")


@app.callback()
def _root() -> None:
    pass


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
def offline(
    config: Config,
    workload: Annotated[
        str,
        typer.Option(
            "--workload",
            help=f"One of: {', '.join(WORKLOADS)}. All requests come at once; with @R behind "
            "the name (mixed-64@2) they come as a Poisson process of R per second.",
        ),
    ] = "mixed-64",
    batching: Annotated[
        str, typer.Option("--batching", help=f"Modes, comma separated: {', '.join(MODES)}.")
    ] = "continuous",
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Measured rounds.")] = 3,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all figures to this file.")
    ] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="Draw a picture into this PNG file.")
    ] = None,
) -> None:
    """Run a fixed workload in this process, in one or several batching modes.

    A warm-up round is run first and not counted. Rounds of several modes are interleaved.
    """
    modes = _parse_modes(batching)
    work = parse_workload(workload)
    console = Console()
    with progress_bar("loading weights") as progress:
        model = load_model(config, progress)
    for reason in model.resolved.reasons:
        console.print(f"[dim]{reason}[/dim]", soft_wrap=True)
    bench = Bench(
        model.executor, config.scheduler, SystemClock(), config.cache.enable_prefix_caching
    )
    with progress_bar("measuring") as progress:
        runs = run_rounds(bench, work, modes, rounds, progress)
    results = [summarize(mode, runs[mode]) for mode in modes]
    console.print(as_table(work, results))
    for line in compare(results):
        console.print(line)
    all_runs = [run for mode in modes for run in runs[mode]]
    console.print(f"identical tokens in all {len(all_runs)} runs: {same_tokens(all_runs):.1%}")
    if json_file is not None:
        context: dict[str, object] = {
            "headway": __version__,
            "rounds": rounds,
            "resolved": asdict(model.resolved),
            "scheduler": asdict(bench.config),
        }
        json_file.write_bytes(as_json(work, results, context))
    if plot_file is not None:
        draw(plot_file, work, results)
        console.print(f"picture: {plot_file}")
    model.executor.close()


def _parse_modes(batching: str) -> list[str]:
    modes = [mode.strip() for mode in batching.split(",") if mode.strip()]
    unknown = [mode for mode in modes if mode not in MODES]
    if unknown or not modes:
        raise ConfigError(f"--batching takes {', '.join(MODES)}; got {batching!r}")
    return list(dict.fromkeys(modes))


def _with_load_options(command: Callable[[str, LoadOptions], None]) -> Callable[..., None]:
    """Give a command a URL and one flag per option; it takes the options as one value."""

    def run(url: str, **given: Any) -> None:
        command(url, LoadOptions(**given))

    kind = inspect.Parameter.KEYWORD_ONLY
    hints = get_type_hints(LoadOptions)
    parameters = [inspect.Parameter("url", kind, annotation=_URL)]
    for spec in fields(LoadOptions):
        flag = spec.metadata["flag"] or "--" + spec.name.replace("_", "-")
        option = typer.Option(
            flag, help=spec.metadata["about"], rich_help_panel=spec.metadata["panel"]
        )
        annotation = Annotated[hints[spec.name], option]
        parameters.append(
            inspect.Parameter(spec.name, kind, default=spec.default, annotation=annotation)
        )
    run.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    run.__annotations__ = {item.name: item.annotation for item in parameters}
    run.__doc__ = command.__doc__
    return run


_URL = Annotated[str, typer.Argument(help="Where the server is, such as http://127.0.0.1:8000.")]


@app.command("serve")
@_with_load_options
def serve(url: str, options: LoadOptions) -> None:
    """Send requests to any server with the OpenAI API, and measure what comes back.

    Requests come at times of their own, whatever the server does, unless --arrivals is closed:N.
    Latencies count from those times. Ctrl-C ends the run and shows what there is.
    """
    plan, target = plan_of(options), target_of(url, options)
    sweep = sweep_of(options, plan.workload)
    measured = Measured()
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


async def _measure(target: Target, plan: Plan, sweep: Sweep | None, measured: Measured) -> None:
    with progress_bar("warming up") as progress:
        await warm_up(target, plan, progress)
    with progress_bar("measuring") as progress:
        if sweep is None:
            await measure(target, plan, measured, progress)
        else:
            await measure_sweep(target, plan, sweep, measured, progress)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop halves the cost of the client; it does not exist everywhere."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
