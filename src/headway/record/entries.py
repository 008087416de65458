"""What a recording of an engine holds, as msgspec structs, and the digest of a plan.

A file is MAGIC, a block with a header, and blocks with lists of entries. Times are those of the
engine's clock. No entry has a token or a text; requests and tenants go by their ids and names.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple

import msgspec

from headway.config import SchedulerConfig
from headway.core.executor import Capacity
from headway.core.plan import StepPlan
from headway.core.request import FinishReason
from headway.core.terms import NO_TERMS, Terms

FORMAT = 1
ENGINE = "engine"
"""Kind of the recordings below; headers of older releases have no kind."""
DIGEST_BYTES = 8
HASH_BYTES = 8
SUFFIX = ".rec"
GOES_ON = "goes on in the next file"
CLOSED = "the engine ended"
FAILED_OUTCOME = -1
"""`OddOutcome.num_tokens` of a request that failed."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What was recorded, and by what; at the start of each file."""

    format: int = FORMAT
    kind: str = ENGINE
    recording: str
    """Name of the recording; its files have the same."""
    part: int = 0
    """Number of the file in its recording."""
    headway: str
    platform: str
    """Python and C library: they compute powers and logarithms."""
    clock_began_at: float | None = None
    """Unix time at which the process's clock showed 0; None in recordings of older releases."""


class RecordingHeader(Header, frozen=True, kw_only=True):
    """What the scheduler of an engine was made with."""

    model: str
    numerics: str
    scheduler: SchedulerConfig
    capacity: Capacity
    enable_prefix_caching: bool


class RestoredBlock(NamedTuple):
    """A KV block of an earlier process, with the salted hash of its tokens."""

    block_id: int
    block_hash: bytes
    group: str
    num_tokens: int


class RestoredEntry(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The engine began with these KV blocks of an earlier process."""

    blocks: list[RestoredBlock]


class DamagedEntry(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Restored blocks that the next call finds damaged."""

    block_ids: list[int]


class AddEntry(msgspec.Struct, array_like=True, tag=3, kw_only=True):
    """A request was added, or refused."""

    now: float
    id: str
    num_tokens: int
    num_prompt_tokens: int
    max_tokens: int
    arrived_at: float
    is_refused: bool
    hashes: bytes = b""
    """Salted hashes of the full blocks, HASH_BYTES each."""
    terms: Terms = NO_TERMS
    """Without the cache salt, which is a text of the client; the hashes depend on it."""
    priority: int = 0
    n: int = 1
    index: int = 0
    num_scored: int = 1
    has_prompt_logprobs: bool = False
    is_embedding: bool = False
    is_resent: bool = False
    waited_s: float | None = None
    tail: bytes = b""
    """Salted hash of the tokens after the full blocks that may come from the cache.

    Only in an engine that began with last blocks of requests; only those are found by it.
    """


class AbortEntry(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """A live request was aborted."""

    now: float
    id: str
    reason: FinishReason


class Chunk(NamedTuple):
    """Prompt tokens of a request in a plan."""

    number: int
    """The request, counted in the order of additions and forks."""
    start: int
    num_tokens: int


class BeginEntry(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """A step was planned; without a digest, nothing was scheduled."""

    now: float
    digest: bytes = b""
    left: list[int] = []
    """Requests that decoded in the plan before and do not in this one, by number."""
    joined: list[int] = []
    """Requests that decode in this plan and did not in the one before, by number."""
    chunks: list[Chunk] = []


class OddOutcome(NamedTuple):
    """An outcome other than one token that ends nothing, or none where none was asked for."""

    position: int
    num_tokens: int
    stop_at: int = 0
    """How many of the tokens were taken, if the last of these is a stop token."""


class NewHashes(NamedTuple):
    """Salted hashes of the blocks that the sample of a request completes."""

    position: int
    hashes: bytes


class ScoredRange(NamedTuple):
    """Prompt tokens of a request that the step scored."""

    request_id: str
    start: int
    num_tokens: int


class EndEntry(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """The result of the step that was planned last."""

    now: float
    elapsed_s: float
    copy_s: float = 0.0
    odd: list[OddOutcome] = []
    hashes: list[NewHashes] = []
    scores: list[ScoredRange] = []
    embedded: list[str] = []
    """Requests that got an embedding."""


class ClosedEntry(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """The last entry of a file, and why it is."""

    reason: str


Entry = RestoredEntry | DamagedEntry | AddEntry | AbortEntry | BeginEntry | EndEntry

encode = msgspec.msgpack.Encoder().encode
decode_entries = msgspec.msgpack.Decoder(list[Entry | ClosedEntry]).decode
decode_header = msgspec.msgpack.Decoder(RecordingHeader).decode


def digest_plan(plan: StepPlan) -> bytes:
    """Return a digest of all that a plan says but its tokens; the plan schedules something."""
    # By column: that takes a third of the time of a tuple per request.
    ids, starts, token_ids, block_ids, has_sample, new_requests = zip(*plan.scheduled, strict=True)
    new = [
        (position, one.index, one.num_prompt_tokens, len(one.token_ids), one.num_scored)
        for position, one in enumerate(new_requests)
        if one is not None
    ]
    content = (
        (plan.step_id, plan.num_tokens, plan.num_scored_rows),
        (ids, starts, list(map(len, token_ids)), block_ids, has_sample, new),
        (plan.copies, plan.released_ids, plan.saves, plan.loads),
    )
    return blake2b(encode(content), digest_size=DIGEST_BYTES).digest()
