"""Reference pages made of the code: settings, commands, metrics, wait causes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any, cast, get_type_hints

from prometheus_client import CollectorRegistry
from typer.main import get_command

from headway.cli.app import make_app
from headway.cli.quick_serve import flag_of
from headway.config import ENV_PREFIX, SECTIONS
from headway.observe import Metrics
from headway.observe.ledger.writer import LedgerWriter
from headway.observe.spans.exporter import SpanExporter
from headway.observe.trace.explain import CAUSES, HOLDERS, NEEDS

MADE = "<!-- Made by scripts/build-docs from {}; changes here are lost. -->"
_UNITS = ((1024**3, "G"), (1024**2, "M"), (1024, "k"))
_HELP_OPTIONS = {"help", "install_completion", "show_completion"}
COMMON_LABELS = ("model_name", "engine")


def page(title: str, source: str, *parts: str) -> str:
    """Return a page that says what it was made of."""
    return "\n\n".join([f"# {title}", MADE.format(source), *parts]) + "\n"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; bars within cells are escaped."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


# -------------------------------------------------------------------- settings


def settings_page() -> str:
    """Return every setting with its flag, default and meaning."""
    commands = {name: _setting_names(command) for name, command in _leaves(_root())}
    parts = [
        "Each setting is a flag, a variable and a line of YAML. `--max-num-seqs 32`, "
        f"`{ENV_PREFIX}MAX_NUM_SEQS=32` and `max_num_seqs: 32` in the file of `--config` are the "
        "same. Flags go before variables, variables before the file. An unknown name is an error. "
        "Sizes may have a unit: `512M`, `2G`. `none` is the value that leaves a setting out.",
    ]
    for section, kind in SECTIONS.items():
        names = {spec.name for spec in fields(kind)} - {"model"}
        users = [f"`headway {name}`" for name, known in commands.items() if names <= known]
        parts += [
            f"## {section.capitalize()}",
            f"{kind.__doc__} Flags of {', '.join(users)}.",
            table(("Flag", "Default", "Meaning"), _setting_rows(kind)),
        ]
    return page("Which settings are there?", "src/headway/config.py", *parts)


def _setting_rows(kind: type[Any]) -> Iterator[Sequence[str]]:
    hints = get_type_hints(kind)
    for spec in fields(kind):
        flag = f"`{flag_of(spec.name)}`"
        if hints[spec.name] is bool:
            flag += f", `{flag_of(f'no_{spec.name}')}`"
        if spec.name == "model":
            flag = "`MODEL`"
        yield flag, _default_text(spec.name, spec.default), spec.metadata["about"]


def _default_text(name: str, value: object) -> str:
    if value in (None, (), ""):
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and name.endswith("_bytes"):
        size, unit = next(((size, unit) for size, unit in _UNITS if value % size == 0), (1, ""))
        return f"`{value // size}{unit}`"
    return f"`{value}`"


# -------------------------------------------------------------------- commands


def _root() -> Any:
    return get_command(make_app())


def _leaves(command: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield commands without subcommands, by their words after `headway`."""
    for name, one in command.commands.items():
        words = f"{path} {name}".strip()
        if hasattr(one, "commands"):
            yield from _leaves(one, words)
        else:
            yield words, one


def _setting_names(command: Any) -> set[str]:
    known = {spec.name for kind in SECTIONS.values() for spec in fields(kind)}
    has_config = any(param.name == "config_file" for param in command.params)
    options = [param.name for param in command.params if param.param_type_name == "option"]
    return known.intersection(options) if has_config else set()


def commands_page() -> str:
    """Return every command with its arguments and options."""
    parts = ["`headway COMMAND --help` shows the same in a terminal."]
    for words, command in _leaves(_root()):
        settings = _setting_names(command)
        params = [one for one in command.params if one.name not in settings | _HELP_OPTIONS]
        parts += [f"## headway {words}", f"```text\n{_usage(words, params)}\n```"]
        parts += [_paragraphs(command.help)]
        rows = [(_param_name(one), _param_default(one), _param_help(one)) for one in params]
        if rows:
            parts.append(table(("Argument or option", "Default", "Meaning"), rows))
        if settings:
            found = [
                f"[{name}](settings.md#{name})"
                for name, kind in SECTIONS.items()
                if {spec.name for spec in fields(kind)} - {"model"} <= settings
            ]
            parts.append(f"Settings: {', '.join(found)}.")
    return page("Which commands are there?", "src/headway/cli", *parts)


def _usage(words: str, params: Sequence[Any]) -> str:
    arguments = [one for one in params if one.param_type_name == "argument"]
    shown = [_param_name(one).strip("`") for one in arguments]
    shown = [
        name if one.required else f"[{name}]" for name, one in zip(shown, arguments, strict=True)
    ]
    return " ".join(["headway", *words.split(), *shown, "[OPTIONS]"])


def _paragraphs(text: str | None) -> str:
    parts = (text or "").split("\n\n")
    return "\n\n".join(" ".join(part.split()) for part in parts)


def _param_name(param: Any) -> str:
    if param.param_type_name == "argument":
        return f"`{(param.metavar or param.name).upper()}`"
    names = sorted([*param.opts, *param.secondary_opts], key=lambda name: not name.startswith("--"))
    return ", ".join(f"`{name}`" for name in names)


def _param_default(param: Any) -> str:
    value = param.default
    if param.required:
        return "required"
    is_open = value is None or callable(value) or value is False or value == []
    return "" if is_open else f"`{value}`"


def _param_help(param: Any) -> str:
    return re.sub(r"\s*\(default: [^)]*\)$", "", param.help or "")


# --------------------------------------------------------------------- metrics


class _Listing(CollectorRegistry):
    """A registry that remembers what was registered, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.listed: list[Any] = []

    def register(self, collector: Any) -> None:
        self.listed.append(collector)
        super().register(collector)


def metrics_page() -> str:
    """Return every metric with its type, labels and help text."""
    registry = _Listing()
    metrics = Metrics("m", registry)
    metrics.watch_need(lambda: 0.0)
    metrics.watch_ledger(cast("LedgerWriter", None))  # read at a scrape only
    metrics.watch_spans(cast("SpanExporter", None))
    rows = []
    for one in sorted(registry.listed, key=lambda one: (one._name.startswith("h"), one._name)):
        [family] = one.describe()
        labels = [f"`{name}`" for name in one._labelnames if name not in COMMON_LABELS]
        rows.append((f"`{family.name}`", family.type, ", ".join(labels), family.documentation))
    common = " and ".join(f"`{name}`" for name in COMMON_LABELS)
    return page(
        "Which metrics are there?",
        "src/headway/observe/metrics",
        f"Every metric has the labels {common}; the third column has others. Counters have "
        "`_total` added to their names. [metrics.md](../metrics.md) says where they are served, "
        "and how labels are bounded.",
        table(("Metric", "Type", "Labels", "Meaning"), rows),
    )


# ---------------------------------------------------------------------- causes


def causes_page() -> str:
    """Return every wait cause with its words in an explanation."""
    rows = [
        (
            f"`{cause}`",
            f"It waited 1.2 s {text}",
            HOLDERS.get(cause, "").format("...").strip(", ") or "",
            NEEDS.get(cause, ""),
        )
        for cause, text in CAUSES.items()
    ]
    return page(
        "What can a request wait for?",
        "src/headway/observe/trace/explain.py",
        "One cause at a time, and the causes add up to the wait. The names are those of `causes` "
        "in an [explanation](../explain.md) and of the label `cause` of `headway_wait_seconds`. "
        "The last column is how an explanation names the cause of a preemption: what the request "
        "that preempted needed.",
        table(("Cause", "In an explanation", "Holder", "As cause of a preemption"), rows),
    )
