"""What hosts and frontends exchange with the manager of their fleet.

Each message is one frame of msgpack, never pickle, over ZeroMQ with the cluster key. A host or a
frontend sends a report every second, and gets an answer. Every report is complete in itself, so
that it does not matter which of them, or which manager, is lost.
"""

from __future__ import annotations

from enum import StrEnum
from math import isfinite
from typing import Annotated, TypeVar

import msgspec

from headway.errors import WireError

MANAGER_VERSION = 1
MAX_FRAME_BYTES = 1024**2
REPORT_S = 1.0
MAX_SILENCE_S = 5.0
"""Time without a report after which a host or a frontend counts as gone."""
MAX_LISTED = 1024
MAX_FACTS_BYTES = 64 * 1024
_MAX_ERROR_CHARS = 200

Name = Annotated[str, msgspec.Meta(max_length=128)]
Line = Annotated[str, msgspec.Meta(max_length=1024)]
Facts = Annotated[bytes, msgspec.Meta(max_length=MAX_FACTS_BYTES)]
T = TypeVar("T")


class Role(StrEnum):
    """What a member does."""

    ENGINE = "engine"
    FRONTEND = "frontend"


class ProcessState(StrEnum):
    """How far the process of a host's member is."""

    NONE = "none"
    STARTING = "starting"
    READY = "ready"
    STOPPED = "stopped"


class RunningProcess(msgspec.Struct, frozen=True):
    """A process of a member, as its pid file says."""

    member: Name
    pid: int
    address: Line = ""
    """Where frontends or clients reach it."""
    admin: Line = ""
    """Where its metrics are; empty for an engine."""


class HostReport(msgspec.Struct, tag="host", frozen=True):
    """What a host runs, and what else of the fleet runs on its machine."""

    version: int
    host: Name
    instance: Name
    """Random id of the host process: another one may know another machine."""
    machine: Name
    node: Name
    """Address of its machine, for people."""
    running: Annotated[list[RunningProcess], msgspec.Meta(max_length=MAX_LISTED)] = []
    """All members with a live process on this machine."""
    member: Name = ""
    state: ProcessState = ProcessState.NONE
    problem: Line = ""
    facts: Facts = b""
    """What its engine says of itself: an EngineUp, encoded."""


class MemberOrder(msgspec.Struct, frozen=True):
    """The member that a host is to run, or to stop."""

    name: Name
    role: Role
    model: Line
    flags: Annotated[list[Line], msgspec.Meta(max_length=256)]
    """Settings as flags, without those that the host decides."""
    stop_s: float | None = None
    """Seconds that a member may take to end; None: it is to run."""
    renew_s: float = 60.0
    """Seconds between two renewals of an engine's lease."""


class Orders(msgspec.Struct, tag="orders", frozen=True):
    """The answer to a HostReport."""

    member: MemberOrder | None = None
    end: Annotated[list[RunningProcess], msgspec.Meta(max_length=MAX_LISTED)] = []
    """Processes on the host's machine that the fleet does not have any more."""


class FleetNeed(msgspec.Struct, frozen=True):
    """The work of one frontend, as measured by its router."""

    work_rate: float = 0.0
    """Seconds of work that arrive per second."""
    backlog_s: float = 0.0
    """Seconds of work that wait."""
    ttft_s: float = 5.0
    """Tightest TTFT target among the requests that wait."""
    speed: float = 1.0
    """Seconds of work that one engine does per second."""


class FrontendReport(msgspec.Struct, tag="frontend", frozen=True):
    """What a frontend needs and uses."""

    version: int
    pool: Name
    member: Name
    """Name of the member; empty if the frontend was not started by a host."""
    instance: Name
    seen: int
    """Version of the last list that it has taken over."""
    is_ready: bool
    in_use: Annotated[list[Line], msgspec.Meta(max_length=MAX_LISTED)] = []
    """Addresses of engines that have its requests."""
    need: FleetNeed = FleetNeed()


class EngineList(msgspec.Struct, tag="engines", frozen=True):
    """The engines of a pool; the answer to a FrontendReport."""

    version: int
    addresses: Annotated[list[Line], msgspec.Meta(max_length=MAX_LISTED)]
    problem: Line = ""
    """Why there is no list."""
    facts: Facts = b""
    """What an engine of the pool has said of itself, for a frontend that has seen none yet."""


Report = HostReport | FrontendReport
Answer = Orders | EngineList
encode = msgspec.msgpack.Encoder().encode
_report = msgspec.msgpack.Decoder(Report)
_answer = msgspec.msgpack.Decoder(Answer)


def decode_manager_report(frame: bytes) -> Report:
    """Return a report; raise WireError if it is not one."""
    report = _decode(_report, frame)
    if report.version != MANAGER_VERSION:
        raise WireError(f"version {report.version}; this manager speaks {MANAGER_VERSION}")
    if isinstance(report, FrontendReport):
        need = report.need
        numbers = (need.work_rate, need.backlog_s, need.ttft_s, need.speed)
        if not all(isfinite(one) and one >= 0.0 for one in numbers):
            raise WireError("a need that is no number")
    return report


def decode_answer(frame: bytes) -> Answer:
    """Return the answer of a manager; raise WireError if it is not one."""
    return _decode(_answer, frame)


def _decode(decoder: msgspec.msgpack.Decoder[T], frame: bytes) -> T:
    if len(frame) > MAX_FRAME_BYTES:
        raise WireError(f"a message of {len(frame)} bytes")
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise WireError(ascii(str(error))[:_MAX_ERROR_CHARS]) from error
