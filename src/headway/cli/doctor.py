"""`headway doctor`: hardware of this machine, and what "auto" resolves to."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headway._version import __version__
from headway.build import model_facts
from headway.config import load_config
from headway.errors import HeadwayError
from headway.executors.hardware import probe_hardware
from headway.executors.load import has_cuda
from headway.resolve import GIB, Hardware, resolve


def doctor(
    model: Annotated[
        str | None, typer.Argument(help="Also show the resolved settings for this model.")
    ] = None,
) -> None:
    """Show the hardware: cores, instruction sets, torch, memory, KV cache."""
    hardware = probe_hardware(has_cuda())
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    for name, value in _rows(hardware):
        table.add_row(name, escape(value))
    console = Console()
    console.print(table)
    if model is None:
        console.print("\nName a model to see what it would get: headway doctor MODEL")
        return
    try:
        config = load_config({"model": model})
        facts = model_facts(config)
        resolved = resolve(config, facts, hardware)
    except HeadwayError as error:
        console.print(f"\n{model}: [red]{error}[/red]")
        raise typer.Exit(1) from error
    console.print(f"\n[bold]{model}[/bold]")
    console.print(f"  {facts.num_parameters / 1e6:.0f} M parameters")
    console.print(f"  max_model_len {resolved.max_model_len}")
    for reason in resolved.reasons:
        console.print(f"  {reason}", soft_wrap=True)


def _rows(hardware: Hardware) -> list[tuple[str, str]]:
    half = hardware.available_bytes / 2 / GIB
    return [
        ("headway", __version__),
        ("python", platform.python_version()),
        ("kernels", hardware.kernels or "not built; install a C++ compiler and reinstall"),
        ("torch", _version_of("torch") or "not installed; pip install 'headway[torch]'"),
        ("cores", str(hardware.num_cores)),
        ("instructions", " ".join(hardware.isa) or "none known"),
        ("accelerator", "CUDA" if hardware.has_cuda else "none; the CPU computes"),
        ("free memory", f"{hardware.available_bytes / GIB:.1f} GiB"),
        (
            "KV cache auto",
            f"at most {half:.1f} GiB: half of the free memory, less half of the weights; "
            "never more than max_num_seqs full-length requests need",
        ),
    ]


def _version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
