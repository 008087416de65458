"""A TCP relay whose connections can be cut or stalled: a network that fails."""

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
        self._flows = asyncio.Event()
        self._flows.set()
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

    def stall(self) -> None:
        """Pass nothing on, without ending a connection: as if a cable was pulled."""
        self._loop.call_soon_threadsafe(self._flows.clear)

    def resume(self) -> None:
        """Pass on what was held back."""
        self._loop.call_soon_threadsafe(self._flows.set)

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
            await asyncio.gather(self._pass_on(reader, back), self._pass_on(there, writer))

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while piece := await reader.read(65536):
                await self._flows.wait()
                writer.write(piece)
                await writer.drain()
        finally:
            writer.transport.abort()
