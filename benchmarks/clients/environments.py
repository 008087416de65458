"""Makes one virtual environment per client; a second call with the same packages does nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks.clients.catalog import Client
from benchmarks.support.commands import call

INSTALL_TIMEOUT_S = 1800


def prepare(client: Client, cache: Path) -> dict[str, str]:
    """Install the packages of a client; return the versions of all that is installed."""
    home = cache / client.name
    record = home / "installed.json"
    recipe = {"pins": list(client.pins), "uninstalls": list(client.uninstalls)}
    if record.exists():
        content = json.loads(record.read_text())
        if recipe.items() <= content.items():
            return content["packages"]
    call([sys.executable, "-m", "venv", "--clear", str(home)], INSTALL_TIMEOUT_S)
    pip = [str(python_of(client, cache)), "-m", "pip", "--disable-pip-version-check"]
    call([*pip, "install", "--prefer-binary", *client.pins], INSTALL_TIMEOUT_S)
    if client.uninstalls:
        call([*pip, "uninstall", "--yes", *client.uninstalls], INSTALL_TIMEOUT_S)
    installed = json.loads(call([*pip, "list", "--format", "json"], INSTALL_TIMEOUT_S))
    packages = {item["name"]: item["version"] for item in installed}
    record.write_text(json.dumps({**recipe, "packages": packages}, indent=2) + "\n")
    return packages


def python_of(client: Client, cache: Path) -> Path:
    return cache / client.name / "bin" / "python"
