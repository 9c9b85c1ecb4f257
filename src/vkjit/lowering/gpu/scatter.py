"""Scatter-add on the GPU: parallel, and with the sums of a serial loop over the updates.

Every update looks whether it is the first with its index. That first one owns the target there: it
adds its followers in order. With few updates each invocation looks on its own, in one kernel; with
many a kernel before ranks the updates by index (by counting, stable), so that the followers of an
owner are neighbours in that order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from vkjit.lowering.gpu.grid import each_item
from vkjit.lowering.gpu.index import index_type
from vkjit.lowering.gpu.lanes import BYTES, LANES
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.types import (
    I32,
    Access,
    BinOp,
    CmpOp,
    ConvertOp,
    VecType,
    with_elem,
)
from vkjit.lowering.kernel.views import View, dense
from vkjit.lowering.plan.groups import LoadStep, ScatterAddGroup, StoreStep
from vkjit.lowering.templates.body import Point, load, store
from vkjit.lowering.templates.context import Buffers, Lowered, TemplateContext
from vkjit.lowering.templates.space import coordinates

_ONE_KERNEL = 1 << 26
"""Comparisons of indices that cost about as much as another launch."""
_UNROLL = 4

Visit = Callable[[Value, Value, tuple[Value, ...]], tuple[Value, ...]]
"""Indices, their positions and a state to the next state; scalars or vectors."""


def scatter_add(group: ScatterAddGroup, context: TemplateContext) -> list[Lowered]:
    """The kernels of a scatter-add; the sum at an index is that of its updates in order."""
    work = _Scatter(group, context)
    if group.outer * group.count**2 * (group.inner // work.lanes) <= _ONE_KERNEL:
        return [work.searching()]
    return [work.ranking(), work.adding()]


@final
class _Scatter:
    """What the kernels share."""

    def __init__(self, group: ScatterAddGroup, context: TemplateContext) -> None:
        self.group = group
        self.context = context
        self.target = dense((group.outer, group.size, group.inner))
        self.lanes = _lanes(group, self.target)
        # Filled by ``ranking``: updates by index, and the place and number of each owner's.
        self.order = self.begin = self.many = -1

    def buffers(self, b: Builder, **temporaries: Access) -> Buffers:
        """The arrays of the group, and those between the kernels, by name."""
        group = self.group
        access = {
            group.indices.array: Access.READ,
            group.updates.array: Access.READ,
            group.target: Access.READ_WRITE,
        }
        access.update({getattr(self, name): how for name, how in temporaries.items()})
        return Buffers(b, self.context, access)

    # -- one kernel -------------------------------------------------------------------------------

    def searching(self) -> Lowered:
        """Every invocation finds the first and last update with its index."""
        group = self.group
        b = Builder("scatter_add", index_type(self.context))
        buffers = self.buffers(b)

        def visit(item: Value) -> None:
            shape = (group.outer, group.count, group.inner // self.lanes)
            outer, number, column = coordinates(b, item, shape)
            index = self.index(b, buffers, number)
            first, last = self.ends(b, buffers, index)
            owns = b.binary(BinOp.AND, b.compare(CmpOp.EQ, first, number), self.inside(b, index))
            with b.branch(owns).then():
                at = self.point(b, (outer, index, column))
                before = load(at, buffers, self.reading())
                total = b.add(before, self.update(b, buffers, (outer, number, column)))
                end = b.offset(last, 1)
                start = b.offset(number, 1)
                with b.loop(start, end, carried=(total,), hint="update") as loop:
                    same = b.compare(CmpOp.EQ, self.index(b, buffers, loop.index), index)
                    chosen = b.branch(same, (total.type,))
                    with chosen.then() as region:
                        where = (outer, loop.index, column)
                        added = b.add(loop.carried[0], self.update(b, buffers, where))
                        region.yields = (added,)
                    with chosen.otherwise() as region:
                        region.yields = (loop.carried[0],)
                    loop.yields(*chosen.results)
                store(at, buffers, self.writing(), loop.results[0])

        items = group.outer * group.count * (group.inner // self.lanes)
        grid, workgroup = each_item(b, items, self.context.target, visit)
        return Lowered(b.finish(grid, workgroup, group.origin), buffers.arrays)

    def ends(self, b: Builder, buffers: Buffers, index: Value) -> tuple[Value, Value]:
        """Positions of the first and the last update with this index."""
        count, none = self.group.count, -1
        states: tuple[Value, ...] = (b.index(count), b.index(none))

        def visit(found: Value, where: Value, carried: tuple[Value, ...]) -> tuple[Value, ...]:
            lanes = found.type.lanes if isinstance(found.type, VecType) else 1
            same = b.compare(CmpOp.EQ, found, b.splat(index, lanes))
            low = b.select(same, where, b.const(where.type, count))
            high = b.select(same, where, b.const(where.type, none))
            first, last = carried
            for lane in range(lanes):
                one, other = (b.extract(v, lane) if lanes > 1 else v for v in (low, high))
                first = b.binary(BinOp.MIN_S, first, one)
                last = b.binary(BinOp.MAX_S, last, other)
            return first, last

        first, last = self.over_indices(b, buffers, states, visit)
        return first, last

    # -- two kernels ------------------------------------------------------------------------------

    def ranking(self) -> Lowered:
        """Each update counts those before it in the order of indices."""
        group, context = self.group, self.context
        b = Builder("scatter_order", index_type(context))
        self.order, self.begin, self.many = (context.new_array(I32, group.count) for _ in range(3))
        kept = {"order": Access.WRITE, "begin": Access.WRITE, "many": Access.WRITE}
        buffers = self.buffers(b, **kept)

        def visit(number: Value) -> None:
            index = self.index(b, buffers, number)

            def count(found: Value, where: Value, carried: tuple[Value, ...]) -> tuple[Value, ...]:
                lanes = found.type.lanes if isinstance(found.type, VecType) else 1
                mine, here = b.splat(index, lanes), b.splat(number, lanes)
                same = b.compare(CmpOp.EQ, found, mine)
                earlier = b.binary(BinOp.AND, same, b.compare(CmpOp.LT, where, here))
                out: list[Value] = []
                for total, holds in zip(
                    carried, (b.compare(CmpOp.LT, found, mine), earlier, same), strict=True
                ):
                    ones = b.convert(ConvertOp.ZEXT, holds, with_elem(holds.type, I32))
                    for lane in range(lanes):
                        total = b.add(total, b.extract(ones, lane) if lanes > 1 else ones)
                    out.append(total)
                return tuple(out)

            zero = b.const(I32, 0)
            less, earlier, same = self.over_indices(b, buffers, (zero,) * 3, count)
            rank = _as_index(b, b.add(less, earlier))
            owns = b.binary(BinOp.AND, b.compare(CmpOp.EQ, earlier, zero), self.inside(b, index))
            b.store(buffers.of(self.order), rank, _narrow(b, number))
            b.store(buffers.of(self.begin), number, less)
            b.store(buffers.of(self.many), number, b.select(owns, same, zero))

        grid, workgroup = each_item(b, group.count, context.target, visit)
        return Lowered(b.finish(grid, workgroup, group.origin), buffers.arrays)

    def adding(self) -> Lowered:
        """Each owner adds its followers, neighbours in the order of indices."""
        group = self.group
        b = Builder("scatter_add", index_type(self.context))
        buffers = self.buffers(b, order=Access.READ, begin=Access.READ, many=Access.READ)

        def visit(item: Value) -> None:
            shape = (group.outer, group.count, group.inner // self.lanes)
            outer, number, column = coordinates(b, item, shape)
            many = _as_index(b, b.load(buffers.of(self.many), number))
            with b.branch(b.compare(CmpOp.GT, many, b.index(0))).then():
                begin = _as_index(b, b.load(buffers.of(self.begin), number))
                at = self.point(b, (outer, self.index(b, buffers, number), column))
                before = load(at, buffers, self.reading())
                with b.loop(begin, b.add(begin, many), carried=(before,), hint="rank") as loop:
                    which = _as_index(b, b.load(buffers.of(self.order), loop.index))
                    update = self.update(b, buffers, (outer, which, column))
                    loop.yields(b.add(loop.carried[0], update))
                store(at, buffers, self.writing(), loop.results[0])

        items = group.outer * group.count * (group.inner // self.lanes)
        grid, workgroup = each_item(b, items, self.context.target, visit)
        return Lowered(b.finish(grid, workgroup, group.origin), buffers.arrays)

    # -- parts ------------------------------------------------------------------------------------

    def over_indices(
        self, b: Builder, buffers: Buffers, states: tuple[Value, ...], visit: Visit
    ) -> tuple[Value, ...]:
        """``visit`` of all indices, several at a time where they lie in vectors."""
        count, view = self.group.count, self.group.indices.view
        lanes = LANES if view.strides == (1,) and view.offset % LANES == 0 else 1
        whole = count - count % (lanes * _UNROLL)
        for start, end, width, turns in ((0, whole, lanes, _UNROLL), (whole, count, 1, 1)):
            if start == end:
                continue
            step = b.index(width * turns)
            with b.loop(b.index(start), b.index(end), step, states, "other") as loop:
                states = loop.carried
                for turn in range(turns):
                    at = Point(b, [b.offset(loop.index, turn * width)], 0, width)
                    where = at.indices[0] if width == 1 else at.spread(at.indices[0], 1)
                    found = _as_index(b, load(at, buffers, self.group.indices))
                    states = visit(found, where, states)
                loop.yields(*states)
            states = loop.results
        return states

    def index(self, b: Builder, buffers: Buffers, number: Value) -> Value:
        """The index of update ``number``."""
        return _as_index(b, load(Point(b, [number]), buffers, self.group.indices))

    def inside(self, b: Builder, index: Value) -> Value:
        """Whether the target has this index."""
        return b.binary(
            BinOp.AND,
            b.compare(CmpOp.GE, index, b.index(0)),
            b.compare(CmpOp.LT, index, b.index(self.group.size)),
        )

    def point(self, b: Builder, where: tuple[Value, Value, Value]) -> Point:
        """A vector along the last axis; its index is counted in vectors."""
        outer, index, column = where
        return Point(b, [outer, index, b.scaled(column, self.lanes)], 2, self.lanes)

    def update(self, b: Builder, buffers: Buffers, where: tuple[Value, Value, Value]) -> Value:
        """The update (or vector of it) at (outer, number, column)."""
        value = load(self.point(b, where), buffers, self.group.updates)
        return b.splat(value, self.lanes)

    def reading(self) -> LoadStep:
        """A read of the target."""
        return LoadStep(self.group.target, self.target, self.group.updates.type)

    def writing(self) -> StoreStep:
        """A write of the target."""
        return StoreStep(0, self.group.target, self.target)


def _lanes(group: ScatterAddGroup, target: View) -> int:
    """Elements of the last axis that one invocation adds."""
    lanes = min(LANES, BYTES // max(group.updates.type.bytes, 4))
    view = group.updates.view
    rest = (view.offset, *view.strides[:2], group.inner, *target.strides[:2])
    vectors = view.strides[2] in (0, 1) and not any(n % lanes for n in rest)
    return lanes if vectors else 1


def _as_index(b: Builder, value: Value) -> Value:
    """An ``i32`` value in the kernel's index type."""
    return b.convert(ConvertOp.SEXT, value, with_elem(value.type, b.kernel.index_type))


def _narrow(b: Builder, value: Value) -> Value:
    """An index as ``i32``."""
    return b.convert(ConvertOp.TRUNC, value, I32)
