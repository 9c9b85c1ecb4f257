"""Control groups as steps: where the arrays of inner programs lie in those around them.

A scan's constants and slices are read, and its stacked results written, where they are; a slice
that would start where kernels cannot read is copied. A carry has one place if the body can work in
it, else two that change roles each turn. All of this is decided once for a body, before any offset
is known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import assert_never, final

from vkjit.ir.control import Branch, Call, Scan, Transfer, While
from vkjit.lowering.artifact import Move
from vkjit.lowering.kernel.elements import memory_type
from vkjit.lowering.plan.groups import ControlGroup, Group, Partition
from vkjit.lowering.plan.memory import aligned
from vkjit.lowering.sharing import SMALL, Handover, in_levels, without_copies
from vkjit.lowering.steps import (
    AnyStep,
    Arrays,
    Choose,
    ControlStep,
    CopyStep,
    KernelStep,
    Levels,
    Repeat,
    Tell,
    Turns,
)
from vkjit.lowering.target import Target, TargetKind

_MANY_TURNS = 4
"""Turns whose barriers cost more than two copies."""

KernelsOf = Callable[[Group, int, int], Sequence[KernelStep]]
"""Steps of a group whose array 0 has the given number, and which runs so many times."""


@final
@dataclass(frozen=True, slots=True)
class Place:
    """Where a block stands: inside ``depth`` loops, and run ``times`` times, as far as known."""

    depth: int = 0
    times: int = 1

    def turns(self, length: int) -> Place:
        """Inside one more loop."""
        return Place(self.depth + 1, self.times * length)


@final
@dataclass(slots=True)
class Inner:
    """The steps of a program in order, and the arrays of its parameters and results."""

    steps: list[AnyStep]
    inputs: Sequence[int]
    results: Sequence[int]

    def kept(self) -> set[int]:
        """Arrays that hold something before or after the steps."""
        return {*self.inputs, *self.results}


@final
class Nesting:
    """Makes the steps of programs and of those inside them."""

    def __init__(self, target: Target, arrays: Arrays, kernels: KernelsOf) -> None:
        self.target = target
        self.arrays = arrays
        self.kernels = kernels

    def program(self, parts: Partition, place: Place) -> Inner:
        """The steps of a program, in arrays of its own."""
        first = self.arrays.add(parts.arrays)
        steps: list[AnyStep] = []
        for group in parts.groups:
            if isinstance(group, ControlGroup):
                steps += self.control(group, first, place)
            else:
                steps += self.kernels(group, first, place.times)
        inputs = range(first, first + parts.inputs)
        return Inner(steps, inputs, [first + r for r in parts.results])

    def control(self, group: ControlGroup, first: int, place: Place) -> list[AnyStep]:
        """The steps of a control group whose array 0 has the number ``first``."""
        operands = [first + a for a in group.operands]
        results = [first + a for a in group.results]
        form = group.control
        match form:
            case Scan():
                return self.scan(group, form, (operands, results), place)
            case While():
                return self.repeat(group, form, (operands, results), place)
            case Branch():
                return self.branch(group, (operands, results), place)
            case Call():
                tell = Tell(form.function, tuple(operands), group.types)
                return [ControlStep(tell, tuple(operands), (), group.origin)]
            case Transfer(away):
                if away and self.target.kind is not TargetKind.CPU:
                    self.arrays.to_host(results[0])
                return [CopyStep(operands[0], results[0], group.origin, moves=True)]
            case _:
                assert_never(form)

    def levels(self, inner: Inner, same: Sequence[tuple[int, int]] = ()) -> Levels:
        """The finished block of an inner program; pairs in ``same`` may become one memory."""
        if self.target.kind is TargetKind.CPU:
            return tuple((step,) for step in inner.steps)
        return in_levels(inner.steps, self.arrays, inner.kept(), same)

    # -- scan -----------------------------------------------------------------------------------

    def scan(
        self, group: ControlGroup, form: Scan, outer: tuple[list[int], list[int]], place: Place
    ) -> list[AnyStep]:
        """Copies of the first carries, the loop, and copies of the last carries."""
        operands, results = outer
        n, c = form.constants, form.carries
        before: list[AnyStep] = []
        after: list[AnyStep] = []
        if form.length == 0:
            pairs = zip(operands[n : n + c], results[:c], strict=True)
            return [CopyStep(a, r, group.origin) for a, r in pairs]
        body = self.program(group.inner[0], place.turns(form.length))
        for param, operand in zip(body.inputs[:n], operands[:n], strict=True):
            self.arrays.put(param, operand)
        self.slices(body, form, (operands[n + c :], results[c:]), place.depth)
        body.steps = without_copies(body.steps, self.arrays, body.kept())
        carries = list(zip(body.inputs[n : n + c], body.results[:c], strict=True))
        handover = Handover(body.steps, self.arrays)
        held: list[int] = []
        for (param, made), first, last in zip(
            carries, operands[n : n + c], results[:c], strict=True
        ):
            if handover.has(made, param) or (
                not self.has_room(param, form) and handover.take(made, param)
            ):
                self.arrays.put(param, last)
                self.arrays.put(made, last)
                before.append(CopyStep(first, last, group.origin))
                held.append(last)
            else:
                ring, start, end = self.ring(param, made, form.length, place.depth)
                before.append(CopyStep(first, start, group.origin))
                after.append(CopyStep(end, last, group.origin))
                held.append(ring)
        same = self.updated(body, form, handover, outer)
        pairs = frozenset([(operands[i], results[j]) for i, j in same])
        body.steps = handover.steps()
        levels = self.levels(body, [(body.inputs[i], body.results[j]) for i, j in same])
        read = (*operands[:n], *operands[n + c :], *held)
        turns, written = Turns(levels, form.length), (*held, *results[c:])
        step = ControlStep(turns, read, written, group.origin, pairs)
        return [*before, step, *after]

    def slices(
        self, body: Inner, form: Scan, stacks: tuple[Sequence[int], Sequence[int]], depth: int
    ) -> None:
        """Has the slices of stacked arrays lie in them, or be copied where they cannot."""
        n, c = form.constants, form.carries
        for param, stack in zip(body.inputs[n + c :], stacks[0], strict=True):
            where = self.slice_of(param, stack, form, depth)
            if where != param:
                body.steps.insert(0, CopyStep(where, param))
        for made, stack in zip(body.results[c:], stacks[1], strict=True):
            where = self.slice_of(made, stack, form, depth)
            if where != made:
                body.steps.append(CopyStep(made, where))

    def updated(
        self, body: Inner, form: Scan, handover: Handover, outer: tuple[list[int], list[int]]
    ) -> list[tuple[int, int]]:
        """Positions of stacked operands and results that may be one memory.

        Each turn reads its slice of one before it writes that of the other: the caches of layers,
        for example.
        """
        operands, _ = outer
        first, c = form.constants + form.carries, form.carries
        found: dict[int, int] = {}
        for j in range(c, len(body.results)):
            for i in range(first, len(operands)):
                param, made = body.inputs[i], body.results[j]
                alone = operands.count(operands[i]) == 1 and i not in found
                where_they_are = self.arrays.is_put(param) and self.arrays.is_put(made)
                updates = handover.updates(made, param) and handover.has(made, param)
                if alone and where_they_are and updates:
                    found[i] = j
                    break
        return list(found.items())

    def slice_of(self, array: int, stack: int, form: Scan, depth: int) -> int:
        """The array that is a slice of ``stack``: ``array`` itself where kernels can use that."""
        stride = self.arrays.size(array)
        first, step = (form.length - 1, -1) if form.reverse else (0, 1)
        moves = (Move(depth, stride, form.length, first, step),)
        info = self.arrays.infos[array]
        start = self.target.start_of(memory_type(info.elem), info.length)
        usable = form.length == 1 or stride % start == 0
        where = array if usable else self.arrays.like(array)
        self.arrays.put(where, stack, moves=moves if form.length > 1 and stride else ())
        return where

    def has_room(self, carry: int, form: Scan) -> bool:
        """Whether two places cost less than turns in which steps wait for each other.

        They cost two copies, and memory; a barrier more in each turn costs a GPU more than that.
        """
        small = self.arrays.size(carry) <= SMALL
        return small and form.length >= _MANY_TURNS and self.target.kind is TargetKind.GPU

    def ring(self, param: int, made: int, length: int, depth: int) -> tuple[int, int, int]:
        """Two places for a carry: the array of both, and its parts before and after all turns."""
        arrays = self.arrays
        stride = aligned(arrays.size(param))
        ring = arrays.new_bytes(stride + arrays.size(param))
        arrays.put(param, ring, moves=(Move(depth, stride, 2, 0),))
        arrays.put(made, ring, moves=(Move(depth, stride, 2, 1),))
        start, end = arrays.like(param), arrays.like(param)
        arrays.put(start, ring)
        arrays.put(end, ring, offset=stride * (length % 2))
        return ring, start, end

    # -- while ----------------------------------------------------------------------------------

    def repeat(
        self, group: ControlGroup, form: While, outer: tuple[list[int], list[int]], place: Place
    ) -> list[AnyStep]:
        """Copies of the first carries into the results, where condition and body use them."""
        operands, results = outer
        split = form.condition_constants
        start = split + form.body_constants
        condition = self.program(group.inner[0], place)
        body = self.program(group.inner[1], place)
        given = (*operands[:split], *results), (*operands[split:start], *results)
        for inner, lies in zip((condition, body), given, strict=True):
            for param, array in zip(inner.inputs, lies, strict=True):
                self.arrays.put(param, array)
        predicate = self.arrays.like(condition.results[0])
        self.arrays.put(condition.results[0], predicate)
        condition.steps = without_copies(condition.steps, self.arrays, condition.kept())
        body.steps = without_copies(body.steps, self.arrays, body.kept())
        handover = Handover(body.steps, self.arrays)
        carries = list(zip(body.results, body.inputs[form.body_constants :], strict=True))
        taken = [handover.take(made, param) for made, param in carries]
        body.steps = handover.steps()
        for (made, param), works in zip(carries, taken, strict=True):
            if works:
                self.arrays.put(made, param)
            else:
                body.steps.append(CopyStep(made, param))
        pairs = zip(operands[start:], results, strict=True)
        before = [CopyStep(a, r, group.origin) for a, r in pairs]
        repeat = Repeat(self.levels(condition), predicate, self.levels(body))
        read = (*operands[:start], *results)
        return [*before, ControlStep(repeat, read, (*results, predicate), group.origin)]

    # -- branch ---------------------------------------------------------------------------------

    def branch(
        self, group: ControlGroup, outer: tuple[list[int], list[int]], place: Place
    ) -> list[AnyStep]:
        """One step; every branch reads the operands and writes the results where they are."""
        operands, results = outer
        index, given = operands[0], operands[1:]
        inner = [self.program(parts, place) for parts in group.inner]
        for part in inner:
            for param, operand in zip(part.inputs, given, strict=True):
                self.arrays.put(param, operand)
            part.steps = without_copies(part.steps, self.arrays, part.kept())
        handovers = [Handover(part.steps, self.arrays) for part in inner]
        same = self.both(inner, handovers, operands)
        for part, handover in zip(inner, handovers, strict=True):
            part.steps = handover.steps()
            for made, result in zip(part.results, results, strict=True):
                self.arrays.put(made, result)
        pairs = [(given[i], results[j]) for i, j in same]
        levels = tuple([self.levels(part, pairs) for part in inner])
        form = Choose(index, levels)
        return [ControlStep(form, tuple(operands), tuple(results), group.origin, frozenset(pairs))]

    def both(
        self, inner: Sequence[Inner], handovers: Sequence[Handover], operands: Sequence[int]
    ) -> list[tuple[int, int]]:
        """Pairs of an operand and a result that may be one memory in every branch.

        Operands that most branches update, or give as they are, come first.
        """
        index, *given = operands
        alone = [i for i, a in enumerate(given) if a != index and given.count(a) == 1]
        found: dict[int, int] = {}
        for j in range(len(inner[0].results)):
            blocks = [(h, p.results[j], p.inputs) for h, p in zip(handovers, inner, strict=True)]
            often = {i: sum(h.updates(made, its[i]) for h, made, its in blocks) for i in alone}
            for i in sorted([i for i in alone if often[i]], key=lambda i: -often[i]):
                if i not in found and all(h.take(made, its[i]) for h, made, its in blocks):
                    found[i] = j
                    break
        return list(found.items())
