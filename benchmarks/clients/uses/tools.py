"""Questions, tools and schemas that several clients send; standard library only."""

from __future__ import annotations

import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

QUESTION = "What is the weather in Paris?"
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
SHORT = 12
"""Tokens of an answer that is only looked at for being there."""
LONG = 120
"""Tokens that are enough for a call or an object by the schemas below."""

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 16}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": PARAMETERS,
}
TOOL: dict[str, Any] = {"type": "function", "function": FUNCTION}
RESULT = "Sunny, 21 degrees."


@cache
def tokenizer_folder() -> str:
    """Write the tokenizer of the model's file (MODEL_PATH) to a folder; needs transformers."""
    from transformers import AutoTokenizer

    path = Path(os.environ["MODEL_PATH"])
    folder = tempfile.mkdtemp(prefix="tokenizer-", dir=Path.cwd())
    AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name).save_pretrained(folder)
    return folder
