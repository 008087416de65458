"""The command `headway top`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from headway.cli.remote import Key
from headway.cli.top.client import DashboardClient
from headway.cli.top.follow import Follower, read_once
from headway.cli.top.screen import TopScreen, can_draw, make_console, print_lines, window_of
from headway.cli.top.view import Window, lines_of

DEFAULT_URL = "http://127.0.0.1:8001"


def top(
    url: Annotated[
        str, typer.Option("--url", help="URL of the admin listener, where the metrics are.")
    ] = DEFAULT_URL,
    api_key: Key = None,
    once: Annotated[
        bool, typer.Option("--once", help="Print the state once; the default without a terminal.")
    ] = False,
) -> None:
    """Show live what requests wait for and what the engines do.

    The first page of the dashboard in a terminal; `q` quits. With keys, the key must be that of an
    administrator. From another machine: `ssh -t HOST headway top`.
    """
    client, console = DashboardClient(url, api_key), make_console()
    if once or not can_draw(console):
        state = read_once(client)
        # Without the footer, which is for the screen.
        print_lines(console, lines_of(state, client.address, window_of(console, False))[:-1])
        return
    screen = TopScreen(console)
    follower = Follower(client, screen.wake)

    def lines(window: Window) -> list[Text]:
        if follower.failure is not None:
            raise follower.failure
        return lines_of(follower.state, client.address, window)

    follower.start()
    screen.run(lines)
