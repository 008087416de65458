"""A server under `python -O`, which removes every assert statement."""

from __future__ import annotations

import httpx
import pytest

from benchmarks.support.servers import Launcher


def test_a_server_without_asserts_serves(launch: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both processes inherit the setting; test_architecture keeps asserts out of the source."""
    monkeypatch.setenv("PYTHONOPTIMIZE", "1")
    server = launch().wait_ready()
    body = {"prompt": "a prompt", "max_tokens": 20, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 20
    refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": 7}, timeout=60)
    assert refused.status_code == 400
    assert server.stop() == 0, server.log
