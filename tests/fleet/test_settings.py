"""Keys, addresses and discovery: what is refused, and what the error says to do."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import zmq.asyncio

from headway.clock import SystemClock
from headway.core.executor import Capacity
from headway.engine.process.messages import EngineInfo
from headway.errors import ConfigError
from headway.executors.weights.source_files import SourceFiles
from headway.fleet.engines.numerics import numerics_class, own_class, weights_digest
from headway.fleet.frontends.discovery import (
    DnsDiscovery,
    EngineSet,
    FileDiscovery,
    parse_discovery,
)
from headway.fleet.frontends.link import LinkParts, NetworkLink
from headway.fleet.network.cluster_key import ClusterKey, FrontendKeys, write_cluster_key
from headway.fleet.network.endpoints import Endpoint

SECRET = "0123456789abcdef" * 2


def test_a_new_key_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "key"
    write_cluster_key(path)
    assert path.stat().st_mode & 0o777 == 0o600
    key = ClusterKey.read(path)
    assert key == ClusterKey.read(path)
    assert key.engine != key.frontend
    assert SECRET not in repr(key)
    with pytest.raises(ConfigError, match="File exists"):
        write_cluster_key(path)


def test_keys_of_another_secret_are_refused() -> None:
    key, other = ClusterKey.of(SECRET), ClusterKey.of(SECRET[::-1])
    assert FrontendKeys(key).callback("", key.frontend.public)
    assert not FrontendKeys(key).callback("", other.frontend.public)
    assert not FrontendKeys(key).callback("", key.engine.public)


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [
        ("short", 0o600, "32 to 4096"),
        ("x" * 5000, 0o600, "32 to 4096"),
        ("ä" * 40, 0o600, "ASCII"),
        (SECRET, 0o644, "chmod 600"),
    ],
)
def test_a_bad_key_file_is_refused(tmp_path: Path, content: str, mode: int, message: str) -> None:
    path = tmp_path / "key"
    path.write_text(content)
    os.chmod(path, mode)
    with pytest.raises(ConfigError, match=message):
        ClusterKey.read(path)


def test_a_missing_key_file_names_the_command_that_makes_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="headway keys cluster"):
        ClusterKey.read(tmp_path / "none")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "[::1]", "localhost"])
def test_loopback_needs_no_key(host: str) -> None:
    Endpoint.parse(f"tcp://{host}:1", "--listen").check_key(False, "--listen")


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "10.0.0.1", "127.evil.example", "[::]", "host"])
def test_everything_else_needs_a_key(host: str) -> None:
    endpoint = Endpoint.parse(f"tcp://{host}:1", "--listen", may_be_any=True)
    endpoint.check_key(True, "--listen")
    with pytest.raises(ConfigError, match=r"--listen .* needs --cluster-key-file"):
        endpoint.check_key(False, "--listen")


@pytest.mark.parametrize(
    "text", ["", "127.0.0.1:1", "tcp://a", "tcp://a:99999", "ipc:///x", "tcp://a b:1", "tcp://:1"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--engine must be tcp://HOST:PORT"):
        Endpoint.parse(text, "--engine")


@pytest.mark.parametrize("text", ["tcp://*:1", "tcp://127.0.0.1:0"])
def test_an_address_that_nobody_can_connect_to_is_refused(text: str) -> None:
    Endpoint.parse(text, "--listen", may_be_any=True)
    with pytest.raises(ConfigError, match="--engine must name one host and port"):
        parse_discovery((text,), None)


@pytest.mark.parametrize(
    ("engines", "discover"),
    [((), None), (("tcp://a:1",), "file:x"), ((), "etcd:x"), ((), "dns:name"), ((), "file:")],
)
def test_a_frontend_needs_one_source_of_engines(engines: tuple[str, ...], discover: str) -> None:
    with pytest.raises(ConfigError, match="--discover"):
        parse_discovery(engines, discover)


async def test_engines_of_a_file_and_of_a_name(tmp_path: Path) -> None:
    path = tmp_path / "engines"
    path.write_text("tcp://a:1  # first\n\n# none\ntcp://[::1]:2\n")
    nobody: Any = None
    found = await FileDiscovery(path).find(nobody)
    assert {one.address for one in found} == {"tcp://a:1", "tcp://[::1]:2"}
    discovery = parse_discovery((), "dns:localhost:7600")
    assert isinstance(discovery, DnsDiscovery)
    assert "tcp://127.0.0.1:7600" in {one.address for one in await discovery.find(nobody)}


async def test_a_source_that_names_no_engine_changes_nothing(tmp_path: Path) -> None:
    """A file that is written anew is empty for a moment."""
    path = tmp_path / "engines"
    path.write_text("tcp://127.0.0.1:1\n")
    engine = Engines()
    context = zmq.asyncio.Context()
    parts = LinkParts(context, None, "test", "", SystemClock())
    engines = EngineSet(FileDiscovery(path), parts)
    for content in ("tcp://127.0.0.1:1\n", "", "tcp://127.0.0.1:2\n"):
        path.write_text(content)
        await engines.update(engine)  # pyright: ignore
    assert engine.added == ["tcp://127.0.0.1:1", "tcp://127.0.0.1:2"]
    assert engine.retired == ["tcp://127.0.0.1:1"]
    context.term()


class Engines:
    """Records what an EngineSet does."""

    def __init__(self) -> None:
        self.added: list[str] = []
        self.retired: list[str] = []
        self.is_managed = False

    def add_engine(self, link: NetworkLink) -> None:
        self.added.append(link.name)

    def retire_engine(self, name: str) -> None:
        self.retired.append(name)


def test_the_numerics_class_is_that_of_content_and_kernels(tmp_path: Path) -> None:
    def digest(name: str, content: bytes) -> str:
        path = tmp_path / name
        path.write_bytes(content)
        return weights_digest(SourceFiles.of(path, [path]), tmp_path / "cache")

    weights = digest("a", b"weights")
    assert digest("copy", b"weights") == weights
    assert digest("b", b"Weights") != weights
    assert digest("a", b"other") != weights, "the kept digest is that of the file as it was"
    for kept in (tmp_path / "cache").iterdir():
        assert kept.suffix == ".sha256", "no part of a digest is left"
        kept.write_text("abc")  # as if another engine was about to write it
    assert digest("copy", b"weights") == weights

    def numerics(weights: str = weights, **facts: str | None) -> str:
        known = {"dtype": "int4", "kv_dtype": "bf16", "kernels": "avx512"}
        info = EngineInfo(Capacity(8, 16, 64), 4, 100, **(known | facts))  # pyright: ignore
        return numerics_class(info, weights)

    assert numerics() == numerics()
    others = [
        numerics(dtype="int8"),
        numerics(kv_dtype="int8"),
        numerics(activation_dtype="int8"),
        numerics(kernels="amx"),
        numerics(weights="x"),
    ]
    assert len({numerics(), *others}) == 6
    # In plain torch tokens depend on the batch: no other engine is of the same class.
    assert numerics(kernels=None) == "" and own_class() != own_class()
