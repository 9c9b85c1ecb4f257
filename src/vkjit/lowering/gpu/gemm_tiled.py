"""Products on the GPU: tiles of both operands in shared memory, a small tile in registers.

Reference: the classical tiled product of the CUDA programming guide, with 4 x 4 outputs for each
invocation. Operands are read through any strides; edges are masked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

from vkjit.lowering.gpu.grid import Grid, within
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.types import (
    BinOp,
    CmpOp,
    ConvertOp,
    ScalarType,
    Scratch,
    scalar_of,
)
from vkjit.lowering.plan.groups import ContractGroup, LoadStep
from vkjit.lowering.plan.schedule import ContractSchedule
from vkjit.lowering.target import Target
from vkjit.lowering.templates.body import Point, access_of, evaluate, load, store
from vkjit.lowering.templates.context import Buffers, Lowered, TemplateContext
from vkjit.lowering.templates.space import coordinates


def default_schedule(group: ContractGroup, target: Target) -> ContractSchedule:
    """8 x 8 invocations of 4 x 4 outputs, 16 steps of the sum at a time."""
    del group, target
    return ContractSchedule(4, 4, 1, 32, 32, 16, workgroup=(8, 8, 1))


def contract(
    group: ContractGroup, schedule: ContractSchedule | None, context: TemplateContext
) -> list[Lowered]:
    """One kernel: a workgroup for each tile of the product and each batch index."""
    schedule = schedule or default_schedule(group, context.target)
    b = Builder("gemm_tiled", context.target.index_type)
    extra = {group.lhs.array, group.rhs.array}
    buffers = Buffers(b, context, access_of(group.body, group.stores, extra))
    tiles = (-(-group.m // schedule.block_m), -(-group.n // schedule.block_n))
    grid = Grid(math.prod(group.batch) * math.prod(tiles), context.target)
    with grid.each(b) as position:
        *batch, tile_m, tile_n = coordinates(b, position, (*group.batch, *tiles))
        _Tile(b, group, schedule, buffers).emit(batch, tile_m, tile_n)
    kernel = b.finish(grid.shape, schedule.workgroup, group.origin)
    return [Lowered(kernel, buffers.arrays)]


@final
class _Tile:
    """One tile of the product."""

    def __init__(
        self, b: Builder, group: ContractGroup, schedule: ContractSchedule, buffers: Buffers
    ) -> None:
        self.b = b
        self.group = group
        self.s = schedule
        self.buffers = buffers
        self.elem = group.accumulate
        self.lhs = b.scratch("lhs", self.elem, schedule.block_m * schedule.block_k)
        self.rhs = b.scratch("rhs", self.elem, schedule.block_k * schedule.block_n)

    def emit(self, batch: Sequence[Value], tile_m: Value, tile_n: Value) -> None:
        """Sums over blocks of k, then the epilogue of every output."""
        b, s, group = self.b, self.s, self.group
        first_m, first_n = b.scaled(tile_m, s.block_m), b.scaled(tile_n, s.block_n)
        zero = b.const(self.elem, 0.0 if self.elem.kind == "float" else 0)
        states = [zero] * (s.tile_m * s.tile_n)
        with b.loop(b.index(0), b.index(group.k), b.index(s.block_k), states, hint="k") as loop:
            self.fill(self.lhs, group.lhs, batch, first_m, loop.index, s.block_m)
            self.fill(self.rhs, group.rhs, batch, first_n, loop.index, s.block_n)
            b.barrier()
            sums = self.block(list(loop.carried))
            b.barrier()
            loop.yields(*sums)
        self.epilogue(batch, first_m, first_n, loop.results)

    def fill(  # noqa: PLR0913  where from, where to, and the corner of the tile
        self,
        memory: Scratch,
        operand: LoadStep,
        batch: Sequence[Value],
        first: Value,
        k: Value,
        block: int,
    ) -> None:
        """Copies a tile to shared memory, k outermost; zeros beyond the edges."""
        b, s, group = self.b, self.s, self.group
        is_lhs = operand is group.lhs
        limit = group.m if is_lhs else group.n
        across = operand.view.strides[-2 if is_lhs else -1]
        count = s.workgroup[0] * s.workgroup[1]
        linear = b.add(b.scaled(b.local_id(1), s.workgroup[0]), b.local_id(0))
        for start in range(0, block * s.block_k, count):
            position = b.offset(linear, start)
            with within(b, position, block * s.block_k, start + count):
                shape = (s.block_k, block) if across == 1 else (block, s.block_k)
                outer, inner = coordinates(b, position, shape)
                dk, d = (outer, inner) if across == 1 else (inner, outer)
                row, col = b.add(first, d), b.add(k, dk)
                inside = b.binary(
                    BinOp.AND,
                    b.compare(CmpOp.LT_U, row, b.index(limit)),
                    b.compare(CmpOp.LT_U, col, b.index(group.k)),
                )
                indices = [*batch, row, col] if is_lhs else [*batch, col, row]
                value = load(Point(b, indices, mask=inside), self.buffers, operand)
                where = b.add(b.scaled(dk, block), d)
                b.store(memory, where, widened(b, value, self.elem))

    def block(self, sums: list[Value]) -> list[Value]:
        """``block_k`` outer products of register tiles."""
        b, s = self.b, self.s
        with b.loop(b.index(0), b.index(s.block_k), carried=sums, hint="kk") as loop:
            row = b.add(b.scaled(loop.index, s.block_m), b.scaled(b.local_id(1), s.tile_m))
            col = b.add(b.scaled(loop.index, s.block_n), b.scaled(b.local_id(0), s.tile_n))
            lhs = [b.load(self.lhs, b.offset(row, i)) for i in range(s.tile_m)]
            rhs = [b.load(self.rhs, b.offset(col, j)) for j in range(s.tile_n)]
            out = [
                multiply_add(b, lhs[i], rhs[j], loop.carried[i * s.tile_n + j])
                for i in range(s.tile_m)
                for j in range(s.tile_n)
            ]
            loop.yields(*out)
        return list(loop.results)

    def epilogue(
        self, batch: Sequence[Value], first_m: Value, first_n: Value, sums: Sequence[Value]
    ) -> None:
        """Body and stores for every output of this invocation that lies inside the product."""
        b, s, group = self.b, self.s, self.group
        row0 = b.add(first_m, b.scaled(b.local_id(1), s.tile_m))
        col0 = b.add(first_n, b.scaled(b.local_id(0), s.tile_n))
        reach_m = -(-group.m // s.block_m) * s.block_m
        reach_n = -(-group.n // s.block_n) * s.block_n
        for i in range(s.tile_m):
            for j in range(s.tile_n):
                row, col = b.offset(row0, i), b.offset(col0, j)
                with within(b, row, group.m, reach_m), within(b, col, group.n, reach_n):
                    point = Point(b, [*batch, row, col])
                    product = widened(b, sums[i * s.tile_n + j], group.body[0].type)
                    wanted = {step.value for step in group.stores}
                    values = evaluate(point, self.buffers, group.body, wanted, {0: product})
                    for step in group.stores:
                        store(point, self.buffers, step, values[step.value])


def widened(b: Builder, value: Value, elem: ScalarType) -> Value:
    """``value`` in the accumulation or output type."""
    have = scalar_of(value.type)
    if have is elem:
        return value
    if elem.kind == "float":
        return b.convert(ConvertOp.FLOAT, value, elem)
    return b.convert(ConvertOp.SEXT if elem.bits > have.bits else ConvertOp.TRUNC, value, elem)


def multiply_add(b: Builder, x: Value, y: Value, total: Value) -> Value:
    """``x * y + total``, with one rounding for floats."""
    if scalar_of(total.type).kind == "float":
        return b.fma(x, y, total)
    return b.add(b.mul(x, y), total)
