"""Ray clusters of several nodes on this machine, and ways to break them.

Each node is a `ray start --block` of its own, which reaps what it has started. Ray itself is never
imported here: a process that has joined a cluster is ended a minute after its head is lost.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import psutil

from benchmarks.support.servers import ServerFailed, free_port

OBJECT_STORE_BYTES = 80_000_000
MIN_PORT, MAX_PORT = 6400, 6900
"""Below the ports that Ray gives to its workers."""


class RayCluster:
    """A head without CPUs and some nodes; needs the token in its environment.

    With a store (`redis-server`), a head that is started again knows its nodes and actors.
    """

    def __init__(self, num_nodes: int = 3, num_cpus: int = 2, has_store: bool = False) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ray-"))
        self._num_cpus = num_cpus
        self.port = _free_port()
        self.address = f"127.0.0.1:{self.port}"
        token = secrets.token_hex(16)
        self.environment = {
            **os.environ,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": token,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_raylet_start_wait_time_s": "120",  # the machine may be busy
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }
        self._num_nodes = num_nodes
        self._store: subprocess.Popen[bytes] | None = None
        if has_store:
            port = free_port()
            self._store = self._start_store(port)
            self.environment["RAY_REDIS_ADDRESS"] = f"127.0.0.1:{port}"
        self.head: subprocess.Popen[bytes] | None = None
        self.nodes: list[subprocess.Popen[bytes]] = []

    def _start_store(self, port: int) -> subprocess.Popen[bytes]:
        folder = self._folder / "store"
        folder.mkdir()
        command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder)]
        return subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL, start_new_session=True
        )

    def start(self) -> RayCluster:
        """Start the head, then the nodes."""
        try:
            self.start_head()
            for _ in range(self._num_nodes):
                self.nodes.append(self.start_node())
        except BaseException:
            self.stop()
            raise
        return self

    def start_head(self) -> None:
        self.head = self._start("head", "--head", f"--port={self.port}", "--num-cpus=0")

    def start_node(self) -> subprocess.Popen[bytes]:
        name = f"node-{time.monotonic_ns()}"
        return self._start(name, f"--address={self.address}", f"--num-cpus={self._num_cpus}")

    def _start(self, name: str, *flags: str) -> subprocess.Popen[bytes]:
        is_head = "--head" in flags
        if is_head:
            flags = (*flags, "--include-dashboard=false", f"--temp-dir={self._folder / 't'}")
        log = (self._folder / f"{name}.log").open("wb")
        process = subprocess.Popen(
            [
                "ray",
                "start",
                "--block",
                "--node-ip-address=127.0.0.1",
                f"--object-store-memory={OBJECT_STORE_BYTES}",
                *flags,
            ],
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            env=self.environment,
            start_new_session=True,
        )
        log.close()

        def is_up() -> bool:
            if process.poll() is not None:
                raise ServerFailed((self._folder / f"{name}.log").read_text()[-2000:])
            return b"--block" in (self._folder / f"{name}.log").read_bytes()

        try:
            wait_for(is_up, 300.0)
        except BaseException:
            _kill_all([process])
            raise
        return process

    def pids(self, text: str, nodes: Iterable[subprocess.Popen[bytes]] | None = None) -> list[int]:
        """Return the processes of nodes whose command begins with a program of this name."""
        found: list[int] = []
        everyone = [*self.nodes, *([self.head] if self.head else [])]
        for node in everyone if nodes is None else nodes:
            with contextlib.suppress(psutil.Error):
                for child in psutil.Process(node.pid).children(recursive=True):
                    with contextlib.suppress(psutil.Error):
                        words = child.cmdline()
                        if words and text in words[0]:
                            found.append(child.pid)
        return found

    def kill_host(self, number: int = 0) -> int:
        """Kill the actor of a host; return its process id."""
        pid = sorted(self.pids("HostActor"))[number]
        os.kill(pid, signal.SIGKILL)
        return pid

    def kill_raylet(self, number: int) -> None:
        """Kill the raylet of a node: Ray loses the node and all its actors."""
        for pid in self.pids("raylet", [self.nodes[number]]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.nodes[number].wait(60)

    def replace_node(self, number: int) -> None:
        self.nodes[number] = self.start_node()

    def kill_gcs(self) -> None:
        """Kill the head's GCS; without a store, the cluster cannot recover from it."""
        for pid in self.pids("gcs_server"):
            os.kill(pid, signal.SIGKILL)

    def kill_head(self) -> None:
        """Kill every process of the head; with a store, `start_head` brings it back."""
        if self.head is not None:
            _kill_all([self.head])
            self.head = None
            # `ray start` refuses an address that it finds here and in the command of any raylet.
            (self._folder / "t" / "ray_current_cluster").unlink(missing_ok=True)

    def stop(self) -> None:
        """End every process of the nodes."""
        _kill_all([*self.nodes, *([self.head] if self.head else [])])
        self.head, self.nodes = None, []

    def close(self) -> None:
        self.stop()
        if self._store is not None:
            _kill_all([self._store])
        shutil.rmtree(self._folder, ignore_errors=True)


def _kill_all(nodes: Sequence[subprocess.Popen[bytes]]) -> None:
    children: list[psutil.Process] = []
    for node in nodes:
        with contextlib.suppress(psutil.Error):
            children += psutil.Process(node.pid).children(recursive=True)
    for node in nodes:
        if node.poll() is None:
            node.kill()
        node.wait(20)
    for child in children:
        with contextlib.suppress(psutil.Error):
            child.kill()
    psutil.wait_procs(children, 10)


def wait_for(test: Callable[[], bool], timeout_s: float) -> None:
    """Wait until a test passes."""
    deadline = time.monotonic() + timeout_s
    while not test():
        if time.monotonic() > deadline:
            raise ServerFailed(f"{test} did not pass in {timeout_s:.0f} s")
        time.sleep(0.1)


def _free_port() -> int:
    import socket

    for port in range(MIN_PORT, MAX_PORT):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise ServerFailed("no port is free")
