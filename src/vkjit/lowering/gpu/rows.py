"""Groups with reductions on the GPU: rows walked by the members of a ``Team``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

from vkjit.lowering.gpu.grid import Grid, each_item, within
from vkjit.lowering.gpu.index import index_type
from vkjit.lowering.gpu.lanes import spread
from vkjit.lowering.gpu.meeting import Meeting, State, Team
from vkjit.lowering.gpu.teams import default_team
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.specs import ReduceRule
from vkjit.lowering.kernel.types import BinOp, CmpOp
from vkjit.lowering.plan.groups import LoopGroup, ReduceStep, StoreStep
from vkjit.lowering.target import Target
from vkjit.lowering.templates.body import Point, access_of, arguments, evaluate, needed, store
from vkjit.lowering.templates.context import Buffers, Lowered, TemplateContext
from vkjit.lowering.templates.phases import full_values, phases
from vkjit.lowering.templates.space import coordinates


def rows(group: LoopGroup, context: TemplateContext, who: Team | None = None) -> list[Lowered]:
    """One kernel for a compact group with reduced axes."""
    target = context.target
    who = who or default_team(group, target)
    split = len(group.shape) - group.reduced
    count, length = math.prod(group.shape[:split]), math.prod(group.shape[split:])
    b = Builder("rows", index_type(context, max(count, length)))
    buffers = Buffers(b, context, access_of(group.body, group.stores))
    nest = Nest(b, group, buffers, who, target)
    if who.size == 1 and who.rows == 1:
        grid, workgroup = each_item(b, count, target, nest.row)
        return [Lowered(b.finish(grid, workgroup, group.origin), buffers.arrays)]
    whole = Grid(-(-count // who.rows), target)
    with whole.each(b) as position:
        nest.row(position)
    kernel = b.finish(whole.shape, who.workgroup, group.origin)
    kernel.subgroup = nest.meeting.subgroup
    return [Lowered(kernel, buffers.arrays)]


@final
@dataclass(slots=True)
class Chunk:
    """A vector of the row that a member keeps: the full values there that are known so far.

    ``inside`` says whether the row reaches there; None: always. ``column`` may lie outside, the
    point never does.
    """

    point: Point
    column: Value
    inside: Value | None
    values: dict[int, Value] = field(default_factory=dict[int, Value])


@final
class Nest:
    """One group on its way to a kernel: its rows, and who walks them."""

    def __init__(
        self, b: Builder, group: LoopGroup, buffers: Buffers, who: Team, target: Target
    ) -> None:
        self.b = b
        self.group = group
        self.buffers = buffers
        self.who = who
        self.split = len(group.shape) - group.reduced
        self.row_shape = group.shape[: self.split]
        self.columns = group.shape[self.split :]
        self.length = math.prod(self.columns)
        self.phase = phases(group)
        self.full = full_values(group)
        self.meeting = Meeting(b, who, target)
        self.chunks: list[Chunk] = []
        # Every other walk runs backwards: the end of the row is still in the nearest cache.
        self.walks = 0
        # Bounds of the part of the row that this workgroup walks; None: all of it.
        self.part: tuple[Value, Value] | None = None

    def row(self, position: Value) -> None:
        """All phases of the row at ``position``, or of this invocation's of the rows there."""
        at, is_row = self.place(position)
        self.chunks = [self.chunk(at, number) for number in range(self.who.keep)]
        known: dict[int, Value] = {}
        for phase in range(1, max(self.phase.values(), default=0) + 1):
            steps = [n for n, p in self.phase.items() if p == phase]
            known = self.before(at, steps, known)
            known.update(self.fold(at, steps, known))
        with within(self.b, is_row, math.prod(self.row_shape), self.reach()):
            self.write(at, known)

    def before(
        self, at: Sequence[Value], steps: Sequence[int], known: dict[int, Value]
    ) -> dict[int, Value]:
        """``known`` and the row values that the reductions ``steps`` use."""
        body = self.group.body
        used = needed(body, [a for n in steps for a in arguments(body[n])], known)
        wanted = [n for n in used if n not in self.full]
        return evaluate(self.row_point(at), self.buffers, body, wanted, known)

    def place(self, position: Value) -> tuple[list[Value], Value]:
        """Indices of the row, and its number.

        The last workgroup repeats the last row where there are no more: all must meet.
        """
        b, many = self.b, self.who.rows
        number = position if many == 1 else b.add(b.scaled(position, many), self.meeting.row)
        count = math.prod(self.row_shape)
        inside = number
        if self.reach() > count:
            inside = b.binary(BinOp.MIN_U, number, b.index(count - 1))
        return spread(b, inside, self.row_shape, self.who.axis, 1), number

    def reach(self) -> int:
        """Rows that all workgroups together have room for."""
        return -(-math.prod(self.row_shape) // self.who.rows) * self.who.rows

    def row_point(self, at: Sequence[Value]) -> Point:
        """A point of the row itself; reduced indices are 0 and must not matter."""
        return Point(self.b, [*at, *[self.b.index(0)] * len(self.columns)])

    def point(self, at: Sequence[Value], column: Value) -> Point:
        """The elements of the row from the position ``column``."""
        indices = [*at, *coordinates(self.b, column, self.columns)]
        return Point(self.b, indices, len(indices) - 1, self.who.lanes, aligned=True)

    def chunk(self, at: Sequence[Value], number: int) -> Chunk:
        """Vector ``number`` of those that this member keeps."""
        b, lanes = self.b, self.who.lanes
        step = self.who.size * lanes
        column = b.offset(b.scaled(self.meeting.member, lanes), number * step)
        if (number + 1) * step <= self.length:
            return Chunk(self.point(at, column), column, None)
        inside = b.compare(CmpOp.LT_U, column, b.index(self.length))
        clamped = b.binary(BinOp.MIN_U, column, b.index(self.length - lanes))
        return Chunk(self.point(at, clamped), column, inside)

    def spans(self) -> list[tuple[Value, Value, int, int]]:
        """Loops that together walk the row: bounds, step and vectors of one turn."""
        b, lanes, unroll = self.b, self.who.lanes, self.who.unroll
        step = self.who.size * lanes
        mine = b.scaled(self.meeting.member, lanes)
        first, end = self.part or (b.index(0), b.index(self.length))
        if unroll == 1:
            return [(b.add(first, mine), end, step, 1)]
        if self.part is None:
            middle: Value = b.index(self.length - self.length % (step * unroll))
        else:
            whole = b.binary(BinOp.AND, b.sub(end, first), b.index(-step * unroll))
            middle = b.add(first, whole)
        head = (b.add(first, mine), middle, step * unroll, unroll)
        if self.part is None and self.length % (step * unroll) == 0:
            return [head]
        return [head, (b.add(middle, mine), end, step, 1)]

    def fold(
        self, at: Sequence[Value], steps: Sequence[int], known: dict[int, Value]
    ) -> dict[int, Value]:
        """One pass over the row; gives the values of the reductions ``steps``."""
        states = self.states(at, steps, known)
        return {n: rule.finish(self.b, state) for n, (rule, state) in states.items()}

    def states(
        self, at: Sequence[Value], steps: Sequence[int], known: dict[int, Value]
    ) -> dict[int, tuple[ReduceRule, State]]:
        """One pass over the row, or its part; gives the states, the same in all members."""
        b, lanes = self.b, self.who.lanes
        found = [s for n in steps if isinstance(s := self.group.body[n], ReduceStep)]
        initial = [s.rule.initial(b, lanes) for s in found]
        flat: Sequence[Value] = [v for state in initial for v in state]
        if self.chunks:
            for chunk in self.chunks:
                flat = self.folded_chunk(chunk, found, flat, known)
        else:
            flat = self.folded_spans(at, found, flat, known)
        out: dict[int, tuple[ReduceRule, State]] = {}
        rest = list(flat)
        for number, step, state in zip(steps, found, initial, strict=True):
            mine, rest = tuple(rest[: len(state)]), rest[len(state) :]
            out[number] = step.rule, self.meeting.merged(step.rule, mine, lanes)
        return out

    def folded_chunk(
        self,
        chunk: Chunk,
        steps: Sequence[ReduceStep],
        states: Sequence[Value],
        known: dict[int, Value],
    ) -> list[Value]:
        """States after a kept vector, whose values are remembered."""
        wanted = [s.arg for s in steps]
        values = evaluate(chunk.point, self.buffers, self.group.body, wanted, known | chunk.values)
        chunk.values = {n: v for n, v in values.items() if n in self.full}
        after = self.stepped(steps, states, values, (chunk.point, chunk.column))
        if chunk.inside is None:
            return after
        pairs = zip(after, states, strict=True)
        return [self.b.select(chunk.inside, new, old) for new, old in pairs]

    def folded_spans(
        self,
        at: Sequence[Value],
        steps: Sequence[ReduceStep],
        states: Sequence[Value],
        known: dict[int, Value],
    ) -> Sequence[Value]:
        """States after a walk along the row."""
        b, wanted = self.b, [s.arg for s in steps]
        self.walks += 1
        for lower, upper, step, unroll in self.spans():
            with b.loop(lower, upper, b.index(step), states, hint="col") as loop:
                states = loop.carried
                for column, point in self.turns(at, loop.index, step, unroll):
                    values = evaluate(point, self.buffers, self.group.body, wanted, known)
                    states = self.stepped(steps, states, values, (point, column))
                loop.yields(*states)
            states = loop.results
        return states

    def turns(
        self, at: Sequence[Value], first: Value, step: int, unroll: int
    ) -> list[tuple[Value, Point]]:
        """The vectors of one turn of a loop."""
        b = self.b
        columns = [b.offset(first, turn * (step // unroll)) for turn in range(unroll)]
        if self.walks % 2 == 0:
            last = b.index(self.length - self.who.lanes)
            columns = [b.sub(last, column) for column in columns]
        return [(column, self.point(at, column)) for column in columns]

    def stepped(
        self,
        steps: Sequence[ReduceStep],
        states: Sequence[Value],
        values: dict[int, Value],
        where: tuple[Point, Value],
    ) -> list[Value]:
        """States after the elements at a point and column."""
        b, lanes, (point, column) = self.b, self.who.lanes, where
        index = column if lanes == 1 else point.spread(column, 1)
        after: list[Value] = []
        for step in steps:
            size = len(step.rule.initial(b, lanes))
            before = tuple(states[len(after) : len(after) + size])
            element = b.splat(values[step.arg], lanes)
            after.extend(step.rule.step(b, before, element, index))
        return after

    def write(self, at: Sequence[Value], known: dict[int, Value]) -> None:
        """Stores row values once, then full values element by element."""
        body = self.group.body
        per_row = [s for s in self.group.stores if s.value not in self.full]
        per_element = [s for s in self.group.stores if s.value in self.full]
        used = needed(body, [s.value for s in self.group.stores], known)
        values = evaluate(
            self.row_point(at), self.buffers, body, [n for n in used if n not in self.full], known
        )
        if per_row:
            self.write_row(at, per_row, values)
        if per_element and self.chunks:
            self.write_chunks(per_element, values)
        elif per_element:
            self.write_spans(at, per_element, values)

    def write_chunks(self, steps: Sequence[StoreStep], known: dict[int, Value]) -> None:
        """Stores full values of the kept vectors, after all have been computed."""
        wanted = [s.value for s in steps]
        for chunk in self.chunks:
            chunk.values = evaluate(
                chunk.point, self.buffers, self.group.body, wanted, known | chunk.values
            )
        for chunk in self.chunks:
            if chunk.inside is None:
                self.write_point(chunk.point, steps, chunk.values)
                continue
            with self.b.branch(chunk.inside).then():
                self.write_point(chunk.point, steps, chunk.values)

    def write_spans(
        self, at: Sequence[Value], steps: Sequence[StoreStep], known: dict[int, Value]
    ) -> None:
        """Stores full values in a walk along the row."""
        b, wanted = self.b, [s.value for s in steps]
        self.walks += 1
        for lower, upper, step, unroll in self.spans():
            with b.loop(lower, upper, b.index(step), hint="col") as loop:
                points = [point for _, point in self.turns(at, loop.index, step, unroll)]
                found = [
                    evaluate(point, self.buffers, self.group.body, wanted, known)
                    for point in points
                ]
                for point, values in zip(points, found, strict=True):
                    self.write_point(point, steps, values)

    def write_point(
        self, point: Point, steps: Sequence[StoreStep], values: dict[int, Value]
    ) -> None:
        """Stores values at a point."""
        for step in steps:
            store(point, self.buffers, step, values[step.value])

    def write_row(
        self, at: Sequence[Value], steps: Sequence[StoreStep], values: dict[int, Value]
    ) -> None:
        """Stores row values from the first invocation of the row."""
        b = self.b
        if self.who.size == 1:
            self.write_point(self.row_point(at), steps, values)
            return
        with b.branch(b.compare(CmpOp.EQ, self.meeting.member, b.index(0))).then():
            self.write_point(self.row_point(at), steps, values)
