"""The numerics class: engines of one class compute the same tokens for the same request.

A class is a digest of all that decides which bits an engine computes: the weights, the data types
of weights, KV cache and activations, the compiled kernels and the instruction set in use, and the
version of what chooses tokens. Only compiled kernels compute a row independently of its batch. An
engine without them is in a class of its own.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from pathlib import Path

from headway.engine.process.messages import EngineInfo
from headway.executors.cpu.kernels import LIBRARY
from headway.executors.rng import SAMPLER_VERSION
from headway.executors.weights.source_files import SourceFiles

_CHUNK_BYTES = 1024**2
_NUM_DIGITS = 32
_DIGEST = re.compile(r"[0-9a-f]{64}")


def own_class() -> str:
    """Return a class that no other engine is in."""
    return f"own-{secrets.token_hex(8)}"


def numerics_class(info: EngineInfo, weights: str) -> str:
    """Return the class of an engine; empty if its tokens depend on the batch."""
    if info.kernels is None or not weights:
        return ""
    facts = (
        weights,
        info.dtype,
        info.kv_dtype,
        info.activation_dtype,
        info.kernels,
        str(info.capacity.block_size),
        _digest_of(LIBRARY),
        str(SAMPLER_VERSION),
    )
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:_NUM_DIGITS]


def weights_digest(source: SourceFiles, cache: Path | None) -> str:
    """Return a digest of the content of a model's files.

    Reading large files takes a while, so the digest is kept in the folder `cache`, under the
    identity of the files.
    """
    kept = None if cache is None else cache / f"{source.digest}.sha256"
    try:
        if kept is not None and _DIGEST.fullmatch(found := kept.read_text("ascii")):
            return found
    except (OSError, UnicodeDecodeError):
        pass
    digest = hashlib.sha256("".join(_digest_of(path) for path in source.files).encode())
    try:
        if kept is not None:
            kept.parent.mkdir(parents=True, exist_ok=True)
            # Another engine may start at the same time: it must not read half a digest.
            part = kept.with_suffix(f".{os.getpid()}.new")
            part.write_text(digest.hexdigest(), "ascii")
            part.replace(kept)
    except OSError:
        pass  # it is computed again next time
    return digest.hexdigest()


def _digest_of(path: Path) -> str:
    """Return a digest of the content of a file; its name if it cannot be read."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    except OSError:
        return path.name
    return digest.hexdigest()
