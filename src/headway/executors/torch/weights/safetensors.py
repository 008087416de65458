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
_DTYPES = ("F64", "F32", "F16", "BF16")


class SafetensorsCheckpoint:
    """A folder with config.json and model.safetensors, or shards with an index."""

    def __init__(self, folder: Path) -> None:
        self._spec = spec_from_config(_read_json(folder / "config.json"))
        self._files = {path: _open(path) for path in _shards(folder)}
        self._file_of: dict[str, Path] = {}
        for path, file in self._files.items():
            for name in file.keys():  # noqa: SIM118, not a dict: it has keys but no iterator
                if name in self._file_of:
                    raise ModelLoadError(f"{name} is in {self._file_of[name].name} and {path.name}")
                self._file_of[name] = path

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    def shapes(self) -> dict[str, tuple[int, ...]]:
        # Old exports store the rotary table, and tied ones repeat the embedding as the head.
        return {
            name: tuple(self._files[path].get_slice(name).get_shape())
            for name, path in self._file_of.items()
            if not name.endswith("rotary_emb.inv_freq")
            and not (name == HEAD and self._spec.tie_embeddings)
        }

    def read(self, name: str) -> torch.Tensor:
        file = self._files[self._file_of[name]]
        dtype = file.get_slice(name).get_dtype()
        if dtype not in _DTYPES:
            raise ModelLoadError(
                f"tensor {name} is stored as {dtype}; supported: {', '.join(_DTYPES)}"
            )
        return file.get_tensor(name)


def _shards(folder: Path) -> list[Path]:
    if (folder / _INDEX).is_file():
        weight_map = _read_json(folder / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelLoadError(f"{folder / _INDEX} has no weight_map")
        shards = set(map(str, weight_map.values()))
        for shard in shards:
            # A folder from a stranger must not name files outside of itself.
            if Path(shard).name != shard or "\0" in shard:
                raise ModelLoadError(f"{folder / _INDEX} names {shard!r}, no file of the folder")
        return [folder / shard for shard in sorted(shards)]
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
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"cannot read {path}: it holds no JSON object")
    return content
