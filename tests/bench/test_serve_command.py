"""`headway bench serve` as a person meets it."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.support.servers import RunningServer
from headway.bench.load.options import LoadOptions, plan_of
from headway.errors import ConfigError
from headway.workload import Replay
from tests.conftest import ROOT

COMMAND = [sys.executable, "-m", "headway", "bench", "serve"]
SMALL = ("--vocab", "100,250", "--prompt-tokens", "uniform:4,16", "--output-tokens", "fixed:5")


def bench(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *args], capture_output=True, text=True, check=False, cwd=ROOT, timeout=120
    )


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("http://127.0.0.1:1",), "cannot reach http://127.0.0.1:1/v1/models: connection refused"),
        (("http://127.0.0.1:1", "--model", "m"), "cannot reach http://127.0.0.1:1: connection"),
        (("127.0.0.1:8000",), "is not a URL; accepted: http://HOST:PORT"),
        (("http://127.0.0.1:1", "--arrivals", "poisson"), "accepted: poisson:RATE"),
        (("http://127.0.0.1:1", "--sweep", "fast"), "rates per second such as 0.5,1,2"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(args: tuple[str, ...], said: str):
    result = bench(*args)
    assert result.returncode == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"prompt_tokens": "long"}, "fixed:TOKENS"),
        ({"goodput": "itl=1"}, "ttft=SECONDS"),
        ({"num_requests": 0}, "--num-requests must be at least 1"),
        ({"max_concurrency": 0}, "--max-concurrency must be at least 1"),
        ({"warmup": -1}, "--warmup must be at least 0"),
        ({"duration": 0.0}, "--duration must be above 0"),
        ({"arrivals": "closed:2", "rate": 3.0}, "closed loop has no rate"),
        ({"length_scale": 0.5}, "--length-scale needs --trace"),
        ({"trace": Path("t.csv"), "arrivals": "closed:2"}, "--arrivals excludes --trace"),
        ({"trace": Path("t.csv"), "rate": 1.0, "time_scale": 2.0}, "exclude each other"),
        ({"trace": Path("missing.csv")}, "cannot read missing.csv"),
    ],
)
def test_options_that_make_no_plan(given: dict[str, object], said: str):
    with pytest.raises(ConfigError, match=said):
        plan_of(LoadOptions(**given))  # pyright: ignore[reportArgumentType]


def test_a_trace_at_a_rate(tmp_path: Path):
    file = tmp_path / "t.csv"
    file.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00,40,10\n"
        "2023-11-16 18:00:10,400,100\n"
    )
    options = LoadOptions(trace=file, rate=2.0, length_scale=0.5, max_prompt_tokens=64)
    workload = plan_of(options).workload
    assert isinstance(workload, Replay)
    items = list(workload.items(0))
    assert [len(item.prompt_token_ids) for item in items] == [20, 64]
    assert [item.at for item in items] == pytest.approx([0.0, 1.0])


def test_a_run(fake_server: RunningServer, tmp_path: Path):
    files = {name: tmp_path / f"out.{name}" for name in ("json", "csv", "plot")}
    flags = [part for name, path in files.items() for part in (f"--{name}", str(path))]
    result = bench(
        fake_server.url, *SMALL, "--arrivals", "gamma:40,cv=2", "--num-requests", "30",
        "--tenants", "3", "--warmup", "2", "--goodput", "ttft=20,e2e=50", "--api-key", "sesame",
        *flags,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "30 completed" in result.stdout
    assert "goodput: 100.0% of the requests" in result.stdout
    assert "time to first token" in result.stdout
    assert "of a core" in result.stdout
    assert "steal " in result.stdout
    assert result.stderr == ""
    text = files["json"].read_text()
    document = json.loads(text)
    assert document["model"] == "fake"
    assert "sesame" not in text
    [run] = document["runs"]
    assert "steal" in run
    assert document["options"]["temperature"] == 0.0
    assert run["summary"]["num_output_tokens"] == 150
    assert sum(one["num_requests"] for one in run["tenants"].values()) == 30
    with files["csv"].open() as file:
        assert len(list(csv.DictReader(file))) == 30
    assert files["plot"].read_bytes().startswith(b"\x89PNG")


def test_a_sweep(fake_server: RunningServer, tmp_path: Path):
    report, picture = tmp_path / "out.json", tmp_path / "out.png"
    limits = ("--num-requests", "10", "--sweep", "20,40")
    result = bench(fake_server.url, *SMALL, *limits, "--json", str(report), "--plot", str(picture))
    assert result.returncode == 0, result.stderr
    assert "knee" in result.stdout
    document = json.loads(report.read_text())
    assert [run["rate"] for run in document["runs"]] == [20, 40]
    assert set(document["knee"]) == {"rate", "why"}
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_closed_loop_cannot_be_swept(fake_server: RunningServer):
    result = bench(fake_server.url, "--arrivals", "closed:2", "--sweep", "auto")
    assert result.returncode == 2
    assert "a sweep needs arrivals with a rate" in result.stderr


def test_a_run_that_completes_nothing_is_an_error(fake_server: RunningServer):
    result = bench(
        fake_server.url, *SMALL, "--arrivals", "closed:2", "--num-requests", "4", "--model", "none"
    )
    assert result.returncode == 1
    assert "failed: 4 x HTTP 404" in result.stdout
    assert "no request was completed" in result.stderr


def test_ctrl_c_shows_what_there_is(fake_server: RunningServer):
    flags = ("--arrivals", "closed:2", "--duration", "60")
    while fake_server.metric("vllm:num_requests_running"):  # of the tests before
        time.sleep(0.05)
    # Whoever runs the tests in the background may ignore it, and children inherit that.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        [*COMMAND, fake_server.url, *SMALL, *flags],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    signal.signal(signal.SIGINT, handler)
    before = fake_server.metric("vllm:request_success_total")
    deadline = time.monotonic() + 30
    while fake_server.metric("vllm:request_success_total") < before + 4:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "completed" in out
    assert "interrupted" in err
    assert "Traceback" not in err
