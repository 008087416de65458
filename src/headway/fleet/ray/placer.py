"""The child of a manager that starts and ends hosts by Ray.

    python -m headway.fleet.ray.placer ADDRESS NAMESPACE HOST_ARGUMENTS

Reads which hosts there should be, a line of JSON each time, and answers with those that Ray has.
Ray ends this process 60 s after the head is lost; the manager then starts it again.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError

from headway.fleet.manage.host import HostArguments
from headway.fleet.manage.placers import PlacerReport, PlacerRequest
from headway.fleet.ray.actor import start_actor

CALL_TIMEOUT_S = 1.0
READ_BYTES = 1024**2


class ActorPlacer:
    """Makes the named actors of one fleet those that were asked for."""

    def __init__(self, arguments: HostArguments) -> None:
        self._arguments = arguments
        self._prefix = f"{arguments.fleet}-host-"

    def place(self, hosts: dict[str, float]) -> PlacerReport:
        """Start and end actors; return those that there are now."""
        found = self._list()
        for name in found - hosts.keys():
            ray.kill(ray.get_actor(name), no_restart=True)
        for name in hosts.keys() - found:
            given = msgspec.json.encode(replace(self._arguments, host=name)).decode()
            start_actor(name, hosts[name], given)
        return PlacerReport(sorted(self._list()), self._first_problem(found & hosts.keys()))

    def _list(self) -> set[str]:
        names = ray.util.list_named_actors()
        return {name for name in names if isinstance(name, str) and name.startswith(self._prefix)}

    def _first_problem(self, names: set[str]) -> str:
        """Return what keeps a host from its work, such as a machine without the cluster key."""
        calls: list[Any] = [ray.get_actor(name).problem.remote() for name in sorted(names)]
        if not calls:
            return ""
        done, _ = ray.wait(calls, num_returns=len(calls), timeout=CALL_TIMEOUT_S)
        for call in done:
            try:
                if problem := ray.get(call):
                    return str(problem)[:500]
            except RayError:
                continue  # the actor is starting again
        return ""


def read_requests() -> Iterator[PlacerRequest]:
    """Yield the newest request each time, until the pipe is closed: Ray may have been slow."""
    unread = b""
    while chunk := os.read(0, READ_BYTES):
        *lines, unread = (unread + chunk).split(b"\n")
        if lines:
            yield msgspec.json.decode(lines[-1], type=PlacerRequest)


def main() -> None:
    """Connect to Ray, and place hosts until the manager closes the pipe."""
    address, namespace, given = sys.argv[1:]
    arguments = msgspec.json.decode(given, type=HostArguments)
    # What Ray prints must not be taken for an answer.
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)

    def report(answer: PlacerReport) -> None:
        out.write(msgspec.json.encode(answer) + b"\n")

    try:
        ray.init(address, namespace=namespace, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:
        text = " ".join(str(error).split())
        report(PlacerReport(problem=f"Ray at {address} cannot be joined: {text[:300]}"))
        sys.exit(1)
    placer = ActorPlacer(arguments)
    for request in read_requests():
        try:
            report(placer.place(request.hosts))
        except Exception as error:
            text = " ".join(str(error).split())
            report(PlacerReport(problem=f"Ray at {address}: {text[:300]}"))


if __name__ == "__main__":
    main()
