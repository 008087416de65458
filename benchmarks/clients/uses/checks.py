"""Runs checks in the environment of a client, and prints one line of JSON for each.

A check is a function that takes the server, raises if the client did not work, and returns what
it saw. Only the standard library is imported: every client has an environment of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

LOOPBACK = ("127.0.0.1", "localhost", "::1", "0.0.0.0", "")
MAX_DETAIL = 600
WRONG_KEY = "not-the-key"


@dataclass(frozen=True, slots=True)
class Server:
    """Where the client finds the server; `url` has no /v1."""

    url: str
    model: str
    key: str

    @property
    def openai_url(self) -> str:
        return f"{self.url}/v1"


@dataclass(frozen=True, slots=True)
class Result:
    """Outcome of one check."""

    name: str
    is_ok: bool
    detail: str
    known_reason: str = ""
    """Why the check is expected to fail; empty if it must pass."""

    @property
    def is_expected(self) -> bool:
        return self.is_ok == (not self.known_reason)


Check = Callable[[Server], Any]


def report(result: Result) -> None:
    """Print a result as one line of JSON."""
    print(json.dumps(asdict(result)), flush=True)


class Network:
    """Refuses connections to other hosts than this one, and lists them."""

    def __init__(self) -> None:
        self.refused: list[str] = []
        sys.addaudithook(self._audit)

    def report(self) -> None:
        hosts = ", ".join(sorted(set(self.refused)))
        report(Result("connects to the server only", not hosts, hosts))

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "socket.connect" and isinstance(args[1], tuple):
            self._judge(args[1][0])
        elif event == "socket.getaddrinfo":
            self._judge(args[0])

    def _judge(self, host: Any) -> None:
        name = host.decode() if isinstance(host, bytes) else str(host or "")
        if name not in LOOPBACK:
            self.refused.append(name)
            raise OSError(f"no connection to {name}: checks use this host only")


def expect(condition: object, what: object) -> None:
    """Raise with what was seen, unless the condition holds."""
    if not condition:
        raise AssertionError(f"not as expected: {what!r}")


def raises(kind: type[BaseException], act: Callable[[], Any]) -> Any:
    """Return the exception of this kind that a call raises."""
    try:
        found = act()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}: {found!r}")


async def raises_async(kind: type[BaseException], awaitable: Any) -> Any:
    """Return the exception of this kind that an awaitable raises."""
    try:
        found = await awaitable
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}: {found!r}")


def parse_server() -> Server:
    """Read the server from the command line: URL MODEL KEY."""
    parser = argparse.ArgumentParser()
    for name in ("url", "model", "key"):
        parser.add_argument(name)
    args = parser.parse_args()
    return Server(args.url, args.model, args.key)


def run(*checks: Check, known: Mapping[Check, str] | None = None) -> None:
    """Run checks against the server of the command line; `known` has expected failures."""
    server, network = parse_server(), Network()
    for check in checks:
        report(_run_one(check, server, (known or {}).get(check, "")))
    network.report()


def _run_one(check: Check, server: Server, known_reason: str) -> Result:
    name = check.__name__.replace("_", " ")
    started_at = time.monotonic()
    try:
        seen = check(server)
        if inspect.isawaitable(seen):
            seen = asyncio.run(_wait(seen))
    except Exception as error:
        traceback.print_exc()
        detail = f"{type(error).__name__}: {error}"
        return Result(name, False, detail[:MAX_DETAIL], known_reason)
    words = [*str("" if seen is None else seen).split(), f"({time.monotonic() - started_at:.1f} s)"]
    return Result(name, True, " ".join(words)[-MAX_DETAIL:], known_reason)


async def _wait(awaitable: Any) -> Any:
    return await awaitable
