"""`headway simulate` and `headway plan` as a person meets them."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from headway.cli import main
from headway.cli.capacity.simulate import SimulateOptions
from headway.errors import ConfigError
from headway.record.reader import find_recordings
from headway.sim.profile.fitting import profile_of
from headway.sim.profile.machine import write_profile
from headway.sim.recording.observed import read_observed
from tests.cli.test_cli import headway
from tests.sim.support import make_profile

LOAD = ("--rate", "12", "--prompt-tokens", "uniform:20,60", "--output-tokens", "uniform:5,15")


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("profile") / "machine.json"
    write_profile(path, make_profile(drift=0.05))
    return str(path)


def test_simulate_prints_a_table_with_ranges_and_a_verdict(profile: str, tmp_path: Path):
    page, document = tmp_path / "page.html", tmp_path / "figures.json"
    done = headway(
        "simulate", profile, *LOAD, "--engines", "2", "--runs", "3", "--num-requests", "60",
        "--tenants", "2", "--set", "policy=fcfs", "--html", str(page), "--json", str(document),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "TTFT p99, ms" in done.stdout
    assert "verdict: stable" in done.stdout
    assert "tenant-1" in done.stdout
    assert "--max-queue-wait-s" not in done.stdout
    figures = json.loads(document.read_text())["figures"]
    ttft = figures["ttft_p50"]
    assert ttft["low"] <= ttft["median"] <= ttft["high"]
    html = page.read_text()
    assert "<svg" in html
    assert "http" not in html  # nothing from elsewhere


def test_replay_says_how_slow_the_steps_were_by_a_profile(profile: str, tmp_path: Path):
    path, own = find_recordings([Path("tests/record/data")])[0], tmp_path / "own.json"
    write_profile(own, profile_of(read_observed(path)))
    done = headway("replay", str(path), "--profile", str(own))
    assert done.returncode == 0, done.stderr
    found = re.search(r"steps took ([\d.]+) times as long as profiled", done.stdout)
    assert found is not None, done.stdout
    assert float(found[1]) == pytest.approx(1.0, abs=0.05)
    assert f"plan with --set slowness={found[1]}" in done.stdout
    assert "but the recording" not in done.stdout
    done = headway("replay", str(path), "--profile", profile)
    assert "but the recording is of SmolLM2-135M-Instruct.Q4_1.gguf, the profile" in done.stdout
    assert "plan with" not in done.stdout
    done = headway("replay", str(path), "--profile", "no-such.json")
    assert done.returncode == 2
    assert "no-such.json" in done.stderr


def test_simulate_says_that_a_server_refuses_requests_that_wait_so_long(profile: str):
    done = headway(
        "simulate", profile, *LOAD, "--rate", "2000", "--runs", "1", "--num-requests", "1500"
    )
    assert done.returncode == 0, done.stderr
    assert "p99 TTFT is above 10 s" in done.stdout
    assert "--max-queue-wait-s" in done.stdout


def test_simulate_says_what_an_autoscaled_fleet_costs(profile: str, tmp_path: Path):
    document = tmp_path / "figures.json"
    done = headway(
        "simulate", profile, "--prompt-tokens", "fixed:400", "--output-tokens", "fixed:4",
        "--arrivals", "diurnal:25,low=1,day=15", "--duration", "15", "--runs", "1",
        "--engines", "1..4", "--autoscale", "--frontends", "2", "--json", str(document),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "1..4 engines, 2 frontends" in done.stdout
    assert "engine minutes" in done.stdout
    engines = json.loads(document.read_text())["engines"]
    assert 1 < engines["most"]["median"] <= 4
    assert 0 < engines["cost_share"]["median"] < 100


def test_plan_says_how_many_engines(profile: str, tmp_path: Path):
    page, document = tmp_path / "page.html", tmp_path / "plan.json"
    done = headway(
        "plan", profile, *LOAD, "--rate", "90", "--ttft", "0.3", "--percentile", "95",
        "--runs", "1", "--num-requests", "100", "--price", "0.5",
        "--what-if", "max_num_seqs=4", "--what-if", "price=1,ttft=0.6",
        "--html", str(page), "--json", str(document),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "90 requests/s need" in done.stdout
    assert "runs of 100 requests" in done.stdout
    given, smaller, dearer = json.loads(document.read_text())["plans"]
    assert given["engines"] >= 2
    assert smaller["carried_requests_per_s"] < given["carried_requests_per_s"]
    assert given["price_per_million_output_tokens"] > 0
    assert dearer["goal"] == "p95 TTFT within 0.6 s"
    assert dearer["carried_requests_per_s"] >= given["carried_requests_per_s"]
    price = dearer["price_per_million_output_tokens"] / given["price_per_million_output_tokens"]
    assert price == pytest.approx(2.0, rel=0.01)
    assert "<svg" in page.read_text()


def test_predictions_by_datasheet_say_so(tmp_path: Path):
    document, page = tmp_path / "figures.json", tmp_path / "page.html"
    done = headway(
        "plan", "datasheet:h100/8B", *LOAD, "--ttft", "1", "--runs", "1", "--num-requests", "100",
        "--set", "max_num_seqs=8", "--json", str(document), "--html", str(page),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "datasheet, not measured" in done.stdout
    assert "datasheet, not measured" in page.read_text()
    found = json.loads(document.read_text())
    (warning,) = found["warnings"]
    assert "datasheet, not measured" in warning
    assert found["plans"][0]["settings"] == ["max_num_seqs=8"]
    assert "Set: max_num_seqs=8." in done.stdout
    assert "Set: max_num_seqs=8." in page.read_text()
    done = headway("simulate", "datasheet:h100/8B", *LOAD, "--runs", "1", "--num-requests", "20")
    assert done.returncode == 0, done.stderr
    assert "datasheet, not measured" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["simulate"], "a profile is needed"),
        (["simulate", "nowhere.json"], "cannot read nowhere.json"),
        (["simulate", "PROFILE", "--set", "colour=red"], "unknown setting 'colour'"),
        (["simulate", "PROFILE", "--html", "/nowhere/page.html"], "/nowhere is not a folder"),
        (["simulate", "--from", "nowhere"], "nowhere"),
        (["simulate", "--from", "x", "--rate", "5"], "--from excludes --rate"),
        (["simulate", "PROFILE", "--rule", "round-robin"], "--rule needs --engines above 1"),
        (["plan", "datasheet:abacus/8B", "--ttft", "1"], "no datasheet of GPU 'abacus'"),
        (["plan", "PROFILE", "--rate", "5"], "a target is needed"),
        (["plan", "PROFILE", "--ttft", "1", "--what-if", "colour=red"], "unknown setting"),
        (["plan", "PROFILE", "--ttft", "1", "--what-if", "rate=many"], "'many' is not a valid"),
        (["plan", "PROFILE", "--arrivals", "closed:4", "--ttft", "1"], "a rate"),
        (
            ["plan", "PROFILE", *LOAD, "--ttft", "0.001", "--runs", "1", "--num-requests", "100"],
            "cannot be",
        ),
        (["simulate", "PROFILE", "--kill-every", "0.5"], "none of 1 would be left"),
        (["simulate", "PROFILE", "--num-requests", "-1"], "at least 1 request"),
        (["simulate", "PROFILE", "--duration", "nan"], "a duration must be a number above 0"),
        (["simulate", "PROFILE", "--set", "num_blocks=0"], "num_blocks must be at least 1"),
        (
            [
                "simulate",
                "PROFILE",
                "--engines",
                "4000",
                "--frontends",
                "2",
                "--set",
                "max_num_seqs=64",
            ],
            "a router takes 65536 requests of a frontend: --frontends must be at least 5",
        ),
        (["plan", "PROFILE", "--ttft", "1", "--num-requests", "0"], "--num-requests"),
        (["plan", "PROFILE", "--ttft", "1", "--what-if", "price=0"], "--price must be above 0"),
        (["profile", "nowhere.gguf", "-o", "/nowhere/machine.json"], "/nowhere is not a folder"),
    ],
)
def test_a_mistake_is_named(
    profile: str,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """In this process: to start one for each mistake takes a second."""
    words = [profile if one == "PROFILE" else one for one in arguments]
    monkeypatch.setattr(sys, "argv", ["headway", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code not in (0, None)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engines": "2..8"}, "--autoscale needs a range"),
        ({"autoscale": True}, "--autoscale needs a range"),
        ({"engines": "many"}, "a number such as 4, or 2..8"),
        ({"frontends": 0}, "--frontends is 1 to 64"),
        ({"closed_loop": True}, "--closed-loop needs --from"),
    ],
)
def test_options_that_do_not_fit_together_are_named(options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        SimulateOptions(**options)


def test_an_empty_trace_is_named(profile: str, tmp_path: Path):
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n")
    done = headway("simulate", profile, "--trace", str(trace))
    assert done.returncode != 0
    assert str(trace) in done.stderr


def test_a_trace_is_simulated_to_its_end_and_planned_by_its_busiest_part(
    profile: str, tmp_path: Path
):
    trace = tmp_path / "trace.csv"
    seconds = [6.0 * number for number in range(120)]
    seconds += [720.0 + 0.05 * number for number in range(80)]
    rows = [f"2023-11-16 18:{int(at // 60):02d}:{at % 60:09.6f},40,10" for at in seconds]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    done = headway("simulate", profile, "--trace", str(trace), "--runs", "1")
    assert done.returncode == 0, done.stderr
    assert "1 run of 200 requests" in done.stdout
    assert "in the busiest 10 minutes" in done.stdout
    done = headway(
        "plan", profile, "--trace", str(trace), "--ttft", "1", "--runs", "1",
        "--num-requests", "100",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "The load varies" in done.stdout
