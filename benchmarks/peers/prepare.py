"""Makes one virtual environment per peer, and a weights folder for peers that need one.

Nothing here is timed. A repeated run does nothing unless the requirements changed.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.peers.catalog import (
    BF16,
    ENVIRONMENTS,
    PEERS,
    ROOT,
    TORCH,
    W8A8,
    Environment,
    folder_of,
    preloads,
    python_of,
    record_of,
)
from benchmarks.peers.compare import say
from benchmarks.support.commands import CommandFailed, call

INSTALL_TIMEOUT_S = 3 * 3600
CONVERT_TIMEOUT_S = 1800
TCMALLOC_PACKAGES = ("libtcmalloc-minimal4", "libtcmalloc-minimal4t64")

CMAKE_FLAGS = {
    "avx2": ("GGML_AVX2",),
    "fma": ("GGML_FMA",),
    "f16c": ("GGML_F16C",),
    "bmi2": ("GGML_BMI2",),
    "avx512f": ("GGML_AVX512",),
    "avx512vbmi": ("GGML_AVX512_VBMI",),
    "avx512_vnni": ("GGML_AVX512_VNNI",),
    "avx512_bf16": ("GGML_AVX512_BF16",),
}
# Named one by one instead of -march=native, which includes AMX: with AMX the library ends with an
# illegal instruction where the kernel does not grant the tiles.
CMAKE_OFF = ("GGML_NATIVE", "GGML_AMX_TILE", "GGML_AMX_INT8", "GGML_AMX_BF16")


@dataclass(frozen=True, slots=True)
class Recipe:
    """Requirements that determine whether an environment is up to date."""

    installs: tuple[tuple[str, ...], ...]
    uninstalls: tuple[str, ...]
    torch: str | None
    cmake_args: str | None


def prepare(names: Sequence[str], cache: Path, model: Path) -> dict[str, str]:
    """Prepare the environments of these peers; return the failures by environment."""
    environments = list(dict.fromkeys(PEERS[name].environment for name in names))
    forms = {form for name in names if (form := PEERS[name].form) is not None}
    folders = [folder_of(cache, model, form) for form in forms]
    if not all(map(_has_weights, folders)) and "transformers" not in environments:
        environments.append("transformers")  # it converts the weights
    failures: dict[str, str] = {}
    for name in environments:
        try:
            _prepare_one(ENVIRONMENTS[name], cache)
        except (CommandFailed, OSError) as error:
            failures[name] = str(error)
            say(f"{name}: failed: {error}")
    if forms:
        try:
            make_folders(cache, model, forms)
        except (CommandFailed, OSError) as error:
            failures["folder"] = str(error)
            say(f"folder: failed: {error}")
    return failures


def recipe_of(env: Environment) -> Recipe:
    return Recipe(
        env.installs,
        env.uninstalls,
        os.environ.get("TORCH", TORCH) if env.needs_torch else None,
        cmake_args(cpu_flags()) if env.needs_compiler else None,
    )


def cpu_flags() -> frozenset[str]:
    """Return the CPU flags of Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())


def cmake_args(flags: frozenset[str]) -> str:
    """Return CMake flags for the vector instructions of this CPU, without AMX."""
    on = [name for flag, names in CMAKE_FLAGS.items() if flag in flags for name in names]
    return " ".join([*(f"-D{name}=ON" for name in on), *(f"-D{name}=OFF" for name in CMAKE_OFF)])


def _prepare_one(env: Environment, cache: Path) -> None:
    recipe = recipe_of(env)
    record = record_of(cache, env.name)
    if _is_current(record, recipe):
        say(f"{env.name}: ready in {record.parent}")
        return
    home = record.parent
    python = python_of(cache, env.name)
    if not python.exists():
        say(f"{env.name}: creating {home}")
        call([sys.executable, "-m", "venv", str(home)], INSTALL_TIMEOUT_S)
    record.unlink(missing_ok=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    variables = _install_variables(home, recipe)
    if recipe.torch is not None:
        say(f"{env.name}: installing {recipe.torch}")
        call([*pip, "install", recipe.torch], INSTALL_TIMEOUT_S, variables)
    for packages in recipe.installs:
        say(f"{env.name}: installing {' '.join(packages)}")
        call([*pip, "install", *packages], INSTALL_TIMEOUT_S, variables)
    if recipe.uninstalls:
        say(f"{env.name}: removing {' '.join(recipe.uninstalls)}")
        call([*pip, "uninstall", "--yes", *recipe.uninstalls], INSTALL_TIMEOUT_S)
    if env.needs_tcmalloc:
        _fetch_tcmalloc(home)
    installed = json.loads(call([*pip, "list", "--format", "json"], INSTALL_TIMEOUT_S))
    content = {
        "recipe": asdict(recipe),
        "python": platform.python_version(),
        "packages": {item["name"]: item["version"] for item in installed},
        "preloads": [path.name for path in preloads(cache, env.name)],
        "prepared_at": time.strftime("%Y-%m-%d"),
    }
    record.write_text(json.dumps(content, indent=2) + "\n")
    say(f"{env.name}: done, {len(installed)} packages")


def _is_current(record: Path, recipe: Recipe) -> bool:
    if not record.exists():
        return False
    # Through JSON, so that tuples and lists compare equal.
    return json.loads(record.read_text())["recipe"] == json.loads(json.dumps(asdict(recipe)))


def _install_variables(home: Path, recipe: Recipe) -> dict[str, str]:
    """Return variables for one build job at a time, and a pinned torch."""
    variables = {"CMAKE_BUILD_PARALLEL_LEVEL": os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", "1")}
    if recipe.cmake_args is not None:
        variables["CMAKE_ARGS"] = recipe.cmake_args
    if recipe.torch is not None and "/" not in recipe.torch:
        constraint = home / "constraint.txt"
        constraint.write_text(recipe.torch + "\n")
        variables["PIP_CONSTRAINT"] = str(constraint)
    return variables


def _fetch_tcmalloc(home: Path) -> None:
    """Unpack the Debian package into the environment; without it the peer still runs."""
    target = home / "tcmalloc"
    if any(target.glob("**/libtcmalloc_minimal.so.4")) or shutil.which("apt-get") is None:
        return
    target.mkdir(exist_ok=True)
    for package in TCMALLOC_PACKAGES:
        try:
            call(["apt-get", "download", package], INSTALL_TIMEOUT_S, cwd=target)
            for deb in target.glob("*.deb"):
                call(["dpkg", "-x", str(deb), str(target)], INSTALL_TIMEOUT_S)
        except CommandFailed:
            continue
        say(f"unpacked {package}")
        return
    say("no tcmalloc: the engine will run without it, and slower")


def _has_weights(folder: Path) -> bool:
    return (folder / "model.safetensors").exists()


def make_folders(cache: Path, model: Path, forms: Collection[str]) -> None:
    """Write the weights of the GGUF file in these forms, with tokenizer and config."""
    plain = folder_of(cache, model, BF16)
    _make_folder(cache, "convert", model, plain)
    if W8A8 in forms:
        _make_folder(cache, "quantize", plain, folder_of(cache, model, W8A8))


def _make_folder(cache: Path, module: str, source: Path, folder: Path) -> None:
    if _has_weights(folder):
        say(f"folder: ready in {folder}")
        return
    python = python_of(cache, "transformers")
    if not python.exists():
        raise CommandFailed("the transformers environment is needed to convert the weights")
    say(f"folder: making {folder} from {source.name}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    command = [str(python), "-m", f"benchmarks.peers.{module}", str(source), str(partial)]
    call(command, CONVERT_TIMEOUT_S, cwd=ROOT)
    partial.rename(folder)
