"""The core needs the standard library and nothing else: shown in an environment without it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src"

DEMO = """
import importlib.util
import sys

for name in ("torch", "numpy", "pydantic", "starlette", "zmq", "msgspec", "yaml", "transformers"):
    if importlib.util.find_spec(name) is not None:
        sys.exit(f"{name} is here: this environment is not bare")

import headway.core
from headway.clock import VirtualClock
from headway.config import SchedulerConfig
from headway.core import Capacity, EngineCore, Request, SamplingParams, Scheduler, StepResult
from headway.core.events import Finished
from headway.core.executor import Ticket
from headway.core.plan import Sample


class Counting:
    def capacity(self):
        return Capacity(num_blocks=8, block_size=4, max_model_len=32)

    def submit(self, plan):
        self.plan = plan
        return Ticket(plan.step_id)

    def collect(self, ticket):
        items = self.plan.scheduled
        outcomes = tuple(Sample((1,)) if item.has_sample else None for item in items)
        return StepResult(ticket.step_id, outcomes, 0.0)

    def close(self):
        pass


executor, events = Counting(), []
scheduler = Scheduler(SchedulerConfig(), executor.capacity())
core = EngineCore(scheduler, executor, VirtualClock(), events.extend)
for name in ("a", "b"):
    params = SamplingParams(max_tokens=6)
    core.add(Request(id=name, token_ids=[1, 2, 3], params=params, seed=0, arrived_at=0.0))
while core.step():
    pass

import headway.executors.fake

third_party = sorted(
    name
    for name, module in sys.modules.items()
    if "site-packages" in (getattr(module, "__file__", None) or "")
)
finished = [event.num_output_tokens for event in events if isinstance(event, Finished)]
print(finished, third_party)
"""


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("bare") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    return home / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")


def test_the_core_schedules_with_the_standard_library_alone(bare_python: Path, tmp_path: Path):
    kept = {name: os.environ[name] for name in ("PATH", "SYSTEMROOT") if name in os.environ}
    result = subprocess.run(
        [bare_python, "-c", DEMO],
        env={**kept, "PYTHONPATH": str(SOURCE), "PYTHONDONTWRITEBYTECODE": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[6, 6] []"
