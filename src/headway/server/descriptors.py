"""How many connections the limit of open files allows.

An engine process that replaces a failed one needs sockets, pipes and files. If idle connections
held all descriptors, the engine could not be replaced, and every stream would end.
"""

from __future__ import annotations

import logging
import os
import resource
from dataclasses import dataclass

from headway.errors import ConfigError

logger = logging.getLogger(__name__)

RESERVE = 64
"""Descriptors that no connection gets: an engine needs about 20, ledger and files the rest."""
MAX_DESCRIPTORS = 2**20
MAX_BACKLOG = 2048
MAX_ADMIN_CONNECTIONS = 128
MIN_CONNECTIONS = 32
_UNKNOWN_NUM_OPEN = 64


@dataclass(frozen=True, slots=True)
class ConnectionShare:
    """Connections and backlog of one listener.

    The backlog counts twice: the server may accept a full backlog before it refuses the first
    connection of it, while the refused connections of the backlog before are still being closed.
    """

    max_connections: int
    backlog: int

    @classmethod
    def of(cls, num_descriptors: int) -> ConnectionShare:
        backlog = max(1, min(MAX_BACKLOG, num_descriptors // 8))
        return cls(num_descriptors - 2 * backlog, backlog)


@dataclass(frozen=True, slots=True)
class ConnectionPlan:
    """The shares of both listeners, so that probes and metrics work when clients use all."""

    public: ConnectionShare
    admin: ConnectionShare


def plan_connections(limit: int, num_open: int) -> ConnectionPlan:
    """Divide the descriptors that `limit` leaves; raise ConfigError if they are too few."""
    num_free = limit - num_open - RESERVE
    if num_free < MIN_CONNECTIONS:
        needed = num_open + RESERVE + MIN_CONNECTIONS
        raise ConfigError(
            f"this process may have {limit} files open and needs {needed}; raise the hard limit "
            "(ulimit -Hn, LimitNOFILE= of systemd, --ulimit nofile= of a container)"
        )
    num_admin = min(MAX_ADMIN_CONNECTIONS, num_free // 4)
    return ConnectionPlan(ConnectionShare.of(num_free - num_admin), ConnectionShare.of(num_admin))


def raise_descriptor_limit() -> int:
    """Raise the soft limit of open files; return the limit in force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Some systems have no limit, or a limit of a billion, which is no basis for sizes.
    limit = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= limit:
        return MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    except (OSError, ValueError) as error:
        logger.warning("the limit of open files stays at %d: %s", soft, error)
        return soft
    logger.info("raised the limit of open files from %d to %d", soft, limit)
    return limit


def num_open_descriptors() -> int:
    """Return the number of descriptors that this process has open."""
    for folder in ("/proc/self/fd", "/dev/fd"):
        try:
            return len(os.listdir(folder))
        except OSError:
            continue
    return _UNKNOWN_NUM_OPEN
