"""Measures this machine: cores, memory, instruction sets."""

from __future__ import annotations

import os
import re
from pathlib import Path

import psutil

from headway.executors.cgroups import core_quota, memory_left
from headway.resolve import Hardware

_ISA = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "asimd", "bf16")


def probe_hardware(has_cuda: bool = False) -> Hardware:
    """Return the hardware available to this process, within its limits.

    The caller passes `has_cuda`, because only torch knows.
    """
    from headway.executors.cpu.kernels import best_isa

    return Hardware(
        num_cores=_num_cores(),
        available_bytes=available_bytes(),
        isa=_instruction_sets(),
        has_cuda=has_cuda,
        kernels=best_isa(),
    )


def _num_cores() -> int:
    """Return the cores this process may use, within the quota of its container."""
    if hasattr(os, "sched_getaffinity"):
        num_cores = len(os.sched_getaffinity(0))
    else:
        num_cores = os.cpu_count() or 1
    quota = core_quota()
    return num_cores if quota is None else min(num_cores, quota)


def available_bytes(root: Path = Path("/")) -> int:
    """Return the free memory, within the limit of the container."""
    available = psutil.virtual_memory().available
    left = memory_left(root)
    return available if left is None else min(available, left)


def _instruction_sets() -> tuple[str, ...]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ()
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    flags = set(found.group(1).split()) if found else set[str]()
    return tuple(name for name in _ISA if name in flags)
