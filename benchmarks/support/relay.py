"""A TCP relay whose connections can be cut, stalled or slow: a network that fails."""

from __future__ import annotations

import asyncio
import contextlib
import threading

from benchmarks.support.servers import free_port


class Relay:
    """Passes connections on a port of its own to a target, in a thread of its own."""

    def __init__(self, target_port: int) -> None:
        self.port = free_port()
        self._target_port = target_port
        self._loop = asyncio.new_event_loop()
        self._writers: set[asyncio.StreamWriter] = set()
        self._is_cut = False
        self._delay_s = 0.0
        self._there, self._back = asyncio.Event(), asyncio.Event()
        """Whether anything is passed on, to the target and from it."""
        self._there.set()
        self._back.set()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._started = threading.Event()
        self._thread.start()
        self._started.wait(10)

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def cut(self) -> None:
        """End all connections, and refuse new ones."""
        self._is_cut = True
        self._loop.call_soon_threadsafe(self._end_all)

    def heal(self) -> None:
        """Take connections again."""
        self._is_cut = False

    def stall(self, is_one_way: bool = False) -> None:
        """Pass nothing on, or nothing from the target: as if a cable was pulled."""
        self._loop.call_soon_threadsafe(self._back.clear)
        if not is_one_way:
            self._loop.call_soon_threadsafe(self._there.clear)

    def resume(self) -> None:
        """Pass on what was held back."""
        self._loop.call_soon_threadsafe(self._there.set)
        self._loop.call_soon_threadsafe(self._back.set)

    def delay(self, seconds: float) -> None:
        """Hold back everything that comes from now on for so long."""
        self._delay_s = seconds

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = asyncio.start_server(self._accept, "127.0.0.1", self.port)
        listener = self._loop.run_until_complete(server)
        self._started.set()
        self._loop.run_forever()
        listener.close()
        self._end_all()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    def _end_all(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            writer.transport.abort()
            return
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, back}
        with contextlib.suppress(OSError):
            await asyncio.gather(
                self._pass_on(reader, back, self._there), self._pass_on(there, writer, self._back)
            )

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, flows: asyncio.Event
    ) -> None:
        try:
            while piece := await reader.read(65536):
                await flows.wait()
                if self._delay_s:
                    await asyncio.sleep(self._delay_s)
                writer.write(piece)
                await writer.drain()
        finally:
            writer.transport.abort()
