"""Runs the apps and their engine until a signal.

The listeners answer from the start: while the model is located and loaded, probes are answered, and
all else gets 503. The end has an order: new requests are refused, running requests may finish, then
the connections end, then the engine process. No process and no file is left, whichever way it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Iterable,
)
from dataclasses import dataclass
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headway.clock import SystemClock
from headway.config import notify_address, watchdog_s
from headway.engine.client.async_engine import AsyncEngine
from headway.errors import HeadwayError
from headway.observe.metrics.stats_log import StatsLog
from headway.server.admission import AdmissionController
from headway.server.app import Apps, loading_apps
from headway.server.descriptors import ConnectionShare
from headway.server.http.limits import Timeouts, bounded_protocol
from headway.server.listeners import ListenSockets
from headway.server.service_manager import ServiceManager

logger = logging.getLogger(__name__)

FLUSH_S = 5
"""How long clients have to read the end of their answers after the drain."""
SWEEP_S = 0.25
WATCH_S = 1.0
READY_S = 0.05
GC_THRESHOLDS = (50_000, 20, 100)
GC_INTERVAL_S = 5.0
REPEAT_S = 1.0
"""Pause before a failed background task starts again."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run(main: Coroutine[Any, Any, int]) -> int:
    """Run `serve` in a new event loop, with uvloop if it is installed."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        new_event_loop = None
    collect_rarely()
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main)


def collect_rarely() -> None:
    """Have the garbage collector run rarely, and skip objects that exist already.

    Decoding one large body makes millions of objects. With the default thresholds the collector
    would scan them repeatedly and delay every stream by a second. See `_collect_garbage`.
    """
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    gc.enable()


@dataclass(frozen=True, slots=True)
class ServerParts:
    """The engine, its apps, its admission and its statistics line."""

    engine: AsyncEngine
    apps: Apps
    admission: AdmissionController
    stats: StatsLog
    background: Callable[[], Awaitable[None]] | None = None
    """Runs for as long as the server, and starts again if it fails."""


MakeParts = Callable[[], Awaitable[ServerParts]]
"""Locates and loads the model, and builds the parts; may take long, may raise."""


async def serve(
    make_parts: MakeParts, listeners: ListenSockets, timeouts: Timeouts | None = None
) -> int:
    """Answer probes, load, serve, clean up; return the exit code."""
    serving = _ServerRun(listeners, timeouts or Timeouts())
    try:
        return await serving.run(make_parts)
    finally:
        await serving.close()
        listeners.close()


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Do nothing: `_ServerRun` handles signals, and the base class would raise them again."""
        yield

    async def stop_accepting(self, listener: socket.socket) -> None:
        """Take the connections that wait on a listener, then accept none any more."""
        taken: list[socket.socket] = []
        with contextlib.suppress(OSError):  # none waits, or no descriptor is left
            while True:
                taken.append(listener.accept()[0])
        # Without a pause: a connection that comes now would be reset.
        for server in self.servers:
            server.close()
        loop = asyncio.get_running_loop()
        for connection in taken:
            connection.setblocking(False)
            await loop.connect_accepted_socket(self._make_protocol, connection)

    def _make_protocol(self) -> asyncio.Protocol:
        make: Any = self.config.http_protocol_class
        return make(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )

    async def until_unconnected(self) -> None:
        """Wait until every connection has ended."""
        while self.server_state.connections:
            await asyncio.sleep(READY_S)


class _Front:
    """ASGI app of one listener: passes each request to an app that may be replaced."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.is_leaving = False
        """Whether answers ask the client to use another connection from then on.

        The server never closes a connection between two requests then: the next one may be on its
        way. It ends after an answer that says so, or when it was idle for a while, as always.
        """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # uvicorn cancels an answer only when it is about to end itself: no error to report.
        with contextlib.suppress(asyncio.CancelledError):
            await self.app(scope, receive, _closing(send) if self.is_leaving else send)


def _closing(send: Send) -> Send:
    """Return a `send` that asks the client to close the connection after the answer."""

    async def send_closing(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [*message.get("headers", ()), (b"connection", b"close")]
            message = {**message, "headers": headers}
        await send(message)

    return send_closing


class _ServerRun:
    def __init__(self, listeners: ListenSockets, timeouts: Timeouts) -> None:
        self._parts: ServerParts | None = None
        self._clock = SystemClock()
        self._config = listeners.access.config
        self._listeners = listeners
        self._manager = ServiceManager(notify_address(), watchdog_s())
        self._watch = listeners.access.tenants.watch
        self._reload = asyncio.Event()
        self._stop = asyncio.Event()
        self._forced = asyncio.Event()
        self._num_signals = 0
        self._exit_code = 0
        apps = loading_apps(listeners.access, self._loading_status)
        self._public, self._admin = _Front(apps.public), _Front(apps.admin)
        slow_s, plan = self._config.slow_reader_timeout_s, listeners.plan
        public = _Server(_uvicorn_config(self._public, plan.public, timeouts, slow_s))
        self._servers = {public: listeners.public}
        if listeners.admin is not None:
            admin = _Server(_uvicorn_config(self._admin, plan.admin, timeouts, slow_s))
            self._servers[admin] = listeners.admin

    async def run(self, make_parts: MakeParts) -> int:
        async with _signal_handlers(self._on_signal, self._reload.set):
            http = [
                asyncio.create_task(self._serve(server, listener))
                for server, listener in self._servers.items()
            ]
            tasks = [
                *http,
                asyncio.create_task(self._stop.wait()),
                asyncio.create_task(_repeat(_collect_garbage)),
                asyncio.create_task(_repeat(self._follow_files)),
                asyncio.create_task(self._manager.show_life(self._is_alive)),
            ]
            making = asyncio.ensure_future(make_parts())
            try:
                # None of these tasks ends by itself, unless something is wrong.
                await asyncio.wait((making, *tasks), return_when=asyncio.FIRST_COMPLETED)
                if making.done():
                    parts = self._open(making.result())
                    parts.stats.start(self._clock.now())
                    tasks += [
                        asyncio.create_task(self._load(parts.engine)),
                        asyncio.create_task(_repeat(partial(self._refuse_expired, parts))),
                        asyncio.create_task(_repeat(partial(self._log_stats, parts.stats))),
                    ]
                    works = (parts.background, parts.apps.idle_work, parts.apps.feed_batches)
                    for work in works:
                        if work is not None:
                            tasks.append(asyncio.create_task(_repeat(work)))
                    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                # Before any await: the task must not start an engine now.
                making.cancel()
                await self._drain(http)
            finally:
                for task in tasks:
                    task.cancel()
                ends = await asyncio.gather(*tasks, return_exceptions=True)
                for failure in ends:
                    if isinstance(failure, Exception):
                        self._exit_code = self._exit_code or 1
                        logger.error("the server failed", exc_info=failure)
            # Here, not in the caller: a second signal must still be able to shorten it.
            await self._close_engine()
        return self._exit_code

    async def _serve(self, server: _Server, listener: socket.socket) -> None:
        """Serve a listener; one that shares its port from when requests can be served."""
        if self._config.reuse_port and listener is self._listeners.public:
            while self._parts is None or not self._parts.engine.is_ready:
                if server.should_exit:
                    return
                await asyncio.sleep(READY_S)
        await server.serve(sockets=[listener])

    async def close(self) -> None:
        """Stop the engine, if there is one, whichever way `run` ended."""
        if self._parts is not None:
            await self._parts.engine.close()

    def _open(self, parts: ServerParts) -> ServerParts:
        """Pass requests to these parts from now on."""
        self._parts = parts
        self._public.app, self._admin.app = parts.apps.public, parts.apps.admin
        # Loaded objects live to the end, and scanning them would delay streams.
        gc.collect()
        gc.freeze()
        return parts

    def _is_alive(self) -> bool:
        """Whether no new process is needed, as /health/live says it."""
        return self._parts is None or not self._parts.engine.has_given_up

    def _loading_status(self) -> str:
        return "draining" if self._stop.is_set() else "loading"

    async def _load(self, engine: AsyncEngine) -> None:
        """Load the model; return only if that fails, which ends the server.

        An engine that fails later is replaced. After an engine is given up, the server answers 503.
        """
        try:
            await engine.start(_log_progress)
        except HeadwayError as error:
            self._exit_code = 1
            logger.error("the engine failed: %s", error)
            return
        for note in engine.info.notes:
            logger.info("%s", note)
        if self._listeners.admin is not None:
            admin = _url(self._listeners.admin)
            logger.info("metrics on %s/metrics", admin)
            if self._config.dashboard:
                logger.info("dashboard on %s/dashboard", admin)
        url = _url(self._listeners.public)
        while not next(iter(self._servers)).started:
            await asyncio.sleep(READY_S)
        logger.info("ready on %s", url)
        self._manager.say_ready(url)
        await asyncio.Event().wait()

    async def _refuse_expired(self, parts: ServerParts) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            await parts.admission.refuse_expired()
            await parts.engine.fail_overdue()
            await parts.engine.leave_retired()

    async def _log_stats(self, stats: StatsLog) -> None:
        while True:
            await asyncio.sleep(self._config.log_interval_s)
            line = stats.line(self._clock.now())
            if line is not None:
                logger.info("%s", line)

    async def _follow_files(self) -> None:
        """Check the keys file and the tenants file every second, and at once on SIGHUP."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._reload.wait(), WATCH_S)
            is_forced = self._reload.is_set()
            self._reload.clear()
            await self._watch.poll(is_forced)

    async def _drain(self, http: list[asyncio.Task[None]]) -> None:
        forced = asyncio.create_task(self._forced.wait())
        if self._config.reuse_port:
            await self._leave_port((forced, *http))
        if self._parts is not None:
            await self._drain_parts(self._parts, (forced, *http))
        for server in self._servers:
            server.should_exit = True
        served = asyncio.create_task(asyncio.wait(http))
        await asyncio.wait((served, forced), return_when=asyncio.FIRST_COMPLETED)
        for waiter in (served, forced):
            waiter.cancel()
        for task in http:
            if task.done():
                task.result()

    async def _leave_port(self, ends: Iterable[asyncio.Task[Any]]) -> None:
        """Leave new connections to the other servers of the port, and finish those there are.

        Requests on open connections are served, not refused: nobody else can.
        """
        public = next(iter(self._servers))
        if not public.started:
            return
        self._public.is_leaving = True
        await public.stop_accepting(self._listeners.public)
        self._listeners.public.close()
        ended = asyncio.create_task(public.until_unconnected())
        await asyncio.wait(
            (ended, *ends),
            timeout=self._config.shutdown_timeout,
            return_when=asyncio.FIRST_COMPLETED,
        )
        ended.cancel()

    async def _drain_parts(self, parts: ServerParts, ends: Iterable[asyncio.Task[Any]]) -> None:
        """Let running requests finish, within the timeout, or until one of `ends`."""
        parts.admission.close()
        idle = asyncio.create_task(_until_idle(parts))
        await asyncio.wait(
            (idle, *ends),
            timeout=self._config.shutdown_timeout,
            return_when=asyncio.FIRST_COMPLETED,
        )
        idle.cancel()
        if parts.engine.num_requests:
            logger.warning(
                "%d requests did not end within %.0f s (shutdown_timeout)",
                parts.engine.num_requests,
                self._config.shutdown_timeout,
            )
            # Ends every stream with an error event, so that its answer is complete.
            await self._close_engine()

    async def _close_engine(self) -> None:
        if self._parts is None:
            return
        engine = self._parts.engine
        if not engine.is_ready:
            engine.kill()  # a loading or failed process reads no commands
        await engine.close()

    def _on_signal(self, number: int) -> None:
        self._num_signals += 1
        self._stop.set()
        if self._num_signals == 1:
            logger.info("draining; a second signal stops the server at once")
            self._manager.say_stopping()
            return
        self._exit_code = 128 + number
        for server in self._servers:
            server.should_exit = server.force_exit = True
        self._forced.set()
        if self._parts is not None:
            self._parts.engine.kill()


@contextlib.asynccontextmanager
async def _signal_handlers(
    stop: Callable[[int], None], reload: Callable[[], None]
) -> AsyncGenerator[None, None]:
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, stop, number)
    # Also without a file to reload: an unhandled SIGHUP would end the process.
    loop.add_signal_handler(signal.SIGHUP, reload)
    try:
        yield
    finally:
        for number in (*SIGNALS, signal.SIGHUP):
            loop.remove_signal_handler(number)


async def _repeat(work: Callable[[], Awaitable[None]], pause_s: float = REPEAT_S) -> None:
    """Run background work forever; start it again a while after it fails."""
    while True:
        try:
            await work()
        except Exception:
            logger.exception("background work failed; it starts again in %.0f s", pause_s)
        await asyncio.sleep(pause_s)


async def _until_idle(parts: ServerParts) -> None:
    while parts.engine.num_requests or parts.admission.num_queued:
        await asyncio.sleep(0.05)


async def _collect_garbage() -> None:
    """Collect cyclic garbage at intervals.

    The thresholds of `collect_rarely` would hardly ever trigger a collection, and every connection
    leaves some garbage. Objects frozen at the start are not scanned.
    """
    while True:
        await asyncio.sleep(GC_INTERVAL_S)
        gc.collect()


def _log_progress(num_done: int, num_total: int) -> None:
    """Log one line per quarter of the weights."""
    if num_done * 4 // num_total > (num_done - 1) * 4 // num_total:
        logger.info("loaded %d of %d tensors", num_done, num_total)


def _uvicorn_config(
    app: ASGIApp, share: ConnectionShare, timeouts: Timeouts, slow_reader_timeout_s: float
) -> uvicorn.Config:
    # uvicorn's info messages repeat those of Headway; its warnings are useful.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    return uvicorn.Config(
        app,
        http=bounded_protocol(slow_reader_timeout_s, timeouts, share.max_connections),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        # Trust depends on the address of the connection, never on X-Forwarded-For.
        proxy_headers=False,
        server_header=False,
        backlog=share.backlog,
        timeout_keep_alive=timeouts.keep_alive_s,  # pyright: ignore[reportArgumentType]
        timeout_graceful_shutdown=FLUSH_S,
    )


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
