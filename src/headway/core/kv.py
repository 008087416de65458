"""Which blocks each request holds: its block table, from prefix match to release.

Owns the block tables and the pool. A table only grows; its full blocks may be shared, its tail
block never is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headway.core.blocks import BlockPool
from headway.core.plan import BlockCopy
from headway.core.prefix import extend_chain
from headway.core.request import Request


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Blocks that already hold the start of a request's tokens."""

    block_ids: tuple[int, ...]
    num_tokens: int


NO_MATCH = PrefixMatch((), 0)


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks of one request, in order of position."""

    block_ids: list[int]
    num_sent: int = 0
    """How many of them the executor has been told of."""
    num_published: int = 0
    """How many of them have been offered to the prefix index."""

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

    def blocks_needed(self, match: PrefixMatch, num_tokens: int) -> int:
        """Free blocks that holding `num_tokens` would use up, given what matched.

        A matched block without an owner counts as free now and stops being so when shared.
        """
        fresh = self.num_blocks_for(num_tokens) - len(match.block_ids)
        return max(0, fresh) + self.pool.num_unowned(match.block_ids)

    def allocate(self, request: Request, match: PrefixMatch, num_tokens: int) -> None:
        """Give the request a table with room for `num_tokens`, starting with what matched."""
        # Share before allocating, or the allocation could evict the very blocks that matched.
        self.pool.share(match.block_ids)
        fresh = self.num_blocks_for(num_tokens) - len(match.block_ids)
        block_ids = [*match.block_ids, *self.pool.allocate(max(0, fresh))]
        self.tables[request.id] = BlockTable(block_ids, num_published=len(match.block_ids))

    def num_full(self, requests: Sequence[Request]) -> int:
        """How many of these need one more block for their next token."""
        tables, size = self.tables, self.block_size
        return sum([len(tables[it.id].block_ids) * size == it.num_computed for it in requests])

    def extend(self, table: BlockTable) -> None:
        """One more block at the end of a table."""
        table.block_ids.extend(self.pool.allocate(1))

    def fork(self, parent: Request, child: Request) -> None:
        """Give `child` the parent's prompt, all but its last token, as its own table.

        The blocks the child will never write are shared; the one it writes first is copied.
        The caller has checked that one block is free. The copy goes into the next plan, before
        anything can be written into the block it is made from.
        """
        num_tokens = parent.num_prompt_tokens - 1
        num_shared, num_copied = divmod(num_tokens, self.block_size)
        parent_ids = self.tables[parent.id].block_ids
        shared = parent_ids[:num_shared]
        self.pool.share(shared)
        tail = self.pool.allocate(1)
        self.tables[child.id] = BlockTable([*shared, *tail], num_published=num_shared)
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
        for position in range(table.num_published, num_full):
            self.pool.publish(table.block_ids[position], request.block_hashes[position])
        table.num_published = num_full

    def free(self, request_id: str) -> None:
        """Let go of a request's blocks."""
        self.pool.free(self.tables.pop(request_id).block_ids)

    def num_freeable(self, requests: Sequence[Request], kept: frozenset[int] = frozenset()) -> int:
        """How many blocks freeing all of these would make usable, not counting those `kept`."""
        tables = (self.tables[request.id].block_ids for request in requests)
        return self.pool.num_freeable(id for ids in tables for id in ids if id not in kept)

    def _hash_full_blocks(self, request: Request) -> None:
        salt = request.terms.cache_group
        extend_chain(request.block_hashes, request.token_ids, self.block_size, salt)

    def check(self, running: dict[str, Request]) -> None:
        """Every table belongs to a running request and is long enough for what it computed."""
        if self.tables.keys() != running.keys():
            raise AssertionError(f"tables {set(self.tables)} but running {set(running)}")
        owners: dict[int, int] = {}
        for request_id, table in self.tables.items():
            if len(set(table.block_ids)) != len(table.block_ids):
                raise AssertionError(f"{request_id} holds a block twice")
            if len(table.block_ids) * self.block_size < running[request_id].num_computed:
                raise AssertionError(f"{request_id} computed more than its table holds")
            for block_id in table.block_ids:
                owners[block_id] = owners.get(block_id, 0) + 1
        self.pool.check(owners)
