"""Runs the apps and their engine until a signal ends them.

Ends in order: nobody new is let in and is told so, answers in progress may finish, then the
connections, then the engine process. Nothing is left behind whichever way it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import signal
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from headway.clock import Clock, SystemClock
from headway.config import ServerConfig
from headway.engine.async_engine import AsyncEngine
from headway.engine.messages import all_events
from headway.errors import ConfigError, HeadwayError
from headway.observe.stats_log import StatsLog
from headway.server.app import Apps
from headway.server.gate import Gate
from headway.server.hosts import HostPolicy, is_loopback
from headway.server.limits import bounded_protocol
from headway.server.proxies import Proxies
from headway.server.tenants import load_tenants

logger = logging.getLogger(__name__)

FLUSH_S = 5
"""How long clients have to read the end of their answers once there is nothing left to do."""
KEEP_ALIVE_S = 5
BACKLOG = 2048
SEND_BUFFER_BYTES = 64 * 1024
"""What the kernel holds for a client that does not read; it grows into megabytes by itself."""
SWEEP_S = 0.25
WATCH_S = 1.0
GC_THRESHOLDS = (50_000, 20, 100)
TIDY_S = 5.0
REPEAT_S = 1.0
"""Pause before background work that failed starts again."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class Listeners:
    """The ports that are taken."""

    public: socket.socket
    admin: socket.socket | None = None

    def close(self) -> None:
        for listener in (self.public, self.admin):
            if listener is not None:
                listener.close()


def listen(config: ServerConfig) -> Listeners:
    """Take the ports, before anything slow is begun: if one is in use, or a setting is wrong, that
    is said at once."""
    has_keys = not load_tenants(config, SystemClock()).directory.is_open
    if Proxies.of(config.trusted_proxy).is_anyone:
        logger.warning("--trusted-proxy holds every address: anyone may speak for any tenant")
    for host in (config.host, config.admin_host):
        HostPolicy.of(host, config.allowed_host)
        if not has_keys and not is_loopback(host):
            logger.warning("anyone who can reach %s may use this server: it has no keys", host)
    public = _listen(config.host, config.port, "--port")
    if config.admin_port is None:
        return Listeners(public)
    try:
        return Listeners(public, _listen(config.admin_host, config.admin_port, "--admin-port"))
    except BaseException:
        public.close()
        raise


def _listen(host: str, port: int, flag: str) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}: {error.strerror or error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted connections inherit it.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        listener.bind(address)
        # Another process could bind as well until somebody listens.
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host} is in use; choose another with {flag} (0: a free one)"
            ) from error
        raise ConfigError(f"cannot listen on port {port} of {host}: {error.strerror}") from error
    listener.setblocking(False)
    return listener


def run(main: Coroutine[Any, Any, int]) -> int:
    """Run `serve` in a new event loop, the fast kind where there is one."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        new_event_loop = None
    # Reading one large body makes millions of objects; looking through them over and over, as the
    # usual thresholds have it, would hold up every stream for a second. See `_tidy`.
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main)


@dataclass(frozen=True, slots=True)
class Site:
    """What is to be served, and where."""

    engine: AsyncEngine
    apps: Apps
    gate: Gate
    listeners: Listeners


async def serve(site: Site, config: ServerConfig) -> int:
    """Load, serve, clean up; the process's exit code."""
    try:
        return await _Serving(site, config).run()
    finally:
        await site.engine.close()
        site.listeners.close()


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Signals are handled here in `_Serving`; the base class would raise them again."""
        yield


class _Serving:
    def __init__(self, site: Site, config: ServerConfig) -> None:
        self._engine = site.engine
        self._gate = site.gate
        self._config = config
        self._listeners = site.listeners
        self._watch = site.apps.watch
        self._reload = asyncio.Event()
        timeout_s = config.slow_reader_timeout_s
        public = _Server(_uvicorn_config(site.apps.public, timeout_s))
        self._servers = {public: site.listeners.public}
        if site.listeners.admin is not None:
            admin = _Server(_uvicorn_config(site.apps.admin, timeout_s))
            self._servers[admin] = site.listeners.admin
        self._stop = asyncio.Event()
        self._forced = asyncio.Event()
        self._num_signals = 0
        self._exit_code = 0

    async def run(self) -> int:
        async with _signal_handlers(self._on_signal):
            http = [
                asyncio.create_task(server.serve(sockets=[listener]))
                for server, listener in self._servers.items()
            ]
            clock, interval_s = SystemClock(), self._config.log_interval_s
            stats = StatsLog(clock.now())
            self._engine.subscribe(lambda batch: stats.consume(all_events(batch)))
            work = asyncio.create_task(self._load())
            stopping = asyncio.create_task(self._stop.wait())
            others = [
                work,
                stopping,
                asyncio.create_task(_repeat(self._sweep)),
                asyncio.create_task(_repeat(_tidy)),
                asyncio.create_task(_repeat(self._follow_tenants)),
                asyncio.create_task(_repeat(partial(_log_stats, stats, clock, interval_s))),
            ]
            try:
                # None of them ends by itself, unless something is wrong.
                await asyncio.wait((*http, *others), return_when=asyncio.FIRST_COMPLETED)
                await self._drain(http)
            finally:
                for task in (*http, *others):
                    task.cancel()
                ends = await asyncio.gather(*http, *others, return_exceptions=True)
                for failure in ends:
                    if isinstance(failure, Exception):
                        self._exit_code = self._exit_code or 1
                        logger.error("the server failed", exc_info=failure)
            # Here, not in the caller, because a second signal must still be able to cut it short.
            await self._close_engine()
        return self._exit_code

    async def _load(self) -> None:
        """Returns only if the model cannot be loaded, which ends the server. An engine that fails
        later is replaced; one that has been given up leaves a server that answers 503."""
        try:
            await self._engine.start(_log_progress)
        except HeadwayError as error:
            self._exit_code = 1
            logger.error("the engine failed: %s", error)
            return
        for note in self._engine.info.notes:
            logger.info("%s", note)
        if self._listeners.admin is not None:
            logger.info("metrics on %s/metrics", _url(self._listeners.admin))
        logger.info("ready on %s", _url(self._listeners.public))
        await asyncio.Event().wait()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            await self._gate.sweep()

    async def _follow_tenants(self) -> None:
        """Looks at the tenants file every now and then, and at once when told to."""
        if self._watch is None:
            await asyncio.Event().wait()
            return
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, self._reload.set)
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._reload.wait(), WATCH_S)
                is_told = self._reload.is_set()
                self._reload.clear()
                await self._watch.look(is_forced=is_told)
        finally:
            loop.remove_signal_handler(signal.SIGHUP)

    async def _drain(self, http: list[asyncio.Task[None]]) -> None:
        self._gate.close()
        forced = asyncio.create_task(self._forced.wait())
        idle = asyncio.create_task(self._until_idle())
        timeout_s = self._config.shutdown_timeout
        await asyncio.wait(
            (idle, forced, *http), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        idle.cancel()
        if self._engine.num_requests:
            logger.warning("%d requests did not end in time", self._engine.num_requests)
            # Ends every stream with an error event, so that its answer is complete.
            await self._close_engine()
        for server in self._servers:
            server.should_exit = True
        served = asyncio.create_task(asyncio.wait(http))
        await asyncio.wait((served, forced), return_when=asyncio.FIRST_COMPLETED)
        for waiter in (served, forced):
            waiter.cancel()
        for task in http:
            if task.done():
                task.result()

    async def _until_idle(self) -> None:
        while self._engine.num_requests or self._gate.num_queued:
            await asyncio.sleep(0.05)

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
        for server in self._servers:
            server.should_exit = server.force_exit = True
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


async def _repeat(work: Callable[[], Awaitable[None]], pause_s: float = REPEAT_S) -> None:
    """Run background work without end; start it again some time after it fails."""
    while True:
        try:
            await work()
        except Exception:
            logger.exception("background work failed; it starts again in %.0f s", pause_s)
        await asyncio.sleep(pause_s)


async def _tidy() -> None:
    """Looks for garbage in cycles every now and then. By the thresholds that would hardly ever
    happen, and every connection leaves some. What was there from the start is not looked at."""
    while True:
        await asyncio.sleep(TIDY_S)
        gc.collect()


async def _log_stats(stats: StatsLog, clock: Clock, interval_s: float) -> None:
    while True:
        await asyncio.sleep(interval_s)
        line = stats.line(clock.now())
        if line is not None:
            logger.info("%s", line)


def _log_progress(num_done: int, num_total: int) -> None:
    """A line per quarter: a log file is no place for a bar."""
    if num_done * 4 // num_total > (num_done - 1) * 4 // num_total:
        logger.info("loaded %d of %d tensors", num_done, num_total)


def _uvicorn_config(app: ASGIApp, slow_reader_timeout_s: float) -> uvicorn.Config:
    # Its own messages repeat ours; what it warns of is worth seeing.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    return uvicorn.Config(
        _without_cancellation(app),
        http=bounded_protocol(slow_reader_timeout_s),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        # Whose word counts is decided by the address of the connection, not by X-Forwarded-For.
        proxy_headers=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=FLUSH_S,
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
