"""May a request come in: could it ever fit, and does it fit now.

Pure decisions over plain values. Nothing here takes a block or changes a request; the scheduler
applies what is decided.
"""

from __future__ import annotations

from dataclasses import dataclass

from headway.core.causes import WaitCause
from headway.core.executor import Capacity
from headway.core.kv.cache import KVCache, PrefixMatch, kv_quota_blocks
from headway.core.request import Request
from headway.errors import NeverFitsError


@dataclass(frozen=True, slots=True)
class Admit:
    """It fits: give it a table for `num_tokens`, starting with what matched."""

    match: PrefixMatch
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Wait:
    """It does not fit now: so many more seats, so many more blocks, and so many more blocks of
    what its tenant may hold, are needed."""

    cause: WaitCause
    num_seqs: int
    num_blocks: int
    match: PrefixMatch
    num_quota_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Refuse:
    """It can never fit; the message has the numbers."""

    message: str
    param: str


@dataclass(frozen=True, slots=True)
class Room:
    """What is free for the next admission. Fewer than zero blocks: running requests have grown
    into the watermark, and that much must come back before anyone is admitted."""

    num_seqs: int
    num_blocks: int
    num_reserved_blocks: int = 0
    """Blocks of what the request's tenant may hold that running ones of it need first."""


@dataclass(frozen=True, slots=True)
class PeakDemand:
    """The most a request can come to need, and the share of the blocks its tenant may hold."""

    num_prompt_tokens: int
    max_tokens: int
    num_samples: int
    max_kv_share: float = 1.0


def demand_of(request: Request) -> PeakDemand:
    """The demand of a request whose params are resolved."""
    params = request.params
    share = request.terms.max_kv_share
    return PeakDemand(request.num_prompt_tokens, params.max_tokens or 0, params.n, share)


def refuse_if_never_fits(
    demand: PeakDemand, capacity: Capacity, max_num_seqs: int
) -> Refuse | None:
    """Compare a request with an empty engine. The API process asks the same question before
    it sends a request, so that the answer is an immediate 400 and not a wait without end."""
    total = demand.num_prompt_tokens + demand.max_tokens
    if total > capacity.max_model_len:
        return Refuse(
            f"{demand.num_prompt_tokens} prompt tokens and {demand.max_tokens} output tokens "
            f"exceed the context of {capacity.max_model_len} tokens",
            "max_tokens",
        )
    # The last output token is never fed back, so it needs no room in the cache.
    num_blocks = -(-(total - 1) // capacity.block_size)
    if num_blocks > capacity.num_blocks:
        return Refuse(
            f"{demand.num_prompt_tokens} prompt tokens and {demand.max_tokens} output tokens "
            f"need {num_blocks} KV blocks of {capacity.block_size} tokens; "
            f"the whole cache has {capacity.num_blocks}",
            "max_tokens",
        )
    max_blocks = kv_quota_blocks(demand.max_kv_share, capacity.num_blocks)
    if num_blocks > max_blocks:
        return Refuse(
            f"{demand.num_prompt_tokens} prompt tokens and {demand.max_tokens} output tokens "
            f"need {num_blocks} KV blocks of {capacity.block_size} tokens; "
            f"this tenant may hold {max_blocks}",
            "max_tokens",
        )
    if demand.num_samples > max_num_seqs:
        return Refuse(
            f"n={demand.num_samples} samples run together; at most {max_num_seqs} can", "n"
        )
    return None


def max_tokens_for(num_prompt_tokens: int, capacity: Capacity, max_kv_share: float = 1.0) -> int:
    """The longest output a prompt leaves room for, of what its tenant may hold; a prompt that
    leaves none is refused."""
    in_cache = kv_quota_blocks(max_kv_share, capacity.num_blocks) * capacity.block_size + 1
    room = min(capacity.max_model_len, in_cache) - num_prompt_tokens
    if room < 1:
        is_for_share = max_kv_share < 1.0 and in_cache < capacity.max_model_len
        whose = "this tenant may" if is_for_share else "this server can"
        raise NeverFitsError(
            f"the prompt has {num_prompt_tokens} tokens; with at least one output token it "
            f"exceeds the {min(capacity.max_model_len, in_cache)} tokens {whose} hold",
            "prompt",
        )
    return room


def try_admit(
    request: Request, match: PrefixMatch, kv: KVCache, room: Room, is_immune: bool
) -> Admit | Wait:
    """Does it fit now, beginning with what matched? Room is made for every known token at once,
    so that a prefill never stops half-way for want of blocks. An immune request, which may not be
    preempted again, gets room for its whole output, so that it never needs to wait for anyone
    either."""
    num_tokens = request.max_num_tokens - 1 if is_immune else request.num_tokens
    num_blocks = max(0, kv.num_blocks_needed(match, num_tokens) - room.num_blocks)
    num_seqs = max(0, request.params.n - room.num_seqs)
    num_quota_blocks = num_over_kv_quota(
        request, kv, match, num_tokens + room.num_reserved_blocks * kv.block_size
    )
    # The KV quota first: a tenant at its quota is suspended, and must not block others.
    if num_quota_blocks > 0:
        return Wait(WaitCause.KV_QUOTA, num_seqs, num_blocks, match, num_quota_blocks)
    if num_seqs > 0:
        return Wait(WaitCause.RUNNING_LIMIT, num_seqs, num_blocks, match)
    if num_blocks > 0:
        return Wait(WaitCause.KV_BLOCKS, 0, num_blocks, match)
    return Admit(match, num_tokens)


def num_over_kv_quota(request: Request, kv: KVCache, match: PrefixMatch, num_tokens: int) -> int:
    """By how many blocks its tenant would exceed its share if the request got this table."""
    share = request.terms.max_kv_share
    if share >= 1.0:
        return 0
    tenant = request.terms.tenant
    num_tenant_blocks = len(kv.blocks_by_tenant.get(tenant, ())) + kv.num_new_blocks(
        tenant, match, num_tokens
    )
    return max(0, num_tenant_blocks - kv.max_quota_blocks(share))
