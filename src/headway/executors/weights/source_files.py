"""The files of a checkpoint, and whether they are still the same."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_SAMPLE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class SourceFiles:
    """The files of a model at `path`; taken before they are opened."""

    path: Path
    files: tuple[Path, ...]
    digest: str

    @staticmethod
    def of(path: Path, files: Sequence[Path]) -> SourceFiles:
        """Identify the files as they are now. Missing files count as such."""
        return SourceFiles(path, tuple(files), _digest(files))

    def is_unchanged(self) -> bool:
        """Return whether the files are still those of the digest."""
        return _digest(self.files) == self.digest


def _digest(files: Sequence[Path]) -> str:
    """Return a digest of the identity of files.

    Reading all weights would take as long as packing them. A change of a file changes its ctime,
    which no program can set.
    """
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.absolute()}\n".encode(errors="surrogateescape"))
        try:
            found = path.stat()
            identity = (found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)
            digest.update(f"{identity}\n".encode())
            with path.open("rb") as file:
                digest.update(file.read(_SAMPLE_BYTES))
                file.seek(max(0, found.st_size - _SAMPLE_BYTES))
                digest.update(file.read(_SAMPLE_BYTES))
        except OSError as error:
            digest.update(f"{type(error).__name__}\n".encode())
    return digest.hexdigest()
