"""Memory and cores that control groups leave a process, over folders laid out as the kernel's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from headway.executors import hardware
from headway.executors.cgroups import core_quota, memory_left

MIB = 1024**2
NO_LIMIT_V1 = 9223372036854771712


def write(root: Path, files: Mapping[str, object]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def v1(folder: str, limit: int, used: int, inactive: int = 0) -> dict[str, object]:
    base = f"sys/fs/cgroup/memory{folder}"
    return {
        f"{base}/memory.limit_in_bytes": limit,
        f"{base}/memory.usage_in_bytes": used,
        f"{base}/memory.stat": f"inactive_file 1\ntotal_inactive_file {inactive}",
    }


def v2(folder: str, limit: object, used: int, inactive: int = 0) -> dict[str, object]:
    base = f"sys/fs/cgroup{folder}"
    return {
        f"{base}/memory.max": limit,
        f"{base}/memory.current": used,
        f"{base}/memory.stat": f"anon 5\ninactive_file {inactive}\nactive_file 3",
    }


V1_GROUP = {"proc/self/cgroup": "9:name=systemd:/x\n4:cpuset,memory:/pod/box\n3:cpu,cpuacct:/pod"}
V2_GROUP = {"proc/self/cgroup": "0::/pod/box"}


def test_a_limit_of_cgroup_v1(tmp_path: Path) -> None:
    files = V1_GROUP | v1("/pod/box", 100 * MIB, 60 * MIB, 10 * MIB)
    assert memory_left(write(tmp_path, files)) == 50 * MIB


@pytest.mark.parametrize("group", [V1_GROUP, V2_GROUP])
def test_the_tightest_ancestor_counts(tmp_path: Path, group: dict[str, object]) -> None:
    make = v1 if group is V1_GROUP else v2
    files = make("/pod/box", 100 * MIB, 10 * MIB) | make("/pod", 120 * MIB, 90 * MIB)
    root = write(tmp_path, group | files | make("", 500 * MIB, 95 * MIB))
    assert memory_left(root) == 30 * MIB


def test_a_limit_of_cgroup_v2_at_the_root_of_a_container(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/"} | v2("", 100 * MIB, 30 * MIB, 5 * MIB)
    assert memory_left(write(tmp_path, files)) == 75 * MIB


def test_a_container_that_sees_the_path_of_its_host(tmp_path: Path) -> None:
    """Its own group is mounted as the root, and the path of the host leads nowhere."""
    files = {"proc/self/cgroup": "4:memory:/docker/abc"} | v1("", 100 * MIB, 30 * MIB)
    assert memory_left(write(tmp_path, files)) == 70 * MIB


def test_both_versions_at_once(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "4:memory:/a\n0::/b"} | v1("/a", 100 * MIB, 30 * MIB)
    files |= v2("/unified/b", 90 * MIB, 30 * MIB)
    assert memory_left(write(tmp_path, files)) == 60 * MIB


@pytest.mark.parametrize(
    "files",
    [
        {},
        V1_GROUP | v1("/pod/box", NO_LIMIT_V1, 5) | v1("", NO_LIMIT_V1, 5),
        V2_GROUP | v2("/pod/box", "max", 5),
        V1_GROUP
        | v1("/pod/box", 100, 5)
        | {"sys/fs/cgroup/memory/pod/box/memory.limit_in_bytes": "?"},
        {"proc/self/cgroup": "nonsense"},
        {"proc/self/cgroup": "4:memory:/../../../.."},
    ],
)
def test_no_limit(tmp_path: Path, files: dict[str, object]) -> None:
    assert memory_left(write(tmp_path, files)) is None


def test_a_limit_without_statistics(tmp_path: Path) -> None:
    root = write(tmp_path, V2_GROUP | v2("/pod/box", 100, 30))
    (root / "sys/fs/cgroup/pod/box/memory.stat").unlink()
    assert memory_left(root) == 70


def test_more_in_use_than_the_limit_leaves_nothing(tmp_path: Path) -> None:
    assert memory_left(write(tmp_path, V1_GROUP | v1("/pod/box", 100, 130))) == 0


def test_available_memory_is_what_the_limit_leaves(tmp_path: Path) -> None:
    root = write(tmp_path, V1_GROUP | v1("/pod/box", 3 * MIB, MIB))
    assert hardware.available_bytes(root) == 2 * MIB
    assert hardware.available_bytes(write(tmp_path / "none", {})) > 2 * MIB


def test_quotas_of_cores(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/cpu/pod/cpu.cfs_quota_us": 350000}
    files |= {"sys/fs/cgroup/cpu/pod/cpu.cfs_period_us": 100000}
    assert core_quota(write(tmp_path / "v1", V1_GROUP | files)) == 3
    unlimited = files | {"sys/fs/cgroup/cpu/pod/cpu.cfs_quota_us": -1}
    assert core_quota(write(tmp_path / "unlimited", V1_GROUP | unlimited)) is None
    files = {
        "sys/fs/cgroup/pod/box/cpu.max": "max 100000",
        "sys/fs/cgroup/pod/cpu.max": "50000 100000",
    }
    assert core_quota(write(tmp_path / "v2", V2_GROUP | files)) == 1
