"""A real engine host with the fake engine process.

Arguments: address, engine settings as JSON, host settings as JSON, tokenizer file. Host settings
are those of SupervisionConfig, `cluster_key_file`, `orphan_s` and `lease_s`.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import msgspec

from headway.build_server import supervise
from headway.clock import SystemClock
from headway.config import SupervisionConfig
from headway.engine.process.messages import EngineInfo
from headway.engine.supervise.launcher import EngineProcess
from headway.engine.supervise.start import EngineStart
from headway.errors import ConfigError
from headway.fleet.engines.engine_host import host_engine
from headway.fleet.engines.listener import EngineIdentity, EngineListener
from headway.fleet.network.cluster_key import ClusterKey
from headway.fleet.network.endpoints import Endpoint
from headway.server import run
from headway.text import Tokenizer

COMMAND = (sys.executable, "-m", "benchmarks.support.fake_engine")


class FakeLauncher:
    """Launches fake engine processes, and prints the id of each."""

    def __init__(self, settings: bytes) -> None:
        self._settings = settings

    def launch(self, _before: EngineInfo | None) -> EngineProcess:
        process = EngineProcess(EngineStart(COMMAND), self._settings)
        print("engine", process.pid, flush=True)
        return process

    launch_standby = launch


async def main(address: str, settings: bytes, host_settings: bytes, tokenizer_path: str) -> int:
    given = msgspec.json.decode(host_settings)
    key_file, orphan_s = given.pop("cluster_key_file", None), given.pop("orphan_s", 30.0)
    lease_s = given.pop("lease_s", None)
    key = None if key_file is None else ClusterKey.read(Path(key_file))
    identity = EngineIdentity("fake", Tokenizer.from_gguf(tokenizer_path).digest())
    launcher = FakeLauncher(settings)
    supervisor = supervise(launcher, SupervisionConfig(**given))  # pyright: ignore
    endpoint = Endpoint.parse(address, "--listen", may_be_any=True)
    return await host_engine(
        supervisor,
        lambda one: EngineListener(endpoint, key, one, identity, SystemClock(), orphan_s),
        lease_s,
    )


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    address, settings, host_settings, path = sys.argv[1:]
    try:
        sys.exit(run(main(address, settings.encode(), host_settings.encode(), path)))
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
