"""The static memory plan: where every temporary of one call lies, and how much it all takes.

Lifetimes follow from the order of the kernels. Temporaries share one arena; two that are alive at
the same time never overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

Offsets = NDArray[np.int64]
ALIGNMENT = 256
"""Bytes: the largest offset alignment that Vulkan lets a device ask of storage buffers."""
_UNLIMITED = 1 << 62


@final
@dataclass(frozen=True, slots=True)
class Lifetime:
    """An array of ``size`` bytes, used by steps ``first`` to ``last``."""

    array: int
    size: int
    first: int
    last: int


@final
@dataclass(frozen=True, slots=True)
class Arena:
    """Offsets of arrays in the arena, its size, and the largest sum of live bytes at any step.

    The arena is cut into buffers of ``limit`` bytes, the last one shorter; no array lies across a
    cut. The size of a single buffer is no reason for a limit: then it is beyond all offsets.
    ``live`` are the lifetimes of the arrays, in levels of steps.
    """

    offsets: dict[int, int]
    size: int
    live_peak: int
    limit: int = _UNLIMITED
    live: tuple[Lifetime, ...] = ()

    def buffers(self) -> list[int]:
        """Bytes of each buffer."""
        return [min(self.limit, self.size - at) for at in range(0, self.size, self.limit)]


def lifetimes(uses: Sequence[Sequence[int]], sizes: dict[int, int]) -> list[Lifetime]:
    """Lifetimes of the arrays in ``sizes``, given the arrays that each step uses."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for position, arrays in enumerate(uses):
        for array in arrays:
            if array in sizes:
                first.setdefault(array, position)
                last[array] = position
    return [Lifetime(a, sizes[a], first[a], last[a]) for a in first]


def arena(live: Sequence[Lifetime], largest: int = 0) -> Arena:
    """Places arrays by decreasing size, each at the lowest offset free over its whole lifetime.

    Args:
        live: the arrays.
        largest: most bytes of one buffer; 0 stands for any. A larger array has one to itself.
    """
    limit = _limit(live, largest)
    count = len(live)
    low, high = np.zeros(count, np.int64), np.zeros(count, np.int64)
    first, last = np.zeros(count, np.int64), np.zeros(count, np.int64)
    offsets: dict[int, int] = {}
    for placed, item in enumerate(sorted(live, key=lambda t: (-t.size, t.first))):
        size = aligned(item.size)
        clash = (first[:placed] <= item.last) & (last[:placed] >= item.first)
        start = _lowest_gap(low[:placed][clash], high[:placed][clash], size, limit)
        offsets[item.array] = start
        low[placed], high[placed] = start, start + size
        first[placed], last[placed] = item.first, item.last
    return Arena(offsets, int(high.max(initial=0)), live_peak(live), limit, tuple(live))


def aligned(size: int) -> int:
    """Bytes from the start of an array of ``size`` bytes to that of the next one."""
    return -(-max(size, 1) // ALIGNMENT) * ALIGNMENT


def _limit(live: Sequence[Lifetime], largest: int) -> int:
    """Bytes of one buffer: as many as there may be, but as many as the largest array has."""
    if not largest:
        return _UNLIMITED
    return max(largest // ALIGNMENT * ALIGNMENT, *(aligned(item.size) for item in live), ALIGNMENT)


def _lowest_gap(low: Offsets, high: Offsets, size: int, limit: int) -> int:
    """The lowest offset at which ``size`` bytes are outside all [low, high) and within one buffer.

    Buffers are ``limit`` bytes long.
    """
    order = np.argsort(low, kind="stable")
    reached = np.maximum.accumulate(high[order])
    starts = np.concatenate(([0], reached))
    ends = np.concatenate((low[order], [_UNLIMITED]))
    crosses = starts // limit != (starts + size - 1) // limit
    starts = np.where(crosses, (starts // limit + 1) * limit, starts)
    return int(starts[np.flatnonzero(ends - starts >= size)[0]])


def live_peak(live: Sequence[Lifetime]) -> int:
    """The largest sum of bytes alive at one step: what no placement can go below."""
    change: dict[int, int] = {}
    for item in live:
        change[item.first] = change.get(item.first, 0) + item.size
        change[item.last + 1] = change.get(item.last + 1, 0) - item.size
    total = peak = 0
    for position in sorted(change):
        total += change[position]
        peak = max(peak, total)
    return peak
