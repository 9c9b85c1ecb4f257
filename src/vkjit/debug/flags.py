"""Plans that note which launch first wrote a value that is not finite.

Behind each launch stand kernels that look at what it wrote, on the device: a table has a clock, and
for each launch the time at which it was first found to have written such a value, or 0. The kernels
are those of ordinary programs, compiled for the target, so they run wherever plans do.

An array may be written by several launches, each a part of it. It is looked at behind the last of
them, before anything reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import assert_never, final

import numpy as np

from vkjit import dtypes
from vkjit.debug.modes import Watch
from vkjit.dtypes import DType
from vkjit.errors import InternalError
from vkjit.ir.avals import aval
from vkjit.ir.primitive import Value
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
from vkjit.lowering.compile import compile_program
from vkjit.lowering.kernel.types import BF16, F16, F32, F64, Access, ScalarType
from vkjit.lowering.target import Target
from vkjit.ops.compare import eq, is_finite, ne
from vkjit.ops.logical import and_, not_, select
from vkjit.ops.reduce import reduce_or
from vkjit.ops.structural import add
from vkjit.passes.pipeline import simplify
from vkjit.trace import trace

SLOT = 256
"""Bytes between entries of the table: every target lets arrays start there."""

_FLOATS: dict[ScalarType, DType] = {
    BF16: dtypes.bfloat16,
    F16: dtypes.float16,
    F32: dtypes.float32,
    F64: dtypes.float64,
}


def bad(x: Value, watch: Watch) -> Value:
    """Where elements are not as they should be."""
    return ne(x, x) if watch is Watch.NAN else not_(is_finite(x))


@final
@dataclass(frozen=True, slots=True)
class Flagged:
    """An instrumented plan.

    Its last input is the table, zeros, and must be donated; its last output is the table after the
    run. ``launches`` are those watched: number i has entry i + 1.
    """

    plan: Plan
    launches: tuple[Launch, ...]

    def table(self) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """The table before a run."""
        return np.zeros((len(self.launches) + 1) * SLOT, np.uint8)

    def found(self, table: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> list[int]:
        """The launches that a table names, by the time at which they were."""
        times = table.view(np.int32)[:: SLOT // 4][1:].tolist()
        named = [(time, i) for i, time in enumerate(times) if time]
        return [i for _, i in sorted(named)]


def flagged(plan: Plan, target: Target, watch: Watch) -> Flagged:
    """``plan`` with a look at the floats that each launch writes.

    Raises:
        InternalError: the plan has inputs that are donated.
    """
    made = _Instrument(plan, target, watch)
    return Flagged(made.plan(), tuple(made.launches))


@final
class _Instrument:
    """A plan in the making."""

    def __init__(self, plan: Plan, target: Target, watch: Watch) -> None:
        self.before = plan
        self.target = target
        self.watch = watch
        self.launches: list[Launch] = []
        self.looks: dict[tuple[ScalarType, int], Plan] = {}
        self.noted = _note(target)
        self.table = len(plan.buffers) + 1
        self.room = 0
        every = [i for i, b in enumerate(plan.buffers) if b.role is Role.ARENA]
        arenas = [i for i in every if not plan.buffers[i].host]
        self.arena, self.start = len(plan.buffers) + 2, 0
        if len(arenas) == 1:  # the CPU takes one arena
            self.arena = arenas[0]
            self.start = -(-plan.buffers[self.arena].size // SLOT) * SLOT
        self.arenas = len(every)
        if any(b.donated is not None for b in plan.buffers):
            raise InternalError(f"nans: plan {plan.name} takes over inputs")

    def plan(self) -> Plan:
        """The instrumented plan."""
        block = self.block(self.before.steps)
        buffers = list(self.before.buffers)
        inputs, outputs = (sum(b.role is r for b in buffers) for r in (Role.INPUT, Role.OUTPUT))
        size = (len(self.launches) + 1) * SLOT
        buffers.append(PlannedBuffer(Role.INPUT, size, inputs))
        buffers.append(PlannedBuffer(Role.OUTPUT, size, outputs, donated=inputs))
        total = self.start + self.room
        if self.arena < len(self.before.buffers):
            buffers[self.arena] = replace(buffers[self.arena], size=total)
        elif self.room:
            buffers.append(PlannedBuffer(Role.ARENA, total, self.arenas))
        added = size + self.room
        return replace(
            self.before,
            buffers=tuple(buffers),
            steps=block.steps,
            barriers=block.barriers,
            peak_bytes=self.before.peak_bytes + added,
            arena_bytes=self.before.arena_bytes + self.room,
        )

    def block(self, steps: Sequence[Step]) -> Block:
        """Steps with looks between them, all one after another."""
        made: list[Step] = []
        last = {
            place.buffer: position
            for position, step in enumerate(steps)
            if isinstance(step, Launch)
            for place in step.arguments
        }
        for position, step in enumerate(steps):
            made.append(self.inside(step))
            if isinstance(step, Launch):
                found = [
                    (elem, place)
                    for elem, place in _floats(step)
                    if not _written_again(place, steps[position + 1 : last[place.buffer] + 1])
                ]
                if found:
                    self.launches.append(step)
                for elem, place in found:
                    made += self.look(elem, place, len(self.launches))
        return Block(tuple(made), frozenset(range(1, len(made))))

    def inside(self, step: Step) -> Step:
        """A step with looks in its blocks."""
        match step:
            case Launch() | Copy() | HostCall():
                return step
            case Loop():
                return replace(step, body=self.block(step.body.steps))
            case While():
                condition = self.block(step.condition.steps)
                return replace(step, condition=condition, body=self.block(step.body.steps))
            case Branch():
                blocks = tuple(self.block(b.steps) for b in step.branches)
                return replace(step, branches=blocks)
            case _:
                assert_never(step)

    def look(self, elem: ScalarType, place: Range, entry: int) -> Iterator[Step]:
        """The steps that look at a range."""
        count = place.size // elem.bytes
        key = elem, count
        if key not in self.looks:
            self.looks[key] = _look(elem, count, self.target, self.watch)
        clock, noted = Range(self.table, 0, 4), Range(self.table, entry * SLOT, 4)
        found = Range(self.arena, self.start, 1)
        yield from self.spliced(self.looks[key], [place], [found])
        yield from self.spliced(self.noted, [found, clock, noted], [clock, noted])

    def spliced(
        self, plan: Plan, inputs: Sequence[Range], outputs: Sequence[Range]
    ) -> Iterator[Step]:
        """The launches of a small plan, for buffers that lie here."""
        where: list[Range] = []
        used = self.start + SLOT
        for buffer in plan.buffers:
            match buffer.role:
                case Role.INPUT:
                    where.append(inputs[buffer.position])
                case Role.OUTPUT:
                    where.append(outputs[buffer.position])
                case Role.ARENA:
                    where.append(Range(self.arena, used, buffer.size))
                    used += -(-buffer.size // SLOT) * SLOT
                case Role.CONSTANT:
                    raise InternalError("nans: a look needs no constants")
                case _:
                    assert_never(buffer.role)
        self.room = max(self.room, used - self.start)
        for step in plan.steps:
            if not isinstance(step, Launch):
                raise InternalError("nans: a look is made of launches")
            yield replace(step, arguments=tuple(_moved(r, where[r.buffer]) for r in step.arguments))


def _moved(inner: Range, base: Range) -> Range:
    """A range of a small plan, where its buffer lies at ``base``."""
    return Range(base.buffer, base.offset + inner.offset, inner.size, base.moves)


def _floats(step: Launch) -> list[tuple[ScalarType, Range]]:
    """The arrays of floats that a launch writes."""
    pairs = zip(step.kernel.buffers, step.arguments, strict=True)
    return [
        (b.emulated or b.elem, replace(place, size=b.length * b.elem.bytes))
        for b, place in pairs
        if b.access is not Access.READ and (b.emulated or b.elem) in _FLOATS and b.length
    ]


def _written_again(place: Range, later: Sequence[Step]) -> bool:
    """Whether a later launch writes into a range before anything else touches it."""
    for step in later:
        if not isinstance(step, Launch):
            return False
        pairs = zip(step.kernel.buffers, step.arguments, strict=True)
        touching = [b.access for b, other in pairs if place.overlaps(other)]
        if touching:
            return all(access is Access.WRITE for access in touching)
    return False


def _look(elem: ScalarType, count: int, target: Target, watch: Watch) -> Plan:
    """Whether any of ``count`` elements is bad."""

    def look(x: Value) -> list[Value]:
        return [reduce_or(bad(x, watch), (0,))]

    program = trace(look, [aval((count,), _FLOATS[elem])], "look").program
    return compile_program(simplify(program), target).plan


def _note(target: Target) -> Plan:
    """(found, clock, entry) to (clock, entry), in place."""
    one = aval((), dtypes.int32)

    def note(found: Value, clock: Value, entry: Value) -> list[Value]:
        now = add(clock, np.int32(1))
        return [now, select(and_(found, eq(entry, np.int32(0))), now, entry)]

    program = trace(note, [aval((), dtypes.bool_), one, one], "note").program
    plan = compile_program(simplify(program), target, donated=(1, 2)).plan
    taken = [b.donated for b in plan.buffers if b.role is Role.OUTPUT]
    if taken != [1, 2]:
        raise InternalError(f"nans: outputs of a note take over {taken}, expected [1, 2]")
    return plan
