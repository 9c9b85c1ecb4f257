"""The memory plan: no two live arrays overlap, and little is wasted."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vkjit.lowering.plan.memory import ALIGNMENT, Lifetime, arena, lifetimes, live_peak


@st.composite
def plans(draw: st.DrawFn) -> list[Lifetime]:
    made: list[Lifetime] = []
    for array in range(draw(st.integers(0, 12))):
        first = draw(st.integers(0, 15))
        last = draw(st.integers(first, 15))
        made.append(Lifetime(array, draw(st.integers(0, 5000)), first, last))
    return made


@given(plans())
def test_live_arrays_never_overlap(live: list[Lifetime]) -> None:
    placed = arena(live)
    assert set(placed.offsets) == {item.array for item in live}
    for item in live:
        start = placed.offsets[item.array]
        assert start % ALIGNMENT == 0
        assert start + item.size <= placed.size
        for other in live:
            together = item.first <= other.last and other.first <= item.last
            if other.array != item.array and together:
                at = placed.offsets[other.array]
                assert at + other.size <= start or start + item.size <= at


@given(plans())
def test_the_arena_holds_the_live_peak(live: list[Lifetime]) -> None:
    placed = arena(live)
    at_once = [sum(t.size for t in live if t.first <= step <= t.last) for step in range(16)]
    assert placed.live_peak == live_peak(live) == max(at_once)
    assert placed.size >= placed.live_peak


def test_memory_is_used_again() -> None:
    chain = [Lifetime(i, 1024, i, i + 1) for i in range(50)]
    assert arena(chain).size == 2048


def test_lifetimes_span_first_to_last_use() -> None:
    found = lifetimes([(0, 1), (1, 2), (2, 3), (1, 3)], {1: 10, 2: 20})
    assert found == [Lifetime(1, 10, 0, 3), Lifetime(2, 20, 1, 2)]


def test_nothing_needs_no_memory() -> None:
    empty = arena([])
    assert (empty.offsets, empty.size, empty.live_peak) == ({}, 0, 0)


@pytest.mark.parametrize("seed", range(20))
def test_no_array_lies_across_the_buffers_of_an_arena(seed: int):
    rng = np.random.default_rng(seed)
    live = [
        Lifetime(i, int(rng.integers(1, 9000)), *sorted(map(int, rng.integers(0, 30, 2))))
        for i in range(60)
    ]
    placed = arena(live, 10_000)
    sizes = placed.buffers()
    assert placed.limit == 9984
    assert sum(sizes) == placed.size
    assert len(sizes) > 1
    ranges = {t.array: (placed.offsets[t.array], t.size) for t in live}
    for start, size in ranges.values():
        assert start // placed.limit == (start + size - 1) // placed.limit
        assert start % placed.limit + size <= sizes[start // placed.limit]
    for a, b in itertools.combinations(live, 2):
        if a.first <= b.last and b.first <= a.last:
            (s, n), (t, m) = ranges[a.array], ranges[b.array]
            assert s + n <= t or t + m <= s


def test_an_array_beyond_the_limit_widens_the_buffers():
    placed = arena([Lifetime(0, 5000, 0, 1), Lifetime(1, 100, 0, 1)], 1024)
    assert placed.buffers() == [5120, 256]
