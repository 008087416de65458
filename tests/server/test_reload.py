"""The tenants file under a running server: real sockets, the real command, signals."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.support.servers import RunningServer, free_port
from headway.tenancy.keys_file import append_key, key_for
from tests.conftest import ROOT

PATH = "/v1/completions"


def tenants(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headway", "tenants", *arguments, "--file", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


def new_key(path: Path, *arguments: str) -> str:
    result = tenants(path, *arguments)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def replace_text(path: Path, text: str) -> None:
    """Change a file at once: the server may read it at any moment."""
    other = path.with_suffix(".new")
    other.write_text(text)
    shutil.copymode(path, other)
    other.replace(path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tenants.yaml"


def ask(server: RunningServer, key: str, headers: Any = None, **body: Any) -> httpx.Response:
    return httpx.post(
        server.url + PATH,
        json={"prompt": "x", "max_tokens": 1, **body},
        headers={"Authorization": f"Bearer {key}", **(headers or {})},
    )


def metrics(server: RunningServer, key: str) -> str:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.get(f"{server.admin_url}/metrics", headers=headers).text


def wait_for(server: RunningServer, key: str, status: int) -> httpx.Response:
    deadline = time.monotonic() + 60
    while (response := ask(server, key)).status_code != status:
        assert time.monotonic() < deadline, (response.status_code, server.log)
        time.sleep(0.05)
    return response


def test_tenants_come_change_and_go_while_streams_run(launch: Any, path: Path) -> None:
    alice = new_key(path, "add", "alice")
    root = new_key(path, "add", "root", "--admin")
    server = launch(server={"tenants_file": str(path)}, step_s=0.1).wait_ready(alice)
    assert ask(server, "nonsense").status_code == 401
    headers = {"Authorization": f"Bearer {alice}"}
    body = {"prompt": "x", "max_tokens": 2000, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", server.url + PATH, json=body, headers=headers, timeout=300) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        bob = new_key(path, "add", "bob")
        wait_for(server, bob, 200)
        fresh = new_key(path, "rotate", "alice")
        wait_for(server, fresh, 200)
        assert ask(server, alice).status_code == 401
        assert tenants(path, "disable", "alice").returncode == 0
        assert wait_for(server, fresh, 403).json()["error"]["code"] == "tenant_disabled"
        assert ask(server, bob).status_code == 200
        # Under way before all of this, and not over.
        for _ in range(20):
            next(lines)
        assert re.search(r"num_requests_running\{.*\} 1\.0", metrics(server, root))
    tenants(path, "enable", "alice")
    wait_for(server, fresh, 200)
    assert alice not in server.log and bob not in server.log
    assert server.stop() == 0, server.log


def test_a_broken_file_is_said_once_and_changes_nothing(launch: Any, path: Path) -> None:
    alice = new_key(path, "add", "alice")
    server = launch(server={"tenants_file": str(path)}).wait_ready(alice)
    good = path.read_text()
    replace_text(path, good.replace("keys:", "kyes:"))
    deadline = time.monotonic() + 60
    while "kyes: is not known here" not in server.log:
        assert time.monotonic() < deadline, server.log
        time.sleep(0.05)
    time.sleep(2.5)
    assert server.log.count("the tenants stay as they were") == 1
    assert "Traceback" not in server.log
    assert ask(server, alice).status_code == 200
    replace_text(path, good)
    server.process.send_signal(signal.SIGHUP)
    while "again: 1 tenants" not in server.log:
        assert time.monotonic() < deadline, server.log
        time.sleep(0.02)
    assert server.process.poll() is None
    assert ask(server, alice).status_code == 200


def keys(path: Path, *names: str) -> list[str]:
    path.unlink(missing_ok=True)
    made = []
    for name in names:
        append_key(path, key_for(f"secret-of-{name}", name))
        made.append(f"secret-of-{name}")
    return made


def test_a_revoked_key_of_the_keys_file_is_refused_without_a_restart(
    launch: Any, tmp_path: Path
) -> None:
    path = tmp_path / "keys.txt"
    alice, bob = keys(path, "alice", "bob")
    server = launch(server={"api_keys_file": str(path)}).wait_ready(alice)
    assert ask(server, bob).status_code == 200
    _, carol = keys(path, "alice", "carol")
    wait_for(server, bob, 401)
    assert ask(server, alice).status_code == ask(server, carol).status_code == 200
    replace_text(path, "a key in the clear")
    deadline = time.monotonic() + 60
    while "the keys stay as they were" not in server.log:
        assert time.monotonic() < deadline, server.log
        time.sleep(0.05)
    assert ask(server, alice).status_code == 200
    assert "in the clear" not in server.log
    keys(path, "carol")
    server.process.send_signal(signal.SIGHUP)
    wait_for(server, alice, 401)
    assert ask(server, carol).status_code == 200
    assert server.stop() == 0, server.log


def test_sighup_without_a_file_changes_nothing(launch: Any) -> None:
    server = launch().wait_ready()
    server.process.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    assert server.process.poll() is None
    assert httpx.post(server.url + PATH, json={"prompt": "x"}).status_code == 200
    assert server.stop() == 0, server.log


def test_headers_of_a_gateway_over_a_socket(launch: Any, path: Path) -> None:
    gateway = new_key(path, "add", "gateway")
    new_key(path, "add", "bob", "--quota", "requests_per_minute=1")
    for trusted, expected in (("10.0.0.0/8", ""), ("127.0.0.0/8", "1")):
        settings = {"tenants_file": str(path), "trusted_proxy": [trusted]}
        server = launch(server=settings).wait_ready(gateway)
        headers = {"x-gateway-inference-fairness-id": "bob", "X-Forwarded-For": "10.0.0.1"}
        response = ask(server, gateway, headers)
        assert response.status_code == 200
        # Only bob has limits: whose request it was can be seen by them.
        assert response.headers.get("x-ratelimit-limit-requests", "") == expected
        assert ("is no --trusted-proxy" in server.log) == (not expected)
        assert ask(server, gateway, headers).status_code == (429 if expected else 200)
        server.stop()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--tenants-file", "{path}"), "there is no tenants file"),
        (("--tenants-file", "{wrong}"), "line 1: tenant: is not known here"),
        (("--tenants-file",), "requires an argument"),
        (("--trusted-proxy", "gateway.local"), "trusted_proxy must be an address"),
        (("--tenant-file", "{path}"), "No such option"),
    ],
)
def test_a_wrong_flag_or_file_ends_with_one_error_line(
    path: Path, flags: tuple[str, ...], says: str
) -> None:
    wrong = path.with_name("wrong.yaml")
    wrong.write_text("tenant: {alice: {}}\n")
    given = [flag.format(path=path, wrong=wrong) for flag in flags]
    command = [sys.executable, "-m", "headway", "serve", "missing.gguf"]
    result = subprocess.run(
        [*command, "--port", str(free_port()), *given],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert result.returncode == 2
    assert says in result.stderr
    assert "Traceback" not in result.stderr
