"""Runs a supervised engine behind a listener, until a signal.

The engine process is the one that `headway serve` runs. If it fails, it is replaced here, with its
KV blocks; frontends hear of both, and decide where their requests go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable
from typing import Any

from headway.config import notify_address, watchdog_s
from headway.engine.supervise.supervisor import Supervisor
from headway.errors import HeadwayError
from headway.fleet.engines.listener import EngineListener
from headway.server.service_manager import ServiceManager

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)


async def host_engine(
    supervisor: Supervisor,
    make_listener: Callable[[Supervisor], EngineListener],
    lease_s: float | None = None,
) -> int:
    """Load, listen and serve until a signal, or the end of the lease; return the exit code."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, stop.set)
    manager = ServiceManager(notify_address(), watchdog_s())
    stopping = asyncio.create_task(stop.wait())
    # A hung engine process is replaced here: signs of life are those of this process.
    life = asyncio.create_task(manager.show_life(lambda: True))
    tasks: list[asyncio.Task[Any]] = [stopping, life]
    listener: EngineListener | None = None
    try:
        listener = make_listener(supervisor)
        if lease_s is not None:
            tasks.append(asyncio.create_task(_end_lease(listener, lease_s, stop)))
        return await _run(supervisor, listener, stopping, manager)
    finally:
        manager.say_stopping("stopping")
        for task in tasks:
            task.cancel()
        if listener is not None:
            await listener.close()
        if not supervisor.is_up:
            supervisor.kill()  # a loading or failed process reads no commands
        await supervisor.stop()
        for number in SIGNALS:
            loop.remove_signal_handler(number)


async def _end_lease(listener: EngineListener, lease_s: float, stop: asyncio.Event) -> bool:
    """Have an engine that nobody has used for a while end."""
    while listener.unused_s < lease_s:
        await asyncio.sleep(min(1.0, lease_s / 4))
    logger.info("no frontend for %.0f s (lease_s): the engine ends", lease_s)
    stop.set()
    return True


async def _run(
    supervisor: Supervisor,
    listener: EngineListener,
    stopping: asyncio.Task[bool],
    manager: ServiceManager,
) -> int:
    logger.info("listening on %s", listener.address)
    listening = asyncio.create_task(listener.run())
    loading = asyncio.create_task(supervisor.load())
    tasks: list[asyncio.Task[None]] = [listening, loading]
    try:
        await asyncio.wait((*tasks, stopping), return_when=asyncio.FIRST_COMPLETED)
        if stopping.done():
            return 0
        loading.result() if loading.done() else listening.result()
        logger.info("the engine is ready on %s", listener.address)
        manager.say_ready(str(listener.address))
        tasks.append(asyncio.create_task(supervisor.run(listener)))
        await asyncio.wait((*tasks[::2], stopping), return_when=asyncio.FIRST_COMPLETED)
        if listener.error is not None:
            logger.error("%s", listener.error)
            return 1
        return 0 if stopping.done() else 1
    except HeadwayError as error:
        logger.error("the engine failed: %s", error)
        return 1
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError, HeadwayError):
                await task
