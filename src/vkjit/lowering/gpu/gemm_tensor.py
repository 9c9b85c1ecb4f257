"""Products on cooperative matrices of flexible dimensions: VK_NV_cooperative_matrix2.

One matrix holds all sums of a workgroup; a step adds the product of two matrices to it. At
workgroup scope tensor loads name the tile that they want and the driver does the rest: staging in
shared memory, fragments, registers. Tiles at the edge of the product read zeros beyond it and drop
what they would store there, which is slower: one test for each workgroup says which it is.

The driver schedules loads of one step beside the product of another only in straight code, so the
loop is written out several times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import final

from vkjit.errors import InternalError
from vkjit.lowering.gpu.gemm_epilogue import buffers_of
from vkjit.lowering.gpu.gemm_join import split_sum
from vkjit.lowering.gpu.gemm_tensor_epilogue import Epilogue
from vkjit.lowering.gpu.gemm_tensor_memory import Located, Place, plane_of
from vkjit.lowering.gpu.grid import Grid
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.types import BinOp, CmpOp, MatScope, MatType, MatUse
from vkjit.lowering.plan.groups import ContractGroup, LoadStep
from vkjit.lowering.plan.schedule import TensorSchedule
from vkjit.lowering.templates.body import Point
from vkjit.lowering.templates.context import Buffers, Lowered, TemplateContext
from vkjit.lowering.templates.space import coordinates

_UNROLLED_EDGE = 2
"""Steps of the loop of a clamped tile that are written out: it waits for memory anyway."""


def contract(
    group: ContractGroup, schedule: TensorSchedule, context: TemplateContext
) -> list[Lowered]:
    """A workgroup for each tile of the product, batch index and part of the sum."""
    lower = partial(_kernel, schedule, context)
    return split_sum(group, schedule.split_k, context, lower)


def _kernel(
    schedule: TensorSchedule, context: TemplateContext, group: ContractGroup
) -> list[Lowered]:
    b = Builder("gemm_tensor", context.target.index_type)
    buffers = buffers_of(b, group, context)
    tiles = (-(-group.m // schedule.block_m), -(-group.n // schedule.block_n))
    grid = Grid(math.prod(group.batch) * math.prod(tiles), context.target)
    with grid.each(b) as position:
        *batch, tile_m, tile_n = coordinates(b, position, (*group.batch, *tiles))
        tile = _Tile(b, group, schedule, buffers, batch)
        place = (b.scaled(tile_m, schedule.block_m), b.scaled(tile_n, schedule.block_n))
        whole = _is_whole(b, group, schedule, (tile_m, tile_n))
        if isinstance(whole, bool):
            tile.emit(place, clamped=not whole)
        else:
            branch = b.branch(whole)
            with branch.then():
                tile.emit(place, clamped=False)
            with branch.otherwise():
                tile.emit(place, clamped=True)
    kernel = b.finish(grid.shape, (schedule.invocations, 1, 1), group.origin)
    if not schedule.whole_workgroup:
        kernel.subgroup = schedule.invocations
    return [Lowered(kernel, buffers.arrays)]


def _is_whole(
    b: Builder, group: ContractGroup, schedule: TensorSchedule, tile: Place
) -> bool | Value:
    """Whether a tile lies inside the product; one test for all of its invocations."""
    tests: list[Value] = []
    for index, size, block in (
        (tile[0], group.m, schedule.block_m),
        (tile[1], group.n, schedule.block_n),
    ):
        if size < block:
            return False
        if size % block:
            tests.append(b.compare(CmpOp.LT_U, index, b.index(size // block)))
    if not tests:
        return True
    return tests[0] if len(tests) == 1 else b.binary(BinOp.AND, *tests)


@final
class _Tile:
    """The tile of one workgroup."""

    def __init__(
        self,
        b: Builder,
        group: ContractGroup,
        schedule: TensorSchedule,
        buffers: Buffers,
        batch: Sequence[Value],
    ) -> None:
        self.b = b
        self.group = group
        self.s = schedule
        self.batch = tuple(batch)
        self.lhs = self._located(buffers, group.lhs)
        self.rhs = self._located(buffers, group.rhs)
        self.epilogue = Epilogue(b, group, schedule, buffers, self.batch)
        scope = MatScope.WORKGROUP if schedule.whole_workgroup else MatScope.SUBGROUP
        m, n, k = schedule.block_m, schedule.block_n, schedule.block_k
        self.type_a = MatType(group.lhs.type, m, k, MatUse.A, scope)
        self.type_b = MatType(group.rhs.type, k, n, MatUse.B, scope)
        self.type_c = MatType(group.accumulate, m, n, MatUse.ACC, scope)

    def _located(self, buffers: Buffers, operand: LoadStep) -> Located:
        plane = plane_of(operand.view)
        if plane is None:
            raise InternalError(f"gemm_tensor: operand {operand.view}, expected a contiguous axis")
        b = self.b
        index = (*self.batch, b.index(0), b.index(0))
        return Located(buffers.of(operand.array), plane, Point(b, index).base(operand.view))

    def emit(self, place: Place, *, clamped: bool) -> None:
        """The sums of the tile, then body and stores."""
        total = self.b.mat_fill(self.type_c)
        whole, rest = divmod(self.group.k, self.s.block_k)
        if clamped:
            total = self.summed(place, total, whole + bool(rest), clamped=True)
        else:
            total = self.summed(place, total, whole, clamped=False)
            if rest:
                start = self.b.index(whole * self.s.block_k)
                total = self.step(place, start, total, clamped=True)
        self.epilogue.emit(place, total, clamped=clamped)

    def summed(self, place: Place, total: Value, steps: int, *, clamped: bool) -> Value:
        """``steps`` steps from the start: a loop of several steps each, and what remains."""
        b, block = self.b, self.s.block_k
        count = unrolled(steps, _UNROLLED_EDGE if clamped else self.s.unroll)
        looped = steps // count * count if steps > count else 0
        if looped:
            stride = b.index(count * block)
            with b.loop(b.index(0), b.index(looped * block), stride, [total], hint="k") as loop:
                inner = loop.carried[0]
                for ahead in range(count):
                    start = b.offset(loop.index, ahead * block)
                    inner = self.step(place, start, inner, clamped=clamped)
                loop.yields(inner)
            total = loop.results[0]
        for step in range(looped, steps):
            total = self.step(place, b.index(step * block), total, clamped=clamped)
        return total

    def step(self, place: Place, k: Value, total: Value, *, clamped: bool) -> Value:
        """The sums after ``block_k`` more steps from ``k`` on."""
        b = self.b
        lhs = self.lhs.load(b, (place[0], k), self.type_a, clamped=clamped)
        rhs = self.rhs.load(b, (k, place[1]), self.type_b, clamped=clamped)
        return b.mat_mul_add(lhs, rhs, total)


def unrolled(steps: int, wanted: int) -> int:
    """Steps to write out: at most ``wanted``; a divisor of ``steps`` if one is at least half."""
    most = max(1, min(steps, wanted))
    divisors = [n for n in range(most, most // 2, -1) if steps % n == 0]
    return divisors[0] if divisors else most
