"""Engine process without a model: real loop and scheduler, letters as output."""

from __future__ import annotations

import faulthandler
import os
import random
import sys
import time
from dataclasses import replace

import msgspec

from headway.clock import SystemClock
from headway.config import SchedulerConfig
from headway.core.engine import EngineCore
from headway.core.events import Sink
from headway.core.executor import Capacity, Ticket
from headway.core.plan import Sample, ScheduledRequest, StepPlan, StepResult, TokenLogprobs
from headway.core.scheduler import Scheduler
from headway.core.slo.steptime import shape_of
from headway.engine.process.journal import JournaledExecutor
from headway.engine.process.loop import EngineLoop, Progress, ignore_stop_signals
from headway.engine.process.messages import EngineInfo
from headway.engine.supervise.launcher import STACKS_SIGNAL
from headway.executors.fake import HIDDEN_SIZE, FakeExecutor
from headway.sim import SMOLLM2_135M
from headway.sim.steps import DrawStep

CAPACITY = Capacity(num_blocks=256, block_size=16, max_model_len=2048)
VOCAB_SIZE = 275


class Settings(msgspec.Struct):
    step_s: float = 0.002
    slowness: float = 0.0
    """If set, steps take as long as those of SmolLM2-135M on two cores, times this."""
    load_s: float = 0.0
    fails_loading: bool = False
    fails_at_step: int = 0
    poison_token: int = -1
    """A prompt with this token ends the process when the token is computed."""
    hang_token: int = -1
    """A prompt with this token is never computed, nor anything after it."""
    decode_poison_token: int = -1
    """A request with this token ends the process at its first decode."""
    dies_loading_file: str = ""
    """While this file exists, loading fails."""
    scheduling_policy: str = "priority"
    mode: str = "auto"
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    numerics: str = "letters"
    num_blocks: int = 256
    max_model_len: int = CAPACITY.max_model_len


class LetterExecutor(FakeExecutor):
    def __init__(self, settings: Settings) -> None:
        num_blocks, max_model_len = settings.num_blocks, settings.max_model_len
        super().__init__(replace(CAPACITY, num_blocks=num_blocks, max_model_len=max_model_len))
        self._settings = settings
        self._draw_step: DrawStep | None = None
        if settings.slowness:
            profile = SMOLLM2_135M.scaled(settings.slowness)
            self._draw_step = profile.start(random.Random(os.getpid()))

    def submit(self, plan: StepPlan) -> Ticket:
        ticket = super().submit(plan)
        if self._draw_step is not None:
            step_s = self._draw_step(shape_of(plan), 0).elapsed_s
            result = self._results[plan.step_id]
            self._results[plan.step_id] = replace(result, elapsed_s=step_s)
        for item in plan.scheduled:
            token_ids = self._requests[item.request_id].token_ids
            is_decode = len(item.token_ids) == 1
            if self._settings.poison_token in token_ids:
                os._exit(9)
            if self._settings.hang_token in token_ids:
                time.sleep(3600)
            if is_decode and self._settings.decode_poison_token in token_ids:
                os._exit(9)
        return ticket

    def collect(self, ticket: Ticket) -> StepResult:
        if ticket.step_id == self._settings.fails_at_step:
            raise RuntimeError("secret detail of the failure")
        result = super().collect(ticket)
        time.sleep(self._settings.step_s if self._draw_step is None else result.elapsed_s)
        return result

    def _sample(self, item: ScheduledRequest) -> Sample | None:
        sample = super()._sample(item)
        if sample is None:
            return None
        token_id = 97 + sample.token_ids[0] % 26
        num_top = self._requests[item.request_id].params.logprobs
        if num_top is None:
            return Sample((token_id,))
        top_ids = tuple(range(97, 97 + num_top))
        scores = TokenLogprobs(-0.5, 1, top_ids, tuple(-float(i + 1) for i in range(num_top)))
        return Sample((token_id,), (scores,))


def main() -> int:
    ignore_stop_signals()
    faulthandler.register(STACKS_SIGNAL)
    settings = msgspec.json.decode(sys.stdin.readline(), type=Settings)
    loop = EngineLoop(sys.argv[1])

    def factory(sink: Sink, progress: Progress) -> tuple[EngineCore, EngineInfo]:
        time.sleep(settings.load_s)
        if settings.fails_loading or os.path.exists(settings.dies_loading_file or "/nowhere"):
            raise ValueError("the weights are not there")
        config = SchedulerConfig(
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            scheduling_policy=settings.scheduling_policy,
            kv_watermark=0.0,
            mode=settings.mode,
        )
        executor = JournaledExecutor(LetterExecutor(settings), loop.journal)
        capacity = executor.capacity()
        core = EngineCore(Scheduler(config, capacity), executor, SystemClock(), sink)
        info = EngineInfo(
            capacity,
            settings.max_num_seqs,
            VOCAB_SIZE,
            scheduling_policy=settings.scheduling_policy,
            numerics=settings.numerics,
            hidden_size=HIDDEN_SIZE,
        )
        return core, info

    return loop.run(factory)


if __name__ == "__main__":
    sys.exit(main())
