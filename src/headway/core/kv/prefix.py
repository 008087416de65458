"""Block hashes and the prefix index: a SHA-256 chain over full blocks, salted per cache group.

The hash of a block covers its tokens and, through the parent hash, all tokens before it, so equal
hashes imply equal prefixes. The salt starts the chain: tenants share blocks only within a cache
group.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256
from sys import byteorder, implementation
from typing import NewType, Protocol, cast

BlockHash = NewType("BlockHash", bytes)
"""On PyPy an integer, see `_extend_keys`: only recorders need bytes, and no simulation has one."""


@lru_cache(maxsize=1024)
def chain_start(salt: str) -> BlockHash:
    """Return the parent hash of the first block of a chain."""
    return BlockHash(sha256(b"headway:" + salt.encode()).digest())


def no_hashes() -> list[BlockHash]:
    """Return an empty chain; `list[BlockHash]` as a call takes several times as long."""
    return []


class RunningHash(Protocol):
    """A hash that can be read and then extended."""

    def update(self, data: bytes, /) -> None: ...

    def digest(self) -> bytes: ...


def hash_tokens(parent: BlockHash, token_ids: Sequence[int]) -> RunningHash:
    """Return the hash of a block with these tokens that follows `parent`, to be extended."""
    return sha256(parent + _to_bytes(token_ids))


def hash_token(running: RunningHash, token_id: int) -> None:
    """Add one more token of the same block."""
    running.update(token_id.to_bytes(8, byteorder))


def chain_next(parent: BlockHash, block: bytes) -> BlockHash:
    """Return the hash of a full block that follows `parent`; a token takes eight bytes."""
    return BlockHash(sha256(parent + block).digest())


def _to_bytes(token_ids: Sequence[int]) -> bytes:
    return array("q", token_ids).tobytes()


def extend_chain(
    hashes: list[BlockHash], token_ids: Sequence[int], block_size: int, salt: str
) -> None:
    """Append the hashes of the full blocks that `hashes` does not cover yet."""
    start, end = len(hashes) * block_size, len(token_ids) // block_size * block_size
    if start >= end:
        return
    parent = hashes[-1] if hashes else chain_start(salt)
    blocks, num_bytes = _to_bytes(token_ids[start:end]), 8 * block_size
    for at in range(0, len(blocks), num_bytes):
        parent = chain_next(parent, blocks[at : at + num_bytes])
        hashes.append(parent)


def _extend_keys(
    hashes: list[BlockHash], token_ids: Sequence[int], block_size: int, salt: str
) -> None:
    """Append integers in place of hashes, as `extend_chain` does."""
    start, end = len(hashes) * block_size, len(token_ids) // block_size * block_size
    if start >= end:
        return
    parent = hashes[-1] if hashes else hash(salt)
    for at in range(start, end, block_size):
        parent = cast("BlockHash", hash((parent, *token_ids[at : at + block_size])))
        hashes.append(parent)


if implementation.name == "pypy":
    # Only simulations run there, and no hash leaves the process. SHA-256 takes 7 us a block there,
    # hashes of tuples 0.3 us, and dicts hold integers without objects for them.
    extend_chain = _extend_keys


class PrefixIndex:
    """Map from block hash to block, and back.

    Of several blocks with equal content only the first is indexed. A duplicate becomes empty when
    its owner frees it.
    """

    def __init__(self) -> None:
        self._block_of: dict[BlockHash, int] = {}
        self._hash_of: dict[int, BlockHash] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._hash_of

    def find(self, block_hash: BlockHash) -> int | None:
        return self._block_of.get(block_hash)

    def insert(self, block_hash: BlockHash, block_id: int) -> bool:
        """Index a full block; return False if equal content is already indexed."""
        if block_hash in self._block_of or block_id in self._hash_of:
            return False
        self._block_of[block_hash] = block_id
        self._hash_of[block_id] = block_hash
        return True

    def remove(self, block_id: int) -> None:
        block_hash = self._hash_of.pop(block_id, None)
        if block_hash is not None:
            del self._block_of[block_hash]

    def check(self) -> None:
        hash_of = {block_id: block_hash for block_hash, block_id in self._block_of.items()}
        if hash_of != self._hash_of:
            raise AssertionError("the two maps of the prefix index differ")
