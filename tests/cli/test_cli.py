"""The command as a person meets it: right, wrong, and interrupted."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import save_file
from typer.core import TyperGroup
from typer.main import get_command

from headway.cli.app import make_app
from headway.cli.root import SUMMARIES
from headway.executors.cpu.packed_cache import CacheKey, Matrix, PackedCache, PackedMatrix
from headway.executors.spec import spec_from_config
from tests.conftest import ROOT
from tests.support.tiny import CONFIG, tiny_weights


def headway(*args: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "headway", *args],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=300,
        **options,  # pyright: ignore
    )


def test_version():
    assert headway("--version").stdout.startswith("headway 0.")


def test_help_names_every_subcommand_with_its_own_summary():
    shown = headway("--help").stdout
    assert all(name in shown for name in SUMMARIES)
    whole = get_command(make_app())
    assert isinstance(whole, TyperGroup)
    first_lines = {
        name: " ".join((command.help or "").split("\n\n")[0].split())
        for name, command in whole.commands.items()
    }
    assert first_lines == SUMMARIES


@pytest.mark.parametrize("flag", ["--version", "--help"])
def test_version_and_help_import_nothing_that_takes_long(flag: str):
    code = f"import sys; from headway.cli import main; sys.argv[1:] = ['{flag}']; main()"
    listed = "; print(*sorted(name for name in sys.modules if '.' not in name))"
    done = subprocess.run(
        [sys.executable, "-c", code + listed], capture_output=True, text=True, check=True, cwd=ROOT
    )
    modules = done.stdout.splitlines()[-1].split()
    assert not {"typer", "click", "rich", "msgspec", "numpy"} & set(modules)


@pytest.mark.parametrize(
    ("words", "offered"),
    [("headway ser", "serve"), ("headway serve --log-f", "--log-format")],
)
def test_a_shell_completes_subcommands_and_flags(words: str, offered: str):
    number = str(len(words.split()) - 1)
    asked = {"_HEADWAY_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": number}
    code = "import sys; sys.argv = ['headway']; from headway.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, **asked},
    )
    assert done.stdout.split() == [offered]


def test_an_unknown_subcommand_is_refused():
    result = headway("severe", "x.gguf")
    assert result.returncode == 2
    assert "No such command 'severe'" in result.stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("serve",), "Missing argument"),
        (("serve", "x.gguf", "--no-such-flag"), "No such option"),
        (("serve", "missing.gguf", "--port", "0"), "no such file or folder"),
        (("serve", "missing.gguf", "--port", "many"), "port: 'many' is not a valid int"),
        (("serve", "missing.gguf", "--max-num-seqs", "0"), "max_num_seqs must be at least 1"),
        (("chat", "missing.gguf", "--config", "missing.yaml"), "cannot read missing.yaml"),
        (("bench", "offline", "missing.gguf", "--batching", "magic"), "static, dynamic"),
        (("bench", "offline", "missing.gguf", "--workload", "none"), "unknown workload"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(args: tuple[str, ...], said: str):
    result = headway(*args)
    assert result.returncode == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr


def test_a_config_file_with_an_unknown_key_is_refused(tmp_path: Path):
    file = tmp_path / "settings.yaml"
    file.write_text("max-num-seqs: 4\nmax-num-sequences: 5\n")
    result = headway("serve", "missing.gguf", "--config", str(file))
    assert result.returncode == 2
    assert "unknown setting: max_num_sequences" in result.stderr


def test_an_unknown_policy_is_refused_before_anything_is_loaded():
    result = headway("serve", "missing.gguf", "--port", "0", "--scheduling-policy", "luck")
    assert result.returncode == 2
    assert "fcfs, priority" in result.stderr


def test_a_port_in_use_leaves_no_engine_and_no_folder(model_path: Path, tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        environ = {**os.environ, "TMPDIR": str(tmp_path)}
        result = headway("serve", str(model_path), "--port", port, env=environ)
    assert result.returncode == 2
    assert "is in use" in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_engine_removes_the_folder_of_a_server_killed_at_its_start(
    model_path: Path, tmp_path: Path, number: int
):
    command = [sys.executable, "-m", "headway", "serve", str(model_path), "--port", "0"]
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([*command, "--admin-port", "none"], cwd=ROOT, env=environ) as server:
        wait_until(lambda: any(tmp_path.glob("headway-*/engine.commands")))
        server.send_signal(number)
    wait_until(lambda: not any(tmp_path.iterdir()))


def wait_until(is_so: Callable[[], bool], timeout_s: float = 60.0) -> None:
    until = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_doctor_says_what_auto_gives():
    result = headway("doctor")
    assert result.returncode == 0
    for word in ("cores", "instructions", "torch", "free memory", "KV cache auto"):
        assert word in result.stdout


@pytest.mark.model
def test_doctor_of_a_model(model_path: Path):
    result = headway("doctor", str(model_path))
    assert "134 M parameters" in result.stdout
    assert "blocks of 16 tokens" in result.stdout


@pytest.mark.model
def test_chat_knows_the_capital_of_japan(model_path: Path):
    result = headway(
        "chat", str(model_path), "--prompt", "What is the capital of Japan?", "--max-tokens", "12"
    )
    assert result.returncode == 0, result.stderr
    assert "Tokyo" in result.stdout


@pytest.mark.model
@pytest.mark.full
def test_a_conversation_goes_on_until_the_end_of_input(model_path: Path):
    said = "What is the capital of Japan?\n/reset\n"
    result = headway("chat", str(model_path), "--max-tokens", "12", input=said)
    assert result.returncode == 0, result.stderr
    assert "Tokyo" in result.stdout


@pytest.mark.model
@pytest.mark.full  # tests/cli/test_ledger_commands.py closes the pipe of a command without a model
def test_a_closed_pipe_is_no_error(model_path: Path):
    command = f'"{sys.executable}" -m headway chat "{model_path}" --prompt Hello | head -c 0'
    result = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, check=False, cwd=ROOT, timeout=300
    )
    assert "Traceback" not in result.stderr
    assert "Error" not in result.stderr


def test_bench_offline_compares_modes(tmp_path: Path):
    config = CONFIG | {"vocab_size": 49_152, "max_position_embeddings": 1024}
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = tiny_weights(spec_from_config(config))
    save_file(weights, tmp_path / "model.safetensors")
    report, picture = tmp_path / "report.json", tmp_path / "picture.png"
    flags = ("--workload", "mixed-16", "--batching", "static,continuous", "--rounds", "1")
    files = ("--json", str(report), "--plot", str(picture))
    result = headway("bench", "offline", str(tmp_path), *flags, *files)
    assert result.returncode == 0, result.stderr
    assert "identical tokens in all 2 runs: 100.0%" in result.stdout
    modes = json.loads(report.read_text())["modes"]
    assert modes["continuous"]["padding_waste"]["median"] == 0.0
    assert modes["static"]["padding_waste"]["median"] > 0.1
    assert modes["continuous"]["num_output_tokens"] == modes["static"]["num_output_tokens"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_packed_weights_are_listed_and_cleared(tmp_path: Path):
    folder = ("--weights-cache", str(tmp_path / "cache"))
    assert headway("cache", "list", *folder).stdout.startswith("no packed weights in")
    data = memoryview(bytes(3_000_000))
    packed = PackedMatrix(Matrix(("weight",), 0, False, len(data)), data)
    cache = PackedCache(tmp_path / "cache", 10**9)
    cache.store(CacheKey("/models/[gone].gguf", "int4", "0" * 32), [packed])
    listed = headway("cache", "list", *folder).stdout
    assert "/models/[gone].gguf (gone)" in listed
    assert "int4" in listed and "3 of at most 21475 MB in" in listed
    assert headway("cache", "clear", *folder).stdout.startswith("deleted 3 MB")
    assert cache.entries() == []
    assert "weights_cache is none" in headway("cache", "list", "--weights-cache", "none").stderr
