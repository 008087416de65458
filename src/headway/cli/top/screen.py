"""A terminal: draws lines, reads keys, follows the size of the window, and is left as it was."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType

from rich.console import Console, Group
from rich.control import Control
from rich.text import Text

from headway.cli.top.view import Window

QUIT = frozenset(b"qQ\x04")
"""Keys that end the command; Ctrl-D is one."""
REDRAW_S = 2.0
TERMINATED = 128 + signal.SIGTERM


def make_console() -> Console:
    """Return a console that takes nothing in a text for markup."""
    return Console(markup=False, emoji=False, highlight=False)


def can_draw(console: Console) -> bool:
    """Return whether the console is a terminal whose cursor can be moved."""
    return console.is_terminal and not console.is_dumb_terminal


def window_of(console: Console, has_height: bool = True) -> Window:
    """Return the size of the console now."""
    is_ascii = not console.encoding.lower().startswith("utf")
    return Window(console.width, console.height if has_height else None, is_ascii)


def print_lines(console: Console, lines: list[Text]) -> None:
    """Print lines as they are; raise BrokenPipeError if the reader is gone."""
    with console.capture() as captured:
        for line in lines:
            line.rstrip()
            console.print(line, no_wrap=True, overflow="ignore", crop=False)
    # Not through the console, which would end the process for a reader that is gone.
    sys.stdout.write(captured.get())
    sys.stdout.flush()


class TopScreen:
    """Draws a screen again and again until a key says to quit."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)

    def wake(self) -> None:
        """Have the screen drawn; may be called by another thread or by a signal handler."""
        with suppress(BlockingIOError):  # it is woken already
            os.write(self._writer, b".")

    def run(self, lines: Callable[[Window], list[Text]]) -> None:
        """Draw until somebody quits; `lines` may raise to end it."""
        with ExitStack() as stack:
            keys = stack.enter_context(_keys())
            stack.enter_context(_handlers(self.wake))
            screen = stack.enter_context(self._console.screen(hide_cursor=True))
            watched = [self._reader, *keys]
            while True:
                shown = Group(*lines(window_of(self._console)))
                with self._console:  # one write
                    self._console.control(Control.home())
                    screen.update(shown)
                ready, _, _ = select.select(watched, [], [], REDRAW_S)
                if self._reader in ready:
                    os.read(self._reader, 4096)
                for key in set(ready) & set(keys):
                    pressed = os.read(key, 64)
                    if QUIT & set(pressed):
                        return
                    if not pressed:  # nobody is at the keyboard any more
                        watched.remove(key)


@contextmanager
def _keys() -> Iterator[list[int]]:
    """Read keys one by one and unseen; yield the descriptor, if there is a keyboard."""
    if not sys.stdin.isatty():
        yield []
        return
    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)
    try:
        tty.setcbreak(number)
        yield [number]
    finally:
        termios.tcsetattr(number, termios.TCSAFLUSH, before)


@contextmanager
def _handlers(on_resize: Callable[[], None]) -> Iterator[None]:
    """Draw again when the window changes; leave the terminal in order when terminated."""

    def resize(_number: int, _frame: FrameType | None) -> None:
        on_resize()

    def terminate(_number: int, _frame: FrameType | None) -> None:
        sys.exit(TERMINATED)

    before = {
        signal.SIGWINCH: signal.signal(signal.SIGWINCH, resize),
        signal.SIGTERM: signal.signal(signal.SIGTERM, terminate),
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
