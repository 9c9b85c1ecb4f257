"""Inverses of orders on the GPU: gaps filled by one kernel, numbers written by another."""

from __future__ import annotations

import math

from vkjit.lowering.gpu.grid import each_item, within
from vkjit.lowering.gpu.index import index_type
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.types import I32, Access, ConvertOp
from vkjit.lowering.kernel.views import dense
from vkjit.lowering.plan.groups import InverseGroup, StoreStep
from vkjit.lowering.templates.body import Point, load, store
from vkjit.lowering.templates.context import Buffers, Lowered, TemplateContext
from vkjit.lowering.templates.space import coordinates


def inverse(group: InverseGroup, context: TemplateContext) -> list[Lowered]:
    """The kernels of an inverse; one where the order has all positions."""
    numbers = [_numbers(group, context)] if group.outer * group.count * group.inner else []
    gaps = group.count < group.length and group.outer * group.inner > 0
    return [_gaps(group, context), *numbers] if gaps else numbers


def _gaps(group: InverseGroup, context: TemplateContext) -> Lowered:
    """Writes the length of the order everywhere."""
    b = Builder("sort_gaps", index_type(context))
    buffers = Buffers(b, context, {group.target: Access.WRITE})
    nowhere = b.const(I32, group.count)

    def visit(item: Value) -> None:
        b.store(buffers.of(group.target), item, nowhere)

    size = group.outer * group.length * group.inner
    grid, workgroup = each_item(b, size, context.target, visit)
    return Lowered(b.finish(grid, workgroup, group.origin), buffers.arrays)


def _numbers(group: InverseGroup, context: TemplateContext) -> Lowered:
    """Writes each number to the place that the order names."""
    b = Builder("sort_inverse", index_type(context))
    access = {group.order.array: Access.READ, group.target: Access.WRITE}
    buffers = Buffers(b, context, access)
    shape = (group.outer, group.count, group.inner)
    write = StoreStep(0, group.target, dense((group.outer, group.length, group.inner)))

    def visit(item: Value) -> None:
        outer, position, inner = coordinates(b, item, shape)
        found = load(Point(b, [outer, position, inner]), buffers, group.order)
        place = b.convert(ConvertOp.SEXT, found, b.kernel.index_type)
        with within(b, place, group.length, group.length + 1):
            number = b.convert(ConvertOp.TRUNC, position, I32)
            store(Point(b, [outer, place, inner]), buffers, write, number)

    grid, workgroup = each_item(b, math.prod(shape), context.target, visit)
    return Lowered(b.finish(grid, workgroup, group.origin), buffers.arrays)
