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
from headway.bench.options import SamplingOptions, flag_of, option_about
from headway.errors import ConfigError
from headway.workload import (
    Bounds,
    Content,
    Replay,
    Scale,
    Synthetic,
    Workload,
    parse_arrivals,
    parse_lengths,
    parse_prefixes,
    parse_rates,
    parse_tenants,
    parse_vocabulary,
    read_trace,
)

DEFAULT_NUM_REQUESTS = 100
WORK, REPLAY, ASK, RUN, RESULTS = ("Workload", "Replay", "Requests", "Run", "Results")


@dataclass(frozen=True, slots=True)
class LoadOptions(SamplingOptions):
    """Options of `bench serve`; `about` in the metadata of a field is its help."""

    arrivals: str = field(
        default="poisson:1",
        metadata=option_about(
            WORK,
            "Arrivals, in requests per second: closed:N, poisson:RATE, gamma:RATE,cv=CV or "
            "onoff:RATE_WHILE_ON,on=S,off=S.",
        ),
    )
    prompt_tokens: str = field(
        default="uniform:32,256",
        metadata=option_about(
            WORK,
            "Prompt lengths in tokens: fixed:N, uniform:LOW,HIGH, lognormal:MU,SIGMA,min=N,max=N, "
            "list:N,N,... or empirical:FILE,scale=F,min=N,max=N.",
        ),
    )
    output_tokens: str = field(
        default="lognormal:4.0,0.9,min=8,max=256",
        metadata=option_about(WORK, "Output lengths in tokens, in the same forms."),
    )
    tenants: str = field(
        default="1",
        metadata=option_about(
            WORK, "NUMBER,zipf=EXPONENT: number of tenants, with Zipf weights; sent as `user`."
        ),
    )
    prefixes: str = field(
        default="0",
        metadata=option_about(
            WORK,
            "SHARE,count=N,tokens=L: this share of prompts starts with one of N prefixes of L "
            "tokens of its tenant.",
        ),
    )
    vocab: str = field(
        default="100,20000",
        metadata=option_about(WORK, "LOW,HIGH: range of the token ids of prompts."),
    )
    seed: int = field(
        default=0,
        metadata=option_about(
            WORK, "Random seed; a new seed gives new prompts, which no prefix cache has."
        ),
    )
    rate: float | None = field(
        default=None,
        metadata=option_about(
            WORK, "Mean requests per second; replaces the rate of the arrivals or the trace."
        ),
    )
    trace: Path | None = field(
        default=None,
        metadata=option_about(
            REPLAY, "Azure (CSV) or Mooncake (JSON lines) trace: its arrivals and lengths."
        ),
    )
    time_scale: float = field(
        default=1.0, metadata=option_about(REPLAY, "Factor for the times of the trace.")
    )
    length_scale: float = field(
        default=1.0, metadata=option_about(REPLAY, "Factor for the lengths of the trace.")
    )
    max_prompt_tokens: int | None = field(
        default=None,
        metadata=option_about(
            REPLAY, "Most prompt tokens of a trace request; longer prompts are cut."
        ),
    )
    max_output_tokens: int | None = field(
        default=None,
        metadata=option_about(
            REPLAY, "Most output tokens of a trace request; longer outputs are cut."
        ),
    )
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


def workload_of(options: LoadOptions) -> Workload:
    """Return the workload of the options."""
    _check_sources(options)
    content = Content(
        parse_vocabulary(options.vocab),
        parse_tenants(options.tenants),
        parse_prefixes(options.prefixes),
    )
    workload: Workload
    if options.trace is None:
        workload = Synthetic(
            parse_arrivals(options.arrivals),
            parse_lengths(options.prompt_tokens, "prompt"),
            parse_lengths(options.output_tokens, "output"),
            content,
        )
    else:
        scale = Scale(
            options.time_scale,
            options.length_scale,
            Bounds(1, options.max_prompt_tokens),
            Bounds(1, options.max_output_tokens),
        )
        workload = Replay(read_trace(options.trace), scale, content)
    return workload if options.rate is None else workload.with_rate(options.rate)


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


_OF_A_TRACE = ("time_scale", "length_scale", "max_prompt_tokens", "max_output_tokens")
_INSTEAD_OF_A_TRACE = ("arrivals", "prompt_tokens", "output_tokens")


def _check_sources(options: LoadOptions) -> None:
    """Refuse options that would have no effect."""
    has_trace = options.trace is not None
    idle = _INSTEAD_OF_A_TRACE if has_trace else _OF_A_TRACE
    defaults = LoadOptions()
    given = [flag_of(name) for name in idle if getattr(options, name) != getattr(defaults, name)]
    if given:
        raise ConfigError(f"{', '.join(given)} {'excludes' if has_trace else 'needs'} --trace")
    if options.rate is not None and options.time_scale != defaults.time_scale:
        raise ConfigError("--rate and --time-scale exclude each other")


def _check_least(least: int, **values: int | None) -> None:
    for name, value in values.items():
        if value is not None and value < least:
            raise ConfigError(f"{flag_of(name)} must be at least {least}, not {value}")
