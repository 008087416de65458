"""The fake engine, which first says where the model is that its settings name."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import msgspec

from benchmarks.support import fake_engine
from headway.config import Config
from headway.executors.source import locate

if __name__ == "__main__":
    config = msgspec.json.decode(sys.stdin.readline(), type=Config)
    path = locate(config.model.model, config.model.revision).path
    print("engine", os.getpid(), "loads", path, flush=True)
    fake_engine.sys = SimpleNamespace(stdin=SimpleNamespace(readline=lambda: "{}"), argv=sys.argv)
    sys.exit(fake_engine.main())
