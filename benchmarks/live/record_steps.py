"""Records servers with the real model and replays every plan.

    python -m benchmarks.live.record_steps MODEL [--steps 100000] [--minutes 40] [--folder DIR]
        [--life 120] [--threads N] [--json FILE]

One server after the other, under each policy in turn: tenants with weights, targets, a KV quota and
spot requests; a KV cache that is too small; samples, second turns, shared prefixes, stop strings,
clients that leave, and an engine that is killed twice in each life. After each life its recordings
are replayed. Ends after so many steps or minutes. With --folder, earlier recordings there count.

Then the checks are checked. One byte of a recording is altered: the damaged block is named, after
the steps before it. The digest of one step is altered, with a right checksum: that step is found.
Constants of the scheduler are altered: some step differs.

`--life 30 --steps 1500 --folder tests/record/data` makes those of tests/record/test_gate.py.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import msgspec

from benchmarks.live.record_clients import Life, live
from benchmarks.support import proc_stats
from headway.core.events import Admitted, Event, Forked, Preempted
from headway.errors import RecordingError
from headway.record.entries import (
    DIGEST_BYTES,
    SUFFIX,
    AbortEntry,
    AddEntry,
    BeginEntry,
    Entry,
    RestoredEntry,
    decode_entries,
    encode,
)
from headway.record.kinds import ENGINE
from headway.record.parts import BLOCK_HEADER_BYTES, LENGTHS, MAGIC, make_block
from headway.record.reader import RecordingReader
from headway.record.replay import PlanDifference, ReplayedEngine, find_difference

POLICIES = ("fair", "deadline", "priority", "fcfs")
NUM_BYTES, NUM_DIGESTS, NUM_FOR_CONSTANTS = 60, 10, 12
CONSTANTS: dict[str, Any] = {
    "headway.core.scheduler.MAX_SKIPS": 16,
    "headway.core.waiting.accounts.OUTPUT_COST": 4.0,
    "headway.core.running.headroom.BLOCKS_PER_PREEMPTION": 2.0,
    "headway.core.running.spot_time.SPOT_SHARE": 0.2,
    "headway.core.kv.eviction.MAX_GROUP_SHARE": 0.9,
}


class Unequal(Exception):
    """A replay has found a difference, or an alteration was not found."""


def replay(path: Path) -> tuple[int, Counter[str]]:
    """Replay a recording; return its steps and what happened in it."""
    reader, seen = RecordingReader.open(path, ENGINE), Counter[str]()
    engine = ReplayedEngine(reader.header)
    engine.on_events = lambda events: seen.update(map(_name_event, events))
    difference = find_difference(reader, engine)
    if difference is not None:
        raise Unequal(f"{path}: {difference}")
    seen.update(map(_name_entry, RecordingReader.open(path, ENGINE).entries()))
    del seen[""]
    return engine.num_steps, seen


def _name_event(event: Event) -> str:
    match event:
        case Preempted(method=method):
            return f"preempted, {method}"
        case Forked():
            return "samples forked"
        case Admitted(is_resumed=False, num_cached_tokens=number) if number:
            return "prefix hits"
        case _:
            return ""


def _name_entry(entry: Entry) -> str:
    match entry:
        case AbortEntry():
            return "aborted"
        case AddEntry(is_refused=True):
            return "refused by the engine"
        case AddEntry(is_resent=True):
            return "of a killed engine"
        case AddEntry():
            return "requests"
        case RestoredEntry(blocks=blocks) if blocks:
            return "engines with KV blocks of a killed one"
        case _:
            return ""


def first_files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*.0000{SUFFIX}"))


# ---------------------------------------------------------------------- the checks


def find_step(path: Path) -> tuple[int, str]:
    """Return the equal steps before the first fault of a recording, and the fault."""
    engine = None
    try:
        reader = RecordingReader.open(path, ENGINE)
        engine = ReplayedEngine(reader.header)
        difference = find_difference(reader, engine)
    except RecordingError as error:
        return (0 if engine is None else engine.num_steps), str(error)
    if isinstance(difference, PlanDifference):
        return difference.step - 1, "differs"
    return engine.num_steps, "" if difference is None else "differs"


def blocks_of(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield where each block of a file begins, and its content."""
    at = len(MAGIC)
    while at < len(content):
        length, _ = LENGTHS.unpack_from(content, at)
        start = at + BLOCK_HEADER_BYTES
        at, begin = start + length, at
        if at <= len(content):
            yield begin, content[start:at]


def check_bytes(path: Path, draw: random.Random) -> int:
    """Alter single bytes; each must be found in its block, after the steps before it."""
    content = path.read_bytes()
    steps_before: dict[int, int] = {}
    num_steps, is_header, end = 0, True, 0
    for at, block in blocks_of(content):
        steps_before[at], end = num_steps, at + BLOCK_HEADER_BYTES + len(block)
        entries = [] if is_header else decode_entries(block)
        is_header = False
        num_steps += sum(isinstance(one, BeginEntry) and bool(one.digest) for one in entries)
    for _ in range(NUM_BYTES):
        position = draw.randrange(len(MAGIC), end)
        altered = bytearray(content)
        altered[position] ^= draw.randint(1, 255)
        begin = max(at for at in steps_before if at <= position)
        with _written(bytes(altered)) as file:
            found = find_step(file)
        if found[0] != steps_before[begin] or f"damaged at byte {begin}" not in found[1]:
            raise Unequal(f"byte {position} of {path}, in the block at {begin}: found {found}")
    return NUM_BYTES


def check_digests(path: Path, draw: random.Random) -> int:
    """Alter the digest of one step, and the checksum with it; the step must be found."""
    reader = RecordingReader.open(path, ENGINE)
    entries = list(reader.entries())
    begun = [at for at, one in enumerate(entries) if isinstance(one, BeginEntry) and one.digest]
    for number in sorted(draw.sample(range(len(begun)), min(NUM_DIGESTS, len(begun)))):
        altered = list(entries)
        altered[begun[number]] = msgspec.structs.replace(
            entries[begun[number]], digest=bytes(DIGEST_BYTES)
        )
        blocks = [make_block(encode(one)) for one in (reader.header, altered)]
        with _written(b"".join((MAGIC, *blocks))) as file:
            found = find_step(file)
        if found != (number, "differs"):
            raise Unequal(f"step {number + 1} of {path} was altered: found {found}")
    return min(NUM_DIGESTS, len(begun))


def check_constants(paths: Sequence[Path]) -> dict[str, str]:
    """Alter constants; a replay of some recording must differ, if there are many.

    Not every recording depends on every constant: they are replayed until one differs.
    """
    caught: dict[str, str] = {}
    for name, value in CONSTANTS.items():
        with patch(name, value):
            found = ((number, *find_step(path)) for number, path in enumerate(paths, 1))
            number, step, fault = next((one for one in found if one[2]), (0, 0, ""))
        if not fault and len(paths) >= NUM_FOR_CONSTANTS:
            raise Unequal(f"{name} = {value} changes no step of {len(paths)} recordings")
        what = f"{fault} at step {step + 1} of recording {number}" if fault else "differs nowhere"
        caught[name] = f"{value:g}: {what} of {len(paths)}"
    return caught


@contextmanager
def _written(content: bytes) -> Iterator[Path]:
    with TemporaryDirectory() as name:
        path = Path(name) / f"altered.0000{SUFFIX}"
        path.write_bytes(content)
        yield path


# -------------------------------------------------------------------------- the run


def record(args: Any, folder: Path) -> tuple[int, Counter[str]]:
    """Let servers live until there are enough steps; return all steps and counts."""
    until = time.monotonic() + 60.0 * args.minutes
    num_steps, seen, known, policies = 0, Counter[str](), set[Path](), cycle(POLICIES)
    while True:
        for path in [one for one in first_files(folder) if one not in known]:
            found, happened = replay(path)
            known.add(path)
            num_steps += found
            seen += happened
        print(f"{num_steps} steps of {len(known)} engines are equal", flush=True)
        if num_steps >= args.steps or time.monotonic() >= until:
            return num_steps, seen
        life = Life(next(policies), args.life, len(known), args.kills, args.threads)
        print(f"{life.policy}: {dict(live(args.model, life, folder))}", flush=True)


def run(args: Any, folder: Path) -> dict[str, Any]:
    num_steps, seen = record(args, folder)
    paths = first_files(folder)
    command = [sys.executable, "-m", "headway", "replay", str(folder)]
    code = subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode
    print(f"headway replay: {code}; {dict(seen)}", flush=True)
    draw = random.Random("alterations")
    small = sorted(paths, key=lambda path: path.stat().st_size)[len(paths) // 4]
    report = {
        "steps": num_steps,
        "engines": len(paths),
        "bytes": sum(path.stat().st_size for path in folder.glob(f"*{SUFFIX}")),
        "seen": dict(sorted(seen.items())),
        "replay_code": code,
        "bytes_altered": check_bytes(small, draw),
        "digests_altered": check_digests(small, draw),
        "constants_altered": check_constants(paths),
    }
    for name, value in report.items():
        print(f"{name}: {value}", flush=True)
    return report


def main() -> int:
    parser = proc_stats.battery_parser(__doc__, can_fake=False)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--life", type=float, default=120.0, help="seconds of each server")
    parser.add_argument("--kills", type=int, default=2, help="engines killed in each life")
    parser.add_argument("--threads", type=int, help="threads of the executor")
    parser.add_argument("--folder", type=Path, help="keep the recordings here")
    args = proc_stats.arguments(parser)
    with TemporaryDirectory() as name:
        try:
            report = run(args, args.folder or Path(name))
        except Unequal as error:
            return proc_stats.conclude({}, [str(error)], args)
    failures = [] if report["replay_code"] == 0 else ["headway replay found a difference"]
    if report["steps"] < args.steps:
        failures.append(f"{report['steps']} of {args.steps} steps in {args.minutes:g} minutes")
    return proc_stats.conclude(report, failures, args)


if __name__ == "__main__":
    sys.exit(main())
