"""Tokenizers that the tests of this folder share."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.support.tiny_tokenizers import write_byte_level, write_spm
from headway.text import Tokenizer
from tests.support.oracle import quick_gguf


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("text") / "byte_level.gguf"
    return Tokenizer.from_gguf(write_byte_level(path, pre="gpt-2"))


@pytest.fixture(scope="session")
def spm(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("text") / "spm.gguf"
    return Tokenizer.from_gguf(write_spm(path))


@pytest.fixture(scope="session")
def smollm(model_path: Path) -> Tokenizer:
    return Tokenizer.from_gguf(model_path)


@pytest.fixture(scope="session")
def oracle(model_path: Path):
    from transformers import AutoTokenizer

    with quick_gguf():
        return AutoTokenizer.from_pretrained(model_path.parent, gguf_file=model_path.name)
