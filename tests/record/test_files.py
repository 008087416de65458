"""The files of a recording: damage, limits, full disks, and what `headway replay` says of them."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner, Result

from headway.cli.app import make_app
from headway.config import RecordConfig
from headway.core.plan import StepPlan
from headway.core.scheduler import Scheduler
from headway.errors import ConfigError, RecordingError
from headway.record import parts
from headway.record.encoder import CallEncoder
from headway.record.entries import CLOSED, FORMAT, RecordingHeader, encode
from headway.record.kinds import ENGINE
from headway.record.parts import MAGIC, NO_ROOM, NoRoomError, make_block
from headway.record.reader import CUT_SHORT, RecordingReader, find_recordings
from headway.record.recording import start_recording
from headway.sim.recording.observed import read_observed
from tests.record.support import Recorder, harness_class, recorded, replay
from tests.support.harness import Harness


def headway(*arguments: str | Path) -> Result:
    return CliRunner().invoke(make_app(["replay"]), [str(one) for one in arguments])


def run_some(engine: Harness, num_requests: int = 12) -> Harness:
    for number in range(num_requests):
        engine.add(f"request-{number}", 5 + number, max_tokens=9)
        engine.steps(2)
    engine.run()
    return engine


def make_recording(folder: Path, **settings: int) -> tuple[Path, int]:
    """A recording, and the number of its steps."""
    recorder = Recorder(folder, **settings)  # pyright: ignore[reportArgumentType]
    with recorded(harness_class(recorder)()) as engine:
        run_some(engine)
    return recorder.path, replay(recorder.path).num_steps


def test_a_file_that_was_cut_short_is_readable_to_its_last_whole_block(tmp_path: Path):
    path, num_steps = make_recording(tmp_path)
    content = path.read_bytes()
    header = len(MAGIC) + len(make_block(encode(RecordingReader.open(path, ENGINE).header)))
    counts: list[int] = []
    for length in range(header, len(content), 151):
        path.write_bytes(content[:length])
        found = replay(path)
        assert found.difference is None
        assert found.end == CUT_SHORT
        counts.append(found.num_steps)
    assert counts == sorted(counts)
    path.write_bytes(content[:-1])  # in the last entry, which only says why it is the last
    assert replay(path).num_steps == num_steps
    path.write_bytes(content[: len(content) // 2])
    shown = headway("replay", path)
    assert shown.exit_code == 0
    assert "steps equal (the file is cut short" in shown.output
    path.write_bytes(content[: header - 1])
    assert headway("replay", path).exit_code == 2


def test_one_altered_byte_is_found(tmp_path: Path):
    path, _ = make_recording(tmp_path)
    content = path.read_bytes()
    for at in (*range(0, 40, 3), *range(40, len(content), 701), len(content) - 1):
        path.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
        with pytest.raises(RecordingError, match=r"damaged at byte|is not a recording"):
            replay(path)
    path.write_bytes(content[:-20] + b"\0" + content[-19:])
    shown = headway("replay", path)
    assert shown.exit_code == 2
    assert "steps equal, then:" in shown.output
    assert "damaged at byte" in shown.output


def test_another_file_another_format_and_none(tmp_path: Path):
    path, _ = make_recording(tmp_path)
    header = msgspec.structs.replace(RecordingReader.open(path, ENGINE).header, format=FORMAT + 1)
    newer = tmp_path / "newer.0000.rec"
    newer.write_bytes(MAGIC + make_block(encode(header)))
    text = tmp_path / "notes.txt"
    text.write_text("not a recording, but long enough to be one")
    empty = tmp_path / "empty"
    empty.mkdir()
    for given, expected in (
        (newer, f"has format {FORMAT + 1}, this release reads format {FORMAT}"),
        (text, "is not a recording"),
        (tmp_path / "absent.0000.rec", "does not exist"),
    ):
        shown = headway("replay", given)
        assert shown.exit_code == 2
        assert expected in shown.output
    shown = headway("replay", empty)
    assert shown.exit_code != 0
    assert "has no recordings" in str(shown.exception)


def test_a_difference_is_shown_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    recorder = Recorder(tmp_path)
    settings = {"scheduling_policy": "fcfs", "num_blocks": 16}
    with recorded(harness_class(recorder)(**settings)) as engine:
        engine.add("first", 24, max_tokens=8)
        engine.steps(2)
        for number in range(5):
            engine.add(f"large-{number}", 48, max_tokens=4)
        engine.add("small", 4, max_tokens=4)
        engine.run()
    assert headway("replay", recorder.path).exit_code == 0
    monkeypatch.setattr("headway.core.scheduler.MAX_SKIPS", 6)
    shown = headway("replay", tmp_path)
    assert shown.exit_code == 1
    assert "2 steps equal; step 3 differs" in shown.output
    lines = [line.split() for line in shown.output.splitlines()]
    assert ["recorded", "replayed"] in lines
    assert ["first", "decodes", "first", "decodes"] in lines
    assert ["*", "small", "tokens", "0", "to", "3"] in lines


def test_a_call_that_fails_is_a_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, num_steps = make_recording(tmp_path)
    schedule, num_calls = Scheduler.schedule, 0

    def fail_once(scheduler: Scheduler, now: float) -> StepPlan | None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3:
            raise RuntimeError("no block is free")
        return schedule(scheduler, now)

    monkeypatch.setattr(Scheduler, "schedule", fail_once)
    assert num_steps > 3
    shown = headway("replay", path)
    assert shown.exit_code == 1
    assert "2 steps equal; step 3 fails in the replay" in shown.output
    assert "RuntimeError: no block is free" in shown.output
    assert "recorded by release 0" in shown.output
    num_calls = 0
    with pytest.raises(RecordingError, match="differs in step 3; see `headway replay`"):
        read_observed(path)


def test_the_date_of_a_difference_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    began_at = datetime(2026, 11, 17, 14, 5, tzinfo=UTC).timestamp()
    recorder = Recorder(tmp_path, clock_began_at=began_at)
    with recorded(harness_class(recorder)()) as engine:
        engine.clock.advance_to(90.0)
        engine.add("first", 24, max_tokens=8)
        engine.run()
    monkeypatch.setattr("headway.record.replay.digest_plan", lambda _plan: b"another")
    assert "at 90.000000 s, 2026-11-17 14:06:30 UTC" in headway("replay", tmp_path).output


def test_files_of_one_recording_are_replayed_once(tmp_path: Path):
    path, num_steps = make_recording(tmp_path, file_bytes=1500)
    shown = headway("replay", *sorted(tmp_path.glob("*.rec")), tmp_path)
    assert shown.output.splitlines() == [f"{path.name}: {num_steps} steps equal"]


def test_a_folder_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(_path: Path) -> list[str]:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("headway.record.reader.os.listdir", refuse)
    with pytest.raises(RecordingError, match="cannot be read: Permission denied"):
        find_recordings([tmp_path])


def test_a_recording_goes_on_in_further_files(tmp_path: Path):
    path, num_steps = make_recording(tmp_path, file_bytes=1500)
    files = sorted(tmp_path.glob("*.rec"))
    assert len(files) > 3
    assert all(file.stat().st_size <= 1600 for file in files)
    for file in files:
        found = replay(file)
        assert (found.difference, found.num_steps, found.end) == (None, num_steps, CLOSED)
    files[2].unlink()
    assert f"{files[2].name}, the next file of the recording, is missing" == replay(path).end
    shutil.copy(files[1], files[2])
    with pytest.raises(RecordingError, match="file of another recording"):
        replay(path)
    files[0].unlink()
    with pytest.raises(RecordingError, match="the start of the recording, is gone"):
        replay(files[1])


def test_a_recording_without_room_ends_and_the_engine_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.WARNING):
        path, num_steps = make_recording(tmp_path, file_bytes=1500, total_bytes=6000)
    found = replay(path)
    assert found.difference is None
    assert 0 < found.num_steps == num_steps
    assert found.end.startswith(NO_ROOM)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 6000
    assert NO_ROOM in caplog.text


def test_older_recordings_make_room_unless_they_are_being_written(tmp_path: Path):
    limits = {"file_bytes": 2000, "total_bytes": 8000}
    old = Recorder(tmp_path, name="1-old", **limits)  # pyright: ignore[reportArgumentType]
    with recorded(harness_class(old)()) as engine:
        run_some(engine, 30)
    others = {"show.rec": b"not ours", "show.0000.rec": b"nor this", "copy.rec": MAGIC}
    for name, content in others.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder.0000.rec").mkdir()
    busy = Recorder(tmp_path, name="2-busy", **limits)  # pyright: ignore[reportArgumentType]
    new = Recorder(tmp_path, name="3-new", **limits)  # pyright: ignore[reportArgumentType]
    with recorded(harness_class(busy)()) as engine:
        run_some(engine, 2)
        with recorded(harness_class(new)()) as other:
            run_some(other, 30)
    assert not old.path.exists()
    assert replay(busy.path).end == CLOSED
    assert replay(new.path).difference is None
    assert sum(file.stat().st_size for file in tmp_path.iterdir() if file.is_file()) <= 8000
    assert {name: (tmp_path / name).read_bytes() for name in others} == others


def test_a_recording_outlives_the_next_one(tmp_path: Path):
    """An engine that crashed is replaced at once: what it did must still be there then."""
    limits = {"file_bytes": 2000, "total_bytes": 8000}
    recorders = [Recorder(tmp_path, name=str(number), **limits) for number in range(3)]  # pyright: ignore[reportArgumentType]
    for recorder in recorders:
        with recorded(harness_class(recorder)()) as engine:
            run_some(engine, 30)
    first, second, third = recorders
    assert not first.path.exists()
    assert replay(second.path).num_steps > 5 and replay(third.path).num_steps > 5


def test_engines_of_one_folder_keep_to_its_limit_together(tmp_path: Path):
    limits = {"file_bytes": 2000, "total_bytes": 8000}
    recorders = [Recorder(tmp_path, name=str(number), **limits) for number in range(5)]  # pyright: ignore[reportArgumentType]
    with ExitStack() as stack:
        for recorder in recorders[:4]:  # each may fill its file
            stack.enter_context(recorded(harness_class(recorder)()))
        with pytest.raises(NoRoomError, match="recordings that go on"):
            recorders[4].start(Harness().scheduler)
    assert [one.path.exists() for one in recorders] == [True] * 4 + [False]


def test_a_disk_that_is_full_at_the_start_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(_file: int, _content: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    num_open = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(parts.os, "write", fail)
        Recorder(tmp_path).start(Harness().scheduler)
    assert not list(tmp_path.glob("*.rec"))
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_a_full_disk_ends_the_recording_and_not_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    recorder = Recorder(tmp_path)
    write, left = os.write, 3000

    def write_until_full(file: int, content: bytes) -> int:
        nonlocal left
        if left == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        num_written = write(file, content[:left])
        left -= num_written
        return num_written

    monkeypatch.setattr(parts.os, "write", write_until_full)
    with caplog.at_level(logging.WARNING), recorded(harness_class(recorder)()) as engine:
        run_some(engine)
    assert len(engine.events) > 100
    assert "No space left on device" in caplog.text
    found = replay(recorder.path)
    assert found.difference is None
    assert found.num_steps > 5
    assert recorder.path.stat().st_size <= 3000


def test_a_disk_that_is_full_at_the_start_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write, num_starts = os.write, 0

    def fail_once(file: int, content: bytes) -> int:
        nonlocal num_starts
        is_start = bytes(content[: len(MAGIC)]) == MAGIC
        num_starts += is_start
        if is_start and num_starts == 2:
            write(file, content[:100])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, content)

    monkeypatch.setattr(parts.os, "write", fail_once)
    path, num_steps = make_recording(tmp_path, file_bytes=1500)
    assert num_steps
    assert replay(path).end == CUT_SHORT
    second = tmp_path / "test.0001.rec"
    assert second.read_bytes() == b""
    for num_bytes in (5, len(MAGIC), 100):
        second.write_bytes(path.read_bytes()[:num_bytes])  # as after a kill
        assert headway("replay", path).exit_code == 0


def test_a_slow_disk_ends_the_recording_and_not_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    recorder = Recorder(tmp_path, max_queued=20)
    engine = harness_class(recorder)()
    may_write = threading.Event()
    write = os.write

    def write_late(file: int, content: bytes) -> int:
        assert may_write.wait(10)
        return write(file, content)

    monkeypatch.setattr(parts.os, "write", write_late)
    with caplog.at_level(logging.WARNING), recorded(engine):
        run_some(engine)
        assert "too slow" in caplog.text
        may_write.set()
    found = replay(recorder.path)
    assert found.difference is None
    assert found.num_steps >= 5
    assert "too slow" in found.end


def test_an_engine_starts_without_a_recording_if_none_can_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    file = tmp_path / "file"
    file.write_text("")
    engine = Harness()
    header = RecordingHeader(
        recording="r",
        headway="0",
        platform="",
        model="",
        numerics="",
        scheduler=engine.scheduler.config,
        capacity=engine.capacity,
        enable_prefix_caching=True,
    )
    assert start_recording(RecordConfig(record=str(file)), header, CallEncoder(b"key", 16)) is None
    assert "nothing is recorded" in caplog.text
    with pytest.raises(NoRoomError):
        parts.PartWriter(tmp_path, header, 1000, 999)


def test_files_can_be_read_by_their_owner_only(tmp_path: Path):
    path, _ = make_recording(tmp_path / "new")
    assert path.stat().st_mode & 0o077 == 0
    assert path.parent.stat().st_mode & 0o077 == 0


def test_limits_that_leave_no_room_are_refused():
    with pytest.raises(ConfigError, match="record_total_bytes"):
        RecordConfig(record="x", record_file_bytes=2**20, record_total_bytes=2**20)
    with pytest.raises(ConfigError, match="record_file_bytes"):
        RecordConfig(record="x", record_file_bytes=1)
