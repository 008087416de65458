"""How many connections there may be, so that descriptors are left for everything else.

An engine that is replaced needs sockets, pipes and files. With all descriptors taken by idle
connections it could not be, and every stream would end.
"""

from __future__ import annotations

import logging
import os
import resource
from dataclasses import dataclass

from headway.errors import ConfigError

logger = logging.getLogger(__name__)

RESERVE = 64
"""Descriptors that no connection gets: an engine takes about 20, the ledger and files the rest."""
MAX_DESCRIPTORS = 2**20
MAX_BACKLOG = 2048
MAX_ADMIN_CONNECTIONS = 128
MIN_CONNECTIONS = 32
_UNKNOWN_NUM_OPEN = 64


@dataclass(frozen=True, slots=True)
class ConnectionShare:
    """What one listener may take.

    The kernel's queue is bounded with it: all that is in there may be accepted before the first of
    them is refused, once while those refused before are still being closed.
    """

    max_connections: int
    backlog: int

    @classmethod
    def of(cls, num_descriptors: int) -> ConnectionShare:
        backlog = max(1, min(MAX_BACKLOG, num_descriptors // 8))
        return cls(num_descriptors - 2 * backlog, backlog)


@dataclass(frozen=True, slots=True)
class ConnectionPlan:
    """The shares of both listeners: probes and metrics come through when clients take all."""

    public: ConnectionShare
    admin: ConnectionShare


def plan_connections(limit: int, num_open: int) -> ConnectionPlan:
    """Share out what `limit` leaves. ConfigError if that is next to nothing."""
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
    """Raise the soft limit of open files to the hard limit; the limit that holds now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Some systems have no limit, or one of a billion, by which nothing should be sized.
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:
        logger.warning("the limit of open files stays at %d: %s", soft, error)
        return soft
    logger.info("raised the limit of open files from %d to %d", soft, wanted)
    return wanted


def num_open_descriptors() -> int:
    """How many descriptors this process has open now."""
    for folder in ("/proc/self/fd", "/dev/fd"):
        try:
            return len(os.listdir(folder))
        except OSError:
            continue
    return _UNKNOWN_NUM_OPEN
