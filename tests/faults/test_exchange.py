"""How long the battery of bad inputs waits for an answer, and until when it times an answer."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from benchmarks.faults import exchange as module
from benchmarks.faults.cases import Case, Target
from benchmarks.faults.exchange import TIMED_OUT, PromptCost, exchange

REFUSAL = b"HTTP/1.1 413 Content Too Large\r\nContent-Length: 0\r\n\r\n"
CASE = Case("any", (413,), raw=(b"x" * 100,))
LONG_S = 0.5


@contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[Target]:
    """Serve one connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                answer(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        yield Target("127.0.0.1", listener.getsockname()[1], 1000)
        thread.join()


@pytest.mark.parametrize("interim", [b"", b"HTTP/1.1 100 Continue\r\n\r\n"])
def test_an_answer_is_timed_until_its_head_not_until_the_connection_ends(interim: bytes) -> None:
    answered_at: list[float] = []
    closed_at: list[float] = []

    def refuse(connection: socket.socket) -> None:
        connection.sendall(interim)
        time.sleep(0.1)
        answered_at.append(time.monotonic())
        connection.sendall(REFUSAL)
        time.sleep(LONG_S)
        closed_at.append(time.monotonic())

    with answering(refuse) as target:
        began_at = time.monotonic()
        found = exchange(CASE, target)
        ended_at = time.monotonic()
    assert found.outcome == 413
    assert answered_at[0] <= began_at + found.elapsed_s + 0.01
    assert began_at + found.elapsed_s < closed_at[0] <= ended_at


def test_the_wait_depends_on_what_a_prompt_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TIMEOUT_S", LONG_S / 5)

    def compute(connection: socket.socket) -> None:
        time.sleep(LONG_S)
        with suppress(ConnectionError):
            connection.sendall(REFUSAL)

    with answering(compute) as target:
        assert exchange(CASE, target).outcome == TIMED_OUT
    with answering(compute) as target:
        assert exchange(CASE, target, PromptCost(100, 5.0)).outcome == 413


def test_a_longer_body_is_waited_for_as_long_as_the_longest_prompt_needs() -> None:
    cost = PromptCost(num_tokens=8000, elapsed_s=12.0)
    few, many, most = (cost.timeout_s(number) for number in (0, 4000, 8000))
    assert (few, many, most) == (20.0, 32.0, 44.0)
    assert cost.timeout_s(4_000_000) == most
