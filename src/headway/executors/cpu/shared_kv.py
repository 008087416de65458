"""KV blocks in memory that outlives the engine process, with a record of their tokens.

The API process owns the memory, a memfd, and passes it to each engine process. The record has one
entry per block: the hash of its tokens and a checksum of their KV. The next engine process puts
the recorded blocks into its prefix index, so that requests continue without computing their tokens
again. Contents decide: a block that was overwritten, in part or by accident, has another checksum
and is not used. So the order of writes does not matter, and a write may be torn.

    header    identity of the model, its sizes, and starts that failed
    entries   [num_blocks][128]: hash, checksum, tokens, cache group, checksum of the entry
    blocks    the KV store of the kernels
"""

from __future__ import annotations

import logging
import os
import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from headway.core.executor import HashedBlock
from headway.executors.cpu.large_pages import LARGE_PAGE, AlignedMapping

_HEADER_BYTES = 64
_HEADER = struct.Struct("<32sQQQ")
"""Followed by the number of processes that began with these blocks and completed no step."""
MAX_STARTS = 3
"""Processes in a row that may complete no step; the next begins without blocks."""
_FIELDS = struct.Struct("<32sQHB81s")
_CRC = struct.Struct("<I")
_ENTRY = struct.Struct("<32sQHB81sI")
_MAX_GROUP_BYTES = 81


logger = logging.getLogger(__name__)


class RecordedBlock(NamedTuple):
    """A block and the checksum of its tokens' KV."""

    block: HashedBlock
    checksum: int


class SharedKV:
    """The KV blocks of one model in shared memory, and their record.

    `shape` is (layers, blocks, bytes of a block in a layer).
    """

    def __init__(self, descriptor: int, identity: bytes, shape: tuple[int, int, int]) -> None:
        """Map the memory; clear it if it is of another model or another shape.

        `identity` has 32 bytes. Raises OSError if the memory cannot be mapped.
        """
        self._shape = num_layers, num_blocks, block_bytes = shape
        record_bytes = _HEADER_BYTES + num_blocks * _ENTRY.size
        self._blocks_at = -(-record_bytes // LARGE_PAGE) * LARGE_PAGE
        blocks_end = self._blocks_at + num_layers * num_blocks * block_bytes
        size = -(-blocks_end // LARGE_PAGE) * LARGE_PAGE
        header = _HEADER.pack(identity, *shape)
        old_size, start = os.fstat(descriptor).st_size, os.pread(descriptor, _HEADER_BYTES, 0)
        num_starts = start[_HEADER.size] if len(start) == _HEADER_BYTES else 0
        if old_size != size or start[: len(header)] != header or num_starts >= MAX_STARTS:
            if old_size:
                logger.warning("the KV blocks of the last engine process cannot be used")
            os.ftruncate(descriptor, 0)
            os.ftruncate(descriptor, size)
            os.pwrite(descriptor, header, 0)
            num_starts = 0
        os.pwrite(descriptor, bytes([num_starts + 1]), _HEADER.size)
        self._mapping = AlignedMapping(descriptor, size)
        self._memory = self._mapping.view()
        self.address = self._mapping.address + self._blocks_at
        self._blocks_per_page = -(-LARGE_PAGE // block_bytes)
        self._prepared: set[int] = set()

    def prepare(self, block_id: int) -> None:
        """Have large pages under a block that is about to be written.

        Reading blocks in pages of 4 KiB takes up to a tenth longer. The system gives large pages to
        memory of a process when it is first written, but to shared memory only on demand.
        """
        group = block_id // self._blocks_per_page
        if group in self._prepared:
            return
        self._prepared.add(group)
        num_layers, num_blocks, block_bytes = self._shape
        group_bytes = self._blocks_per_page * block_bytes
        for layer in range(num_layers):
            start = self._blocks_at + layer * num_blocks * block_bytes + group * group_bytes
            self._mapping.use_large_pages(start, start + group_bytes)

    def confirm(self) -> None:
        """Note that a process on these blocks has completed a step."""
        self._memory[_HEADER.size] = 0

    def record(self, blocks: Sequence[RecordedBlock]) -> None:
        """Write the entries of blocks. A block of a group with a long name gets none."""
        for (block_id, block_hash, group, num_tokens), checksum in blocks:
            name = group.encode()
            if len(name) > _MAX_GROUP_BYTES:
                entry = bytes(_ENTRY.size)
            else:
                entry = _FIELDS.pack(block_hash, checksum, num_tokens, len(name), name)
                entry += _CRC.pack(zlib.crc32(entry, block_id))
            at = _HEADER_BYTES + block_id * _ENTRY.size
            self._memory[at : at + _ENTRY.size] = entry

    def recorded(self) -> list[RecordedBlock]:
        """Return the entries that are whole; their blocks are not checked."""
        found: list[RecordedBlock] = []
        end = _HEADER_BYTES + self._shape[1] * _ENTRY.size
        entries = _ENTRY.iter_unpack(bytes(self._memory[_HEADER_BYTES:end]))
        for block_id, (*fields, crc) in enumerate(entries):
            if crc == 0 or zlib.crc32(_FIELDS.pack(*fields), block_id) != crc:
                continue
            block_hash, checksum, num_tokens, length, name = fields
            try:
                group = name[:length].decode()
            except UnicodeDecodeError:
                continue
            block = HashedBlock(block_id, block_hash, group, num_tokens)
            found.append(RecordedBlock(block, checksum))
        return found


class BlockContents(Protocol):
    """The KV blocks themselves."""

    def checksums(self, block_ids: Sequence[int], num_tokens: Sequence[int]) -> Sequence[int]:
        """Return a checksum of the first tokens of each block."""
        ...

    def forget(self, block_ids: Sequence[int]) -> None:
        """Have the next checksum of each block read the block."""
        ...

    def clear_tails(self, block_ids: Sequence[int], num_tokens: Sequence[int]) -> None:
        """Clear what follows the first tokens of each block."""
        ...


class KVRecorder:
    """Records blocks with checksums of their contents, and finds the intact ones."""

    def __init__(self, shared: SharedKV, contents: BlockContents, block_size: int) -> None:
        self._shared = shared
        self._contents = contents
        self._block_size = block_size
        self._recorded: dict[HashedBlock, int] = {}
        """Checksums of restored blocks that were not used yet."""

    def record(self, blocks: Sequence[HashedBlock]) -> None:
        self._shared.confirm()
        if blocks:
            checksums = self._contents.checksums(*_sizes(blocks))
            self._shared.record(list(map(RecordedBlock, blocks, checksums)))

    def restore(self) -> list[HashedBlock]:
        # Unread: that takes a second with a large cache, and most blocks are not used at once.
        self._recorded = {
            one.block: one.checksum
            for one in self._shared.recorded()
            if 0 < one.block.num_tokens <= self._block_size
        }
        return list(self._recorded)

    def find_intact(self, blocks: Sequence[HashedBlock]) -> list[HashedBlock]:
        block_ids, num_tokens = _sizes(blocks)
        self._contents.forget(block_ids)
        checksums = self._contents.checksums(block_ids, num_tokens)
        pairs = zip(blocks, checksums, strict=True)
        intact = [one for one, checksum in pairs if self._recorded.pop(one, None) == checksum]
        # An unfinished step may have written behind the last token.
        self._contents.clear_tails(*_sizes(intact))
        return intact


def _sizes(blocks: Sequence[HashedBlock]) -> tuple[list[int], list[int]]:
    return [one.block_id for one in blocks], [one.num_tokens for one in blocks]
