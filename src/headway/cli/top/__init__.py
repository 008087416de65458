"""`headway top`: the first page of the dashboard in a terminal.

Shows what the stream of the dashboard sends; knows nothing else of the server. In reading order:

    messages.py  what the server sends, checked when it is read
    client.py    asks the server: the stream, and the slowest requests
    follow.py    a thread that keeps the last frames, and connects again
    text.py      names and numbers as text that a terminal cannot take for commands
    figures.py   sums over the history
    sections.py  the sections of a screen
    view.py      the lines of a screen, for any size of the window
    screen.py    a terminal: draws, reads keys, follows its size
    command.py   the command
"""

from headway.cli.top.command import top

__all__ = ["top"]
