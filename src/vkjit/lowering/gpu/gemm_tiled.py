"""Products on the GPU: tiles of both operands in shared memory, a small tile in registers.

Each invocation keeps 4 x 4 outputs, or 2 x 2 blocks of 4 x 4 half a tile apart, as vectors along n;
the next tiles are fetched to registers while the present ones are multiplied. Operands are read
through any strides, as vectors where one axis is contiguous; edges are guarded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

from vkjit.lowering.gpu.gemm_fill import Staging, clamped, multiply_add, number, widened
from vkjit.lowering.gpu.gemm_schedule import LANES, pitch
from vkjit.lowering.gpu.grid import Grid, within
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.types import Scratch
from vkjit.lowering.plan.groups import ContractGroup
from vkjit.lowering.plan.schedule import TiledSchedule
from vkjit.lowering.templates.body import Point, access_of, evaluate, store
from vkjit.lowering.templates.context import Buffers, Lowered, TemplateContext
from vkjit.lowering.templates.space import coordinates, views_of


def contract(
    group: ContractGroup, schedule: TiledSchedule, context: TemplateContext
) -> list[Lowered]:
    """One kernel: a workgroup for each tile of the product and each batch index."""
    b = Builder("gemm_tiled", context.target.index_type)
    extra = {group.lhs.array, group.rhs.array}
    buffers = Buffers(b, context, access_of(group.body, group.stores, extra))
    tiles = (-(-group.m // schedule.block_m), -(-group.n // schedule.block_n))
    grid = Grid(math.prod(group.batch) * math.prod(tiles), context.target)
    with grid.each(b) as position:
        *batch, tile_m, tile_n = coordinates(b, position, (*group.batch, *tiles))
        first = (b.scaled(tile_m, schedule.block_m), b.scaled(tile_n, schedule.block_n))
        _Tile(b, group, schedule, buffers).emit(batch, first)
    kernel = b.finish(grid.shape, schedule.workgroup, group.origin)
    return [Lowered(kernel, buffers.arrays)]


@final
class _Tile:
    """One tile of the product. ``sums`` are vectors along n: for each row, one for each block."""

    def __init__(
        self, b: Builder, group: ContractGroup, schedule: TiledSchedule, buffers: Buffers
    ) -> None:
        self.b = b
        self.group = group
        self.s = schedule
        self.buffers = buffers
        self.staging = Staging(b, group, schedule, buffers)
        self.rows = self.offsets(1, schedule.tile_m, schedule.block_m)
        self.columns = self.offsets(0, schedule.tile_n, schedule.block_n)

    def offsets(self, axis: int, tile: int, block: int) -> list[Value]:
        """First row (or column) in the tile of each of this invocation's blocks of 4."""
        b, blocks = self.b, tile // LANES
        local = b.scaled(b.local_id(axis), LANES)
        return [b.offset(local, number * block // blocks) for number in range(blocks)]

    def emit(self, batch: Sequence[Value], first: tuple[Value, Value]) -> None:
        """Sums over blocks of k, then the epilogue of every output."""
        b, s = self.b, self.s
        zero = b.splat(number(b, self.group.accumulate, 0), LANES)
        sums = [zero] * (s.tile_m * len(self.columns))
        if self.group.k:
            sums = self.summed(batch, first, sums)
        self.epilogue(batch, first, sums)

    def summed(
        self, batch: Sequence[Value], first: tuple[Value, Value], zeros: list[Value]
    ) -> list[Value]:
        """The product's elements of this invocation."""
        b, s, k = self.b, self.s, self.group.k
        units = self.staging.fetch(batch, first, b.index(0))
        if k <= s.block_k:
            self.staging.put(units)
            b.barrier()
            return self.block(zeros)
        count = len(zeros)
        last = k - s.block_k if k % s.block_k == 0 else k
        with b.loop(b.index(0), b.index(k), b.index(s.block_k), [*zeros, *units], hint="k") as loop:
            b.barrier()
            self.staging.put(loop.carried[count:])
            b.barrier()
            following = clamped(b, b.offset(loop.index, s.block_k), last)
            units = self.staging.fetch(batch, first, following)
            loop.yields(*self.block(loop.carried[:count]), *units)
        return list(loop.results[:count])

    def block(self, sums: Sequence[Value]) -> list[Value]:
        """``block_k`` outer products of register tiles, a few at a time."""
        b, s = self.b, self.s
        unroll = min(s.tile_m, s.block_k)
        step = b.index(unroll)
        with b.loop(b.index(0), b.index(s.block_k), step, sums, hint="kk") as loop:
            out = list(loop.carried)
            for ahead in range(unroll):
                out = self.outer_product(b.offset(loop.index, ahead), out)
            loop.yields(*out)
        return list(loop.results)

    def outer_product(self, step: Value, sums: Sequence[Value]) -> list[Value]:
        """One step of the sum for every output."""
        b, s = self.b, self.s
        lhs = self.vectors(self.staging.lhs, step, self.rows, s.block_m)
        rhs = self.vectors(self.staging.rhs, step, self.columns, s.block_n)
        left = [b.splat(b.extract(v, lane), LANES) for v in lhs for lane in range(LANES)]
        return [
            multiply_add(b, x, y, sums[i * len(rhs) + j])
            for i, x in enumerate(left)
            for j, y in enumerate(rhs)
        ]

    def vectors(
        self, memory: Scratch, step: Value, starts: Sequence[Value], block: int
    ) -> list[Value]:
        """This invocation's elements of one step of a tile."""
        b, base = self.b, self.b.scaled(step, pitch(block))
        return [b.load(memory, b.add(base, start), LANES) for start in starts]

    def epilogue(
        self, batch: Sequence[Value], first: tuple[Value, Value], sums: Sequence[Value]
    ) -> None:
        """Body and stores for every output of this invocation that lies inside the product."""
        b, s, group = self.b, self.s, self.group
        reach_m = -(-group.m // s.block_m) * s.block_m
        reach_n = -(-group.n // s.block_n) * s.block_n
        views = views_of(group.body, group.stores)
        whole = group.n % LANES == 0 and all(v.strides[-1] in (0, 1) for v in views)
        for i in range(s.tile_m):
            row = b.add(first[0], b.offset(self.rows[i // LANES], i % LANES))
            for j, start in enumerate(self.columns):
                total = sums[i * len(self.columns) + j]
                column = b.add(first[1], start)
                with within(b, row, group.m, reach_m):
                    if whole:
                        with within(b, column, group.n, reach_n):
                            self.finish(Point(b, [*batch, row, column], len(batch) + 1, 4), total)
                        continue
                    for lane in range(LANES):
                        at = b.offset(column, lane)
                        with within(b, at, group.n, reach_n):
                            self.finish(Point(b, [*batch, row, at]), b.extract(total, lane))

    def finish(self, point: Point, total: Value) -> None:
        """Body and stores for one output or one vector of them."""
        group = self.group
        product = widened(self.b, total, group.body[0].type)
        wanted = {step.value for step in group.stores}
        values = evaluate(point, self.buffers, group.body, wanted, {0: product})
        for step in group.stores:
            store(point, self.buffers, step, values[step.value])
