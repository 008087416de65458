"""Checkpoints as Hugging Face lays them out: config.json beside one or more safetensors files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from headway.errors import ModelLoadError
from headway.executors.torch.spec import ModelSpec, spec_from_config
from headway.executors.torch.weights.names import HEAD

_INDEX = "model.safetensors.index.json"


class SafetensorsCheckpoint:
    """A folder with config.json and model.safetensors, or shards with an index."""

    def __init__(self, folder: Path) -> None:
        self._spec = spec_from_config(_read_json(folder / "config.json"))
        self._files = {path: _open(path) for path in _shards(folder)}
        self._file_of = {
            name: path
            for path, file in self._files.items()
            for name in file.keys()  # noqa: SIM118, not a dict: it has keys but no iterator
        }

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    def names(self) -> frozenset[str]:
        # Old exports store the rotary table, and tied ones repeat the embedding as the head.
        return frozenset(
            name
            for name in self._file_of
            if not name.endswith("rotary_emb.inv_freq")
            and not (name == HEAD and self._spec.tie_embeddings)
        )

    def read(self, name: str) -> torch.Tensor:
        return self._files[self._file_of[name]].get_tensor(name)


def _shards(folder: Path) -> list[Path]:
    if (folder / _INDEX).is_file():
        shards = sorted(set(_read_json(folder / _INDEX)["weight_map"].values()))
        return [folder / shard for shard in shards]
    if found := sorted(folder.glob("*.safetensors")):
        return found
    raise ModelLoadError(
        f"no *.safetensors in {folder}; checkpoints that need unpickling (*.bin, *.pt) are not read"
    )


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"cannot read {path}: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"cannot read {path}: {error}") from error
