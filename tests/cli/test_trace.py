"""`headway trace` as a person meets it, against a real server."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner, Result

from benchmarks.support.servers import Launcher, RunningServer
from headway.cli.app import make_app
from headway.cli.observe.trace import read_duration
from headway.errors import ConfigError, HeadwayError
from tests.observe.test_chrome import tracks_of


def headway(*arguments: str, **options: str) -> Result:
    return CliRunner().invoke(make_app(["trace"]), ["trace", *arguments], env=options)


def test_a_trace_of_a_real_server_adds_up(fake_server: RunningServer, tmp_path: Path) -> None:
    prompt = "a secret prompt"
    body = {"prompt": prompt, "max_tokens": 20, "ignore_eos": True, "n": 2}
    with httpx.Client(base_url=fake_server.url, timeout=30) as client:
        ids = [client.post("/v1/completions", json=body).json()["id"] for _ in range(3)]
        accounts = [client.get(f"/v1/requests/{one}/explanation").json() for one in ids]
    path = tmp_path / "trace.json"
    path.write_text("of the day before")
    result = headway("-o", str(path), "--since", "1m", "--url", fake_server.admin_url)
    assert result.exit_code == 0, result.output
    assert f"{path}: " in result.stdout and "ui.perfetto.dev" in result.stdout
    assert list(tmp_path.iterdir()) == [path]
    trace = json.loads(path.read_text())
    tracks = tracks_of(trace)
    for account in accounts:
        own = {
            name: found
            for (group, name), found in tracks.items()
            if name.split()[0] == account["id"]
        }
        assert list(own) == [account["id"], f"{account['id']} sample 2"]
        whole, *pieces = own[account["id"]]
        end = max(part[0]["ts"] + part[0]["dur"] for part in own.values())
        assert end - whole["ts"] == pytest.approx(account["duration_s"] * 1e6, abs=2)
        run = [one for one in pieces if one["name"] in ("queue", "prefill", "decode")]
        assert sum(one["dur"] for one in run) == pytest.approx(whole["dur"], abs=3)
        waits = [one for part in own.values() for one in part if one.get("cat") == "queue"]
        waited_s = sum(one["args"]["seconds"] for one in waits)
        assert waited_s == pytest.approx(account.get("queue_s", 0.0), abs=1e-9)
        assert whole["args"]["num_output_tokens"] == 40
    steps = [
        one for (group, _), found in tracks.items() if group == "engine steps" for one in found
    ]
    num_tokens = sum(one["args"]["tokens"] for one in steps)
    assert num_tokens >= sum(one["num_output_tokens"] for one in accounts)
    assert prompt not in path.read_text()


def test_times() -> None:
    assert [read_duration(text) for text in ("30s", "5m", "1.5h", " 24h ")] == [
        30.0,
        300.0,
        5400.0,
        86_400.0,
    ]


@pytest.mark.parametrize(
    "text", ["", "5", "m", "-5m", "0s", "5 minutes", "25h", "1e3s", "nan", "5d"]
)
def test_a_time_that_is_none_is_said(text: str) -> None:
    with pytest.raises(ConfigError, match="a time such as 30s, 5m or 1h"):
        read_duration(text)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--since", "soon"], "a time such as 30s, 5m or 1h"),
        (["--url", "ftp://x"], "must start with http"),
        (["--url", "http://127.0.0.1:1"], "address of the admin listener"),
        (["--url", "http://[x"], "address of the admin listener"),
        (["-o", "/no/such/folder/trace.json"], "choose another file with --output"),
        (["-o", "/"], "is not a file"),
        (["-o", "/dev/null"], "is not a file"),
    ],
)
def test_what_is_wrong_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = headway(*arguments)
    assert isinstance(result.exception, HeadwayError), result.output
    assert words in str(result.exception)
    assert not list(tmp_path.iterdir()), "no file of a trace that failed is left"


def test_keys_and_listeners_that_are_wrong(launch: Launcher, tmp_path: Path) -> None:
    server = launch(server={"api_key": ["key-of-one", "key-of-two"]}).wait_ready("key-of-one")
    output = ("-o", str(tmp_path / "trace.json"))
    admin = ("--url", server.admin_url, *output)
    assert "HEADWAY_API_KEY" in str(headway(*admin).exception)
    assert "admin's key" in str(headway(*admin, "--api-key", "key-of-one").exception)
    key = {"HEADWAY_API_KEY": "key-of-two"}
    assert "by default port 8001" in str(headway("--url", server.url, *output, **key).exception)
    assert not (tmp_path / "trace.json").exists()


HEAD = b'{"type":"head","version":1,"headway":"0.2.0","model":"m","now":1.0,"since_s":1.0}\n'
NOTHING = b'{"type":"end","num_steps":0,"num_requests":0,"is_complete":true}\n'


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"<html>", "not a Headway server"),
        (b'{"type":"end","num_steps":1,"num_requests":1,"is_complete":true}\n', "not a Headway"),
        (HEAD.replace(b":1,", b":2,"), "it has headway 0.2.0"),
        (HEAD, "ended early"),
        (HEAD + NOTHING, "recorded nothing in the last 5m; send a request"),
        (HEAD + b'{"type":"request"}\n', "not a Headway server"),
    ],
)
def test_another_server_is_no_traceback(tmp_path: Path, content: bytes, words: str) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        result = headway(
            "--url", f"http://127.0.0.1:{server.server_port}", "-o", str(tmp_path / "t.json")
        )
        thread.join()
    assert isinstance(result.exception, HeadwayError)
    assert words in str(result.exception)
    assert not list(tmp_path.iterdir())
