"""fleet.yaml: what is refused, by name, and what follows from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from headway.errors import ConfigError
from headway.fleet.manage.members import engine_flags, frontend_flags
from headway.fleet.manage.spec import MAX_FILE_BYTES, FleetSpec, flags_of, read_spec

GOOD: dict[str, Any] = {
    "name": "demo",
    "cluster_key_file": "demo.key",
    "pools": [{"name": "small", "model": "m.gguf"}],
}


def read(folder: Path, **changes: Any) -> FleetSpec:
    path = folder / "fleet.yaml"
    path.write_text(yaml.safe_dump({**GOOD, **changes}, sort_keys=False))
    return read_spec(path)


def pool(**changes: Any) -> list[dict[str, Any]]:
    return [{"name": "small", "model": "m.gguf", **changes}]


def test_the_smallest_file_is_one_engine_and_one_frontend_on_loopback(tmp_path: Path) -> None:
    spec = read(tmp_path)
    assert spec.ray is None
    assert spec.cluster_key_file == str(tmp_path / "demo.key")
    only = spec.pools[0]
    assert (only.engines.min, only.engines.most) == (1, 1)
    assert (only.frontends.count, only.frontends.host, only.frontends.port) == (
        1,
        "127.0.0.1",
        8000,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"colour": 1}, "colour"),
        ({"name": "Demo Fleet"}, "a-z"),
        ({"name": "../etc"}, "a-z"),
        ({"pools": []}, "length >= 1"),
        ({"pools": pool(engins={})}, "engins"),
        ({"pools": pool(engines={"min": 3, "max": 2})}, r"max \(2\) is below min \(3\)"),
        ({"pools": pool(engines={"min": -1})}, ">= 0"),
        ({"pools": pool(engines={"min": 3}), "max_engines": 2}, r"below the sum of min \(3\)"),
        ({"pools": pool(engines={"max": 100000})}, "<= 256"),
        ({"pools": pool(engines={"settings": {"colour": 1}})}, "engines.settings has no colour"),
        ({"pools": pool(engines={"settings": {"port": 1}})}, "engines.settings has no port"),
        ({"pools": pool(engines={"settings": {"listen": "tcp://*:1"}})}, "has no listen"),
        ({"pools": pool(engines={"settings": {"max_num_seqs": 0}})}, "max_num_seqs must be"),
        ({"pools": pool(frontends={"settings": {"failover": "x"}})}, "failover must be one of"),
        ({"pools": pool(frontends={"port": 70000})}, "<= 65535"),
        ({"pools": pool(frontends={"port": 0})}, "port of their own"),
        ({"pools": [*pool(), {"name": "small", "model": "n"}]}, "same name"),
        ({"pools": [*pool(), {"name": "other", "model": "n"}]}, "port of their own"),
        ({"ray": {}}, "address"),
        ({"ray": {"address": "auto"}}, "HOST:PORT"),
        ({"manager": "tcp://*:7700"}, "not \\*"),
        ({"manager": "ipc:///x"}, "tcp://HOST:PORT"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read(tmp_path, **changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: [", "is not YAML"),
        (b"- 1", "Expected `object`"),
        (b"\xff\xfe\x00", "is not YAML"),
        (b"x" * (MAX_FILE_BYTES + 1), "larger than"),
        (b"!!python/object/apply:os.system ['true']", "is not YAML"),
    ],
)
def test_a_file_that_is_no_fleet_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_spec(path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_spec(tmp_path / "none.yaml")


def test_settings_become_flags(tmp_path: Path) -> None:
    given = {"kv_cache_memory_bytes": "64M", "standby": True, "deterministic": False}
    flags = ["--kv-cache-memory-bytes=64M", "--standby", "--no-deterministic"]
    assert flags_of(given) == flags
    assert flags_of({"api_key": ["a", "b"], "revision": None}) == ["--api-key=a", "--api-key=b"]
    spec = read(tmp_path, pools=pool(engines={"cpus": 2, "settings": given}))
    assert engine_flags(spec.pools[0]) == ["--lease-s=600.0", "--num-threads=2", *flags]
    words = frontend_flags(spec, spec.pools[0], "frontend-2")
    assert words[:2] == ["--discover", f"fleet:{spec.manager}/small/frontend-2"]
    assert "--reuse-port" in words
