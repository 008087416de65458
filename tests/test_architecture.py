"""The rules of the architecture that a machine can check, over the source as text.

One test for each rule; what breaks it is listed as `file:line name`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "headway"
BENCHMARKS = ROOT / "benchmarks"

MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 6
MAX_PROTOCOL_METHODS = 5

BANNED_IMPORTS = {"pickle", "dill", "cloudpickle", "shelve", "marshal", "atexit"}
BANNED_CALLS = {"eval", "exec", "torch.load"}
BANNED_METHODS = {"recv_pyobj", "send_pyobj"}
SHELLS = {"os.system", "os.popen"}
ENVIRONMENT = {"os.environ", "os.environb", "os.getenv", "os.putenv"}
Function = ast.FunctionDef | ast.AsyncFunctionDef
Found = Iterable[tuple[int, str]]
"""Lines that break a rule, and what is there."""


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def broken(rule: Callable[[Path], Found], folder: Path = SOURCE) -> list[str]:
    """Every place below a folder that breaks a rule."""
    paths = sorted(folder.rglob("*.py"))
    assert paths
    return [
        f"{path.relative_to(ROOT)}:{line} {what}" for path in paths for line, what in rule(path)
    ]


def dotted(node: ast.expr) -> str:
    """`a.b.c` of an expression that is one, else an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        parent = dotted(node.value)
        return f"{parent}.{node.attr}" if parent else ""
    return ""


def functions_in(path: Path) -> Iterator[Function]:
    return (node for node in ast.walk(tree_of(path)) if isinstance(node, Function))


def calls_in(path: Path) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call))


def imports_in(path: Path) -> Iterator[tuple[int, str]]:
    """Every imported name, as full as the statement gives it."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            yield node.lineno, module
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def test_a_function_has_at_most_60_lines():
    def rule(path: Path) -> Found:
        for function in functions_in(path):
            length = (function.end_lineno or 0) - function.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield function.lineno, f"{function.name}: {length} lines"

    assert not broken(rule)


def test_a_signature_has_at_most_6_parameters():
    def rule(path: Path) -> Found:
        for function in functions_in(path):
            args = function.args
            names = [one.arg for one in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
            num_given = len([name for name in names if name not in ("self", "cls")])
            if num_given > MAX_PARAMETERS:
                yield function.lineno, f"{function.name}: {num_given} parameters"

    assert not broken(rule)


def test_a_protocol_has_at_most_5_methods():
    def rule(path: Path) -> Found:
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.ClassDef):
                continue
            if any(dotted(base) in ("Protocol", "typing.Protocol") for base in node.bases):
                methods = [item.name for item in node.body if isinstance(item, Function)]
                named = [name for name in methods if not name.startswith("__")]
                if len(named) > MAX_PROTOCOL_METHODS:
                    yield node.lineno, f"{node.name}: {len(named)} methods"

    assert not broken(rule)


def test_nothing_that_unpickles_or_runs_at_exit_is_imported():
    def rule(path: Path) -> Found:
        for line, name in imports_in(path):
            if name.split(".")[0] in BANNED_IMPORTS or name == "torch.load":
                yield line, name

    assert not broken(rule)


def test_nothing_evaluates_code_or_unpickles():
    def rule(path: Path) -> Found:
        for call in calls_in(path):
            method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
            if (name := dotted(call.func)) in BANNED_CALLS or method in BANNED_METHODS:
                yield call.lineno, name or method

    assert not broken(rule)


def test_nothing_is_run_by_a_shell():
    def rule(path: Path) -> Found:
        for call in calls_in(path):
            has_shell = any(given.arg == "shell" for given in call.keywords)
            if has_shell or dotted(call.func) in SHELLS:
                yield call.lineno, dotted(call.func)

    assert not broken(rule)


def test_the_environment_is_read_only_in_config():
    def rule(path: Path) -> Found:
        if path == SOURCE / "config.py":
            return
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute) and dotted(node) in ENVIRONMENT:
                yield node.lineno, dotted(node)
        for line, name in imports_in(path):
            if name in ENVIRONMENT:
                yield line, name

    assert not broken(rule)


def test_no_assert_statement_that_would_vanish_under_dash_o():
    def rule(path: Path) -> Found:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Assert):
                yield node.lineno, "assert"

    assert not broken(rule)


def test_every_module_says_what_it_is():
    def rule(path: Path) -> Found:
        if path.name != "__init__.py" and not ast.get_docstring(tree_of(path)):
            yield 1, "no docstring"

    assert not broken(rule)


def test_benchmarks_do_not_import_tests():
    """Tests import benchmarks/support and the batteries; the other way round makes a circle."""

    def rule(path: Path) -> Found:
        for line, name in imports_in(path):
            if name.split(".")[0] == "tests":
                yield line, name

    assert not broken(rule, BENCHMARKS)
    assert not broken(rule)


def test_no_class_name_is_there_twice() -> None:
    places: dict[str, list[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{path.relative_to(ROOT)}:{node.lineno}")
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert not twice
