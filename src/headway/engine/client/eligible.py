"""Which engines may have a request, now or later."""

from __future__ import annotations

from collections.abc import Sequence

from headway.engine.client.replica import EngineReplica
from headway.engine.client.streams import RequestStream
from headway.engine.process.messages import AddRequest
from headway.errors import DeadlineError


class EligibleEngines:
    """Judges the engines of a client by link, size, numerics class, trials and forecast."""

    def __init__(self, replicas: Sequence[EngineReplica], may_change_numerics: bool) -> None:
        """`replicas` is the list of the caller, which changes with time."""
        self._replicas = replicas
        self._may_change_numerics = may_change_numerics

    @property
    def is_any_up(self) -> bool:
        return any(one.link.is_up for one in self._replicas)

    def keeps_numerics(self, stream: RequestStream, replica: EngineReplica) -> bool:
        """Return whether a request may continue in an engine, by the numerics of its tokens."""
        if not stream.num_output_tokens or self._may_change_numerics:
            return True
        return replica.info is not None and replica.info.numerics == stream.numerics

    def may_wait_for(self, stream: RequestStream, replica: EngineReplica) -> bool:
        """Return whether a request may wait for an engine to have room."""
        if not replica.link.is_up or replica.is_retired or not replica.fits(stream.command):
            return False
        if replica.suspects.is_under_way and any(
            one.link.is_up and not one.suspects.is_under_way for one in self._replicas
        ):
            return False  # an engine on which suspects are tried may fail again
        return self.keeps_numerics(stream, replica)

    def may_send(self, stream: RequestStream, replica: EngineReplica) -> bool:
        """Return whether a request may be sent to an engine now."""
        return replica.may_take(stream) and self.keeps_numerics(stream, replica)

    def find(self, stream: RequestStream) -> list[EngineReplica]:
        """Return the engines that a request may be sent to now."""
        engines = [one for one in self._replicas if self.may_send(stream, one)]
        # An engine on which suspects are tried may fail again.
        engines = [one for one in engines if not one.suspects.is_under_way] or engines
        if len(engines) > 1 and not stream.is_awaiting_engine:
            engines = self._feasible(stream.command, engines) or engines
        return engines

    def find_feasible(self, command: AddRequest) -> list[EngineReplica]:
        """Return the engines whose forecast does not rule out the targets of a request.

        Raise DeadlineError if every forecast does.
        """
        engines = [
            one
            for one in self._replicas
            if one.link.is_up and not one.is_retired and one.fits(command)
        ]
        feasible = self._feasible(command, engines)
        if engines and not feasible:
            _check_forecast(engines[0], command)
        return feasible

    def _feasible(
        self, command: AddRequest, engines: Sequence[EngineReplica]
    ) -> list[EngineReplica]:
        return [one for one in engines if _may_meet_targets(one, command)]


def _may_meet_targets(replica: EngineReplica, command: AddRequest) -> bool:
    try:
        _check_forecast(replica, command)
    except DeadlineError:
        return False
    return True


def _check_forecast(replica: EngineReplica, command: AddRequest) -> None:
    """Raise DeadlineError if the engine's forecast rules out the targets of a request."""
    if replica.info is not None:
        replica.forecast_reader.check(command, replica.info, command.arrived_at)
