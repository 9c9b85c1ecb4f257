"""Order of steps: put off where memory is handed on, side by side where nothing is shared.

A barrier costs a GPU more than a small kernel does. Steps are gathered into *levels* of
independent steps, with one barrier before each level. Looking far ahead makes levels wide, but
keeps what they write alive for longer: of several reaches, the farthest is taken that leaves the
peak of memory almost where the program's own order has it.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from vkjit.lowering.plan.memory import lifetimes, live_peak

Levels = tuple[tuple[int, ...], ...]

_REACHES = (128, 48, 16, 6)
"""How many steps ahead of the first waiting one a step may be taken from."""
_LAST_STEPS = 1
"""Steps with no more than this many after them are at the end of their chain."""
_AT_THE_END = 24
_MORE_MEMORY = 0.03
"""Part of the memory of the whole plan that wider levels may add to its peak."""


@final
@dataclass(frozen=True, slots=True)
class Use:
    """The arrays that a step reads and writes."""

    reads: tuple[int, ...]
    writes: tuple[int, ...]


@final
class Order:
    """The order of steps: their dependencies, and what was asked for beyond them."""

    def __init__(self, uses: Sequence[Use]) -> None:
        self._needs = [set(needed) for needed in _dependencies(uses)]
        self._followers: list[set[int]] = [set() for _ in uses]
        for step, needed in enumerate(self._needs):
            for before in needed:
                self._followers[before].add(step)
        self._writers: dict[int, list[int]] = {}
        self._users: dict[int, list[int]] = {}
        for step, use in enumerate(uses):
            for array in use.writes:
                self._writers.setdefault(array, []).append(step)
            for array in dict.fromkeys((*use.reads, *use.writes)):
                self._users.setdefault(array, []).append(step)

    def writers(self, array: int) -> Sequence[int]:
        """The steps that write an array."""
        return self._writers.get(array, ())

    def users(self, array: int) -> Sequence[int]:
        """The steps that read or write an array."""
        return self._users.get(array, ())

    def put_off(self, steps: Sequence[int], others: Sequence[int]) -> bool:
        """Has ``steps`` wait for ``others``, unless one of these needs one of those."""
        waiting = set(others) - set(steps)
        if waiting & self._after(steps):
            return False
        for step in steps:
            self._needs[step] |= waiting
        for other in waiting:
            self._followers[other].update(steps)
        return True

    def follow(self, steps: Sequence[int], others: Sequence[int]) -> bool:
        """Whether ``steps`` come after ``others`` as it is, but for those that are both."""
        missing = set(others) - set(steps)
        return all(missing <= self._before(step) for step in steps) if missing else True

    def sequence(self) -> list[int]:
        """All steps: the earliest first among those whose needs are met."""
        missing = [len(needed) for needed in self._needs]
        ready = [step for step, count in enumerate(missing) if not count]
        found: list[int] = []
        while ready:
            step = heapq.heappop(ready)
            found.append(step)
            for follower in self._followers[step]:
                missing[follower] -= 1
                if not missing[follower]:
                    heapq.heappush(ready, follower)
        return found

    def _after(self, steps: Sequence[int]) -> set[int]:
        """The steps that cannot come before ``steps``."""
        return _reached(self._followers, steps)

    def _before(self, step: int) -> set[int]:
        """The steps that cannot come after ``step``."""
        return _reached(self._needs, (step,))


def _reached(edges: Sequence[set[int]], steps: Sequence[int]) -> set[int]:
    """The steps that edges lead to from ``steps``."""
    found: set[int] = set()
    todo = list(steps)
    while todo:
        for step in edges[todo.pop()]:
            if step not in found:
                found.add(step)
                todo.append(step)
    return found


def by_levels(uses: Sequence[Use], sizes: Mapping[int, int], others: int = 0) -> Levels:
    """Steps in levels, in order; each level needs only earlier ones.

    Args:
        uses: of each step, in the program's order. Arrays that share memory have one number.
        sizes: bytes of the arrays that live in the arena.
        others: bytes of all other arrays; the more there are, the less the arena matters.
    """
    known = dict(sizes)
    peak = live_peak(lifetimes([(*u.reads, *u.writes) for u in uses], known))
    limit = peak + (peak + others) * _MORE_MEMORY
    needs = _dependencies(uses)
    for reach in _REACHES:
        found = _levels(needs, reach)
        touched = [
            [a for step in level for a in (*uses[step].reads, *uses[step].writes)]
            for level in found
        ]
        if live_peak(lifetimes(touched, known)) <= limit:
            return found
    return tuple((step,) for step in range(len(uses)))


def _dependencies(uses: Sequence[Use]) -> list[tuple[int, ...]]:
    """The steps that must finish before each step starts; transitive ones may be left out."""
    writer: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    needs: list[tuple[int, ...]] = []
    for step, use in enumerate(uses):
        before: set[int] = set()
        for array in use.reads:
            if array in writer:
                before.add(writer[array])
        for array in use.writes:
            if array in writer:
                before.add(writer[array])
            before.update(readers.pop(array, ()))
        for array in use.reads:
            readers.setdefault(array, []).append(step)
        for array in use.writes:
            writer[array] = step
        needs.append(tuple(before - {step}))
    return needs


def _heights(needs: Sequence[tuple[int, ...]]) -> list[int]:
    """How many steps follow each one, on the longest chain."""
    heights = [0] * len(needs)
    for step in range(len(needs) - 1, -1, -1):
        for before in needs[step]:
            heights[before] = max(heights[before], heights[step] + 1)
    return heights


def _levels(needs: Sequence[tuple[int, ...]], reach: int) -> Levels:
    """At each level, the ready steps among the first ``reach`` waiting ones.

    Steps at the end of their chain, such as the updates of an optimizer, hold up nobody, but a
    level is as long as its longest step: they wait until there are ``_AT_THE_END`` of them.
    """
    heights = _heights(needs)
    done: set[int] = set()
    waiting = list(range(len(needs)))
    found: list[tuple[int, ...]] = []
    while waiting:
        ahead = waiting[:reach]
        # The first waiting step is always ready: everything that it needs came before it.
        level = [s for s in ahead if all(n in done for n in needs[s])]
        urgent = [s for s in level if heights[s] > _LAST_STEPS]
        if urgent and len(level) - len(urgent) < _AT_THE_END:
            level = urgent
        done.update(level)
        found.append(tuple(level))
        waiting[:reach] = [s for s in ahead if s not in done]
    return tuple(found)
