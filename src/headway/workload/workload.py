"""Workloads: a stream of requests with arrival times, synthetic or from a trace.

The same seed gives the same requests in the same order; the rate changes only their times. A load
client and a simulator read the same items.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count

from headway.errors import ConfigError
from headway.workload.arrivals import Arrivals, ClosedLoop, Diurnal, OnOff, Poisson
from headway.workload.content import Content, ContentMaker, stream
from headway.workload.lengths import Bounds, Lengths
from headway.workload.mixed import WorkItem
from headway.workload.spec import check_positive
from headway.workload.trace import MOONCAKE_BLOCK_TOKENS, Trace, TraceRow


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Arrivals, lengths and contents drawn independently; never ends."""

    arrivals: Arrivals
    prompt_tokens: Lengths
    output_tokens: Lengths
    content: Content = field(default_factory=Content)

    @property
    def concurrency(self) -> int | None:
        """Number of clients of a closed loop; None for an open loop."""
        return self.arrivals.concurrency if isinstance(self.arrivals, ClosedLoop) else None

    @property
    def tenant_names(self) -> frozenset[str]:
        """Tenants that requests may name."""
        return self.content.tenant_names

    @property
    def mean_rate(self) -> float | None:
        return None if isinstance(self.arrivals, ClosedLoop) else self.arrivals.mean_rate

    def with_rate(self, rate: float) -> Synthetic:
        """Return the same requests at another mean rate."""
        if isinstance(self.arrivals, ClosedLoop):
            raise ConfigError("a closed loop has no rate; use poisson, gamma or onoff arrivals")
        return replace(self, arrivals=self.arrivals.with_rate(rate))

    def busiest(self, stretch_s: float) -> Synthetic:
        """Return the load as it is in the busiest stretch of so many seconds."""
        arrivals = self.arrivals
        if isinstance(arrivals, Diurnal) and arrivals.day > stretch_s:
            return replace(self, arrivals=Poisson(arrivals.peak))
        if isinstance(arrivals, OnOff) and arrivals.on > stretch_s:
            return replace(self, arrivals=Poisson(arrivals.rate))
        return self

    def begun_at(self, share: float) -> Synthetic:
        """Return the load itself: each seed draws other requests."""
        return self

    def part(self, share: float) -> Synthetic:
        """Return what one of several engines gets of the load, with its bursts."""
        if isinstance(self.arrivals, ClosedLoop):
            raise ConfigError("a closed loop has no rate; use poisson, gamma or onoff arrivals")
        return replace(self, arrivals=self.arrivals.part(share))

    def items(self, seed: int) -> Iterator[WorkItem]:
        maker = ContentMaker(self.content, seed)
        prompts, outputs = stream(seed, "prompt lengths"), stream(seed, "output lengths")
        for at in self.arrivals.times(stream(seed, "arrivals")):
            tenant = maker.tenant()
            prompt = maker.prompt(self.prompt_tokens.draw(prompts), tenant)
            yield WorkItem(prompt, self.output_tokens.draw(outputs), at, tenant)


@dataclass(frozen=True, slots=True)
class Scale:
    """Factors and limits for the times and lengths of a trace."""

    time: float = 1.0
    length: float = 1.0
    prompt: Bounds = field(default_factory=Bounds)
    output: Bounds = field(default_factory=Bounds)

    def __post_init__(self) -> None:
        check_positive(time_scale=self.time, length_scale=self.length)


@dataclass(frozen=True, slots=True)
class Replay:
    """A scaled trace.

    Prompts that share hash ids share tokens, block for block; other contents are drawn.
    """

    trace: Trace
    scale: Scale = Scale()
    content: Content = field(default_factory=Content)
    share: float = 1.0
    """Share of the requests that are sent, drawn by the seed."""
    is_endless: bool = False
    """Whether it begins again at its end, with other contents."""

    @property
    def concurrency(self) -> None:
        return None

    @property
    def tenant_names(self) -> frozenset[str]:
        return self.content.tenant_names

    @property
    def mean_rate(self) -> float:
        """Requests per second over the whole trace."""
        return self.share * self.trace.mean_rate / self.scale.time

    def with_rate(self, rate: float) -> Replay:
        check_positive(rate=rate)
        time = self.share * self.trace.mean_rate / rate
        return replace(self, scale=replace(self.scale, time=time))

    def busiest(self, stretch_s: float) -> Replay:
        """Return the stretch of so many seconds that has the most tokens, again and again."""
        trace = self.trace.busiest(stretch_s / self.scale.time, lambda row: sum(self._lengths(row)))
        return replace(self, trace=trace, is_endless=True)

    def begun_at(self, share: float) -> Replay:
        """Return the same requests, begun after this share of them and then from the first."""
        return replace(self, trace=self.trace.begun_at(share))

    def part(self, share: float) -> Replay:
        """Return what one of several engines gets of the load.

        That is a share of the requests at their times. If prompts share blocks it is all of them,
        more slowly, because a router keeps those together that share.
        """
        if any(row.hash_ids for row in self.trace.rows):
            return self.with_rate(share * self.mean_rate)
        return replace(self, share=share * self.share)

    def items(self, seed: int) -> Iterator[WorkItem]:
        for turn in count():
            yield from self._items(f"{seed}" if turn == 0 else f"{seed}/{turn}", turn)
            if not self.is_endless:
                return

    def _items(self, seed: str, turn: int) -> Iterator[WorkItem]:
        """Yield the requests of one time through the trace."""
        maker, picks = ContentMaker(self.content, seed), stream(seed, "part")
        block_tokens = max(1, round(MOONCAKE_BLOCK_TOKENS * self.scale.length))
        for row in self.trace.jittered(stream(seed, "jitter")).rows:
            if self.share < 1.0 and picks.random() >= self.share:
                continue
            tenant = maker.tenant()
            num_prompt, num_output = self._lengths(row)
            if row.hash_ids:
                prompt = maker.prompt_of_blocks(num_prompt, row.hash_ids, block_tokens)
            else:
                prompt = maker.prompt(num_prompt, tenant)
            at = (turn * self.trace.span_s + row.at) * self.scale.time
            yield WorkItem(prompt, num_output, at, tenant)

    def _lengths(self, row: TraceRow) -> tuple[int, int]:
        """Return the tokens of prompt and output."""
        scale = self.scale
        return (
            scale.prompt.clip(row.num_prompt_tokens * scale.length),
            scale.output.clip(row.num_output_tokens * scale.length),
        )


@dataclass(frozen=True, slots=True)
class Listed:
    """A list of requests in order of arrival, or, with a concurrency, a closed loop."""

    requests: tuple[WorkItem, ...]
    concurrency: int | None = None

    @property
    def tenant_names(self) -> frozenset[str]:
        return frozenset(one.tenant for one in self.requests if one.tenant is not None)

    @property
    def mean_rate(self) -> None:
        return None

    def with_rate(self, rate: float) -> Listed:
        raise ConfigError("a list of requests has no rate to change")

    def items(self, seed: int) -> Iterator[WorkItem]:
        return iter(self.requests)


Workload = Synthetic | Replay | Listed
