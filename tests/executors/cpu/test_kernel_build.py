"""Building and finding the compiled kernels, and doing without them."""

from __future__ import annotations

import _ctypes
import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headway.clock import SystemClock
from headway.config import load_config
from headway.errors import ConfigError, ModelLoadError
from headway.executors.cpu import kernels
from headway.executors.cpu.compiled import CompiledModel
from headway.executors.hardware import probe_hardware
from headway.executors.load import ModelOptions, load_executor
from headway.executors.torch.eager import EagerModel
from headway.resolve import ModelFacts, resolve
from tests.executors.torch.test_executor import GREEDY, PROMPT, generate
from tests.support.tiny import MemoryCheckpoint, tiny_spec, tiny_weights

SOURCES = Path(__file__).parents[3] / "kernels"
HEADER = (SOURCES / "headway.h").read_text()
STRUCTURES = {
    "HwLinear": kernels.CLinear,
    "HwRows": kernels.Rows,
    "HwLayer": kernels.Layer,
    "HwModel": kernels.Model,
    "HwStep": kernels.Step,
}

# ------------------------------------------------------------------------- building


@pytest.fixture(name="builder")
def copy_of_the_sources(tmp_path: Path) -> Any:
    """The build module of a copy, so that its target is none that anybody uses."""
    shutil.copytree(SOURCES, tmp_path / "kernels")
    spec = importlib.util.spec_from_file_location("kernel_build", tmp_path / "kernels/build.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.TARGET.is_relative_to(tmp_path)
    module.TARGET.parent.mkdir(parents=True)
    module.TARGET.write_text("of an earlier build")
    return module


def run_hook(builder: Any) -> dict[str, Any]:
    """What the hook tells the package build; its own constructor is the build tool's business."""
    build_data: dict[str, Any] = {}
    hook = builder.CustomBuildHook.__new__(builder.CustomBuildHook)
    hook.initialize("standard", build_data)
    return build_data


def use_compiler(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> Path:
    """A compiler that logs what it is asked; `script` sees the file it is to write as $last."""
    compiler, log = folder / "compiler", folder / "log"
    compiler.write_text(f'#!/bin/sh\nfor last; do :; done\necho "$@" >> {log}\n{script}\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    return log


def test_a_missing_compiler_leaves_no_library_and_is_no_error(builder, monkeypatch, capsys):
    monkeypatch.setenv("CXX", "/no/such/compiler")
    assert run_hook(builder) == {}
    assert "built without compiled kernels" in capsys.readouterr().err
    assert not list(builder.TARGET.parent.iterdir())


def test_no_compiler_at_all_is_said(builder, monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert run_hook(builder) == {}
    assert "no C++ compiler" in capsys.readouterr().err


def test_what_a_failing_compiler_said_is_passed_on(builder, monkeypatch, tmp_path, capsys):
    use_compiler(monkeypatch, tmp_path, "echo no such instruction >&2; exit 1")
    assert run_hook(builder) == {}
    assert "no such instruction" in capsys.readouterr().err
    assert not builder.TARGET.exists()


def test_a_build_that_works_makes_the_wheel_one_of_this_platform(builder, monkeypatch, tmp_path):
    log = use_compiler(monkeypatch, tmp_path, 'echo new > "$last"')
    build_data = run_hook(builder)
    assert build_data["pure_python"] is False
    assert re.fullmatch(r"py3-none-\w+", build_data["tag"])
    assert builder.TARGET.read_text() == "new\n"
    assert list(builder.TARGET.parent.iterdir()) == [builder.TARGET]
    compiled = {Path(source).name for source in re.findall(r"-c (\S+)", log.read_text())}
    assert compiled == {path.name for path in SOURCES.glob("*.cpp")}
    assert set(builder.ISA) == set(kernels.ISA)


def test_a_link_that_fails_leaves_the_library_that_was_there(builder, monkeypatch, tmp_path):
    script = 'case "$*" in *-shared*) exit 1;; esac; echo new > "$last"'
    use_compiler(monkeypatch, tmp_path, script)
    with pytest.raises(subprocess.CalledProcessError):
        builder.build()
    assert builder.TARGET.read_text() == "of an earlier build"


# ------------------------------------------------------------------ the same on both sides


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures_have_the_fields_of_the_header(name):
    (body,) = re.findall(rf"struct {name} {{(.*?)^}};", HEADER, re.DOTALL | re.MULTILINE)
    declared = re.findall(r"(\w+);", re.sub(r"//.*", "", body))
    assert declared == [field[0] for field in STRUCTURES[name]._fields_]


def test_names_and_numbers_are_those_of_the_header():
    def members(name: str) -> dict[str, int]:
        (body,) = re.findall(rf"enum {name} : int32_t {{(.*?)}};", HEADER, re.DOTALL)
        return {key: int(value) for key, value in re.findall(r"HW_(\w+) = (\d+)", body)}

    assert f"HW_ABI_VERSION = {kernels.ABI_VERSION};" in HEADER
    assert members("HwFormat") == {key.upper(): value for key, value in kernels.FORMATS.items()}
    assert members("HwSource") == {f"FROM_{key}": n for key, n in kernels.SOURCES.items()}
    assert members("HwStatus") == kernels.STATUSES
    assert members("HwIsa") == {isa.upper(): place for place, isa in enumerate(kernels.ISA)}
    (parts,) = re.findall(r"enum HwPart {(.*), HW_NUM_PARTS }", HEADER)
    assert len(parts.split(",")) == len(kernels.PARTS)


# ------------------------------------------------------------------------- finding


@pytest.fixture(name="forgotten")
def forget_the_library() -> Iterator[None]:
    kernels.load_kernels.cache_clear()
    yield
    kernels.load_kernels.cache_clear()


@pytest.fixture(name="absent")
def hide_the_library(forgotten, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(kernels, "LIBRARY", tmp_path / "nowhere.so")


@pytest.mark.skipif(kernels.best_isa() is None, reason="the compiled kernels are not built")
def test_a_library_of_another_version_is_refused(forgotten, monkeypatch):
    assert kernels.load_kernels() is not None
    kernels.load_kernels.cache_clear()
    monkeypatch.setattr(kernels, "ABI_VERSION", kernels.ABI_VERSION + 1)
    assert kernels.load_kernels() is None
    assert kernels.best_isa() is None


def test_a_file_that_is_no_such_library_is_refused(forgotten, monkeypatch, tmp_path):
    broken = tmp_path / "broken.so"
    broken.write_text("not a library")
    monkeypatch.setattr(kernels, "LIBRARY", broken)
    assert kernels.load_kernels() is None
    kernels.load_kernels.cache_clear()
    monkeypatch.setattr(kernels, "LIBRARY", Path(_ctypes.__file__))
    assert kernels.load_kernels() is None


# ------------------------------------------------------------------------- doing without


@pytest.mark.parametrize("quantization", [None, "int4"])
def test_without_kernels_plain_torch_is_chosen(absent, quantization):
    machine = probe_hardware()
    assert machine.kernels is None
    facts = ModelFacts(2048, 1_000_000, 1024, quantization=quantization)
    choice = resolve(load_config({}, environ={}), facts, machine)
    assert choice.kernels is None
    assert choice.dtype == choice.kv_dtype and choice.dtype in ("bf16", "fp32")
    with pytest.raises(ConfigError, match=r"not built.*use bf16 or fp32"):
        resolve(load_config({"dtype": "int4"}, environ={}), facts, machine)


def test_without_kernels_a_model_still_runs(absent):
    spec = tiny_spec()
    checkpoint = MemoryCheckpoint(spec, tiny_weights(spec))
    choice = resolve(load_config({"max_num_seqs": 2}, environ={}), spec.facts, probe_hardware())
    executor = load_executor(checkpoint, choice, SystemClock())
    assert isinstance(executor._model, EagerModel)
    assert len(generate(executor, PROMPT, GREEDY, 3)) == 3
    options = ModelOptions(dtype="bf16", num_blocks=8, block_size=16, max_model_len=64)
    with pytest.raises(ModelLoadError, match="compiled kernels are not built"):
        CompiledModel(checkpoint, options)
