"""Options of a workload: what a load client sends, and what a simulation serves."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from headway.bench.options import flag_of, option_about
from headway.errors import ConfigError
from headway.workload import (
    Bounds,
    Content,
    Replay,
    Scale,
    Synthetic,
    parse_arrivals,
    parse_lengths,
    parse_prefixes,
    parse_tenants,
    parse_vocabulary,
    read_trace,
)

WORK, REPLAY = "Workload", "Replay"
DEFAULT_NUM_REQUESTS = 100


@dataclass(frozen=True)
class WorkloadOptions:
    """Arrivals, lengths and contents of requests, drawn or from a trace."""

    arrivals: str = field(
        default="poisson:1",
        metadata=option_about(
            WORK,
            "Arrivals, in requests per second: closed:N, poisson:RATE, gamma:RATE,cv=CV, "
            "onoff:RATE_WHILE_ON,on=S,off=S or diurnal:PEAK,low=RATE,day=S.",
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


def workload_of(options: WorkloadOptions) -> Synthetic | Replay:
    """Return the workload of the options."""
    _check_sources(options)
    content = Content(
        parse_vocabulary(options.vocab),
        parse_tenants(options.tenants),
        parse_prefixes(options.prefixes),
    )
    workload: Synthetic | Replay
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


_OF_A_TRACE = ("time_scale", "length_scale", "max_prompt_tokens", "max_output_tokens")
_INSTEAD_OF_A_TRACE = ("arrivals", "prompt_tokens", "output_tokens")


def _check_sources(options: WorkloadOptions) -> None:
    """Refuse options that would have no effect."""
    has_trace = options.trace is not None
    idle = _INSTEAD_OF_A_TRACE if has_trace else _OF_A_TRACE
    defaults = WorkloadOptions()
    given = [flag_of(name) for name in idle if getattr(options, name) != getattr(defaults, name)]
    if given:
        raise ConfigError(f"{', '.join(given)} {'excludes' if has_trace else 'needs'} --trace")
    if options.rate is not None and options.time_scale != defaults.time_scale:
        raise ConfigError("--rate and --time-scale exclude each other")
