# pyright: basic, reportMissingImports=false
"""LlamaIndex with OpenAILike: chat, completions, function calls, structured programs."""

from __future__ import annotations

from typing import Any

import openai
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field

from benchmarks.clients.uses.checks import WRONG_KEY, Server, expect, raises, run
from benchmarks.clients.uses.tools import LONG, QUESTION, RESULT, SHORT

MESSAGES = [ChatMessage(role="system", content="Be brief."), ChatMessage(content=QUESTION)]


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=16)
    population: int = Field(ge=0, le=99_999_999)


def llm_of(server: Server, **options: Any) -> OpenAILike:
    given = {
        "model": server.model,
        "api_base": server.openai_url,
        "api_key": server.key,
        "is_chat_model": True,
        "is_function_calling_model": True,
        "max_tokens": SHORT,
        "temperature": 0,
        "max_retries": 0,
        **options,
    }
    return OpenAILike(**given)


def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"{city}: {RESULT}"


def chat_whole_and_streamed(server: Server) -> str:
    llm = llm_of(server)
    whole = llm.chat(MESSAGES).message.content
    streamed = "".join(part.delta or "" for part in llm.stream_chat(MESSAGES))
    expect(whole and streamed == whole, (streamed, whole))
    return whole


def completion_whole_and_streamed(server: Server) -> str:
    llm = llm_of(server, is_chat_model=False, is_function_calling_model=False)
    whole = llm.complete("One, two,").text
    streamed = "".join(part.delta or "" for part in llm.stream_complete("One, two,"))
    expect(whole and streamed == whole, (streamed, whole))
    return whole


async def asynchronous(server: Server) -> str:
    answer = await llm_of(server).achat(MESSAGES)
    expect(answer.message.content, answer)
    return answer.message.content


def function_call(server: Server) -> str:
    tool = FunctionTool.from_defaults(get_weather)
    llm = llm_of(server, max_tokens=LONG)
    answer = llm.chat_with_tools([tool], user_msg=QUESTION, tool_required=True)
    calls = llm.get_tool_calls_from_response(answer)
    expect(calls and calls[0].tool_name == "get_weather", answer)
    expect(set(calls[0].tool_kwargs) == {"city"}, calls)
    return str(calls[0].tool_kwargs)


def predict_and_call(server: Server) -> str:
    tool = FunctionTool.from_defaults(get_weather)
    llm = llm_of(server, max_tokens=LONG)
    answer = llm.predict_and_call(
        [tool], user_msg=QUESTION, tool_required=True, allow_parallel_tool_calls=False
    )
    expect(RESULT in answer.response, answer)
    return answer.response


def structured_by_schema(server: Server) -> str:
    llm = llm_of(server, max_tokens=LONG, should_use_structured_outputs=True)
    city = llm.structured_predict(City, PromptTemplate("A city as JSON."))
    expect(isinstance(city, City), city)
    return repr(city)


def structured_by_tool(server: Server) -> str:
    llm = llm_of(server, max_tokens=LONG)
    city = llm.as_structured_llm(City).chat(MESSAGES).raw
    expect(isinstance(city, City), city)
    return repr(city)


def errors(server: Server) -> str:
    wrong = llm_of(server, api_key=WRONG_KEY)
    raises(openai.AuthenticationError, lambda: wrong.chat(MESSAGES))
    raises(openai.NotFoundError, lambda: llm_of(server, model="other").chat(MESSAGES))
    return "401, 404"


if __name__ == "__main__":
    run(
        chat_whole_and_streamed,
        completion_whole_and_streamed,
        asynchronous,
        function_call,
        predict_and_call,
        structured_by_schema,
        structured_by_tool,
        errors,
    )
