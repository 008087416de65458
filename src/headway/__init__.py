"""Headway: a continuous-batching LLM inference server.

Names are loaded on first use: `import headway.core` needs nothing but the standard library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from headway._version import __version__

if TYPE_CHECKING:
    from headway.core.params import SamplingParams
    from headway.engine.client.outputs import CompletionOutput, RequestOutput
    from headway.llm import LLM

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "__version__"]

_HOME_OF = {
    "LLM": "headway.llm",
    "CompletionOutput": "headway.engine.client.outputs",
    "RequestOutput": "headway.engine.client.outputs",
    "SamplingParams": "headway.core.params",
}


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'headway' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)
