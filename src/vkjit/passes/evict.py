"""Which arrays to evict so that the peak of a timeline stays below a bound, at little cost.

A greedy search with exact lifetimes: at each turn the eviction that takes away most of what is
above the bound for the seconds it costs. Arrays of one kind, such as those of the layers of a
model, are interchangeable: one of each kind is tried, and as many as are needed are evicted
together. Last, evictions that turned out to be unneeded are taken back.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import final

from vkjit.passes.timeline import Buffer, Outcome, Timeline

_TRIED = 6
"""Kinds that are tried at each turn, the most promising ones."""
_TINY = 1e-12
_DEARER = 1.01
_DEEP = 48
"""Most arrays that are looked at for one to be computed again from: none needs a whole model."""


@final
@dataclass(frozen=True, slots=True)
class Eviction:
    """Evicted arrays and what they come to."""

    arrays: frozenset[int]
    outcome: Outcome


def evict(timeline: Timeline, bound: int, start: Collection[int] = ()) -> Eviction:
    """Evicts arrays until at most ``bound`` bytes are alive at any step, or nothing helps.

    Args:
        timeline: the arrays.
        bound: bytes of temporaries.
        start: arrays that are evicted to begin with.
    """
    search = _Search(timeline, bound, start)
    while search.outcome.peak > bound and search.turn():
        pass
    search.take_back()
    return Eviction(frozenset(search.evicted), search.outcome)


@final
class _Search:
    def __init__(self, timeline: Timeline, bound: int, start: Collection[int]) -> None:
        self.timeline = timeline
        self.bound = bound
        self.evicted = set(start)
        self.outcome = timeline.outcome(self.evicted)
        self._useless: set[object] = set()
        self._kinds: dict[object, list[Buffer]] = {}
        for item in timeline.candidates():
            self._kinds.setdefault(item.kind, []).append(item)

    def turn(self) -> bool:
        """Evicts the best kind's members; false where no kind helps."""
        best: list[Buffer] = []
        best_score = -1.0
        excess = self.outcome.excess(self.bound)
        for members in self._promising():
            trial = self.timeline.outcome(self.evicted | {members[0].array})
            gained = excess - trial.excess(self.bound)
            cost = max(trial.seconds - self.outcome.seconds, _TINY)
            if gained <= 0:
                self._useless.add(members[0].array)
            elif gained / cost > best_score:
                best, best_score = members, gained / cost
        if not best:
            # Members that did not help alone were noted; others of their kinds may.
            return bool(self._promising())
        self._evict_some(best)
        return True

    def _evict_some(self, members: list[Buffer]) -> None:
        """Evicts the first member, then more of them at a time as long as each lot helps.

        Those that the others have made dearer wait for another turn: every second value of a chain
        is evicted before two in a row.
        """
        count = 1
        waiting = [(item, self._closure(item)) for item in members]
        while waiting and self.outcome.peak > self.bound:
            chosen: set[int] = set()
            before = self.evicted
            while waiting and len(chosen) < count:
                item, seconds = waiting.pop(0)
                self.evicted = before | chosen
                if self._closure(item) <= seconds * _DEARER:
                    chosen.add(item.array)
            self.evicted = before
            trial = self.timeline.outcome(before | chosen)
            if not chosen or trial.excess(self.bound) >= self.outcome.excess(self.bound):
                break
            self.evicted = before | chosen
            self.outcome = trial
            count = min(2 * count, 4)

    def _promising(self) -> list[list[Buffer]]:
        """The members of each kind that could help, the best first; the best kinds first."""
        over = self.outcome.profile > self.bound
        before = [0, *over.cumsum().tolist()]
        ranked: list[tuple[float, list[Buffer]]] = []
        for members in self._kinds.values():
            scored: list[tuple[float, int, Buffer]] = []
            for item in members:
                if item.array in self.evicted or item.array in self._useless:
                    continue
                covered = before[item.late] - before[item.end + 1]
                if not covered:
                    continue
                cost = self._closure(item) / (item.size * covered)
                if cost < math.inf:
                    scored.append((cost, item.start, item))
            if scored:
                scored.sort(key=lambda s: s[:2])
                ranked.append((scored[0][0], [s[2] for s in scored]))
        ranked.sort(key=lambda r: (r[0], r[1][0].array))
        return [members for _, members in ranked[:_TRIED]]

    def _closure(self, item: Buffer) -> float:
        """Seconds to compute an array again together with what is not alive then."""
        seen: set[int] = set()
        todo = [item]
        seconds = 0.0
        while todo:
            if len(seen) > _DEEP:
                return math.inf
            found = todo.pop()
            if found.array in seen:
                continue
            seen.add(found.array)
            if found is not item and self._present(found, item.late):
                continue
            seconds += found.seconds
            todo.extend(self.timeline.buffers[a] for a in found.operands if self._known(a))
        return seconds

    def _known(self, array: int) -> bool:
        return array in self.timeline.buffers

    def _present(self, item: Buffer, now: int) -> bool:
        if not item.repeatable or now <= (item.end if item.array in self.evicted else item.last):
            return True
        again = self.outcome.again.get(item.array)
        return again is not None and again[0] <= now <= again[1]

    def take_back(self) -> None:
        """Keeps arrays again whose eviction is not needed, the most expensive first."""
        if self.outcome.peak > self.bound:
            return
        for item in _by_cost(self.timeline.buffers[a] for a in self.evicted):
            trial = self.timeline.outcome(self.evicted - {item.array})
            if trial.peak <= self.bound and trial.seconds < self.outcome.seconds:
                self.evicted.discard(item.array)
                self.outcome = trial


def _by_cost(items: Iterable[Buffer]) -> list[Buffer]:
    return sorted(items, key=lambda b: (-b.seconds, b.array))
