"""Compiled grammars over the tokens of the real model."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.text import Tokenizer
from headway.text.matchers import Matchers

VOCAB_SIZE = 49152


@pytest.fixture(scope="session")
def smollm(model_path: Path) -> Tokenizer:
    return Tokenizer.from_gguf(model_path)


@pytest.fixture(scope="session")
def matchers(smollm: Tokenizer) -> Matchers:
    return Matchers(lambda: smollm, VOCAB_SIZE)
