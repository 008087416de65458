"""Checksums of KV blocks by the compiled kernels."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence


class KernelBlocks:
    """The KV blocks of one engine of the kernels.

    Steps add up the checksums of what they write, so that a block is not read again.
    """

    def __init__(self, library: ctypes.CDLL, engine: int) -> None:
        self._library = library
        self._engine = engine

    def checksums(self, block_ids: Sequence[int], num_tokens: Sequence[int]) -> array[int]:
        """Return a checksum of the first tokens of each block."""
        ids, counts = array("i", block_ids), array("i", num_tokens)
        checksums = array("Q", bytes(8 * len(ids)))
        self._library.hw_checksum_blocks(
            self._engine, _at(ids), _at(counts), len(ids), _at(checksums)
        )
        return checksums

    def forget(self, block_ids: Sequence[int]) -> None:
        """Have the next checksum of each block read the block."""
        ids = array("i", block_ids)
        self._library.hw_forget_blocks(self._engine, _at(ids), len(ids))

    def clear_tails(self, block_ids: Sequence[int], num_tokens: Sequence[int]) -> None:
        """Clear what follows the first tokens of each block."""
        ids, counts = array("i", block_ids), array("i", num_tokens)
        self._library.hw_clear_tails(self._engine, _at(ids), _at(counts), len(ids))


def _at(numbers: array[int]) -> int:
    return numbers.buffer_info()[0]
