"""Flags from the settings: one source for names, defaults and help."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, get_origin, get_type_hints

import typer

from headway.cli.quick_serve import flag_of, read_file
from headway.config import SECTIONS, load_config

PANELS = {
    "model": "Model",
    "cache": "KV cache",
    "scheduler": "Scheduling",
    "supervision": "Engine process",
    "recording": "Recording",
    "server": "Server",
    "logs": "Log",
    "tracing": "Tracing",
    "ledger": "Ledger",
    "batches": "Batches",
    "cluster": "Cluster",
    "listener": "Cluster",
    "orphans": "Cluster",
    "frontend": "Cluster",
    "routing": "Cluster",
}


def with_settings(
    *sections: str, has_model: bool = True, **defaults: object
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add one flag per setting of these sections to a command, and `--config FILE`.

    The command takes `config: Config` instead, loaded and checked. `defaults` replace defaults of
    the settings for this command. With `has_model` it takes MODEL too.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        flags = [flag for section in sections for flag in _flags_of(section, defaults)]
        names = [flag.name for flag in flags]

        def run(config_file: Path | None, model: str | None = None, **given: Any) -> None:
            settings = {name: given.pop(name) for name in names}
            file = {**defaults, **read_file(config_file)}
            command(config=load_config({"model": model, **settings}, file), **given)

        own = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in inspect.signature(command, eval_str=True).parameters.values()
            if parameter.name != "config"
        ]
        parameters = [*([_MODEL] if has_model else []), *own, _CONFIG_FILE, *flags]
        run.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
        run.__annotations__ = {item.name: item.annotation for item in parameters}
        run.__doc__ = command.__doc__
        return run

    return decorate


def with_options(
    options: type[Any], first: inspect.Parameter
) -> Callable[[Callable[[Any, Any], None]], Callable[..., None]]:
    """Add one flag per field of `options` to a command."""

    def decorate(command: Callable[[Any, Any], None]) -> Callable[..., None]:
        def run(**given: Any) -> None:
            command(given.pop(first.name), options(**given))

        hints = get_type_hints(options)
        parameters = [first]
        for spec in fields(options):
            flag = spec.metadata["flag"] or flag_of(spec.name)
            option = typer.Option(
                flag, help=spec.metadata["about"], rich_help_panel=spec.metadata["panel"]
            )
            annotation = Annotated[hints[spec.name], option]
            parameters.append(
                inspect.Parameter(
                    spec.name, first.kind, default=spec.default, annotation=annotation
                )
            )
        run.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
        run.__annotations__ = {item.name: item.annotation for item in parameters}
        run.__doc__ = command.__doc__
        return run

    return decorate


def _flags_of(section: str, defaults: Mapping[str, object]) -> list[inspect.Parameter]:
    cls = SECTIONS[section]
    hints = get_type_hints(cls)
    return [
        _flag(
            spec.name,
            hints[spec.name],
            defaults.get(spec.name, spec.default),
            spec.metadata["about"],
            PANELS[section],
        )
        for spec in fields(cls)
        if spec.name != "model"
    ]


def _flag(name: str, hint: Any, default: Any, about: str, panel: str) -> inspect.Parameter:
    flag = flag_of(name)
    about = about if default in (None, ()) else f"{about} (default: {default})"
    kind: Any = str | None
    metavar: str | None = "N" if hint in (int, int | None, float) else "TEXT"
    if hint is bool:
        kind, metavar, flag = bool | None, None, f"{flag}/{flag_of(f'no_{name}')}"
    elif get_origin(hint) is tuple:
        kind = list[str] | None
    option = typer.Option(flag, help=about, metavar=metavar, rich_help_panel=panel)
    return _parameter(name, Annotated[kind, option], None)


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


_MODEL = _parameter(
    "model",
    Annotated[str, typer.Argument(help="A GGUF file, a folder, or a Hugging Face id.")],
    inspect.Parameter.empty,
)
_CONFIG_FILE = _parameter(
    "config_file",
    Annotated[
        Path | None,
        typer.Option(
            "--config", help="YAML file of settings; flags and environment take precedence."
        ),
    ],
    None,
)
