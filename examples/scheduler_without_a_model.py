"""Watch the scheduler at work, with nothing installed but Python."""

from headway.clock import VirtualClock
from headway.config import SchedulerConfig
from headway.core import Capacity, EngineCore, Request, SamplingParams, Scheduler
from headway.executors.fake import FakeExecutor

capacity = Capacity(num_blocks=12, block_size=4, max_model_len=64)
config = SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=8, prefill_floor=2)
scheduler = Scheduler(config, capacity)
core = EngineCore(scheduler, FakeExecutor(capacity), VirtualClock(), lambda events: None)

for number in range(4):
    core.add(
        Request(
            id=f"request-{number}",
            token_ids=list(range(6 + 3 * number)),
            params=SamplingParams(max_tokens=10),
            seed=number,
            arrived_at=0.0,
        )
    )

while (plan := core.begin_step()) is not None:
    work = ", ".join(f"{item.request_id}: {len(item.token_ids)}" for item in plan.scheduled)
    print(f"step {plan.step_id:2d}  {plan.num_tokens} tokens  {work}")
    core.end_step()
