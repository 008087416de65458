"""Limits of the control groups of this process, versions 1 and 2.

The limits of ancestors apply too, so every visible group is read and the tightest limit counts. A
container may see the path of its group on the host while its own group is mounted as the root, so
ancestors that do not exist are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

_NO_LIMIT_V1 = 1 << 62
""""No limit" in version 1: the largest multiple of a page in 63 bits."""


def memory_left(root: Path = Path("/")) -> int | None:
    """Return the bytes this process may still allocate; None without a limit."""
    left = [*_read_all(root, "memory", _memory_v1), *_read_all(root, "", _memory_v2)]
    return min(left, default=None)


def core_quota(root: Path = Path("/")) -> int | None:
    """Return the CPU quota in whole cores, at least 1; None without a quota."""
    quotas = [*_read_all(root, "cpu", _cores_v1), *_read_all(root, "", _cores_v2)]
    return min(quotas, default=None)


def _read_all(root: Path, controller: str, read: Callable[[Path], int | None]) -> Iterator[int]:
    """Yield the limits of a controller in this group and its ancestors.

    An empty controller name means version 2.
    """
    for folder in _groups(root, controller):
        try:
            limit = read(folder)
        except (OSError, ValueError, IndexError):
            continue
        if limit is not None:
            yield limit


def _groups(root: Path, controller: str) -> Iterator[Path]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return
    tops = [controller] if controller else ["", "unified"]
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        is_ours = controller in controllers.split(",") if controller else number == "0"
        if not is_ours or ".." in PurePosixPath(path).parts:
            continue
        group = PurePosixPath(path.lstrip("/"))
        for ancestor in (group, *group.parents):
            for top in tops:
                yield root / "sys/fs/cgroup" / top / ancestor


def _memory_v1(folder: Path) -> int | None:
    limit = int((folder / "memory.limit_in_bytes").read_text())
    if limit >= _NO_LIMIT_V1:
        return None
    used = int((folder / "memory.usage_in_bytes").read_text())
    return max(0, limit - used + _droppable(folder, "total_inactive_file"))


def _memory_v2(folder: Path) -> int | None:
    limit = (folder / "memory.max").read_text().strip()
    if limit == "max":
        return None
    used = int((folder / "memory.current").read_text())
    return max(0, int(limit) - used + _droppable(folder, "inactive_file"))


def _droppable(folder: Path, name: str) -> int:
    """Return the bytes of page cache, which count as used but can be dropped."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.split()[:1] == [name])
    except (OSError, ValueError, IndexError, StopIteration):
        return 0


def _cores_v1(folder: Path) -> int | None:
    quota = int((folder / "cpu.cfs_quota_us").read_text())
    period = int((folder / "cpu.cfs_period_us").read_text())
    return None if quota <= 0 or period <= 0 else max(1, quota // period)


def _cores_v2(folder: Path) -> int | None:
    quota, period = (folder / "cpu.max").read_text().split()
    return None if quota == "max" else max(1, int(quota) // int(period))
