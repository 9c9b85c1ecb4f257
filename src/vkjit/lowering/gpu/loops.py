"""Pointwise groups, scatter-add and scans on the GPU: one invocation for each independent item."""

from __future__ import annotations

import math
from collections.abc import Callable

from vkjit.lowering.gpu.grid import Grid, invocations, within
from vkjit.lowering.gpu.lanes import spread, vector_lanes
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.types import Access, BinOp, CmpOp
from vkjit.lowering.kernel.views import View, dense
from vkjit.lowering.plan.groups import LoopGroup, ScanGroup, ScatterAddGroup, StoreStep
from vkjit.lowering.templates.body import Point, access_of, evaluate, load, store
from vkjit.lowering.templates.context import Buffers, Lowered, TemplateContext
from vkjit.lowering.templates.space import compact, coordinates, lane_axis, views_of

_VECTORS_FROM = 1 << 16
"""Elements from which on memory, not the launch, is what a pointwise kernel waits for."""


def each_item(
    b: Builder, count: int, context: TemplateContext, visit: Callable[[Value], None]
) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Visits every number below ``count`` in its own invocation; returns grid and workgroup."""
    size = min(invocations(context.target), max(1, 1 << (count - 1).bit_length()))
    grid = Grid(-(-count // size), context.target)
    item = b.add(b.scaled(grid.position(b), size), b.local_id())
    with within(b, item, count, grid.shape[0] * grid.shape[1] * size):
        visit(item)
    return grid.shape, (size, 1, 1)


def pointwise(group: LoopGroup, context: TemplateContext) -> list[Lowered]:
    """One kernel that computes every store of a group without reductions.

    Neighbouring invocations walk the axis along which most arrays are contiguous; where there is
    enough work each takes a vector of it.
    """
    group = compact(group)
    b = Builder("pointwise", context.target.index_type)
    buffers = Buffers(b, context, access_of(group.body, group.stores))
    views = views_of(group.body, group.stores)
    axis = lane_axis(views, range(len(group.shape)), 4)
    count = math.prod(group.shape)
    lanes = vector_lanes(group, axis) if count >= _VECTORS_FROM else 1

    def visit(item: Value) -> None:
        point = Point(b, spread(b, item, group.shape, axis, lanes), axis, lanes)
        values = evaluate(point, buffers, group.body, {s.value for s in group.stores}, {})
        for step in group.stores:
            store(point, buffers, step, values[step.value])

    grid, workgroup = each_item(b, count // lanes, context, visit)
    return [Lowered(b.finish(grid, workgroup, group.origin), buffers.arrays)]


def scatter_add(group: ScatterAddGroup, context: TemplateContext) -> list[Lowered]:
    """One invocation for each column of the target adds the updates in order."""
    b = Builder("scatter_add", context.target.index_type)
    access = {
        group.indices.array: Access.READ,
        group.updates.array: Access.READ,
        group.target: Access.READ_WRITE,
    }
    buffers = Buffers(b, context, access)
    target_view = dense((group.outer, group.size, group.inner))

    def visit(item: Value) -> None:
        outer, inner = coordinates(b, item, (group.outer, group.inner))
        with b.loop(b.index(0), b.index(group.count), hint="update") as loop:
            index = load(Point(b, [loop.index]), buffers, group.indices)
            inside = b.binary(
                BinOp.AND,
                b.compare(CmpOp.GE, index, b.const(index.type, 0)),
                b.compare(CmpOp.LT, index, b.const(index.type, group.size)),
            )
            with b.branch(inside).then():
                update = load(Point(b, [outer, loop.index, inner]), buffers, group.updates)
                there = Point(b, [outer, index, inner])
                before = b.load(buffers.of(group.target), there.base(target_view))
                after = b.add(before, update)
                store(there, buffers, StoreStep(0, group.target, target_view), after)

    grid, workgroup = each_item(b, group.outer * group.inner, context, visit)
    return [Lowered(b.finish(grid, workgroup, group.origin), buffers.arrays)]


def scan(group: ScanGroup, context: TemplateContext) -> list[Lowered]:
    """One invocation for each line runs along it with the state in registers."""
    b = Builder("scan", context.target.index_type)
    access = {group.source.array: Access.READ, group.target: Access.WRITE}
    buffers = Buffers(b, context, access)
    shape = (group.outer, group.length, group.inner)
    view = View(shape, dense(shape).strides)

    def visit(item: Value) -> None:
        outer, inner = coordinates(b, item, (group.outer, group.inner))
        state = group.rule.initial(b, 1)
        with b.loop(b.index(0), b.index(group.length), carried=state, hint="step") as loop:
            step = loop.index
            if group.reverse:
                step = b.sub(b.index(group.length - 1), step)
            point = Point(b, [outer, step, inner])
            x = load(point, buffers, group.source)
            after = group.rule.step(b, loop.carried, x, step)
            store(point, buffers, StoreStep(0, group.target, view), group.rule.finish(b, after))
            loop.yields(*after)

    grid, workgroup = each_item(b, group.outer * group.inner, context, visit)
    return [Lowered(b.finish(grid, workgroup, group.origin), buffers.arrays)]
