"""Scatters and scans on the CPU: one axis in order, vectors and tasks across the others."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

from vkjit.lowering.cpu.lanes import lane_mask
from vkjit.lowering.cpu.tasks import share, task_count
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.types import Access, BinOp, CmpOp, ConvertOp
from vkjit.lowering.kernel.views import View, dense
from vkjit.lowering.plan.groups import ScanGroup, ScatterAddGroup, SetRowsGroup, StoreStep
from vkjit.lowering.target import Target
from vkjit.lowering.templates.body import Point, load, store
from vkjit.lowering.templates.context import Buffers, Lowered, TemplateContext
from vkjit.lowering.templates.space import coordinates

Visit = Callable[[Value, Value, Value | None], None]
"""Called with the outer index, the first inner index and the lane mask."""


def _lanes(inner: int, target: Target) -> int:
    """Vector width along the inner axis; 1 where that axis is a single element."""
    return 1 if inner == 1 else max(1, target.vector_bytes // 4)


def _columns(  # noqa: PLR0913  two sizes, their width and their cost
    b: Builder, outer: int, inner: int, lanes: int, cost: int, target: Target, visit: Visit
) -> int:  # fmt: skip
    """Visits every vector of inner elements, shared by tasks; returns the number of tasks."""
    spans = -(-inner // lanes)
    items = outer * spans
    tasks = task_count(items, cost, target)
    with share(b, items, tasks) as item:
        at, part = coordinates(b, item, [outer, spans])
        start = b.scaled(part, lanes)
        mask = lane_mask(b, start, b.index(inner), lanes) if inner % lanes else None
        visit(at, start, mask)
    return tasks


def scatter_add(group: ScatterAddGroup, context: TemplateContext) -> list[Lowered]:
    """One kernel that adds the updates in order; equal indices meet in one task."""
    b = Builder("scatter_add", context.target.index_type)
    access = {
        group.indices.array: Access.READ,
        group.updates.array: Access.READ,
        group.target: Access.READ_WRITE,
    }
    buffers = Buffers(b, context, access)
    lanes = _lanes(group.inner, context.target)
    elem = group.updates.type
    target_view = dense((group.outer, group.size, group.inner))

    def visit(at: Value, start: Value, mask: Value | None) -> None:
        with _each_row(b, buffers, group) as (number, row):
            here = Point(b, [at, number, start], 2, lanes, mask)
            there = Point(b, [at, row, start], 2, lanes, mask)
            update = load(here, buffers, group.updates)
            before = b.load(buffers.of(group.target), there.base(target_view), lanes, mask)
            after = b.add(before, b.splat(update, lanes))
            store(there, buffers, StoreStep(0, group.target, target_view), after)

    assert elem.bits > 1
    cost = group.outer * group.count * group.inner * 4
    tasks = _columns(b, group.outer, group.inner, lanes, cost, context.target, visit)
    return [Lowered(b.finish((tasks, 1, 1), origin=group.origin), buffers.arrays)]


def set_rows(group: SetRowsGroup, context: TemplateContext) -> list[Lowered]:
    """One kernel that writes the updates in order."""
    b = Builder("set_rows", context.target.index_type)
    access = {
        group.indices.array: Access.READ,
        group.updates.array: Access.READ,
        group.target: Access.WRITE,
    }
    buffers = Buffers(b, context, access)
    lanes = _lanes(group.inner, context.target)
    write = StoreStep(0, group.target, dense((group.outer, group.size, group.inner)))

    def visit(at: Value, start: Value, mask: Value | None) -> None:
        with _each_row(b, buffers, group) as (number, row):
            update = load(Point(b, [at, number, start], 2, lanes, mask), buffers, group.updates)
            there = Point(b, [at, row, start], 2, lanes, mask)
            store(there, buffers, write, b.splat(update, lanes))

    cost = group.outer * group.count * group.inner
    tasks = _columns(b, group.outer, group.inner, lanes, cost, context.target, visit)
    return [Lowered(b.finish((tasks, 1, 1), origin=group.origin), buffers.arrays)]


@contextmanager
def _each_row(
    b: Builder, buffers: Buffers, group: ScatterAddGroup | SetRowsGroup
) -> Generator[tuple[Value, Value]]:
    """Runs the block for each update whose index is inside; gives its number and index."""
    with b.loop(b.index(0), b.index(group.count), hint="update") as loop:
        index = load(Point(b, [loop.index]), buffers, group.indices)
        inside = b.binary(
            BinOp.AND,
            b.compare(CmpOp.GE, index, b.const(index.type, 0)),
            b.compare(CmpOp.LT, index, b.const(index.type, group.size)),
        )
        with b.branch(inside).then():
            yield loop.index, b.convert(ConvertOp.SEXT, index, b.kernel.index_type)


def scan(group: ScanGroup, context: TemplateContext) -> list[Lowered]:
    """One kernel that runs along the middle axis with the state in registers."""
    b = Builder("scan", context.target.index_type)
    access = {group.source.array: Access.READ, group.target: Access.WRITE}
    buffers = Buffers(b, context, access)
    lanes = _lanes(group.inner, context.target)
    shape = (group.outer, group.length, group.inner)
    view = View(shape, dense(shape).strides)

    def visit(at: Value, start: Value, mask: Value | None) -> None:
        state = group.rule.initial(b, lanes)
        with b.loop(b.index(0), b.index(group.length), carried=state, hint="step") as loop:
            step = loop.index
            if group.reverse:
                step = b.sub(b.index(group.length - 1), step)
            point = Point(b, [at, step, start], 2, lanes, mask)
            x = b.splat(load(point, buffers, group.source), lanes)
            after = group.rule.step(b, loop.carried, x, b.splat(step, lanes))
            store(point, buffers, StoreStep(0, group.target, view), group.rule.finish(b, after))
            loop.yields(*after)

    cost = group.outer * group.length * group.inner * 4
    tasks = _columns(b, group.outer, group.inner, lanes, cost, context.target, visit)
    return [Lowered(b.finish((tasks, 1, 1), origin=group.origin), buffers.arrays)]
