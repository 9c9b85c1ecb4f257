"""Pointwise groups whose views are contiguous along different axes: transposes and their kin.

Vectors lie along one axis, where most views are contiguous. Views that are contiguous along another
one, the *turned* axis, are read and written there in square tiles, which are transposed in
registers. Without this each of their vectors would touch as many cache lines as it has lanes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from vkjit.lowering.cpu.gemm_pack import transpose
from vkjit.lowering.cpu.tasks import share
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.types import I1, I8, BinOp, CmpOp, ConvertOp, scalar_of, with_elem
from vkjit.lowering.kernel.views import View
from vkjit.lowering.plan.groups import IOTA, BodyStep, LoadStep, LoopGroup, StoreStep
from vkjit.lowering.plan.schedule import LoopSchedule
from vkjit.lowering.templates.body import Point, access_of, evaluate, from_memory, load, store
from vkjit.lowering.templates.context import Buffers, Lowered, TemplateContext
from vkjit.lowering.templates.cost import body_costs
from vkjit.lowering.templates.space import coordinates

_BLOCK = 32
"""Elements along each side of a block of tiles: its cache lines and pages are used up at once."""
_MOST_COST = 64
"""Dearer bodies hide the cost of strided access, and a tile of them would be long code."""


@final
@dataclass(frozen=True, slots=True)
class Turn:
    """The lane axis, the turned axis, and which loads and stores are contiguous along the latter.

    ``loads`` are numbers of body steps, ``stores`` positions in the group's stores.
    """

    axis: int
    across: int
    loads: tuple[int, ...]
    stores: tuple[int, ...]


def turn_of(group: LoopGroup, axis: int, lanes: int) -> Turn | None:
    """How a group with lanes along ``axis`` is to be tiled; None where that gains nothing."""
    if lanes & (lanes - 1) or lanes < 4 or sum(body_costs(group.body)) > _MOST_COST:
        return None
    found: Turn | None = None
    for across, size in enumerate(group.shape):
        if across == axis or min(size, group.shape[axis]) < lanes:
            continue
        loads = tuple(
            number
            for number, step in enumerate(group.body)
            if isinstance(step, LoadStep) and step.array != IOTA and _is(step.view, axis, across)
        )
        stores = tuple(i for i, s in enumerate(group.stores) if _is(s.view, axis, across))
        gain = len(loads) + len(stores)
        if gain and (found is None or gain > len(found.loads) + len(found.stores)):
            found = Turn(axis, across, loads, stores)
    return found


def _is(view: View, axis: int, across: int) -> bool:
    return view.strides[across] == 1 and view.strides[axis] not in (0, 1)


def turned(
    group: LoopGroup, turn: Turn, schedule: LoopSchedule, context: TemplateContext
) -> list[Lowered]:
    """One kernel, in blocks of tiles; what is left at the edges runs vector by vector."""
    b = Builder("turned", context.target.index_type)
    buffers = Buffers(b, context, access_of(group.body, group.stores))
    tiles = _Tiles(b, group, buffers, turn, schedule.lanes)
    rows, columns = group.shape[turn.across], group.shape[turn.axis]
    outer = [n for i, n in enumerate(group.shape) if i not in (turn.axis, turn.across)]
    counts = [*outer, -(-rows // _BLOCK), -(-columns // _BLOCK)]
    items = math.prod(counts)
    tasks = min(schedule.tasks, items)
    with share(b, items, tasks) as item:
        *at, row, column = coordinates(b, item, counts)
        tiles.block(at, b.scaled(row, _BLOCK), b.scaled(column, _BLOCK))
    return [Lowered(b.finish((tasks, 1, 1), origin=group.origin), buffers.arrays)]


@final
class _Tiles:
    """The tiles of one kernel: rows along the turned axis, columns along the lane axis."""

    def __init__(
        self, b: Builder, group: LoopGroup, buffers: Buffers, turn: Turn, lanes: int
    ) -> None:
        self.b = b
        self.group = group
        self.buffers = buffers
        self.turn = turn
        self.lanes = lanes

    def block(self, at: Sequence[Value], row: Value, column: Value) -> None:
        """All elements of the block that begins at ``row`` and ``column``."""
        b, step = self.b, self.b.index(self.lanes)
        rows, columns = self.group.shape[self.turn.across], self.group.shape[self.turn.axis]
        even_rows, even_columns = rows - rows % self.lanes, columns - columns % self.lanes
        row_end = self.end(row, even_rows)
        with (
            b.loop(row, row_end, step, hint="row") as down,
            b.loop(column, self.end(column, even_columns), step, hint="column") as along,
        ):
            self.tile(at, down.index, along.index)
        if columns > even_columns:
            edge = b.binary(BinOp.MAX_S, column, b.index(even_columns))
            self.strip(at, (row, row_end), (edge, self.end(column, columns)))
        if rows > even_rows:
            edge = b.binary(BinOp.MAX_S, row, b.index(even_rows))
            self.strip(at, (edge, self.end(row, rows)), (column, self.end(column, columns)))

    def end(self, start: Value, size: int) -> Value:
        """Where a block that begins at ``start`` ends along an axis of ``size``."""
        b = self.b
        return b.binary(BinOp.MIN_S, b.offset(start, _BLOCK), b.index(size))

    def strip(
        self, at: Sequence[Value], rows: tuple[Value, Value], columns: tuple[Value, Value]
    ) -> None:
        """Elements that fill no tile: vectors under a mask, gathered where they must be."""
        b = self.b
        with (
            b.loop(*rows, hint="row") as down,
            b.loop(*columns, b.index(self.lanes), hint="column") as along,
        ):
            where = b.add(b.splat(along.index, self.lanes), b.iota(self.lanes))
            mask = b.compare(CmpOp.LT, where, b.splat(columns[1], self.lanes))
            point = self.point(at, down.index, along.index, self.turn.axis, mask)
            wanted = {s.value for s in self.group.stores}
            values = evaluate(point, self.buffers, self.group.body, wanted, {})
            for step in self.group.stores:
                store(point, self.buffers, step, values[step.value])

    def tile(self, at: Sequence[Value], row: Value, column: Value) -> None:
        """One whole tile."""
        b, group, turn = self.b, self.group, self.turn
        ready = {n: self.loaded(group.body[n], at, row, column) for n in turn.loads}
        wanted = {s.value for s in group.stores}
        leaving: dict[int, list[Value]] = {position: [] for position in turn.stores}
        for i in range(self.lanes):
            point = self.point(at, b.offset(row, i), column, turn.axis)
            known = {n: lines[i] for n, lines in ready.items()}
            values = evaluate(point, self.buffers, group.body, wanted, known)
            for position, step in enumerate(group.stores):
                value = b.splat(values[step.value], self.lanes)
                if position in leaving:
                    leaving[position].append(value)
                else:
                    store(point, self.buffers, step, value)
        for position, lines in leaving.items():
            self.stored(group.stores[position], lines, at, row, column)

    def loaded(self, step: BodyStep, at: Sequence[Value], row: Value, column: Value) -> list[Value]:
        """Values of a turned load for each row of the tile, along the columns."""
        b = self.b
        assert isinstance(step, LoadStep)
        points = [
            self.point(at, row, b.offset(column, j), self.turn.across) for j in range(self.lanes)
        ]
        if step.blocks is not None:
            return transpose(b, [load(point, self.buffers, step) for point in points])
        buffer = self.buffers.of(step.array)
        lines = [b.load(buffer, point.base(step.view), self.lanes) for point in points]
        return [from_memory(b, line, step.type) for line in transpose(b, lines)]

    def stored(
        self, step: StoreStep, lines: list[Value], at: Sequence[Value], row: Value, column: Value
    ) -> None:
        """Writes a turned store from its values for each row of the tile."""
        b = self.b
        if scalar_of(lines[0].type) is I1:
            bytes_ = with_elem(lines[0].type, I8)
            lines = [b.convert(ConvertOp.ZEXT, line, bytes_) for line in lines]
        for j, line in enumerate(transpose(b, lines)):
            point = self.point(at, row, b.offset(column, j), self.turn.across)
            store(point, self.buffers, step, line)

    def point(
        self,
        at: Sequence[Value],
        row: Value,
        column: Value,
        axis: int,
        mask: Value | None = None,
    ) -> Point:
        """A vector along ``axis``, one of the tile's two."""
        rest = iter(at)
        own = {self.turn.across: row, self.turn.axis: column}
        indices = [own[a] if a in own else next(rest) for a in range(len(self.group.shape))]
        return Point(self.b, indices, axis, self.lanes, mask, aligned=True)
