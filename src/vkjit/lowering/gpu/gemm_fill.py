"""Operands of a product on their way from global to shared memory.

A tile lies in shared memory with the step of the sum outermost. Each invocation moves a few *units*
of every tile: four consecutive elements along whichever axis is contiguous in memory, or single
ones. Units are first fetched to registers, so that one tile is under way while another is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from vkjit.lowering.gpu.gemm_epilogue import number, widened
from vkjit.lowering.gpu.gemm_schedule import LANES, pitch
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.types import BinOp, CmpOp, Scratch, VecType
from vkjit.lowering.plan.groups import ContractGroup, LoadStep
from vkjit.lowering.plan.schedule import TiledSchedule
from vkjit.lowering.templates.body import Point, load
from vkjit.lowering.templates.context import Buffers
from vkjit.lowering.templates.space import coordinates


@final
@dataclass(frozen=True, slots=True)
class Guards:
    """What a tile may reach over: the edges of m and n, and the end of the sum."""

    edges: bool
    end: bool = False


@final
@dataclass(frozen=True, slots=True)
class _Side:
    """One operand. ``free`` and ``sum`` number its view's axes of m (or n) and of k."""

    operand: LoadStep
    size: int
    block: int
    free: int
    sum: int
    memory: Scratch


@final
@dataclass(frozen=True, slots=True)
class _Unit:
    """Where one unit of this invocation begins in a tile; ``has`` where not all have this one."""

    free: Value
    step: Value
    has: Value | None


@final
class Staging:
    """Both operands of one product, with one or two tiles of each in shared memory."""

    def __init__(
        self, b: Builder, group: ContractGroup, schedule: TiledSchedule, buffers: Buffers
    ) -> None:
        self.b = b
        self.group = group
        self.s = schedule
        self.buffers = buffers
        elem, axes = group.accumulate, len(group.batch)

        def memory(name: str, block: int) -> Scratch:
            return b.scratch(name, elem, schedule.stages * schedule.block_k * pitch(block))

        block_m, block_n = schedule.block_m, schedule.block_n
        self.sides = (
            _Side(group.lhs, group.m, block_m, axes, axes + 1, memory("lhs", block_m)),
            _Side(group.rhs, group.n, block_n, axes + 1, axes, memory("rhs", block_n)),
        )
        # Here, outside of all loops, once for all steps.
        self._places = {side.memory: self._units(side) for side in self.sides}

    @property
    def lhs(self) -> Scratch:
        """The tiles of the left operand."""
        return self.sides[0].memory

    @property
    def rhs(self) -> Scratch:
        """The tiles of the right operand."""
        return self.sides[1].memory

    def stage(self, side: int, number: Value) -> Value:
        """Where stage ``number`` of the left or right operand begins in its shared memory."""
        return self.b.scaled(number, self.s.block_k * pitch(self.sides[side].block))

    def fetch(
        self, batch: Sequence[Value], first: tuple[Value, Value], k: Value, guards: Guards
    ) -> list[Value]:
        """This invocation's units of both tiles from step ``k`` on; zeros beyond the guards."""
        return [
            self._fetched(side, batch, (start, k), unit, guards)
            for side, start in zip(self.sides, first, strict=True)
            for unit in self._places[side.memory]
        ]

    def put(self, units: Sequence[Value], number: Value) -> None:
        """Writes fetched units to stage ``number`` of shared memory."""
        b, rest = self.b, list(units)
        for index, side in enumerate(self.sides):
            row, base = pitch(side.block), self.stage(index, number)
            for unit in self._places[side.memory]:
                where = b.add(base, b.add(b.scaled(unit.step, row), unit.free))
                if unit.has is None:
                    self._put(side, where, rest.pop(0))
                    continue
                with b.branch(unit.has).then():
                    self._put(side, where, rest.pop(0))

    def _put(self, side: _Side, where: Value, value: Value) -> None:
        b = self.b
        if not isinstance(value.type, VecType) or self._axis(side) == side.free:
            b.store(side.memory, where, value)
            return
        for lane in range(value.type.lanes):
            b.store(side.memory, b.offset(where, lane * pitch(side.block)), b.extract(value, lane))

    def _units(self, side: _Side) -> list[_Unit]:
        """This invocation's units of a tile."""
        b, s, width = self.b, self.s, self._width(side)
        columns, rows, slices = s.workgroup
        units, count = side.block * s.block_k // width, columns * rows * slices
        linear = b.add(b.scaled(b.local_id(1), columns), b.local_id(0))
        if slices > 1:
            linear = b.add(b.scaled(b.local_id(2), columns * rows), linear)
        places: list[_Unit] = []
        for start in range(0, units, count):
            position, has = b.offset(linear, start), None
            if start + count > units:
                has = b.compare(CmpOp.LT_U, position, b.index(units))
            if self._axis(side) == side.sum:
                free, along = coordinates(b, position, (side.block, s.block_k // width))
                places.append(_Unit(free, b.scaled(along, width), has))
            else:
                step, along = coordinates(b, position, (s.block_k, side.block // width))
                places.append(_Unit(b.scaled(along, width), step, has))
        return places

    def _axis(self, side: _Side) -> int:
        """The axis of the view along which units lie: the contiguous one, else that of m or n."""
        strides = side.operand.view.strides
        return side.sum if strides[side.sum] == 1 and strides[side.free] != 1 else side.free

    def _width(self, side: _Side) -> int:
        """Elements of a unit: a vector where it is always aligned and never crosses an edge."""
        view, axis = side.operand.view, self._axis(side)
        size, block = (
            (self.group.k, self.s.block_k) if axis == side.sum else (side.size, side.block)
        )
        others = [stride for a, stride in enumerate(view.strides) if a != axis]
        aligned = all(number % LANES == 0 for number in (size, block, view.offset, *others))
        return LANES if view.strides[axis] == 1 and aligned else 1

    def _fetched(
        self,
        side: _Side,
        batch: Sequence[Value],
        at: tuple[Value, Value],
        unit: _Unit,
        guards: Guards,
    ) -> Value:
        """The unit of a tile that begins at an index along m (or n) and one along k."""
        b, width = self.b, self._width(side)
        index = [*batch, b.index(0), b.index(0)]
        index[side.free], index[side.sum] = b.add(at[0], unit.free), b.add(at[1], unit.step)
        inside = unit.has
        for axis, size, guarded in (
            (side.free, side.size, guards.edges and side.size % side.block),
            (side.sum, self.group.k, guards.end),
        ):
            if guarded:
                below = b.compare(CmpOp.LT_U, index[axis], b.index(size))
                inside = below if inside is None else b.binary(BinOp.AND, inside, below)
        if inside is not None:
            # Somewhere inside: what is read there is not used.
            for axis in (side.free, side.sum):
                index[axis] = b.select(inside, index[axis], b.index(0))
        point = Point(b, index, axis=self._axis(side), lanes=width)
        value = widened(b, load(point, self.buffers, side.operand), self.group.accumulate)
        if inside is None:
            return value
        return b.select(inside, value, b.splat(number(b, self.group.accumulate, 0), width))
