"""Shared memory on large pages."""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os

logger = logging.getLogger(__name__)

LARGE_PAGE = 2 * 1024**2
_MAP_FIXED, _MAP_NORESERVE, _MADV_HUGEPAGE, _MADV_COLLAPSE = 0x10, 0x4000, 14, 25
"""Of Linux, on x86-64 and arm64; the mmap module does not have them."""


class AlignedMapping:
    """A mapping of a file at an address that is a multiple of a large page."""

    def __init__(self, descriptor: int, size: int) -> None:
        """Raises OSError if the file cannot be mapped."""
        self._libc = _libc()
        self._size = size
        none = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._reserved = self._map(None, size + LARGE_PAGE, 0, none, -1)
        self.address = -(-self._reserved // LARGE_PAGE) * LARGE_PAGE
        access = mmap.PROT_READ | mmap.PROT_WRITE
        self._map(self.address, size, access, mmap.MAP_SHARED | _MAP_FIXED, descriptor)
        # Of use where the system gives large pages to shared memory by itself.
        self._libc.madvise(self.address, size, _MADV_HUGEPAGE)
        self._large: set[int] = set()
        self._can_collapse = True

    def __del__(self) -> None:
        if hasattr(self, "_reserved"):
            self._libc.munmap(self._reserved, self._size + LARGE_PAGE)

    def view(self) -> memoryview:
        """Return the memory; the view must not outlive the mapping."""
        return memoryview((ctypes.c_char * self._size).from_address(self.address)).cast("B")

    def use_large_pages(self, start: int, end: int) -> None:
        """Put large pages under the offsets from `start` to `end`, if the system can."""
        for page in range(start // LARGE_PAGE, -(-end // LARGE_PAGE)):
            if (
                page in self._large
                or not self._can_collapse
                or (page + 1) * LARGE_PAGE > self._size
            ):
                continue
            self._large.add(page)
            address = self.address + page * LARGE_PAGE
            # Only memory that is in use can be moved to a large page.
            byte = ctypes.c_ubyte.from_address(address)
            byte.value = byte.value
            if self._libc.madvise(address, LARGE_PAGE, _MADV_COLLAPSE) != 0:
                # Other errors concern this page alone, such as memory that is not contiguous.
                self._can_collapse = ctypes.get_errno() != errno.EINVAL
                if not self._can_collapse:
                    logger.info("the KV blocks are on small pages: this kernel cannot move them")

    def _map(self, address: int | None, size: int, access: int, flags: int, file: int) -> int:
        found = self._libc.mmap(address, size, access, flags, file, 0)
        if found == ctypes.c_void_p(-1).value:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        return found


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.argtypes = [pointer, size, number, number, number, ctypes.c_long]
    libc.mmap.restype = pointer
    libc.munmap.argtypes = [pointer, size]
    libc.madvise.argtypes = [pointer, size, number]
    return libc
