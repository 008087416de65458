"""The Helm chart makes the objects that kustomize makes."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
import yaml

from tests.conftest import ROOT
from tests.deploy.test_manifests import Object, rendered

IS_FLEET = "fleet.enabled=true"
pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")


def charted(*values: str) -> list[Object]:
    command = [sys.executable, str(ROOT / "deploy/render_chart.py"), *values]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return list(yaml.safe_load_all(done.stdout))


def by_name(objects: list[Object]) -> dict[tuple[str, str], Object]:
    return {(one["kind"], one["metadata"]["name"]): one for one in objects}


@pytest.mark.parametrize(
    ("values", "folder"),
    [
        ((), "one-node"),
        ((IS_FLEET,), "fleet"),
        ((IS_FLEET, "scaling.enabled=true", "monitoring.enabled=true"), "production"),
    ],
)
def test_the_objects_are_those_of_kustomize(values: tuple[str, ...], folder: str) -> None:
    assert by_name(charted(*values)) == by_name(rendered(folder))


def test_values_reach_their_places() -> None:
    given = ("engines=5", "frontends=4")
    values = (IS_FLEET, *(f"fleet.{one}" for one in given), "model=/models/x", "cpu=7", "image=i:1")
    found = by_name(charted(*values, "memory=3Gi", "kvCacheMemory=1G", "modelsClaim=c"))
    engines = found["StatefulSet", "headway-engine"]["spec"]
    assert engines["replicas"] == 5
    assert found["Deployment", "headway-frontend"]["spec"]["replicas"] == 4
    [container] = engines["template"]["spec"]["containers"]
    assert container["image"] == "i:1"
    assert container["args"][1] == "/models/x"
    assert "--kv-cache-memory-bytes=1G" in container["args"]
    assert container["resources"]["requests"] == {"cpu": "7", "memory": "3Gi"}
    claims = [one.get("persistentVolumeClaim") for one in engines["template"]["spec"]["volumes"]]
    assert {"claimName": "c", "readOnly": True} in claims
