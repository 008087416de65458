"""The writer against databases that are locked, full, or away, and against being killed."""

from __future__ import annotations

import resource
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.support.postgres import PostgresServer
from headway.errors import LedgerError
from headway.observe.ledger.spool import Spool, num_waiting_bytes, read_rows
from headway.observe.ledger.writer import Retention
from tests.conftest import ROOT
from tests.support.rows import DAY, make_row, make_writer, numbers_in, wait_until

SUM = 4950
"""Output tokens of rows 0 to 99."""


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Another process writes, and does not come to an end."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("CREATE TABLE IF NOT EXISTS lock (x)")
    connection.execute("BEGIN EXCLUSIVE")
    try:
        yield
    finally:
        connection.execute("ROLLBACK")
        connection.close()


def test_rows_are_written_and_nothing_is_left_behind(any_url: str, tmp_path: Path) -> None:
    writer = make_writer(any_url, tmp_path / "spool")
    writer.start()
    for number in range(100):
        writer.put(make_row(number))
    wait_until(lambda: writer.num_pending == 0)
    assert numbers_in(any_url) == (100, SUM)
    writer.stop()
    assert list((tmp_path / "spool").iterdir()) == []


@pytest.mark.timing
def test_a_locked_database_loses_and_doubles_nothing(sqlite_url: str, tmp_path: Path) -> None:
    folder, path = tmp_path / "spool", tmp_path / "ledger.db"
    writer = make_writer(sqlite_url, folder)
    writer.start()
    writer.put(make_row(0))
    wait_until(lambda: path.exists() and writer.num_pending == 0)
    with locked(path):
        slowest_s = 0.0
        for number in range(1, 100):
            began_at = time.monotonic()
            writer.put(make_row(number))
            slowest_s = max(slowest_s, time.monotonic() - began_at)
        wait_until(lambda: writer.is_failing and writer.num_buffered == 0)
        assert num_waiting_bytes(folder) > 99 * 300, "they wait on disk"
        assert slowest_s < 0.5, "whoever hands over a row does not wait with it"
    wait_until(lambda: not writer.is_failing and writer.num_pending == 0)
    assert numbers_in(sqlite_url) == (100, SUM)
    writer.stop()
    assert writer.num_dropped == 0 and list(folder.iterdir()) == []


def test_a_backlog_of_many_rows_is_read_back_from_disk(sqlite_url: str, tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    with locked(path):
        writer = make_writer(sqlite_url, tmp_path / "spool", max_bytes=2**24)
        writer.start()
        for number in range(2000):
            writer.put(make_row(number))
        wait_until(lambda: writer.is_failing and writer.num_buffered == 0)
        assert writer.num_pending == 2000
    wait_until(lambda: not writer.is_failing)
    writer.stop()
    assert numbers_in(sqlite_url) == (2000, 2000 * 1999 // 2)


def test_what_could_not_be_written_is_written_by_the_next_process(
    sqlite_url: str, tmp_path: Path
) -> None:
    folder, path = tmp_path / "spool", tmp_path / "ledger.db"
    with locked(path):
        writer = make_writer(sqlite_url, folder)
        writer.start()
        for number in range(100):
            writer.put(make_row(number))
        writer.stop()
        assert num_waiting_bytes(folder) > 0
    writer = make_writer(sqlite_url, folder)
    writer.start()
    wait_until(lambda: num_waiting_bytes(folder) == 0)
    writer.stop()
    assert numbers_in(sqlite_url) == (100, SUM)


def test_the_spool_of_a_living_process_is_left_alone(sqlite_url: str, tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    living = Spool(folder, 2**20)
    living.append([make_row(1)])
    writer = make_writer(sqlite_url, folder)
    writer.start()
    writer.put(make_row(2))
    wait_until(lambda: writer.num_pending == 0)
    writer.stop()
    assert numbers_in(sqlite_url) == (1, 2)
    path = living.sealed()
    assert path is not None
    assert [[row.output_tokens for row in rows] for rows in read_rows(path)] == [[1]]
    living.close()


def test_half_a_line_is_left_out_and_the_others_are_not(
    sqlite_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "spool"
    spool = Spool(folder, 2**20)
    spool.append([make_row(1), make_row(2)])
    (path,) = folder.iterdir()
    with path.open("ab") as file:
        file.write(b'{"request_id":"cmpl-3","revi')
    spool.close()
    writer = make_writer(sqlite_url, folder)
    writer.start()
    wait_until(lambda: not path.exists())
    writer.stop()
    assert numbers_in(sqlite_url) == (2, 3)
    assert "line 3 is damaged" in caplog.text


def test_beyond_every_bound_rows_are_dropped_and_counted(
    sqlite_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    num_bytes = 5000
    with locked(tmp_path / "ledger.db"):
        writer = make_writer(
            sqlite_url, tmp_path / "spool", max_bytes=num_bytes, max_buffered_rows=20
        )
        writer.start()
        for number in range(100):
            writer.put(make_row(number))
            wait_until(lambda: not writer._has_rows.is_set())
        assert 0 < num_waiting_bytes(tmp_path / "spool") <= num_bytes
        assert writer.num_dropped > 0
    wait_until(lambda: not writer.is_failing and writer.num_pending == 0)
    writer.stop()
    assert numbers_in(sqlite_url)[0] == 100 - writer.num_dropped
    assert f"{writer.num_dropped} rows dropped" in caplog.text or "1 rows" in caplog.text


def test_rows_that_are_too_old_are_forgotten(sqlite_url: str, tmp_path: Path) -> None:
    rows = [make_row(1), make_row(2, arrived_at=DAY + 60.0)]
    for retention, left in (
        (Retention(), (2, 3)),
        (Retention(100.0, lambda: DAY + 90.0), (2, 3)),
        (Retention(100.0, lambda: DAY + 150.0), (1, 2)),
    ):
        writer = make_writer(sqlite_url, tmp_path / "spool", retention=retention)
        writer.start()
        while rows:
            writer.put(rows.pop())
        writer.stop()
        assert numbers_in(sqlite_url) == left


def test_an_error_nobody_thought_of_is_logged_and_tried_again(
    sqlite_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = make_writer(sqlite_url, tmp_path / "spool")
    write, failures = writer._store.write, [ZeroDivisionError("?"), LedgerError("later")]

    def fail_first(rows):
        if rows and failures:
            raise failures.pop()
        write(rows)

    writer._store.write = fail_first
    writer.start()
    writer.put(make_row(5))
    wait_until(lambda: not failures and writer.num_pending == 0)
    writer.stop()
    assert numbers_in(sqlite_url) == (1, 5)
    assert "ZeroDivisionError" in caplog.text


# ------------------------------------------------------------------------ disk


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of half a megabyte."""
    disk = folder / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(disk)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("only root may mount a small disk")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1024))
        except OSError:
            pass


def test_a_full_disk_loses_and_doubles_nothing(tmp_path: Path) -> None:
    with small_disk(tmp_path) as disk:
        url = f"sqlite://{disk}/ledger.db"
        writer = make_writer(url, disk / "spool")
        writer.start()
        for number in range(10):
            writer.put(make_row(number))
        wait_until(lambda: writer.num_pending == 0)
        fill(disk / "filler")
        for number in range(10, 100):
            writer.put(make_row(number))
        wait_until(lambda: writer.is_failing and writer.num_buffered > 0)
        assert writer.num_dropped == 0
        (disk / "filler").unlink()
        wait_until(lambda: not writer.is_failing and writer.num_pending == 0)
        assert numbers_in(url) == (100, SUM)
        writer.stop()
        assert list((disk / "spool").iterdir()) == []


FILE_LIMIT = """
import resource, sys
from pathlib import Path
from tests.support.rows import make_row, make_writer, numbers_in, wait_until

folder, limit = Path(sys.argv[1]), int(sys.argv[2])
url = f"sqlite://{folder}/ledger.db"
writer = make_writer(url, folder / "spool")
writer.start()
for number in range(10):
    writer.put(make_row(number))
wait_until(lambda: writer.num_pending == 0)
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
for number in range(10, 100):
    writer.put(make_row(number))
wait_until(lambda: writer.is_failing and writer.num_buffered > 0)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
wait_until(lambda: not writer.is_failing and writer.num_pending == 0)
writer.stop()
print(*numbers_in(url), writer.num_dropped)
"""


@pytest.mark.parametrize("limit", [0, 2000, 20_000])
def test_files_that_may_not_grow_lose_and_double_nothing(tmp_path: Path, limit: int) -> None:
    """The same without privileges; at some limits a write ends in the middle of a line."""
    if resource.getrlimit(resource.RLIMIT_FSIZE)[1] != resource.RLIM_INFINITY:
        pytest.skip("the limit cannot be lifted again here")
    command = [sys.executable, "-c", FILE_LIMIT, str(tmp_path), str(limit)]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT
    )
    assert result.stdout.split() == ["100", str(SUM), "0"], result.stderr


# -------------------------------------------------------------- away, or killed


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGQUIT])
def test_postgres_goes_away_and_comes_back(
    postgres: PostgresServer, postgres_url: str, tmp_path: Path, how: signal.Signals
) -> None:
    writer = make_writer(postgres_url, tmp_path / "spool")
    writer.start()
    gone = threading.Event()

    def produce() -> None:
        """Half of the rows while the server leaves, however long that takes, half after it."""
        for number in range(100):
            if number == 50:
                gone.wait()
            writer.put(make_row(number))
            time.sleep(0.02)

    producer = threading.Thread(target=produce)
    producer.start()
    wait_until(lambda: writer.num_pending == 0)
    postgres.stop(how)
    gone.set()
    try:
        wait_until(lambda: writer.is_failing)
        producer.join()
        wait_until(lambda: writer.num_buffered == 0)
        assert num_waiting_bytes(tmp_path / "spool") > 0
    finally:
        gone.set()
        postgres.start()
    wait_until(lambda: not writer.is_failing and writer.num_pending == 0)
    writer.stop()
    assert numbers_in(postgres_url) == (100, SUM)
    assert writer.num_dropped == 0


PRODUCER = """
import itertools, sys
from pathlib import Path
from tests.support.rows import make_row, make_writer

folder = Path(sys.argv[1])
writer = make_writer(f"sqlite://{folder}/ledger.db", folder / "spool", max_bytes=2**24)
writer.start()
for number in itertools.count(int(sys.argv[2])):
    writer.put(make_row(number))
    while writer.num_buffered:
        pass
    print(number, flush=True)
"""


def test_processes_killed_while_rows_wait_lose_and_double_nothing(
    sqlite_url: str, tmp_path: Path
) -> None:
    """Three of them, one after the other, each leaving a spool behind; every row that was in one
    is in the ledger in the end. The last is killed while it writes to the database."""
    first, last = 0, -1
    path = tmp_path / "ledger.db"
    for is_locked in (True, True, False):
        command = [sys.executable, "-c", PRODUCER, str(tmp_path), str(first)]
        with locked(path) if is_locked else subprocess.Popen(["true"]):
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
            assert process.stdout is not None
            for _ in range(200):
                last = int(process.stdout.readline())
            process.send_signal(signal.SIGKILL)
            last = max([last, *map(int, process.stdout.read().split())])
            process.wait()
            process.stdout.close()
        first = last + 1
    writer = make_writer(sqlite_url, tmp_path / "spool")
    writer.start()
    wait_until(lambda: num_waiting_bytes(tmp_path / "spool") == 0)
    writer.stop()
    num_rows, num_tokens = numbers_in(sqlite_url)
    # A row may have been in the spool already when its number was yet to be printed.
    assert first <= num_rows <= first + 3
    assert num_tokens >= first * (first - 1) // 2
    with sqlite3.connect(path) as connection:
        ids = {name for (name,) in connection.execute("SELECT request_id FROM headway_requests")}
    connection.close()
    assert ids >= {f"cmpl-{number:x}" for number in range(first)}
