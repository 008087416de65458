"""A private PostgreSQL server in a folder, reached by a socket."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import time
from pathlib import Path
from urllib.parse import quote

import psycopg

ACCOUNTS = ("postgres", "nobody")


def find_binaries() -> Path | None:
    """Return the folder of initdb and postgres, of the newest version installed."""
    on_path = shutil.which("initdb")
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=_version)
    found = [Path(on_path).resolve()] if on_path else []
    for initdb in [*debian[::-1], *found]:
        if (initdb.parent / "postgres").exists():
            return initdb.parent
    return None


def _version(path: Path) -> int:
    name = path.parent.parent.name
    return int(name) if name.isdecimal() else 0


class PostgresServer:
    """PostgreSQL server that can be stopped or crashed, and started with its data."""

    def __init__(self, folder: Path, binaries: Path) -> None:
        self._folder = folder
        self._binaries = binaries
        self._data = folder / "data"
        self._process: subprocess.Popen[bytes] | None = None
        # PostgreSQL refuses to run as root.
        self._account = next(filter(_exists, ACCOUNTS)) if os.getuid() == 0 else None
        if self._account is not None:
            shutil.chown(folder, self._account)
        self._run("initdb", "-D", str(self._data), "-A", "trust", "-U", "headway", "-N")

    @property
    def url(self) -> str:
        return f"postgresql://headway@/postgres?host={quote(str(self._folder), safe='')}"

    def start(self) -> None:
        command = [str(self._binaries / "postgres"), "-D", str(self._data)]
        command += ["-c", "listen_addresses=", "-c", f"unix_socket_directories={self._folder}"]
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, user=self._account, cwd=self._folder
            )
        deadline = time.monotonic() + 120
        while True:
            try:
                psycopg.connect(self.url).close()
                return
            except psycopg.Error:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise
                time.sleep(0.05)

    def stop(self, number: int = signal.SIGINT) -> None:
        """Stop the server: SIGINT in order, SIGQUIT as by a crash."""
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(60)
            self._process = None

    def _run(self, name: str, *arguments: str) -> None:
        subprocess.run(
            [str(self._binaries / name), *arguments],
            check=True,
            capture_output=True,
            user=self._account,
            cwd=self._folder,
        )


def _exists(account: str) -> bool:
    try:
        pwd.getpwnam(account)
    except KeyError:
        return False
    return True
