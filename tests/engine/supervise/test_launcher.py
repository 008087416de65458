"""What an engine process says is read, or it is an engine that cannot be trusted any more."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
import sys

import psutil
import pytest
import zmq

from headway.core.events import Finished, Refused, Stepped, TokensEmitted
from headway.core.executor import Capacity
from headway.core.request import FinishReason
from headway.engine.process.messages import (
    AbortRequests,
    EngineInfo,
    EngineReady,
    EventBatch,
    Report,
    decode_report,
    encode,
)
from headway.engine.supervise.launcher import EngineProcess
from headway.engine.supervise.start import EngineMemory, EngineStart
from headway.errors import EngineDeadError, EngineError

SPEAKER = """
import json, sys, zmq
frames = json.loads(sys.stdin.readline())
context = zmq.Context()
reports = context.socket(zmq.PUSH)
reports.connect(sys.argv[1] + ".reports")
for frame in frames:
    reports.send(bytes.fromhex(frame))
reports.close()
context.term()
"""
SLOW_TO_CONNECT = """
import json, sys, time, zmq
ready, answer = [bytes.fromhex(frame) for frame in json.loads(sys.stdin.readline())]
context = zmq.Context()
reports, commands = context.socket(zmq.PUSH), context.socket(zmq.PULL)
reports.connect(sys.argv[1] + ".reports")
reports.send(ready)
time.sleep(0.3)
commands.connect(sys.argv[1] + ".commands")
commands.recv()
reports.send(answer)
context.destroy(linger=1000)
"""
BATCH = EventBatch(
    refused=[Refused("naïve", 1.0, "never_fits", "größer als der Speicher")],
    tokens=[TokensEmitted("b" * 40, (1, 70_000), None)],
    finished=[Finished("b" * 40, 2.0, FinishReason.STOP, 2, "")],
    stepped=[Stepped(1, 2.0, 0.1, 3, 8, 1, 2, 1, 0, 1, 9)],
)


def damaged(frame: bytes, draw: random.Random) -> list[bytes]:
    """Cut anywhere, cut with a byte that begins nothing, and with bytes that are no text."""
    # Fewer than the socket holds: what is beyond is lost when the sender ends.
    cut = [frame[:end] for end in range(0, len(frame), 2)]
    ended = [frame[:end] + b"\xc1" for end in range(1, len(frame), 2)]
    at = frame.index("größer".encode())
    no_text = [frame[: at + 1] + bytes([draw.randrange(0xC0, 0xC2)]) + frame[at + 2 :]]
    return cut + ended + no_text


async def reports_of(frames: list[bytes]) -> list[Report | EngineError | None]:
    start = EngineStart([sys.executable, "-c", SPEAKER])
    process = EngineProcess(start, json.dumps([frame.hex() for frame in frames]).encode())
    try:
        return [await read_one(process) for _ in frames]
    finally:
        await process.stop()


async def test_the_first_command_waits_until_an_engine_that_is_ready_takes_commands() -> None:
    """Its two sockets connect one after the other, and a command in between would be lost."""
    ready = EngineReady(EngineInfo(Capacity(10, 16, 100), 4, 100))
    frames = [encode(ready).hex(), encode(BATCH).hex()]
    start = EngineStart([sys.executable, "-c", SLOW_TO_CONNECT])
    process = EngineProcess(start, json.dumps(frames).encode())
    try:
        assert await read_one(process) == ready
        await process.send(AbortRequests(["one"], FinishReason.ABORT))
        assert await read_one(process) == BATCH
    finally:
        await process.stop()


async def test_an_engine_that_ends_as_soon_as_it_is_ready_is_not_waited_for() -> None:
    ready = EngineReady(EngineInfo(Capacity(10, 16, 100), 4, 100))
    start = EngineStart([sys.executable, "-c", SPEAKER])
    process = EngineProcess(start, json.dumps([encode(ready).hex()]).encode())
    try:
        assert await read_one(process) == ready
        assert isinstance(await read_one(process), EngineDeadError)
    finally:
        await process.stop()


async def test_the_end_of_a_process_is_noticed_at_once() -> None:
    process = EngineProcess(EngineStart([sys.executable, "-c", "input(); input()"]), b"")
    try:
        assert await process.receive(0.05) is None
        waiting = asyncio.create_task(read_one(process))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        process.kill()
        died = await asyncio.wait_for(waiting, 5.0)  # reading alone would wait for 10
        assert isinstance(died, EngineDeadError)
    finally:
        await process.stop()


async def test_a_report_that_vanishes_is_not_waited_for() -> None:
    """A socket may be readable and yet have no frame, if its sender has gone since."""
    process = EngineProcess(EngineStart([sys.executable, "-c", "input(); input()"]), b"")
    try:
        readable = asyncio.get_running_loop().create_future()
        readable.set_result(zmq.POLLIN)
        process._reports.poll = lambda *_: readable  # pyright: ignore
        assert await asyncio.wait_for(process.receive(0.05), 5.0) is None
    finally:
        await process.stop()


async def test_a_lack_of_descriptors_is_no_failure_of_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever opens many connections must not have the engine replaced."""

    def refuse(_pid: int) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    process = EngineProcess(EngineStart([sys.executable, "-c", "input(); input()"]), b"")
    try:
        before = process.cpu_s()
        monkeypatch.setattr(psutil, "Process", refuse)
        assert process.cpu_s() == before
    finally:
        monkeypatch.undo()
        process.kill()
        await process.stop()


async def test_memory_outlives_the_process_that_wrote_it() -> None:
    memory = EngineMemory()
    code = "import os, sys; os.write(int(sys.argv[2].removeprefix('--kv-descriptor=')), b'left')"
    process = EngineProcess(EngineStart([sys.executable, "-c", code], memory), b"")
    await process.wait()
    await process.stop()
    assert os.pread(memory.descriptor, 10, 0) == b"left"


async def read_one(process: EngineProcess) -> Report | EngineError | None:
    try:
        return await process.receive(10.0)
    except EngineError as error:
        return error


def test_a_report_that_cannot_be_read_is_an_error_of_the_engine() -> None:
    frame = encode(BATCH)
    frames = [*damaged(frame, random.Random(1)), frame]
    with pytest.raises(UnicodeDecodeError):  # not an error of msgspec's own
        decode_report(frames[-2])
    reports = asyncio.run(reports_of(frames))
    assert reports[-1] == BATCH
    wrong = [report for report in reports[:-1] if not isinstance(report, EngineError)]
    assert not wrong
