"""Times of GET /ping, measured in a process of its own: a busy client would measure itself.

    python -m benchmarks.support.pings URL

asks without a pause until its standard input ends, and prints the times in seconds as JSON.
"""

from __future__ import annotations

import http.client
import json
import select
import subprocess
import sys
import time
from urllib.parse import urlsplit

PAUSE_S = 0.002
TIMEOUT_S = 60.0


class Pinger:
    """A process that asks a server for /ping until it is ended."""

    def __init__(self, url: str) -> None:
        command = [sys.executable, "-m", "benchmarks.support.pings", url]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def end(self) -> list[float]:
        """Return the times so far, and end the process."""
        output, _ = self._process.communicate(timeout=TIMEOUT_S)
        return json.loads(output)


def main() -> None:
    """Ask the server of the command line."""
    address = urlsplit(sys.argv[1])
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=TIMEOUT_S)
    times: list[float] = []
    while not select.select([sys.stdin], [], [], PAUSE_S)[0]:
        sent_at = time.perf_counter()
        connection.request("GET", "/ping")
        connection.getresponse().read()
        times.append(time.perf_counter() - sent_at)
    print(json.dumps(times))


if __name__ == "__main__":
    main()
