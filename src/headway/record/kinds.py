"""Kinds of recordings: of an engine, and of a router. Their files are alike but for the entries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from headway.record import entries as engine
from headway.record.router import entries as router
from headway.record.router.entries import RouterEntry, RouterHeader

H = TypeVar("H", bound=engine.Header)
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
