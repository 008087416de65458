"""Fixtures shared by every test folder."""

from __future__ import annotations

import functools
import os
import shutil
import ssl
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from benchmarks.support.postgres import PostgresServer
from benchmarks.support.servers import Launcher, RunningServer, start_model_server
from benchmarks.support.tiny_tokenizers import write_byte_level
from headway.text import Tokenizer
from tests.support.postgres import make_server

ROOT = Path(__file__).parent.parent
NEEDED_IN_CI = ("kernels", "PostgreSQL", "test model")
"""A skip that names one of these is a failure where CI is set: they are what is to be tested."""


SHARED_STARTS = {
    "tests/parity/test_architectures.py": "transformers",
    "tests/parity/test_smollm2.py": "transformers",
    "tests/text/test_chat_template.py": "transformers",
    "tests/text/test_gguf_parity.py": "transformers",
    "tests/observe/test_store.py": "PostgreSQL",
    "tests/observe/test_writer.py": "PostgreSQL",
    "tests/server/batches/test_database.py": "PostgreSQL",
    "tests/server/batches/test_files.py": "PostgreSQL",
    "tests/server/batches/test_model.py": "model server",
    "tests/server/test_anthropic_client.py": "model server",
    "tests/server/test_openai_client.py": "model server",
    "tests/server/test_other_apis.py": "model server",
    "tests/server/test_real_load.py": "model server",
    "tests/server/test_scoring.py": "model server",
    "tests/server/test_structured.py": "model server",
    "tests/server/test_tools.py": "model server",
}
"""Files that run in one worker, because they share what takes many seconds to start."""


class _FilesAndGroups(LoadFileScheduling):
    """Gives a worker all tests of a file, or of the files that share a start."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return SHARED_STARTS.get(file, file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> _FilesAndGroups | None:
    is_by_file = config.getoption("dist") == "loadfile"
    return _FilesAndGroups(config, log) if is_by_file else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full", action="store_true", help="all cases of the tests that run a choice of them"
    )
    parser.addoption("--browser", action="store_true", help="the tests that need a browser too")


def pytest_configure(config: pytest.Config) -> None:
    """Keep packed weights apart from the user's, shared by the processes of one run.

    Every client of httpx reads all CA certificates, which takes 40 ms; here they are read once.
    """
    ssl.create_default_context = functools.cache(ssl.create_default_context)
    if "HEADWAY_WEIGHTS_CACHE" not in os.environ:
        folder = tempfile.mkdtemp(prefix="headway-weights-")
        os.environ["HEADWAY_WEIGHTS_CACHE"] = folder
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not asked for; begin with the real model, which takes longest.

    What begins last decides how long one of two workers is idle at the end.
    """
    items.sort(key=lambda item: item.get_closest_marker("model") is None)
    for mark in ("full", "browser"):
        left_out = [item for item in items if item.get_closest_marker(mark)]
        if left_out and not config.getoption(f"--{mark}"):
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if not item.get_closest_marker(mark)]


def _forbid_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    if os.environ.get("CI") and report.skipped and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2]
        if any(name in reason for name in NEEDED_IN_CI):
            report.outcome = "failed"
            report.longrepr = f"in CI this must not be missing: {reason}"


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    outcome = yield
    _forbid_skip(outcome.get_result())  # pyright: ignore[reportOptionalMemberAccess]


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    outcome = yield
    _forbid_skip(outcome.get_result())  # pyright: ignore[reportOptionalMemberAccess]


@pytest.fixture(scope="session")
def is_full(request: pytest.FixtureRequest) -> bool:
    """Whether all cases are asked for, not a choice of them."""
    return bool(request.config.getoption("--full"))


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The real test model. Without it, its tests fail; `-m "not model"` leaves them out."""
    result = subprocess.run(
        [ROOT / "scripts" / "get-test-model"], capture_output=True, text=True, check=False
    )
    if result.returncode != 0:
        pytest.fail(f"the test model is out of reach: {result.stderr.strip()}")
    return Path(result.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_level(tmp_path_factory.mktemp("server") / "tokenizer.gguf", pre="gpt-2")


@pytest.fixture(scope="session")
def tokenizer(tokenizer_path: Path) -> Tokenizer:
    return Tokenizer.from_gguf(tokenizer_path)


@pytest.fixture
def launch(tmp_path: Path, tokenizer_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path, tokenizer_path)
    yield launcher
    launcher.close()


@pytest.fixture(scope="session")
def fake_server(
    tmp_path_factory: pytest.TempPathFactory, tokenizer_path: Path
) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("fake-server")
    launcher = Launcher(folder, tokenizer_path)
    server = launcher(server={"batch_dir": str(folder / "batches")}).wait_ready()
    yield server
    assert server.stop() == 0, server.log


@pytest.fixture(scope="session")
def model_server(
    model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """The default path: its kernels give the same tokens however much of a prompt was cached."""
    log_path = tmp_path_factory.mktemp("model-server") / "server.log"
    batches = str(log_path.parent / "batches")
    flags = ("--kv-cache-memory-bytes", "256M", "--batch-dir", batches)
    # Hundreds of requests at once are part of what is tested, not too many.
    server = start_model_server(model_path, log_path, *flags, "--max-queue-age-s", "600")
    try:
        yield server.wait_ready()
        assert server.stop() == 0, server.log
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    # The path of a socket may have 107 characters, and those of pytest are long.
    folder = Path(tempfile.mkdtemp(prefix="hw-pg-"))
    server = make_server(folder)
    server.start()
    try:
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder)
