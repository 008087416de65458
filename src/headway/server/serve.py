"""Runs an app and its engine until a signal or a failure ends them.

Ends in order: no new connections, answers in progress get a few seconds, then the engine process.
Nothing is left behind whichever way it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
from collections.abc import AsyncGenerator, Coroutine, Generator
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from headway.clock import Clock, SystemClock
from headway.config import ServerConfig
from headway.engine.async_engine import AsyncEngine
from headway.engine.messages import all_events
from headway.errors import ConfigError, HeadwayError
from headway.observe.stats_log import StatsLog
from headway.server.limits import BoundedHttpProtocol

logger = logging.getLogger(__name__)

DRAIN_S = 5.0
"""How long answers in progress may take after the first signal."""
LOOPBACK = ("127.0.0.1", "::1", "localhost")
KEEP_ALIVE_S = 5
BACKLOG = 2048
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def listen(config: ServerConfig) -> socket.socket:
    """Take the port, before anything slow is begun: if it is in use, that is said at once."""
    if not config.api_key and config.host not in LOOPBACK:
        logger.warning("anyone who can reach %s may use this server: no --api-key", config.host)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"cannot listen on {config.host}: {error.strerror or error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # Another process could bind as well until somebody listens.
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {config.port} on {config.host} is in use; choose another with --port"
            ) from error
        raise ConfigError(
            f"cannot listen on port {config.port} of {config.host}: {error.strerror}"
        ) from error
    listener.setblocking(False)
    return listener


def run(main: Coroutine[Any, Any, int]) -> int:
    """Run `serve` in a new event loop, the fast kind where there is one."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        new_event_loop = None
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main)


async def serve(
    engine: AsyncEngine,
    app: FastAPI,
    config: ServerConfig,
    listener: socket.socket | None = None,
) -> int:
    """Load, serve, clean up; the process's exit code.

    `listener` is what `listen` returned, if the caller took the port before it made the engine.
    """
    try:
        listener = listener or listen(config)
        return await _Serving(engine, app, listener).run(config.log_interval_s)
    finally:
        await engine.close()


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Signals are handled here in `_Serving`; the base class would raise them again."""
        yield


class _Serving:
    def __init__(self, engine: AsyncEngine, app: FastAPI, listener: socket.socket) -> None:
        self._engine = engine
        self._listener = listener
        self._url = _url(listener)
        self._server = _Server(_uvicorn_config(app))
        self._stop = asyncio.Event()
        self._forced = asyncio.Event()
        self._num_signals = 0
        self._exit_code = 0

    async def run(self, log_interval_s: float) -> int:
        async with _signal_handlers(self._on_signal):
            http = asyncio.create_task(self._server.serve(sockets=[self._listener]))
            stats = asyncio.create_task(_log_stats(self._engine, SystemClock(), log_interval_s))
            work = asyncio.create_task(self._load_and_watch())
            stopping = asyncio.create_task(self._stop.wait())
            try:
                await asyncio.wait((http, work, stopping), return_when=asyncio.FIRST_COMPLETED)
                work.cancel()  # it must not take the end that follows for a failure
                await self._drain(http)
            finally:
                for task in (http, stats, work, stopping):
                    task.cancel()
                await asyncio.gather(http, stats, work, stopping, return_exceptions=True)
            # Here, not in the caller, because a second signal must still be able to cut it short.
            await self._close_engine()
        return self._exit_code

    async def _load_and_watch(self) -> None:
        """Returns when the engine has failed, which ends the server too: a supervisor that sees
        the exit can start a new one, and nobody is kept waiting by an empty shell."""
        try:
            await self._engine.start(_log_progress)
            for note in self._engine.info.notes:
                logger.info("%s", note)
            logger.info("ready on %s", self._url)
            error: HeadwayError = await self._engine.wait_failed()
        except HeadwayError as failure:
            error = failure
        self._exit_code = 1
        logger.error("the engine failed: %s", error)

    async def _drain(self, http: asyncio.Task[None]) -> None:
        self._server.should_exit = True
        forced = asyncio.create_task(self._forced.wait())
        either = (http, forced)
        await asyncio.wait(either, timeout=DRAIN_S, return_when=asyncio.FIRST_COMPLETED)
        if not http.done():
            # Ends every stream with an error event, so that its answer is complete.
            await self._close_engine()
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        forced.cancel()
        if http.done():
            http.result()

    async def _close_engine(self) -> None:
        if not self._engine.is_ready:
            self._engine.kill()  # one that is loading, or has failed, does not hear requests
        await self._engine.close()

    def _on_signal(self, number: int) -> None:
        self._num_signals += 1
        self._stop.set()
        if self._num_signals == 1:
            logger.info("stopping; once more to stop at once")
            return
        self._exit_code = 128 + number
        self._server.force_exit = True
        self._forced.set()
        self._engine.kill()


@contextlib.asynccontextmanager
async def _signal_handlers(handler: Any) -> AsyncGenerator[None, None]:
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, handler, number)
    try:
        yield
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)


async def _log_stats(engine: AsyncEngine, clock: Clock, interval_s: float) -> None:
    stats = StatsLog(clock.now())
    engine.subscribe(lambda batch: stats.consume(all_events(batch)))
    while True:
        await asyncio.sleep(interval_s)
        line = stats.line(clock.now())
        if line is not None:
            logger.info("%s", line)


def _log_progress(num_done: int, num_total: int) -> None:
    """A line per quarter: a log file is no place for a bar."""
    if num_done * 4 // num_total > (num_done - 1) * 4 // num_total:
        logger.info("loaded %d of %d tensors", num_done, num_total)


def _uvicorn_config(app: FastAPI) -> uvicorn.Config:
    # Its own messages repeat ours; what it warns of is worth seeing.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    return uvicorn.Config(
        _without_cancellation(app),
        http=BoundedHttpProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        # Ours comes first; this one ends clients that do not even read the end of their stream.
        timeout_graceful_shutdown=int(DRAIN_S) + 2,
    )


def _without_cancellation(app: ASGIApp) -> ASGIApp:
    """The server cancels an answer only when it is itself about to end: no error to report."""

    async def quiet(scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await app(scope, receive, send)

    return quiet


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
