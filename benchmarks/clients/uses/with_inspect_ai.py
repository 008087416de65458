# pyright: basic, reportMissingImports=false
"""inspect-ai: evaluations with its provider for OpenAI's API, and single calls of a model."""

from __future__ import annotations

from typing import Any, Literal

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import (
    ChatMessageUser,
    GenerateConfig,
    ResponseSchema,
    execute_tools,
    get_model,
)
from inspect_ai.scorer import choice, includes
from inspect_ai.solver import generate, multiple_choice, use_tools
from inspect_ai.tool import ToolFunction, tool
from inspect_ai.util import json_schema
from pydantic import BaseModel

from benchmarks.clients.uses.checks import WRONG_KEY, Server, expect, run
from benchmarks.clients.uses.tools import LONG, QUESTION, RESULT, SHORT


class Weather(BaseModel):
    """Without strings of any length: the client drops their bounds from the schema."""

    city: Literal["Paris", "Rome"]
    sky: Literal["sunny", "cloudy", "rainy"]


@tool
def get_weather() -> Any:
    async def execute(city: str) -> str:
        """The weather in a city.

        Args:
            city: Name of the city.
        """
        return f"{city}: {RESULT}"

    return execute


def model_of(server: Server, key: str = "", **options: Any) -> Any:
    return get_model(
        f"openai-api/headway/{server.model}",
        base_url=server.openai_url,
        api_key=key or server.key,
        memoize=False,
        **options,
    )


def evaluate(server: Server, task: Task, **options: Any) -> Any:
    model = model_of(server, options.pop("key", ""))
    (log,) = eval(task, model=model, display="none", log_dir="logs", **options)
    return log


def generation_task(server: Server) -> str:
    samples = [Sample(input=f"Say {word}.", target=word) for word in ("one", "two", "three")]
    task = Task(dataset=samples, solver=generate(), scorer=includes())
    log = evaluate(server, task, max_tokens=SHORT, temperature=0, seed=1)
    expect(log.status == "success" and len(log.samples) == 3, log.error)
    return f"{log.results.completed_samples} samples"


def multiple_choice_task(server: Server) -> str:
    sample = Sample(input="The capital of France?", choices=["Paris", "Rome"], target="A")
    task = Task(dataset=[sample], solver=multiple_choice(), scorer=choice())
    log = evaluate(server, task, max_tokens=SHORT, logprobs=True, top_logprobs=2)
    expect(log.status == "success", log.error)
    expect(log.samples[0].output.choices[0].logprobs.content, log.samples[0].output)
    return log.samples[0].output.completion[:60]


async def streamed_and_sampled(server: Server) -> str:
    config = GenerateConfig(max_tokens=SHORT, temperature=0.8, num_choices=2, seed=5)
    outputs = [
        await model_of(server, stream=is_stream).generate(QUESTION, config=config)
        for is_stream in (False, True)
    ]
    texts = [[one.message.text for one in output.choices] for output in outputs]
    expect(texts[0] == texts[1] and len(set(texts[0])) == 2, texts)
    return f"{len(texts[0])} samples"


async def strict_tool_loop(server: Server) -> str:
    model, config = model_of(server), GenerateConfig(max_tokens=LONG, parallel_tool_calls=False)
    history: list[Any] = [ChatMessageUser(content=QUESTION)]
    chosen = ToolFunction(name="get_weather")
    first = await model.generate(history, tools=[get_weather()], tool_choice=chosen, config=config)
    history.append(first.message)
    results = await execute_tools(history, [get_weather()])
    expect(RESULT in results.messages[0].text, results)
    history += results.messages
    second = await model.generate(history, tools=[get_weather()], config=config)
    expect(second.completion, second)
    return results.messages[0].text


async def schema(server: Server) -> str:
    wanted = ResponseSchema(name="weather", json_schema=json_schema(Weather), strict=True)
    config = GenerateConfig(max_tokens=LONG, response_schema=wanted)
    output = await model_of(server).generate(QUESTION, config=config)
    return repr(Weather.model_validate_json(output.completion))


async def responses_api(server: Server) -> str:
    config = GenerateConfig(max_tokens=SHORT, temperature=0)
    output = await model_of(server, responses_api=True).generate(QUESTION, config=config)
    expect(output.completion, output)
    return output.completion


def tool_task(server: Server) -> str:
    """The model may call the tool; a sample that does not is a sample nonetheless."""
    task = Task(
        dataset=[Sample(input=QUESTION, target="Sunny")],
        solver=[use_tools(get_weather()), generate()],
        scorer=includes(),
    )
    log = evaluate(server, task, max_tokens=SHORT)
    expect(log.status == "success", log.error)
    return f"{log.results.completed_samples} sample"


def wrong_key_is_an_error(server: Server) -> str:
    task = Task(dataset=[Sample(input=QUESTION, target="x")], solver=generate(), scorer=includes())
    log = evaluate(server, task, key=WRONG_KEY, max_retries=0)
    expect(log.status == "error" and "401" in log.error.message, log.error)
    return log.error.message[:80]


if __name__ == "__main__":
    run(
        generation_task,
        multiple_choice_task,
        streamed_and_sampled,
        strict_tool_loop,
        schema,
        responses_api,
        tool_task,
        wrong_key_is_an_error,
    )
