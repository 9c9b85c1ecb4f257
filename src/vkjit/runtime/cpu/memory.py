"""Pooled host memory.

Fresh pages cost more than most kernels that fill them, so freed blocks wait in lists by size for
the next request. Sizes are rounded up to 16 classes per power of two, at most 1/16 over.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import defaultdict
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

    ``take`` and ``give`` are on the path of every call and take no lock: popping from and
    appending to a list is atomic, and so is, in CPython with its global lock, a statement that
    changes one counter. The garbage collector may give a block back at any point.
    """

    def __init__(self, limit: int, pooled_limit: int) -> None:
        self._limit = limit
        self._pooled_limit = pooled_limit
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        self._lock = threading.RLock()  # of the calls to the system's allocator
        self._reserved = 0  # bytes of all blocks, handed out or waiting
        self._live = 0
        self._peak = 0

    def take(self, size: int) -> int:
        """The address of a block of ``size`` bytes, which is a :func:`class_bytes`.

        Raises:
            OutOfMemoryError: the limit is reached, or the system has no memory left.
        """
        try:
            address = self._free[size].pop()
        except IndexError:
            address = self._fresh(size)
        self._live += size
        if self._live > self._peak:
            self._peak = self._live
        return address

    def give(self, address: int, size: int) -> None:
        """Takes a block back."""
        self._live -= size
        if self._reserved - self._live > self._pooled_limit:
            with self._lock:
                self._reserved -= size
                _free(address)
        else:
            self._free[size].append(address)

    def trim(self) -> None:
        """Gives all waiting blocks back to the system."""
        with self._lock:
            for size, blocks in list(self._free.items()):
                while blocks:
                    _free(blocks.pop())
                    self._reserved -= size

    def stats(self) -> MemoryStats:
        """The accounts; live bytes are those of whole blocks."""
        live = self._live
        return MemoryStats(live, self._peak, self._reserved - live, self._limit)

    def reset_peak(self) -> None:
        """Lets the peak start again from what is in use."""
        self._peak = self._live

    def _fresh(self, size: int) -> int:
        with self._lock:
            if self._reserved + size > self._limit:
                self.trim()
                if self._reserved + size > self._limit:
                    raise self._exhausted(size)
            address = self._ask(size)
            if address is None:
                self.trim()
                address = self._ask(size)
                if address is None:
                    raise self._exhausted(size)
            self._reserved += size
            return address

    def _ask(self, size: int) -> int | None:
        """A new block from the system, None where it has none."""
        align = _HUGE_PAGE if size >= _HUGE_FROM else ALIGN
        padded = -(-size // align) * align
        address = _aligned_alloc(align, padded)
        if address is not None and size >= _HUGE_FROM and _madvise is not None:
            _madvise(address, padded, _MADV_HUGEPAGE)  # advice: failure changes nothing
        return address

    def _exhausted(self, size: int) -> OutOfMemoryError:
        return OutOfMemoryError(
            f"cpu: cannot allocate {size:,} bytes: {self._live:,} of {self._limit:,} bytes are in "
            "use; free arrays, donate inputs, or lower the memory of the computation"
        )
