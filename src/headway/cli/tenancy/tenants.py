"""`headway tenants`: edit tenants, their keys and quotas."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.tenancy import Tenant
    from headway.tenancy.edit import EditResult

app = typer.Typer(no_args_is_help=True, help="Edit the file for --tenants-file.")

Name = Annotated[str, typer.Argument(help="The tenant's name.")]
File = Annotated[Path, typer.Option("--file", help="The tenants file.")]
DEFAULT_FILE = Path("tenants.yaml")


@app.callback()
def _root() -> None:
    pass


@app.command("add")
def add(
    name: Name,
    file: File = DEFAULT_FILE,
    tier: Annotated[
        str | None, typer.Option(help="Tier of the tenant; must be in the file.")
    ] = None,
    weight: Annotated[
        float | None, typer.Option(help="Weight of the tenant in its fair share (default: 1).")
    ] = None,
    quota: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=N",
            help="requests_per_minute, tokens_per_minute, concurrent_requests or kv_share. "
            "May be given more than once.",
        ),
    ] = None,
    admin: Annotated[
        bool, typer.Option("--admin", help="Admin: may see the accounts of all requests.")
    ] = False,
) -> None:
    """Add a tenant and print its key, once.

    The file is created if it does not exist.
    """
    from headway.tenancy.edit import add_tenant

    given: dict[str, Any] = {
        "tier": tier,
        "weight": weight,
        "quotas": _quotas(quota or []) or None,
        "admin": admin or None,
    }
    entries = {entry: value for entry, value in given.items() if value is not None}
    result = add_tenant(file, name, entries)
    _print_result(result, f"added {name} to {file}")


@app.command("list")
def list_tenants(file: File = DEFAULT_FILE) -> None:
    """Print the tenants.

    A key is shown by the start of its hash.
    """
    from headway.tenancy.roster import read_roster

    rows = [("TENANT", "TIER", "WEIGHT", "QUOTAS", "KEYS", "")]
    rows += [_row(tenant) for tenant in read_roster(file).tenants.values()]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        typer.echo("  ".join(cells).rstrip())


@app.command("rotate")
def rotate(
    name: Name,
    file: File = DEFAULT_FILE,
    keep_old: Annotated[
        bool, typer.Option("--keep-old", help="Keep the other keys of the tenant valid.")
    ] = False,
) -> None:
    """Print a new key for a tenant, once.

    Its other keys stop working.
    """
    from headway.tenancy.edit import rotate_key

    result = rotate_key(file, name, keep_old)
    others = "its other keys stay valid" if keep_old else "its other keys are gone"
    _print_result(result, f"{name} has a new key in {file}; {others}")


@app.command("disable")
def disable(name: Name, file: File = DEFAULT_FILE) -> None:
    """Refuse new requests of a tenant.

    Running requests finish.
    """
    from headway.tenancy.edit import set_disabled

    _print_result(set_disabled(file, name, True), f"{name} is disabled")


@app.command("enable")
def enable(name: Name, file: File = DEFAULT_FILE) -> None:
    """Accept requests of a disabled tenant again."""
    from headway.tenancy.edit import set_disabled

    _print_result(set_disabled(file, name, False), f"{name} is enabled")


def _print_result(result: EditResult, what: str) -> None:
    typer.echo(what, err=True)
    if result.has_lost_comments:
        typer.echo(f"the comments in {result.path} were not kept", err=True)
    if result.key:
        typer.echo("the key is not stored; this is the only time it is shown:", err=True)
        typer.echo(result.key)


def _quotas(given: list[str]) -> dict[str, int | float]:
    from headway.tenancy.roster import QUOTA_ENTRIES

    quotas: dict[str, int | float] = {}
    for item in given:
        name, _, text = item.partition("=")
        if name not in QUOTA_ENTRIES:
            names = ", ".join(QUOTA_ENTRIES)
            raise ConfigError(f"--quota takes NAME=N, NAME one of {names}; got {item!r}")
        try:
            quotas[name] = float(text) if name == "kv_share" else int(text)
        except ValueError as error:
            raise ConfigError(f"--quota {item!r}: {text!r} is not a number") from error
    return quotas


def _row(tenant: Tenant) -> tuple[str, ...]:
    quotas = tenant.quotas
    limits = {
        "req/min": quotas.requests_per_minute,
        "tok/min": quotas.tokens_per_minute,
        "at once": quotas.concurrent_requests,
        "of the KV cache": None if quotas.kv_share == 1.0 else f"{quotas.kv_share:.0%}",
    }
    state = ["disabled"] * tenant.is_disabled + ["admin"] * tenant.is_admin
    return (
        tenant.name,
        tenant.tier,
        f"{tenant.weight:g}",
        ", ".join(f"{limit} {unit}" for unit, limit in limits.items() if limit) or "-",
        " ".join(digest.hex()[:8] for digest in tenant.key_digests) or "-",
        ", ".join(state),
    )
