"""Rules, dashboard and runbook name metrics, causes and alerts that exist."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import yaml

from headway.core.causes import WaitCause
from headway.core.request import FinishReason
from headway.observe import Metrics
from tests.conftest import ROOT
from tests.support.rows import make_writer

DEPLOY = ROOT / "deploy"
RULES = yaml.safe_load((DEPLOY / "prometheus/rules.yml").read_text())
PANELS = yaml.safe_load((DEPLOY / "grafana/panels.yml").read_text())
WORD = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum"), "gauge": ("",)}


def rules() -> list[dict[str, Any]]:
    return [rule for group in RULES["groups"] for rule in group["rules"]]


def alerts() -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for rule in rules() if "alert" in rule}


def queries() -> Iterator[tuple[str, str]]:
    """Every query, with the place where it is."""
    for rule in rules():
        yield rule.get("record") or rule["alert"], rule["expr"]
    for row in PANELS["rows"]:
        for panel in row["panels"]:
            for query in panel["queries"]:
                yield panel["title"], query["expr"]
    scaled = DEPLOY / "kubernetes/scaling/scaled-object.yaml"
    for trigger in yaml.safe_load(scaled.read_text())["spec"]["triggers"]:
        yield "the ScaledObject", trigger["metadata"]["query"]


def names_in(expr: str) -> set[str]:
    words = WORD.findall(re.sub(r'"[^"]*"', "", expr))
    return {word for word in words if "headway_" in word or word.startswith("vllm:")}


@pytest.fixture(scope="module")
def known(tmp_path_factory) -> set[str]:
    """The names of all series that a server, or a frontend of a fleet, may export."""
    metrics = Metrics("m")
    metrics.watch_need(lambda: 0.0)
    folder = tmp_path_factory.mktemp("ledger")
    metrics.watch_ledger(make_writer(f"sqlite://{folder}/ledger.db", folder / "spool"))
    families = list(metrics.registry.collect())
    return {family.name + suffix for family in families for suffix in SUFFIXES[family.type]}


def test_every_metric_that_is_asked_for_exists(known: set[str]) -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    found = {name: place for place, expr in queries() for name in names_in(expr)}
    assert len(found) > 40
    assert {name: place for name, place in found.items() if name not in known | recorded} == {}


def test_the_names_of_the_registry_are_those_of_a_scrape(known: set[str], fake_server) -> None:
    """A frontend alone has the need of engines, and a server with a ledger its rows."""
    text = httpx.get(f"{fake_server.admin_url}/metrics").text
    typed = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    created = {name for name in typed if name.endswith("_created")}
    names = {
        name + suffix
        for name, kind in typed.items()
        if name not in created
        for suffix in (SUFFIXES[kind] if kind != "counter" else ("",))
    }
    assert names <= known
    absent = {name for name in known - names if not name.startswith("headway_ledger")}
    assert absent == {"headway_fleet_desired_replicas"}


def test_values_of_labels_exist() -> None:
    text = " ".join(expr for _, expr in queries())
    causes = re.findall(r'cause="(\w+)"', text)
    assert causes
    assert set(causes) <= {str(cause) for cause in WaitCause}
    [reasons] = set(re.findall(r'finished_reason=~"([\w|]+)"', text))
    assert set(reasons.split("|")) <= {str(reason) for reason in FinishReason}
    refusals = set("|".join(re.findall(r'[{,]reason=~?"([\w|]+)"', text)).split("|"))
    errors = (ROOT / "src/headway/server/http/errors.py").read_text()
    assert all(f'return "{reason}"' in errors for reason in refusals)


def test_every_alert_has_a_section_in_the_runbook() -> None:
    text = (ROOT / "docs/runbook.md").read_text()
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    assert sections.keys() == alerts().keys()
    for name, section in sections.items():
        assert "**Means:**" in section, name
        assert re.search(r"\*\*(Look and do|Do):\*\*", section), name


def test_every_alert_names_its_section_and_has_a_story() -> None:
    stories = (DEPLOY / "prometheus/rules_test.yml").read_text()
    for name, rule in alerts().items():
        assert rule["annotations"]["runbook"] == f"docs/runbook.md#{name.lower()}"
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert f'alertname="{name}"' in stories, name


def test_files_that_are_made_of_others_are_current() -> None:
    subprocess.run([sys.executable, DEPLOY / "generate.py", "--check"], check=True, timeout=60)
