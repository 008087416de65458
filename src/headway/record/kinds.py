"""Kinds of recordings: of an engine, and of a router. Their files are alike but for the entries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import msgspec

from headway.record import entries as engine
from headway.record.router import entries as router
from headway.record.router.entries import RouterEntry, RouterHeader


class Header(Protocol):
    """What the header of every recording has."""

    @property
    def recording(self) -> str: ...
    @property
    def part(self) -> int: ...
    @property
    def headway(self) -> str: ...
    @property
    def platform(self) -> str: ...
    @property
    def clock_began_at(self) -> float | None: ...


H = TypeVar("H", bound=Header)
E = TypeVar("E")


@dataclass(frozen=True, slots=True)
class Kind(Generic[H, E]):
    """What is recorded, and how headers and entries of it are read."""

    name: str
    decode_header: Callable[[bytes], H]
    decode_entries: Callable[[bytes], list[E | engine.ClosedEntry]]


ENGINE: Kind[engine.RecordingHeader, engine.Entry] = Kind(
    engine.ENGINE, engine.decode_header, engine.decode_entries
)
ROUTER: Kind[RouterHeader, RouterEntry] = Kind(
    router.ROUTER, router.decode_header, router.decode_entries
)


class HeaderStart(msgspec.Struct, frozen=True):
    """The part of a header that every format and kind has."""

    format: int
    kind: str = engine.ENGINE


decode_start = msgspec.msgpack.Decoder(HeaderStart).decode
