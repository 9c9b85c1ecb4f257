"""Arrays that share memory: results that take over what is read, and the order which that needs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import final

from vkjit.lowering.plan.order import Order, by_levels
from vkjit.lowering.steps import AnyStep, Arrays, ControlStep, CopyStep, Levels


def without_copies(
    steps: Sequence[AnyStep], arrays: Arrays, kept: Collection[int]
) -> list[AnyStep]:
    """Has temporaries be made where they are copied to, if nobody reads them after that.

    Their arrays are put into those that the copies, or branches that may work in place, write.

    Args:
        steps: of one block, in order.
        arrays: all arrays.
        kept: what the block is given and what it gives, which is no temporary of it.
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for position, step in enumerate(steps):
        for array in map(arrays.memory, step.arrays):
            first.setdefault(array, position)
            last[array] = position
    fixed = set(kept)
    for position, step in enumerate(steps):
        if not isinstance(step, (CopyStep, ControlStep)):
            continue
        for source, target in sorted(step.in_place):
            free = source not in fixed and not arrays.is_put(source) and last[source] == position
            fresh = not arrays.is_put(target) and first[target] == position
            if free and fresh and first[source] < position:
                arrays.put(source, target)
                first[target] = first[source]
    return [s for s in steps if not (isinstance(s, CopyStep) and _is_nothing(s, arrays))]


def _is_nothing(step: CopyStep, arrays: Arrays) -> bool:
    same = arrays.memory(step.source) == arrays.memory(step.target)
    return same and arrays.size(step.source) == arrays.size(arrays.memory(step.target))


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

    def fits(self, result: int, other: int) -> bool:
        """Whether sizes agree and no step reads one while it writes the other out of step."""
        memory = self._arrays.memory
        if self._arrays.size(result) != self._arrays.size(other):
            return False
        result, other = memory(result), memory(other)
        writers = self._order.writers(result)
        return all(
            w == writers[0] and (other, result) in self._in_place(w)
            for w in self.shared(result, other)
        )

    def shared(self, result: int, other: int) -> set[int]:
        """Steps that write ``result`` and use ``other``."""
        memory = self._arrays.memory
        return set(self._order.writers(memory(result))) & set(self._order.users(memory(other)))

    def _in_place(self, step: int) -> set[tuple[int, int]]:
        memory = self._arrays.memory
        return {(memory(a), memory(b)) for a, b in self._steps[step].in_place}

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
    uses = [arrays.use(step, memory) for step in steps]
    touched = dict.fromkeys(a for use in uses for a in (*use.reads, *use.writes))
    sizes = {a: arrays.size(a) for a in touched if arrays.is_array(a) and a not in outside}
    others = sum(arrays.size(a) for a in outside)
    return tuple(tuple(steps[n] for n in level) for level in by_levels(uses, sizes, others))
