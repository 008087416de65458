"""`headway batch` as a person meets it: right, wrong, and interrupted."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

from benchmarks.support.batches import jsonl, line
from tests.cli.test_cli import headway
from tests.conftest import ROOT


def test_a_file_is_submitted_followed_fetched_and_cancelled(launch, tmp_path: Path) -> None:
    settings = {"batch_dir": str(tmp_path / "batches"), "api_key": ["k"]}
    server = launch(server=settings, scheduling_policy="fair").wait_ready("k")
    file = tmp_path / "in.jsonl"
    file.write_bytes(jsonl([line(number, seed=1, max_tokens=5) for number in range(10)]))
    where = ("--url", server.url, "--api-key", "k")

    whole = headway("batch", "submit", str(file), "--wait", *where)
    assert whole.returncode == 0, whole.stderr
    answers = [json.loads(text) for text in whole.stdout.splitlines()]
    assert sorted(one["custom_id"] for one in answers) == sorted(f"r{n}" for n in range(10))
    assert "10 of 10 answered" in whole.stderr

    batch_id = whole.stderr.split(";")[0].split()[-1]
    shown = json.loads(headway("batch", "status", batch_id, *where).stdout)
    assert shown["status"] == "completed" and shown["id"] == batch_id
    assert headway("batch", "results", batch_id, *where).stdout == whole.stdout

    file.write_bytes(jsonl([line(number, ignore_eos=True, max_tokens=1900) for number in range(9)]))
    command = [sys.executable, "-m", "headway", "batch", "submit", str(file), "--wait", *where]
    # A process inherits an ignored SIGINT, as in a background job, but no handler.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    signal.signal(signal.SIGINT, handler)
    assert process.stderr is not None
    batch_id = process.stderr.readline().split(";")[0]
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    assert "Traceback" not in process.stderr.read()
    process.stderr.close()
    early = headway("batch", "results", batch_id, *where)
    assert early.returncode == 2 and "has not ended" in early.stderr
    cancelled = headway("batch", "cancel", batch_id, *where)
    assert cancelled.returncode == 0 and "cancel" in cancelled.stdout

    file.write_bytes(jsonl([line(1, n=0)]))
    wrong = headway("batch", "submit", str(file), "--wait", *where)
    assert wrong.returncode == 1 and "line 1: n" in wrong.stderr and not wrong.stdout

    refused = headway("batch", "status", batch_id, "--url", server.url)
    assert refused.returncode == 2 and "API key" in refused.stderr
    assert "Traceback" not in "".join(one.stderr for one in (whole, early, wrong, refused))


def test_a_mistake_is_one_line_that_says_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_bytes(jsonl([line(1)]))
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    nobody = ("--url", "http://127.0.0.1:1")
    for arguments, hint in (
        (("submit", str(tmp_path / "none.jsonl")), "No such file"),
        (("submit", str(empty)), "custom_id"),
        (("submit", str(file), *nobody), "--batch-dir"),
        (("status", "batch_1", *nobody), "--batch-dir"),
        (("status", "batch_1", "--url", "ftp://x"), "http://"),
    ):
        done = headway("batch", *arguments)
        assert done.returncode == 2 and not done.stdout
        assert done.stderr.count("\n") == 1 and hint in done.stderr, done.stderr
    assert headway("batch", "submit", str(file), "--wat").returncode == 2
