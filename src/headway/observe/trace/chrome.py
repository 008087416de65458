"""A trace as a file in Chrome's JSON format, which Perfetto and others open.

Tracks: the steps of each engine, and each part of a request in a group of its tenant. Times are
whole microseconds: every reader computes with them exactly, so a slice never ends after the slice
around it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO, Any

import msgspec

from headway.observe.trace.account import RequestAccount
from headway.observe.trace.export import TraceHead, TraceStep
from headway.observe.trace.pieces import QUEUE, Piece, pieces_of

BEFORE_S = 86_400.0
"""How long before the time asked for a request may have arrived."""
STEPS = "engine steps"
FIRST_TRACK = 1_000_000
"""Numbers of tracks do not meet those of groups."""

Json = dict[str, Any]


class ChromeTrace:
    """Writes a trace to a file as it comes; `close` makes the file complete."""

    def __init__(self, file: IO[bytes], head: TraceHead) -> None:
        self._file = file
        self._head = head
        self._origin = head.now - head.since_s - BEFORE_S
        self._groups: dict[str, int] = {}
        self._steps_end: dict[str, tuple[int, int]] = {}
        """Track of each engine, and the end of its last step."""
        self._num_tracks = 0
        self._is_empty = True
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[')

    def add_steps(self, engine: str, steps: Iterable[TraceStep]) -> None:
        """Add steps of an engine, the oldest first."""
        group = self._group(STEPS)
        if engine not in self._steps_end:
            self._steps_end[engine] = self._track(group, engine), 0
        track, end = self._steps_end[engine]
        for step in steps:
            # A step that was measured longer than the time since the one before begins after it.
            start = max(end, self._us(step.at - step.elapsed_s))
            end = max(start, self._us(step.at))
            self._slice(group, track, "step", (start, end), _step_args(step))
        self._steps_end[engine] = track, end

    def add_request(self, account: RequestAccount) -> None:
        """Add the parts of a request, each on a track of its own."""
        group = self._group(f"tenant {account.tenant}" if account.tenant else "requests")
        parts: dict[str, list[Piece]] = {"": []}
        for piece in pieces_of(account):
            parts.setdefault(piece.part, []).append(piece)
        for part, pieces in parts.items():
            track = self._track(group, f"{account.id} {part}".rstrip())
            times = (pieces[0].start_s, pieces[-1].end_s) if pieces else (0.0, account.duration_s)
            span = self._span(account, *times)
            about = {"part": part, "request": account.id} if part else _request_args(account)
            self._slice(group, track, part or "request", span, about)
            for piece in pieces:
                self._add_piece(account, group, track, piece)

    def close(self, **about: object) -> None:
        """End the file, with what is to be known about the trace."""
        head = msgspec.to_builtins(self._head)
        other = {**head, "origin": self._origin, **about}
        self._file.write(b'\n],"otherData":' + msgspec.json.encode(other) + b"}\n")

    # ------------------------------------------------------------------ slices

    def _add_piece(self, account: RequestAccount, group: int, track: int, piece: Piece) -> None:
        start, end = self._span(account, piece.start_s, piece.end_s)
        cause = piece.interruption
        name = piece.kind if cause is None else cause.kind
        args: Json = {"seconds": piece.end_s - piece.start_s}
        if cause is not None and cause.kind == "preempted":
            args |= {
                "by": cause.by,
                "by_tenant": cause.by_tenant,
                "cause": cause.cause,
                "method": cause.method,
                "tokens_lost": cause.num_tokens,
            }
        self._slice(group, track, name, (start, end), args, piece.kind)
        at_s = piece.start_s
        for share in piece.causes:
            # An account knows how long a cause lasted, not when: causes follow each other here.
            first = min(end, self._us(account.arrived_at + at_s))
            at_s += share.seconds
            last = min(end, self._us(account.arrived_at + at_s))
            args = {"seconds": share.seconds}
            if share.held_by:
                args["held_by"] = share.held_by
            self._slice(group, track, share.cause, (first, last), args, f"{QUEUE}.cause")

    def _slice(
        self,
        group: int,
        track: int,
        name: str,
        span: tuple[int, int],
        args: Json,
        category: str = "",
    ) -> None:
        start, end = span
        event: Json = {"ph": "X", "pid": group, "tid": track, "name": name}
        if category:
            event["cat"] = category
        self._write({**event, "ts": start, "dur": end - start, "args": args})

    # ------------------------------------------------------------------ tracks

    def _group(self, name: str) -> int:
        if name not in self._groups:
            number = self._groups[name] = len(self._groups) + 1
            self._name("process_name", number, 0, name)
            # Steps come first.
            index = 0 if name == STEPS else number
            event = {"ph": "M", "pid": number, "tid": 0, "name": "process_sort_index"}
            self._write({**event, "args": {"sort_index": index}})
        return self._groups[name]

    def _track(self, group: int, name: str) -> int:
        self._num_tracks += 1
        track = FIRST_TRACK + self._num_tracks
        self._name("thread_name", group, track, name)
        return track

    def _name(self, kind: str, group: int, track: int, name: str) -> None:
        self._write({"ph": "M", "pid": group, "tid": track, "name": kind, "args": {"name": name}})

    # ------------------------------------------------------------------- bytes

    def _span(self, account: RequestAccount, start_s: float, end_s: float) -> tuple[int, int]:
        return self._us(account.arrived_at + start_s), self._us(account.arrived_at + end_s)

    def _us(self, at: float) -> int:
        return max(0, round((at - self._origin) * 1e6))

    def _write(self, event: Json) -> None:
        self._file.write((b"\n" if self._is_empty else b",\n") + msgspec.json.encode(event))
        self._is_empty = False


def _step_args(step: TraceStep) -> Json:
    args: Json = {
        "step": step.step_id,
        "seconds": step.elapsed_s,
        "rows": step.num_seqs,
        "tokens": step.num_tokens,
        "running": step.num_running,
        "waiting": step.num_waiting,
        "kv_blocks": step.num_blocks_used,
    }
    return args | {"predicted_seconds": step.predicted_s} if step.predicted_s else args


def _request_args(account: RequestAccount) -> Json:
    """Return all of an account but its timeline; it has no text of a prompt or an output."""
    left_out = ("timeline", "causes")
    fields = msgspec.to_builtins(account)
    args: Json = {name: value for name, value in fields.items() if name not in left_out}
    return args | {"queue_s": account.queue_s}
