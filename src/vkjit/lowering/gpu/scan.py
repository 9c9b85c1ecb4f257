"""Scans on the GPU: running reductions along one axis.

Neighbouring lines that lie side by side in memory are walked by neighbouring invocations, several
lines each where they come in vectors. A line that is contiguous is scanned by the invocations of a
workgroup together: each folds a vector, a scan of these sums says where it starts.

Either way long lines are cut into parts where there are too few of them: a first kernel folds the
parts, a second one starts each part from the fold of those before it. The order of the additions is
the same in every run.
"""

from __future__ import annotations

from typing import final

from vkjit.lowering.gpu.grid import Grid, each_item, invocations, power_of_two
from vkjit.lowering.gpu.index import index_type
from vkjit.lowering.gpu.lanes import BYTES, LANES
from vkjit.lowering.gpu.meeting import Meeting, State, Team
from vkjit.lowering.gpu.running import Running
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.types import Access, BinOp, CmpOp, scalar_of
from vkjit.lowering.kernel.views import dense
from vkjit.lowering.plan.groups import ScanGroup, StoreStep
from vkjit.lowering.templates.body import Point, load, store
from vkjit.lowering.templates.context import Buffers, Lowered, TemplateContext
from vkjit.lowering.templates.space import coordinates

_ENOUGH = 1 << 16
"""Invocations that walk lines side by side, from which on parts gain nothing."""
_ENOUGH_GROUPS = 256
"""Workgroups with a line each, from which on parts gain nothing."""
_PART = 32
"""Elements of a part, at least, where one invocation walks it."""
_LONG_PART = 1 << 13
"""Elements of a part, at least, where a workgroup walks it."""
_MOST_PARTS = 512
_WIDE = 256
"""Lines side by side from which on each invocation walks several."""
_UNROLL = 4


def scan(group: ScanGroup, context: TemplateContext) -> list[Lowered]:
    """The kernels of a scan."""
    if group.inner == 1 and group.length > 1:
        return _Lines(group, context).kernels()
    return _Columns(group, context).kernels()


@final
class _Common:
    """What both ways share: arrays, elements, and parts in memory."""

    def __init__(self, group: ScanGroup, context: TemplateContext) -> None:
        self.group = group
        self.context = context
        self.view = dense((group.outer, group.length, group.inner))
        self.lines = group.outer * group.inner
        # One array for each value of a part's state, where there are parts.
        self.between: tuple[int, ...] = ()

    def between_parts(self, parts: int) -> None:
        """Makes the arrays for the states of parts."""
        initial = self.group.rule.initial(Builder("types"), 1)
        self.between = tuple(
            self.context.new_array(scalar_of(v.type), parts * self.lines) for v in initial
        )

    def buffers(self, b: Builder, how: Access) -> Buffers:
        """The arrays of the group, and those between the kernels."""
        access = {self.group.source.array: Access.READ, self.group.target: Access.WRITE}
        return Buffers(b, self.context, access | dict.fromkeys(self.between, how))

    def element(self, b: Builder, position: Value, last: int = 0) -> Value:
        """The index of the element that comes at ``position``, ``last`` elements after it."""
        if not self.group.reverse:
            return position
        return b.sub(b.index(self.group.length - 1 - last), position)

    def writes(self) -> StoreStep:
        """A write of the target."""
        return StoreStep(0, self.group.target, self.view)


@final
class _Columns:
    """Lines side by side: an invocation walks one, or a vector of them."""

    def __init__(self, group: ScanGroup, context: TemplateContext) -> None:
        self.group = group
        self.context = context
        self.common = _Common(group, context)
        self.lanes = self.vector_lanes()
        walkers = self.common.lines // self.lanes
        most = min(_MOST_PARTS, group.length // _PART)
        self.parts = max(1, min(most, _ENOUGH // max(1, walkers)))
        self.step = -(-group.length // self.parts)
        self.parts = max(1, -(-group.length // max(1, self.step)))

    def vector_lanes(self) -> int:
        """Lines that one invocation walks at once."""
        group, view = self.group, self.group.source.view
        lanes = min(LANES, BYTES // max(group.source.type.bytes, 4))
        wide = view.strides[2] in (0, 1) and self.common.lines >= _WIDE
        rest = (view.offset, *view.strides[:2], group.inner)
        return lanes if wide and not any(n % lanes for n in rest) else 1

    def kernels(self) -> list[Lowered]:
        """One kernel, or two where there are parts."""
        if self.parts == 1:
            return [self.running()]
        self.common.between_parts(self.parts)
        return [self.folding(), self.running()]

    def point(self, b: Builder, at: tuple[Value, Value, Value]) -> Point:
        """A vector of lines; the last index is counted in vectors."""
        return Point(b, [*at[:2], b.scaled(at[2], self.lanes)], 2, self.lanes)

    def place(self, b: Builder, item: Value, parts: int) -> tuple[Value, Value, Value]:
        """The part, and the two indices of the line."""
        shape = (parts, self.group.outer, self.group.inner // self.lanes)
        part, outer, inner = coordinates(b, item, shape)
        return part, outer, inner

    def line(self, b: Builder, part: Value, outer: Value, inner: Value) -> Value:
        """Where a part's states are."""
        first = b.add(b.scaled(part, self.common.lines), b.scaled(outer, self.group.inner))
        return b.add(first, b.scaled(inner, self.lanes))

    def folding(self) -> Lowered:
        """The states of all parts but the last."""
        group, common = self.group, self.common
        b = Builder("scan_part", index_type(self.context))
        buffers = common.buffers(b, Access.WRITE)

        def visit(item: Value) -> None:
            part, outer, inner = self.place(b, item, self.parts - 1)
            initial = group.rule.initial(b, self.lanes)
            state = self.walk(b, buffers, (part, outer, inner), initial)
            where = self.line(b, part, outer, inner)
            for array, value in zip(common.between, state, strict=True):
                b.store(buffers.of(array), where, value)

        items = (self.parts - 1) * common.lines // self.lanes
        grid, workgroup = each_item(b, items, self.context.target, visit)
        return Lowered(b.finish(grid, workgroup, group.origin), buffers.arrays)

    def walk(
        self,
        b: Builder,
        buffers: Buffers,
        part: tuple[Value, Value, Value],
        state: State,
        write: StoreStep | None = None,
    ) -> State:
        """The state after a part; every state on the way is stored where ``write`` says."""
        number, *line = part
        start = b.scaled(number, self.step)
        end = b.offset(start, self.step)
        if self.step * self.parts > self.group.length:
            end = b.binary(BinOp.MIN_S, end, b.index(self.group.length))
        span = b.binary(BinOp.AND, b.sub(end, start), b.index(-_UNROLL))
        middle = b.add(start, span)
        for lower, upper, turns in ((start, middle, _UNROLL), (middle, end, 1)):
            with b.loop(lower, upper, b.index(turns), state, "step") as loop:
                state = loop.carried
                at = [self.common.element(b, b.offset(loop.index, turn)) for turn in range(turns)]
                points = [self.point(b, (line[0], where, line[1])) for where in at]
                # All reads before the first write: the driver may not change their order.
                found = [load(point, buffers, self.group.source) for point in points]
                states: list[State] = []
                for value, where in zip(found, at, strict=True):
                    state = self.group.rule.step(b, state, b.splat(value, self.lanes), where)
                    states.append(state)
                for point, after in zip(points, states, strict=True):
                    if write is not None:
                        store(point, buffers, write, self.group.rule.finish(b, after))
                loop.yields(*state)
            state = loop.results
        return state

    def running(self) -> Lowered:
        """The results of all parts, each started from those before it."""
        group, common = self.group, self.common
        b = Builder("scan", index_type(self.context))
        buffers = common.buffers(b, Access.READ)

        def visit(item: Value) -> None:
            part, outer, inner = self.place(b, item, self.parts)
            state = group.rule.initial(b, self.lanes)
            if self.parts > 1:
                state = self.before(b, buffers, (part, outer, inner))
            self.walk(b, buffers, (part, outer, inner), state, common.writes())

        items = self.parts * common.lines // self.lanes
        grid, workgroup = each_item(b, items, self.context.target, visit)
        return Lowered(b.finish(grid, workgroup, group.origin), buffers.arrays)

    def before(self, b: Builder, buffers: Buffers, at: tuple[Value, Value, Value]) -> State:
        """The state of all parts of the lines before this one."""
        part, outer, inner = at
        rule = self.group.rule
        state = rule.initial(b, self.lanes)
        middle = b.binary(BinOp.AND, part, b.index(-_UNROLL))
        for lower, upper, turns in ((b.index(0), middle, _UNROLL), (middle, part, 1)):
            with b.loop(lower, upper, b.index(turns), state, "before") as loop:
                state = loop.carried
                for turn in range(turns):
                    where = self.line(b, b.offset(loop.index, turn), outer, inner)
                    arrays = self.common.between
                    other = tuple(b.load(buffers.of(a), where, self.lanes) for a in arrays)
                    state = rule.merge(b, state, other)
                loop.yields(*state)
            state = loop.results
        return state


@final
class _Lines:
    """Contiguous lines: a workgroup scans one, or a part of it, block by block."""

    def __init__(self, group: ScanGroup, context: TemplateContext) -> None:
        self.group = group
        self.context = context
        self.common = _Common(group, context)
        self.lanes = self.vector_lanes()
        steps = -(-group.length // self.lanes)
        self.size = invocations(context.target, min(512, power_of_two(steps)))
        # Several short lines share a workgroup.
        self.rows = max(1, invocations(context.target) // self.size)
        blocks = max(1, -(-self.common.lines // self.rows))
        parts = 1
        if blocks < _ENOUGH_GROUPS:
            parts = max(1, min(_MOST_PARTS // blocks, group.length // _LONG_PART))
        block = self.size * self.lanes
        self.step = -(-group.length // (parts * block)) * block
        self.parts = -(-group.length // self.step)

    def vector_lanes(self) -> int:
        """Elements that an invocation folds alone."""
        group, view = self.group, self.group.source.view
        lanes = min(LANES, BYTES // max(group.source.type.bytes, 4))
        rest = (view.offset, view.strides[0], group.length)
        return lanes if view.strides[1] == 1 and not any(n % lanes for n in rest) else 1

    def kernels(self) -> list[Lowered]:
        """One kernel, or two where there are parts."""
        if self.parts == 1:
            return [self.running()]
        self.common.between_parts(self.parts)
        return [self.folding(), self.running()]

    def folding(self) -> Lowered:
        """The states of all parts: a workgroup each."""
        group, common, target = self.group, self.common, self.context.target
        b = Builder("scan_part", index_type(self.context))
        buffers = common.buffers(b, Access.WRITE)
        meeting = Meeting(b, Team(1, self.size, self.lanes, 0), target)
        grid = Grid(common.lines * self.parts, target)
        with grid.each(b) as position:
            line, part = self.place(b, position)
            start = b.scaled(part, self.step)
            end = b.binary(BinOp.MIN_S, b.offset(start, self.step), b.index(group.length))
            first = b.add(start, b.scaled(meeting.member, self.lanes))
            state = group.rule.initial(b, self.lanes)
            with b.loop(first, end, b.index(self.size * self.lanes), state, "step") as loop:
                at = self.point(b, line, loop.index)
                value = b.splat(load(at, buffers, group.source), self.lanes)
                where = at.indices[1] if self.lanes == 1 else at.spread(at.indices[1], 1)
                loop.yields(*group.rule.step(b, loop.carried, value, where))
            state = meeting.merged(group.rule, loop.results, self.lanes)
            with b.branch(b.compare(CmpOp.EQ, meeting.member, b.index(0))).then():
                for array, value in zip(common.between, state, strict=True):
                    b.store(buffers.of(array), position, value)
        kernel = b.finish(grid.shape, (self.size, 1, 1), group.origin)
        kernel.subgroup = meeting.subgroup
        return Lowered(kernel, buffers.arrays)

    def place(self, b: Builder, position: Value) -> tuple[Value, Value]:
        """The line and the part at a position of the grid."""
        if self.parts == 1:
            return position, b.index(0)
        parts = b.index(self.parts)
        line = b.binary(BinOp.DIV_U, position, parts)
        return line, b.binary(BinOp.REM_U, position, parts)

    def point(self, b: Builder, line: Value, position: Value) -> Point:
        """The elements that come from ``position`` on, in the order of memory."""
        where = self.common.element(b, position, self.lanes - 1)
        return Point(b, [line, where, b.index(0)], 1, self.lanes)

    def running(self) -> Lowered:
        """The results of all parts, each started from those before it."""
        group, common, target = self.group, self.common, self.context.target
        b = Builder("scan", index_type(self.context))
        buffers = common.buffers(b, Access.READ)
        run = Running(b, group.rule, (self.rows, self.size), target)
        grid = Grid(-(-common.lines // self.rows) * self.parts, target)
        with grid.each(b) as position:
            place, part = self.place(b, position)
            line = b.add(b.scaled(place, self.rows), run.row)
            number = line
            if common.lines % self.rows:
                line = b.binary(BinOp.MIN_U, line, b.index(common.lines - 1))
            state = group.rule.initial(b, 1)
            if self.parts > 1:
                state = self.before(b, buffers, run, (line, part))
            start = b.scaled(part, self.step)
            end = b.binary(BinOp.MIN_S, b.offset(start, self.step), b.index(group.length))
            block = self.size * self.lanes
            if self.step == block:
                self.block(b, buffers, run, (line, number, start), state)
            else:
                with b.loop(start, end, b.index(block), state, "block") as loop:
                    after = self.block(b, buffers, run, (line, number, loop.index), loop.carried)
                    b.barrier()
                    loop.yields(*after)
        kernel = b.finish(grid.shape, (self.size * self.rows, 1, 1), group.origin)
        kernel.subgroup = run.subgroup
        return Lowered(kernel, buffers.arrays)

    def before(self, b: Builder, buffers: Buffers, run: Running, at: tuple[Value, Value]) -> State:
        """The state of all parts of the line before this one."""
        line, part = at
        rule, first = self.group.rule, b.scaled(line, self.parts)
        step = b.index(self.size)
        with b.loop(run.member, part, step, rule.initial(b, 1), "before") as loop:
            where = b.add(first, loop.index)
            other = tuple(b.load(buffers.of(a), where) for a in self.common.between)
            loop.yields(*rule.merge(b, loop.carried, other))
        _, total = run.scanned(loop.results)
        b.barrier()
        return total

    def block(
        self,
        b: Builder,
        buffers: Buffers,
        run: Running,
        at: tuple[Value, Value, Value],
        state: State,
    ) -> State:
        """Scans a block; gives the state after it."""
        group, rule, (line, number, start) = self.group, self.group.rule, at
        position = b.add(start, b.scaled(run.member, self.lanes))
        clamped = b.binary(BinOp.MIN_U, position, b.index(group.length - self.lanes))
        point = self.point(b, line, clamped)
        value = load(point, buffers, group.source)
        inside = b.compare(CmpOp.LT_U, position, b.index(group.length))
        states: list[State] = []
        mine = rule.initial(b, 1)
        for turn in range(self.lanes):
            lane = self.lanes - 1 - turn if group.reverse else turn
            element = b.extract(value, lane) if self.lanes > 1 else value
            where = self.common.element(b, b.offset(clamped, turn))
            mine = rule.step(b, mine, element, where)
            states.append(mine)
        nothing = rule.initial(b, 1)
        folded = tuple(b.select(inside, x, y) for x, y in zip(mine, nothing, strict=True))
        prefix, total = run.scanned(folded)
        prefix = rule.merge(b, state, prefix)
        results = [rule.finish(b, rule.merge(b, prefix, s)) for s in states]
        ordered = results[::-1] if group.reverse else results
        out = b.splat(ordered[0], self.lanes)
        for lane, result in enumerate(ordered[1:], start=1):
            out = b.insert(out, result, lane)
        if self.common.lines % self.rows:
            is_line = b.compare(CmpOp.LT_U, number, b.index(self.common.lines))
            inside = b.binary(BinOp.AND, inside, is_line)
        with b.branch(inside).then():
            store(point, buffers, self.common.writes(), out)
        return rule.merge(b, state, total)
