# pyright: basic, reportMissingImports=false
"""openai-agents: agents with tools, hand-offs, schemas and sessions, over both APIs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Literal

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    WebSearchTool,
    function_tool,
)
from pydantic import BaseModel, Field

from benchmarks.clients.uses.checks import WRONG_KEY, Check, Server, expect, raises_async, run
from benchmarks.clients.uses.tools import QUESTION, RESULT

MAX_TOKENS = 600
KINDS = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}
AgentCheck = Callable[[Any, "Calls"], Awaitable[str]]


class Weather(BaseModel):
    city: str = Field(max_length=16)
    sky: Literal["sunny", "cloudy", "rainy"]


class Calls:
    """A tool, and the cities that it was called with."""

    def __init__(self) -> None:
        self.cities: list[str] = []

        def get_weather(city: Literal["Paris", "Rome"]) -> str:
            """The weather in a city."""
            self.cities.append(city)
            return RESULT

        self.tool = function_tool(get_weather)


def settings_of(**fields: Any) -> ModelSettings:
    """Return settings under which answers end by themselves: the client refuses cut ones."""
    return ModelSettings(temperature=0, max_tokens=MAX_TOKENS, **fields)


async def whole_with_tool(model: Any, calls: Calls) -> str:
    settings = settings_of(tool_choice="required", parallel_tool_calls=False)
    agent = Agent(name="weather", model=model, tools=[calls.tool], model_settings=settings)
    result = await Runner.run(agent, QUESTION)
    expect(len(calls.cities) == 1 and result.final_output, result)
    return f"{calls.cities}, then {str(result.final_output)[:60]!r}"


async def streamed_with_tool(model: Any, calls: Calls) -> str:
    settings = settings_of(tool_choice="required")
    agent = Agent(name="weather", model=model, tools=[calls.tool], model_settings=settings)
    result = Runner.run_streamed(agent, QUESTION)
    kinds = [event.type async for event in result.stream_events()]
    expect(calls.cities and result.final_output and "raw_response_event" in kinds, kinds)
    return f"{len(kinds)} events, {len(calls.cities)} calls"


async def output_type(model: Any, calls: Calls) -> str:
    settings = settings_of()
    agent = Agent(name="weather", model=model, output_type=Weather, model_settings=settings)
    result = await Runner.run(agent, QUESTION)
    expect(isinstance(result.final_output, Weather), result)
    return repr(result.final_output)


async def hand_off(model: Any, calls: Calls) -> str:
    expert = Agent(name="expert", model=model, model_settings=settings_of())
    settings = settings_of(tool_choice="required", parallel_tool_calls=False)
    first = Agent(name="first", model=model, handoffs=[expert], model_settings=settings)
    result = await Runner.run(first, QUESTION)
    expect(result.last_agent.name == "expert" and result.final_output, result)
    return str(result.final_output)[:60]


async def session(model: Any, calls: Calls) -> str:
    agent = Agent(name="chat", model=model, model_settings=settings_of())
    memory = SQLiteSession("check")
    await Runner.run(agent, "Say hello.", session=memory)
    await Runner.run(agent, "Say goodbye.", session=memory)
    items = await memory.get_items()
    expect([item["role"] for item in items] == ["user", "assistant"] * 2, items)
    return f"{len(items)} items"


async def hosted_tool_beside(model: Any, calls: Calls) -> str:
    """A hosted tool is not offered to the model; the others are."""
    tools = [WebSearchTool(), calls.tool]
    settings = settings_of(tool_choice="required")
    agent = Agent(name="weather", model=model, tools=tools, model_settings=settings)
    result = await Runner.run(agent, QUESTION)
    expect(calls.cities and result.final_output, result)
    return str(calls.cities)


def over(kind: str, check: AgentCheck) -> Check:
    """Return the check with a model over one of the two APIs."""

    async def checked(server: Server) -> str:
        async with openai.AsyncOpenAI(base_url=server.openai_url, api_key=server.key) as client:
            return await check(KINDS[kind](server.model, client), Calls())

    checked.__name__ = f"{kind}: {getattr(check, '__name__', '')}"
    return checked


async def errors(server: Server) -> str:
    async with openai.AsyncOpenAI(base_url=server.openai_url, api_key=WRONG_KEY) as client:
        for kind in KINDS.values():
            agent = Agent(name="chat", model=kind(server.model, client))
            await raises_async(openai.AuthenticationError, Runner.run(agent, QUESTION))
    return "401"


if __name__ == "__main__":
    common = (whole_with_tool, streamed_with_tool, output_type, hand_off, session)
    run(
        *(over(kind, check) for kind in KINDS for check in common),
        over("responses", hosted_tool_beside),
        errors,
    )
