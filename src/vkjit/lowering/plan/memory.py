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
    """Offsets of arrays in the arena, its size, and the largest sum of live bytes at any step."""

    offsets: dict[int, int]
    size: int
    live_peak: int


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


def arena(live: Sequence[Lifetime]) -> Arena:
    """Places arrays by decreasing size, each at the lowest offset free over its whole lifetime."""
    count = len(live)
    low, high = np.zeros(count, np.int64), np.zeros(count, np.int64)
    first, last = np.zeros(count, np.int64), np.zeros(count, np.int64)
    offsets: dict[int, int] = {}
    for placed, item in enumerate(sorted(live, key=lambda t: (-t.size, t.first))):
        size = -(-max(item.size, 1) // ALIGNMENT) * ALIGNMENT
        clash = (first[:placed] <= item.last) & (last[:placed] >= item.first)
        start = _lowest_gap(low[:placed][clash], high[:placed][clash], size)
        offsets[item.array] = start
        low[placed], high[placed] = start, start + size
        first[placed], last[placed] = item.first, item.last
    return Arena(offsets, int(high.max(initial=0)), live_peak(live))


def _lowest_gap(low: Offsets, high: Offsets, size: int) -> int:
    """The lowest offset at which ``size`` bytes lie outside all ranges [low, high)."""
    if not len(low):
        return 0
    order = np.argsort(low, kind="stable")
    reached = np.maximum.accumulate(high[order])
    starts = low[order]
    if starts[0] >= size:
        return 0
    wide = np.flatnonzero(starts[1:] - reached[:-1] >= size)
    return int(reached[wide[0]] if len(wide) else reached[-1])


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
