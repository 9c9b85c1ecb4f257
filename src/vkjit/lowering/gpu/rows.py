"""Groups with reductions on the GPU.

Long rows get a workgroup each: invocations walk the reduced axes side by side, meet in shared
memory, and read the row's result from there. Short rows, and rows that lie side by side in memory,
get one invocation each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

from vkjit.lowering.gpu.grid import Grid, invocations
from vkjit.lowering.gpu.loops import each_item
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.types import CmpOp, Scratch, scalar_of
from vkjit.lowering.plan.groups import LoopGroup, ReduceStep, StoreStep
from vkjit.lowering.templates.body import Point, access_of, arguments, evaluate, needed, store
from vkjit.lowering.templates.context import Buffers, Lowered, TemplateContext
from vkjit.lowering.templates.phases import full_values, phases
from vkjit.lowering.templates.space import compact, coordinates, lane_axis, views_of

_SHORT_ROW = 32
"""Rows of up to this many elements are walked by one invocation."""
_MANY_ROWS = 1024
"""From this many on, rows that lie side by side in memory get one invocation each."""


def rows(group: LoopGroup, context: TemplateContext) -> list[Lowered]:
    """One kernel for a group with reduced axes."""
    group = compact(group)
    split = len(group.shape) - group.reduced
    count, length = math.prod(group.shape[:split]), math.prod(group.shape[split:])
    views = views_of(group.body, group.stores)
    side_by_side = lane_axis(views, range(len(group.shape)), 4) < split
    alone = length <= _SHORT_ROW or (side_by_side and count >= _MANY_ROWS)
    b = Builder("rows", context.target.index_type)
    buffers = Buffers(b, context, access_of(group.body, group.stores))
    size = 1 if alone else invocations(context.target, max(32, min(256, length)))
    nest = _Nest(b, group, buffers, size)
    if alone:
        grid, workgroup = each_item(b, count, context, nest.row)
        return [Lowered(b.finish(grid, workgroup, group.origin), buffers.arrays)]
    grid = Grid(count, context.target)
    with grid.each(b) as position:
        nest.row(position)
    return [Lowered(b.finish(grid.shape, (size, 1, 1), group.origin), buffers.arrays)]


@final
class _Nest:
    """One group on its way to a kernel; ``size`` invocations share a row."""

    def __init__(self, b: Builder, group: LoopGroup, buffers: Buffers, size: int) -> None:
        self.b = b
        self.group = group
        self.buffers = buffers
        self.size = size
        self.split = len(group.shape) - group.reduced
        self.columns = group.shape[self.split :]
        self.length = math.prod(self.columns)
        self.phase = phases(group)
        self.full = full_values(group)
        self.shared: dict[tuple[int, int], Scratch] = {}

    def row(self, position: Value) -> None:
        """All phases of one row."""
        at = coordinates(self.b, position, self.group.shape[: self.split])
        known: dict[int, Value] = {}
        body = self.group.body
        for phase in range(1, max(self.phase.values(), default=0) + 1):
            steps = [n for n, p in self.phase.items() if p == phase]
            used = needed(body, [a for n in steps for a in arguments(body[n])], known)
            wanted = [n for n in used if n not in self.full]
            known = evaluate(self.row_point(at), self.buffers, body, wanted, known)
            known.update(self.fold(at, steps, known))
        self.write(at, known)

    def row_point(self, at: Sequence[Value]) -> Point:
        """A point of the row itself; reduced indices are 0 and must not matter."""
        return Point(self.b, [*at, *[self.b.index(0)] * len(self.columns)])

    def first(self) -> Value:
        """The first element of this invocation."""
        return self.b.index(0) if self.size == 1 else self.b.local_id()

    def fold(
        self, at: Sequence[Value], steps: Sequence[int], known: dict[int, Value]
    ) -> dict[int, Value]:
        """One pass over the row; gives the values of the reductions ``steps``."""
        b, body = self.b, self.group.body
        rules = [s for n in steps if isinstance(s := body[n], ReduceStep)]
        initial = [s.rule.initial(b, 1) for s in rules]
        states = [v for state in initial for v in state]
        with b.loop(
            self.first(), b.index(self.length), b.index(self.size), states, hint="col"
        ) as loop:
            point = Point(b, [*at, *coordinates(b, loop.index, self.columns)])
            values = evaluate(point, self.buffers, body, [s.arg for s in rules], known)
            after: list[Value] = []
            for step, state in zip(rules, initial, strict=True):
                before = loop.carried[len(after) : len(after) + len(state)]
                after.extend(step.rule.step(b, before, values[step.arg], loop.index))
            loop.yields(*after)
        out: dict[int, Value] = {}
        rest = list(loop.results)
        for number, step, state in zip(steps, rules, initial, strict=True):
            mine, rest = tuple(rest[: len(state)]), rest[len(state) :]
            out[number] = step.rule.finish(b, self.together(number, step, mine))
        return out

    def together(
        self, number: int, step: ReduceStep, state: tuple[Value, ...]
    ) -> tuple[Value, ...]:
        """The states of all invocations merged, by halves through shared memory."""
        if self.size == 1:
            return state
        b = self.b
        memory = [self.scratch(number, i, v) for i, v in enumerate(state)]
        local = b.local_id()
        for where, value in zip(memory, state, strict=True):
            b.store(where, local, value)
        half = self.size // 2
        while half:
            b.barrier()
            with b.branch(b.compare(CmpOp.LT_U, local, b.index(half))).then():
                left = tuple(b.load(m, local) for m in memory)
                right = tuple(b.load(m, b.offset(local, half)) for m in memory)
                for where, value in zip(memory, step.rule.merge(b, left, right), strict=True):
                    b.store(where, local, value)
            half //= 2
        b.barrier()
        return tuple(b.load(m, b.index(0)) for m in memory)

    def scratch(self, number: int, part: int, value: Value) -> Scratch:
        """Shared memory for one part of a reduction's state."""
        key = (number, part)
        if key not in self.shared:
            elem = scalar_of(value.type)
            self.shared[key] = self.b.scratch(f"s{number}_{part}", elem, self.size)
        return self.shared[key]

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
            with b.loop(self.first(), b.index(self.length), b.index(self.size), hint="col") as loop:
                point = Point(b, [*at, *coordinates(b, loop.index, self.columns)])
                wanted = [s.value for s in per_element]
                found = evaluate(point, self.buffers, body, wanted, values)
                for step in per_element:
                    store(point, self.buffers, step, found[step.value])

    def write_row(
        self, at: Sequence[Value], steps: Sequence[StoreStep], values: dict[int, Value]
    ) -> None:
        """Stores row values from the first invocation of the row."""
        b = self.b
        if self.size == 1:
            for step in steps:
                store(self.row_point(at), self.buffers, step, values[step.value])
            return
        with b.branch(b.compare(CmpOp.EQ, b.local_id(), b.index(0))).then():
            for step in steps:
                store(self.row_point(at), self.buffers, step, values[step.value])
