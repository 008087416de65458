"""Builds the compiled kernels: as part of the package build, or by `python kernels/build.py`.

    python kernels/build.py [TARGET FLAG...]    another file, with more flags for the compiler

Without a C++ compiler the package is built without kernels and uses plain torch. The environment
variable HEADWAY_KERNELS names a library that the package gets instead of a new one; if it is empty,
the package gets none.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    Base = object
else:
    try:
        from hatchling.builders.hooks.plugin.interface import BuildHookInterface as Base
    except ImportError:  # run as a script
        Base = object

KERNELS = Path(__file__).parent
TARGET = KERNELS.parent / "src/headway/executors/cpu/libheadway_kernels.so"
FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-pthread", "-fvisibility=hidden"),
    *("-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wextra", "-Wno-psabi"),
    "-Wno-maybe-uninitialized",  # GCC 12 warns about its own intrinsics
)
AVX512 = (
    *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma"),
    "-mprefer-vector-width=512",
)
ISA = {
    "plain": (),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "avx512": AVX512,
    "avx512_vnni": (*AVX512, "-mavx512vnni"),
    "amx": (*AVX512, "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-DHW_WITH_AMX"),
}


def build(target: Path = TARGET, extra_flags: Sequence[str] = ()) -> None:
    """Compile and link; CalledProcessError has the compiler output."""
    found = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    compiler = shlex.split(found or "")  # CXX may have several words: "ccache g++"
    if not compiler:
        raise FileNotFoundError("no C++ compiler: neither CXX, nor c++, nor g++")
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        jobs: list[tuple[str, str, tuple[str, ...]]] = [
            *((source, source, ()) for source in ("model", "pool", "cpu")),
            # They round as the references do.
            *((source, source, ("-ffp-contract=off",)) for source in ("pack", "sample")),
        ]
        jobs += [
            ("ops", f"ops_{isa}", (*flags, f"-DHW_ISA_NAME={isa}"))
            for isa, flags in ISA.items()
            if is_x86 or isa == "plain"
        ]
        commands = [
            [
                *compiler,
                *FLAGS,
                *flags,
                *extra_flags,
                "-c",
                f"{KERNELS / source}.cpp",
                "-o",
                f"{folder / output}.o",
            ]
            for source, output, flags in jobs
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, commands))
        # Built beside the target and renamed over it: processes that mapped the old file keep it.
        fresh = target.with_suffix(".new")
        objects = [str(folder / f"{output}.o") for _, output, _ in jobs]
        strip = () if extra_flags else ("-Wl,-s",)
        _run([*compiler, "-shared", "-pthread", *strip, *extra_flags, *objects, "-o", str(fresh)])
        fresh.replace(target)


def copy(library: Path, target: Path = TARGET) -> None:
    """Use a library that was built before."""
    fresh = target.with_suffix(".new")
    shutil.copy(library, fresh)
    fresh.replace(target)


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


class CustomBuildHook(Base):
    """Build hook: Hatchling runs it before it collects the files of a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        given = os.environ.get("HEADWAY_KERNELS")
        if given == "":
            TARGET.unlink(missing_ok=True)
            return
        try:
            build() if given is None else copy(Path(given))
        except (OSError, subprocess.CalledProcessError) as error:
            why = getattr(error, "stderr", None) or error
            print(f"headway: built without compiled kernels: {why}", file=sys.stderr)
            TARGET.unlink(missing_ok=True)
            return
        build_data["pure_python"] = False
        tag = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{tag}"


if __name__ == "__main__":
    named = Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET
    try:
        build(named, sys.argv[2:])
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(getattr(error, "stderr", None) or str(error))
    print(f"built {named.name}")
