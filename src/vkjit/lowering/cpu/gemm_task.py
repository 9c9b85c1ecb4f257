"""The kernel of a product: what one task computes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from vkjit.lowering.cpu import gemm_schedule as schedules
from vkjit.lowering.cpu.gemm_micro import Strip, Tile, dot, outer, outer_blocks, prefix
from vkjit.lowering.cpu.gemm_operand import Layout, Operand, Panel, operand
from vkjit.lowering.cpu.gemm_pack import Packed, pack
from vkjit.lowering.cpu.gemm_unpack import BlockRows, widened
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Const, Value
from vkjit.lowering.kernel.types import I1, BinOp, CmpOp, Scratch, Space
from vkjit.lowering.plan.groups import ContractGroup
from vkjit.lowering.plan.schedule import ContractSchedule
from vkjit.lowering.templates.body import Point, access_of, evaluate, needed, store
from vkjit.lowering.templates.context import Buffers, Lowered, TemplateContext
from vkjit.lowering.templates.space import coordinates

_MOST_UNROLLED = 90
"""Steps of the body written out for a tile: two for each vector beside the store."""
_LONG_SUM = 256


@final
@dataclass(frozen=True, slots=True)
class _Region:
    """What a task computes: one batch item, and ranges of tiles along m and n."""

    batch: tuple[Value, ...]
    rows: tuple[Value, Value]
    columns: tuple[Value, Value]


@final
@dataclass(frozen=True, slots=True)
class _Place:
    """A tile: its numbers along m and n, the first index it computes and that it must store."""

    tile: tuple[Value, Value]
    computed: tuple[Value, Value]
    stored: tuple[Value, Value]


@final
class Task:
    """Builds the kernel of one product; ``packed`` operands have been packed before."""

    def __init__(
        self,
        group: ContractGroup,
        schedule: ContractSchedule,
        context: TemplateContext,
        packed: Mapping[str, Packed],
    ) -> None:
        self._group = group
        self._schedule = schedule
        self._packed = packed
        self._dot = schedules.is_dot(group, schedule)
        lanes = schedules.vector_lanes(group, context.target)
        rows, columns = schedule.tile_m, schedule.tile_n
        self._tile = Tile(rows, columns, lanes, group.accumulate, schedule.tile_k)
        self._b = Builder("gemm", context.target.index_type)
        read = {group.lhs.array, group.rhs.array} | {p.array for p in packed.values()}
        self._buffers = Buffers(self._b, context, access_of(group.body, group.stores, read))
        self._lhs = operand(group, schedule, "lhs", lanes)
        self._rhs = operand(group, schedule, "rhs", lanes)
        self._row_tiles = _per_task(schedule.block_m, self._lhs)
        self._panels = _per_task(schedule.block_n, self._rhs)
        self._depth = min(schedule.block_k or group.k, group.k)
        self._blocked = self._depth < group.k
        self._light = not self._dot and _is_light(group, self._tile)
        self._scratch = self._declared()

    def lowered(self) -> Lowered:
        """The kernel and its arrays."""
        b, group = self._b, self._group
        row_blocks = -(-self._lhs.panels // self._row_tiles)
        column_blocks = -(-self._rhs.panels // self._panels)
        tasks = math.prod(group.batch) * row_blocks * column_blocks
        *batch, i, j = coordinates(b, b.workgroup_id(), [*group.batch, row_blocks, column_blocks])
        rows = self._range(i, self._row_tiles, self._lhs.panels)
        columns = self._range(j, self._panels, self._rhs.panels)
        self._region(_Region(tuple(batch), rows, columns))
        return Lowered(b.finish((tasks, 1, 1), origin=group.origin), self._buffers.arrays)

    def _declared(self) -> dict[str, Scratch]:
        """The tile of sums, or all tiles if the sum is blocked, and what the task packs."""
        tiles = self._row_tiles * self._panels if self._blocked else 1
        # The vector at the ragged end of the last row runs beyond it.
        sizes = {"sums": tiles * self._tile.size + self._tile.lanes}
        if self._packs("lhs"):
            sizes["lhs"] = self._row_tiles * self._tile.rows * self._depth
        if self._packs("rhs"):
            sizes["rhs"] = self._tile.columns * self._depth
        return {
            name: self._b.scratch(name, self._tile.elem, size, Space.LOCAL)
            for name, size in sizes.items()
        }

    def _packs(self, side: str) -> bool:
        """Whether the task packs this operand itself."""
        wanted = self._schedule.pack_lhs if side == "lhs" else self._schedule.pack_rhs
        return wanted and side not in self._packed and self._group.k > 0

    def _range(self, block: Value, size: int, count: int) -> tuple[Value, Value]:
        """First tile of a block, and the one after its last."""
        b = self._b
        if size == count:
            return b.index(0), b.index(count)
        first = b.scaled(block, size)
        last = b.offset(first, size)
        return first, last if count % size == 0 else b.binary(BinOp.MIN_S, last, b.index(count))

    # -- the loops of a task --------------------------------------------------------------------

    def _region(self, region: _Region) -> None:
        b = self._b
        if not self._blocked:
            self._sweep(region, b.index(0), self._group.k)
            return
        sums = self._scratch["sums"]
        with b.loop(b.index(0), b.index(sums.length), b.index(self._tile.lanes)) as loop:
            b.store(sums, loop.index, self._tile.zeros(b, 1)[0])
        end, step = b.index(self._group.k), b.index(self._depth)
        with b.loop(b.index(0), end, step, hint="kb") as loop:
            count: Value | int = self._depth
            if self._group.k % self._depth:
                count = b.binary(BinOp.MIN_S, b.sub(end, loop.index), step)
            self._sweep(region, loop.index, count)
        with (
            b.loop(*region.columns, hint="column") as columns,
            b.loop(*region.rows, hint="row") as rows,
        ):
            place = self._place(rows.index, columns.index)
            self._finish(region, place, self._sums_at(region, place))

    def _sweep(self, region: _Region, start: Value, count: Value | int) -> None:
        """Adds ``count`` steps of the sum from ``start`` on to each tile of the region."""
        b = self._b
        if self._packs("lhs"):
            with b.loop(*region.rows, hint="row") as rows:
                slot = b.sub(rows.index, region.rows[0])
                self._pack(self._lhs, region, (rows.index, slot), (start, count))
        if self._rhs_stays():
            with (
                b.loop(*region.rows, hint="row") as rows,
                b.loop(*region.columns, hint="column") as columns,
            ):
                self._tile_step(region, (rows.index, columns.index), start, count)
            return
        with b.loop(*region.columns, hint="column") as columns:
            if self._packs("rhs"):
                self._pack(self._rhs, region, (columns.index, b.index(0)), (start, count))
            with b.loop(*region.rows, hint="row") as rows:
                self._tile_step(region, (rows.index, columns.index), start, count)

    def _rhs_stays(self) -> bool:
        """Whether rhs is small enough to be read again for each row of tiles."""
        size = self._depth * self._group.n * self._tile.elem.bytes
        return not self._packs("rhs") and size <= schedules.RESIDENT_BYTES

    def _tile_step(
        self, region: _Region, tile: tuple[Value, Value], start: Value, count: Value | int
    ) -> None:
        """Adds to one tile, and finishes it unless more steps of the sum follow."""
        b = self._b
        place = self._place(*tile)
        totals = self._totals(region, place, start, count)
        if self._blocked:
            self._keep(self._sums_at(region, place), totals)
            return
        full = self._is_full(place) if self._light else b.const(I1, False)
        if isinstance(full, Const):
            self._finish_tile(region, place, totals, whole=bool(full.value))
            return
        branch = b.branch(full)
        with branch.then():
            self._finish_tile(region, place, totals, whole=True)
        with branch.otherwise():
            self._finish_tile(region, place, totals, whole=False)

    def _finish_tile(
        self, region: _Region, place: _Place, totals: Sequence[Value], *, whole: bool
    ) -> None:
        """Finishes a whole tile from registers, any other from scratch memory."""
        if whole:
            self._finish_registers(region, place, totals)
            return
        base = self._b.index(0)
        self._keep(base, totals)
        self._finish(region, place, base)

    def _is_full(self, place: _Place) -> Value:
        """Whether all of a tile is stored."""
        b = self._b
        full: Value = b.const(I1, True)
        for side, first in self._sides(place):
            if side.size % side.width:
                last = b.index(side.size - side.width)
                inside = b.compare(CmpOp.LE, first, last)
                full = inside if isinstance(full, Const) else b.binary(BinOp.AND, full, inside)
        return full

    def _pack(
        self,
        side: Operand,
        region: _Region,
        panel: tuple[Value, Value],
        steps: tuple[Value, Value | int],
    ) -> None:
        """Packs panel ``panel[0]`` of an operand into place ``panel[1]`` of its scratch memory."""
        b = self._b
        number, slot = panel
        base = b.scaled(slot, side.width * self._depth)
        target = Panel(
            self._scratch[side.name], base, side.width, self._tile.elem, self._tile.lanes
        )
        source = side.source(b, self._buffers, region.batch)
        pack(b, source, target, b.scaled(number, side.width), steps)

    # -- one tile -------------------------------------------------------------------------------

    def _place(self, row: Value, column: Value) -> _Place:
        """Where a tile lies.

        A tile at the end of an operand that is not packed begins earlier, so that it reads nothing
        beyond the operand; what it computes a second time it does not store.
        """
        b = self._b
        stored = (b.scaled(row, self._lhs.width), b.scaled(column, self._rhs.width))
        moved = [
            b.binary(BinOp.MIN_S, at, b.index(side.size - side.width))
            if not self._is_packed(side) and side.size > side.width and side.size % side.width
            else at
            for at, side in zip(stored, (self._lhs, self._rhs), strict=True)
        ]
        return _Place((row, column), (moved[0], moved[1]), stored)

    def _is_packed(self, side: Operand) -> bool:
        return side.name in self._packed or side.name in self._scratch

    def _sums_at(self, region: _Region, place: _Place) -> Value:
        """Where the sums of a tile stand in scratch memory."""
        if not self._blocked:
            return self._b.index(0)
        b = self._b
        row = b.sub(place.tile[0], region.rows[0])
        column = b.sub(place.tile[1], region.columns[0])
        return b.scaled(b.add(b.scaled(column, self._row_tiles), row), self._tile.size)

    def _totals(
        self, region: _Region, place: _Place, start: Value, count: Value | int
    ) -> Sequence[Value]:
        """The sums of a tile after ``count`` more steps from ``start`` on."""
        b, tile = self._b, self._tile
        totals: Sequence[Value] = tile.zeros(b, tile.size // tile.lanes)
        if self._group.k == 0:
            scalar = b.const(tile.elem, 0.0 if tile.elem.kind == "float" else 0)
            return (scalar,) * tile.size if self._dot else totals
        lhs = self._strip(self._lhs, region, place, start)
        if self._rhs.layout is Layout.ALONG and not self._is_packed(self._rhs):
            source = self._rhs.source(b, self._buffers, region.batch)
            ragged = self._rhs.size < tile.lanes
            rows = BlockRows(b, source, place.computed[1], tile.lanes, ragged=ragged)
            steps = start, b.index(count) if isinstance(count, int) else count
            return outer_blocks(b, tile, (lhs, rows), steps, totals)
        strips = lhs, self._strip(self._rhs, region, place, start)
        if self._dot:
            return dot(b, tile, strips, self._group.k)
        if self._blocked:
            sums, base = self._scratch["sums"], self._sums_at(region, place)
            offsets = range(0, tile.size, tile.lanes)
            totals = [b.load(sums, b.offset(base, at), tile.lanes) for at in offsets]
        return outer(b, tile, strips, count, totals)

    def _keep(self, base: Value, totals: Sequence[Value]) -> None:
        """Leaves the sums of a tile, vectors or scalars, in scratch memory."""
        b, step = self._b, self._tile.size // len(totals)
        for i, total in enumerate(totals):
            b.store(self._scratch["sums"], b.offset(base, i * step), total)

    def _strip(self, side: Operand, region: _Region, place: _Place, start: Value) -> Strip:
        """An operand as a tile reads it, ``k`` counted from ``start``."""
        b = self._b
        axis = 0 if side is self._lhs else 1
        if self._is_packed(side):
            number = place.tile[axis]
            if side.name in self._packed:
                memory, base = self._packed[side.name].item(b, self._buffers, region.batch)
                base = b.add(base, b.scaled(number, side.width * side.depth))
                return Strip(memory, b.add(base, b.scaled(start, side.width)), 1, side.width)
            number = b.sub(number, region.rows[0]) if axis == 0 else b.index(0)
            base = b.scaled(number, side.width * self._depth)
            return Strip(self._scratch[side.name], base, 1, side.width)
        source = side.source(b, self._buffers, region.batch)
        at = b.scaled(place.computed[axis], side.across)
        base = b.add(source.base, b.add(at, b.scaled(start, side.along)))
        step = side.step if side.step.blocks else None
        return Strip(source.memory, base, side.across, side.along, self._masks(side), step)

    def _masks(self, side: Operand) -> tuple[Value | None, ...]:
        """Masks of the vectors of rhs where it is narrower than a tile."""
        if side is self._lhs or self._dot or side.size >= side.width:
            return ()
        b, lanes = self._b, self._tile.lanes
        return tuple(
            prefix(b, b.index(side.size - at), lanes) if at + lanes > side.size else None
            for at in range(0, side.width, lanes)
        )

    def _finish(self, region: _Region, place: _Place, base: Value) -> None:
        """Runs the body over a tile of sums, row by row, in vectors along n."""
        b, group, tile = self._b, self._group, self._tile
        row_end, column_end = (self._end(side, at) for side, at in self._sides(place))
        with b.loop(place.stored[0], row_end, hint="m") as rows:
            row = b.sub(rows.index, place.computed[0])
            at = b.sub(b.add(base, b.scaled(row, tile.columns)), place.computed[1])
            step = b.index(tile.lanes)
            with b.loop(place.stored[1], column_end, step, hint="n") as columns:
                mask = None
                if group.n % tile.lanes or tile.columns % tile.lanes:
                    mask = prefix(b, b.sub(column_end, columns.index), tile.lanes)
                product = b.load(self._scratch["sums"], b.add(at, columns.index), tile.lanes)
                self._write(region, (rows.index, columns.index), product, mask)

    def _finish_registers(self, region: _Region, place: _Place, totals: Sequence[Value]) -> None:
        """Runs the body over a whole tile, vector by vector."""
        b, tile = self._b, self._tile
        row, column = place.stored
        for i, total in enumerate(totals):
            down, right = divmod(i, tile.vectors)
            at = b.offset(row, down), b.offset(column, right * tile.lanes)
            self._write(region, at, total, None)

    def _write(
        self, region: _Region, at: tuple[Value, Value], total: Value, mask: Value | None
    ) -> None:
        """Evaluates the body for a vector of sums, and stores what it gives."""
        group = self._group
        product = widened(self._b, total, group.body[0].type)
        indices = [*region.batch, *at]
        point = Point(self._b, indices, len(indices) - 1, self._tile.lanes, mask)
        wanted = {s.value for s in group.stores}
        values = evaluate(point, self._buffers, group.body, wanted, {0: product})
        for step in group.stores:
            store(point, self._buffers, step, values[step.value])

    def _sides(self, place: _Place) -> tuple[tuple[Operand, Value], tuple[Operand, Value]]:
        return (self._lhs, place.stored[0]), (self._rhs, place.stored[1])

    def _end(self, side: Operand, first: Value) -> Value:
        """The index after the last one that a tile stores."""
        b = self._b
        last = b.offset(first, side.width)
        if side.size % side.width == 0:
            return last
        return b.binary(BinOp.MIN_S, last, b.index(side.size))


def _is_light(group: ContractGroup, tile: Tile) -> bool:
    """Whether the body is small enough to stand in the kernel once for each vector of a tile.

    After a long sum the time saved does not show.
    """
    steps = needed(group.body, {s.value for s in group.stores}, {0})
    size = (len(steps) + len(group.stores)) * (tile.size // tile.lanes)
    return size <= _MOST_UNROLLED and group.k <= _LONG_SUM


def _per_task(block: int, side: Operand) -> int:
    """Tiles of a task along one axis."""
    return min(-(-block // side.width), side.panels) if block else side.panels
