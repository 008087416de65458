"""A scheduling policy of your own: the shortest prompt goes first, and long ones do not starve.

KeyedQueue brings aging: a request that has waited for `max_wait_s` goes first, however long it is.
"""

from headway.clock import VirtualClock
from headway.config import SchedulerConfig
from headway.core import Capacity, EngineCore, Request, SamplingParams, Scheduler
from headway.core.events import Admitted
from headway.core.waiting.keyed import KeyedQueue
from headway.core.waiting.policies import POLICIES
from headway.core.waiting.sort_key import SortKey
from headway.executors.fake import FakeExecutor


def shortest_first(request: Request) -> SortKey:
    """Smallest key first; all have the same rank, so none preempts another."""
    return SortKey(0, (request.num_prompt_tokens, request.arrival_order, request.index))


POLICIES["shortest"] = lambda context: KeyedQueue(shortest_first)

capacity = Capacity(num_blocks=16, block_size=16, max_model_len=200)
config = SchedulerConfig(scheduling_policy="shortest", max_num_seqs=1, max_wait_s=0.5)
clock, admitted = VirtualClock(), list[str]()
core = EngineCore(
    Scheduler(config, capacity),
    FakeExecutor(capacity),
    clock,
    lambda events: admitted.extend(e.request_id for e in events if isinstance(e, Admitted)),
)
for step in range(12):
    name, length = ("long", 100) if step == 1 else (f"short-{step}", 20 - step)
    prompt, params = list(range(length)), SamplingParams(max_tokens=2)
    core.add(Request(id=name, token_ids=prompt, params=params, seed=0, arrived_at=clock.now()))
    core.step()
    clock.advance_to(clock.now() + 0.1)
print(" ".join(admitted))
