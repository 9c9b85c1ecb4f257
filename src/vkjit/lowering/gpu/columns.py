"""Reductions of rows that lie side by side in memory (sums of columns) on the GPU.

A workgroup has a run of neighbouring rows along x, a vector of them for each invocation, so that
its reads are whole lines of memory; its members along y walk the reduced axes in turns and meet in
shared memory. Where that makes too few workgroups, the reduced axes are cut into parts: a second
kernel of the same form folds the states of the parts. The order of the additions is the same in
every run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import final

from vkjit.lowering.gpu.grid import Grid, power_of_two
from vkjit.lowering.gpu.index import index_type
from vkjit.lowering.gpu.lanes import aligned, spread, vector_lanes
from vkjit.lowering.gpu.meeting import State
from vkjit.lowering.gpu.teams import row_axis, side_by_side
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.specs import ReduceRule
from vkjit.lowering.kernel.types import Access, BinOp, CmpOp, scalar_of
from vkjit.lowering.plan.groups import LoopGroup, ReduceStep
from vkjit.lowering.target import Target
from vkjit.lowering.templates.body import Point, access_of, arguments, evaluate, needed, store
from vkjit.lowering.templates.context import Buffers, Lowered, TemplateContext
from vkjit.lowering.templates.phases import full_values, phases
from vkjit.lowering.templates.space import coordinates

_WORKGROUPS = 256
"""Enough to fill a large device."""
_ENOUGH = 96
"""Workgroups from which on parts gain less than the kernel that joins them costs."""
_MOST_PARTS = 256
_STEPS = 8
"""Elements of each member, at least, where the reduced axes are cut into parts."""
_WIDE = 32
_NARROW = 8
_LARGE = 1024
_UNROLL = 4


@final
@dataclass(frozen=True, slots=True)
class ColumnTeam:
    """``beside`` x ``lanes`` rows in a workgroup, ``members`` for each, ``parts`` of the sum."""

    axis: int
    lanes: int
    beside: int
    members: int
    parts: int = 1


def column_team(group: LoopGroup, target: Target) -> ColumnTeam | None:
    """Who sums the columns of a compact group; None where it is no such group.

    It is one when its rows lie side by side, and all its stores are of reductions of one pass.
    """
    full = full_values(group)
    one_pass = max(phases(group).values(), default=0) == 1
    if not one_pass or any(s.value in full for s in group.stores) or not side_by_side(group):
        return None
    split = len(group.shape) - group.reduced
    axis = row_axis(group)
    lanes = vector_lanes(group, axis)
    lanes = lanes if aligned(group, axis, lanes) else 1
    walkers = math.prod(group.shape[:split]) // lanes
    length = math.prod(group.shape[split:])
    beside = _beside(walkers, lanes, target)
    blocks = -(-walkers // beside)
    # Many workgroups need not be large.
    room = min(_LARGE if blocks < 2 * _WORKGROUPS else _WORKGROUPS, target.max_invocations)
    room = min(room // beside, target.max_workgroup[1], max(1, length // 4))
    members = 1 << (max(1, room).bit_length() - 1)
    states = [v for s in group.body if isinstance(s, ReduceStep) for v in _initial(s.rule, lanes)]
    while members > 1 and _shared(states, beside * members) > target.shared_bytes:
        members //= 2
    parts = 1
    if blocks < _ENOUGH and length >= 2 * members * _STEPS:
        parts = min(_WORKGROUPS // blocks, length // (members * _STEPS), _MOST_PARTS)
    return ColumnTeam(axis, lanes, beside, members, parts)


def _beside(walkers: int, lanes: int, target: Target) -> int:
    """Invocations along x: whole lines of memory, fewer where that gives more workgroups."""
    least = _WIDE if lanes == 1 else _NARROW
    options = [x for x in (_WIDE, _WIDE // 2, _NARROW) if x >= least]
    found = next((x for x in options if walkers >= x * _WORKGROUPS), least)
    return min(found, power_of_two(walkers), target.max_workgroup[0])


def _initial(rule: ReduceRule, lanes: int) -> State:
    return rule.initial(Builder("types"), lanes)


def _shared(states: Sequence[Value], invocations: int) -> int:
    """Bytes of shared memory in which states of so many invocations meet."""
    return sum(scalar_of(v.type).bytes * getattr(v.type, "lanes", 1) * invocations for v in states)


def columns(group: LoopGroup, who: ColumnTeam, context: TemplateContext) -> list[Lowered]:
    """One kernel, or two where there are parts, for a compact group."""
    work = _Columns(group, who, context)
    if who.parts == 1:
        return [work.whole()]
    return [work.fold(), work.join()]


States = dict[int, State]
"""The state of each reduction."""


@final
@dataclass(frozen=True, slots=True)
class _Block:
    """Indices and number of this invocation's rows, its part, and whether it writes."""

    at: list[Value]
    row: Value
    part: Value
    writes: Value


Walk = Callable[[Builder, Buffers, _Block], States]
Finish = Callable[[Builder, Buffers, _Block, States], None]


@final
class _Columns:
    """What the kernels share."""

    def __init__(self, group: LoopGroup, who: ColumnTeam, context: TemplateContext) -> None:
        self.group = group
        self.who = who
        self.context = context
        split = len(group.shape) - group.reduced
        self.row_shape, self.columns = group.shape[:split], group.shape[split:]
        self.count, self.length = math.prod(self.row_shape), math.prod(self.columns)
        self.walkers = self.count // who.lanes
        self.steps = [n for n, s in enumerate(group.body) if isinstance(s, ReduceStep)]
        step = who.members * _UNROLL
        self.part = -(-self.length // (who.parts * step)) * step
        self.parts = -(-self.length // max(1, self.part)) if who.parts > 1 else 1
        # For each reduction, an array for each value of its state.
        self.between: dict[int, tuple[int, ...]] = {}

    def rule(self, number: int) -> ReduceRule:
        """How reduction ``number`` folds."""
        step = self.group.body[number]
        assert isinstance(step, ReduceStep)
        return step.rule

    def buffers(self, b: Builder, access: Access) -> Buffers:
        """The arrays of the group, and those between the kernels."""
        arrays = dict.fromkeys([a for found in self.between.values() for a in found], access)
        return Buffers(b, self.context, access_of(self.group.body, self.group.stores) | arrays)

    def whole(self) -> Lowered:
        """One kernel from elements to results."""
        b = Builder("columns", index_type(self.context, self.length))
        buffers = self.buffers(b, Access.READ)
        return self.kernel(b, buffers, 1, self.elements, self.results)

    def fold(self) -> Lowered:
        """The states of all parts."""
        b = Builder("columns_part", index_type(self.context, self.length))
        for number in self.steps:
            self.between[number] = tuple(
                self.context.new_array(scalar_of(v.type), self.count * self.parts)
                for v in _initial(self.rule(number), 1)
            )
        buffers = self.buffers(b, Access.WRITE)
        return self.kernel(b, buffers, self.parts, self.elements, self.keep)

    def join(self) -> Lowered:
        """The results, from the states of all parts."""
        b = Builder("columns_join", index_type(self.context, self.length))
        buffers = self.buffers(b, Access.READ)
        members = min(self.who.members, power_of_two(self.parts))
        work = _Columns(self.group, replace(self.who, members=members), self.context)
        work.between, work.parts = self.between, self.parts
        return work.kernel(b, buffers, 1, work.states_of_parts, work.results)

    def kernel(
        self, b: Builder, buffers: Buffers, parts: int, walk: Walk, finish: Finish
    ) -> Lowered:
        """Each invocation does ``walk``, they meet, and member 0 of every row does ``finish``."""
        who = self.who
        blocks = -(-self.walkers // who.beside)
        grid = Grid(blocks * parts, self.context.target)
        with grid.each(b) as position:
            block = self.block(b, position, parts)
            states = self.met(b, walk(b, buffers, block))
            with b.branch(block.writes).then():
                finish(b, buffers, block, states)
        kernel = b.finish(grid.shape, (who.beside, who.members, 1), self.group.origin)
        return Lowered(kernel, buffers.arrays)

    def block(self, b: Builder, position: Value, parts: int) -> _Block:
        """Rows and part of this invocation."""
        who, blocks = self.who, -(-self.walkers // self.who.beside)
        part: Value = b.index(0)
        if parts > 1:
            # Neighbouring workgroups read neighbouring rows of memory.
            part = b.binary(BinOp.DIV_U, position, b.index(blocks))
            position = b.binary(BinOp.REM_U, position, b.index(blocks))
        number = b.add(b.scaled(position, who.beside), b.local_id(0))
        row = number
        writes = b.compare(CmpOp.EQ, b.local_id(1), b.index(0))
        if self.walkers % who.beside:
            row = b.binary(BinOp.MIN_U, number, b.index(self.walkers - 1))
            is_row = b.compare(CmpOp.LT_U, number, b.index(self.walkers))
            writes = b.binary(BinOp.AND, writes, is_row)
        at = spread(b, row, self.row_shape, who.axis, who.lanes)
        return _Block(at, row, part, writes)

    def row_point(self, b: Builder, block: _Block) -> Point:
        """A point of the rows themselves; reduced indices are 0 and must not matter."""
        indices = [*block.at, *[b.index(0)] * len(self.columns)]
        return Point(b, indices, self.who.axis, self.who.lanes)

    # -- walks ------------------------------------------------------------------------------------

    def elements(self, b: Builder, buffers: Buffers, block: _Block) -> States:
        """The states of this invocation's elements."""
        body, lanes = self.group.body, self.who.lanes
        wanted = [a for n in self.steps for a in arguments(body[n])]
        per_row = [n for n in needed(body, wanted, {}) if n not in full_values(self.group)]
        known = evaluate(self.row_point(b, block), buffers, body, per_row, {})

        def visit(position: Value, states: States) -> States:
            indices = [*block.at, *coordinates(b, position, self.columns)]
            point = Point(b, indices, self.who.axis, lanes)
            values = evaluate(point, buffers, body, wanted, known)
            where = b.splat(position, lanes)
            return {
                n: self.rule(n).step(
                    b, states[n], b.splat(values[arguments(body[n])[0]], lanes), where
                )
                for n in self.steps
            }

        first, end = b.index(0), b.index(self.length)
        if self.parts > 1:
            first = b.scaled(block.part, self.part)
            end = b.binary(BinOp.MIN_S, b.offset(first, self.part), end)
        return self.looped(b, (first, end), visit)

    def states_of_parts(self, b: Builder, buffers: Buffers, block: _Block) -> States:
        """The states of this invocation's parts."""

        def visit(position: Value, states: States) -> States:
            where = self.slot(b, block, position)
            return {
                n: self.rule(n).merge(
                    b,
                    states[n],
                    tuple(b.load(buffers.of(a), where, self.who.lanes) for a in self.between[n]),
                )
                for n in self.steps
            }

        return self.looped(b, (b.index(0), b.index(self.parts)), visit)

    def looped(
        self,
        b: Builder,
        bounds: tuple[Value, Value],
        visit: Callable[[Value, States], States],
    ) -> States:
        """States after this invocation's positions, several a turn."""
        (first, end), step = bounds, self.who.members
        states: States = {n: self.rule(n).initial(b, self.who.lanes) for n in self.steps}
        whole = b.binary(BinOp.AND, b.sub(end, first), b.index(-step * _UNROLL))
        middle = b.add(first, whole)
        member = b.local_id(1)
        for lower, upper, turns in ((first, middle, _UNROLL), (middle, end, 1)):
            flat = [v for n in self.steps for v in states[n]]
            start = b.add(lower, member)
            with b.loop(start, upper, b.index(step * turns), flat, "col") as loop:
                states = self.grouped(loop.carried, states)
                for turn in range(turns):
                    states = visit(b.offset(loop.index, turn * step), states)
                loop.yields(*[v for n in self.steps for v in states[n]])
            states = self.grouped(loop.results, states)
        return states

    def grouped(self, flat: Sequence[Value], like: States) -> States:
        """Values in the order of ``like`` as states."""
        rest = iter(flat)
        return {n: tuple(next(rest) for _ in like[n]) for n in self.steps}

    # -- meeting ----------------------------------------------------------------------------------

    def met(self, b: Builder, states: States) -> States:
        """The states of all members of each row; right in member 0."""
        return {
            n: self.halved(b, n, states[n]) if self.who.members > 1 else states[n] for n in states
        }

    def halved(self, b: Builder, number: int, state: State) -> State:
        """One reduction's states merged by halves of the members."""
        who, rule = self.who, self.rule(number)
        row = who.beside * who.lanes
        memory = [
            b.scratch(f"s{number}_{part}", scalar_of(v.type), row * who.members)
            for part, v in enumerate(state)
        ]
        member, lanes = b.local_id(1), who.lanes
        slot = b.add(b.scaled(member, row), b.scaled(b.local_id(0), lanes))
        half = who.members // 2
        # Members of the upper half hand over; the others add and go on.
        while half:
            gives = b.binary(
                BinOp.AND,
                b.compare(CmpOp.GE_U, member, b.index(half)),
                b.compare(CmpOp.LT_U, member, b.index(2 * half)),
            )
            with b.branch(gives).then():
                for where, value in zip(memory, state, strict=True):
                    b.store(where, slot, value)
            b.barrier()
            takes = b.branch(b.compare(CmpOp.LT_U, member, b.index(half)), [v.type for v in state])
            with takes.then() as region:
                other = b.offset(slot, half * row)
                right = tuple(b.load(m, other, lanes) for m in memory)
                region.yields = rule.merge(b, state, right)
            with takes.otherwise() as region:
                region.yields = state
            state = takes.results
            half //= 2
        return state

    # -- ends -------------------------------------------------------------------------------------

    def slot(self, b: Builder, block: _Block, part: Value) -> Value:
        """Where the states of a part of these rows are."""
        return b.add(b.scaled(part, self.count), b.scaled(block.row, self.who.lanes))

    def keep(self, b: Builder, buffers: Buffers, block: _Block, states: States) -> None:
        """Stores the states of a part."""
        where = self.slot(b, block, block.part)
        for number, state in states.items():
            for array, value in zip(self.between[number], state, strict=True):
                b.store(buffers.of(array), where, value)

    def results(self, b: Builder, buffers: Buffers, block: _Block, states: States) -> None:
        """Stores what the group makes of its reductions."""
        body = self.group.body
        known = {n: self.rule(n).finish(b, state) for n, state in states.items()}
        point = self.row_point(b, block)
        values = evaluate(point, buffers, body, {s.value for s in self.group.stores}, known)
        for step in self.group.stores:
            store(point, buffers, step, values[step.value])
