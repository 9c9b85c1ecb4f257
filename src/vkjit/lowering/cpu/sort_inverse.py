"""Inverses of orders on the CPU: each line in one walk."""

from __future__ import annotations

from vkjit.lowering.cpu.tasks import share, task_count, within
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.types import I32, Access, ConvertOp
from vkjit.lowering.kernel.views import dense
from vkjit.lowering.plan.groups import InverseGroup, StoreStep
from vkjit.lowering.templates.body import Point, load, store
from vkjit.lowering.templates.context import Buffers, Lowered, TemplateContext
from vkjit.lowering.templates.space import coordinates

_COST = 8
"""Additions for an element."""


def inverse(group: InverseGroup, context: TemplateContext) -> list[Lowered]:
    """One kernel that fills each line where the order has gaps, then writes each number."""
    b = Builder("sort_inverse", context.target.index_type)
    access = {group.order.array: Access.READ, group.target: Access.WRITE}
    buffers = Buffers(b, context, access)
    lines = group.outer * group.inner
    write = StoreStep(0, group.target, dense((group.outer, group.length, group.inner)))
    tasks = task_count(max(1, lines), lines * group.length * _COST, context.target)
    with share(b, lines, tasks) as line:
        outer, inner = coordinates(b, line, (group.outer, group.inner))
        if group.count < group.length:
            nowhere = b.const(I32, group.count)
            with b.loop(b.index(0), b.index(group.length), hint="place") as loop:
                store(Point(b, [outer, loop.index, inner]), buffers, write, nowhere)
        with b.loop(b.index(0), b.index(group.count), hint="position") as loop:
            found = load(Point(b, [outer, loop.index, inner]), buffers, group.order)
            place = b.convert(ConvertOp.SEXT, found, b.kernel.index_type)
            with within(b, place, group.length, group.length + 1):
                number = b.convert(ConvertOp.TRUNC, loop.index, I32)
                store(Point(b, [outer, place, inner]), buffers, write, number)
    return [Lowered(b.finish((tasks, 1, 1), origin=group.origin), buffers.arrays)]
