# pyright: basic, reportMissingImports=false
"""ChatOpenAI of langchain-openai, by the standard integration suite of langchain-tests.

The suite runs unchanged, over chat completions and over Responses. Tests of images, audio and files
are left out: the model reads text.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

from benchmarks.clients.uses.checks import MAX_DETAIL, Network, Result, parse_server, report

MAX_TOKENS = 400
"""Enough for the schemas of the suite, which bound no string."""

_NOT_STRICT = (
    "one schema of the test is sent as not strict, without additionalProperties: false, so other "
    "properties are valid, and the model adds one"
)
_NO_SCHEMA = (
    "JSON mode sends no schema, so any object is valid; the model does not write the keys that the "
    "question asks for"
)
KNOWN = {
    f"{api}: {test}": reason
    for api in ("chat", "responses")
    for test, reason in (
        ("test_structured_output_pydantic_2_v1", _NOT_STRICT),
        ("test_json_mode", _NO_SCHEMA),
    )
}
"""Why tests are expected to fail, by name."""


class TestChat(ChatModelIntegrationTests):
    """Over /v1/chat/completions; ChatOpenAI reads address and key from the environment."""

    @property
    def chat_model_class(self) -> type[ChatOpenAI]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "model": os.environ["MODEL"],
            "max_tokens": MAX_TOKENS,
            "stream_usage": True,
            # A seed makes runs equal. Greedily, so small a model repeats itself without end.
            "temperature": 0.7,
            "extra_body": {"seed": 1},
            # The suite expects one call where the model would repeat it.
            "model_kwargs": {"parallel_tool_calls": False},
        }

    @property
    def supports_json_mode(self) -> bool:
        return True


class TestResponses(TestChat):
    """Over /v1/responses."""

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**super().chat_model_params, "use_responses_api": True}


class Recorder:
    """Plugin of pytest that keeps the result of every test that ran."""

    def __init__(self) -> None:
        self.results: list[Result] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped or (report.when != "call" and report.passed):
            return
        _, kind, test = report.nodeid.split("::")
        name = f"{kind.removeprefix('Test').lower()}: {test}"
        detail = str(report.longrepr)[-MAX_DETAIL:] if report.failed else ""
        self.results.append(Result(name, report.passed, detail, KNOWN.get(name, "")))


def main() -> None:
    server, network, recorder = parse_server(), Network(), Recorder()
    os.environ["MODEL"] = server.model
    os.environ["OPENAI_BASE_URL"] = os.environ["OPENAI_API_BASE"] = server.openai_url
    os.environ["OPENAI_API_KEY"] = server.key
    options = ["-c", os.devnull, "--rootdir", ".", "-q", "-p", "no:cacheprovider"]
    options += ["--benchmark-disable", "-o", "asyncio_mode=auto"]
    # ChatOpenAI keeps one client for all its objects, and a client belongs to one event loop.
    for scope in ("test", "fixture"):
        options += ["-o", f"asyncio_default_{scope}_loop_scope=session"]
    pytest.main([*options, __file__], plugins=[recorder])
    for result in recorder.results:
        report(result)
    network.report()


if __name__ == "__main__":
    main()
