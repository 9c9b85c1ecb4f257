"""From kernels in order to a plan: buffers, donation, work done once, memory, barriers."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import assert_never, final

from vkjit.errors import ArgumentError, InternalError
from vkjit.lowering.artifact import (
    Block,
    Branch,
    Copy,
    HostCall,
    Launch,
    Loop,
    Plan,
    PlannedBuffer,
    Range,
    Role,
    Step,
    While,
)
from vkjit.lowering.kernel.elements import memory_type
from vkjit.lowering.plan.groups import (
    IOTA,
    ContractGroup,
    GatherStep,
    Group,
    LoadStep,
    LoopGroup,
)
from vkjit.lowering.plan.hazards import barriers
from vkjit.lowering.plan.memory import Arena, Lifetime, arena
from vkjit.lowering.sharing import Handover
from vkjit.lowering.steps import (
    AnyStep,
    Arrays,
    Choose,
    ControlStep,
    CopyStep,
    KernelStep,
    Levels,
    Pairs,
    Repeat,
    Tell,
    Turns,
    inside,
)

_PREPACK_BYTES = 256 << 20
"""Most memory spent on constants in packed form, unless VKJIT_PREPACK_BYTES says otherwise."""


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
        if isinstance(step, LoadStep) and step.blocks is None:
            place = step.view, memory_type(step.type).bytes
            reads.setdefault(step.array, []).append(place)
        elif isinstance(step, (LoadStep, GatherStep)):
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
    if group.reduced or not isinstance(step, LoadStep) or step.array == IOTA or step.blocks:
        return False
    return step.view == store.view


@final
@dataclass(frozen=True, slots=True)
class SplitSteps:
    """Steps that depend on constants alone, the others, and the arrays the others take over."""

    once: tuple[AnyStep, ...]
    each_call: tuple[AnyStep, ...]
    kept: tuple[int, ...]


def split_constant(
    steps: Sequence[AnyStep], constants: int, results: Collection[int], arrays: Arrays
) -> SplitSteps:
    """Takes the steps that read nothing but constants out of the call, as far as memory allows.

    Of equal ones, such as those that pack an operand of several products, one is done for all.

    Args:
        steps: in order.
        constants: number of leading arrays that are constants.
        results: arrays that must be written in every call.
        arrays: all arrays.
    """
    limit = prepack_limit()
    writers: dict[int, int] = {}
    for step in steps:
        for array in map(arrays.memory, step.written()):
            writers[array] = writers.get(array, 0) + 1
    known = set(range(constants))
    once: list[AnyStep] = []
    results_of: dict[object, list[int]] = {}  # of steps that are done once, by kernel and operands
    each_call: list[AnyStep] = []
    for step in steps:
        made = [arrays.memory(a) for a in step.written()]
        spent = sum(arrays.size(a) for a in made)
        fixed = (
            constants > 0
            and isinstance(step, KernelStep)
            and not step.decodes
            and all(arrays.memory(a) in known for a in step.read())
            and all(writers[a] == 1 and a not in results for a in made)
        )
        same = (id(step.kernel), tuple(step.read())) if isinstance(step, KernelStep) else None
        if fixed and same in results_of and not any(map(arrays.is_put, step.written())):
            for array, equal in zip(step.written(), results_of[same], strict=True):
                arrays.put(array, equal)
        elif fixed and spent <= limit:
            limit -= spent
            known.update(made)
            once.append(step)
            results_of[same] = step.written()
        else:
            each_call.append(step)
    wanted = {arrays.memory(a) for step in each_call for a in step.read()}
    made_once = [arrays.memory(a) for step in once for a in step.written()]
    kept = tuple(a for a in made_once if a in wanted)
    return SplitSteps(tuple(once) if kept else (), tuple(each_call), kept)


def one_by_one(steps: Sequence[AnyStep]) -> Levels:
    """Steps in order, each a level of its own."""
    return tuple((step,) for step in steps)


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
        arrays: Arrays,
        inputs: int,
        results: Sequence[int],
        constants: int = 0,
        kept: Sequence[int] = (),
    ) -> None:
        self.arrays = arrays
        self.inputs = inputs
        self.results = list(results)
        self.constants = constants
        self.kept = list(kept)
        self.taken: dict[int, int] = {}

    def outside(self) -> list[int]:
        """Arrays that hold something before or after the steps."""
        return [*range(self.inputs), *self.kept, *self.results]

    def donate(self, steps: Sequence[AnyStep], donated: Collection[int]) -> list[AnyStep]:
        """Lets results take over the memory of donated inputs of their size.

        Returns:
            the steps in an order that allows it.
        """
        if not donated:
            return list(steps)
        handover = Handover(steps, self.arrays)
        free: dict[int, list[int]] = {}  # by size
        for candidate in [self.constants + d for d in donated]:
            free.setdefault(self.arrays.size(candidate), []).append(candidate)
        for result in self.results:
            alike = free.get(self.arrays.size(result), [])
            updated = handover.updated(result)
            others = [c for c in alike if c not in updated]
            for candidate in [*(c for c in alike if c in updated), *others]:
                if handover.take(result, candidate):
                    alike.remove(candidate)
                    self.taken[result] = candidate - self.constants
                    break
        for result, position in self.taken.items():
            self.arrays.put(result, position + self.constants)
        return handover.steps()

    def plan(self, name: str, levels: Levels, largest: int = 0) -> tuple[Plan, Arena]:
        """The finished plan and its arena, in buffers of at most ``largest`` bytes unless 0."""
        arrays = self.arrays
        check_written(name, levels, arrays, [*range(self.inputs), *self.kept])
        live = lives(levels, arrays, self.outside())
        hosts = arrays.hosts()
        space = arena([t for t in live if t.array not in hosts], largest)
        away = arena([t for t in live if t.array in hosts], largest)
        buffers: list[PlannedBuffer] = []
        where: dict[int, Range] = {}

        def add(array: int, role: Role, position: int, taken: int | None = None) -> None:
            where[array] = Range(len(buffers), 0, arrays.size(array))
            buffers.append(PlannedBuffer(role, arrays.size(array), position, taken))

        for array in range(self.inputs):
            if array < self.constants:
                add(array, Role.CONSTANT, array)
            else:
                add(array, Role.INPUT, array - self.constants)
        for position, array in enumerate(self.kept):
            add(array, Role.CONSTANT, self.constants + position)
        for position, array in enumerate(self.results):
            add(array, Role.OUTPUT, position, self.taken.get(array))
        for found in (space, away):
            first = len(buffers)
            for array, offset in found.offsets.items():
                part, start = divmod(offset, found.limit)
                where[array] = Range(first + part, start, arrays.size(array))
            for nbytes in found.buffers():
                position = sum(b.role is Role.ARENA for b in buffers)
                host = found is away
                buffers.append(PlannedBuffer(Role.ARENA, nbytes, position, host=host))
        block = finished(levels, arrays, where)
        peak = sum(b.size for b in buffers if b.donated is None and not b.host)
        made = Plan(name, tuple(buffers), block.steps, block.barriers, peak, space.size)
        return made, space


def check_written(name: str, levels: Levels, arrays: Arrays, given: Sequence[int]) -> None:
    """Checks that no step reads an array that no step before it writes.

    Raises:
        InternalError: one does; the message names it.
    """
    written = {arrays.root(a) for a in given}

    def visit(steps: Levels) -> None:
        for step in (step for level in steps for step in level):
            for array in step.read():
                if arrays.root(array) not in written and arrays.size(array):
                    raise InternalError(
                        f"plan {name}: {step.name} ({'; '.join(step.origin)}) reads array "
                        f"{array} before anything has written it"
                    )
            for block in inside(step):
                visit(block)
            written.update([arrays.root(a) for a in step.written()])

    visit(levels)


def lives(levels: Levels, arrays: Arrays, outside: Collection[int]) -> list[Lifetime]:
    """Lifetimes of the temporaries, those inside control steps too.

    Arrays that steps of one level use never share memory: they may run at the same time. What is
    used inside a step lives while the step runs.
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    named = {arrays.root(a) for a in outside}
    clock = 0

    def visit(steps: Levels) -> None:
        nonlocal clock
        for level in steps:
            start = clock
            for block in (block for step in level for block in inside(step)):
                visit(block)
            for array in dict.fromkeys(arrays.root(a) for step in level for a in step.arrays):
                first[array] = min(first.get(array, start), start)
                last[array] = clock
            clock += 1

    visit(levels)
    return [Lifetime(a, arrays.size(a), first[a], last[a]) for a in first if a not in named]


def finished(levels: Levels, arrays: Arrays, where: Mapping[int, Range]) -> Block:
    """The steps at their places, with the barriers that they need."""

    def place(array: int) -> Range:
        return arrays.place(array, where)

    steps: list[Step] = []
    for step in (step for level in levels for step in level):
        places = [place(a) for a in step.arrays]
        if step.copies and (places[0] == places[-1] or not places[0].size):
            continue
        match step:
            case KernelStep():
                steps.append(Launch(step.kernel, tuple(places), step.origin))
            case CopyStep():
                steps.append(Copy(*places))
            case ControlStep():
                blocks = [finished(inner, arrays, where) for inner in inside(step)]
                steps.append(_control(step, blocks, place))
            case _:
                assert_never(step)
    return Block(tuple(steps), barriers(steps))


def _control(step: ControlStep, blocks: Sequence[Block], place: Callable[[int], Range]) -> Step:
    match step.form:
        case Turns(length=length):
            return Loop(blocks[0], length, step.origin)
        case Repeat(predicate=predicate):
            return While(blocks[0], place(predicate), blocks[1], step.origin)
        case Choose(index=index):
            return Branch(place(index), tuple(blocks), step.origin)
        case Tell(function=function, arguments=arguments, types=types):
            return HostCall(function, tuple(map(place, arguments)), types, step.origin)
        case _:
            assert_never(step.form)
