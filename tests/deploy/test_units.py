"""The systemd unit and the container image, against the command that they run."""

from __future__ import annotations

import re
from configparser import ConfigParser
from pathlib import Path

import pytest
import yaml

from headway._version import __version__
from headway.cli.quick_serve import read_arguments
from headway.config import Config, load_config
from tests.conftest import ROOT

DEPLOY = ROOT / "deploy"


class Repeated(dict):
    """Options of a unit may come several times; the values are joined."""

    def __setitem__(self, key, value):
        if isinstance(value, list) and key in self:
            value = [*self[key], *value]
        super().__setitem__(key, value)


def read_unit(name: str):
    parser = ConfigParser(interpolation=None, strict=False, delimiters="=", dict_type=Repeated)
    parser.optionxform = str  # pyright: ignore
    parser.read_string((DEPLOY / "systemd" / name).read_text())
    return parser["Service"]


@pytest.fixture(scope="module")
def unit():
    return read_unit("headway.service")


@pytest.fixture(scope="module")
def settings() -> Config:
    return load_config({}, yaml.safe_load((DEPLOY / "systemd/headway.yaml").read_text()), {})


def test_the_unit_runs_a_command_that_there_is(unit) -> None:
    program, command, model, *flags = unit["ExecStart"].split()
    assert (program, command, model) == ("/opt/headway/bin/headway", "serve", "${MODEL}")
    assert "MODEL=" in unit["Environment"]
    assert flags == ["--config", "/etc/headway/headway.yaml"]
    path = str(DEPLOY / "systemd/headway.yaml")
    assert read_arguments(["m.gguf", "--config", path]) is not None


def test_the_unit_waits_for_streams_to_finish(unit, settings) -> None:
    assert unit["Type"] == "notify"
    assert int(unit["TimeoutStopSec"]) > settings.server.shutdown_timeout
    assert unit["KillMode"] == "mixed"


def test_the_unit_of_an_engine_is_as_locked_as_that_of_a_server(unit) -> None:
    engine = read_unit("headway-engine.service")
    program, command, model, *flags = engine["ExecStart"].split()
    assert (program, command, model) == ("/opt/headway/bin/headway", "engine", "${MODEL}")
    assert flags == ["--config", "/etc/headway/engine.yaml"]
    given = yaml.safe_load((DEPLOY / "systemd/engine.yaml").read_text())
    assert load_config({}, given, {}).listener.listen == "tcp://127.0.0.1:7600"
    own = {"ExecStart", "ExecReload", "TimeoutStopSec"}
    assert engine["Type"] == "notify"
    assert {k: v for k, v in unit.items() if k not in own} == {
        k: v for k, v in engine.items() if k not in own
    }


def test_the_settings_of_the_unit_listen_on_loopback_only(settings) -> None:
    assert settings.server.host == settings.server.admin_host == "127.0.0.1"


def test_folders_of_the_unit_are_those_that_the_server_writes(unit) -> None:
    assert "XDG_STATE_HOME=%S" in unit["Environment"]
    assert "XDG_CACHE_HOME=%C" in unit["Environment"]
    assert unit["StateDirectory"] == unit["CacheDirectory"] == "headway"
    assert unit["ProtectSystem"] == "strict"


def test_the_image_runs_without_root_and_knows_its_health() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    runtime = text.rsplit("FROM ", 1)[1]
    assert "USER 10001:10001" in runtime
    assert "/health/live" in runtime
    assert "STOPSIGNAL SIGTERM" in runtime
    assert 'ENTRYPOINT ["headway"]' in runtime
    assert "g++" not in runtime


def test_the_image_has_every_file_that_its_build_needs() -> None:
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", (DEPLOY / "Dockerfile").read_text(), re.M)
    names = {name for line in copied for name in line.split()}
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert names == {line.removeprefix("!") for line in ignored if line.startswith("!")}
    assert all((ROOT / name).exists() for name in names)


def test_the_composed_server_may_write_only_where_it_must() -> None:
    server = yaml.safe_load((DEPLOY / "compose.yml").read_text())["services"]["headway"]
    assert server["read_only"]
    assert server["cap_drop"] == ["ALL"]
    config = read_arguments(server["command"][1:])
    assert config is not None
    grace_s = int(server["stop_grace_period"].removesuffix("s"))
    assert grace_s > config.server.shutdown_timeout + 10
    assert all(port.startswith("127.0.0.1:") for port in server["ports"])


def test_every_place_names_the_same_version() -> None:
    for path in (*DEPLOY.rglob("*.yaml"), DEPLOY / "compose.yml", DEPLOY / "Dockerfile"):
        for found in re.findall(
            r'(?:newTag: |headway:|image\.version=)"?(\d[\w.]*)', path.read_text()
        ):
            assert found == __version__, path


def test_the_rules_of_the_compose_file_are_mounted() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yml").read_text())
    mounted = [one.split(":") for one in compose["services"]["prometheus"]["volumes"]]
    for source, target, *_ in mounted[:2]:
        assert (DEPLOY / source).is_file()
        assert Path(target).parent == Path("/etc/prometheus")
    config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    assert config["rule_files"] == ["rules.yml"]
    [scrape] = config["scrape_configs"]
    assert scrape["static_configs"][0]["targets"] == ["headway:8001"]
