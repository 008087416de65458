"""What PyPy runs: simulations without any package outside the standard library."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from dataclasses import asdict
from pathlib import Path

import pytest

from headway.sim.profile.machine import MachineProfile
from headway.sim.profile.plain import from_plain
from tests.sim.support import make_profile

ROOT = Path(__file__).parents[2]
MODULES = {"pyyaml": "yaml", "pyzmq": "zmq"}
"""Modules of packages that have another name."""
BLOCK = """
import sys
from importlib.abc import MetaPathFinder

class Missing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in MISSING:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
sys.implementation.name = "pypy"
"""
SERVE = """
from dataclasses import replace
from functools import partial
from hashlib import sha256
from headway.fleet.router.simulated import SharedFrontends
from headway.sim.profile.catalog import find_profile
from headway.sim.prediction.serving import Limits, serve_load
from headway.sim.prediction.setup import Setup
from headway.workload import Content, Poisson, Prefixes, Synthetic, Uniform

setup = replace(
    Setup.of(find_profile("smollm2-135m-2-cores")),
    num_engines=4,
    make_frontends=partial(SharedFrontends.make, 3),
    kill_every_s=1.0,
)
content = Content(prefixes=Prefixes(0.5, 3, 64))
load = Synthetic(Poisson(30), Uniform(16, 240), Uniform(8, 56), content)
served = serve_load(setup, load, Limits(150))
assert served.num_kills and served.num_steps > 500
assert any(one.num_cached_tokens for one in served.requests)
print(sha256(repr(served.requests).encode()).hexdigest())
"""


def missing_on_pypy() -> set[str]:
    """Return the modules of the packages that are installed for CPython only."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    marked = [one for one in project["dependencies"] if "implementation_name" in one]
    names: list[str] = [one.split(">")[0] for one in marked]
    # A typer as on PyPy does not need pydantic; the one that is installed here may.
    return {MODULES.get(name, name) for name in names} - {"pydantic", "typer"}


def run(code: str, *arguments: str, is_pypy: bool = True) -> subprocess.CompletedProcess[str]:
    block = f"MISSING = {missing_on_pypy()}{BLOCK}" if is_pypy else ""
    command = [sys.executable, "-c", block + code, *arguments]
    path = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(
        command, check=False, env=path, capture_output=True, text=True, timeout=120
    )


def test_what_is_missing_is_read():
    assert {"msgspec", "numpy", "yaml", "zmq"} <= missing_on_pypy()
    assert run("import msgspec").returncode == 1


def test_a_fleet_with_a_router_process_is_served_alike_as_on_pypy():
    on_pypy, usual = run(SERVE), run(SERVE, is_pypy=False)
    assert on_pypy.returncode == 0, on_pypy.stderr
    assert on_pypy.stdout == usual.stdout
    assert len(usual.stdout.strip()) == 64


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["simulate", "PROFILE", "--runs", "1", "--num-requests", "5"], 0, "TTFT p50"),
        (["simulate", "--from", "x"], 2, "--from needs msgspec: run it with CPython, not PyPy"),
        (["simulate", "PROFILE", "--from-ledger", "auto"], 2, "--from-ledger needs msgspec: run"),
        (["plan", "PROFILE", "--ttft=1", "--runs=1", "--num-requests=100"], 0, "requests/s"),
    ],
)
def test_the_commands_need_typer_and_rich_only(arguments: list[str], code: int, text: str):
    given = ["smollm2-135m-2-cores" if one == "PROFILE" else one for one in arguments]
    found = run("from headway.cli import main; main()", *given)
    assert found.returncode == code, found.stderr
    assert text in found.stdout + found.stderr


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("model", 3, "model is not a value of type str"),
        ("num_steps", True, "num_steps is not a value of type int"),
        ("num_steps", 1.5, "num_steps is not a value of type int"),
        ("drift", "much", "drift is not a value of type float"),
        ("fit", [], "fit is not an object"),
        ("fit", {"knots": [1]}, "fit.coefficients is missing"),
        ("residuals", {}, "residuals is not a list"),
        ("largest", [1, 2], "largest has 2 values, not 4"),
        ("scheduler", {"max_num_seqs": None}, "scheduler.max_num_seqs is not a value of type int"),
    ],
)
def test_a_wrong_value_of_a_profile_is_named(field: str, value: object, message: str):
    plain = asdict(make_profile())
    assert from_plain(MachineProfile, _as_json(plain)) == make_profile()
    with pytest.raises(ValueError, match=message):
        from_plain(MachineProfile, {**_as_json(plain), field: value})


def _as_json(plain: dict[str, object]) -> dict[str, object]:
    return json.loads(json.dumps(plain))
