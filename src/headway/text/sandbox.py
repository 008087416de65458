"""A Jinja sandbox that bounds the work and the output of a template.

A template comes with the model: it is untrusted code that runs in the API process. Every loop,
call, filter, comparison and operator pays before it works. The budget does not depend on the speed
of the machine, so a request is refused everywhere or nowhere. Features that chat templates do not
need, and that could build large values from small ones, are removed.
"""

from __future__ import annotations

import functools
import json
import re
import threading
from collections.abc import Callable, Generator, ItemsView, Iterable, KeysView, Mapping, ValuesView
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.filters import do_indent, do_round, make_attrgetter
from jinja2.runtime import LoopContext, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_SOURCE_CHARS = 1_000_000
MAX_INT_BITS = 4096
MAX_WIDTH = 1000
"""Largest width of a number in a format."""
MAX_REPEATED = 100_000
"""Most elements of a list made by repetition or addition."""
CHARS_PER_UNIT = 64
NODES_PER_UNIT = 32
MIN_UNITS, UNITS_PER_CHAR, MAX_UNITS = 100_000, 100, 10_000_000
"""Work that a template may do: some for any chat, more for a longer one, bounded for all."""

_STR_METHODS = frozenset(
    [
        "capitalize",
        "casefold",
        "count",
        "endswith",
        "find",
        "format",
        "index",
        "isalnum",
        "isalpha",
        "isascii",
        "isdecimal",
        "isdigit",
        "isidentifier",
        "islower",
        "isnumeric",
        "isprintable",
        "isspace",
        "istitle",
        "isupper",
        "join",
        "lower",
        "lstrip",
        "partition",
        "removeprefix",
        "removesuffix",
        "replace",
        "rfind",
        "rindex",
        "rpartition",
        "rsplit",
        "rstrip",
        "split",
        "splitlines",
        "startswith",
        "strip",
        "swapcase",
        "title",
        "upper",
    ]
)
_SAFE_ATTRIBUTES: dict[type, frozenset[str]] = {
    str: _STR_METHODS,
    list: frozenset({"index", "count", "copy"}),
    tuple: frozenset({"index", "count"}),
    dict: frozenset({"get", "items", "keys", "values", "copy"}),
    int: frozenset(),
    bool: frozenset(),
    float: frozenset({"is_integer"}),
    bytes: frozenset(),
}
_CHEAP_FILTERS = frozenset(
    [
        "abs",
        "attr",
        "count",
        "d",
        "default",
        "first",
        "float",
        "items",
        "last",
        "length",
        "list",
        "map",
        "reject",
        "rejectattr",
        "safe",
        "select",
        "selectattr",
    ]
)
_WEIGHED_FILTERS = frozenset(
    [
        "capitalize",
        "dictsort",
        "e",
        "escape",
        "forceescape",
        "groupby",
        "int",
        "lower",
        "max",
        "min",
        "reverse",
        "sort",
        "string",
        "title",
        "trim",
        "truncate",
        "unique",
        "upper",
        "urlencode",
        "wordcount",
    ]
)
_BOUNDED_FILTERS = frozenset({"format", "indent", "join", "replace", "round", "tojson"})
_COMPARING_TESTS = frozenset(
    [
        "!=",
        "<",
        "<=",
        "==",
        ">",
        ">=",
        "eq",
        "equalto",
        "ge",
        "greaterthan",
        "gt",
        "in",
        "le",
        "lessthan",
        "lt",
        "ne",
    ]
)
_PERCENT = re.compile(r"%(?:\([^)]*\))?[-#0 +]*(\*|\d*)(?:\.(\*|\d*))?")
_TIME_WIDTH = re.compile(r"%[-_0^#+]*\d")


@dataclass(slots=True)
class Budget:
    """What one rendering may still use, in units of work and characters."""

    num_units: int
    num_chars: int

    def spend(self, num_units: int) -> None:
        self.num_units -= num_units
        if self.num_units < 0:
            raise SecurityError("the chat template does too much work")

    def build(self, num_chars: int) -> None:
        self.spend(1 + num_chars // CHARS_PER_UNIT)
        self.num_chars -= num_chars
        if self.num_chars < 0:
            raise SecurityError("the text that the chat template builds is too long")


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """Compiles templates whose work is counted; `rendering` sets the budget."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self, max_chars: int, now: Callable[[], datetime], **options: Any) -> None:
        super().__init__(**options)
        self._max_chars = max_chars
        self._local = threading.local()
        self.finalize = self.write
        self.filters = {
            name: self._counted(name, self.filters[name])
            for name in _CHEAP_FILTERS | _WEIGHED_FILTERS
        } | {name: getattr(self, f"_filter_{name}") for name in _BOUNDED_FILTERS}
        self.tests = {name: self._counted_test(name, test) for name, test in self.tests.items()}
        del self.globals["lipsum"]
        # A closure: a template could read the parts of a partial function.
        self.globals["strftime_now"] = lambda pattern: _strftime(now, pattern)

    @contextmanager
    def rendering(self, num_chars: int) -> Generator[None, None, None]:
        """Set the budget for a chat of this many characters, in this thread."""
        units = min(MIN_UNITS + UNITS_PER_CHAR * num_chars, MAX_UNITS)
        self._local.budget = Budget(units, 16 * self._max_chars)
        try:
            yield
        finally:
            del self._local.budget

    @property
    def _budget(self) -> Budget:
        budget = getattr(self._local, "budget", None)
        # The compiler folds constants.
        return Budget(MIN_UNITS, self._max_chars) if budget is None else budget

    # ----------------------------------------- called by the code of a template

    def _generate(self, source: nodes.Template, *args: Any, **options: Any) -> str:
        source = _Counting(self).visit(source)
        source.set_environment(self)
        return super()._generate(source, *args, **options)

    def spend(self, num_units: int) -> str:
        self._budget.spend(num_units)
        return ""

    def build(self, num_chars: int) -> str:
        self._budget.build(num_chars)
        return ""

    def write(self, value: Any) -> Any:
        """Return a written value as text."""
        if isinstance(value, Undefined):
            return value
        if not isinstance(value, str):
            self.weigh(value)
            value = str(value)
        self._budget.build(len(value))
        return value

    def iterate(self, values: Any, num_units: int) -> Any:
        """Charge the elements of a loop; return them."""
        budget = self._budget
        if hasattr(values, "__len__"):
            budget.spend(len(values) * num_units)
            return values
        return self._each(values, num_units)

    def _each(self, values: Iterable[Any], num_units: int) -> Generator[Any, None, None]:
        for value in values:
            self._budget.spend(num_units)
            yield value

    def weighed(self, value: Any) -> Any:
        """Charge a value that is about to be compared; return it."""
        self.weigh(value)
        return value

    def searched(self, value: Any) -> Any:
        """Charge a value that is about to be searched; return it."""
        if not isinstance(value, dict):
            self.weigh(value)
        return value

    def joined(self, *values: Any) -> str:
        texts = [value if isinstance(value, str) else str(self.weighed(value)) for value in values]
        self._bound(sum(map(len, texts)))
        return self._built("".join(texts))

    def sliced(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        part = value[start:stop:step]
        self._budget.spend(1 + len(part) // CHARS_PER_UNIT)
        return self._built(part)

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        budget = self._budget
        budget.spend(1)
        if operator == "%" and isinstance(left, str):
            return self._percent(left, right)
        if operator == "**" and isinstance(left, int):
            if left.bit_length() * abs(right) > MAX_INT_BITS:
                raise SecurityError("a power in the chat template is too large")
        elif operator == "+" and isinstance(left, (str, list, tuple)):
            self._bound(len(left) + len(right), is_text=isinstance(left, str))
        elif operator == "*":
            for value, count in ((left, right), (right, left)):
                if isinstance(value, (str, list, tuple)) and isinstance(count, int):
                    limit = self._max_chars if isinstance(value, str) else MAX_REPEATED
                    if len(value) * count > limit:
                        raise SecurityError("a repetition in the chat template is too long")
        _check_ints(left, right)
        return self._built(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(__obj, "__self__", None)
        if owner is __self:
            # Template code adds loop variables that only macros read.
            return __obj(*args)
        __self._budget.spend(1)
        if isinstance(__obj, LoopContext) and args:
            args = (__self.iterate(args[0], 1), *args[1:])
        elif isinstance(owner, (str, list, tuple)):
            args = __self._before_method(getattr(__obj, "__name__", ""), owner, args)
        elif __obj is dict or __obj.__class__ is type:
            for value in args:
                __self._budget.spend(len(value) if hasattr(value, "__len__") else 0)
        return __self._built(super().call(__context, __obj, *args, **kwargs))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        for kind in type(obj).__mro__:
            if kind in _SAFE_ATTRIBUTES and attr not in _SAFE_ATTRIBUTES[kind]:
                return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        owner = getattr(value, "__self__", None)
        if not isinstance(owner, str) or getattr(value, "__name__", "") != "format":
            return None
        return lambda *args, **kwargs: self._format(owner, *args, **kwargs)

    # ------------------------------------------------------------------ prices

    def weigh(self, value: Any) -> int:
        """Charge a walk through a value; return its approximate size as text."""
        if isinstance(value, str):
            self._budget.spend(1 + len(value) // CHARS_PER_UNIT)
            return len(value)
        num_chars, pending, budget = 0, [value], self._budget
        while pending:
            item = pending.pop()
            budget.spend(1)
            if isinstance(item, str):
                budget.spend(len(item) // CHARS_PER_UNIT)
                num_chars += len(item) + 4
            elif isinstance(item, Mapping):
                pending.extend(item.keys())
                pending.extend(item.values())
            elif isinstance(item, (list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)):
                pending.extend(item)
            elif isinstance(item, int):
                num_chars += 1 + item.bit_length() // 3
            elif isinstance(item, range):
                budget.spend(len(item))
            elif isinstance(item, Namespace):
                raise SecurityError("a namespace in the chat template is used as a value")
            else:
                num_chars += 32
            num_chars += 4
        self._bound(num_chars)
        return num_chars

    def _bound(self, size: int, is_text: bool = True) -> None:
        """Refuse a value of this size before it is built."""
        if size > (self._max_chars if is_text else MAX_REPEATED):
            raise SecurityError("a value in the chat template is too long")

    def _built(self, value: Any) -> Any:
        """Charge a built value; return it."""
        if isinstance(value, str):
            self._bound(len(value))
            self._budget.build(len(value))
        elif isinstance(value, (list, tuple)):
            self._budget.spend(1 + len(value))
        return value

    def _before_method(self, name: str, owner: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if not isinstance(owner, str):
            self.weigh(owner)
            return args
        self.weigh(owner)
        if name == "join" and args:
            return (self._joinable(owner, args[0]), *args[1:])
        if name == "replace" and len(args) > 1:
            self._bound_replacement(owner, args[0], args[1])
        elif name in ("split", "rsplit", "splitlines"):
            self._budget.spend(len(owner) // 4)
        for value in args:
            if isinstance(value, (str, tuple)):
                self.weigh(value)
        return args

    def _joinable(self, separator: str, values: Any) -> list[Any]:
        items = list(self.iterate(values, 1))
        size = sum(len(item) if isinstance(item, str) else self.weigh(item) for item in items)
        self._bound(size + len(separator) * len(items))
        return items

    def _bound_replacement(self, text: str, old: Any, new: Any) -> None:
        if isinstance(old, str) and isinstance(new, str):
            self.weigh(text)
            self._bound(len(text) + text.count(old) * len(new))

    def _percent(self, text: str, values: Any) -> str:
        specs = _PERCENT.findall(text)
        for width in (number for spec in specs for number in spec):
            _check_width(width)
        size = self.weigh(values)
        repeated = len(specs) if isinstance(values, Mapping) else 1
        self._bound(len(text) + MAX_WIDTH * sum(map(any, specs)) + repeated * size)
        return self._built(text % values)

    def _format(self, text: str, *args: Any, **kwargs: Any) -> str:
        self.weigh(text)
        return self._built(_BoundedFormatter(self, self._max_chars).vformat(text, args, kwargs))

    # ----------------------------------------------------------------- filters

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a filter that charges first and keeps the context marker."""
        skipped = 1 if hasattr(function, "jinja_pass_arg") else 0
        is_weighed = name in _WEIGHED_FILTERS

        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._budget.spend(1)
            if is_weighed:
                for value in (*args[skipped:], *kwargs.values()):
                    size = self.weigh(value)
                    if name == "int" and size > MAX_WIDTH:
                        raise SecurityError("a number in the chat template is too long")
            return self._built(function(*args, **kwargs))

        return counted

    def _counted_test(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        is_comparing = name in _COMPARING_TESTS

        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._budget.spend(1)
            if is_comparing:
                for value in args:
                    self.searched(value)
            return function(*args, **kwargs)

        return counted

    def _filter_format(self, value: Any, *args: Any, **kwargs: Any) -> str:
        return self._percent(str(value), kwargs or args)

    def _filter_indent(
        self, value: Any, width: Any = 4, first: bool = False, blank: bool = False
    ) -> str:
        self.weigh(value)
        text = str(value)
        size = len(width) if isinstance(width, str) else width
        self._bound(len(text) + (text.count("\n") + 1) * size)
        return self._built(do_indent(text, width, first, blank))

    def _filter_join(self, value: Any, d: str = "", attribute: str | int | None = None) -> str:
        if attribute is not None:
            value = map(make_attrgetter(self, attribute), value)
        items = self._joinable(str(d), value)
        return self._built(str(d).join(map(str, items)))

    def _filter_replace(self, s: Any, old: Any, new: Any, count: int | None = None) -> str:
        text, old, new = str(self.weighed(s)), str(self.weighed(old)), str(self.weighed(new))
        self._bound_replacement(text, old, new)
        return self._built(text.replace(old, new, -1 if count is None else count))

    def _filter_round(self, value: Any, precision: int = 0, method: Any = "common") -> float:
        if abs(precision) > 100:
            raise SecurityError("a precision in the chat template is too large")
        return do_round(value, precision, method)

    def _filter_tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        is_deep = isinstance(indent, int) and indent > 16
        if is_deep or any(len(str(one)) > 16 for one in (indent, *(separators or ()))):
            raise SecurityError("a separator in the chat template is too long")
        self.weigh(value)
        encoder = json.JSONEncoder(
            ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        pieces, num_chars = [], 0
        for piece in encoder.iterencode(value):
            num_chars += len(piece)
            self._bound(num_chars)
            pieces.append(piece)
        return self._built("".join(pieces))


class _BoundedFormatter(SandboxedFormatter):
    def __init__(self, env: BoundedSandbox, max_chars: int) -> None:
        super().__init__(env)
        self._sandbox = env
        self._num_left = max_chars

    def format_field(self, value: Any, format_spec: str) -> Any:
        for width in re.findall(r"\d+", format_spec):
            _check_width(width)
        self._sandbox.weigh(value)
        text = super().format_field(value, format_spec)
        self._num_left -= len(text)
        if self._num_left < 0:
            raise SecurityError("a value in the chat template is too long")
        return text


class _Counting(NodeTransformer):
    """Adds charges to loops, comparisons, slices, concatenations, macros and text between tags."""

    def __init__(self, environment: BoundedSandbox) -> None:
        self._environment = environment

    def visit_For(self, node: nodes.For) -> nodes.Node:
        price = nodes.Const(_price(node))
        self.generic_visit(node)
        node.iter = _call("iterate", node.iter, price)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._paid_body(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._paid_body(node)

    def visit_Block(self, node: nodes.Block) -> nodes.Node:
        return self._paid_body(node)

    def _paid_body(self, node: Any) -> nodes.Node:
        price = nodes.Const(_price(node))
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("spend", price), lineno=node.lineno))
        return node

    def visit_Output(self, node: nodes.Output) -> Any:
        size = sum(len(one.data) for one in node.nodes if isinstance(one, nodes.TemplateData))
        self.generic_visit(node)
        if not size:
            return node
        return [nodes.ExprStmt(_call("build", nodes.Const(size)), lineno=node.lineno), node]

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.expr, nodes.Const):
            node.expr = _call("weighed", node.expr)
        for operand in node.ops:
            if not isinstance(operand.expr, nodes.Const):
                name = "searched" if operand.op in ("in", "notin") else "weighed"
                operand.expr = _call(name, operand.expr)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("joined", *node.nodes)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        part = node.arg
        if not isinstance(part, nodes.Slice):
            return node
        none = nodes.Const(None)
        return _call("sliced", node.node, part.start or none, part.stop or none, part.step or none)


def _price(node: nodes.Node) -> int:
    return 1 + sum(1 for _ in node.find_all(nodes.Node)) // NODES_PER_UNIT


def _call(name: str, *args: Any) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), list(args), [], None, None)


def _check_width(width: str) -> None:
    if width == "*" or len(width) > 4 or (width and int(width) > MAX_WIDTH):
        raise SecurityError("a width in a format of the chat template is too large")


def _check_ints(*values: Any) -> None:
    for value in values:
        if isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
            raise SecurityError("a number in the chat template is too large")


def _strftime(now: Callable[[], datetime], pattern: str) -> str:
    if len(pattern) > 256 or _TIME_WIDTH.search(pattern):
        raise TemplateError("strftime_now takes a short pattern without widths")
    return now().strftime(pattern)
