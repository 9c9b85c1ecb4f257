"""Arrays that share memory: results that take over what is read, and the order which that needs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import final

from vkjit.lowering.plan.order import Order, by_levels
from vkjit.lowering.steps import AnyStep, Arrays, ControlStep, CopyStep, Levels

SMALL = 1 << 16
"""Bytes that may be kept twice, or for longer, to save copies or waiting."""


def without_copies(
    steps: Sequence[AnyStep], arrays: Arrays, kept: Collection[int]
) -> list[AnyStep]:
    """Has temporaries be made where they are copied to, if nobody reads them after that.

    Their arrays are put into those that copies, or branches that may work in place, write. What is
    copied out of a small array with more than one place stays there likewise.

    Args:
        steps: of one block, in order.
        arrays: all arrays.
        kept: what the block is given and what it gives, which is no temporary of it.
    """
    spans = _Spans(steps, arrays, kept)
    for position, step in enumerate(steps):
        if not (step.copies or isinstance(step, ControlStep)):
            continue
        for source, target in sorted(step.in_place):
            if spans.may_be_made_in(source, target, position):
                arrays.put(source, target)
            elif step.copies and spans.may_stay_in(source, target, position):
                arrays.put(target, source)
    return [s for s in steps if not (isinstance(s, CopyStep) and _is_nothing(s, arrays))]


@final
class _Spans:
    """From which step to which the arrays of a block are in use."""

    def __init__(self, steps: Sequence[AnyStep], arrays: Arrays, kept: Collection[int]) -> None:
        self._arrays = arrays
        self._kept = set(map(arrays.memory, kept))
        self._spans: dict[int, tuple[int, int]] = {}
        for position, step in enumerate(steps):
            for array in map(arrays.memory, step.arrays):
                first, _ = self._spans.get(array, (position, position))
                self._spans[array] = first, position

    def may_be_made_in(self, source: int, target: int, position: int) -> bool:
        """Whether ``source`` ends, and the memory of ``target`` begins, with this step."""
        alike = self._arrays.size(source) == self._arrays.size(target)
        if not alike or not self._is_free(source) or not self._is_alone(target):
            return False
        place = self._arrays.memory(target)
        (first, last), (begins, ends) = self._spans[source], self._spans[place]
        if last != position or begins != position or first == position:
            return False
        self._spans[place] = first, ends
        return True

    def may_stay_in(self, source: int, target: int, position: int) -> bool:
        """Whether ``target`` begins, and the memory of ``source`` ends, with this step."""
        place = self._arrays.memory(source)
        alike = self._arrays.size(source) == self._arrays.size(target)
        if not alike or place == source or not self._is_free(target):
            return False
        if not self._is_alone(source):
            return False
        (begins, ends), (first, last) = self._spans[target], self._spans[place]
        if begins != position or last != position or place in self._kept:
            return False
        self._spans[place] = first, ends
        return True

    def _is_free(self, array: int) -> bool:
        """Whether it is a temporary that may be put somewhere."""
        return array not in self._kept and not self._arrays.is_put(array)

    def _is_alone(self, array: int) -> bool:
        """Whether what is put there keeps little else alive."""
        place = self._arrays.memory(array)
        if place == array:
            return not self._arrays.is_put(array)
        return place not in self._kept and self._arrays.size(place) <= SMALL


def _is_nothing(step: CopyStep, arrays: Arrays) -> bool:
    """Whether both are one memory now, be it part of another."""
    one = arrays.base(step.source) == step.target or arrays.base(step.target) == step.source
    same = arrays.memory(step.source) == arrays.memory(step.target)
    whole = arrays.size(step.source) == arrays.size(arrays.memory(step.target))
    return one or (same and whole)


@final
class Handover:
    """The steps of one block, put in an order in which results take over other arrays."""

    def __init__(self, steps: Sequence[AnyStep], arrays: Arrays) -> None:
        self._steps = list(steps)
        self._arrays = arrays
        self._order = Order([arrays.use(step) for step in steps])

    def take(self, result: int, other: int) -> bool:
        """Whether ``result`` may have the memory of ``other``; then the steps wait as it needs.

        Those that write the result must come after those that use the other array, or be one that
        updates the elements in place. Only the first step that writes the result may be that: it
        may write any element.
        """
        return self.fits(result, other) and self._order.put_off(
            self._order.writers(self._arrays.memory(result)),
            self._order.users(self._arrays.memory(other)),
        )

    def has(self, result: int, other: int) -> bool:
        """Whether ``result`` may have the memory of ``other`` in the order as it is."""
        return self.fits(result, other) and self._order.follow(
            self._order.writers(self._arrays.memory(result)),
            self._order.users(self._arrays.memory(other)),
        )

    def fits(self, result: int, other: int) -> bool:
        """Whether sizes agree and no step reads one while it writes the other out of step."""
        if self._arrays.size(result) != self._arrays.size(other):
            return False
        result, other = self._arrays.memory(result), self._arrays.memory(other)
        writers = self._order.writers(result)
        shared = set(writers) & set(self._order.users(other))
        return not shared or (shared == {writers[0]} and self.updates(result, other))

    def updated(self, result: int) -> set[int]:
        """What the first step that writes ``result`` may update in place to make it."""
        memory = self._arrays.memory
        result = memory(result)
        first = self._order.writers(result)[:1]
        pairs = [(memory(a), memory(b)) for w in first for a, b in self._steps[w].in_place]
        return {a for a, b in pairs if b == result}

    def updates(self, result: int, other: int) -> bool:
        """Whether the first step that writes ``result`` may update ``other`` to make it."""
        return self._arrays.memory(other) in self.updated(result)

    def steps(self) -> list[AnyStep]:
        """The steps in an order that allows what was taken."""
        return [self._steps[n] for n in self._order.sequence()]


def in_levels(
    steps: Sequence[AnyStep],
    arrays: Arrays,
    kept: Collection[int],
    same: Collection[tuple[int, int]] = (),
) -> Levels:
    """The steps of one block in levels of independent ones.

    Args:
        steps: in order.
        arrays: all arrays.
        kept: what the block is given and what it gives, which is no temporary of it.
        same: pairs of arrays that may become one memory.
    """
    one = {arrays.memory(b): arrays.memory(a) for a, b in same}

    def memory(array: int) -> int:
        found = arrays.memory(array)
        return one.get(found, found)

    outside = dict.fromkeys(map(memory, kept))
    away = arrays.hosts()
    uses = [arrays.use(step, memory) for step in steps]
    touched = dict.fromkeys(a for use in uses for a in (*use.reads, *use.writes))
    sizes = {
        a: arrays.size(a)
        for a in touched
        if arrays.is_array(a) and a not in outside and arrays.root(a) not in away
    }
    others = sum(arrays.size(a) for a in outside)
    return tuple(tuple(steps[n] for n in level) for level in by_levels(uses, sizes, others))
