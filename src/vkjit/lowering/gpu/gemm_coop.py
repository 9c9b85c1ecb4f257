"""Products on matrix units that a subgroup works together: tiles in shared memory, sums in them.

A workgroup has one tile of the product, each of its subgroups a part of that in fragments. While
the tiles of both operands for one step are multiplied, those for the next are on their way to
registers. Operands are read through any strides and stay as they lie: which way round a fragment
is loaded depends on the operand. With two parts for each operand (``gemm_split``) there are three
products, and the small ones have sums of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import final

from vkjit.errors import InternalError
from vkjit.lowering.gpu.gemm_coop_finish import Finish, Sums
from vkjit.lowering.gpu.gemm_coop_schedule import Scheme, scheme_of
from vkjit.lowering.gpu.gemm_coop_tiles import Tile
from vkjit.lowering.gpu.gemm_epilogue import buffers_of
from vkjit.lowering.gpu.gemm_join import split_sum
from vkjit.lowering.gpu.grid import Grid
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.types import BinOp, CmpOp, MatType, MatUse
from vkjit.lowering.plan.groups import ContractGroup
from vkjit.lowering.plan.schedule import CoopSchedule
from vkjit.lowering.templates.context import Buffers, Lowered, TemplateContext
from vkjit.lowering.templates.space import coordinates


def contract(
    group: ContractGroup, schedule: CoopSchedule, context: TemplateContext
) -> list[Lowered]:
    """The kernels of a product under ``schedule``, in order: one, or two for a sum in parts."""
    scheme = scheme_of(group)
    if scheme is None:
        raise InternalError(
            f"gemm: {group.lhs.type} by {group.rhs.type} on matrix units with precision "
            f"{group.precision.value}, expected types that gemm_coop_schedule.candidates serves"
        )
    return split_sum(
        group, schedule.split_k, context, lambda part: [_lower(part, schedule, scheme, context)]
    )


def _lower(
    group: ContractGroup, schedule: CoopSchedule, scheme: Scheme, context: TemplateContext
) -> Lowered:
    """A workgroup for each tile of the product and each batch index."""
    b = Builder("gemm_coop", context.target.index_type)
    buffers = buffers_of(b, group, context)
    tiles = (-(-group.m // schedule.block_m), -(-group.n // schedule.block_n))
    grid = Grid(math.prod(group.batch) * math.prod(tiles), context.target)
    work = _Workgroup(b, group, schedule, scheme, buffers)
    with grid.each(b) as position:
        # Neighbours in time share rows and columns: bands of rows are walked column by column.
        band = max(d for d in range(1, schedule.band + 1) if tiles[0] % d == 0)
        shape = (*group.batch, tiles[0] // band, tiles[1], band)
        *batch, outer, tile_n, inner = coordinates(b, position, shape)
        tile_m = b.add(b.scaled(outer, band), inner)
        first = (b.scaled(tile_m, schedule.block_m), b.scaled(tile_n, schedule.block_n))
        work.emit(batch, first)
    kernel = b.finish(grid.shape, (schedule.invocations, 1, 1), group.origin)
    kernel.subgroup = schedule.subgroup
    return Lowered(kernel, buffers.arrays)


@final
class _Workgroup:
    """One tile of the product."""

    def __init__(
        self,
        b: Builder,
        group: ContractGroup,
        schedule: CoopSchedule,
        scheme: Scheme,
        buffers: Buffers,
    ) -> None:
        self.b = b
        self.group = group
        self.s = schedule
        self.scheme = scheme
        self.buffers = buffers
        s = schedule
        self.lhs = Tile(b, group, 0, schedule, scheme)
        self.rhs = Tile(b, group, 1, schedule, scheme)
        self.types = (
            MatType(scheme.elem, s.fragment_m, s.fragment_k, MatUse.A),
            MatType(scheme.elem, s.fragment_k, s.fragment_n, MatUse.B),
        )
        self.sum_type = MatType(group.accumulate, s.fragment_m, s.fragment_n, MatUse.ACC)
        number, columns = b.subgroup_id(), b.index(s.subgroups_n)
        row = b.binary(BinOp.DIV_U, number, columns)
        self.subgroup = (row, b.sub(number, b.scaled(row, s.subgroups_n)))
        self.spans = (s.block_m // s.subgroups_m, s.block_n // s.subgroups_n)
        self.places = [
            [
                tile.place(self.subgroup[axis], self.spans[axis], at)
                for at in range(0, self.spans[axis], size)
            ]
            for axis, (tile, size) in enumerate(
                ((self.lhs, s.fragment_m), (self.rhs, s.fragment_n))
            )
        ]

    def emit(self, batch: Sequence[Value], first: tuple[Value, Value]) -> None:
        """Sums over steps of k, then the epilogue."""
        b = self.b
        count = len(self.places[0]) * len(self.places[1]) * self.scheme.parts
        sums = [b.mat_fill(self.sum_type)] * count
        if self.group.k:
            sums = self.summed(batch, first, sums)
        corner = tuple(
            b.add(start, b.scaled(place, span))
            for start, place, span in zip(first, self.subgroup, self.spans, strict=True)
        )
        each = count // self.scheme.parts
        found = Sums(sums[:each], sums[each:], self.scheme.low_scale, len(self.places[1]))
        Finish(b, self.group, self.s, self.buffers, self.sum_type).emit(
            batch, first, (corner[0], corner[1]), found
        )

    def summed(
        self, batch: Sequence[Value], first: tuple[Value, Value], sums: list[Value]
    ) -> list[Value]:
        """The fragments of this subgroup after all steps."""
        b, depth, k = self.b, self.s.block_k, self.group.k
        units = self.fetch(batch, first, b.index(0))
        if k <= depth:
            self.put(units, batch, first, b.index(0))
            b.barrier()
            return self.multiplied(sums)
        count = len(sums)
        with b.loop(b.index(0), b.index(k), b.index(depth), [*sums, *units], hint="k") as loop:
            b.barrier()
            self.put(loop.carried[count:], batch, first, loop.index)
            b.barrier()
            units = self.ahead(batch, first, loop.index, loop.carried[count:])
            loop.yields(*self.multiplied(list(loop.carried[:count])), *units)
        return list(loop.results[:count])

    def ahead(
        self,
        batch: Sequence[Value],
        first: tuple[Value, Value],
        step: Value,
        units: Sequence[Value],
    ) -> tuple[Value, ...]:
        """Units of the tiles after those from ``step`` on; after the last ones, ``units``."""
        b = self.b
        following = b.offset(step, self.s.block_k)
        more = b.compare(CmpOp.LT, following, b.index(self.group.k))
        branch = b.branch(more, [unit.type for unit in units])
        with branch.then() as region:
            region.yields = tuple(self.fetch(batch, first, following))
        with branch.otherwise() as region:
            region.yields = tuple(units)
        return branch.results

    def fetch(self, batch: Sequence[Value], first: tuple[Value, Value], step: Value) -> list[Value]:
        """Units of both tiles from ``step`` on, to registers.

        Only tiles at an edge ask of every unit whether it is there.
        """
        b, tiles = self.b, (self.lhs, self.rhs)
        places = [(start, step) for start in first]

        def fetched(*, guarded: bool) -> list[Value]:
            units = [
                tile.fetch(self.buffers, batch, place, guarded=guarded)
                for tile, place in zip(tiles, places, strict=True)
            ]
            return units[0] + units[1]

        inside = [c for t, p in zip(tiles, places, strict=True) for c in t.is_inside(*p)]
        if not inside:
            return fetched(guarded=False)
        whole = inside[0]
        for other in inside[1:]:
            whole = b.binary(BinOp.AND, whole, other)
        branch = b.branch(whole, [*tiles[0].types, *tiles[1].types])
        with branch.then() as region:
            region.yields = tuple(fetched(guarded=False))
        with branch.otherwise() as region:
            region.yields = tuple(fetched(guarded=True))
        return list(branch.results)

    def put(
        self,
        units: Sequence[Value],
        batch: Sequence[Value],
        first: tuple[Value, Value],
        step: Value,
    ) -> None:
        """Units of both tiles from ``step`` on, as they were fetched, to shared memory."""
        count = len(self.lhs.types)
        self.lhs.put(units[:count], self.buffers, batch, (first[0], step))
        self.rhs.put(units[count:], self.buffers, batch, (first[1], step))

    def multiplied(self, sums: list[Value]) -> list[Value]:
        """``sums`` after the products of both tiles: of all pairs of parts but the smallest."""
        b, parts = self.b, range(self.scheme.parts)
        rows, columns = self.places
        each = len(rows) * len(columns)
        out = list(sums)
        for step in range(0, self.s.block_k, self.s.fragment_k):
            left = [
                [self.lhs.fragment(part, at, step, self.types[0]) for at in rows] for part in parts
            ]
            for j, at in enumerate(columns):
                right = [self.rhs.fragment(part, at, step, self.types[1]) for part in parts]
                for p, q in product(parts, parts):
                    if p + q > 1:
                        continue
                    for i in range(len(rows)):
                        place = (p + q) * each + i * len(columns) + j
                        out[place] = b.mat_mul_add(left[p][i], right[q], out[place])
        return out
