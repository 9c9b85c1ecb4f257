"""Operands of a product on their way from global to shared memory.

A tile lies in shared memory with the step of the sum outermost. Each invocation moves a few *units*
of every tile: four consecutive elements along whichever axis is contiguous in memory, or single
ones. Units are first fetched to registers, so that one tile is under way while another is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from vkjit.errors import InternalError
from vkjit.lowering.gpu.gemm_schedule import LANES, pitch
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.types import (
    BinOp,
    CmpOp,
    ConvertOp,
    ScalarType,
    Scratch,
    VecType,
    scalar_of,
    with_elem,
)
from vkjit.lowering.plan.groups import ContractGroup, LoadStep
from vkjit.lowering.plan.schedule import TiledSchedule
from vkjit.lowering.templates.body import Point, load
from vkjit.lowering.templates.context import Buffers
from vkjit.lowering.templates.space import coordinates


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
class Staging:
    """Both operands of one product, or of one part of a batch."""

    def __init__(
        self, b: Builder, group: ContractGroup, schedule: TiledSchedule, buffers: Buffers
    ) -> None:
        self.b = b
        self.group = group
        self.s = schedule
        self.buffers = buffers
        elem, axes = group.accumulate, len(group.batch)

        def memory(name: str, block: int) -> Scratch:
            return b.scratch(name, elem, schedule.block_k * pitch(block))

        block_m, block_n = schedule.block_m, schedule.block_n
        self.sides = (
            _Side(group.lhs, group.m, block_m, axes, axes + 1, memory("lhs", block_m)),
            _Side(group.rhs, group.n, block_n, axes + 1, axes, memory("rhs", block_n)),
        )
        # Here, outside of the loop over k, once for all steps.
        self._places = {side.memory: self._units(side) for side in self.sides}

    @property
    def lhs(self) -> Scratch:
        """The tile of the left operand."""
        return self.sides[0].memory

    @property
    def rhs(self) -> Scratch:
        """The tile of the right operand."""
        return self.sides[1].memory

    def fetch(self, batch: Sequence[Value], first: tuple[Value, Value], k: Value) -> list[Value]:
        """This invocation's units of both tiles from step ``k`` on; zeros beyond the edges."""
        b = self.b
        return [
            self._fetched(side, batch, (b.add(start, free), b.add(k, step)))
            for side, start in zip(self.sides, first, strict=True)
            for free, step in self._places[side.memory]
        ]

    def put(self, units: Sequence[Value]) -> None:
        """Writes fetched units to shared memory."""
        b, rest = self.b, list(units)
        for side in self.sides:
            row = pitch(side.block)
            for free, step in self._places[side.memory]:
                unit, where = rest.pop(0), b.add(b.scaled(step, row), free)
                if not isinstance(unit.type, VecType) or self._axis(side) == side.free:
                    b.store(side.memory, where, unit)
                    continue
                for lane in range(unit.type.lanes):
                    b.store(side.memory, b.offset(where, lane * row), b.extract(unit, lane))

    def _units(self, side: _Side) -> list[tuple[Value, Value]]:
        """First offsets along m (or n) and k, in the tile, of each of this invocation's units."""
        b, s, width = self.b, self.s, self._width(side)
        units, count = side.block * s.block_k // width, s.workgroup[0] * s.workgroup[1]
        if units % count:
            raise InternalError(f"gemm: {units} units of a tile for {count} invocations")
        linear = b.add(b.scaled(b.local_id(1), s.workgroup[0]), b.local_id(0))
        places: list[tuple[Value, Value]] = []
        for start in range(0, units, count):
            position = b.offset(linear, start)
            if self._axis(side) == side.sum:
                free, along = coordinates(b, position, (side.block, s.block_k // width))
                places.append((free, b.scaled(along, width)))
            else:
                step, along = coordinates(b, position, (s.block_k, side.block // width))
                places.append((b.scaled(along, width), step))
        return places

    def _axis(self, side: _Side) -> int:
        """The axis of the view along which units lie: the contiguous one, else that of m or n."""
        strides = side.operand.view.strides
        return side.sum if strides[side.sum] == 1 and strides[side.free] != 1 else side.free

    def _width(self, side: _Side) -> int:
        """Elements of a unit: a vector where it is always aligned and never crosses an edge."""
        view, axis = side.operand.view, self._axis(side)
        size = self.group.k if axis == side.sum else side.size
        others = [stride for a, stride in enumerate(view.strides) if a != axis]
        aligned = all(number % LANES == 0 for number in (size, view.offset, *others))
        return LANES if view.strides[axis] == 1 and aligned else 1

    def _fetched(self, side: _Side, batch: Sequence[Value], at: tuple[Value, Value]) -> Value:
        """The unit at an index along m (or n) and one along k."""
        b, width = self.b, self._width(side)
        index = [*batch, b.index(0), b.index(0)]
        guards: list[Value] = []
        for axis, value, size, block in (
            (side.free, at[0], side.size, side.block),
            (side.sum, at[1], self.group.k, self.s.block_k),
        ):
            index[axis] = value
            if size % block:
                inside = b.compare(CmpOp.LT_U, value, b.index(size))
                # Somewhere inside: what is read there is not used.
                index[axis] = b.select(inside, value, b.index(0))
                guards.append(inside)
        point = Point(b, index, axis=self._axis(side), lanes=width)
        value = widened(b, load(point, self.buffers, side.operand), self.group.accumulate)
        zero = b.splat(number(b, self.group.accumulate, 0), width)
        for inside in guards:
            value = b.select(inside, value, zero)
        return value


def number(b: Builder, elem: ScalarType, value: int) -> Value:
    """A small whole number of type ``elem``."""
    return b.const(elem, float(value) if elem.kind == "float" else value)


def clamped(b: Builder, index: Value, last: int) -> Value:
    """The smaller of a non-negative index and ``last``."""
    return b.binary(BinOp.MIN_U, index, b.index(last))


def widened(b: Builder, value: Value, elem: ScalarType) -> Value:
    """``value`` in the accumulation or output type."""
    have = scalar_of(value.type)
    if have is elem:
        return value
    type_ = with_elem(value.type, elem)
    if elem.kind == "float":
        return b.convert(ConvertOp.FLOAT, value, type_)
    return b.convert(ConvertOp.SEXT if elem.bits > have.bits else ConvertOp.TRUNC, value, type_)


def multiply_add(b: Builder, x: Value, y: Value, total: Value) -> Value:
    """``x * y + total``, with one rounding for floats."""
    if scalar_of(total.type).kind == "float":
        return b.fma(x, y, total)
    return b.add(b.mul(x, y), total)
