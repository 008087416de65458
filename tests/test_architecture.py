"""The rules of the architecture that a machine can check, over the source as text."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

from headway.core.plan import ScheduledRequest, StepPlan
from headway.core.request import Request

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "headway"
MODULES = sorted(SOURCE.rglob("*.py"))
TESTS = sorted(path for path in (ROOT / "tests").rglob("*.py"))

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 6
MAX_PROTOCOL_METHODS = 5

LINE_BUDGETS = {
    "core/scheduler.py": 350,
    "core/engine.py": 200,
    "core/executor.py": 80,
    "config.py": 350,
    "errors.py": 120,
    "clock.py": 50,
    "build.py": 150,
    "executors/fake.py": 100,
}

BANNED_IMPORTS = {"pickle", "dill", "cloudpickle", "shelve", "marshal", "atexit"}
BANNED_CALLS = {"eval", "exec", "torch.load"}
BANNED_METHODS = {"recv_pyobj", "send_pyobj"}
ENVIRONMENT = {"os.environ", "os.environb", "os.getenv", "os.putenv"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def name_of(path: Path) -> str:
    return path.relative_to(SOURCE if path.is_relative_to(SOURCE) else ROOT).as_posix()


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def functions_in(path: Path) -> Iterator[Function]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, Function):
            yield node


def dotted(node: ast.expr) -> str:
    """`a.b.c` of an expression that is one, else an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        parent = dotted(node.value)
        return f"{parent}.{node.attr}" if parent else ""
    return ""


def imports_in(path: Path) -> Iterator[tuple[str, int]]:
    """Every imported name, as full as the statement gives it."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            yield module, node.lineno
            yield from ((f"{module}.{alias.name}", node.lineno) for alias in node.names)


def count_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


modules = pytest.mark.parametrize("path", MODULES, ids=name_of)


@pytest.mark.parametrize("path", [*MODULES, *TESTS], ids=name_of)
def test_a_file_has_at_most_400_lines(path: Path):
    assert count_lines(path) <= MAX_FILE_LINES


@pytest.mark.parametrize(("name", "budget"), LINE_BUDGETS.items())
def test_a_file_keeps_its_own_line_budget(name: str, budget: int):
    assert count_lines(SOURCE / name) <= budget


@modules
def test_a_function_has_at_most_60_lines(path: Path):
    long = {
        function.name: length
        for function in functions_in(path)
        if (length := (function.end_lineno or 0) - function.lineno + 1) > MAX_FUNCTION_LINES
    }
    assert not long


def num_parameters(function: Function) -> int:
    given = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return len([one for one in given if one.arg not in ("self", "cls")])


@modules
def test_a_signature_has_at_most_6_parameters(path: Path):
    wide = {
        function.name: count
        for function in functions_in(path)
        if (count := num_parameters(function)) > MAX_PARAMETERS
    }
    assert not wide


@modules
def test_a_protocol_has_at_most_5_methods(path: Path):
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ClassDef) and any(
            dotted(base) in ("Protocol", "typing.Protocol") for base in node.bases
        ):
            methods = [item.name for item in node.body if isinstance(item, Function)]
            named = [name for name in methods if not name.startswith("__")]
            assert len(named) <= MAX_PROTOCOL_METHODS, (node.name, named)


@pytest.mark.parametrize(("value", "limit"), [(Request, 20), (StepPlan, 8), (ScheduledRequest, 8)])
def test_the_central_types_stay_small(value: type, limit: int):
    names = getattr(value, "_fields", None) or fields(value)
    assert len(names) <= limit


@modules
def test_nothing_that_unpickles_or_runs_at_exit_is_imported(path: Path):
    found = [
        (name, line)
        for name, line in imports_in(path)
        if name.split(".")[0] in BANNED_IMPORTS or name == "torch.load"
    ]
    assert not found


@modules
def test_nothing_evaluates_code_or_unpickles_weights(path: Path):
    calls = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call)]
    found = [(name, node.lineno) for node in calls if (name := dotted(node.func)) in BANNED_CALLS]
    assert not found
    assert not [
        node.lineno
        for node in calls
        if isinstance(node.func, ast.Attribute) and node.func.attr in BANNED_METHODS
    ]


@modules
def test_nothing_is_run_by_a_shell(path: Path):
    calls = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call)]
    through_shell = [
        node.lineno for node in calls for given in node.keywords if given.arg == "shell"
    ]
    assert not through_shell
    assert not [node.lineno for node in calls if dotted(node.func) in ("os.system", "os.popen")]


@modules
def test_the_environment_is_read_only_in_config(path: Path):
    if name_of(path) == "config.py":
        return
    nodes = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Attribute)]
    found = [(name, node.lineno) for node in nodes if (name := dotted(node)) in ENVIRONMENT]
    found += [(name, line) for name, line in imports_in(path) if name in ENVIRONMENT]
    assert not found


@modules
def test_no_assert_statement_that_would_vanish_under_dash_o(path: Path):
    asserts = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Assert)]
    assert not [node.lineno for node in asserts]


@modules
def test_every_module_says_what_it_is(path: Path):
    assert path.name == "__init__.py" or ast.get_docstring(tree_of(path))
