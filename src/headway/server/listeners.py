"""Binds the ports, and checks the settings before the model is loaded."""

from __future__ import annotations

import errno
import logging
import socket
from dataclasses import dataclass

from headway.clock import SystemClock
from headway.config import ServerConfig
from headway.errors import ConfigError
from headway.server.access import AccessControl
from headway.server.descriptors import (
    ConnectionPlan,
    num_open_descriptors,
    plan_connections,
    raise_descriptor_limit,
)
from headway.server.http.hosts import is_loopback
from headway.server.http.limits import check_uvicorn

logger = logging.getLogger(__name__)

SEND_BUFFER_BYTES = 64 * 1024
"""Send buffer of the kernel for each client; its automatic size would grow to megabytes."""


@dataclass(frozen=True, slots=True)
class ListenSockets:
    """The bound sockets, the checks for requests, and the connections per listener."""

    access: AccessControl
    plan: ConnectionPlan
    public: socket.socket
    admin: socket.socket | None = None

    def close(self) -> None:
        for listener in (self.public, self.admin):
            if listener is not None:
                listener.close()


def listen(config: ServerConfig) -> ListenSockets:
    """Check the settings and bind the ports, before anything slow begins.

    Raises ConfigError if a port is in use or a setting is wrong.
    """
    check_uvicorn()
    access = AccessControl.of(config, SystemClock())
    has_keys = not access.tenants.directory.is_open
    if access.proxies.trusts_everyone:
        logger.warning("--trusted-proxy includes every address: any client may name any tenant")
    for host in (config.host, config.admin_host):
        if not has_keys and not is_loopback(host):
            logger.warning(
                "any client that can reach %s may use this server: it has no keys; "
                "set --api-keys-file or --tenants-file",
                host,
            )
    plan = plan_connections(raise_descriptor_limit(), num_open_descriptors())
    public = _listen(config.host, config.port, "--port", config.reuse_port)
    if config.admin_port is None:
        return ListenSockets(access, plan, public)
    try:
        admin = _listen(config.admin_host, config.admin_port, "--admin-port")
    except BaseException:
        public.close()
        raise
    return ListenSockets(access, plan, public, admin)


def _listen(host: str, port: int, flag: str, is_shared: bool = False) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host} ({flag.replace('port', 'host')}): {error.strerror or error}"
        ) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # Accepted connections inherit this option.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        listener.bind(address)
        # Until a process listens on the port, another process could bind it too. A server that
        # shares its port listens when it is ready: until then, the others serve all clients.
        if not is_shared:
            listener.listen()
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host} is in use; choose another with {flag} (0: a free one)"
            ) from error
        raise ConfigError(
            f"cannot listen on port {port} of {host} ({flag}): {error.strerror}"
        ) from error
    listener.setblocking(False)
    return listener
