"""The Python entry point: `LLM(model).generate(prompts)`."""

from __future__ import annotations

from headway.build import build_offline
from headway.config import load_config
from headway.engine.offline import OfflineEngine, Progress


class LLM(OfflineEngine):
    """A model in this process, driven by the calling thread.

    `settings` are those of `headway serve`, spelled with underscores: dtype, max_num_seqs,
    kv_cache_memory_bytes and so on. An unknown one is an error.
    """

    def __init__(self, model: str, *, progress: Progress | None = None, **settings: object) -> None:
        super().__init__(build_offline(load_config({"model": model, **settings}), progress))
