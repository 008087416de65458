"""`headway engine` and `headway frontend` with the fake engine, for fleets of many members.

Arguments: as those of the commands. MODEL is a tokenizer file; a file beside it with the suffix
`.json` has the settings of the fake engine.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Coroutine, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.support import fake_host, fake_server
from headway.config import SECTIONS, load_config
from headway.server import run


def read_flags(words: Sequence[str]) -> dict[str, object]:
    """Return flags as settings: `--name value`, `--name=value` or `--switch`."""
    switches = {
        name
        for section in SECTIONS.values()
        for name, spec in section.__dataclass_fields__.items()
        if spec.type == "bool"
    }
    given: dict[str, object] = {}
    rest = iter(words)
    for word in rest:
        flag, sign, value = word.removeprefix("--").partition("=")
        name = flag.replace("-", "_")
        if name in switches:
            given[name] = True
        else:
            given[name] = value if sign else next(rest)
    return given


def make_main(role: str, model: str, given: dict[str, object]) -> Coroutine[Any, Any, int]:
    config = load_config(given, environ={})
    path = Path(model).with_suffix(".json")
    settings = path.read_bytes() if path.exists() else b"{}"
    key_file = config.cluster.cluster_key_file
    if role == "engine":
        host = {"cluster_key_file": key_file, "lease_s": config.orphans.lease_s}
        return fake_host.main(config.listener.listen, settings, msgspec.json.encode(host), model)
    server = {name: asdict(config.server)[name] for name in given if name in asdict(config.server)}
    frontend = {"discover": config.frontend.discover, "failover_s": config.frontend.failover_s}
    frontend["routing"] = config.routing.routing
    given_all = {**server, **frontend, "cluster_key_file": key_file, "max_queue_age_s": 120.0}
    port = given_all.pop("port", 0)
    return fake_server.main(int(str(port)), settings, msgspec.json.encode(given_all), model)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    role, model, *flags = sys.argv[1:]
    sys.exit(run(make_main(role, model, read_flags(flags))))
