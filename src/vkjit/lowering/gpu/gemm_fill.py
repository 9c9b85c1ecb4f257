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
from vkjit.lowering.gpu.gemm_operand import read
from vkjit.lowering.gpu.gemm_schedule import LANES, pitch
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.types import BinOp, CmpOp, Scratch, VecType
from vkjit.lowering.plan.groups import ContractGroup, LoadStep
from vkjit.lowering.plan.schedule import TiledSchedule
from vkjit.lowering.templates.body import Point
from vkjit.lowering.templates.context import Buffers
from vkjit.lowering.templates.space import coordinates

_RUN = 4
"""Neighbouring invocations that read along k where that is the contiguous axis: more of them would
write to the same banks of shared memory, fewer would read lines of memory in parts."""


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
@dataclass(frozen=True, slots=True)
class Source:
    """Where one unit is read: at ``address`` plus k times the stride, only where ``inside``."""

    side: _Side
    unit: _Unit
    address: Value
    inside: Value | None


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

    def aim(
        self, batch: Sequence[Value], first: tuple[Value, Value], *, edges: bool
    ) -> list[Source]:
        """This invocation's units of the tiles at ``first``, whose ``edges`` may stick out.

        Stands before the loop over k, which then adds one number to each address.
        """
        return [
            self._source(side, batch, start, unit, edges=edges)
            for side, start in zip(self.sides, first, strict=True)
            for unit in self._places[side.memory]
        ]

    def fetch(self, sources: Sequence[Source], k: Value, *, end: bool) -> list[Value]:
        """The units from step ``k`` on; zeros beyond the edges, and the ``end`` of the sum."""
        return [self._fetched(source, k, end=end) for source in sources]

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
                run = min(_RUN, s.block_k // width)
                shape = (s.block_k // width // run, side.block, run)
                far, free, near = coordinates(b, position, shape)
                along = b.add(b.scaled(far, run), near)
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

    def _source(
        self, side: _Side, batch: Sequence[Value], start: Value, unit: _Unit, *, edges: bool
    ) -> Source:
        b, view = self.b, side.operand.view
        free, inside = b.add(start, unit.free), unit.has
        if edges and side.size % side.block:
            inside = both(b, inside, b.compare(CmpOp.LT_U, free, b.index(side.size)))
        index = [*batch, b.index(0), b.index(0)]
        index[side.free], index[side.sum] = free, unit.step
        return Source(side, unit, Point(b, index).base(view), inside)

    def _fetched(self, source: Source, k: Value, *, end: bool) -> Value:
        b, side, inside = self.b, source.side, source.inside
        view, width = side.operand.view, self._width(side)
        address = b.add(source.address, b.scaled(k, view.strides[side.sum]))
        if end:
            step = b.add(k, source.unit.step)
            inside = both(b, inside, b.compare(CmpOp.LT_U, step, b.index(self.group.k)))
        if inside is not None:
            # The first element instead: it is there, and it is not used.
            address = b.select(inside, address, b.index(view.offset))
        value = read(b, self.buffers, side.operand, address, width)
        value = widened(b, value, self.group.accumulate)
        if inside is None:
            return value
        return b.select(inside, value, b.splat(number(b, self.group.accumulate, 0), width))


def both(b: Builder, test: Value | None, other: Value) -> Value:
    """Whether both hold; None always does."""
    return other if test is None else b.binary(BinOp.AND, test, other)
