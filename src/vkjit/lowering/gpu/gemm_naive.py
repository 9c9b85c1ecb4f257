"""Products on the GPU, the plain way: one output for each invocation, read straight from memory.

It asks nothing of the device and nothing of the operands: the last resort, and the first rung of
the ladder that the benchmarks print.
"""

from __future__ import annotations

import math

from vkjit.lowering.gpu.gemm_epilogue import (
    buffers_of,
    finish,
    multiply_add,
    number,
    widened,
)
from vkjit.lowering.gpu.grid import Grid, within
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.plan.groups import ContractGroup
from vkjit.lowering.plan.schedule import NaiveSchedule
from vkjit.lowering.target import Target
from vkjit.lowering.templates.body import Point, load
from vkjit.lowering.templates.context import Buffers, Lowered, TemplateContext
from vkjit.lowering.templates.space import coordinates


def candidates(target: Target) -> list[NaiveSchedule]:
    """The schedules that the target can run, best first."""
    sizes = [(8, 32), (8, 16), (8, 8), (4, 4), (1, 1)]
    return [NaiveSchedule(*size) for size in sizes if fits(NaiveSchedule(*size), target)]


def fits(schedule: NaiveSchedule, target: Target) -> bool:
    """Whether the schedule keeps to the limits of the device."""
    return (
        schedule.rows * schedule.columns <= target.max_invocations
        and schedule.columns <= target.max_workgroup[0]
        and schedule.rows <= target.max_workgroup[1]
    )


def contract(
    group: ContractGroup, schedule: NaiveSchedule, context: TemplateContext
) -> list[Lowered]:
    """One kernel: an invocation for each output."""
    b = Builder("gemm_naive", context.target.index_type)
    buffers = buffers_of(b, group, context)
    tiles = (-(-group.m // schedule.rows), -(-group.n // schedule.columns))
    grid = Grid(math.prod(group.batch) * math.prod(tiles), context.target)
    with grid.each(b) as position:
        *batch, tile_m, tile_n = coordinates(b, position, (*group.batch, *tiles))
        row = b.add(b.scaled(tile_m, schedule.rows), b.local_id(1))
        column = b.add(b.scaled(tile_n, schedule.columns), b.local_id(0))
        with (
            within(b, row, group.m, tiles[0] * schedule.rows),
            within(b, column, group.n, tiles[1] * schedule.columns),
        ):
            total = _total(b, group, buffers, [*batch, row, column])
            finish(Point(b, [*batch, row, column]), buffers, group, total)
    workgroup = (schedule.columns, schedule.rows, 1)
    return [Lowered(b.finish(grid.shape, workgroup, group.origin), buffers.arrays)]


def _total(b: Builder, group: ContractGroup, buffers: Buffers, at: list[Value]) -> Value:
    """The sum over k for one output, in order."""
    *batch, row, column = at
    zero = number(b, group.accumulate, 0)
    with b.loop(b.index(0), b.index(group.k), b.index(1), [zero], hint="k") as loop:
        x = load(Point(b, [*batch, row, loop.index]), buffers, group.lhs)
        y = load(Point(b, [*batch, loop.index, column]), buffers, group.rhs)
        x, y = (widened(b, v, group.accumulate) for v in (x, y))
        loop.yields(multiply_add(b, x, y, loop.carried[0]))
    return loop.results[0]
