"""The static memory plan: where every temporary of one call lies, and how much it all takes.

Lifetimes follow from the order of the kernels. Temporaries share one arena; two that are alive at
the same time never overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

ALIGNMENT = 64
"""Bytes; a cache line, and the largest vector."""


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
    placed: list[tuple[int, int, Lifetime]] = []
    offsets: dict[int, int] = {}
    for item in sorted(live, key=lambda t: (-t.size, t.first)):
        size = -(-max(item.size, 1) // ALIGNMENT) * ALIGNMENT
        start = 0
        for low, high, other in placed:
            if high <= start or other.last < item.first or item.last < other.first:
                continue
            if low >= start + size:
                break
            start = high
        offsets[item.array] = start
        placed.append((start, start + size, item))
        placed.sort(key=lambda p: p[0])
    return Arena(offsets, max([high for _, high, _ in placed], default=0), live_peak(live))


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
