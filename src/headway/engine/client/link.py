"""The link port: one engine, in a process of this machine or of another."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from headway.engine.process.messages import Command, EngineInfo, QuarantinedDigest
from headway.engine.supervise.supervisor import EngineOwner, Progress, RestartListener


class EngineLink(Protocol):
    """Sends commands to one engine, and calls the owner of its requests.

    `Supervisor` is the link to an engine process that this process starts.
    """

    name: str
    info: EngineInfo | None
    """None until the engine was up once."""
    is_up: bool
    is_hung: bool
    is_connected: bool
    """Whether the engine is up, or known to be on its way up."""
    has_room: Callable[[int], bool]
    """Returns whether the engine takes one more request, of this many tokens, now."""
    restart_listeners: list[RestartListener]
    adopt: Callable[[str, str], Awaitable[bool]]
    """Asks the engine for a request of another frontend, by id and tenant.

    Returns whether the owner will get a Handover in a report.
    """
    share_quarantine: Callable[[Sequence[QuarantinedDigest]], Awaitable[bool]]
    """Has the engine refuse requests, from any frontend; returns whether it was told."""

    async def load(self, progress: Progress | None = None) -> None:
        """Wait until the engine is up for the first time; raise EngineError if it never will."""
        ...

    async def run(self, owner: EngineOwner) -> None:
        """Call the owner with all that happens to the engine, until the link is given up."""
        ...

    async def send(self, command: Command) -> None:
        """Send a command; an engine that is gone is ignored here."""
        ...

    def kill(self) -> None:
        """End at once what this process has started; `stop` must still follow."""
        ...

    async def stop(self) -> None: ...
