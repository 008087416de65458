"""Processes without a parent: found by their pid file, and never mistaken for another."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from headway.errors import ConfigError
from headway.fleet.manage import processes
from headway.fleet.manage.folders import FleetFolder, machine_id
from headway.fleet.manage.host import end_leftover, find_running, take_lock
from headway.fleet.manage.messages import RunningProcess
from headway.fleet.manage.processes import (
    ProcessRecord,
    end_process,
    find_alive,
    last_line,
    read_record,
    start_daemon,
    start_ticks,
    wait_end,
)

SLEEP = [sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(60)"]


@pytest.fixture
def folder(tmp_path: Path) -> FleetFolder:
    folder = FleetFolder(tmp_path / "fleet")
    folder.make()
    return folder


def test_a_daemon_has_no_parent_here_and_its_own_session(folder: FleetFolder) -> None:
    pid_file, log = folder.pid_file("engine-1"), folder.log_file("engine-1")
    record = start_daemon(SLEEP, pid_file, log, "tcp://127.0.0.1:1")
    try:
        assert find_alive(pid_file) == record
        fields = Path(f"/proc/{record.pid}/stat").read_text().rpartition(")")[2].split()
        assert int(fields[1]) != os.getpid(), "its parent is not this process"
        assert os.getsid(record.pid) != os.getsid(0)
        assert os.getpriority(os.PRIO_PROCESS, record.pid) == 0
        assert pid_file.stat().st_mode & 0o777 == 0o600
        assert find_running(folder) == [
            RunningProcess("engine-1", record.pid, "tcp://127.0.0.1:1", "")
        ]
    finally:
        end_process(record, 5.0)
    assert find_alive(pid_file) is None
    assert find_running(folder) == []
    assert last_line(log) in ("begun", "its log is empty")


def test_a_number_that_was_given_again_is_not_the_process(tmp_path: Path) -> None:
    started = start_ticks(os.getpid())
    assert started is not None
    assert ProcessRecord(os.getpid(), started).is_alive
    other = ProcessRecord(os.getpid(), started - 1)
    assert not other.is_alive
    other.send(signal.SIGKILL)  # would end this process


def test_what_is_left_of_a_process_is_not_alive() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    record = ProcessRecord(child.pid, start_ticks(child.pid) or 0)
    assert wait_end(record, 10.0), "a zombie counts as ended"
    child.wait()


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"pid": "x"}', b"\xff" * 20_000])
def test_a_pid_file_that_cannot_be_read_names_no_process(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    assert read_record(path) is None
    assert read_record(tmp_path / "none.json") is None


def test_a_command_that_cannot_be_run_leaves_no_pid_file(folder: FleetFolder) -> None:
    pid_file, log = folder.pid_file("engine-1"), folder.log_file("engine-1")
    with pytest.raises(ConfigError, match=r"cannot be started: .*No such file"):
        start_daemon(["/no/such/program"], pid_file, log)
    assert not pid_file.exists()
    with pytest.raises(ConfigError, match="cannot be started"):
        start_daemon(SLEEP, folder.root / "none" / "x.json", log)


def test_a_command_that_ends_and_removes_its_pid_file_at_once_was_started(
    folder: FleetFolder,
) -> None:
    pid_file, log = folder.pid_file("engine-1"), folder.log_file("engine-1")
    for _ in range(3):
        record = start_daemon(["rm", str(pid_file)], pid_file, log)
        assert wait_end(record, 10.0)
        assert not pid_file.exists()


def test_a_process_that_ignores_sigterm_is_killed(
    folder: FleetFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "LAST_TIMEOUT_S", 0.2)
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('x', flush=True)"
    command = [sys.executable, "-c", f"{code}; time.sleep(60)"]
    record = start_daemon(command, folder.pid_file("a"), folder.log_file("a"))
    while last_line(folder.log_file("a")) != "x":
        time.sleep(0.01)
    end_process(record, 0.2)
    assert not record.is_alive


def test_a_leftover_is_ended_unless_a_host_has_it(folder: FleetFolder) -> None:
    record = start_daemon(SLEEP, folder.pid_file("engine-1"), folder.log_file("engine-1"))
    process = RunningProcess("engine-1", record.pid)
    lock = take_lock(folder.lock_file("engine-1"))
    assert lock is not None
    assert take_lock(folder.lock_file("engine-1")) is None
    end_leftover(folder, process)
    assert record.is_alive
    os.close(lock)
    end_leftover(folder, RunningProcess("engine-1", record.pid + 1))
    assert record.is_alive, "another process of this name was meant"
    end_leftover(folder, process)
    assert not record.is_alive
    assert not folder.pid_file("engine-1").exists()


def test_pid_files_of_a_shared_home_are_apart(folder: FleetFolder) -> None:
    """Another machine, or this one before a reboot, has another folder."""
    other = folder.root / f"{machine_id()}x"
    other.mkdir()
    record = ProcessRecord(os.getpid(), start_ticks(os.getpid()) or 0)
    (other / "engine-1.json").write_bytes(msgspec.json.encode(record))
    assert find_running(folder) == []
