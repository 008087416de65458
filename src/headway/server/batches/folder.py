"""The folder of uploaded files and of the results of batches.

One server uses a folder at a time. A file has its id as its name, so nothing that a client sends
becomes part of a path. All calls block.
"""

from __future__ import annotations

import fcntl
import os
import uuid
from collections.abc import Iterable
from pathlib import Path

from headway.errors import ConfigError

_DIR_MODE = 0o700
_FILE_MODE = 0o600
FLAGS = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC


class BatchFolder:
    """A folder that this process has locked; `close` unlocks it."""

    def __init__(self, path: Path) -> None:
        """Create and lock the folder; raise ConfigError if that is not possible."""
        self.path = path
        self._files = path / "files"
        self._uploads = path / "uploads"
        try:
            for folder in (path, self._files, self._uploads):
                folder.mkdir(parents=True, exist_ok=True, mode=_DIR_MODE)
            self._lock = os.open(path / "lock", FLAGS, _FILE_MODE)
        except OSError as error:
            raise ConfigError(f"batch_dir: cannot use {path}: {error}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.id = self._read_id()
        except BlockingIOError as error:
            os.close(self._lock)
            raise ConfigError(
                f"batch_dir: another server uses {path}; give each server a folder of its own"
            ) from error
        except OSError as error:
            os.close(self._lock)
            raise ConfigError(f"batch_dir: cannot use {path}: {error}") from error

    def close(self) -> None:
        os.close(self._lock)

    def path_of(self, file_id: str) -> Path:
        return self._files / file_id

    def upload_path(self, file_id: str) -> Path:
        """Return where the data of a file is until all of it is there."""
        return self._uploads / file_id

    def open_upload(self, file_id: str) -> int:
        return os.open(self.upload_path(file_id), FLAGS | os.O_EXCL, _FILE_MODE)

    def keep_upload(self, file_id: str) -> None:
        """Make a whole upload a file that survives the loss of power."""
        os.rename(self.upload_path(file_id), self.path_of(file_id))
        self.sync()

    def sync(self) -> None:
        """Have the names of new files survive the loss of power."""
        folder = os.open(self._files, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def remove(self, file_id: str) -> None:
        self.path_of(file_id).unlink(missing_ok=True)

    def remove_upload(self, file_id: str) -> None:
        self.upload_path(file_id).unlink(missing_ok=True)

    def remove_others(self, file_ids: Iterable[str]) -> int:
        """Delete unfinished uploads and the files without a record; return their number."""
        known, num_removed = set(file_ids), 0
        for path in (*self._uploads.iterdir(), *self._files.iterdir()):
            if path.parent == self._uploads or path.name not in known:
                path.unlink(missing_ok=True)
                num_removed += 1
        return num_removed

    def _read_id(self) -> str:
        """Return the id of the folder, which its records in a database have."""
        path = self.path / "id"
        if not path.exists():
            partial = path.with_suffix(".new")
            partial.write_text(uuid.uuid4().hex)
            partial.rename(path)
        return path.read_text().strip()
