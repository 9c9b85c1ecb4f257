"""Pointwise groups on the GPU: every invocation computes a few neighbouring elements."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from vkjit.lowering.gpu.grid import Grid, invocations, power_of_two, within
from vkjit.lowering.gpu.index import index_type
from vkjit.lowering.gpu.lanes import aligned, spread, vectors_at_once, widest_lanes
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.types import BinOp
from vkjit.lowering.plan.groups import LoopGroup
from vkjit.lowering.templates.body import Point, access_of, evaluate, store
from vkjit.lowering.templates.context import Buffers, Lowered, TemplateContext
from vkjit.lowering.templates.space import lane_axis, views_of

_VECTORS_FROM = 1 << 16
"""Elements from which on memory, not the launch, is what a pointwise kernel waits for."""
_SMALL = 64
"""Invocations of a workgroup where there is little work: it is spread over more cores."""


@final
@dataclass(frozen=True, slots=True)
class Elements:
    """Who computes what: ``lanes`` elements of ``axis`` make a vector, ``unroll`` vectors a turn.

    ``tail`` elements at the end of the axis fill no vector and are computed one by one.
    """

    axis: int
    lanes: int
    unroll: int
    tail: int
    workgroup: int = 256


def default_elements(group: LoopGroup, context: TemplateContext) -> Elements:
    """Vectors of about 16 bytes where there is enough work; else one element each."""
    axis = lane_axis(views_of(group.body, group.stores), range(len(group.shape)), 4)
    if math.prod(group.shape) < _VECTORS_FROM:
        return Elements(axis, 1, 1, 0, _SMALL)
    lanes = widest_lanes(group, axis)
    tail = group.shape[axis] % lanes
    if (tail and len(group.shape) > 1) or not aligned(group, axis, lanes):
        lanes, tail = 1, 0
    return Elements(axis, lanes, vectors_at_once(group, lanes, context), tail)


def pointwise(
    group: LoopGroup, context: TemplateContext, elements: Elements | None = None
) -> list[Lowered]:
    """One kernel that computes every store of a compact group without reductions.

    Neighbouring invocations walk the axis along which most arrays are contiguous.
    """
    b = Builder("pointwise", index_type(context))
    buffers = Buffers(b, context, access_of(group.body, group.stores))
    work = _Pointwise(b, group, buffers, elements or default_elements(group, context))
    grid, workgroup = work.emit(context)
    return [Lowered(b.finish(grid, workgroup, group.origin), buffers.arrays)]


@final
class _Pointwise:
    """One group on its way to a kernel."""

    def __init__(self, b: Builder, group: LoopGroup, buffers: Buffers, elements: Elements) -> None:
        self.b = b
        self.group = group
        self.buffers = buffers
        self.elements = elements
        whole = group.shape[elements.axis] - elements.tail
        self.shape = tuple(whole if a == elements.axis else n for a, n in enumerate(group.shape))

    def emit(self, context: TemplateContext) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """The body of the kernel; returns grid and workgroup."""
        b, e = self.b, self.elements
        count = math.prod(self.shape) // e.lanes
        size = min(invocations(context.target, e.workgroup), power_of_two(count))
        grid = Grid(-(-count // (size * e.unroll)), context.target)
        position = grid.position(b)
        first = b.add(b.scaled(position, size * e.unroll), b.local_id())
        self.vectors(first, size, count, grid.reach * size * e.unroll)
        if e.tail:
            number = b.add(b.scaled(position, size), b.local_id())
            with within(b, number, e.tail, grid.reach * size):
                at = Point(b, [b.offset(number, self.shape[0])])
                self.write(at, self.values(at))
        return grid.shape, (size, 1, 1)

    def vectors(self, first: Value, size: int, count: int, reach: int) -> None:
        """Computes all vectors of this invocation, and only then stores them.

        The driver may not move a load ahead of a store: they might meet in memory.
        """
        b, turns = self.b, range(self.elements.unroll)
        if len(turns) == 1:
            with within(b, first, count, reach):
                at = self.point(first)
                self.write(at, self.values(at))
            return
        items = [b.offset(first, turn * size) for turn in turns]
        points = [self.point(self.inside(item, count, reach)) for item in items]
        values = [self.values(at) for at in points]
        for item, at, found in zip(items, points, values, strict=True):
            with within(b, item, count, reach):
                self.write(at, found)

    def inside(self, item: Value, count: int, reach: int) -> Value:
        """``item``, or the last one where there is no such item."""
        b = self.b
        return item if reach <= count else b.binary(BinOp.MIN_U, item, b.index(count - 1))

    def point(self, item: Value) -> Point:
        """Where vector number ``item`` is."""
        e = self.elements
        indices = spread(self.b, item, self.shape, e.axis, e.lanes)
        return Point(self.b, indices, e.axis, e.lanes, aligned=True)

    def values(self, at: Point) -> dict[int, Value]:
        """All values that are stored, at one point."""
        wanted = {s.value for s in self.group.stores}
        return evaluate(at, self.buffers, self.group.body, wanted, {})

    def write(self, at: Point, values: dict[int, Value]) -> None:
        """Stores them."""
        for step in self.group.stores:
            store(at, self.buffers, step, values[step.value])
