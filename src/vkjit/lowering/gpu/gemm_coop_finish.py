"""What becomes of the fragments of a product: stored as they are, or element by element.

Fragments whose elements need nothing more go straight to memory. Others go to a patch of shared
memory, from where the invocations of the subgroup take vectors of four, convert them, run the body
of the group and store them. Which invocation holds which element of a fragment is up to the driver.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from vkjit.lowering.gpu.gemm_coop_schedule import PATCH_PADDING, patch_words
from vkjit.lowering.gpu.gemm_epilogue import at_once, finish, finish_all
from vkjit.lowering.gpu.gemm_split import LARGEST
from vkjit.lowering.gpu.grid import within
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import BarrierScope, MatLayout, Value
from vkjit.lowering.kernel.types import F32, BinOp, CmpOp, MatType, Scratch, UnOp
from vkjit.lowering.plan.groups import ContractGroup, ProductStep
from vkjit.lowering.plan.schedule import CoopSchedule
from vkjit.lowering.templates.body import Point
from vkjit.lowering.templates.context import Buffers
from vkjit.lowering.templates.space import views_of

_LANES = 4
_BYTES = 16
"""Alignment of fragments in memory."""


@final
@dataclass(frozen=True, slots=True)
class Sums:
    """Fragments of one subgroup in rows of ``columns``.

    ``low`` has the sums that count ``low_scale``, or nothing.
    """

    high: Sequence[Value]
    low: Sequence[Value]
    low_scale: float
    columns: int


@final
class Finish:
    """The epilogue of one kernel."""

    def __init__(
        self,
        b: Builder,
        group: ContractGroup,
        schedule: CoopSchedule,
        buffers: Buffers,
        type_: MatType,
    ) -> None:
        self.b = b
        self.group = group
        self.s = schedule
        self.buffers = buffers
        self.type = type_
        self.patch: Scratch | None = None
        self.axis = self._lane_axis()
        """Axis of the fragment along which elements are neighbours in memory: 1 is n."""

    def emit(
        self,
        batch: Sequence[Value],
        first: tuple[Value, Value],
        corner: tuple[Value, Value],
        sums: Sums,
    ) -> None:
        """Stores all fragments.

        Args:
            batch: indices of the batch axes.
            first: row and column where the workgroup's tile starts.
            corner: row and column where the subgroup's part of it starts.
            sums: its fragments.
        """
        b, group, s = self.b, self.group, self.s
        if sums.low or not self._is_direct():
            self._by_patch(batch, corner, sums)
            return
        ends: list[Value] = []
        for start, size, block in zip(
            first, (group.m, group.n), (s.block_m, s.block_n), strict=True
        ):
            if size % block:
                ends.append(b.compare(CmpOp.LE_U, b.offset(start, block), b.index(size)))
        if not ends:
            self._directly(batch, corner, sums)
            return
        whole = ends[0] if len(ends) == 1 else b.binary(BinOp.AND, *ends)
        branch = b.branch(whole)
        with branch.then():
            self._directly(batch, corner, sums)
        with branch.otherwise():
            self._by_patch(batch, corner, sums)

    # -- whole fragments --------------------------------------------------------------------------

    def _is_direct(self) -> bool:
        """Whether fragments can be stored as they are: the product alone, of 32 bits, aligned."""
        group = self.group
        if len(group.body) != 1 or len(group.stores) != 1:
            return False
        step, view = group.body[0], group.stores[0].view
        assert isinstance(step, ProductStep)
        others = [
            stride
            for a, stride in enumerate(view.strides)
            if a != len(group.batch) + self.axis and view.shape[a] > 1
        ]
        multiple = _BYTES // step.type.bytes
        aligned = all(n % multiple == 0 and n >= 0 for n in (view.offset, *others))
        unit = view.strides[len(group.batch) + self.axis] == 1
        # Stores of narrower fragments are scattered; the patch makes vectors of them.
        return (
            step.type is group.accumulate is F32 and unit and aligned and min(others, default=1) > 0
        )

    def _directly(self, batch: Sequence[Value], corner: tuple[Value, Value], sums: Sums) -> None:
        b, step = self.b, self.group.stores[0]
        stride = step.view.strides[len(batch) + 1 - self.axis]
        layout = MatLayout.ROW if self.axis == 1 else MatLayout.COLUMN
        for number, value in enumerate(sums.high):
            point = Point(b, [*batch, *self._origin(corner, number, sums)])
            buffer, where = self.buffers.of(step.array), point.base(step.view)
            b.mat_store(buffer, where, b.index(stride), layout, value)

    def _origin(self, corner: tuple[Value, Value], number: int, sums: Sums) -> tuple[Value, Value]:
        """Row and column of a fragment."""
        b, (row, column) = self.b, divmod(number, sums.columns)
        return (
            b.offset(corner[0], row * self.type.rows),
            b.offset(corner[1], column * self.type.cols),
        )

    # -- elements ---------------------------------------------------------------------------------

    def _lane_axis(self) -> int:
        """The axis along which most arrays of the epilogue are contiguous; n wins ties."""
        views = views_of(self.group.body, self.group.stores)
        along = [sum(v.strides[axis] == 1 for v in views) for axis in (-2, -1)]
        return 0 if along[0] > along[1] else 1

    def _lanes(self) -> int:
        """Elements that are read and written at once."""
        group, axis = self.group, self.axis - 2
        size = group.n if self.axis == 1 else group.m
        views = views_of(group.body, group.stores)
        vectors = size % _LANES == 0 and all(v.strides[axis] in (0, 1) for v in views)
        return _LANES if vectors else 1

    def _by_patch(self, batch: Sequence[Value], corner: tuple[Value, Value], sums: Sums) -> None:
        b = self.b
        if self.patch is None:
            self.patch = b.scratch("patch", F32, patch_words(self.s))
        each = at_once(self.group) if self._is_inside() else 1
        ready: list[tuple[Point, Value]] = []
        for number in range(len(sums.high)):
            low: list[Value] = []
            if sums.low:
                low = self._elements(sums.low[number])
            high = self._elements(sums.high[number])
            origin = self._origin(corner, number, sums)
            for position, value in enumerate(high):
                if low:
                    value = self._added(value, low[position], sums.low_scale)
                if each == 1:
                    self._finish(batch, origin, position, value)
                    continue
                ready.append((self._point(batch, origin, position), value))
            if len(ready) >= each:
                finish_all(ready, self.buffers, self.group)
                ready = []
        finish_all(ready, self.buffers, self.group)

    def _is_inside(self) -> bool:
        """Whether every vector of every invocation is one of the product's."""
        group, s = self.group, self.s
        whole = group.m % s.block_m == group.n % s.block_n == 0
        return whole and self._count() % s.subgroup == 0

    def _elements(self, fragment: Value) -> list[Value]:
        """This invocation's elements of a fragment, in vectors, by way of the patch."""
        b, patch = self.b, self.patch
        assert patch is not None
        wide = MatType(F32, self.type.rows, self.type.cols, self.type.use)
        layout = MatLayout.ROW if self.axis == 1 else MatLayout.COLUMN
        own = b.scaled(b.subgroup_id(), patch.length // (self.s.subgroups_m * self.s.subgroups_n))
        b.barrier(BarrierScope.SUBGROUP)  # until everyone has read what was there
        b.mat_store(patch, own, b.index(self._pitch()), layout, b.mat_convert(fragment, wide))
        b.barrier(BarrierScope.SUBGROUP)
        found: list[Value] = []
        for position in range(self._rounds()):
            line, along = self._place(position)
            where = b.add(own, b.add(b.scaled(line, self._pitch()), along))
            found.append(b.load(patch, where, self._lanes()))
        return found

    def _pitch(self) -> int:
        """Words from one line of the patch to the next; lines run along the axis."""
        return (self.type.cols if self.axis == 1 else self.type.rows) + PATCH_PADDING

    def _count(self) -> int:
        """Vectors in a fragment."""
        return self.type.rows * self.type.cols // self._lanes()

    def _rounds(self) -> int:
        """Vectors of each invocation."""
        return -(-self._count() // self.s.subgroup)

    def _place(self, position: int) -> tuple[Value, Value]:
        """Line and position on it of one of this invocation's vectors; the last one if beyond."""
        b, each = self.b, (self._pitch() - PATCH_PADDING) // self._lanes()
        linear = b.offset(b.lane(), position * self.s.subgroup)
        if (position + 1) * self.s.subgroup > self._count():
            linear = b.binary(BinOp.MIN_U, linear, b.index(self._count() - 1))
        line = b.binary(BinOp.DIV_U, linear, b.index(each))
        return line, b.scaled(b.sub(linear, b.scaled(line, each)), self._lanes())

    def _added(self, high: Value, low: Value, scale: float) -> Value:
        """The whole sum; where infinities met low parts, the high products alone decide."""
        b, lanes = self.b, self._lanes()
        zero, factor, largest = (
            b.splat(b.const(F32, value), lanes) for value in (0.0, scale, LARGEST)
        )
        finite = b.compare(CmpOp.LE, b.unary(UnOp.ABS, low), largest)
        return b.add(high, b.select(finite, b.mul(low, factor), zero))

    def _finish(
        self, batch: Sequence[Value], origin: tuple[Value, Value], position: int, value: Value
    ) -> None:
        """Body and stores for one vector, where it lies inside the product."""
        b, group, s = self.b, self.group, self.s
        point = self._point(batch, origin, position)
        row, column = point.indices[-2:]
        linear = b.offset(b.lane(), position * s.subgroup)
        reach = -(-group.m // s.block_m) * s.block_m, -(-group.n // s.block_n) * s.block_n
        with (
            within(b, linear, self._count(), (position + 1) * s.subgroup),
            within(b, row, group.m, reach[0]),
            within(b, column, group.n, reach[1]),
        ):
            finish(point, self.buffers, group, value)

    def _point(self, batch: Sequence[Value], origin: tuple[Value, Value], position: int) -> Point:
        """Where one of this invocation's vectors is."""
        line, along = self._place(position)
        offsets = (line, along) if self.axis == 1 else (along, line)
        place = [self.b.add(o, at) for o, at in zip(origin, offsets, strict=True)]
        return Point(self.b, [*batch, *place], len(batch) + self.axis, self._lanes())
