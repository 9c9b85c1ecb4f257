"""Products on the GPU: tiles of both operands in shared memory, a small tile in registers.

Each invocation keeps 1 x 1 outputs, or 4 x 4, or several such blocks an equal part of the tile
apart, as vectors along n. The next tiles are fetched to registers while the present ones are
multiplied. With two stages in shared memory they go to the other one, and one barrier a step is
enough. Operands are read through any strides, as vectors where one axis is contiguous.

Small products have several slices of invocations: each takes its share of the steps of a tile and
leaves its sums in shared memory, where all invocations add them up, a vector of outputs each.

Tiles at the edge of the product test what they read and write; the others do not: one test for
each workgroup says which it is. Where k is no multiple of a step, the sum begins with its last,
partial step, so that the loop has whole ones only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import final

from vkjit.errors import InternalError
from vkjit.lowering.gpu.gemm_epilogue import (
    added,
    at_once,
    buffers_of,
    finish,
    finish_all,
    multiply_add,
    number,
    stores_vectors,
)
from vkjit.lowering.gpu.gemm_fill import Source, Staging
from vkjit.lowering.gpu.gemm_join import split_sum
from vkjit.lowering.gpu.gemm_schedule import is_sound, lanes_of, pitch
from vkjit.lowering.gpu.grid import Grid, within
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Const, Value
from vkjit.lowering.kernel.types import BinOp, CmpOp, Scratch
from vkjit.lowering.plan.groups import ContractGroup
from vkjit.lowering.plan.schedule import TiledSchedule
from vkjit.lowering.templates.body import Point
from vkjit.lowering.templates.context import Buffers, Lowered, TemplateContext
from vkjit.lowering.templates.space import coordinates

_BAND = 8
"""Rows of tiles that are walked together, column by column: their operands stay in the cache."""


def contract(
    group: ContractGroup, schedule: TiledSchedule, context: TemplateContext
) -> list[Lowered]:
    """A workgroup for each tile of the product, batch index and part of the sum.

    Raises:
        InternalError: the numbers of the schedule do not go together.
    """
    if not is_sound(schedule):
        raise InternalError(f"gemm: {schedule.text()} has numbers that do not divide each other")
    lower = partial(_kernel, schedule, context)
    return split_sum(group, schedule.split_k, context, lower)


def _kernel(
    schedule: TiledSchedule, context: TemplateContext, group: ContractGroup
) -> list[Lowered]:
    b = Builder("gemm_tiled", context.target.index_type)
    buffers = buffers_of(b, group, context)
    tiles = (-(-group.m // schedule.block_m), -(-group.n // schedule.block_n))
    grid = Grid(math.prod(group.batch) * math.prod(tiles), context.target)
    with grid.each(b) as position:
        band = max(size for size in range(1, _BAND + 1) if tiles[0] % size == 0) if tiles[0] else 1
        shape = (*group.batch, tiles[0] // band, tiles[1], band)
        *batch, bands, tile_n, row = coordinates(b, position, shape)
        tile_m = b.add(b.scaled(bands, band), row)
        first = (b.scaled(tile_m, schedule.block_m), b.scaled(tile_n, schedule.block_n))
        tile = _Tile(b, group, schedule, buffers)
        whole = _is_whole(b, group, schedule, (tile_m, tile_n))
        if isinstance(whole, bool):
            tile.emit(batch, first, edges=not whole)
        else:
            branch = b.branch(whole)
            with branch.then():
                tile.emit(batch, first, edges=False)
            with branch.otherwise():
                tile.emit(batch, first, edges=True)
    kernel = b.finish(grid.shape, schedule.workgroup, group.origin)
    return [Lowered(kernel, buffers.arrays)]


def _is_whole(
    b: Builder, group: ContractGroup, s: TiledSchedule, tile: tuple[Value, Value]
) -> Value | bool:
    """Whether a tile lies inside the product: for all tiles, or as a test of this one."""
    ragged = [
        (at, size // block)
        for at, size, block in zip(tile, (group.m, group.n), (s.block_m, s.block_n), strict=True)
        if size % block
    ]
    if not ragged or any(whole == 0 for _, whole in ragged):
        return not ragged
    tests = [b.compare(CmpOp.LT_U, at, b.index(whole)) for at, whole in ragged]
    return tests[0] if len(tests) == 1 else b.binary(BinOp.AND, *tests)


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
        self.lanes = lanes_of(schedule)
        self.rows = self.offsets(1, schedule.tile_m, schedule.block_m)
        self.columns = self.offsets(0, schedule.tile_n, schedule.block_n)
        self.sums = None
        if schedule.slices > 1:
            length = schedule.slices * schedule.block_m * schedule.block_n
            self.sums = b.scratch("sums", group.accumulate, length)

    def offsets(self, axis: int, tile: int, block: int) -> list[Value]:
        """First row (or column) in the tile of each of this invocation's blocks."""
        b, blocks = self.b, tile // self.lanes
        local = b.scaled(b.local_id(axis), self.lanes)
        return [b.offset(local, number * block // blocks) for number in range(blocks)]

    def emit(self, batch: Sequence[Value], first: tuple[Value, Value], *, edges: bool) -> None:
        """Sums over the steps of k, then the epilogue of every output."""
        b, s = self.b, self.s
        zero = b.splat(number(b, self.group.accumulate, 0), self.lanes)
        sums = [zero] * (s.tile_m * len(self.columns))
        if self.group.k:
            sums = self.summed(self.staging.aim(batch, first, edges=edges), sums)
        outputs = self.outputs(sums) if self.sums is None else self.met(self.sums, sums)
        whole = not edges and stores_vectors(self.group, self.lanes)
        if whole and self.sums is None and at_once(self.group) > 1:
            self.write_all(batch, first, list(outputs))
            return
        for row, column, total in outputs:
            self.write(batch, (b.add(first[0], row), b.add(first[1], column)), total, edges=edges)

    def outputs(self, sums: Sequence[Value]) -> Iterator[tuple[Value, Value, Value]]:
        """Row and first column in the tile of each vector of this invocation's sums."""
        b, lanes = self.b, self.lanes
        for place, total in enumerate(sums):
            i, j = divmod(place, len(self.columns))
            yield b.offset(self.rows[i // lanes], i % lanes), self.columns[j], total

    def met(self, memory: Scratch, sums: Sequence[Value]) -> Iterator[tuple[Value, Value, Value]]:
        """As ``outputs``, with the sums of all slices added up; yields inside of branches."""
        b, s, lanes = self.b, self.s, self.lanes
        columns, rows, slices = s.workgroup
        size, count = s.block_m * s.block_n, columns * rows * slices
        mine = b.scaled(b.local_id(2), size)
        for row, column, total in self.outputs(sums):
            place = b.add(b.scaled(row, s.block_n), column)
            b.store(memory, b.add(mine, place), total)
        b.barrier()
        linear = b.add(b.scaled(b.local_id(1), columns), b.local_id(0))
        linear = b.add(b.scaled(b.local_id(2), columns * rows), linear)
        vectors = size // lanes
        for start in range(0, vectors, count):
            vector = b.offset(linear, start)
            with within(b, vector, vectors, start + count):
                place = b.scaled(vector, lanes)
                parts = [b.load(memory, b.offset(place, i * size), lanes) for i in range(slices)]
                row, column = coordinates(b, vector, (s.block_m, s.block_n // lanes))
                yield row, b.scaled(column, lanes), added(b, parts)

    def summed(self, sources: Sequence[Source], sums: Sequence[Value]) -> Sequence[Value]:
        """The product's elements of this invocation."""
        b, s, k, staging = self.b, self.s, self.group.k, self.staging
        rest = k % s.block_k
        low, high = (0, k - rest) if rest else (s.block_k, k)
        units = staging.fetch(sources, b.index(k - rest if rest else 0), end=bool(rest))
        staging.put(units, self.stage(b.index(low), 1))
        b.barrier()
        if low < high:
            step = b.index(s.block_k)
            with b.loop(b.index(low), b.index(high), step, sums, hint="k") as loop:
                units = staging.fetch(sources, loop.index, end=False)
                after = self.block(loop.carried, self.stage(loop.index, 1))
                if s.stages == 1:
                    b.barrier()
                staging.put(units, self.stage(loop.index, 0))
                b.barrier()
                loop.yields(*after)
            sums = loop.results
        return self.block(sums, self.stage(b.index(max(low, high)), 1))

    def stage(self, k: Value, before: int) -> Value:
        """The stage of the tile that is fetched at step ``k``, or of that ``before`` it."""
        b, s = self.b, self.s
        if s.stages == 1:
            return b.index(0)
        shift = s.block_k.bit_length() - 1
        if isinstance(k, Const) and isinstance(k.value, int):
            return b.index(((k.value >> shift) - before) & 1)
        turn = b.binary(BinOp.SHR_L, k, b.index(shift))
        return b.binary(BinOp.AND, b.offset(turn, -before), b.index(1))

    def block(self, sums: Sequence[Value], stage: Value) -> Sequence[Value]:
        """The outer products of all steps of one tile, in registers."""
        b, s = self.b, self.s
        steps = s.block_k // s.slices
        unroll = min(s.unroll, steps)
        first = b.scaled(b.local_id(2), steps) if s.slices > 1 else b.index(0)
        bases = (self.staging.stage(0, stage), self.staging.stage(1, stage))
        if unroll == steps:
            for step in range(steps):
                sums = self.outer_product(bases, b.offset(first, step), sums)
            return sums
        with b.loop(b.index(0), b.index(steps), b.index(unroll), sums, hint="kk") as loop:
            out: Sequence[Value] = loop.carried
            start = b.add(first, loop.index)
            for step in range(unroll):
                out = self.outer_product(bases, b.offset(start, step), out)
            loop.yields(*out)
        return loop.results

    def outer_product(
        self, bases: tuple[Value, Value], step: Value, sums: Sequence[Value]
    ) -> list[Value]:
        """One step of the sum for every output."""
        b = self.b
        lhs, rhs = (
            self.vectors(side, b.add(bases[side], b.scaled(step, pitch(block))))
            for side, block in enumerate((self.s.block_m, self.s.block_n))
        )
        left = [
            b.splat(b.extract(v, lane), self.lanes) if self.lanes > 1 else v
            for v in lhs
            for lane in range(self.lanes)
        ]
        return [
            multiply_add(b, x, y, sums[i * len(rhs) + j])
            for i, x in enumerate(left)
            for j, y in enumerate(rhs)
        ]

    def vectors(self, side: int, base: Value) -> list[Value]:
        """This invocation's elements of one step of the left or right tile."""
        b, memory = self.b, self.staging.sides[side].memory
        starts = (self.rows, self.columns)[side]
        return [b.load(memory, b.add(base, start), self.lanes) for start in starts]

    def write_all(
        self,
        batch: Sequence[Value],
        first: tuple[Value, Value],
        outputs: Sequence[tuple[Value, Value, Value]],
    ) -> None:
        """Body and stores of vectors that lie inside the product, several at a time."""
        b, each = self.b, at_once(self.group)
        for start in range(0, len(outputs), each):
            found: list[tuple[Point, Value]] = []
            for row, column, total in outputs[start : start + each]:
                index = [*batch, b.add(first[0], row), b.add(first[1], column)]
                found.append((Point(b, index, len(batch) + 1, self.lanes), total))
            finish_all(found, self.buffers, self.group)

    def write(
        self, batch: Sequence[Value], at: tuple[Value, Value], total: Value, *, edges: bool
    ) -> None:
        """Body and stores of a vector of outputs, of those that lie inside the product."""
        b, s, group, lanes = self.b, self.s, self.group, self.lanes
        row, column = at
        reach_m = -(-group.m // s.block_m) * s.block_m if edges else group.m
        reach_n = -(-group.n // s.block_n) * s.block_n if edges else group.n
        with within(b, row, group.m, reach_m):
            if stores_vectors(group, lanes):
                with within(b, column, group.n, reach_n):
                    point = Point(b, [*batch, row, column], len(batch) + 1, lanes)
                    finish(point, self.buffers, group, total)
                return
            for lane in range(lanes):
                where = b.offset(column, lane)
                element = b.extract(total, lane) if lanes > 1 else total
                with within(b, where, group.n, reach_n):
                    finish(Point(b, [*batch, row, where]), self.buffers, group, element)
