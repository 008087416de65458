"""Models named by a Hugging Face id: resolved once, and slowly, over a stand-in for the hub."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import msgspec
import pytest

from benchmarks.support.servers import RunningServer, free_port, start_process
from benchmarks.support.tiny_tokenizers import byte_level_backend, write_folder

MODEL = "tests/tiny"
FIRST, SECOND = "1" * 40, "2" * 40
TOKENIZER_CONFIG = {"eos_token": "</s>", "chat_template": "{{ messages[0].content }}"}
Start = Callable[..., RunningServer]


class Hub:
    """A cache with two snapshots of one model, and a server that answers when it may."""

    def __init__(self, folder: Path) -> None:
        self._model = folder / "hub" / "models--tests--tiny"
        for commit in (FIRST, SECOND):
            write_folder(
                self.snapshot(commit), byte_level_backend(), tokenizer_config=TOKENIZER_CONFIG
            )
        self.set_main(FIRST)
        self.asked = threading.Event()
        self.may_answer = threading.Event()
        self.status = 200
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def snapshot(self, commit: str) -> Path:
        return self._model / "snapshots" / commit

    def set_main(self, commit: str) -> None:
        refs = self._model / "refs"
        refs.mkdir(exist_ok=True)
        (refs / "main").write_text(commit)

    def close(self) -> None:
        self.may_answer.set()
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.asked.set()
                hub.may_answer.wait(60)
                about = {"id": MODEL, "sha": FIRST, "siblings": []}
                body = json.dumps([] if "/tree/" in self.path else about).encode()
                self.send_response(hub.status)
                if hub.status != 200:
                    self.send_header("X-Error-Code", "RepoNotFound")
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_HEAD = do_GET

            def log_message(self, format: str, *args: object) -> None:
                pass

        return Handler


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    made = Hub(tmp_path / "cache")
    yield made
    made.close()


@pytest.fixture
def start(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    servers: list[RunningServer] = []

    def start(is_offline: bool, **settings: object) -> RunningServer:
        monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_HUB_OFFLINE", str(int(is_offline)))
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "100")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        port, admin_port = free_port(), free_port()
        flags = {"model": MODEL, "port": port, "admin_port": admin_port, "ledger_url": "none"}
        encoded = msgspec.json.encode(flags | settings).decode()
        command = [sys.executable, "-m", "tests.server.hub_server", encoded]
        servers.append(start_process(command, port, tmp_path / "server.log", admin_port))
        return servers[-1]

    yield start
    for server in servers:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


def engines(server: RunningServer) -> list[tuple[int, str]]:
    found = re.findall(r"^engine (\d+) loads (.*)$", server.log, re.MULTILINE)
    return [(int(pid), path) for pid, path in found]


def test_an_engine_that_takes_over_loads_the_same_snapshot(start: Start, hub: Hub) -> None:
    server = start(is_offline=True).wait_ready()
    ((pid, path),) = engines(server)
    assert path == str(hub.snapshot(FIRST))
    hub.set_main(SECOND)
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while len(engines(server)) < 2:
        assert time.monotonic() < deadline, server.log
        time.sleep(0.05)
    assert [path for _, path in engines(server)] == [str(hub.snapshot(FIRST))] * 2
    server.wait_ready()
    names = [model["id"] for model in httpx.get(f"{server.url}/v1/models").json()["data"]]
    assert names == [MODEL]
    assert f'model_name="{MODEL}"' in httpx.get(f"{server.admin_url}/metrics").text
    assert server.stop() == 0, server.log


def test_probes_are_answered_while_a_model_is_downloaded(start: Start, hub: Hub) -> None:
    server = start(is_offline=False, api_key=["the-key"])
    headers = {"Authorization": "Bearer the-key"}
    assert hub.asked.wait(60), server.log
    with httpx.Client(timeout=10) as client:
        for url in (server.url, server.admin_url):
            live = client.get(f"{url}/health/live")
            assert (live.status_code, live.json()) == (200, {"status": "live"})
            ready = client.get(f"{url}/health/ready")
            assert (ready.status_code, ready.json()) == (503, {"status": "loading"})
            assert client.get(f"{url}/health").status_code == 401
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/models"):
            refused = client.post(f"{server.url}{path}", json={"prompt": "x"}, headers=headers)
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) > 0
            assert refused.json()["error"]["code"] == "service_unavailable"
        assert client.post(f"{server.url}/v1/completions", json={}).status_code == 401
        assert not engines(server)
        hub.may_answer.set()
        server.wait_ready("the-key")
        # The same connection, now to the real app.
        body = {"prompt": "x", "max_tokens": 2}
        done = client.post(f"{server.url}/v1/completions", json=body, headers=headers)
        assert done.status_code == 200
        assert done.json()["model"] == MODEL
    assert server.stop() == 0, server.log


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_model_is_downloaded(start: Start, hub: Hub, number: int) -> None:
    server = start(is_offline=False)
    assert hub.asked.wait(60), server.log
    began_at = time.monotonic()
    server.process.send_signal(number)
    assert server.process.wait(20) == 0
    assert time.monotonic() - began_at < 5
    assert "Traceback" not in server.log
    assert not engines(server)


def test_a_model_that_does_not_exist_ends_the_server(start: Start, hub: Hub) -> None:
    hub.status = 404
    hub.may_answer.set()
    server = start(is_offline=False, model="tests/none")
    assert server.process.wait(60) == 2
    assert "no file, folder or Hugging Face repository named tests/none" in server.log
    assert "Traceback" not in server.log
