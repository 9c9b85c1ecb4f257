"""Pooled host memory.

Fresh pages cost more than most kernels that fill them, so freed blocks wait in lists by size for
the next request. Sizes are rounded up to 16 classes per power of two, at most 1/16 over.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from typing import final

from vkjit.errors import ArgumentError, OutOfMemoryError
from vkjit.runtime.device import MemoryStats

ALIGN = 64
"""Alignment of every block in bytes: a cache line and the widest vector."""

_HUGE_PAGE = 2 << 20
_HUGE_FROM = 4 << 20  # blocks this large ask for huge pages
_MADV_HUGEPAGE = 14

_libc = ctypes.CDLL(None)
_aligned_alloc: Callable[[int, int], int | None] = ctypes.CFUNCTYPE(
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t
)(("aligned_alloc", _libc))
_free: Callable[[int], None] = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(("free", _libc))
_madvise: Callable[[int, int, int], int] | None = (
    ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)(
        ("madvise", _libc)
    )
    if hasattr(_libc, "madvise")
    else None
)


def class_bytes(nbytes: int) -> int:
    """The size of the block that serves a request: a multiple of 64, and of 1/16 of its octave."""
    if nbytes <= ALIGN:
        return ALIGN
    grain = max(ALIGN, 1 << max(0, (nbytes - 1).bit_length() - 5))
    return -(-nbytes // grain) * grain


def pool_limit(memory: int) -> int:
    """``VKJIT_POOL_BYTES``, else a quarter of ``memory``.

    Raises:
        ArgumentError: ``VKJIT_POOL_BYTES`` is not a whole number.
    """
    asked = os.environ.get("VKJIT_POOL_BYTES")
    if not asked:
        return memory // 4
    if not asked.isdecimal():
        raise ArgumentError(f"VKJIT_POOL_BYTES: got {asked!r}, expected a number of bytes")
    return int(asked)


@final
class MemoryPool:
    """Blocks of host memory, aligned to 64 bytes.

    ``live`` counts the classes of blocks handed out. The lock is reentrant because the garbage
    collector may return a block at any point, also while one is being taken.
    """

    def __init__(self, limit: int, pooled_limit: int) -> None:
        self._limit = limit
        self._pooled_limit = pooled_limit
        self._free: dict[int, list[int]] = {}
        self._lock = threading.RLock()
        self._live = 0
        self._peak = 0
        self._pooled = 0

    def take(self, size: int) -> int:
        """The address of a block of ``size`` bytes, which is a :func:`class_bytes`.

        Raises:
            OutOfMemoryError: the limit is reached, or the system has no memory left.
        """
        with self._lock:
            blocks = self._free.get(size)
            if blocks:
                self._pooled -= size
                address = blocks.pop()
            else:
                address = self._fresh(size)
            self._live += size
            if self._live > self._peak:
                self._peak = self._live
            return address

    def give(self, address: int, size: int) -> None:
        """Takes a block back."""
        with self._lock:
            self._live -= size
            if self._pooled + size > self._pooled_limit:
                _free(address)
                return
            self._pooled += size
            blocks = self._free.get(size)
            if blocks is None:
                self._free[size] = [address]
            else:
                blocks.append(address)

    def trim(self) -> None:
        """Gives all waiting blocks back to the system."""
        with self._lock:
            for size, blocks in self._free.items():
                while blocks:
                    _free(blocks.pop())
                    self._pooled -= size

    def stats(self) -> MemoryStats:
        """The accounts."""
        with self._lock:
            return MemoryStats(self._live, self._peak, self._pooled, self._limit)

    def reset_peak(self) -> None:
        """Lets the peak start again from what is in use."""
        with self._lock:
            self._peak = self._live

    def _fresh(self, size: int) -> int:
        if self._live + self._pooled + size > self._limit:
            self.trim()
            if self._live + size > self._limit:
                raise self._exhausted(size)
        align = _HUGE_PAGE if size >= _HUGE_FROM else ALIGN
        padded = -(-size // align) * align
        address = _aligned_alloc(align, padded)
        if address is None:
            self.trim()
            address = _aligned_alloc(align, padded)
            if address is None:
                raise self._exhausted(size)
        if size >= _HUGE_FROM and _madvise is not None:
            _madvise(address, padded, _MADV_HUGEPAGE)  # advice: failure changes nothing
        return address

    def _exhausted(self, size: int) -> OutOfMemoryError:
        return OutOfMemoryError(
            f"cpu: cannot allocate {size:,} bytes: {self._live:,} of {self._limit:,} bytes are in "
            "use; free arrays, donate inputs, or lower the memory of the computation"
        )
