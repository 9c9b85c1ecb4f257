"""Rows written at computed indices on the GPU: an invocation for each element of the updates."""

from __future__ import annotations

import math

from vkjit.lowering.gpu.grid import each_item
from vkjit.lowering.gpu.index import index_type
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.types import Access, BinOp, CmpOp, ConvertOp
from vkjit.lowering.kernel.views import dense
from vkjit.lowering.plan.groups import SetRowsGroup, StoreStep
from vkjit.lowering.templates.body import Point, load, store
from vkjit.lowering.templates.context import Buffers, Lowered, TemplateContext
from vkjit.lowering.templates.space import coordinates


def set_rows(group: SetRowsGroup, context: TemplateContext) -> list[Lowered]:
    """One kernel; no two invocations write the same element."""
    shape = (group.outer, group.count, group.inner)
    items = math.prod(shape)
    b = Builder("set_rows", index_type(context, items))
    access = {
        group.indices.array: Access.READ,
        group.updates.array: Access.READ,
        group.target: Access.WRITE,
    }
    buffers = Buffers(b, context, access)
    write = StoreStep(0, group.target, dense((group.outer, group.size, group.inner)))

    def visit(item: Value) -> None:
        outer, number, inner = coordinates(b, item, shape)
        found = load(Point(b, [number]), buffers, group.indices)
        inside = b.binary(
            BinOp.AND,
            b.compare(CmpOp.GE, found, b.const(found.type, 0)),
            b.compare(CmpOp.LT, found, b.const(found.type, group.size)),
        )
        with b.branch(inside).then():
            row = b.convert(ConvertOp.SEXT, found, b.kernel.index_type)
            update = load(Point(b, [outer, number, inner]), buffers, group.updates)
            store(Point(b, [outer, row, inner]), buffers, write, update)

    grid, workgroup = each_item(b, items, context.target, visit)
    return [Lowered(b.finish(grid, workgroup, group.origin), buffers.arrays)]
