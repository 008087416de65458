# pyright: basic, reportMissingImports=false
"""instructor: pydantic models by named tools, by schemas and by prompts; lists; retries."""

from __future__ import annotations

from typing import Any, Literal

import instructor
import openai
from instructor.core import InstructorRetryException
from pydantic import BaseModel, Field, field_validator

from benchmarks.clients.uses.checks import WRONG_KEY, Check, Server, expect, raises, run
from benchmarks.clients.uses.tools import LONG, MESSAGES

MODES = ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS")


class City(BaseModel):
    name: str = Field(max_length=16)
    population: int = Field(ge=0, le=99_999_999)


class Sky(BaseModel):
    state: Literal["sunny", "cloudy", "rainy"]


class Impossible(BaseModel):
    state: Literal["sunny", "cloudy"]

    @field_validator("state")
    @classmethod
    def refuse(cls, value: str) -> str:
        raise ValueError(f"{value} is never right")


def client_of(server: Server, mode: str, key: str = "") -> Any:
    given = openai.OpenAI(base_url=server.openai_url, api_key=key or server.key, max_retries=0)
    return instructor.from_openai(given, mode=instructor.Mode[mode])


def fields_of(server: Server) -> dict[str, Any]:
    return {"model": server.model, "messages": MESSAGES, "max_tokens": LONG, "max_retries": 0}


def by(mode: str) -> Check:
    """Return a check of one mode."""

    def checked(server: Server) -> str:
        city = client_of(server, mode).create(response_model=City, **fields_of(server))
        expect(isinstance(city, City), city)
        return repr(city)

    checked.__name__ = f"mode {mode}"
    return checked


def partial_objects(server: Server) -> str:
    create = client_of(server, "TOOLS").create_partial
    parts = list(create(response_model=City, **fields_of(server)))
    expect(len(parts) > 1 and parts[-1].name is not None, parts)
    return f"{len(parts)} parts, {parts[-1]!r}"


def list_of_objects(server: Server) -> str:
    fields = {**fields_of(server), "temperature": 0}
    found = list(client_of(server, "TOOLS").create_iterable(response_model=Sky, **fields))
    expect(found and all(isinstance(one, Sky) for one in found), found)
    return f"{len(found)} objects"


def with_the_answer(server: Server) -> str:
    create = client_of(server, "TOOLS").create_with_completion
    sky, answer = create(response_model=Sky, **fields_of(server))
    expect(answer.usage.completion_tokens > 0 and isinstance(sky, Sky), answer)
    return repr(sky)


def retry_sends_the_error_back(server: Server) -> str:
    create = client_of(server, "TOOLS").create
    fields = {**fields_of(server), "max_retries": 2, "response_model": Impossible}
    error = raises(InstructorRetryException, lambda: create(**fields))
    expect("never right" in str(error) and error.n_attempts > 1, error)
    return f"{error.n_attempts} attempts"


def errors(server: Server) -> str:
    create = client_of(server, "TOOLS", WRONG_KEY).create
    error = raises(Exception, lambda: create(response_model=Sky, **fields_of(server)))
    expect("401" in str(error), error)
    return type(error).__name__


if __name__ == "__main__":
    run(
        *map(by, MODES),
        partial_objects,
        list_of_objects,
        with_the_answer,
        retry_sends_the_error_back,
        errors,
    )
