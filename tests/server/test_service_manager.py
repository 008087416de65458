"""What systemd hears from a server, by a socket such as its own."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.support.fleets import Fleet
from headway.config import notify_address, watchdog_s
from headway.server.service_manager import ServiceManager


@pytest.fixture
def inbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A socket that the environment names; the path of one may have 107 characters."""
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind("notify")
        listener.settimeout(30)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield listener


def receive(inbox: socket.socket) -> dict[str, str]:
    lines = inbox.recv(4096).decode().splitlines()
    return dict(line.split("=", 1) for line in lines)


def test_ready_after_loading_and_stopping_at_the_signal(inbox, launch) -> None:
    server = launch(load_s=0.3)
    told = receive(inbox)
    # Ready is what clients see, not only what was said.
    assert server.wait_ready(timeout_s=1) is server
    assert told == {"READY": "1", "STATUS": f"serving {server.url}"}
    server.process.send_signal(signal.SIGTERM)
    assert receive(inbox)["STOPPING"] == "1"
    assert server.process.wait(10) == 0
    inbox.setblocking(False)
    with pytest.raises(BlockingIOError):
        inbox.recv(4096)  # without WATCHDOG_USEC no sign of life was sent


def test_signs_of_life_end_when_the_engine_is_given_up(inbox, launch, monkeypatch) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "300000")
    server = launch(server={"max_engine_restarts": 0})
    while "READY" not in (told := receive(inbox)):
        assert told == {"WATCHDOG": "1"}
    assert receive(inbox) == {"WATCHDOG": "1"}
    found = re.search(r"^engine (\d+)$", server.log, re.MULTILINE)
    assert found is not None
    os.kill(int(found[1]), signal.SIGKILL)
    inbox.settimeout(2)
    with pytest.raises(TimeoutError):
        while True:
            inbox.recv(4096)
    assert server.process.poll() is None


def test_an_engine_host_says_it_too(inbox, tmp_path: Path, tokenizer_path, monkeypatch) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "300000")
    fleet = Fleet(tmp_path, tokenizer_path)
    try:
        engine = fleet.start_engine(load_s=0.3)
        while "READY" not in (told := receive(inbox)):
            assert told == {"WATCHDOG": "1"}
        assert told == {"READY": "1", "STATUS": f"serving {engine.address}"}
        assert receive(inbox) == {"WATCHDOG": "1"}
        engine.process.send_signal(signal.SIGTERM)
        while "STOPPING" not in (told := receive(inbox)):
            assert told == {"WATCHDOG": "1"}
        assert engine.process.wait(10) == 0
    finally:
        fleet.close()


@pytest.mark.parametrize("name", ["@headway-test-{}", "headway-test"])
def test_both_kinds_of_addresses(tmp_path: Path, monkeypatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    name = name.format(tmp_path.name)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(name.replace("@", "\0"))
        ServiceManager(name, None).say_stopping()
        assert listener.recv(100).startswith(b"STOPPING=1\n")


def test_a_manager_that_is_gone_or_full_delays_nothing(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    ServiceManager("nobody-is-here", None).say_stopping()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind("full")
        manager = ServiceManager("full", None)
        for _ in range(1_000):  # more than a queue of datagrams takes
            manager.say_stopping()


async def test_without_a_manager_nothing_is_shown() -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(ServiceManager(None, 0.001).show_life(lambda: True), 0.05)


def test_the_environment_of_another_process_is_not_ours(monkeypatch) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "60000000")
    assert watchdog_s() == 60
    monkeypatch.setenv("WATCHDOG_PID", "1")
    assert watchdog_s() is None
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    assert notify_address() is None
