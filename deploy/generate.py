"""Makes the files below deploy/ that follow from others; `--check` fails where one is out of date.

grafana/panels.yml    ->  grafana/headway.json
prometheus/rules.yml  ->  kubernetes/monitoring/prometheus-rule.yaml
kubernetes/           ->  helm/headway/templates/
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml
from chart import templates

DEPLOY = Path(__file__).parent
WIDTH, HEIGHT, PER_ROW = 6, 8, 4
SOURCE = {"type": "prometheus", "uid": "${source}"}
MADE = "# Made of deploy/prometheus/rules.yml by `python deploy/generate.py`.\n"


def dashboard(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the dashboard of a list of rows."""
    panels: list[dict[str, Any]] = []
    top = 0
    for row in spec["rows"]:
        place = {"x": 0, "y": top, "w": 24, "h": 1}
        numbered = {"id": len(panels) + 1, "gridPos": place}
        panels.append({"type": "row", "title": row["title"], "collapsed": False, **numbered})
        top += 1
        for index, panel in enumerate(row["panels"]):
            line, column = divmod(index, PER_ROW)
            place = {"x": column * WIDTH, "y": top + line * HEIGHT, "w": WIDTH, "h": HEIGHT}
            panels.append(_panel(panel, len(panels) + 1, place))
        top += HEIGHT * -(-len(row["panels"]) // PER_ROW)
    return {
        "title": spec["title"],
        "uid": "headway",
        "tags": ["headway"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [_source_variable(), _model_variable()]},
        "panels": panels,
    }


def _panel(spec: dict[str, Any], number: int, place: dict[str, int]) -> dict[str, Any]:
    stacking = {"mode": "normal" if spec.get("stack") else "none"}
    custom = {"fillOpacity": 30 if spec.get("stack") else 0, "stacking": stacking}
    targets = [
        {
            "refId": chr(ord("A") + index),
            "expr": query["expr"],
            "legendFormat": query["legend"],
            "datasource": SOURCE,
        }
        for index, query in enumerate(spec["queries"])
    ]
    return {
        "type": "timeseries",
        "id": number,
        "title": spec["title"],
        "description": spec.get("about", ""),
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {
            "defaults": {"unit": spec.get("unit", "short"), "min": 0, "custom": custom},
            "overrides": [],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": targets,
    }


def _source_variable() -> dict[str, Any]:
    return {"name": "source", "label": "Source", "type": "datasource", "query": "prometheus"}


def _model_variable() -> dict[str, Any]:
    return {
        "name": "model",
        "label": "Model",
        "type": "query",
        "datasource": SOURCE,
        "query": "label_values(vllm:num_requests_running, model_name)",
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def prometheus_rule(rules: dict[str, Any]) -> dict[str, Any]:
    """Return the rules as an object of the Prometheus operator."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "headway", "labels": {"app.kubernetes.io/name": "headway"}},
        "spec": rules,
    }


def made_files() -> dict[Path, str]:
    """Return every file that is made, with its text."""
    panels = yaml.safe_load((DEPLOY / "grafana/panels.yml").read_text())
    rule = prometheus_rule(yaml.safe_load((DEPLOY / "prometheus/rules.yml").read_text()))
    charted = templates(DEPLOY / "kubernetes", rule)
    return {
        **{DEPLOY / "helm/headway/templates" / name: text for name, text in charted.items()},
        DEPLOY / "grafana/headway.json": json.dumps(dashboard(panels), indent=1) + "\n",
        DEPLOY / "kubernetes/monitoring/prometheus-rule.yaml": MADE
        + yaml.safe_dump(rule, sort_keys=False, width=100),
    }


def main() -> int:
    """Write the files, or compare them; return the exit code."""
    is_check = sys.argv[1:] == ["--check"]
    code = 0
    for path, text in made_files().items():
        if is_check and (not path.exists() or path.read_text() != text):
            print(f"{path} is out of date: run python deploy/generate.py", file=sys.stderr)
            code = 1
        elif not is_check:
            path.write_text(text)
    return code


if __name__ == "__main__":
    sys.exit(main())
