"""Admission: whether a request can ever fit, and whether it fits now.

Pure decisions over plain values. This module allocates no block and changes no request; the
scheduler applies the decisions.
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
    """The request fits: allocate a table for `num_tokens` that starts with `match`."""

    match: PrefixMatch
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Wait:
    """The request does not fit now; the counts are what it lacks."""

    cause: WaitCause
    num_seqs: int
    num_blocks: int
    match: PrefixMatch
    num_quota_blocks: int = 0
    """Blocks by which the table would exceed the KV quota of the tenant."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """The request can never fit; the message has the numbers."""

    message: str
    param: str


@dataclass(frozen=True, slots=True)
class Room:
    """Sequences and blocks that are free for the next admission.

    `num_blocks` is negative if running requests have grown into the headroom: so many blocks must
    be freed before the next admission.
    """

    num_seqs: int
    num_blocks: int
    num_reserved_blocks: int = 0
    """Blocks of the tenant's KV quota that its running requests need first."""


@dataclass(frozen=True, slots=True)
class PeakDemand:
    """The most tokens and samples of a request, and the KV share of its tenant."""

    num_prompt_tokens: int
    max_tokens: int
    num_samples: int
    max_kv_share: float = 1.0


def demand_of(request: Request) -> PeakDemand:
    """Return the peak demand of a request."""
    params = request.params
    share = request.terms.max_kv_share
    return PeakDemand(request.num_prompt_tokens, params.max_tokens or 0, params.n, share)


def refuse_if_never_fits(
    demand: PeakDemand, capacity: Capacity, max_num_seqs: int
) -> Refuse | None:
    """Return a refusal if the request does not fit into an empty engine.

    The API process makes the same check before it sends a request, and answers 400 at once.
    """
    total = demand.num_prompt_tokens + demand.max_tokens
    if total > capacity.max_model_len:
        return Refuse(
            f"{demand.num_prompt_tokens} prompt tokens and {demand.max_tokens} output tokens "
            f"exceed the context of {capacity.max_model_len} tokens",
            "max_tokens",
        )
    # The last output token is not computed, so it needs no room in the cache.
    num_blocks = -(-max(demand.num_prompt_tokens, total - 1) // capacity.block_size)
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
            f"n={demand.num_samples} samples run together; max_num_seqs is {max_num_seqs}", "n"
        )
    return None


def max_tokens_for(num_prompt_tokens: int, capacity: Capacity, max_kv_share: float = 1.0) -> int:
    """Return the longest output that fits behind a prompt within the KV quota.

    Raise NeverFitsError if not even one output token fits.
    """
    in_cache = kv_quota_blocks(max_kv_share, capacity.num_blocks) * capacity.block_size + 1
    room = min(capacity.max_model_len, in_cache) - num_prompt_tokens
    if room < 1:
        is_quota = max_kv_share < 1.0 and in_cache < capacity.max_model_len
        holder = "this tenant may" if is_quota else "this server can"
        raise NeverFitsError(
            f"the prompt has {num_prompt_tokens} tokens; with at least one output token it "
            f"exceeds the {min(capacity.max_model_len, in_cache)} tokens {holder} hold",
            "prompt",
        )
    return room


def try_admit(
    request: Request, match: PrefixMatch, kv: KVCache, room: Room, is_immune: bool
) -> Admit | Wait:
    """Return whether a request fits now, given its matched blocks.

    The table has room for all known tokens, so that a prefill never stops for lack of blocks. The
    table of an immune request has room for its whole output, because the request cannot be
    preempted again.
    """
    num_tokens = request.num_tokens
    if is_immune:
        num_tokens = max(num_tokens, request.max_num_tokens - 1)
    num_blocks = max(0, kv.num_blocks_needed(match, num_tokens) - room.num_blocks)
    num_seqs = max(0, request.params.n - room.num_seqs)
    num_quota_blocks = num_over_kv_quota(
        request, kv, match, num_tokens + room.num_reserved_blocks * kv.block_size
    )
    # The KV quota comes first: a tenant at its quota is suspended and blocks no other.
    if num_quota_blocks > 0:
        return Wait(WaitCause.KV_QUOTA, num_seqs, num_blocks, match, num_quota_blocks)
    if num_seqs > 0:
        return Wait(WaitCause.RUNNING_LIMIT, num_seqs, num_blocks, match)
    if num_blocks > 0:
        return Wait(WaitCause.KV_BLOCKS, 0, num_blocks, match)
    return Admit(match, num_tokens)


def num_over_kv_quota(request: Request, kv: KVCache, match: PrefixMatch, num_tokens: int) -> int:
    """Return by how many blocks this table would exceed the KV quota of the tenant."""
    share = request.terms.max_kv_share
    if share >= 1.0:
        return 0
    tenant = request.terms.tenant
    num_tenant_blocks = len(kv.blocks_by_tenant.get(tenant, ())) + kv.num_new_blocks(
        tenant, match, num_tokens
    )
    return max(0, num_tenant_blocks - kv.max_quota_blocks(share))
