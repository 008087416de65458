"""The KV cache: block tables of requests, from prefix match to release.

Owns the block tables and the pool, and counts blocks per tenant. A table only grows. Its full
blocks may be shared, its tail block never is. Block-seconds are added up whenever a table changes,
so methods that change a table take the time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest

from headway.core.executor import BlockRecorder, HashedBlock
from headway.core.kv.pool import BlockPool
from headway.core.kv.prefix import (
    BlockHash,
    RunningHash,
    chain_start,
    extend_chain,
    hash_token,
    hash_tokens,
)
from headway.core.owners import BlockOwners
from headway.core.plan import BlockCopy, StepPlan, make_tuple
from headway.core.request import Request


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Blocks that hold a prefix of the tokens of a request."""

    block_ids: tuple[int, ...]
    num_tokens: int


NO_MATCH = PrefixMatch((), 0)


def kv_quota_blocks(max_kv_share: float, num_blocks: int) -> int:
    """Return the KV quota of a tenant in blocks, at least one."""
    return num_blocks if max_kv_share >= 1.0 else max(1, int(max_kv_share * num_blocks))


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks of one request, in order of position."""

    block_ids: list[int]
    num_sent: int = 0
    """Blocks at the start of the table that were sent to the executor."""
    num_published: int = 0
    """Blocks at the start of the table that were published to the prefix index."""
    block_s: float = 0.0
    """Blocks held times seconds, up to `accrued_at`."""
    accrued_at: float = 0.0
    tail_end: int = 0
    tail_hash: RunningHash | None = None
    """Hash of the tokens of the last block, up to `tail_end`."""

    def accrue(self, now: float) -> float:
        """Add the block-seconds since `accrued_at` and return them.

        Called before the number of blocks changes.
        """
        block_s = len(self.block_ids) * (now - self.accrued_at)
        self.block_s += block_s
        self.accrued_at = now
        return block_s

    def take_unsent(self) -> tuple[int, ...]:
        """Return the blocks not sent to the executor and mark them as sent."""
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
        """Tenant -> block id -> number of the tenant's tables that contain the block."""
        self.kept_blocks: dict[str, list[int]] = {}
        """Preempted request -> the blocks it keeps, from the start of its former table.

        headway.core.kv.offload shortens these lists and frees the removed blocks.
        """
        self._block_s: dict[str, float] = {}
        """Preempted request -> block-seconds of its former tables."""
        self._copies: list[BlockCopy] = []
        self._recorder: BlockRecorder | None = None
        self._published: list[HashedBlock] = []
        """Blocks to record: published since the last record."""
        self._restored: dict[int, HashedBlock] = {}
        """Blocks of an earlier engine process that were not used yet; each may be damaged."""
        self._has_tails = False
        """Whether last blocks of requests were among them."""

    def block_owners(self, max_tenants: int) -> BlockOwners:
        """Return the blocks of the tenants with the most, and those without a table."""
        tenants = ((name, len(blocks)) for name, blocks in self.blocks_by_tenant.items())
        most = nlargest(max_tenants, tenants, key=lambda one: one[1])
        num_kept = sum(len(blocks) for blocks in self.kept_blocks.values())
        return BlockOwners(self.pool.num_used, dict(most), num_kept, self.pool.num_cached)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the blocks that `num_tokens` tokens occupy."""
        return -(-num_tokens // self.block_size)

    def match(self, request: Request) -> PrefixMatch:
        """Return the longest cached prefix of a request, without taking its blocks.

        No token is matched that a step must compute; see `Request.max_cached_tokens`.
        """
        if not self.enable_prefix_caching:
            return NO_MATCH
        self._hash_full_blocks(request)
        max_blocks = request.max_cached_tokens // self.block_size
        block_ids: list[int] = []
        for block_hash in request.block_hashes[:max_blocks]:
            block_id = self.pool.find(block_hash)
            if block_id is None:
                break
            block_ids.append(block_id)
        if self._restored or self._has_tails:
            return self._match_restored(request, block_ids, max_blocks)
        if not block_ids:
            return NO_MATCH
        return PrefixMatch(tuple(block_ids), len(block_ids) * self.block_size)

    def has_cached_prefix(self, request: Request) -> bool:
        """Return whether `match` finds at least one block."""
        if not self.enable_prefix_caching or request.max_cached_tokens < self.block_size:
            return False
        self._hash_full_blocks(request)
        return self.pool.find(request.block_hashes[0]) is not None

    def num_blocks_needed(self, match: PrefixMatch, num_tokens: int) -> int:
        """Return the free blocks that a table for `num_tokens` uses, after `match`.

        A matched block without an owner is free now and no longer free once it is shared.
        """
        num_new = self.num_blocks_for(num_tokens) - len(match.block_ids)
        return max(0, num_new) + self.pool.num_unowned(match.block_ids)

    def allocate(
        self, request: Request, match: PrefixMatch, num_tokens: int, now: float = 0.0
    ) -> None:
        """Allocate a table for `num_tokens` tokens that starts with the matched blocks."""
        # Share before allocating: the allocation could evict the matched blocks.
        self.pool.add_references(match.block_ids)
        if match.num_tokens % self.block_size:
            self.pool.withdraw(match.block_ids[-1])
        num_new = self.num_blocks_for(num_tokens) - len(match.block_ids)
        block_ids = [*match.block_ids, *self._allocate(max(0, num_new))]
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
        """Return the blocks that the table of a running request lacks."""
        # num_blocks_for without its calls: for every request that grew, in every step
        num_blocks = -(-len(request.token_ids) // self.block_size)
        return max(0, num_blocks - len(self.tables[request.id].block_ids))

    def extend(self, request: Request, now: float = 0.0) -> float:
        """Append a block to a table; return the block-seconds since its last change."""
        table = self.tables[request.id]
        block_s = table.accrue(now)
        (block_id,) = self._allocate(1)
        table.block_ids.append(block_id)
        self.blocks_by_tenant[request.terms.tenant][block_id] = 1
        return block_s

    def fork(self, parent: Request, child: Request, now: float = 0.0) -> None:
        """Give `child` a table with the prompt of `parent`, except its last token.

        Blocks that the child never writes are shared; the first block it writes is copied. The
        caller has checked that one block is free. The next plan makes the copy before any write
        into the source block.
        """
        num_tokens = parent.num_prompt_tokens - 1
        num_shared, num_copied = divmod(num_tokens, self.block_size)
        parent_ids = self.tables[parent.id].block_ids
        shared_ids = parent_ids[:num_shared]
        self.pool.add_references(shared_ids)
        (tail_id,) = self._allocate(1)
        self._attach_table(child, BlockTable([*shared_ids, tail_id], num_published=num_shared), now)
        child.num_computed = num_tokens
        child.block_hashes = parent.block_hashes[:num_shared]
        if num_copied:
            self._copies.append(BlockCopy(parent_ids[num_shared], tail_id))

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """Return and clear the copies of the next plan."""
        copies = tuple(self._copies)
        self._copies.clear()
        return copies

    def publish(self, request: Request) -> bool:
        """Add the full blocks of a request to the prefix index; return whether any is new."""
        if not self.enable_prefix_caching:
            return False
        table = self.tables[request.id]
        num_full = request.num_computed // self.block_size
        if num_full <= table.num_published:
            return False
        self._hash_full_blocks(request)
        group = request.terms.cache_group
        for position in range(table.num_published, num_full):
            block_id, block_hash = table.block_ids[position], request.block_hashes[position]
            is_new = self.pool.publish(block_id, block_hash, group)
            if is_new and self._recorder is not None:
                self._published.append(HashedBlock(block_id, block_hash, group, self.block_size))
        table.num_published = num_full
        return True

    # ------------------------------------------------- blocks that outlive the process

    def restore(self, recorder: BlockRecorder) -> None:
        """Begin with the blocks of an earlier engine process; have `take_records` return blocks."""
        if not self.enable_prefix_caching:
            return
        blocks = recorder.restore()
        self.pool.restore(blocks)
        self._restored = {one.block_id: one for one in blocks if self.pool.is_cached(one.block_id)}
        self._has_tails = any(one.num_tokens < self.block_size for one in blocks)
        self._recorder = recorder

    def _match_restored(
        self, request: Request, block_ids: list[int], max_blocks: int
    ) -> PrefixMatch:
        """Add the tail of a request to its full blocks, and leave out what is damaged."""
        end = request.max_cached_tokens
        if len(block_ids) == max_blocks and end % self.block_size:
            tail_id = self.pool.find(BlockHash(self._hash_tail(request, end).digest()))
            block_ids = block_ids if tail_id is None else [*block_ids, tail_id]
        unused = [self._restored.pop(one) for one in block_ids if one in self._restored]
        if unused and self._recorder is not None:
            intact = {block.block_id for block in self._recorder.find_intact(unused)}
            damaged = [block.block_id for block in unused if block.block_id not in intact]
            for block_id in damaged:
                self.pool.discard(block_id)
            if damaged:
                block_ids = block_ids[: block_ids.index(damaged[0])]
        num_tokens = min(len(block_ids) * self.block_size, end)
        return PrefixMatch(tuple(block_ids), num_tokens) if block_ids else NO_MATCH

    def _allocate(self, count: int) -> list[int]:
        block_ids = self.pool.allocate(count)
        if self._restored:
            for block_id in block_ids:
                self._restored.pop(block_id, None)
        return block_ids

    def take_records(self, plan: StepPlan, requests: Mapping[str, Request]) -> list[HashedBlock]:
        """Return the blocks to record after a step: published blocks, and tails that it wrote."""
        if self._recorder is None:
            return []
        blocks, self._published = self._published, []
        block_size = self.block_size
        for item in plan.scheduled:
            table = self.tables.get(item.request_id)
            if table is None:  # finished or preempted
                continue
            request = requests[item.request_id]
            end = request.num_computed
            num_full, num_tokens = divmod(end, block_size)
            if num_tokens == 0:
                continue
            tail_hash = table.tail_hash
            if tail_hash is not None and table.tail_end == end - 1 and num_tokens > 1:
                hash_token(tail_hash, request.token_ids[end - 1])
            else:
                tail_hash = table.tail_hash = self._hash_tail(request, end)
            table.tail_end = end
            group = request.terms.cache_group
            fields = (table.block_ids[num_full], tail_hash.digest(), group, num_tokens)
            blocks.append(make_tuple(HashedBlock, fields))
        return blocks

    def _hash_tail(self, request: Request, end: int) -> RunningHash:
        """Return the hash of the tokens before `end` in the block that `end` is in."""
        self._hash_full_blocks(request)
        num_full = end // self.block_size
        hashes, salt = request.block_hashes, request.terms.prefix_salt
        parent = hashes[num_full - 1] if num_full else chain_start(salt)
        return hash_tokens(parent, request.token_ids[num_full * self.block_size : end])

    # ------------------------------------------------------------------ freeing

    def free(self, request: Request, now: float = 0.0) -> float:
        """Free the blocks of a request; return the block-seconds since the last change."""
        block_s = self.detach(request, now)
        self.release(request.id)
        return block_s

    def detach(self, request: Request, now: float = 0.0) -> float:
        """Move the blocks of a request to `kept_blocks`; return its block-seconds.

        Kept blocks keep their reference, but do not count toward the KV quota of the tenant. The
        block-seconds are those since the last change of the table.
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
        """Free the kept blocks of a request."""
        self.pool.free(self.kept_blocks.pop(request_id))

    def take_block_s(self, request: Request) -> float:
        """Remove and return the block-seconds of a finished request, over all its tables."""
        return self._block_s.pop(request.id, 0.0)

    def is_at_kv_quota(self, request: Request) -> bool:
        """Return whether the tenant of the request is at its KV quota."""
        share = request.terms.max_kv_share
        if share >= 1.0:
            return False
        num_tenant_blocks = len(self.blocks_by_tenant.get(request.terms.tenant, ()))
        return num_tenant_blocks >= self.max_quota_blocks(share)

    def max_quota_blocks(self, max_kv_share: float) -> int:
        """Return the KV quota in blocks for this share."""
        return kv_quota_blocks(max_kv_share, self.pool.num_blocks)

    def num_new_blocks(self, tenant: str, match: PrefixMatch, num_tokens: int) -> int:
        """Return how many blocks this table would add to those of the tenant."""
        tenant_blocks = self.blocks_by_tenant.get(tenant, {})
        num_shared = sum([block_id in tenant_blocks for block_id in match.block_ids])
        return max(self.num_blocks_for(num_tokens), len(match.block_ids)) - num_shared

    def num_released_blocks(
        self, requests: Sequence[Request], pinned: frozenset[int] = frozenset()
    ) -> int:
        """Return how many blocks fewer the tenant has without these requests of it."""
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
        """Return how many blocks become free if these requests free all their blocks.

        The requests are running or preempted; `pinned` blocks do not count.
        """
        lists = (self._block_ids_of(request.id) for request in requests)
        return self.pool.num_freeable(id for ids in lists for id in ids if id not in pinned)

    def _block_ids_of(self, request_id: str) -> Sequence[int]:
        table = self.tables.get(request_id)
        return self.kept_blocks[request_id] if table is None else table.block_ids

    def _hash_full_blocks(self, request: Request) -> None:
        salt = request.terms.prefix_salt
        extend_chain(request.block_hashes, request.token_ids, self.block_size, salt)

    def check(self, running: dict[str, Request]) -> None:
        """Check the tables against the running requests and the reference counts."""
        if self.tables.keys() != running.keys():
            raise AssertionError(f"tables of {set(self.tables)}, but running are {set(running)}")
        owners: dict[int, int] = {}
        tenant_blocks: dict[str, dict[int, int]] = {}
        for request_id, table in self.tables.items():
            if len(set(table.block_ids)) != len(table.block_ids):
                raise AssertionError(f"{request_id}: a block is twice in the table")
            if len(table.block_ids) * self.block_size < running[request_id].num_computed:
                raise AssertionError(f"{request_id}: num_computed exceeds the table")
            counts = tenant_blocks.setdefault(running[request_id].terms.tenant, {})
            for block_id in table.block_ids:
                owners[block_id] = owners.get(block_id, 0) + 1
                counts[block_id] = counts.get(block_id, 0) + 1
        for block_ids in self.kept_blocks.values():
            for block_id in block_ids:
                owners[block_id] = owners.get(block_id, 0) + 1
        if tenant_blocks != self.blocks_by_tenant:
            raise AssertionError(
                f"blocks_by_tenant is {self.blocks_by_tenant}, the tables have {tenant_blocks}"
            )
        self.pool.check(owners)
