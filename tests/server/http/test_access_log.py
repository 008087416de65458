"""The access log, and lines of the log as JSON."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest

from headway.logs import JsonFormatter
from tests.conftest import ROOT
from tests.support.apps import serving


def lines_of(caplog: pytest.LogCaptureFixture) -> list[dict]:
    return [
        json.loads(JsonFormatter("server").format(record))
        for record in caplog.records
        if record.name == "headway.access"
    ]


async def test_a_line_for_each_request_without_what_it_said(local, caplog) -> None:
    caplog.set_level(logging.INFO)
    async with serving(local, access_log=True, api_key=("secret-key",)) as apps:
        headers = {"authorization": "Bearer secret-key", "x-request-id": "mine"}
        body = {"prompt": "secret words", "max_tokens": 2}
        path = "/v1/completions?secret=query"
        answer = await apps.public.post(path, json=body, headers=headers)
        assert answer.status_code == 200
        assert (await apps.public.post("/v1/completions", json=body)).status_code == 401
    [served, refused] = lines_of(caplog)
    assert (served["method"], served["path"], served["status"]) == ("POST", "/v1/completions", 200)
    assert served["request_id"] == "mine"
    assert served["tenant"].startswith("key-")
    assert served["seconds"] > 0
    assert (refused["status"], refused["tenant"]) == (401, "")
    ours = [one.getMessage() for one in caplog.records if one.name.startswith("headway")]
    assert len(ours) >= 2
    assert "secret" not in "".join(ours)


async def test_probes_are_logged_only_if_they_fail(local, caplog) -> None:
    caplog.set_level(logging.INFO)
    async with serving(local, access_log=True, is_started=False) as apps:
        assert (await apps.public.get("/health/live")).status_code == 200
        assert (await apps.public.get("/health/ready")).status_code == 503
    assert [line["path"] for line in lines_of(caplog)] == ["/health/ready"]


async def test_a_path_cannot_begin_a_line_of_its_own(local, caplog) -> None:
    caplog.set_level(logging.INFO)
    async with serving(local, access_log=True) as apps:
        await apps.public.get("/a%0A2026-01-01 INFO forged")
    [record] = [one for one in caplog.records if one.name == "headway.access"]
    assert "\n" not in record.getMessage()
    assert lines_of(caplog)[0]["path"] == "/a\n2026-01-01 INFO forged"


async def test_by_default_there_is_none(local, caplog) -> None:
    caplog.set_level(logging.INFO)
    async with serving(local) as apps:
        await apps.public.get("/v1/models")
    assert not lines_of(caplog)


def test_every_line_of_a_process_is_json() -> None:
    code = (
        "import logging; from headway.logs import set_up_logging\n"
        "set_up_logging('json', 'engine')\n"
        "try: 1 / 0\n"
        "except ZeroDivisionError: logging.getLogger('x').exception('two\\nlines')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    [line] = done.stderr.splitlines()
    read = json.loads(line)
    assert (read["level"], read["process"], read["message"]) == ("error", "engine", "two\nlines")
    assert "ZeroDivisionError" in read["exception"]
    assert read["time"].endswith("+00:00")
