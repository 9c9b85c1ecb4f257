"""Groups with reductions on the GPU.

Who walks a row depends on its length and on how rows lie in memory:

- a long row gets a workgroup: invocations walk the reduced axes side by side, in vectors where
  those are contiguous, and meet at the end;
- of rows that lie side by side, 32 share a workgroup, so that neighbours read neighbouring
  elements; several invocations walk each row;
- a short row, or one of very many that lie side by side, gets one invocation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from vkjit.lowering.gpu.grid import Grid, invocations, within
from vkjit.lowering.gpu.lanes import contiguous, spread, vector_lanes
from vkjit.lowering.gpu.loops import each_item
from vkjit.lowering.gpu.meeting import Meeting, State
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.specs import ReduceRule
from vkjit.lowering.kernel.types import BinOp, CmpOp
from vkjit.lowering.plan.groups import LoopGroup, ReduceStep, StoreStep
from vkjit.lowering.target import Target
from vkjit.lowering.templates.body import Point, access_of, arguments, evaluate, needed, store
from vkjit.lowering.templates.context import Buffers, Lowered, TemplateContext
from vkjit.lowering.templates.phases import full_values, phases
from vkjit.lowering.templates.space import coordinates, lane_axis, views_of

_SHORT_ROW = 32
"""Rows of up to this many elements are walked by one invocation."""
_MANY_ROWS = 1 << 14
"""From this many on, rows that lie side by side in memory get one invocation each."""
_SIDE_BY_SIDE = 32
"""Rows in one workgroup: a subgroup of most GPUs, and 128 bytes of float32."""
_VECTORS_FROM = 256
"""Elements of a row from which on it is walked in vectors."""
_LONG_ROW = 1 << 14
"""Elements of a row from which on a workgroup is as large as the device allows, up to 1024."""


@final
@dataclass(frozen=True, slots=True)
class Team:
    """``rows`` rows in a workgroup, ``size`` invocations for each, ``lanes`` elements at a time.

    ``axis`` is the row axis along which neighbouring rows lie.
    """

    rows: int
    size: int
    lanes: int
    axis: int


def team(group: LoopGroup, target: Target) -> Team:
    """Who walks the rows of a compact group."""
    split = len(group.shape) - group.reduced
    count, length = math.prod(group.shape[:split]), math.prod(group.shape[split:])
    views = views_of(group.body, group.stores)
    axis = lane_axis(views, range(split), 4)
    beside = contiguous(views, axis) > contiguous(views, len(group.shape) - 1)
    if length <= _SHORT_ROW or (beside and count >= _MANY_ROWS):
        return Team(1, 1, 1, axis)
    most = invocations(target)
    if beside and group.shape[axis] >= _SIDE_BY_SIDE and most >= 2 * _SIDE_BY_SIDE:
        return Team(_SIDE_BY_SIDE, most // _SIDE_BY_SIDE, 1, axis)
    lanes = vector_lanes(group, len(group.shape) - 1) if length >= _VECTORS_FROM else 1
    wanted = 1024 if length >= _LONG_ROW else 256
    return Team(1, invocations(target, max(32, min(wanted, length // lanes))), lanes, axis)


def rows(group: LoopGroup, context: TemplateContext) -> list[Lowered]:
    """One kernel for a compact group with reduced axes."""
    count = math.prod(group.shape[: len(group.shape) - group.reduced])
    b = Builder("rows", context.target.index_type)
    buffers = Buffers(b, context, access_of(group.body, group.stores))
    who = team(group, context.target)
    nest = Nest(b, group, buffers, who, context.target)
    if who.size == 1:
        grid, workgroup = each_item(b, count, context, nest.row)
        return [Lowered(b.finish(grid, workgroup, group.origin), buffers.arrays)]
    whole = Grid(-(-count // who.rows), context.target)
    with whole.each(b) as position:
        nest.row(position)
    kernel = b.finish(whole.shape, nest.workgroup, group.origin)
    kernel.subgroup = nest.meeting.subgroup
    return [Lowered(kernel, buffers.arrays)]


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
        self.meeting = Meeting(b, who.rows, who.size, target)
        # Bounds of the part of the row that this workgroup walks; None: all of it.
        self.part: tuple[Value, Value] | None = None

    def row(self, position: Value) -> None:
        """All phases of the row at ``position``, or of this invocation's of the rows there."""
        at, is_row = self.place(position)
        known: dict[int, Value] = {}
        for phase in range(1, max(self.phase.values(), default=0) + 1):
            steps = [n for n, p in self.phase.items() if p == phase]
            known = self.before(at, steps, known)
            known.update(self.fold(at, steps, known))
        with within(self.b, is_row, math.prod(self.row_shape), self.reach()):
            self.write(at, known)

    @property
    def workgroup(self) -> tuple[int, int, int]:
        """Rows along x and members along y, or members of one row along x."""
        who = self.who
        return (who.size, 1, 1) if who.rows == 1 else (who.rows, who.size, 1)

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
        number = position if many == 1 else b.add(b.scaled(position, many), b.local_id(0))
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
        return Point(self.b, indices, len(indices) - 1, self.who.lanes)

    def range(self) -> tuple[Value, Value, Value]:
        """Bounds and step of this invocation's walk along the row."""
        b, lanes = self.b, self.who.lanes
        first, end = self.part or (b.index(0), b.index(self.length))
        step = b.index(self.who.size * lanes)
        return b.add(first, b.scaled(self.meeting.member, lanes)), end, step

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
        b, body, lanes = self.b, self.group.body, self.who.lanes
        rules = [s for n in steps if isinstance(s := body[n], ReduceStep)]
        initial = [s.rule.initial(b, lanes) for s in rules]
        states = [v for state in initial for v in state]
        with b.loop(*self.range(), states, hint="col") as loop:
            point = self.point(at, loop.index)
            values = evaluate(point, self.buffers, body, [s.arg for s in rules], known)
            where = loop.index if lanes == 1 else point.spread(loop.index, 1)
            after: list[Value] = []
            for step, state in zip(rules, initial, strict=True):
                before = loop.carried[len(after) : len(after) + len(state)]
                element = b.splat(values[step.arg], lanes)
                after.extend(step.rule.step(b, before, element, where))
            loop.yields(*after)
        out: dict[int, tuple[ReduceRule, State]] = {}
        rest = list(loop.results)
        for number, step, state in zip(steps, rules, initial, strict=True):
            mine, rest = tuple(rest[: len(state)]), rest[len(state) :]
            out[number] = step.rule, self.meeting.merged(step.rule, mine, lanes)
        return out

    def write(self, at: Sequence[Value], known: dict[int, Value]) -> None:
        """Stores row values once, then full values element by element."""
        b, body = self.b, self.group.body
        per_row = [s for s in self.group.stores if s.value not in self.full]
        per_element = [s for s in self.group.stores if s.value in self.full]
        used = needed(body, [s.value for s in self.group.stores], known)
        values = evaluate(
            self.row_point(at), self.buffers, body, [n for n in used if n not in self.full], known
        )
        if per_row:
            self.write_row(at, per_row, values)
        if per_element:
            with b.loop(*self.range(), hint="col") as loop:
                point = self.point(at, loop.index)
                wanted = [s.value for s in per_element]
                found = evaluate(point, self.buffers, body, wanted, values)
                for step in per_element:
                    store(point, self.buffers, step, found[step.value])

    def write_row(
        self, at: Sequence[Value], steps: Sequence[StoreStep], values: dict[int, Value]
    ) -> None:
        """Stores row values from the first invocation of the row."""
        b = self.b
        if self.who.size == 1:
            for step in steps:
                store(self.row_point(at), self.buffers, step, values[step.value])
            return
        with b.branch(b.compare(CmpOp.EQ, self.meeting.member, b.index(0))).then():
            for step in steps:
                store(self.row_point(at), self.buffers, step, values[step.value])
