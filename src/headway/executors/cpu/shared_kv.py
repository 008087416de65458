"""KV blocks in memory that outlives the engine process, with a record of published blocks.

The API process owns the memory, a memfd, and passes it to each engine process. The record has one
entry per block: the hash of its tokens and a checksum of its contents. The next engine process puts
the recorded blocks into its prefix index, so that requests continue without computing their tokens
again. Contents decide: a block that was overwritten, in part or by accident, has another checksum
and is not used. So the order of writes does not matter, and a write may be torn.

    header    identity of the model and its sizes
    entries   [num_blocks][128]: hash, checksum, cache group, checksum of the entry
    blocks    the KV store of the kernels
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

from headway.core.executor import PublishedBlock

_HEADER_BYTES = 64
_ENTRY = struct.Struct("<32sQB79sI4x")
_MAX_GROUP_BYTES = 79
_LARGE_PAGE = 2 * 1024**2


class RecordedBlock(NamedTuple):
    """A published block and the checksum of its contents."""

    block: PublishedBlock
    checksum: int


class SharedKV:
    """The KV blocks of one model in shared memory, and their record."""

    def __init__(self, descriptor: int, identity: bytes, num_blocks: int, num_bytes: int) -> None:
        """Map the memory; clear it if it is of another model or another size.

        `identity` has 32 bytes. Raises OSError or ValueError if the memory cannot be mapped.
        """
        self._num_blocks = num_blocks
        record_bytes = _HEADER_BYTES + num_blocks * _ENTRY.size
        blocks_at = -(-record_bytes // _LARGE_PAGE) * _LARGE_PAGE
        size = blocks_at + num_bytes
        header = struct.pack("<32sQQ", identity, num_blocks, num_bytes).ljust(_HEADER_BYTES, b"\0")
        if os.fstat(descriptor).st_size != size or os.pread(descriptor, len(header), 0) != header:
            os.ftruncate(descriptor, 0)
            os.ftruncate(descriptor, size)
            os.pwrite(descriptor, header, 0)
        self._memory = mmap.mmap(descriptor, size)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._view = (ctypes.c_char * 1).from_buffer(self._memory)
        self.address = ctypes.addressof(self._view) + blocks_at

    def record(self, blocks: Sequence[RecordedBlock]) -> None:
        """Write the entries of blocks. A block of a group with a long name gets none."""
        for (block_id, block_hash, group), checksum in blocks:
            name = group.encode()
            if len(name) > _MAX_GROUP_BYTES:
                entry = bytes(_ENTRY.size)
            else:
                entry = _ENTRY.pack(block_hash, checksum, len(name), name, 0)
                crc = zlib.crc32(block_id.to_bytes(8, "little") + entry)
                entry = _ENTRY.pack(block_hash, checksum, len(name), name, crc)
            at = _HEADER_BYTES + block_id * _ENTRY.size
            self._memory[at : at + _ENTRY.size] = entry

    def recorded(self) -> list[RecordedBlock]:
        """Return the entries that are whole; their blocks are not checked."""
        found: list[RecordedBlock] = []
        end = _HEADER_BYTES + self._num_blocks * _ENTRY.size
        entries = _ENTRY.iter_unpack(self._memory[_HEADER_BYTES:end])
        for block_id, (block_hash, checksum, length, name, crc) in enumerate(entries):
            if crc == 0 or length > _MAX_GROUP_BYTES:
                continue
            entry = _ENTRY.pack(block_hash, checksum, length, name, 0)
            if zlib.crc32(block_id.to_bytes(8, "little") + entry) != crc:
                continue
            try:
                group = name[:length].decode()
            except UnicodeDecodeError:
                continue
            found.append(RecordedBlock(PublishedBlock(block_id, block_hash, group), checksum))
        return found


class KVRecorder:
    """Records published blocks with checksums of their contents, and finds the intact ones."""

    def __init__(
        self, shared: SharedKV, checksums: Callable[[Sequence[int]], Sequence[int]]
    ) -> None:
        self._shared = shared
        self._checksums = checksums

    def record(self, blocks: Sequence[PublishedBlock]) -> None:
        if blocks:
            checksums = self._checksums([block.block_id for block in blocks])
            self._shared.record(list(map(RecordedBlock, blocks, checksums)))

    def restore(self) -> list[PublishedBlock]:
        recorded = self._shared.recorded()
        checksums = self._checksums([one.block.block_id for one in recorded])
        pairs = zip(recorded, checksums, strict=True)
        return [one.block for one, checksum in pairs if one.checksum == checksum]
