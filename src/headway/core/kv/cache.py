"""Which blocks each request holds: its block table, from prefix match to release.

Owns the block tables and the pool, and knows which tenant holds which blocks. A table only grows;
its full blocks may be shared, its tail block never is. Times are passed in, so that what was held
is integrated where it changes and nowhere else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from headway.core.kv.pool import BlockPool
from headway.core.kv.prefix import extend_chain
from headway.core.plan import BlockCopy
from headway.core.request import Request


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Blocks that already hold the start of a request's tokens."""

    block_ids: tuple[int, ...]
    num_tokens: int


NO_MATCH = PrefixMatch((), 0)


def kv_quota_blocks(max_kv_share: float, num_blocks: int) -> int:
    """How many of the blocks a tenant with this share may hold: one at least."""
    return num_blocks if max_kv_share >= 1.0 else max(1, int(max_kv_share * num_blocks))


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks of one request, in order of position."""

    block_ids: list[int]
    num_sent: int = 0
    """How many of them the executor has been told of."""
    num_published: int = 0
    """How many of them have been offered to the prefix index."""
    block_s: float = 0.0
    """Blocks held times seconds, up to `accrued_at`."""
    accrued_at: float = 0.0

    def accrue(self, now: float) -> float:
        """Add what was held since, and say how much; asked before the number of blocks changes."""
        block_s = len(self.block_ids) * (now - self.accrued_at)
        self.block_s += block_s
        self.accrued_at = now
        return block_s

    def take_unsent(self) -> tuple[int, ...]:
        """The blocks the executor has not been told of; from now on it has."""
        unsent = tuple(self.block_ids[self.num_sent :])
        self.num_sent = len(self.block_ids)
        return unsent


class KVCache:
    """Maps requests to blocks: match, allocate, extend, fork, publish, free."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks)
        self.tables: dict[str, BlockTable] = {}
        self.blocks_by_tenant: dict[str, dict[int, int]] = {}
        """Tenant -> block -> in how many tables of the tenant's requests it is."""
        self.kept_blocks: dict[str, list[int]] = {}
        """Preempted request -> the blocks it keeps, from the start of its former table.
        headway.core.kv.offload shortens these lists and frees the blocks it removes."""
        self._block_s: dict[str, float] = {}
        """What requests without a table held in tables they had before."""
        self._copies: list[BlockCopy] = []

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match(self, request: Request) -> PrefixMatch:
        """The longest indexed prefix of the request's tokens. It takes nothing.

        The last token is never matched: a step must compute something to sample from.
        """
        if not self.enable_prefix_caching:
            return NO_MATCH
        self._hash_full_blocks(request)
        usable = (request.num_tokens - 1) // self.block_size
        block_ids: list[int] = []
        for block_hash in request.block_hashes[:usable]:
            block_id = self.pool.find(block_hash)
            if block_id is None:
                break
            block_ids.append(block_id)
        if not block_ids:
            return NO_MATCH
        return PrefixMatch(tuple(block_ids), len(block_ids) * self.block_size)

    def has_cached_prefix(self, request: Request) -> bool:
        """Would `match` find anything?"""
        if not self.enable_prefix_caching or request.num_tokens <= self.block_size:
            return False
        self._hash_full_blocks(request)
        return self.pool.find(request.block_hashes[0]) is not None

    def num_blocks_needed(self, match: PrefixMatch, num_tokens: int) -> int:
        """Free blocks that holding `num_tokens` would use up, given what matched.

        A matched block without an owner counts as free now and stops being so when shared.
        """
        fresh = self.num_blocks_for(num_tokens) - len(match.block_ids)
        return max(0, fresh) + self.pool.num_unowned(match.block_ids)

    def allocate(
        self, request: Request, match: PrefixMatch, num_tokens: int, now: float = 0.0
    ) -> None:
        """Give the request a table with room for `num_tokens`, starting with what matched."""
        # Share before allocating, or the allocation could evict the very blocks that matched.
        self.pool.add_references(match.block_ids)
        fresh = self.num_blocks_for(num_tokens) - len(match.block_ids)
        block_ids = [*match.block_ids, *self.pool.allocate(max(0, fresh))]
        num_published = match.num_tokens // self.block_size
        self._attach_table(request, BlockTable(block_ids, num_published=num_published), now)

    def _attach_table(self, request: Request, table: BlockTable, now: float) -> None:
        table.block_s = self._block_s.pop(request.id, 0.0)
        table.accrued_at = now
        self.tables[request.id] = table
        tenant_blocks = self.blocks_by_tenant.setdefault(request.terms.tenant, {})
        for block_id in table.block_ids:
            tenant_blocks[block_id] = tenant_blocks.get(block_id, 0) + 1

    def num_missing(self, request: Request) -> int:
        """Blocks that a running request's tokens need beyond those of its table."""
        num_blocks = -(-len(request.token_ids) // self.block_size)
        return max(0, num_blocks - len(self.tables[request.id].block_ids))

    def extend(self, request: Request, now: float = 0.0) -> float:
        """One more block at the end of a request's table; block-seconds held since it last
        changed."""
        table = self.tables[request.id]
        block_s = table.accrue(now)
        (block_id,) = self.pool.allocate(1)
        table.block_ids.append(block_id)
        self.blocks_by_tenant[request.terms.tenant][block_id] = 1
        return block_s

    def fork(self, parent: Request, child: Request, now: float = 0.0) -> None:
        """Give `child` the parent's prompt, all but its last token, as its own table.

        The blocks the child will never write are shared; the one it writes first is copied.
        The caller has checked that one block is free. The copy goes into the next plan, before
        anything can be written into the block it is made from.
        """
        num_tokens = parent.num_prompt_tokens - 1
        num_shared, num_copied = divmod(num_tokens, self.block_size)
        parent_ids = self.tables[parent.id].block_ids
        shared = parent_ids[:num_shared]
        self.pool.add_references(shared)
        tail = self.pool.allocate(1)
        self._attach_table(child, BlockTable([*shared, *tail], num_published=num_shared), now)
        child.num_computed = num_tokens
        child.block_hashes = parent.block_hashes[:num_shared]
        if num_copied:
            self._copies.append(BlockCopy(parent_ids[num_shared], tail[0]))

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """The copies to make before the next step."""
        copies = tuple(self._copies)
        self._copies.clear()
        return copies

    def publish(self, request: Request) -> None:
        """Index the blocks that the request's computed tokens have filled."""
        if not self.enable_prefix_caching:
            return
        table = self.tables[request.id]
        num_full = request.num_computed // self.block_size
        if num_full <= table.num_published:
            return
        self._hash_full_blocks(request)
        group = request.terms.cache_group
        for position in range(table.num_published, num_full):
            self.pool.publish(table.block_ids[position], request.block_hashes[position], group)
        table.num_published = num_full

    def free(self, request: Request, now: float = 0.0) -> float:
        """Let go of a request's blocks; block-seconds held since its table last changed."""
        block_s = self.detach(request, now)
        self.release(request.id)
        return block_s

    def detach(self, request: Request, now: float = 0.0) -> float:
        """Move a request's blocks from its table to `kept_blocks`; return its block-seconds.

        Kept blocks stay referenced, but do not count toward the tenant's KV quota. The
        block-seconds are those since the table last changed.
        """
        table = self.tables.pop(request.id)
        block_s = table.accrue(now)
        self._block_s[request.id] = table.block_s
        self.kept_blocks[request.id] = table.block_ids
        tenant = request.terms.tenant
        tenant_blocks = self.blocks_by_tenant[tenant]
        for block_id in table.block_ids:
            if tenant_blocks[block_id] == 1:
                del tenant_blocks[block_id]
            else:
                tenant_blocks[block_id] -= 1
        if not tenant_blocks:
            del self.blocks_by_tenant[tenant]
        return block_s

    def release(self, request_id: str) -> None:
        """Free the blocks a request keeps."""
        self.pool.free(self.kept_blocks.pop(request_id))

    def take_block_s(self, request: Request) -> float:
        """Blocks times seconds, over all tables it has had; asked once, when it is gone."""
        return self._block_s.pop(request.id, 0.0)

    def is_at_kv_quota(self, request: Request) -> bool:
        """Does its tenant hold all the blocks it may?"""
        share = request.terms.max_kv_share
        if share >= 1.0:
            return False
        num_tenant_blocks = len(self.blocks_by_tenant.get(request.terms.tenant, ()))
        return num_tenant_blocks >= self.max_quota_blocks(share)

    def max_quota_blocks(self, max_kv_share: float) -> int:
        """How many blocks a tenant with this share may hold."""
        return kv_quota_blocks(max_kv_share, self.pool.num_blocks)

    def num_new_blocks(self, tenant: str, match: PrefixMatch, num_tokens: int) -> int:
        """Blocks the tenant would hold in addition, if one of its requests got this table."""
        tenant_blocks = self.blocks_by_tenant.get(tenant, {})
        num_shared = sum([block_id in tenant_blocks for block_id in match.block_ids])
        return max(self.num_blocks_for(num_tokens), len(match.block_ids)) - num_shared

    def num_released_blocks(
        self, requests: Sequence[Request], pinned: frozenset[int] = frozenset()
    ) -> int:
        """How many blocks fewer their tenant would hold without these requests of it."""
        if not requests:
            return 0
        tenant_blocks = self.blocks_by_tenant[requests[0].terms.tenant]
        release_counts = Counter(
            id for request in requests for id in self.tables[request.id].block_ids
        )
        return sum(
            [
                tenant_blocks[id] == times and id not in pinned
                for id, times in release_counts.items()
            ]
        )

    def num_freeable(
        self, requests: Sequence[Request], pinned: frozenset[int] = frozenset()
    ) -> int:
        """Return how many blocks freeing all of these requests' blocks makes usable.

        The requests may run or be preempted; `pinned` blocks do not count.
        """
        lists = (self._block_ids_of(request.id) for request in requests)
        return self.pool.num_freeable(id for ids in lists for id in ids if id not in pinned)

    def _block_ids_of(self, request_id: str) -> Sequence[int]:
        table = self.tables.get(request_id)
        return self.kept_blocks[request_id] if table is None else table.block_ids

    def _hash_full_blocks(self, request: Request) -> None:
        salt = request.terms.cache_group
        extend_chain(request.block_hashes, request.token_ids, self.block_size, salt)

    def check(self, running: dict[str, Request]) -> None:
        """Every table belongs to a running request and is long enough for what it computed."""
        if self.tables.keys() != running.keys():
            raise AssertionError(f"tables {set(self.tables)} but running {set(running)}")
        owners: dict[int, int] = {}
        tenant_blocks: dict[str, dict[int, int]] = {}
        for request_id, table in self.tables.items():
            if len(set(table.block_ids)) != len(table.block_ids):
                raise AssertionError(f"{request_id} holds a block twice")
            if len(table.block_ids) * self.block_size < running[request_id].num_computed:
                raise AssertionError(f"{request_id} computed more than its table holds")
            own = tenant_blocks.setdefault(running[request_id].terms.tenant, {})
            for block_id in table.block_ids:
                owners[block_id] = owners.get(block_id, 0) + 1
                own[block_id] = own.get(block_id, 0) + 1
        for block_ids in self.kept_blocks.values():
            for block_id in block_ids:
                owners[block_id] = owners.get(block_id, 0) + 1
        if tenant_blocks != self.blocks_by_tenant:
            raise AssertionError(
                f"tenants hold {tenant_blocks}, by the books {self.blocks_by_tenant}"
            )
        self.pool.check(owners)
