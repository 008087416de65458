"""The Kubernetes manifests: arguments that the commands accept, and names that fit together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from headway.cli.app import make_app

FOLDERS = sorted((Path(__file__).parents[2] / "deploy/kubernetes").glob("*/"))
RUNNERS = {
    "engine": "headway.build_fleet.run_engine",
    "frontend": "headway.build_fleet.run_frontend",
    "serve": "headway.cli.quick_serve.serve",
}


def objects(folder: Path) -> list[dict[str, Any]]:
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    return [
        found
        for name in kustomization["resources"]
        for found in yaml.safe_load_all((folder / name).read_text())
    ]


def workloads() -> Iterator[tuple[str, dict[str, Any]]]:
    for folder in FOLDERS:
        for found in objects(folder):
            if found["kind"] in ("StatefulSet", "Deployment"):
                yield f"{folder.name}/{found['metadata']['name']}", found["spec"]


WORKLOADS = dict(workloads())


@pytest.fixture(params=WORKLOADS)
def spec(request) -> dict[str, Any]:
    return WORKLOADS[request.param]


def container(spec: dict[str, Any]) -> dict[str, Any]:
    [only] = spec["template"]["spec"]["containers"]
    return only


@pytest.fixture
def config(spec, monkeypatch):
    """The settings that the command of a workload ends up with."""
    taken = []
    for name in RUNNERS.values():
        monkeypatch.setattr(name, lambda config, *_, **__: taken.append(config) or 0)
    args = container(spec)["args"]
    result = CliRunner().invoke(make_app(args), args)
    assert result.exit_code == 0, result.output
    [config] = taken
    return config


def test_the_manifests_are_there() -> None:
    assert set(WORKLOADS) == {
        "fleet/headway-engine",
        "fleet/headway-frontend",
        "llm-d/headway-server",
    }


def test_the_command_listens_on_the_ports_that_are_named(spec, config) -> None:
    ports = {port["name"]: port["containerPort"] for port in container(spec)["ports"]}
    if container(spec)["args"][0] == "engine":
        assert config.listener.listen == f"tcp://0.0.0.0:{ports['engine']}"
    else:
        assert (config.server.port, config.server.admin_port) == (ports["http"], ports["admin"])
        assert config.server.host == config.server.admin_host == "0.0.0.0"


def test_files_of_the_arguments_are_in_mounted_volumes(spec) -> None:
    pod = spec["template"]["spec"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container(spec)["volumeMounts"]}
    assert set(mounts.values()) == {volume["name"] for volume in pod["volumes"]}
    values = [arg.partition("=")[2] or arg for arg in container(spec)["args"]]
    files = [value for value in values if value.startswith("/")]
    assert files
    assert all(str(Path(file).parent) in mounts for file in files)


def test_a_pod_has_time_to_finish_its_streams(spec, config) -> None:
    pod = spec["template"]["spec"]
    if container(spec)["args"][0] == "engine":
        return  # its streams go on elsewhere
    pause_s = container(spec)["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] > pause_s + config.server.shutdown_timeout


def test_nothing_runs_as_root_or_writes_to_the_image(spec) -> None:
    pod = spec["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["automountServiceAccountToken"] is False
    locked = container(spec)["securityContext"]
    assert locked["readOnlyRootFilesystem"]
    assert locked["allowPrivilegeEscalation"] is False
    assert locked["capabilities"] == {"drop": ["ALL"]}


def test_selectors_match_the_pods(spec) -> None:
    labels = spec["template"]["metadata"]["labels"].items()
    assert spec["selector"]["matchLabels"].items() <= labels


def test_every_service_and_policy_selects_a_workload() -> None:
    for folder in FOLDERS:
        pods = [
            found["spec"]["template"]["metadata"]["labels"].items()
            for found in objects(folder)
            if "template" in found["spec"]
        ]
        for found in objects(folder):
            selector = found["spec"].get("podSelector", found["spec"].get("selector"))
            wanted = selector.get("matchLabels", selector).items()
            assert any(wanted <= labels for labels in pods), found["metadata"]["name"]


def test_frontends_look_for_the_service_of_the_engines() -> None:
    fleet = {(found["kind"], found["metadata"]["name"]): found for found in objects(FOLDERS[0])}
    frontend = container(fleet["Deployment", "headway-frontend"]["spec"])
    service = fleet["Service", "headway-engines"]["spec"]
    assert service["clusterIP"] == "None"
    [port] = service["ports"]
    assert f"--discover=dns:headway-engines:{port['port']}" in frontend["args"]
    assert fleet["StatefulSet", "headway-engine"]["spec"]["serviceName"] == "headway-engines"


def test_the_pool_sends_to_the_port_of_the_servers() -> None:
    found = {found["kind"]: found["spec"] for found in objects(FOLDERS[1])}
    ports = {
        port["name"]: port["containerPort"] for port in container(found["Deployment"])["ports"]
    }
    assert found["InferencePool"]["targetPorts"] == [{"number": ports["http"]}]
