"""POST /v1/embeddings over a scripted engine."""

from __future__ import annotations

import base64
import math
from array import array
from typing import Any

import openai
import pytest

from headway.core import invariants
from headway.executors.fake import HIDDEN_SIZE, embedding_of
from tests.support.apps import check_error, serving

PATH = "/v1/embeddings"


def unit(token_ids: list[int], dimensions: int = HIDDEN_SIZE) -> list[float]:
    values = array("f", embedding_of(token_ids).values)[:dimensions].tolist()
    length = math.hypot(*values)
    return [one / length for one in values]


async def embed(made: Any, **fields: Any) -> dict[str, Any]:
    response = await made.public.post(PATH, json=fields)
    assert response.status_code == 200, response.text
    return response.json()


async def test_every_form_of_input(local) -> None:
    async with serving(local) as made:
        tokenizer = made.engine.tokenizer
        ids = [tokenizer.encode("one text"), tokenizer.encode("and another")]
        for given, expected in (
            ("one text", ids[:1]),
            (["one text", "and another"], ids),
            (ids[0], ids[:1]),
            (ids, ids),
        ):
            answer = await embed(made, input=given)
            assert [one["index"] for one in answer["data"]] == list(range(len(expected)))
            for one, token_ids in zip(answer["data"], expected, strict=True):
                assert one["embedding"] == pytest.approx(unit(token_ids), abs=1e-6)
            num_tokens = sum(map(len, expected))
            assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        invariants.check_drained(made.process.scheduler)


async def test_dimensions_are_cut_and_the_length_is_1_again(local) -> None:
    async with serving(local) as made:
        ids = made.engine.tokenizer.encode("text")
        (one,) = (await embed(made, input="text", dimensions=3))["data"]
        assert one["embedding"] == pytest.approx(unit(ids, 3), abs=1e-6)
        assert math.hypot(*one["embedding"]) == pytest.approx(1.0, abs=1e-6)


async def test_base64_has_the_same_numbers(local) -> None:
    async with serving(local) as made:
        (plain,) = (await embed(made, input="text"))["data"]
        (coded,) = (await embed(made, input="text", encoding_format="base64"))["data"]
        values = array("f", base64.b64decode(coded["embedding"])).tolist()
        assert values == pytest.approx(plain["embedding"], abs=1e-6)


async def test_the_official_client(local) -> None:
    async with serving(local) as made:
        client = openai.AsyncOpenAI(
            base_url="http://localhost/v1", http_client=made.public, api_key="x"
        )
        answer = await client.embeddings.create(model="tiny", input=["a", "b"])
        ids = made.engine.tokenizer.encode("b")
        assert answer.data[1].embedding == pytest.approx(unit(ids), abs=1e-6)
        assert answer.model == "tiny"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": 5}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["a", [1]]}, "input"),
        ({"input": ["a"] * 129}, "input"),
        ({"input": [10**6]}, "input"),
        ({"input": [5] * 500}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": HIDDEN_SIZE + 1}, "dimensions"),
        ({"input": "a", "dimensions": True}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "max_tokens": 1}, "max_tokens"),
    ],
)
async def test_what_is_refused(local, fields: dict[str, Any], param: str) -> None:
    async with serving(local) as made:
        response = await made.public.post(PATH, json=fields)
        assert check_error(response, 400)["param"] == param
        assert not made.process.added


async def test_an_unknown_model_is_not_found(local) -> None:
    async with serving(local) as made:
        response = await made.public.post(PATH, json={"input": "a", "model": "other"})
        assert check_error(response, 404)["param"] == "model"
