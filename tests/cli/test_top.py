"""`headway top`: what it shows at any size, what it never passes on, and how it ends."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
import unicodedata
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from rich.console import Console

from benchmarks.support.servers import free_port
from headway.cli.top.client import DashboardClient, TopError
from headway.cli.top.follow import TopState
from headway.cli.top.messages import HistoryFrame, NowFrame, SlowRequests
from headway.cli.top.screen import print_lines
from headway.cli.top.text import clean, count, duration, fit
from headway.cli.top.view import Window, lines_of
from tests.cli.test_cli import headway
from tests.conftest import ROOT

NUM = 120
HOSTILE = (
    "\x1b[31mred", "\x1b]0;title\x07", "\x1b]52;c;aGk=\x1b\\", "\x9b2J", "a\nb\r\tc",
    "\x00\x08\x7f",
    "\u202egnp.exe", "\u2066x\u2069", "[red]bold[/red]", "[link=http://x]y[/link]", ":smile:",
    "e" + "\u0301" * 40, "\u200b\u00ad", "\ud83d\ude00" * 2, "\u65e5\u672c\u8a9e" * 20,
    "\u2028x", "",
)  # fmt: skip
ADDRESS = "127.0.0.1:8001"


def column(*last: float) -> list[float]:
    return [0] * (NUM - len(last)) + list(last)


def now_frame(names: tuple[str, ...] = ("search", "chat", "nightly"), **changes: Any) -> dict:
    return {
        "type": "now", "at": 1_800_000_000.0, "status": "ready", "num_running": 12,
        "num_waiting": 345, "tokens_per_s": 431.2, "step_s": 0.0123, "num_blocks": 2000,
        "num_blocks_used": 812, "tenants": [[name, 4, 115, 270] for name in names],
        "others": [3, 4],
    } | changes  # fmt: skip


def history_frame(names: tuple[str, ...] = ("search", "chat")) -> dict:
    causes = ("kv_blocks", "tenant_share", "token_budget", "executor_busy", "tier_order", "router")
    preemption = {"at": 1_800_000_000.0, "cause": "kv_blocks", "tenant": (*names, None)[0],
                  "by_tenant": (None, *names)[-1], "id": "a", "by": "b", "method": "keep",
                  "num_tokens_lost": 3}  # fmt: skip
    return {
        "type": "history", "start": 0.0, "interval_s": 5.0, "last_s": 2.5,
        "causes": [[name, column(*[100.0 / n] * 30)] for n, name in enumerate(causes, 1)],
        "open_waits": column(12.5), "num_steps": column(400, 200), "step_ms": column(12.5, 11.5),
        "max_step_ms": column(40.0, 33.1), "predicted_ms": column(12.0, 12.0),
        "model_error": column(0.03, 0.03), "num_finished": column(20, 10),
        "num_first_tokens": column(10, 30), "ttft_ms": column(400.0, 440.0),
        "num_met": column(97, 1), "num_missed": column(1, 1), "num_restarts": column(1, 0),
        "refusals": [["quota_exceeded", column(3)], ["deadline_not_feasible", column(12)]],
        "preemptions": [["kv_blocks", column(2)]],
        "blocks": {"tenants": list(names), "owned": [column(1)] * len(names),
                   "kept": column(17), "cached": column(301), "used": column(812), "total": 2000},
        "last_preemptions": [preemption], "last_restarts": [],
    }  # fmt: skip


def live_requests(names: tuple[str, ...] = ("search",), num: int = 50) -> dict:
    return {
        "live": [
            {"id": f"chatcmpl-{n:032x}", "tenant": (names or ("",))[n % max(1, len(names))],
             "state": "waiting",
             "age_s": 12.25 + n, "wait_s": 3.5, "num_prompt_tokens": 1200, "num_output_tokens": 99}
            for n in range(num)
        ],
        "num_live": 357, "ended": [], "num_ended": 0,
    }  # fmt: skip


def state_of(names: tuple[str, ...] = ("search", "chat", "nightly"), **changes: Any) -> TopState:
    return TopState(
        msgspec.convert(now_frame(names, **changes), NowFrame),
        msgspec.convert(history_frame(names), HistoryFrame),
        msgspec.convert(live_requests(names), SlowRequests),
    )


def text_of(state: TopState, window: Window) -> list[str]:
    return [line.plain.rstrip() for line in lines_of(state, ADDRESS, window)]


# -------------------------------------------------------------------------- the view


def test_everything_is_there_in_80_by_24() -> None:
    lines = text_of(state_of(), Window(80, 24))
    assert len(lines) == 24
    shown = "\n".join(lines)
    for part in (
        f"headway top  {ADDRESS}  ready", "running 12  waiting 345  431 tokens/s", "TTFT 0.43 s",
        "KV 41 %", "Waited for", "KV blocks         1,200 s ████  3,000 s", "the running step",
        "all waits", "search", "chat", "nightly", "all others",
        "mean 12 ms, model 12 ms, error 3 %",
        "longest 40 ms, 10.4 steps/s", "in use 812 of 2,000 (41 %)",
        "kept of preempted 17, cached 301", "goodput", "98.0 %", "burn rate", "2.0",
        "engine restarts", "deadline_not_feasible", "quota_exceeded",
        "preempted: KV blocks", "search for nightly",
        "Slowest of 357 live", f"chatcmpl-{0:032x}", "12.2 s", "1,200+99", "q quits",
    ):  # fmt: skip
        assert part in shown, (part, shown)
    assert "…" not in shown  # nothing is cut


def test_waits_add_up_to_their_last_row() -> None:
    lines = text_of(state_of(), Window(120, None))
    whole = next(line for line in lines if line.startswith("all waits"))
    # 2.45 * 100 s * 12 intervals and the open wait; then over all of the history.
    assert "2,952 s" in whole and "7,362 s" in whole
    few = text_of(state_of(), Window(80, 24))
    assert "2,952 s" in next(line for line in few if line.startswith("all waits"))
    assert any(line.startswith("others ") for line in few)


def test_every_line_fits_at_every_size() -> None:
    names = ("search", *HOSTILE)
    for state in (state_of(names), state_of(()), TopState(problem="x" * 300)):
        for width in (1, 39, 40, 71, 72, 80, 89, 90, 133):
            for height in (1, 2, 10, 23, 24, 32, 60, None):
                lines = lines_of(state, ADDRESS, Window(width, height))
                assert all(line.cell_len <= width for line in lines), (width, height)
                assert height is None or len(lines) <= height
                assert "\n" not in "".join(line.plain for line in lines)


def test_a_larger_window_shows_more() -> None:
    small, large = (text_of(state_of(), Window(80, height)) for height in (24, 60))
    assert len(large) == 60
    few, many = (sum("chatcmpl-" in line for line in lines) for lines in (small, large))
    assert (few, many) == (5, 34)
    assert any("waited" in line for line in text_of(state_of(), Window(90, 24)))


def test_without_requests_it_says_so() -> None:
    idle = state_of((), tenants=[], others=[0, 0])
    idle = TopState(idle.now, idle.history, SlowRequests([], 0))
    assert "\n".join(text_of(idle, Window(80, 24))).count("no requests") == 2


def test_only_ascii_where_nothing_else_can_be_shown() -> None:
    lines = text_of(state_of(("日本語", "chat")), Window(80, 24, is_ascii=True))
    assert all(line.isascii() for line in lines)
    assert any("####" in line for line in lines)


# ---------------------------------------------------------------------- hostile text


def rendered(state: TopState, is_terminal: bool) -> str:
    """What a terminal would get."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=is_terminal, width=80, markup=False, emoji=False)
    for line in lines_of(state, ADDRESS, Window(80, None)):
        console.print(line)
    return file.getvalue()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_no_name_of_the_server_is_a_command_of_the_terminal(is_terminal: bool) -> None:
    history = msgspec.convert(history_frame(HOSTILE), HistoryFrame)
    history = msgspec.structs.replace(
        history,
        causes=[(name, column(1)) for name in HOSTILE],
        refusals=[(name, column(1)) for name in HOSTILE],
        preemptions=[(name, column(1)) for name in HOSTILE],
    )
    requests = live_requests(HOSTILE)
    for one, name in zip(requests["live"], HOSTILE, strict=False):
        one["id"] = one["state"] = name
    for status in HOSTILE[:3]:
        now = msgspec.convert(now_frame(HOSTILE, status=status), NowFrame)
        state = TopState(now, history, msgspec.convert(requests, SlowRequests), problem=status)
        shown = re.sub(r"\x1b\[[\d;]*m", "", rendered(state, is_terminal))
        assert {c for c in shown if unicodedata.category(c)[0] == "C"} <= {"\n"}
        assert not is_terminal or "[red]bold[/red]" in shown  # text, not markup
        assert "\u2028" not in shown


def test_clean_text_is_one_visible_line() -> None:
    assert clean("\x1b[31mred") == "\ufffd[31mred"
    assert clean("a\nb\u202ec") == "a\ufffdb\ufffdc"
    assert clean("e" + "\u0301" * 40) == "é\u0301\u0301"
    assert clean("a\u00a0b\u3000") == "a b "
    assert fit("日本語", 5) == "日本…" and fit("日本語", 4) == "日…" and fit("abc", 0) == ""
    assert len(clean("x" * 10_000)) <= 512


def test_numbers_have_at_most_eight_characters() -> None:
    for value in (0.0, 0.00123, 0.0994, 0.0996, 9.94, 9.96, 99.4, 99.6, 9999, 10_001, 1e6, 1e8):
        assert len(duration(value)) <= 8
        assert len(count(1000 * value)) <= 8
    assert (duration(None), duration(0.0123), duration(1.234)) == ("-", "12 ms", "1.23 s")


# ------------------------------------------------------------- servers over a socket


class Answers(BaseHTTPRequestHandler):
    """A server that sends what the test says."""

    frames: tuple[dict, ...] = ()
    requests: dict = live_requests()
    status = 200
    over = threading.Event()

    def do_GET(self) -> None:
        is_stream = self.path.endswith("/stream")
        self.send_response(self.status)
        self.end_headers()
        if self.status != 200:
            error = {"error": {"message": "\x1b[31mno\x1b]0;x\x07"}}
            self.wfile.write(json.dumps(error).encode())
        elif not is_stream:
            self.wfile.write(json.dumps(self.requests).encode())
        else:
            for frame in self.frames:
                self.wfile.write(f"event: x\ndata: {json.dumps(frame)}\n\n".encode())
                self.wfile.flush()
            self.over.wait(30)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def answering(port: int = 0, **attributes: Any) -> Iterator[str]:
    kind = type("Given", (Answers,), {"over": threading.Event(), **attributes})
    server = ThreadingHTTPServer(("127.0.0.1", port), kind)
    server.daemon_threads = True
    serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    serving.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        kind.over.set()
        server.shutdown()
        server.server_close()
        serving.join()


def test_one_frame_of_a_real_server_for_scripts(launch, tmp_path: Path) -> None:
    server = launch(server={"api_key": ["k"]}, scheduling_policy="fair").wait_ready("k")
    body = {"prompt": "x", "max_tokens": 3}
    bearer = {"Authorization": "Bearer k"}
    assert httpx.post(f"{server.url}/v1/completions", json=body, headers=bearer).status_code == 200
    shown = headway("top", "--url", server.admin_url, "--api-key", "k")  # no terminal: once
    assert shown.returncode == 0, shown.stderr
    assert "\x1b" not in shown.stdout and max(map(len, shown.stdout.splitlines())) <= 80
    assert "ready" in shown.stdout and "Slowest of 0 live" in shown.stdout
    assert re.search(r"finished +1 +1\b", shown.stdout), shown.stdout
    refused = headway("top", "--once", "--url", server.admin_url)
    assert refused.returncode == 2 and "API key" in refused.stderr
    assert not refused.stdout and "Traceback" not in refused.stderr
    with pytest.raises(TopError, match="admin listener"):
        DashboardClient(server.url, "k").requests()


def test_mistakes_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for url, hint in (
        ("ftp://x", "http://"),
        ("http://127.0.0.1:x", "port"),
        ("http://", "host"),
        (f"http://127.0.0.1:{free_port()}", "admin listener"),
    ):
        with pytest.raises(Exception, match=hint):
            next(iter(DashboardClient(url, None).frames()))
    with answering(status=403) as url, pytest.raises(TopError) as caught:
        DashboardClient(url, None).requests()
    assert caught.value.is_final and "\x1b" not in str(caught.value)
    for odd in ({"type": "other"}, {"type": "now"}, now_frame(tenants=[["x", 1]])):
        with answering(frames=(odd,)) as url, pytest.raises(TopError, match="another release"):
            list(DashboardClient(url, None).frames())


def test_a_closed_pipe_is_no_error() -> None:
    frames = (history_frame(), now_frame(), now_frame())
    with answering(frames=frames) as url:
        command = [sys.executable, "-m", "headway", "top", "--once", "--url", url]
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run(
            command,
            check=False,
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            timeout=60,
        )
        os.close(writer)
    assert done.returncode in (1, 141) and done.stderr == ""


def test_lines_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    print_lines(Console(width=10, markup=False), lines_of(state_of(), ADDRESS, Window(80, None)))
    assert capsys.readouterr().out.splitlines()[0].startswith(f"headway top  {ADDRESS}")


# ------------------------------------------------------------------------ a terminal


class Terminal:
    """The command on a terminal of its own."""

    def __init__(self, *arguments: str, size: tuple[int, int] = (24, 80)) -> None:
        self._master, slave = pty.openpty()
        self._slave = slave
        self.resize(*size)
        self.before = termios.tcgetattr(slave)
        command = [sys.executable, "-m", "headway", "top", *arguments]
        environment = {**os.environ, "TERM": "xterm-256color"}
        for name in ("COLUMNS", "LINES"):
            environment.pop(name, None)
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, cwd=ROOT, env=environment,
            start_new_session=True,
        )  # fmt: skip
        signal.signal(signal.SIGINT, handler)
        self.output = ""

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def wait_for(self, text: str, timeout_s: float = 20.0) -> str:
        """Read until a text comes; return what came since the last call."""
        since, deadline = len(self.output), time.monotonic() + timeout_s
        while text not in self.output[since:]:
            left_s = deadline - time.monotonic()
            assert left_s > 0, f"no {text!r} in {self.output[since:]!r}"
            if select.select([self._master], [], [], min(left_s, 0.2))[0]:
                self.output += os.read(self._master, 65536).decode()
        return self.output[since:]

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    @property
    def is_as_before(self) -> bool:
        return termios.tcgetattr(self._slave) == self.before

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._master)
        os.close(self._slave)


@contextmanager
def terminal(*arguments: str) -> Iterator[Terminal]:
    made = Terminal(*arguments)
    try:
        yield made
    finally:
        made.close()


LEFT = "\x1b[?1049l"
"""A terminal leaves its second screen."""


def test_a_terminal_is_drawn_resized_connected_again_and_left_in_order() -> None:
    port, names = free_port(), ("[red]a", "\x1b[31mb")
    with ExitStack() as stack:
        server = stack.enter_context(ExitStack())
        frames = (history_frame(), now_frame(names))
        url = server.enter_context(answering(port, frames=frames))
        screen = stack.enter_context(terminal("--url", url))
        drawn = screen.wait_for("Slowest") + screen.wait_for("q quits")
        assert "\x1b[?1049h" in drawn and "[red]a" in drawn and "\ufffd[31mb" in drawn
        parts = drawn.split("headway top")
        assert max(part.count("chatcmpl-") for part in parts) == 5
        # Each screen begins where the one before it began.
        assert len(parts) > 2
        assert all(re.search(r"\x1b\[H(\x1b\[[\d;?]*[a-z])*$", part) for part in parts[:-1])
        screen.resize(40, 100)
        screen.process.send_signal(signal.SIGWINCH)
        screen.wait_for("waited")  # a column of wider windows
        server.close()
        screen.wait_for("not connected")
        with answering(port, frames=(history_frame(), now_frame(("after",)))):
            screen.wait_for("after")
            screen.type("xq")
            assert screen.process.wait(20) == 0
            assert LEFT in screen.wait_for("\x1b[?25h") and screen.is_as_before


def test_a_server_that_was_never_there_ends_it() -> None:
    with terminal("--url", f"http://127.0.0.1:{free_port()}") as screen:
        assert screen.process.wait(20) == 2
        assert LEFT in screen.wait_for("cannot be asked") and screen.is_as_before


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_the_terminal_in_order(number: int, code: int) -> None:
    frames = (history_frame(), now_frame())
    with answering(frames=frames) as url, terminal("--url", url) as screen:
        screen.wait_for("q quits")
        screen.process.send_signal(number)
        assert screen.process.wait(20) == code
        left = screen.wait_for("\x1b[?25h")
        assert LEFT in left and "Traceback" not in left and screen.is_as_before
