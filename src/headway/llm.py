"""The Python entry point: `LLM(model).generate(prompts)`."""

from __future__ import annotations

from dataclasses import fields

from headway.build import build_offline
from headway.config import ServerConfig, load_config
from headway.engine.offline import OfflineEngine, Progress
from headway.errors import ConfigError


class LLM(OfflineEngine):
    """A model in this process, driven by the calling thread.

    `settings` are those of `headway serve`, spelled with underscores: dtype, max_num_seqs,
    kv_cache_memory_bytes and so on. Settings of the HTTP server are refused like unknown settings.
    """

    def __init__(self, model: str, *, progress: Progress | None = None, **settings: object) -> None:
        misplaced = sorted(settings.keys() & {item.name for item in fields(ServerConfig)})
        if misplaced:
            raise ConfigError(f"remove the settings that only a server has: {', '.join(misplaced)}")

        super().__init__(build_offline(load_config({"model": model, **settings}), progress))
