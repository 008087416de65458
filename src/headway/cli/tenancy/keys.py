"""`headway keys`: create and hash API keys, create cluster keys."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from headway.errors import ConfigError

app = typer.Typer(
    no_args_is_help=True, help="Create keys for --api-keys-file and --cluster-key-file."
)


@app.callback()
def _root() -> None:
    pass


@app.command("new")
def new(
    name: Annotated[str, typer.Argument(help="Name of the tenant of the key.")],
    file: Annotated[
        Path | None, typer.Option("--file", help="Add the key's hash to this file.")
    ] = None,
) -> None:
    """Print a new key, once.

    Only its hash is stored.
    """
    from headway.tenancy.keys import make_key
    from headway.tenancy.keys_file import append_key, key_for

    secret = make_key()
    key = key_for(secret, name)
    if file is not None:
        append_key(file, key)
        typer.echo(f"added {name} to {file}; the key itself is not stored:", err=True)
    else:
        typer.echo(f"the line for the keys file: {key.line}", err=True)
    typer.echo(secret)


@app.command("hash")
def hash_key(
    name: Annotated[
        str | None, typer.Argument(help="Name of the tenant; default: from the hash of the key.")
    ] = None,
) -> None:
    """Read a key from standard input and print its line for the keys file."""
    from headway.tenancy.keys_file import key_for

    secret = sys.stdin.readline().strip()
    if not secret:
        raise ConfigError("no key on standard input; pipe one in: headway keys hash NAME < FILE")
    typer.echo(key_for(secret, name).line)


@app.command("cluster")
def cluster(
    file: Annotated[Path, typer.Argument(help="File to make; it must not exist.")],
) -> None:
    """Write a new cluster key to a file that only its owner can read.

    Copy the file to every machine that runs `headway engine` or `headway frontend`.
    """
    from headway.fleet.network.cluster_key import write_cluster_key

    write_cluster_key(file)
    typer.echo(f"wrote {file}; use it with --cluster-key-file", err=True)
