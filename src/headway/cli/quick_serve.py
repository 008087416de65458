"""`headway serve` without typer, which takes a tenth of a second to import and as long to parse.

Reads plain arguments only. Whatever else there is, help and mistakes included, is left to typer.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import get_origin, get_type_hints

from headway.config import SECTIONS, Config, load_config
from headway.engine.supervise.start import EngineStart
from headway.errors import ConfigError
from headway.logs import set_up_logging

SERVE_SECTIONS = (
    *("model", "cache", "scheduler", "supervision", "recording", "server", "logs", "ledger"),
    *("batches", "tracing"),
)


def serve(config: Config, engine: EngineStart | None) -> int:
    """Serve until a signal; return the exit code."""
    set_up_logging(config.logs.log_format, "server")
    # What is imported lives to the end; collections would take a tenth of the time. The server
    # turns them on again before it starts.
    gc.disable()
    from headway.build_server import run_server

    return run_server(config, first=engine)


def read_arguments(arguments: Sequence[str]) -> Config | None:
    """Return the settings of `headway serve`; None if typer has to read the arguments."""
    switches: dict[str, tuple[str, bool]] = {}
    options = {"--config": "config"}
    lists: dict[str, list[str]] = {}
    for section in map(SECTIONS.__getitem__, SERVE_SECTIONS):
        hints = get_type_hints(section)
        for name in (spec.name for spec in fields(section) if spec.name != "model"):
            if hints[name] is bool:
                switches[flag_of(name)] = (name, True)
                switches[flag_of(f"no_{name}")] = (name, False)
                continue
            options[flag_of(name)] = name
            if get_origin(hints[name]) is tuple:
                lists[name] = []
    given: dict[str, object] = {}
    rest = iter(arguments)
    for word in rest:
        flag, sign, value = word.partition("=")
        if word in switches:
            name, given_value = switches[word]
            given[name] = given_value
        elif flag in options:
            value = value if sign else next(rest, "-")
            if value.startswith("-"):
                return None
            name = options[flag]
            if name in lists:
                lists[name].append(value)
            given[name] = lists.get(name, value)
        elif word.startswith("-") or "model" in given:
            return None
        else:
            given["model"] = word
    if "model" not in given:
        return None
    path = given.pop("config", None)
    return load_config(given, read_file(None if path is None else Path(str(path))))


def flag_of(name: str) -> str:
    """Return the flag of a setting."""
    return "--" + name.replace("_", "-")


def read_file(path: Path | None) -> dict[str, object]:
    """Return the settings of a YAML file by name; empty without a file."""
    if path is None:
        return {}
    import yaml  # takes long

    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold settings as 'name: value' lines")
    return {str(name).replace("-", "_"): value for name, value in content.items()}
