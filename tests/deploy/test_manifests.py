"""The Kubernetes manifests: arguments that the commands accept, and names that fit together.

With kubectl they are tested as kustomize renders them; without, those that have no patches.
"""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from headway.cli.app import make_app
from headway.fleet.manage.spec import read_spec

KUBERNETES = Path(__file__).parents[2] / "deploy/kubernetes"
RUNNERS = {
    "engine": "headway.build_fleet.run_engine",
    "frontend": "headway.build_fleet.run_frontend",
    "serve": "headway.cli.quick_serve.serve",
}
WORKLOADS = {
    "base": ["headway-server"],
    "fleet": ["headway-engine", "headway-frontend"],
    "llm-d": ["headway-server"],
    "one-node": ["headway-server"],
    "production": ["headway-engine", "headway-frontend"],
}
OVERLAYS = [*WORKLOADS, "ray"]
Object = dict[str, Any]


@cache
def rendered(folder: str) -> list[Object]:
    """The objects of a folder, with its patches."""
    if shutil.which("kubectl"):
        command = ["kubectl", "kustomize", str(KUBERNETES / folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        return list(yaml.safe_load_all(done.stdout))
    return [
        one for path in files(KUBERNETES / folder) for one in yaml.safe_load_all(path.read_text())
    ]


def files(folder: Path) -> list[Path]:
    """The files that a kustomization without patches names."""
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    if "patches" in kustomization or "configMapGenerator" in kustomization:
        pytest.skip("patches need kubectl")
    found: list[Path] = []
    for name in (*kustomization.get("resources", ()), *kustomization.get("components", ())):
        path = folder / name
        found += files(path) if path.is_dir() else [path]
    return found


def find(folder: str, kind: str, name: str) -> Object:
    [found] = [
        one for one in rendered(folder) if (one["kind"], one["metadata"]["name"]) == (kind, name)
    ]
    return found


@pytest.fixture(params=[(folder, name) for folder in WORKLOADS for name in WORKLOADS[folder]])
def spec(request) -> Object:
    folder, name = request.param
    return find(folder, "StatefulSet" if name == "headway-engine" else "Deployment", name)["spec"]


def container(spec: Object) -> Object:
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


def test_every_folder_is_tested() -> None:
    found = {path.parent.name for path in KUBERNETES.glob("*/kustomization.yaml")}
    assert found == {*OVERLAYS, "monitoring", "scaling"}


@pytest.mark.parametrize("folder", WORKLOADS)
def test_no_workload_is_left_out(folder: str) -> None:
    names = [one["metadata"]["name"] for one in rendered(folder) if "template" in one["spec"]]
    assert sorted(names) == WORKLOADS[folder]


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
    values = [value.removeprefix("sqlite://") for value in values]
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


@pytest.mark.parametrize("folder", WORKLOADS)
def test_every_service_policy_and_monitor_selects_something(folder: str) -> None:
    pods = [
        found["spec"]["template"]["metadata"]["labels"].items()
        for found in rendered(folder)
        if "template" in found["spec"]
    ]
    services = [
        one["metadata"]["labels"].items() for one in rendered(folder) if one["kind"] == "Service"
    ]
    for found in rendered(folder):
        selector = found["spec"].get("podSelector", found["spec"].get("selector"))
        if selector is None:
            continue
        wanted = selector.get("matchLabels", selector).items()
        places = services if found["kind"] == "ServiceMonitor" else pods
        assert any(wanted <= labels for labels in places), found["metadata"]["name"]


def test_frontends_look_for_the_service_of_the_engines() -> None:
    frontend = container(find("fleet", "Deployment", "headway-frontend")["spec"])
    service = find("fleet", "Service", "headway-engines")["spec"]
    assert service["clusterIP"] == "None"
    [port] = service["ports"]
    assert f"--discover=dns:headway-engines:{port['port']}" in frontend["args"]
    engines = find("fleet", "StatefulSet", "headway-engine")
    assert engines["spec"]["serviceName"] == "headway-engines"


def test_the_pool_sends_to_the_port_of_the_servers() -> None:
    server = container(find("llm-d", "Deployment", "headway-server")["spec"])
    ports = {port["name"]: port["containerPort"] for port in server["ports"]}
    pool = find("llm-d", "InferencePool", "headway")["spec"]
    assert pool["targetPorts"] == [{"number": ports["http"]}]


def test_prometheus_scrapes_the_admin_port_with_a_key() -> None:
    frontend = container(find("production", "Deployment", "headway-frontend")["spec"])
    [port] = find("production", "Service", "headway-metrics")["spec"]["ports"]
    ports = {one["name"]: one["containerPort"] for one in frontend["ports"]}
    assert port["port"] == ports[port["targetPort"]]
    [endpoint] = find("production", "ServiceMonitor", "headway")["spec"]["endpoints"]
    assert endpoint["port"] == port["name"]
    assert endpoint["authorization"]["credentials"]["name"]


def test_the_engines_of_a_fleet_are_scaled_and_nothing_else_sets_their_number() -> None:
    scaled = find("production", "ScaledObject", "headway-engine")["spec"]
    target = find("production", scaled["scaleTargetRef"]["kind"], scaled["scaleTargetRef"]["name"])
    assert "replicas" not in target["spec"]
    assert scaled["minReplicaCount"] <= scaled["fallback"]["replicas"] <= scaled["maxReplicaCount"]


def test_the_fleet_on_ray_is_one_that_the_manager_accepts(tmp_path: Path) -> None:
    text = (KUBERNETES / "ray/fleet.yaml").read_text()
    path = tmp_path / "fleet.yaml"
    path.write_text(text.replace("POD_IP", "10.0.0.1"))
    [pool] = read_spec(path).pools
    objects = {one["kind"]: one for one in yaml.safe_load_all(ray_manifest().read_text())}
    spec = objects["RayService"]["spec"]
    [workers] = spec["rayClusterConfig"]["workerGroupSpecs"]
    [port] = objects["Service"]["spec"]["ports"]
    assert port["targetPort"] == pool.frontends.port
    assert pool.frontends.count == workers["replicas"]
    [worker] = workers["template"]["spec"]["containers"]
    cpus = pool.engines.cpus + pool.frontends.cpus
    assert cpus <= int(worker["resources"]["limits"]["cpu"])
    mounts = {mount["mountPath"] for mount in worker["volumeMounts"]}
    tenants = str(pool.frontends.settings["tenants_file"])
    assert {str(Path(pool.model).parent), str(Path(tenants).parent)} <= mounts


def test_the_application_of_ray_is_there() -> None:
    objects = {one["kind"]: one for one in yaml.safe_load_all(ray_manifest().read_text())}
    [application] = yaml.safe_load(objects["RayService"]["spec"]["serveConfigV2"])["applications"]
    module, _, name = application["import_path"].partition(":")
    source = KUBERNETES.parents[1] / "src" / f"{module.replace('.', '/')}.py"
    assert f"def {name}(" in source.read_text()
    assert f"class {application['deployments'][0]['name']}" in source.read_text()
    head = objects["RayService"]["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]
    mounts = {mount["mountPath"] for mount in head["containers"][0]["volumeMounts"]}
    assert str(Path(application["args"]["file"]).parent) in mounts


def ray_manifest() -> Path:
    return KUBERNETES / "ray/rayservice.yaml"
