"""Options of a load measurement, and the plan they describe.

The command line makes its flags from the fields.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from headway.bench.load.http import parse_url
from headway.bench.load.measure import Plan, Sweep
from headway.bench.load.openai import Target
from headway.bench.load.runner import RunLimits
from headway.bench.load.stats import parse_targets
from headway.bench.load.workload import DEFAULT_NUM_REQUESTS, WorkloadOptions, workload_of
from headway.bench.options import SamplingOptions, flag_of, option_about
from headway.errors import ConfigError
from headway.workload import Workload, parse_rates

ASK, RUN, RESULTS = "Requests", "Run", "Results"


@dataclass(frozen=True)
class LoadOptions(SamplingOptions, WorkloadOptions):
    """Options of `bench serve`; `about` in the metadata of a field is its help."""

    model: str | None = field(
        default=None, metadata=option_about(ASK, "Model name; default: the first in /v1/models.")
    )
    api_key: list[str] | None = field(
        default=None,
        metadata=option_about(ASK, "API key; repeatable: tenants use the keys in turn."),
    )
    chat: bool = field(
        default=False,
        metadata=option_about(
            ASK, "Use /v1/chat/completions, with texts of roughly the right length.", "--chat"
        ),
    )
    ignore_eos: bool = field(
        default=True,
        metadata=option_about(
            ASK,
            "Send `ignore_eos` for outputs of full length; some servers refuse the field.",
            "--ignore-eos/--no-ignore-eos",
        ),
    )
    extra_body: str = field(
        default="{}", metadata=option_about(ASK, "JSON object of fields to add to every request.")
    )
    timeout: float = field(
        default=600.0, metadata=option_about(ASK, "Seconds after which a request counts as failed.")
    )
    num_requests: int | None = field(
        default=None,
        metadata=option_about(
            RUN, f"Number of requests; {DEFAULT_NUM_REQUESTS} without a duration."
        ),
    )
    duration: float | None = field(
        default=None, metadata=option_about(RUN, "Seconds after which the run stops sending.")
    )
    max_concurrency: int = field(
        default=1024, metadata=option_about(RUN, "Most requests in flight.")
    )
    warmup: int = field(
        default=0, metadata=option_about(RUN, "Number of uncounted requests before the run.")
    )
    sweep: str | None = field(
        default=None,
        metadata=option_about(
            RUN,
            "Rates such as 0.5,1,2,4, one run each; or auto: double the rate until the server is "
            "saturated.",
        ),
    )
    goodput: str | None = field(
        default=None,
        metadata=option_about(RESULTS, "Targets in seconds, such as ttft=2.0,tpot=0.2,e2e=30."),
    )
    json: Path | None = field(
        default=None, metadata=option_about(RESULTS, "Write all figures to this file.")
    )
    csv: Path | None = field(
        default=None, metadata=option_about(RESULTS, "Write one row per request to this file.")
    )
    plot: Path | None = field(
        default=None, metadata=option_about(RESULTS, "Draw a picture into this PNG file.")
    )


def plan_of(options: LoadOptions) -> Plan:
    """Return the plan of the options; ConfigError if an option is wrong."""
    _check_least(0, warmup=options.warmup)
    _check_least(1, num_requests=options.num_requests, max_concurrency=options.max_concurrency)
    if options.duration is not None and not options.duration > 0:
        raise ConfigError(f"--duration must be above 0, not {options.duration:g}")
    num_requests = options.num_requests
    if num_requests is None and options.duration is None:
        num_requests = DEFAULT_NUM_REQUESTS
    return Plan(
        workload=workload_of(options),
        limits=RunLimits(num_requests, options.duration, options.max_concurrency),
        targets=None if options.goodput is None else parse_targets(options.goodput),
        seed=options.seed,
        num_warmup=options.warmup,
    )


def sweep_of(options: LoadOptions, workload: Workload) -> Sweep | None:
    """Return the sweep of the options; None without one."""
    if options.sweep is None:
        return None
    if workload.mean_rate is None:
        raise ConfigError("a sweep needs arrivals with a rate: poisson, gamma, onoff or a trace")
    return Sweep(None if options.sweep == "auto" else parse_rates(options.sweep))


def target_of(url: str, options: LoadOptions) -> Target:
    """Return the endpoint; its model is empty until the server is asked."""
    if not options.timeout > 0:
        raise ConfigError(f"--timeout must be above 0, not {options.timeout:g}")
    try:
        extra_body = msgspec.json.decode(options.extra_body, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError(f"--extra-body takes a JSON object: {error}") from error
    return Target(
        origin=parse_url(url),
        model=options.model or "",
        is_chat=options.chat,
        ignores_eos=options.ignore_eos,
        api_keys=tuple(options.api_key or ()),
        timeout_s=options.timeout,
        extra_body=extra_body,
        sampling=options,
    )


def as_plain(options: LoadOptions) -> dict[str, object]:
    """Return the options for a report, without keys."""
    plain = {name: value for name, value in asdict(options).items() if name != "api_key"}
    return {name: str(v) if isinstance(v, Path) else v for name, v in plain.items()}


def _check_least(least: int, **values: int | None) -> None:
    for name, value in values.items():
        if value is not None and value < least:
            raise ConfigError(f"{flag_of(name)} must be at least {least}, not {value}")
