"""Scatter-add on the GPU: parallel, and with the sums of a serial loop over the updates.

Every update looks whether it is the first with its index. That first one owns the target there: it
adds its followers in order. With few updates each invocation looks on its own, in one kernel; with
many a kernel before ranks the updates by index (by counting, stable), so that the followers of an
owner are neighbours in that order. Very many updates are ranked and added chunk after chunk:
comparisons grow with the square of a chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import final

from vkjit.lowering.gpu.grid import each_item, power_of_two
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
_CHUNK = 1 << 12
"""Updates that are ranked together, where there are not so many that it takes ``_MOST_CHUNKS``."""
_MOST_CHUNKS = 16
_UNROLL = 4

State = tuple[Value, ...]
Visit = Callable[[Value, Value, Value | None, State], State]
"""Indices (a vector or one), the position of the first, a mask and a state to the next state."""


def scatter_add(group: ScatterAddGroup, context: TemplateContext) -> list[Lowered]:
    """The kernels of a scatter-add; the sum at an index is that of its updates in order."""
    work = _Scatter(group, context)
    if group.outer * group.count**2 * (group.inner // work.lanes) <= _ONE_KERNEL:
        return [work.searching()]
    starts = range(0, group.count, work.chunk)
    return [work.ranking(), *[work.adding(start) for start in starts]]


@final
class _Scatter:
    """What the kernels share."""

    def __init__(self, group: ScatterAddGroup, context: TemplateContext) -> None:
        self.group = group
        self.context = context
        self.target = dense((group.outer, group.size, group.inner))
        self.lanes = _lanes(group, self.target)
        many = power_of_two(-(-group.count // _MOST_CHUNKS))
        self.chunk = max(_CHUNK, many)
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
        items = group.outer * group.count * (group.inner // self.lanes)
        b = Builder("scatter_add", index_type(self.context, items))
        buffers = self.buffers(b)

        def visit(item: Value) -> None:
            shape = (group.outer, group.count, group.inner // self.lanes)
            outer, number, column = coordinates(b, item, shape)
            index = self.index(b, buffers, number)
            earlier, end = self.ends(b, buffers, number, index)
            is_first = b.compare(CmpOp.EQ, earlier, b.const(I32, 0))
            owns = b.binary(BinOp.AND, is_first, self.inside(b, index))
            with b.branch(owns).then():
                at = self.point(b, (outer, index, column))
                before = load(at, buffers, self.reading())
                total = b.add(before, self.update(b, buffers, (outer, number, column)))
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

        grid, workgroup = each_item(b, items, self.context.target, visit)
        return Lowered(b.finish(grid, workgroup, group.origin), buffers.arrays)

    def ends(
        self, b: Builder, buffers: Buffers, number: Value, index: Value
    ) -> tuple[Value, Value]:
        """Whether an earlier update has this index, as 0 or 1; and where the search for later ends.

        Later ones are remembered by the vector of indices they lie in, which costs one operation
        for all its lanes.
        """

        def earlier(found: Value, where: Value, mask: Value | None, state: State) -> State:
            any_ = _any(b, _both(b, _equal(b, found, index), mask))
            return b.select(any_, b.const(I32, 1), state[0]), state[1]

        def later(found: Value, where: Value, mask: Value | None, state: State) -> State:
            any_ = _any(b, _both(b, _equal(b, found, index), mask))
            end = b.offset(where, _lanes_of(found))
            return state[0], b.select(any_, end, state[1])

        initial = b.const(I32, 0), b.index(0)
        found, end = self.over_indices(b, buffers, number, initial, (earlier, later))
        return found, end

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

            def counted(found: Value, where: Value, mask: Value | None, sums: State) -> State:
                mine = b.splat(index, _lanes_of(found))
                tests = (b.compare(op, found, mine) for op in (CmpOp.LE, CmpOp.LT))
                return tuple(
                    _added(b, total, _both(b, test, mask))
                    for total, test in zip(sums, tests, strict=True)
                )

            def before(found: Value, where: Value, mask: Value | None, sums: State) -> State:
                return *counted(found, where, mask, sums[:2]), *sums[2:]

            def after(found: Value, where: Value, mask: Value | None, sums: State) -> State:
                return *sums[:2], *counted(found, where, mask, sums[2:])

            zero = b.const(I32, 0)
            # Among the updates before and after: those with at most this index, and with less.
            most, less, most_after, less_after = self.over_indices(
                b, buffers, number, (zero,) * 4, (before, after)
            )
            begin = b.add(less, less_after)
            start = _narrow(b, self.chunk_of(b, number))
            # The update itself is in neither half.
            same = b.sub(b.offset(b.add(most, most_after), 1), begin)
            rank = _as_index(b, b.add(start, b.add(most, less_after)))
            is_first = b.compare(CmpOp.EQ, most, less)
            owns = b.binary(BinOp.AND, is_first, self.inside(b, index))
            b.store(buffers.of(self.order), rank, _narrow(b, number))
            b.store(buffers.of(self.begin), number, b.add(start, begin))
            b.store(buffers.of(self.many), number, b.select(owns, same, zero))

        grid, workgroup = each_item(b, group.count, context.target, visit)
        return Lowered(b.finish(grid, workgroup, group.origin), buffers.arrays)

    def chunk_of(self, b: Builder, number: Value) -> Value:
        """Where the chunk of an update starts."""
        if self.group.count <= self.chunk:
            return b.index(0)
        return b.binary(BinOp.AND, number, b.index(-self.chunk))

    def adding(self, start: int) -> Lowered:
        """Each owner of a chunk adds its followers, neighbours in the order of indices."""
        group = self.group
        count = min(self.chunk, group.count - start)
        items = group.outer * count * (group.inner // self.lanes)
        b = Builder("scatter_add", index_type(self.context, items))
        buffers = self.buffers(b, order=Access.READ, begin=Access.READ, many=Access.READ)

        def visit(item: Value) -> None:
            shape = (group.outer, count, group.inner // self.lanes)
            outer, number, column = coordinates(b, item, shape)
            number = b.offset(number, start)
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

        grid, workgroup = each_item(b, items, self.context.target, visit)
        return Lowered(b.finish(grid, workgroup, group.origin), buffers.arrays)

    # -- parts ------------------------------------------------------------------------------------

    def over_indices(
        self,
        b: Builder,
        buffers: Buffers,
        number: Value,
        states: State,
        visits: tuple[Visit, Visit],
    ) -> State:
        """Visits the indices of all updates of a chunk but ``number``, in order.

        The first of ``visits`` gets those before it, the second those after it; several at a time
        where indices lie in vectors. The block with ``number`` itself is given to both, masked.
        """
        count, view = self.group.count, self.group.indices.view
        lanes = LANES if view.strides == (1,) and view.offset % LANES == 0 else 1
        block = lanes * _UNROLL
        start = self.chunk_of(b, number)
        stop: Value = b.index(count)
        if count > self.chunk:
            stop = b.binary(BinOp.MIN_S, b.offset(start, self.chunk), stop)
        whole = b.binary(BinOp.AND, stop, b.index(-block))
        if count <= self.chunk:
            whole = b.index(count - count % block)
        mine = b.binary(BinOp.AND, number, b.index(-block))
        next_ = b.binary(BinOp.MIN_S, b.offset(mine, block), whole)
        before, after = visits
        spans = (
            (start, mine, _UNROLL, (before,)),
            (mine, next_, _UNROLL, visits),
            (next_, whole, _UNROLL, (after,)),
            (whole, stop, 1, visits),
        )
        for first, end, turns, chosen in spans:
            width = lanes if turns > 1 else 1
            with b.loop(first, end, b.index(width * turns), states, "other") as loop:
                states = loop.carried
                for turn in range(turns):
                    where = b.offset(loop.index, turn * width)
                    found = load(Point(b, [where], 0, width), buffers, self.group.indices)
                    found = _as_index(b, found)
                    for visit in chosen:
                        mask = None
                        if len(chosen) == 2:
                            op = CmpOp.LT if visit is before else CmpOp.GT
                            mask = _against(b, op, where, number, width)
                        states = visit(found, where, mask, states)
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


def _lanes_of(value: Value) -> int:
    return value.type.lanes if isinstance(value.type, VecType) else 1


def _equal(b: Builder, found: Value, index: Value) -> Value:
    return b.compare(CmpOp.EQ, found, b.splat(index, _lanes_of(found)))


def _against(b: Builder, op: CmpOp, where: Value, number: Value, lanes: int) -> Value:
    """Positions from ``where`` on compared with ``number``."""
    positions = where if lanes == 1 else b.add(b.splat(where, lanes), b.iota(lanes))
    return b.compare(op, positions, b.splat(number, lanes))


def _both(b: Builder, test: Value, mask: Value | None) -> Value:
    return test if mask is None else b.binary(BinOp.AND, test, mask)


def _any(b: Builder, test: Value) -> Value:
    """Whether any lane holds."""
    lanes = _lanes_of(test)
    parts = [b.extract(test, lane) for lane in range(lanes)] if lanes > 1 else [test]
    return functools.reduce(lambda x, y: b.binary(BinOp.OR, x, y), parts)


def _added(b: Builder, total: Value, test: Value) -> Value:
    """``total`` and the number of lanes that hold."""
    lanes = _lanes_of(test)
    ones = b.convert(ConvertOp.ZEXT, test, with_elem(test.type, I32))
    for lane in range(lanes):
        total = b.add(total, b.extract(ones, lane) if lanes > 1 else ones)
    return total


def _as_index(b: Builder, value: Value) -> Value:
    """An ``i32`` value in the kernel's index type."""
    return b.convert(ConvertOp.SEXT, value, with_elem(value.type, b.kernel.index_type))


def _narrow(b: Builder, value: Value) -> Value:
    """An index as ``i32``."""
    return b.convert(ConvertOp.TRUNC, value, I32)
