"""Hugging Face checkpoints: config.json and safetensors files."""

from __future__ import annotations

import json
from pathlib import Path
from types import EllipsisType
from typing import Any

import ml_dtypes  # noqa: F401, numpy knows bfloat16 from here
import numpy as np
from safetensors import SafetensorError, safe_open

from headway.errors import ModelLoadError
from headway.executors.spec import ModelSpec, spec_from_config
from headway.executors.weights import Stored
from headway.executors.weights.names import HEAD
from headway.executors.weights.source_files import SourceFiles

_INDEX = "model.safetensors.index.json"
_DTYPES = ("F64", "F32", "F16", "BF16")


class SafetensorsCheckpoint:
    """A folder with config.json and model.safetensors, or shards with an index."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        configuration = [folder / "config.json", folder / _INDEX]
        shards = sorted(folder.glob("*.safetensors"))
        self.source = SourceFiles.of(folder, [*configuration, *shards])
        self._spec = spec_from_config(_read_json(folder / "config.json"))
        weight_map = _weight_map(folder / _INDEX)
        self._files = {path: _open(path) for path in _shards(folder, weight_map)}
        self._file_of: dict[str, Path] = {}
        for path, file in self._files.items():
            for name in file.keys():  # noqa: SIM118, not a dict: it has keys but no iterator
                if name in self._file_of:
                    raise ModelLoadError(f"{name} is in {self._file_of[name].name} and {path.name}")
                self._file_of[name] = path
        for tensor, shard in weight_map.items():
            if self._file_of.get(tensor) != folder / shard:
                raise ModelLoadError(
                    f"{folder / _INDEX} says that {tensor} is in {shard}, which has no such tensor"
                )

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

    def kinds(self) -> dict[str, str]:
        return {
            name: self._files[path].get_slice(name).get_dtype()
            for name, path in self._file_of.items()
        }

    def read(self, name: str) -> np.ndarray:
        return self._read(name, ...).rows

    def read_stored(self, name: str, first: int, last: int) -> Stored:
        return self._read(name, slice(first, last))

    def _read(self, name: str, rows: slice | EllipsisType) -> Stored:
        path = self._file_of.get(name)
        if path is None:
            raise ModelLoadError(f"there is no tensor {name} in {self._folder}")
        try:
            tensor = self._files[path].get_slice(name)
            dtype = tensor.get_dtype()
            if dtype not in _DTYPES:
                raise ModelLoadError(
                    f"tensor {name} is stored as {dtype}; supported: {', '.join(_DTYPES)}"
                )
            return Stored(dtype, tensor[rows])
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"cannot read tensor {name} of {path}: {error}") from error


def _shards(folder: Path, weight_map: dict[str, str]) -> list[Path]:
    found = sorted({folder / name for name in weight_map.values()} or folder.glob("*.safetensors"))
    if not found:
        raise ModelLoadError(
            f"no *.safetensors in {folder}; "
            "checkpoints that need unpickling (*.bin, *.pt) are not read"
        )
    for path in found:
        _check_inside(folder, path)
    return found


def _weight_map(index: Path) -> dict[str, str]:
    """Return the shard of each tensor; empty without an index."""
    if not index.is_file():
        return {}
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{index} has no weight_map")
    for tensor, name in weight_map.items():
        _check_shard_name(index, tensor, name)
    return weight_map


def _check_shard_name(index: Path, tensor: str, name: Any) -> None:
    """Refuse a shard that is not a plain file name: the index is untrusted."""
    is_plain = isinstance(name, str) and Path(name).name == name and "\0" not in name
    if not is_plain or not name.endswith(".safetensors"):
        raise ModelLoadError(
            f"{index} says that {tensor} is in {name!r}; "
            "a shard must be the name of a file beside the index, *.safetensors"
        )


def _check_inside(folder: Path, path: Path) -> None:
    """Refuse a link that leads out of the model.

    In the cache of the Hugging Face hub, snapshots/<commit>/<file> links to blobs/<hash>.
    """
    home, target = folder.resolve(), path.resolve()
    roots = [home]
    if home.parent.name == "snapshots":
        roots.append(home.parent.parent / "blobs")
    if not any(target.is_relative_to(root) for root in roots):
        raise ModelLoadError(f"{path} is a link to {target}, outside the model's folder")


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"cannot read {path}: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} must hold a JSON object")
    return content
