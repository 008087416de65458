"""The compiled path runs where torch is not installed; the plain one says what to install."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headway.executors.cpu import kernels
from headway.executors.load import has_cuda

pytestmark = pytest.mark.skipif(
    kernels.best_isa() is None, reason="the compiled kernels are not built"
)

CHILD = """
import sys

sys.modules["torch"] = None  # importing it fails as if it were missing
from headway import LLM, SamplingParams
from headway.errors import ModelLoadError

llm = LLM(sys.argv[1], kv_cache_memory_bytes="64M")
fields = {"top_p": 0.9, "max_tokens": 8, "ignore_eos": True, "logprobs": 1}
params = [SamplingParams(temperature=t, **fields) for t in (0, 1)]
outputs = llm.generate(["The capital of France is"] * 2, params)
assert all(len(output.outputs[0].token_ids) == 8 for output in outputs)
print(repr(outputs[0].outputs[0].text))
try:
    LLM(sys.argv[1], dtype="fp32", kv_cache_memory_bytes="64M")
except ModelLoadError as error:
    print(error)
"""


def test_torch_is_not_imported_where_it_is_installed(model_path: Path) -> None:
    if has_cuda():
        pytest.skip("this machine has a GPU, so torch is asked for it")
    code = (
        "import sys; from headway import LLM; LLM(sys.argv[1], kv_cache_memory_bytes='64M'); "
        "assert 'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", code, str(model_path)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert child.returncode == 0, child.stderr


def test_a_model_runs_without_torch(model_path: Path) -> None:
    command = [sys.executable, "-c", CHILD, str(model_path)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert child.returncode == 0, child.stderr
    text, error = child.stdout.splitlines()
    assert "Paris" in text
    assert error.startswith("fp32 weights on cpu run in plain torch here")
    assert "pip install 'headway[torch]'" in error
