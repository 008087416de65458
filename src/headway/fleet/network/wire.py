"""The messages between a frontend and an engine on the network, and their bounds.

Each message is one frame of msgpack, never pickle. A frontend begins with Hello. From then on the
engine sends EngineUp whenever it is up, EngineDown when it is not, and the events of every step.
An event names a request by its wire id, which contains the attempt: `2:cmpl-1f#1` is the third
attempt of a sample. Times are by the clock of the sender, which each message carries, so that the
receiver can turn them into ages.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from headway.core.request import FinishReason
from headway.engine.process.messages import (
    AddRequest,
    EngineInfo,
    EventBatch,
    Handover,
    QuarantinedDigest,
)
from headway.engine.supervise.quarantine import MAX_QUARANTINED
from headway.errors import WireError

PROTOCOL_VERSION = 8
MAX_HELLO_BYTES = 4096
MAX_COMMAND_BYTES = 16 * 1024**2
MAX_ABORTED_IDS = 65_536
MAX_REPORT_BYTES = 64 * 1024**2
MAX_UNREAD_BYTES = 64 * 1024**2
"""Reports that an engine sends without hearing that the frontend has read them."""
HEARTBEAT_S = 0.5
"""How often both sides send a message, if there is nothing else to send."""
MAX_SILENCE_S = 5.0
"""Time without a message after which the other side counts as lost."""
SOCKET_SILENCE_MS = 2000
"""The same for the heartbeats of the sockets, which a busy process does not delay."""

_MAX_ERROR_CHARS = 200
T = TypeVar("T")


class Credit(msgspec.Struct, frozen=True):
    """What one frontend may have in an engine at a time."""

    num_requests: int = 1024
    num_tokens: int = 4 * 1024**2
    """Prompt and output tokens of these requests when they are sent."""


DEFAULT_CREDIT = Credit()


class Hello(msgspec.Struct, tag="hello", frozen=True, forbid_unknown_fields=True):
    """The first message of a frontend."""

    version: int
    frontend: str
    """Name for the log of the engine."""
    instance: str = ""
    """Random id of the frontend process: when it is back, it has no orphans."""


class Add(msgspec.Struct, tag="add", frozen=True):
    """Add a request. An engine process other than the one of `epoch` must ignore it."""

    epoch: int
    sent_at: float
    request: AddRequest


class Abort(msgspec.Struct, tag="abort", frozen=True):
    """End samples, by wire id."""

    epoch: int
    ids: Annotated[list[str], msgspec.Meta(max_length=MAX_ABORTED_IDS)]
    reason: FinishReason = FinishReason.ABORT


class Adopt(msgspec.Struct, tag="adopt", frozen=True):
    """Ask for a request of another frontend; the engine answers with HandedOver."""

    request_id: str
    """Id or alias of the request."""
    tenant: str
    """Tenant of the client that asks; the request must be of the same tenant."""


class Quarantined(msgspec.Struct, tag="quarantined", frozen=True):
    """Refuse these requests: they took engines down. Sent by either side, and passed on."""

    entries: Annotated[list[QuarantinedDigest], msgspec.Meta(max_length=MAX_QUARANTINED)]


class Heartbeat(msgspec.Struct, tag="heartbeat", frozen=True):
    """The frontend is alive, and has read this many bytes of reports since its Hello."""

    num_read_bytes: int


class EngineUp(msgspec.Struct, tag="up", frozen=True):
    """The engine takes requests. Sent after Hello, and after every EngineDown."""

    version: int
    model: str
    tokenizer: str
    """Digest of the model's tokenizer; a frontend must have the same."""
    epoch: int
    """Number of the engine process."""
    info: EngineInfo
    credit: Credit = DEFAULT_CREDIT
    weights: str = ""
    """Digest of the weights; empty if unknown."""


class EngineDown(msgspec.Struct, tag="down", frozen=True):
    """The engine process has failed, and another is on its way."""

    step_ids: list[str]
    """Wire ids of this frontend's samples in the step that did not end."""
    has_failed: bool
    """Whether a request of this frontend may be the cause although no step has it."""
    is_shared: bool
    """Whether a request of another frontend may be the cause: it was new in the process."""
    held_ids: list[str]
    """Wire ids of this frontend's samples that the process never had."""


class TriedAlone(msgspec.Struct, tag="tried_alone", frozen=True):
    """Whether no other frontend has a new request in the process, beside one on trial.

    Sent when the request goes to the process, and again when that changes.
    """

    wire_id: str
    is_alone: bool


class Reported(msgspec.Struct, tag="reported", frozen=True):
    """The events of a step that concern a frontend, with wire ids."""

    sent_at: float
    events: EventBatch


class HandedOver(msgspec.Struct, tag="handed_over", frozen=True):
    """The request of an Adopt, which from now on belongs to this frontend, or none."""

    sent_at: float
    handover: Handover


class Pulse(msgspec.Struct, tag="pulse", frozen=True):
    """The engine's side is alive."""


class Closed(msgspec.Struct, tag="closed", frozen=True):
    """The engine has ended the session; `message` says why."""

    message: str


FrontendMessage = Hello | Add | Abort | Adopt | Quarantined | Heartbeat
EngineMessage = (
    EngineUp | EngineDown | TriedAlone | Reported | HandedOver | Quarantined | Pulse | Closed
)

encode = msgspec.msgpack.Encoder().encode
_frontend_message = msgspec.msgpack.Decoder(FrontendMessage)
_engine_message = msgspec.msgpack.Decoder(EngineMessage)
_hello = msgspec.msgpack.Decoder(Hello)


def encode_command(message: FrontendMessage) -> bytes:
    """Return the frame of a message to an engine; raise WireError if no engine would read it."""
    frame = encode(message)
    if len(frame) > MAX_COMMAND_BYTES:
        raise WireError(f"a message of {len(frame)} bytes; an engine reads {MAX_COMMAND_BYTES}")
    return frame


def decode_hello(frame: bytes) -> Hello:
    """Return the first message of a frontend; raise WireError if it is not one."""
    if len(frame) > MAX_HELLO_BYTES:
        raise WireError(f"a Hello of {len(frame)} bytes")
    return decode_message(_hello, frame)


def decode_frontend_message(frame: bytes) -> FrontendMessage:
    """Return a message of a frontend; raise WireError if it is not one."""
    return decode_message(_frontend_message, frame)


def decode_engine_message(frame: bytes) -> EngineMessage:
    """Return a message of an engine; raise WireError if it is not one."""
    return decode_message(_engine_message, frame)


def decode_message(decoder: msgspec.msgpack.Decoder[T], frame: bytes) -> T:
    """Return the message of a frame; raise WireError if it is not one."""
    try:
        return decoder.decode(frame)
    # ValueError: text is not UTF-8. RecursionError: an unknown field of great depth.
    except (msgspec.DecodeError, ValueError, TypeError, OverflowError, RecursionError) as error:
        # The text may repeat a value of the message, which is for the log of the other side.
        raise WireError(ascii(str(error))[:_MAX_ERROR_CHARS]) from error


def wire_id(attempt: int, sample_id: str) -> str:
    """Return the id of a sample on the wire."""
    return f"{attempt}:{sample_id}"


def split_wire_id(name: str) -> tuple[int, str]:
    """Return the attempt and the id of a sample; raise WireError if `name` is not a wire id."""
    attempt, colon, sample = name.partition(":")
    if not colon or not attempt.isascii() or not attempt.isdecimal() or len(attempt) > 9:
        raise WireError(f"{name[:100]!r} is not the id of an attempt")
    return int(attempt), sample
