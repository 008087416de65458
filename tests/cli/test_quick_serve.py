"""Arguments of `headway serve` mean the same with and without typer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headway.cli import quick_serve
from headway.cli.app import make_app
from headway.config import Config


def read_with_typer(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> Config | None:
    read: list[Config] = []

    def serve(config: Config, _engine: object) -> int:
        read.append(config)
        return 0

    monkeypatch.setattr(quick_serve, "serve", serve)
    CliRunner().invoke(make_app(["serve"]), ["serve", *arguments])
    return read[0] if read else None


@pytest.mark.parametrize(
    "arguments",
    [
        ["m.gguf"],
        ["m.gguf", "--port", "9", "--admin-port", "none"],
        ["--port=9", "m.gguf", "--host="],
        ["m.gguf", "--standby", "--no-enable-prefix-caching", "--kv-cache-memory-bytes", "2G"],
        ["m.gguf", "--no-standby", "--standby", "--max-wait-s", "0.5"],
        ["--api-key", "a", "m.gguf", "--api-key=b,c", "--served-model-name", "x=y"],
        ["m.gguf", "--port", "9", "--port", "10"],
    ],
)
def test_plain_arguments_are_read_as_typer_reads_them(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    config = quick_serve.read_arguments(arguments)
    assert config is not None
    assert config == read_with_typer(monkeypatch, arguments)


def test_a_file_of_settings_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("port: 9\nmax-num-seqs: 4\n")
    arguments = ["m.gguf", "--config", str(path), "--port", "10"]
    config = quick_serve.read_arguments(arguments)
    assert config is not None
    assert (config.server.port, config.scheduler.max_num_seqs) == (10, 4)
    assert config == read_with_typer(monkeypatch, arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["m.gguf", "n.gguf"],
        ["m.gguf", "--port"],
        ["m.gguf", "--port", "--standby"],
        ["m.gguf", "--standby=yes"],
        ["m.gguf", "--no-such-flag", "1"],
        ["m.gguf", "-p", "1"],
        ["--", "m.gguf"],
        ["m.gguf", "--port", "-1"],
    ],
)
def test_other_arguments_are_left_to_typer(arguments: list[str]) -> None:
    assert quick_serve.read_arguments(arguments) is None


def test_the_server_of_one_machine_does_not_import_the_fleet() -> None:
    """Its imports would delay the first answer."""
    code = (
        "import sys, headway.cli.quick_serve, headway.build_server, headway.server, "
        "headway.engine.client.async_engine, headway.engine.supervise.supervisor\n"
        "print([name for name in sys.modules if name.startswith(('headway.fleet', 'zmq.auth', "
        "'headway.build_fleet'))])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
