"""From kernels in order to a plan: buffers, donation, work done once, memory, barriers."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import final

from vkjit.errors import ArgumentError, InternalError
from vkjit.lowering.artifact import Launch, Plan, PlannedBuffer, Range, Role
from vkjit.lowering.kernel.nodes import Kernel
from vkjit.lowering.kernel.types import Access
from vkjit.lowering.plan.groups import (
    IOTA,
    ContractGroup,
    GatherStep,
    Group,
    LoadStep,
    LoopGroup,
)
from vkjit.lowering.plan.hazards import barriers
from vkjit.lowering.plan.memory import Arena, arena, lifetimes
from vkjit.lowering.plan.order import Order, Use, by_levels
from vkjit.lowering.templates.context import memory_type

Pairs = frozenset[tuple[int, int]]
SizeOf = Callable[[int], int]

_PREPACK_BYTES = 256 << 20
"""Most memory spent on constants in packed form, unless VKJIT_PREPACK_BYTES says otherwise."""


@final
@dataclass(frozen=True, slots=True)
class KernelStep:
    """A legalized kernel, the arrays behind its buffers, and what it computes.

    ``in_place`` are pairs (read, written) of arrays that may share their memory; a step that
    ``copies`` does nothing where they do.
    """

    kernel: Kernel
    arrays: tuple[int, ...]
    origin: tuple[str, ...]
    in_place: Pairs = frozenset()
    copies: bool = False

    def written(self) -> list[int]:
        """Arrays that the kernel writes."""
        return [a for a, b in self._pairs() if b is not Access.READ]

    def read(self) -> list[int]:
        """Arrays that the kernel reads."""
        return [a for a, b in self._pairs() if b is not Access.WRITE]

    def _pairs(self) -> list[tuple[int, Access]]:
        return [(a, b.access) for a, b in zip(self.arrays, self.kernel.buffers, strict=True)]


def updated_in_place(group: Group) -> Pairs:
    """Pairs (read, written) that may be one memory: every element is read where it is written.

    That holds in a pointwise group, and in the epilogue of a product, for an array whose only read
    has the view of the only write of the other, and elements of the same size: templates load all
    that an element needs before they store any of it, and store each element once.
    """
    if isinstance(group, ContractGroup):
        operands = {group.lhs.array, group.rhs.array}
    elif isinstance(group, LoopGroup) and not group.reduced:
        operands = set[int]()
    else:
        return frozenset()
    reads: dict[int, list[object]] = {}
    for step in group.body:
        if isinstance(step, LoadStep):
            place = step.view, memory_type(step.type).bytes
            reads.setdefault(step.array, []).append(place)
        elif isinstance(step, GatherStep):
            reads.setdefault(step.array, []).append(None)
    writes: dict[int, list[object]] = {}
    for store in group.stores:
        place = store.view, memory_type(group.body[store.value].type).bytes
        writes.setdefault(store.array, []).append(place)
    return frozenset(
        (source, target)
        for source, places in reads.items()
        for target, targets in writes.items()
        if len(places) == 1 and places == targets and source not in operands
    )


def is_copy(group: Group) -> bool:
    """Whether a group writes exactly what it reads, element by element."""
    if not isinstance(group, LoopGroup) or len(group.body) != 1 or len(group.stores) != 1:
        return False
    step, store = group.body[0], group.stores[0]
    if group.reduced or not isinstance(step, LoadStep) or step.array == IOTA:
        return False
    return step.view == store.view


@final
@dataclass(frozen=True, slots=True)
class SplitSteps:
    """Steps that depend on constants alone, the others, and the arrays the others take over."""

    once: tuple[KernelStep, ...]
    each_call: tuple[KernelStep, ...]
    kept: tuple[int, ...]


def split_constant(
    steps: Sequence[KernelStep], constants: int, results: Collection[int], size: SizeOf
) -> SplitSteps:
    """Takes the steps that read nothing but constants out of the call, as far as memory allows.

    Args:
        steps: in order.
        constants: number of leading arrays that are constants.
        results: arrays that must be written in every call.
        size: bytes of an array.
    """
    limit = prepack_limit()
    writers: dict[int, int] = {}
    for step in steps:
        for array in step.written():
            writers[array] = writers.get(array, 0) + 1
    known = set(range(constants))
    once: list[KernelStep] = []
    each_call: list[KernelStep] = []
    for step in steps:
        made = step.written()
        spent = sum(size(a) for a in made)
        fixed = (
            constants > 0
            and all(a in known for a in step.read())
            and all(writers[a] == 1 and a not in results for a in made)
        )
        if fixed and spent <= limit:
            limit -= spent
            known.update(made)
            once.append(step)
        else:
            each_call.append(step)
    wanted = {a for step in each_call for a in step.read()}
    kept = tuple(a for step in once for a in step.written() if a in wanted)
    return SplitSteps(tuple(once) if kept else (), tuple(each_call), kept)


def prepack_limit() -> int:
    """Most bytes that constants may take in packed form."""
    asked = os.environ.get("VKJIT_PREPACK_BYTES", str(_PREPACK_BYTES))
    if not asked.isdecimal():
        raise ArgumentError(f"VKJIT_PREPACK_BYTES: {asked!r} is not a number of bytes, such as 0")
    return int(asked)


@final
class Layout:
    """Buffers of a plan: constants, inputs, results and the arena, and which array lies where.

    Arrays 0 to ``inputs`` - 1 come from outside, the first ``constants`` of them and the arrays
    ``kept`` are constants.
    """

    def __init__(
        self,
        size: SizeOf,
        inputs: int,
        results: Sequence[int],
        constants: int = 0,
        kept: Sequence[int] = (),
    ) -> None:
        self.size = size
        self.inputs = inputs
        self.results = list(results)
        self.constants = constants
        self.kept = list(kept)
        self.taken: dict[int, int] = {}

    def donate(self, steps: Sequence[KernelStep], donated: Collection[int]) -> list[KernelStep]:
        """Lets results take over the memory of donated inputs of their size.

        The steps that write the result must come after those that use the input, or be one that
        updates the elements in place; steps are put off where that needs it.

        Returns:
            the steps in an order that allows it.
        """
        if not donated:
            return list(steps)
        order = Order([Use(tuple(s.read()), tuple(s.written())) for s in steps])
        free = [self.constants + d for d in donated]
        for result in self.results:
            for candidate in self._candidates(result, free, steps, order):
                if order.put_off(order.writers(result), order.users(candidate)):
                    free.remove(candidate)
                    self.taken[result] = candidate - self.constants
                    break
        return [steps[n] for n in order.sequence()]

    def _candidates(
        self, result: int, free: Sequence[int], steps: Sequence[KernelStep], order: Order
    ) -> list[int]:
        """Donated inputs whose memory may serve ``result``, those updated in place first.

        Only the first step that writes the result may read them: it may write any element.
        """
        writers = order.writers(result)

        def shared(candidate: int) -> set[int]:
            return set(writers) & set(order.users(candidate))

        fits = [
            c
            for c in free
            if self.size(c) == self.size(result)
            and all(w == writers[0] and (c, result) in steps[w].in_place for w in shared(c))
        ]
        return sorted(fits, key=lambda c: not shared(c))

    def levels(self, steps: Sequence[KernelStep]) -> list[list[KernelStep]]:
        """The steps in levels of independent ones, results counted as what they take over."""
        memory = {r: i + self.constants for r, i in self.taken.items()}

        def numbers(arrays: Sequence[int]) -> tuple[int, ...]:
            return tuple([memory.get(a, a) for a in arrays])

        uses = [Use(numbers(s.read()), numbers(s.written())) for s in steps]
        sizes = {a: self.size(a) for a in self._temporaries(steps)}
        outside = [a for a in range(self.inputs) if a not in memory.values()]
        others = sum(self.size(a) for a in (*outside, *self.results))
        return [[steps[n] for n in level] for level in by_levels(uses, sizes, others)]

    def _temporaries(self, steps: Sequence[KernelStep]) -> set[int]:
        named = {*range(self.inputs), *self.results, *self.kept}
        return {a for step in steps for a in step.arrays if a not in named}

    def _check_written(self, name: str, steps: Sequence[KernelStep]) -> None:
        """Checks that no step reads an array that no step before it writes."""
        written = {*range(self.inputs), *self.kept}
        for step in steps:
            for array in step.read():
                if array not in written and self.size(array):
                    raise InternalError(
                        f"plan {name}: {step.kernel.name} ({'; '.join(step.origin)}) reads array "
                        f"{array} before anything has written it"
                    )
            written.update(step.written())

    def plan(
        self, name: str, levels: Sequence[Sequence[KernelStep]], largest: int = 0
    ) -> tuple[Plan, Arena]:
        """The finished plan and its arena, in buffers of at most ``largest`` bytes unless 0.

        Arrays that steps of one level use never share memory: they may run at the same time.
        """
        steps = [step for level in levels for step in level]
        self._check_written(name, steps)
        sizes = {a: self.size(a) for a in self._temporaries(steps)}
        touched = [[a for step in level for a in step.arrays] for level in levels]
        space = arena(lifetimes(touched, sizes), largest)
        buffers: list[PlannedBuffer] = []
        where: dict[int, Range] = {}

        def place(array: int, role: Role, position: int) -> None:
            where[array] = Range(len(buffers), 0, self.size(array))
            buffers.append(PlannedBuffer(role, self.size(array), position))

        for array in range(self.inputs):
            if array < self.constants:
                place(array, Role.CONSTANT, array)
            else:
                place(array, Role.INPUT, array - self.constants)
        for position, array in enumerate(self.kept):
            place(array, Role.CONSTANT, self.constants + position)
        for position, array in enumerate(self.results):
            taken = self.taken.get(array)
            where[array] = (
                Range(len(buffers), 0, self.size(array))
                if taken is None
                else where[taken + self.constants]
            )
            buffers.append(PlannedBuffer(Role.OUTPUT, self.size(array), position, taken))
        for array, offset in space.offsets.items():
            part, start = divmod(offset, space.limit)
            where[array] = Range(len(buffers) + part, start, self.size(array))
        for position, nbytes in enumerate(space.buffers()):
            buffers.append(PlannedBuffer(Role.ARENA, nbytes, position))
        launches = tuple(
            Launch(step.kernel, tuple(where[a] for a in step.arrays), step.origin)
            for step in steps
            if not (step.copies and where[step.arrays[0]] == where[step.arrays[-1]])
        )
        peak = sum(b.size for b in buffers if b.donated is None)
        return Plan(name, tuple(buffers), launches, barriers(launches), peak, space.size), space
