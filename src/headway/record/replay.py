"""Replays a recording in a fresh engine core and finds the first plan that differs.

Requests have stand-in tokens. The hashes of their blocks come from the recording, and so do the
outcomes of steps, so that the prefix cache has the same hits and requests end where they did.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from headway.core.engine import EngineCore
from headway.core.events import Event, Finished, Forked, Refused
from headway.core.executor import Capacity, HashedBlock, Ticket
from headway.core.kv.cache import KVCache
from headway.core.kv.prefix import BlockHash, RunningHash
from headway.core.params import SamplingParams
from headway.core.plan import (
    Embedding,
    Failure,
    PromptScores,
    Sample,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from headway.core.request import Request
from headway.core.scheduler import Scheduler
from headway.errors import RecordingError
from headway.record.entries import (
    FAILED_OUTCOME,
    HASH_BYTES,
    AbortEntry,
    AddEntry,
    BeginEntry,
    Chunk,
    DamagedEntry,
    EndEntry,
    Entry,
    OddOutcome,
    RecordingHeader,
    RestoredEntry,
    digest_plan,
)
from headway.record.reader import RecordingReader

TOKEN, STOP_TOKEN = 0, 1
_SAMPLE = Sample((TOKEN,))
_SCORE = TokenLogprobs(0.0, 1)


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """Which requests a plan schedules."""

    decodes: tuple[str, ...]
    chunks: tuple[tuple[str, int, int], ...]
    """Request, first token and number of tokens of each prefill, in the order of the plan."""


@dataclass(frozen=True, slots=True)
class PlanDifference:
    """A plan of the replay is not that of the recording."""

    step: int
    """Number of the planned step, from 1."""
    now: float
    recorded: PlanSummary
    replayed: PlanSummary


@dataclass(frozen=True, slots=True)
class AdmissionDifference:
    """The replay refuses a request that was accepted, or accepts one that was refused."""

    step: int
    now: float
    request_id: str
    was_refused: bool


@dataclass(frozen=True, slots=True)
class ReplayFailure:
    """A call fails in the replay."""

    step: int
    """Number of the step under way, from 1; 0 before the first one."""
    now: float
    error: str


Difference = PlanDifference | AdmissionDifference | ReplayFailure


class _Tail:
    """A recorded hash of a last block; what is added to it makes it one that nothing has."""

    def __init__(self, digest: bytes) -> None:
        self._digest = digest

    def update(self, data: bytes, /) -> None:
        del data
        self._digest = b""

    def digest(self) -> bytes:
        return self._digest


class RecordedHashes(KVCache):
    """A KV cache that takes hashes from a recording, at the moments at which others compute them.

    Which hashes of a request are computed at a time matters: KV quotas look at those alone.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        super().__init__(num_blocks, block_size, enable_prefix_caching)
        self.hashes: dict[str, list[BlockHash]] = {}
        """Hashes of the full blocks of live requests, some of which may not be full yet."""
        self.tails: dict[str, tuple[int, bytes]] = {}
        """Where the cached part of a request may end in its last block, and the hash of that."""

    def fork_hashes(self, child: Request) -> None:
        """Have a forked sample start with the hashes of its prompt."""
        parent_hashes = self.hashes[child.id.rpartition("#")[0]]
        num_prompt_blocks = child.num_prompt_tokens // self.block_size
        self.hashes.setdefault(child.id, parent_hashes[:num_prompt_blocks])

    def _hash_full_blocks(self, request: Request) -> None:
        if request.id not in self.hashes:  # forked in the update that is under way
            self.fork_hashes(request)
        num_full, num_before = request.num_tokens // self.block_size, len(request.block_hashes)
        request.block_hashes += self.hashes[request.id][num_before:num_full]

    def _hash_tail(self, request: Request, end: int) -> RunningHash:
        self._hash_full_blocks(request)
        recorded_end, digest = self.tails.get(request.id, (0, b""))
        return _Tail(digest if recorded_end == end else b"")


class _RecordedTime:
    """A clock that shows the time of the entry under way."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time


class _RecordedResults:
    """An executor that returns the recorded results."""

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity
        self.plan: StepPlan | None = None
        self.result: StepResult | None = None

    def capacity(self) -> Capacity:
        return self._capacity

    def submit(self, plan: StepPlan) -> Ticket:
        self.plan = plan
        return Ticket(plan.step_id)

    def collect(self, ticket: Ticket) -> StepResult:
        if self.result is None:
            raise RuntimeError(f"step {ticket.step_id} has no recorded result")
        return self.result

    def close(self) -> None:
        pass


class _EarlierBlocks:
    """The KV blocks of the process before the recorded one."""

    def __init__(self, blocks: Sequence[HashedBlock]) -> None:
        self._blocks = blocks
        self.damaged_ids: set[int] = set()

    def record(self, blocks: Sequence[HashedBlock]) -> None:
        pass

    def restore(self) -> list[HashedBlock]:
        return list(self._blocks)

    def find_intact(self, blocks: Sequence[HashedBlock]) -> list[HashedBlock]:
        return [one for one in blocks if one.block_id not in self.damaged_ids]


class ReplayedEngine:
    """A fresh engine core that repeats the calls of a recording."""

    def __init__(self, header: RecordingHeader) -> None:
        self._time = _RecordedTime()
        self._results = _RecordedResults(header.capacity)
        capacity, has_cache = header.capacity, header.enable_prefix_caching
        self._cache = RecordedHashes(capacity.num_blocks, capacity.block_size, has_cache)
        self.scheduler = Scheduler(header.scheduler, capacity, has_cache, self._cache)
        self._blocks = _EarlierBlocks(())
        self._core: EngineCore | None = None
        self._ids: dict[int, str] = {}
        """Requests by number."""
        self._numbers = count()
        self._decoding: set[int] = set()
        self.num_steps = 0
        """Planned steps so far."""
        self.on_events: Callable[[Sequence[Event]], None] = lambda _events: None
        """Called with the events of every call."""

    @property
    def plan(self) -> StepPlan | None:
        """The step that was planned last."""
        return self._results.plan

    @property
    def now(self) -> float:
        """Time of the last call."""
        return self._time.time

    @property
    def core(self) -> EngineCore:
        if self._core is None:
            self._core = self._make_core(None)
        return self._core

    def _make_core(self, blocks: _EarlierBlocks | None) -> EngineCore:
        return EngineCore(self.scheduler, self._results, self._time, self._take_events, blocks)

    def apply(self, entry: Entry) -> Difference | None:
        """Repeat a call; return how its outcome differs, if it does."""
        match entry:
            case BeginEntry():
                return self._begin(entry)
            case EndEntry():
                self._end(entry)
            case AddEntry():
                return self._add(entry)
            case AbortEntry():
                self._time.time = entry.now
                self.core.abort(entry.id, entry.reason)
            case RestoredEntry():
                blocks = [HashedBlock(*one) for one in entry.blocks]
                self._blocks = _EarlierBlocks(blocks)
                self._core = self._make_core(self._blocks)
            case DamagedEntry():
                self._blocks.damaged_ids.update(entry.block_ids)
            case _:
                pass
        return None

    def _add(self, entry: AddEntry) -> Difference | None:
        request = _make_request(entry)
        self._cache.hashes[entry.id] = _split(entry.hashes)
        if entry.tail:
            self._cache.tails[entry.id] = (request.max_cached_tokens, entry.tail)
        self._ids[next(self._numbers)] = entry.id
        self._time.time = entry.now
        self.core.add(request, entry.is_resent, entry.waited_s)
        is_refused = entry.id not in self.scheduler.requests
        if is_refused == entry.is_refused:
            return None
        return AdmissionDifference(self.num_steps, entry.now, entry.id, entry.is_refused)

    def _begin(self, entry: BeginEntry) -> PlanDifference | None:
        self._time.time = entry.now
        plan = self.core.begin_step()
        self.num_steps += plan is not None
        self._decoding = (self._decoding - set(entry.left)) | set(entry.joined)
        digest = b"" if plan is None else digest_plan(plan)
        if digest == entry.digest:
            return None
        recorded = self._summary(entry.chunks) if entry.digest else PlanSummary((), ())
        step = self.num_steps + (plan is None)
        return PlanDifference(step, entry.now, recorded, _summarize(plan))

    def _summary(self, chunks: Sequence[Chunk]) -> PlanSummary:
        def id_of(number: int) -> str:
            return self._ids.get(number, f"request number {number}")

        return PlanSummary(
            tuple(sorted(map(id_of, self._decoding))),
            tuple((id_of(one.number), one.start, one.num_tokens) for one in chunks),
        )

    def _end(self, entry: EndEntry) -> None:
        plan = self._results.plan
        if plan is None:
            raise RecordingError("a step ends that was not begun")
        for position, hashes in entry.hashes:
            known = self._cache.hashes[plan.scheduled[position].request_id]
            known += _split(hashes)
        odd = {one.position: one for one in entry.odd}
        outcomes = tuple(
            [
                _odd_outcome(odd[position]) if position in odd
                else _SAMPLE if item.has_sample
                else None
                for position, item in enumerate(plan.scheduled)
            ]
        )  # fmt: skip
        self._results.result = StepResult(
            plan.step_id,
            outcomes,
            entry.elapsed_s,
            entry.copy_s,
            {id: PromptScores(start, (_SCORE,) * length) for id, start, length in entry.scores},
            {id: Embedding(b"") for id in entry.embedded},
        )
        self._time.time = entry.now
        self.core.end_step()

    def _take_events(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Forked):
                self._ids[next(self._numbers)] = event.request_id
                self._cache.fork_hashes(self.scheduler.requests[event.request_id])
        for event in events:
            if isinstance(event, Finished | Refused):
                self._cache.hashes.pop(event.request_id, None)
                self._cache.tails.pop(event.request_id, None)
        self.on_events(events)


def find_difference(reader: RecordingReader, replay: ReplayedEngine) -> Difference | None:
    """Replay a recording up to the first difference."""
    for entry in reader.entries():
        if (difference := compare(replay, entry)) is not None:
            return difference
    return None


def compare(replay: ReplayedEngine, entry: Entry) -> Difference | None:
    """Repeat a call; return how its outcome differs, also if it fails."""
    try:
        return replay.apply(entry)
    except RecordingError:
        raise
    except Exception as error:  # a fault of the scheduler, or another release recorded the call
        step = replay.num_steps + isinstance(entry, BeginEntry)
        return ReplayFailure(step, replay.now, f"{type(error).__name__}: {error}")


def _make_request(entry: AddEntry) -> Request:
    params = SamplingParams(
        n=entry.n,
        max_tokens=entry.max_tokens,
        prompt_logprobs=0 if entry.has_prompt_logprobs else None,
        is_embedding=entry.is_embedding,
        stop_token_ids=(STOP_TOKEN,),
    )
    return Request(
        id=entry.id,
        token_ids=[TOKEN] * entry.num_tokens,
        params=params,
        seed=0,
        arrived_at=entry.arrived_at,
        priority=entry.priority,
        terms=entry.terms,
        index=entry.index,
        num_prompt_tokens=entry.num_prompt_tokens,
        num_scored=entry.num_scored,
    )


def _split(hashes: bytes) -> list[BlockHash]:
    """Return the hashes that are joined in an entry."""
    ends = range(HASH_BYTES, len(hashes) + 1, HASH_BYTES)
    return [BlockHash(hashes[end - HASH_BYTES : end]) for end in ends]


def _odd_outcome(odd: OddOutcome) -> Sample | Failure | None:
    if odd.num_tokens == FAILED_OUTCOME:
        return Failure("the request failed")
    if odd.num_tokens == 0:
        return None
    token_ids = [TOKEN] * odd.num_tokens
    if odd.stop_at:
        token_ids[odd.stop_at - 1] = STOP_TOKEN
    return Sample(tuple(token_ids))


def _summarize(plan: StepPlan | None) -> PlanSummary:
    items = () if plan is None else plan.scheduled
    decodes = [it.request_id for it in items if it.new is None and len(it.token_ids) == 1]
    chunks = [
        (it.request_id, it.start, len(it.token_ids))
        for it in items
        if it.new is not None or len(it.token_ids) > 1
    ]
    return PlanSummary(tuple(sorted(decodes)), tuple(chunks))
