"""Checks that mutated frames end their own session and nothing else.

    python -m benchmarks.faults.mutated_frames [MODEL] [--frames 10000] [--seed 5] [--json FILE]

Starts an engine on loopback without a key, so that every frame reaches the decoder: `headway
engine` with MODEL, or an engine host with the fake engine. Frames of every kind of message are
changed, cut and repeated, and sent over many connections, with and without a Hello before them. A
good frontend beside them streams all the time, and every stream is compared with one before the
frames.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from benchmarks.support.fleet_loads import bodies, run_undisturbed
from benchmarks.support.fleets import Fleet, RunningEngine
from benchmarks.support.history import History, problems
from benchmarks.support.servers import RunningServer
from benchmarks.support.tiny_tokenizers import write_byte_level
from headway.core.params import SamplingParams
from headway.core.request import FinishReason
from headway.core.terms import Terms
from headway.engine.process.messages import AddRequest, Past, SampleRecord
from headway.fleet.network.wire import (
    PROTOCOL_VERSION,
    Abort,
    Add,
    Adopt,
    Heartbeat,
    Hello,
    decode_engine_message,
    encode,
)

HELLO = encode(Hello(PROTOCOL_VERSION, "mutated"))
END = b"\xc1"
"""No message begins so: the engine ends the session."""
NUM_CONNECTIONS = 16
MAX_WAIT_MS = 500


def messages(epoch: int = 1) -> list[bytes]:
    """Return a frame of every kind of message of a frontend."""
    one = AddRequest("cmpl-1f", [65, 66], SamplingParams(max_tokens=4), 7, 5.0)
    two = AddRequest("cmpl-2f", [65] * 9, SamplingParams(max_tokens=8, n=3, logprobs=2), 7, 5.0)
    params = SamplingParams(max_tokens=9)
    again = AddRequest(
        "cmpl-3f#1", [65] * 6, params, 7, 5.0, index=1, num_prompt_tokens=3, attempt=1
    )
    noted = AddRequest("cmpl-4f", [65], params, 7, 5.0, terms=Terms("tenant"), note=b"note")
    past = Past(2, [SampleRecord(1, [65, 66]), SampleRecord(0, [67], None, FinishReason.STOP)])
    resent = AddRequest(
        "cmpl-5f#1",
        [65, 65, 66],
        params,
        7,
        5.0,
        index=1,
        num_prompt_tokens=1,
        note=b"note",
        past=past,
    )
    return [
        *(encode(Add(epoch, 5.5, request)) for request in (one, two, again)),
        encode(Abort(epoch, ["0:cmpl-1f"], FinishReason.STOP)),
        *(encode(Add(epoch, 5.5, request)) for request in (noted, resent)),
        encode(Adopt("cmpl-4f", "tenant")),
        encode(Heartbeat(10)),
        HELLO,
    ]


def mutate(frame: bytes, draw: random.Random) -> bytes:
    """Change bits, cut, repeat or insert bytes."""
    kind, at = draw.randrange(5), draw.randrange(len(frame))
    if kind == 0:
        return frame[:at]
    if kind == 1:
        return frame[:at] + draw.randbytes(draw.randrange(1, 9)) + frame[at:]
    if kind == 2:
        return frame[:at] + frame[at // 2 :]
    changed = bytearray(frame)
    for _ in range(draw.randrange(1, 6)):
        changed[draw.randrange(len(changed))] = draw.randrange(256)
    return bytes(changed)


async def send_frames(address: str, num_frames: int, seed: int) -> Counter[str]:
    """Send mutated frames, each in a session of its own; return the answers by kind."""
    draw, answers = random.Random(seed), Counter[str]()
    context, frames = zmq.asyncio.Context(), messages()
    try:
        for first in range(0, num_frames, NUM_CONNECTIONS):
            num_here = min(NUM_CONNECTIONS, num_frames - first)
            dealers = [context.socket(zmq.DEALER) for _ in range(num_here)]
            for dealer in dealers:
                dealer.connect(address)
                await _send_session(dealer, frames, draw)
            for dealer in dealers:
                while await dealer.poll(MAX_WAIT_MS if answers["EngineUp"] == 0 else 1):
                    answers[type(decode_engine_message(await dealer.recv())).__name__] += 1
                dealer.close(linger=1000)
    finally:
        context.destroy(linger=1000)
    return answers


async def _send_session(
    dealer: zmq.asyncio.Socket, frames: Sequence[bytes], draw: random.Random
) -> None:
    """Send a Hello, some good frames, a mutated one, and mostly the end of the session."""
    if draw.random() < 0.1:
        await dealer.send(mutate(HELLO, draw))
        return
    await dealer.send(HELLO)
    # The mutated frame may then be about a live request.
    for frame in draw.sample(frames[:7], draw.randrange(4)):
        await dealer.send(frame)
    parts = [mutate(draw.choice(frames), draw)]
    await dealer.send_multipart(parts * (1 if draw.random() < 0.95 else draw.randrange(2, 5)))
    if draw.random() < 0.9:  # the requests of the others run until the connection is gone
        await dealer.send(END)


async def run(
    engine: RunningEngine, frontend: RunningServer, num_frames: int, seed: int, num_streams: int = 8
) -> dict[str, Any]:
    """Send the frames beside a good frontend; return what happened."""
    await asyncio.to_thread(frontend.wait_ready)
    requests = bodies(60)[:num_streams]
    references = await run_undisturbed(frontend, requests)
    pid, began_at = engine.engine_pid, time.monotonic()
    sending = asyncio.create_task(send_frames(engine.address, num_frames, seed))
    runs: list[Sequence[History]] = []
    while not sending.done():
        runs.append(await run_undisturbed(frontend, requests))
    answers = await sending
    took_s = time.monotonic() - began_at
    runs.append(await run_undisturbed(frontend, requests))
    pairs = [pair for run in runs for pair in zip(run, references, strict=True)]
    return {
        "frames": num_frames,
        "seconds": round(took_s, 1),
        "answers": dict(answers),
        "sessions_of_mutated_frames": engine.log.count("frontend mutated is connected"),
        "frames_that_were_no_message": engine.log.count("sent what is no message"),
        "requests_refused": engine.log.count("is refused"),
        "streams_beside": len(pairs),
        "streams_that_differ": [found for pair in pairs if (found := problems(*pair))],
        "engine_restarts": engine.log.count("replacing the engine") + (engine.engine_pid != pid),
        "host_exit_code": engine.process.poll(),
        "exceptions_in_the_log": engine.log.count("Traceback"),
        "reconnects_of_the_frontend": frontend.log.count(" is up: ") - 1,
    }


def failures_in(report: dict[str, Any]) -> list[str]:
    """Return what must not have happened."""
    names = ("streams_that_differ", "engine_restarts", "exceptions_in_the_log")
    failures = [f"{name}: {report[name]}" for name in names if report[name]]
    if report["host_exit_code"] is not None:
        failures.append(f"the engine ended with {report['host_exit_code']}")
    if report["reconnects_of_the_frontend"]:
        failures.append("the good frontend lost its connection")
    # One in ten has no good Hello.
    if report["sessions_of_mutated_frames"] < 0.8 * report["frames"]:
        failures.append("too few frames came from within a session")
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--frames", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = write_byte_level(folder / "tokenizer.gguf", pre="gpt-2")
        with closing(Fleet(folder, tokenizer)) as fleet:
            if args.model is None:
                engine = fleet.start_engine(step_s=0.005, num_blocks=2048).wait_ready()
                frontend = fleet.start_frontend()
            else:
                flags = ("--kv-cache-memory-bytes", "64M")
                engine = fleet.start_model_engine(args.model, *flags).wait_ready()
                frontend = fleet.start_model_frontend(args.model)
            report = asyncio.run(run(engine, frontend, args.frames, args.seed))
    failures = failures_in(report)
    text = json.dumps({**report, "failures": failures}, indent=2)
    print(text)
    if args.json is not None:
        args.json.write_text(text + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
