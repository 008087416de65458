"""The Executor port: the only interface between scheduling and computing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from headway.core.plan import StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class Capacity:
    """Sizes of an executor's KV cache, context and offload store."""

    num_blocks: int
    block_size: int
    max_model_len: int
    num_slots: int = 0
    """Slots of the offload store, one block each; 0 without a store."""
    block_copy_s: float = 0.0
    """Seconds to copy one block to the offload store or back, measured at startup."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """Names a submitted step."""

    step_id: int


class Executor(Protocol):
    """Computes step plans. At most one step is in flight.

    `submit` and `collect` are separate so that steps can overlap later.
    """

    def capacity(self) -> Capacity: ...

    def submit(self, plan: StepPlan) -> Ticket: ...

    def collect(self, ticket: Ticket) -> StepResult: ...

    def close(self) -> None: ...


class HashedBlock(NamedTuple):
    """A block, and the hash of the tokens that it holds, in a cache group."""

    block_id: int
    block_hash: bytes
    group: str
    num_tokens: int
    """Fewer than a block has places if it is the tail of a request."""


class BlockRecorder(Protocol):
    """Records blocks where the next engine process finds them."""

    def record(self, blocks: Sequence[HashedBlock]) -> None:
        """Record blocks whose tokens are computed; their former records are void."""
        ...

    def restore(self) -> list[HashedBlock]:
        """Return the blocks that an earlier process recorded, whatever they hold now."""
        ...

    def find_intact(self, blocks: Sequence[HashedBlock]) -> list[HashedBlock]:
        """Return the restored blocks that hold what was recorded; call it before their use."""
        ...
