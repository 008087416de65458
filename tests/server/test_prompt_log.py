"""The log of prompts: only if asked for, and without what the patterns match."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from headway.errors import ConfigError
from headway.logs import JsonFormatter
from headway.server.prompt_log import MAX_CHARS, MAX_PATTERNS, REDACTED, open_prompt_log


@pytest.fixture
def patterns(tmp_path: Path) -> Path:
    path = tmp_path / "redact.txt"
    path.write_text("# keys and addresses\n\nhw-[a-z0-9]+\n[\\w.]+@[\\w.]+\n")
    return path


def lines_of(caplog: pytest.LogCaptureFixture) -> list[dict]:
    records = [one for one in caplog.records if one.name == "headway.prompts"]
    return [json.loads(JsonFormatter("server").format(record)) for record in records]


async def ask(made, **body: object) -> None:
    answer = await made.client.post("/v1/completions", json={"max_tokens": 2, **body})
    assert answer.status_code == 200, answer.text


async def test_by_default_no_prompt_is_logged(local, caplog) -> None:
    caplog.set_level(logging.DEBUG)
    await ask(await local(), prompt="quite private")
    assert "private" not in caplog.text


async def test_prompts_are_logged_without_what_matches(local, patterns, caplog) -> None:
    caplog.set_level(logging.INFO)
    made = await local(log_prompts=str(patterns))
    await ask(made, prompt=["my key is hw-abc123\nand\tmore", "mail a.b@example.org"])
    first, second = lines_of(caplog)
    assert first["prompt"] == f"my key is {REDACTED}\nand\tmore"
    assert second["prompt"] == f"mail {REDACTED}"
    assert (first["prompt_index"], second["prompt_index"]) == (0, 1)
    assert first["request_id"].startswith("cmpl-")
    text = "".join(one.getMessage() for one in caplog.records if one.name == "headway.prompts")
    assert "abc123" not in text and "example.org" not in text
    assert "\n" not in text, "a prompt cannot begin a line of its own"


async def test_a_fault_in_the_log_ends_no_request(local, patterns, caplog, monkeypatch) -> None:
    made = await local(log_prompts=str(patterns))
    monkeypatch.setattr("headway.server.prompt_log.json", None)
    await ask(made, prompt="x")
    assert "cannot be logged" in caplog.text


def test_what_the_patterns_match_is_not_shown_in_part(patterns) -> None:
    log = open_prompt_log(str(patterns))
    assert log is not None
    text = "x" * (MAX_CHARS - 5) + " hw-" + "a" * 100
    shown = log.redact(text)
    assert "hw-a" not in shown
    assert len(log.redact("y" * 10_000)) == MAX_CHARS + 3


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"fine\n(unclosed\n", "line 2 of"),
        (b"x\n" * (MAX_PATTERNS + 1), f"beyond {MAX_PATTERNS} patterns"),
        (b"x" * 2000, "of 1000 characters"),
        (b"\xff\xfe", "cannot read the patterns"),
    ],
)
def test_a_file_that_is_wrong_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "redact.txt"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        open_prompt_log(str(path))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="log_prompts: cannot read"):
        open_prompt_log(str(tmp_path / "none"))
    assert open_prompt_log(None) is None
