"""The kernels' threads: what happens where the system refuses to start one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from headway.executors.cpu import kernels

pytestmark = pytest.mark.skipif(
    kernels.best_isa() is None, reason="the compiled kernels are not built"
)

# The limit counts every thread of the user and does not bind root: root takes an id nobody has.
CHILD = """
import os, resource, sys, time
from pathlib import Path

from headway.errors import ModelLoadError
from tests.executors.cpu.test_compiled import case_of, spec_of

case = case_of(spec_of())
case.load("plain")


def num_threads_of(uid):
    count = 0
    for task in Path("/proc").glob("[0-9]*/task/[0-9]*"):
        try:
            count += task.stat().st_uid == uid
        except OSError:
            pass
    return count


uid = os.getuid() or 1_000_000 + os.getpid()
num_known = num_threads_of(uid) + (1 if os.getuid() == 0 else 0)
resource.setrlimit(resource.RLIMIT_NPROC, (num_known + 2, num_known + 2))
if os.getuid() == 0:
    os.setuid(uid)
num_before = len(os.listdir("/proc/self/task"))
try:
    case.load("plain", num_threads=64)
except ModelLoadError as error:
    print(error)
else:
    sys.exit("64 threads were started")
# A thread that was joined is listed until the system has removed it.
deadline = time.monotonic() + 10
while len(os.listdir("/proc/self/task")) > num_before:
    assert time.monotonic() < deadline, "some threads are still there"
    time.sleep(0.01)
case.load("plain", num_threads=2)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit and /proc are Linux's")
def test_threads_that_cannot_be_started_are_an_error_not_an_abort():
    # One thread in torch's own pools: those would meet the limit as well.
    child = subprocess.run(
        ["env", "OMP_NUM_THREADS=1", sys.executable, "-c", CHILD],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    assert "cannot start 64 threads; set --num-threads lower or raise the pids limit" in (
        child.stdout
    )
