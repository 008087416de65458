"""One engine as the API process sees it: its link, its requests, its forecast."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from headway.core.events import Finished, Stepped
from headway.core.owners import BlockOwners
from headway.core.running.admission import PeakDemand, refuse_if_never_fits
from headway.core.slo.forecast_reader import ForecastReader
from headway.engine.client.link import EngineLink
from headway.engine.client.streams import RequestStream
from headway.engine.client.suspects import Suspects
from headway.engine.process.messages import AddRequest, EngineInfo, EventBatch
from headway.engine.supervise.loss import EngineLoss
from headway.errors import EngineError


class ReplicaOwner(Protocol):
    """Owner of the requests, which hears what happens to each of its engines."""

    async def on_engine_up(self, replica: EngineReplica) -> None: ...

    async def on_report(self, replica: EngineReplica, report: EventBatch) -> None: ...

    async def on_engine_down(self, replica: EngineReplica, loss: EngineLoss) -> int: ...

    def on_give_up(self, replica: EngineReplica, error: EngineError) -> None: ...


class EngineReplica:
    """The requests that one engine has, and what is known about the engine.

    Passes the calls of its link to the owner of all requests.
    """

    def __init__(self, link: EngineLink, owner: ReplicaOwner, max_forecast_age_s: float) -> None:
        self.link = link
        self.forecast_reader = ForecastReader(max_forecast_age_s)
        self.suspects = Suspects()
        """Requests to try here, or on trial here."""
        self.aborting: dict[str, Finished] = {}
        """Finish events of samples whose abort the engine has not confirmed, by sample id."""
        self.last_step: Stepped | None = None
        self.owners: BlockOwners | None = None
        """The last count of KV blocks by owner."""
        self.is_retired = False
        """Whether the engine gets no further requests."""
        self.has_given_up = False
        self.num_seqs = 0
        self.num_tokens = 0
        """Prompt and output tokens of its requests when they were sent."""
        self._owner = owner
        self._streams: dict[str, tuple[RequestStream, int]] = {}
        """Requests of the engine, and the tokens counted for each."""

    def __contains__(self, stream: RequestStream) -> bool:
        return stream.request_id in self._streams

    @property
    def streams(self) -> list[RequestStream]:
        """Requests that the engine has, in the order in which they were sent."""
        return [stream for stream, _ in self._streams.values()]

    @property
    def info(self) -> EngineInfo | None:
        return self.link.info

    @property
    def is_ready(self) -> bool:
        return self.link.is_up and not self.link.is_hung

    @property
    def state(self) -> tuple[str, int, int, float]:
        """Name, running and waiting requests, and share of the KV blocks in use."""
        step = self.last_step
        if step is None:
            return self.link.name, 0, 0, 0.0
        usage = step.num_blocks_used / max(1, step.num_blocks)
        return self.link.name, step.num_running, step.num_waiting, usage

    def may_take(self, stream: RequestStream) -> bool:
        """Return whether this request may be sent to the engine now."""
        is_open = self.link.is_up and not self.is_retired
        is_open = is_open and self.link.has_room(stream.num_tokens_to_send)
        return is_open and self.suspects.may_send(stream) and self.fits(stream.command)

    def fits(self, command: AddRequest) -> bool:
        """Return whether the engine can ever hold this request."""
        if self.info is None:
            return False
        params = command.params
        demand = PeakDemand(
            len(command.token_ids), params.max_tokens or 1, params.n, command.terms.max_kv_share
        )
        return refuse_if_never_fits(demand, self.info.capacity, self.info.max_num_seqs) is None

    def read_forecast(self, report: EventBatch, now: float) -> None:
        """Take over the forecast of a report, and what it says of requests that were sent."""
        changed = (*report.arrived, *report.refused, *report.finished)
        # A step follows the commands of its batch.
        self.forecast_reader.observe((*changed, *report.idled, *report.stepped), now)

    def add(self, stream: RequestStream) -> None:
        """Record that the engine has this request."""
        num_tokens = stream.num_tokens_to_send
        self._streams[stream.request_id] = stream, num_tokens
        self.num_seqs += stream.params.n
        self.num_tokens += num_tokens

    def remove(self, stream: RequestStream) -> None:
        """Record that the request has ended or left the engine."""
        self.suspects.remove(stream)
        _, num_tokens = self._streams.pop(stream.request_id, (None, None))
        if num_tokens is not None:
            self.num_seqs -= stream.params.n
            self.num_tokens -= num_tokens

    def lose_engine(self) -> list[RequestStream]:
        """Forget everything about the engine's state; return the requests that it had."""
        lost = self.streams
        self._streams, self.num_seqs, self.num_tokens = {}, 0, 0
        self.forecast_reader.reset()
        self.last_step = self.owners = None
        return lost

    # ------------------------------------------------------ calls from the link

    def has_work_in_engine(self) -> bool:
        return any(stream.unfinished_ids for stream in self.streams)

    async def on_engine_up(self) -> None:
        await self._owner.on_engine_up(self)

    async def on_report(self, report: EventBatch) -> None:
        if report.stepped:
            self.last_step = report.stepped[-1]
            self.owners = self.last_step.owners or self.owners
        elif report.idled and self.last_step is not None:
            num_used = report.idled[-1].num_blocks_used
            self.last_step = replace(
                self.last_step, num_running=0, num_waiting=0, num_blocks_used=num_used
            )
        await self._owner.on_report(self, report)

    async def on_engine_down(self, loss: EngineLoss) -> int:
        return await self._owner.on_engine_down(self, loss)

    def on_give_up(self, error: EngineError) -> None:
        self._owner.on_give_up(self, error)
