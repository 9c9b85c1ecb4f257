"""Pointwise groups on the CPU: vectors along one axis, tasks over the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

from vkjit.lowering.cpu.lanes import lane_mask, vector_lanes
from vkjit.lowering.cpu.tasks import share, task_count
from vkjit.lowering.cpu.turned import turn_of, turned
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.types import BinOp
from vkjit.lowering.plan.groups import LoopGroup
from vkjit.lowering.plan.schedule import LoopSchedule
from vkjit.lowering.target import Target
from vkjit.lowering.templates.body import Point, access_of, evaluate, store
from vkjit.lowering.templates.context import Buffers, Lowered, TemplateContext
from vkjit.lowering.templates.cost import body_costs
from vkjit.lowering.templates.space import compact, coordinates, lane_axis, views_of

_SPAN = 4096
"""Most elements of the lane axis in one item: long axes are shared by tasks."""
_UNROLLED_COST = 24
"""Bodies cheaper than this run two vectors at a time, to hide latency."""


def default_schedule(group: LoopGroup, target: Target) -> LoopSchedule:
    """Vectors of the widest element, two at a time for cheap bodies, tasks by total cost."""
    cost = sum(body_costs(group.body)) + len(group.stores)
    lanes = vector_lanes(group, target)
    size = math.prod(group.shape)
    unroll = 2 if cost < _UNROLLED_COST else 1
    return LoopSchedule(lanes, unroll, task_count(max(1, size // 64), size * cost, target))


def pointwise(
    group: LoopGroup, schedule: LoopSchedule | None, context: TemplateContext
) -> list[Lowered]:
    """One kernel that computes every store of a group without reductions."""
    group = compact(group)
    schedule = schedule or default_schedule(group, context.target)
    axis = lane_axis(views_of(group.body, group.stores), range(len(group.shape)), schedule.lanes)
    turn = turn_of(group, axis, schedule.lanes)
    if turn is not None:
        return turned(group, turn, schedule, context)
    b = Builder("pointwise", context.target.index_type)
    buffers = Buffers(b, context, access_of(group.body, group.stores))
    size = group.shape[axis]
    spans = -(-size // _SPAN) if schedule.tasks > 1 else 1
    span = -(-size // spans)
    span += -span % (schedule.lanes * schedule.unroll) if spans > 1 else 0
    spans = -(-size // span)
    outer = [n for i, n in enumerate(group.shape) if i != axis]
    items = math.prod(outer) * spans
    tasks = min(schedule.tasks, items)
    with share(b, items, tasks) as item:
        *at, part = coordinates(b, item, [*outer, spans])
        start = b.scaled(part, span)
        _span(b, group, buffers, schedule, _Lanes(at, axis, start, span, size))
    return [Lowered(b.finish((tasks, 1, 1), origin=group.origin), buffers.arrays)]


@final
class _Lanes:
    """A run along the lane axis: ``span`` elements from ``start``, of ``size`` in all."""

    __slots__ = ("at", "axis", "size", "span", "start")

    def __init__(self, at: Sequence[Value], axis: int, start: Value, span: int, size: int) -> None:
        self.at = list(at)
        self.axis = axis
        self.start = start
        self.span = span
        self.size = size

    def indices(self, position: Value) -> list[Value]:
        """Indices of all axes with the lane axis at ``position``."""
        return [*self.at[: self.axis], position, *self.at[self.axis :]]


def _span(
    b: Builder, group: LoopGroup, buffers: Buffers, schedule: LoopSchedule, run: _Lanes
) -> None:
    """Whole steps of the run, then what is left, vector by vector under a mask."""
    lanes, step = schedule.lanes, schedule.lanes * schedule.unroll
    if run.size % run.span == 0:
        count: Value = b.index(run.span)
        full: Value = b.index(run.span - run.span % step)
        ragged = run.span % step != 0
    else:
        left = b.sub(b.index(run.size), run.start)
        count = b.binary(BinOp.MIN_S, left, b.index(run.span))
        full = b.sub(count, b.binary(BinOp.REM_U, count, b.index(step)))
        ragged = True
    if run.span >= step:
        with b.loop(b.index(0), full, b.index(step)) as loop:
            for part in range(0, step, lanes):
                position = b.add(run.start, b.offset(loop.index, part))
                at = Point(b, run.indices(position), run.axis, lanes, aligned=True)
                _write(group, buffers, at)
    if ragged:
        limit = b.index(run.size)
        with b.loop(full, count, b.index(lanes)) as loop:
            position = b.add(run.start, loop.index)
            mask = lane_mask(b, position, limit, lanes)
            _write(group, buffers, Point(b, run.indices(position), run.axis, lanes, mask))


def _write(group: LoopGroup, buffers: Buffers, point: Point) -> None:
    values = evaluate(point, buffers, group.body, {s.value for s in group.stores}, {})
    for step in group.stores:
        store(point, buffers, step, values[step.value])
