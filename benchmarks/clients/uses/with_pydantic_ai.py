# pyright: basic, reportMissingImports=false
"""PydanticAI: agents with typed output by tools and by schemas, over both APIs."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field
from pydantic_ai import Agent, ModelHTTPError, NativeOutput, ToolOutput
from pydantic_ai.embeddings import Embedder
from pydantic_ai.embeddings.openai import OpenAIEmbeddingModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from benchmarks.clients.uses.checks import WRONG_KEY, Check, Server, expect, raises_async, run
from benchmarks.clients.uses.tools import LONG, QUESTION, RESULT, SHORT

KINDS: dict[str, Any] = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}


class Weather(BaseModel):
    city: str = Field(max_length=16)
    sky: Literal["sunny", "cloudy", "rainy"]


def model_of(server: Server, kind: str, key: str = "") -> Any:
    provider = OpenAIProvider(base_url=server.openai_url, api_key=key or server.key)
    return KINDS[kind](server.model, provider=provider)


async def text_whole_and_streamed(model: Any) -> str:
    agent = Agent(model, system_prompt=("Be brief.", "Be exact."))
    settings: Any = {"max_tokens": SHORT, "temperature": 0}
    whole = await agent.run(QUESTION, model_settings=settings)
    async with agent.run_stream(QUESTION, model_settings=settings) as stream:
        pieces = [piece async for piece in stream.stream_text(delta=True, debounce_by=None)]
    expect("".join(pieces) == whole.output and whole.output, (pieces, whole.output))
    return whole.output


async def output_by_tool(model: Any) -> str:
    agent = Agent(model, output_type=ToolOutput(Weather))
    result = await agent.run(QUESTION, model_settings={"max_tokens": LONG})
    expect(isinstance(result.output, Weather), result)
    return repr(result.output)


async def output_by_schema(model: Any) -> str:
    agent = Agent(model, output_type=NativeOutput(Weather))
    settings: Any = {"max_tokens": LONG}
    async with agent.run_stream(QUESTION, model_settings=settings) as stream:
        output = await stream.get_output()
    expect(isinstance(output, Weather), output)
    return repr(output)


async def function_call_and_its_history(model: Any) -> str:
    """The output is what a function returns, so the model must call the function."""

    def get_weather(city: Literal["Paris", "Rome"]) -> str:
        """The weather in a city."""
        return f"{city}: {RESULT}"

    first = await Agent(model, output_type=get_weather).run(
        QUESTION, model_settings={"max_tokens": LONG}
    )
    expect(RESULT in first.output, first)
    second = await Agent(model).run(
        "And in Rome?",
        message_history=first.all_messages(),
        model_settings={"max_tokens": SHORT},
    )
    expect(second.output, second)
    return first.output


async def history(model: Any) -> str:
    agent = Agent(model)
    settings: Any = {"max_tokens": SHORT}
    first = await agent.run(QUESTION, model_settings=settings)
    second = await agent.run(
        "And in Rome?", message_history=first.all_messages(), model_settings=settings
    )
    expect(len(second.all_messages()) == 4 and second.usage.input_tokens, second)
    return repr(second.output)


def over(kind: str, check: Any) -> Check:
    """Return the check with a model over one of the two APIs."""

    async def checked(server: Server) -> str:
        return await check(model_of(server, kind))

    checked.__name__ = f"{kind}: {check.__name__}"
    return checked


async def embeddings(server: Server) -> str:
    provider = OpenAIProvider(base_url=server.openai_url, api_key=server.key)
    found = await Embedder(OpenAIEmbeddingModel(server.model, provider=provider)).embed_query("a")
    expect(len(found.embeddings[0]) > 1, found)
    return f"{len(found.embeddings[0])} numbers"


async def errors(server: Server) -> str:
    for kind in KINDS:
        agent = Agent(model_of(server, kind, WRONG_KEY))
        error = await raises_async(ModelHTTPError, agent.run(QUESTION))
        expect(error.status_code == 401, error)
    return "401"


if __name__ == "__main__":
    common = (
        text_whole_and_streamed,
        output_by_tool,
        output_by_schema,
        function_call_and_its_history,
        history,
    )
    run(*(over(kind, check) for kind in KINDS for check in common), embeddings, errors)
