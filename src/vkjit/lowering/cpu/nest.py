"""Passes over the reduced axes of a group on the CPU, and how they are laid out.

Vectors lie along a reduced axis when that is contiguous, else along a row axis, where no lanes need
to be combined. Long folds run in blocks whose states are merged, so that the rounding error of a
sum grows with the depth of the blocks and not with its length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, final

from vkjit.lowering.cpu.lanes import lane_mask
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Const, Value
from vkjit.lowering.kernel.types import BinOp, CmpOp
from vkjit.lowering.kernel.views import dense_strides
from vkjit.lowering.plan.groups import LoopGroup
from vkjit.lowering.plan.schedule import LoopSchedule
from vkjit.lowering.templates.body import Point
from vkjit.lowering.templates.cost import body_costs
from vkjit.lowering.templates.phases import full_values, phases
from vkjit.lowering.templates.space import coordinates, lane_axis, views_of

_BLOCK = 64
"""Steps of a fold before its state is merged into that of the blocks before."""
_VECTORS = 4
"""Vectors of rows side by side, where lanes lie along a row axis: whole cache lines of columns."""
WRITE_CHAINS = 2
"""Vectors written in one step, to save loop overhead."""
_FILLED = 2
"""One over the least share of a vector that a short reduced axis must fill, else lanes are rows."""
_LONG_BODY = 32
"""Bodies dearer than this fill the registers with half as many."""

State = list[tuple[Value, ...]]
"""The states of the reductions of one pass, in order."""


@final
@dataclass(frozen=True, slots=True)
class Row:
    """A row, or a vector of rows: an index for each row axis, and which lanes are rows at all."""

    at: tuple[Value, ...]
    mask: Value | None = None


@final
@dataclass(frozen=True, slots=True)
class Span:
    """A part of the split axis: from ``low`` to ``high``; ``last`` holds in the last part."""

    low: Value
    high: Value
    last: Value


@final
@dataclass(frozen=True, slots=True)
class _Bounds:
    """A loop of at most ``count`` steps."""

    low: Value
    high: Value
    step: int
    count: int


class Visitor(Protocol):
    """What a pass does at each of its points."""

    chains: int
    """Vectors side by side along the lane axis, each with a state of its own."""

    def fresh(self) -> State:
        """The state before anything."""
        ...

    def at(self, row: int, point: Point, state: State) -> State:
        """The state after ``point`` of row number ``row``."""
        ...

    def merge(self, left: State, right: State) -> State:
        """Two states as one."""
        ...


@final
class Layout:
    """How the index space of a group is walked: pure data, the same for all its kernels."""

    def __init__(self, group: LoopGroup, schedule: LoopSchedule) -> None:
        self.group = group
        self.lanes = schedule.lanes
        self.unroll = schedule.unroll
        rank = len(group.shape)
        self.row_axes = range(rank - group.reduced)
        self.col_axes = range(rank - group.reduced, rank)
        self.axis = self._choose_axis()
        self.over_rows = self.axis in self.row_axes
        self.phase = phases(group)
        self.full = full_values(group)
        self.last = max(self.phase.values(), default=0) + 1
        """Number of the pass that writes full values."""
        self.vectors = self._choose_vectors() if self.over_rows else 1
        self.counts = [group.shape[a] for a in self.row_axes]
        if self.over_rows:
            self.counts[self.axis] = -(-self.counts[self.axis] // self.width())
        self.items = math.prod(self.counts)
        """Rows, or groups of vectors of rows."""
        self.split_axis, self.chunk, self.parts = self._choose_split(schedule.tasks)

    def folded(self, phase: int) -> list[int]:
        """Numbers of the reductions of one pass."""
        return [n for n, p in self.phase.items() if p == phase]

    def whole_vectors(self) -> int:
        """Whole vectors along the lane axis."""
        return self.group.shape[self.axis] // self.lanes

    def width(self) -> int:
        """Rows of one item when lanes lie along a row axis."""
        return self.lanes * self.vectors

    def chains(self, wanted: int) -> int:
        """At most ``wanted`` vectors side by side, as many as the lane axis holds."""
        return 1 if self.over_rows else max(1, min(wanted, self.whole_vectors()))

    def _choose_axis(self) -> int:
        """The lane axis: a reduced one unless a row axis is the contiguous one."""
        views = views_of(self.group.body, self.group.stores)
        sizes = self.group.shape
        best = lane_axis(views, range(len(sizes)), self.lanes)
        if best in self.row_axes and sizes[best] < self.lanes:
            best = max(self.col_axes, key=lambda a: sizes[a])
        longest = max(self.row_axes, key=lambda a: sizes[a], default=best)
        if sizes[best] * _FILLED <= self.lanes <= sizes[longest]:
            best = longest
        return best

    def _choose_vectors(self) -> int:
        size = self.group.shape[self.axis]
        most = _VECTORS if sum(body_costs(self.group.body)) <= _LONG_BODY else _VECTORS // 2
        fitting = [v for v in (most, most // 2) if v and size % (self.lanes * v) == 0]
        if size % self.lanes and size >= 2 * _VECTORS * self.lanes:
            fitting = [most]
        return max(fitting, default=1)

    def _choose_split(self, tasks: int) -> tuple[int, int, int]:
        """Axis, chunk and parts of the reduced axes when rows alone give too few tasks."""
        shape = self.group.shape
        axis = max(self.col_axes, key=lambda a: shape[a] if a != self.axis else shape[a] / 64)
        grain = self.lanes * math.lcm(self.unroll, WRITE_CHAINS) if axis == self.axis else 1
        parts = tasks // max(1, self.items)
        if parts < 2:
            return axis, shape[axis], 1
        chunk = -(-shape[axis] // parts)
        chunk += -chunk % grain
        return axis, chunk, -(-shape[axis] // chunk)


@final
class Nest:
    """Loops over rows and over the reduced axes, in one kernel."""

    def __init__(self, b: Builder, layout: Layout) -> None:
        self.b = b
        self.layout = layout

    # -- rows -----------------------------------------------------------------------------------

    def rows(self, item: Value) -> list[Row]:
        """The rows of one item: one, or vectors side by side."""
        b, layout = self.b, self.layout
        at = coordinates(b, item, layout.counts)
        if not layout.over_rows:
            return [Row(tuple(at))]
        lanes, axis = layout.lanes, layout.axis
        size = layout.group.shape[axis]
        first = b.scaled(at[axis], layout.width())
        found: list[Row] = []
        for i in range(layout.vectors):
            start = b.offset(first, i * lanes)
            mask = None
            if size % layout.width():
                mask = lane_mask(b, start, b.index(size), lanes)
            found.append(Row((*at[:axis], start, *at[axis + 1 :]), mask))
        return found

    def row_point(self, row: Row) -> Point:
        """A point of the row itself; reduced indices are 0 and must not matter."""
        layout = self.layout
        indices = [*row.at, *[self.b.index(0)] * len(layout.col_axes)]
        if layout.over_rows:
            return Point(self.b, indices, layout.axis, layout.lanes, row.mask, aligned=True)
        return Point(self.b, indices)

    def span(self, part: Value) -> Span | None:
        """The piece of the split axis that part number ``part`` folds; None for all of it."""
        b, layout = self.b, self.layout
        if layout.parts == 1:
            return None
        low = b.scaled(part, layout.chunk)
        size = b.index(layout.group.shape[layout.split_axis])
        high = b.binary(BinOp.MIN_S, b.offset(low, layout.chunk), size)
        return Span(low, high, is_equal(b, part, layout.parts - 1))

    # -- columns --------------------------------------------------------------------------------

    def sweep(self, rows: Sequence[Row], visitor: Visitor, span: Span | None) -> list[State]:
        """One pass over the reduced axes of ``rows``; the state of each row, chains merged."""
        states = [visitor.fresh() for _ in range(len(rows) * visitor.chains)]
        outer = [a for a in self.layout.col_axes if a != self.layout.axis]
        states = _Pass(self, rows, visitor, span).over(outer, {}, states)
        while len(states) > len(rows):
            half = (len(states) + 1) // 2
            pairs = zip(states, states[half:], strict=False)
            states = [visitor.merge(x, y) for x, y in pairs] + states[len(states) // 2 : half]
        return states

    def linear(self, point: Point) -> Value:
        """Position along the reduced axes in row-major order, per lane."""
        b, layout = self.b, self.layout
        axes = list(layout.col_axes)
        strides = dense_strides([layout.group.shape[a] for a in axes])
        where = weighted(b, [point.indices[a] for a in axes], strides)
        if layout.over_rows or layout.lanes == 1:
            return b.splat(where, layout.lanes)
        return point.spread(where, strides[axes.index(layout.axis)])


@final
class _Pass:
    """One pass over the reduced axes on its way into a kernel."""

    def __init__(
        self, nest: Nest, rows: Sequence[Row], visitor: Visitor, span: Span | None
    ) -> None:
        self.b = nest.b
        self.layout = nest.layout
        self.rows = rows
        self.visitor = visitor
        self.span = span

    def over(
        self, axes: Sequence[int], chosen: dict[int, Value], states: list[State]
    ) -> list[State]:
        """Loops over ``axes``, then the lane axis if it is a reduced one."""
        if not axes:
            return self.vectors(chosen, states)
        axis, *rest = axes
        inner = math.prod(self.layout.group.shape[a] for a in rest) * (
            1 if self.layout.over_rows else self.steps()
        )

        def body(index: Value, states: list[State]) -> list[State]:
            if inner < _BLOCK:
                return self.over(rest, {**chosen, axis: index}, states)
            return self.merged(states, self.over(rest, {**chosen, axis: index}, self.fresh(states)))

        return self.loop(self.bounds(axis), states, body)

    def steps(self) -> int:
        """Steps along the lane axis."""
        layout = self.layout
        size = layout.chunk if self.splits(layout.axis) else layout.group.shape[layout.axis]
        return size // (layout.lanes * self.visitor.chains)

    def splits(self, axis: int) -> bool:
        """Whether this pass covers only a span of ``axis``."""
        return self.span is not None and axis == self.layout.split_axis

    def bounds(self, axis: int) -> _Bounds:
        """All of a reduced axis other than the lane axis, or the span of it."""
        size = self.layout.group.shape[axis]
        if self.span is not None and self.splits(axis):
            return _Bounds(self.span.low, self.span.high, 1, self.layout.chunk)
        return _Bounds(self.b.index(0), self.b.index(size), 1, size)

    def vectors(self, chosen: dict[int, Value], states: list[State]) -> list[State]:
        """The innermost points."""
        b, layout = self.b, self.layout
        if not layout.over_rows:
            return self.along(chosen, states)
        out: list[State] = []
        for number, (row, state) in enumerate(zip(self.rows, states, strict=True)):
            cols = [chosen[a] for a in layout.col_axes]
            point = Point(b, [*row.at, *cols], layout.axis, layout.lanes, row.mask, aligned=True)
            out.append(self.visitor.at(number, point, state))
        return out

    def along(self, chosen: dict[int, Value], states: list[State]) -> list[State]:
        """Whole vectors along the lane axis, several per step, then single and masked ones."""
        b, layout, visitor = self.b, self.layout, self.visitor
        lanes, size = layout.lanes, layout.group.shape[layout.axis]
        width = lanes * visitor.chains
        full = size - size % width

        def visit(position: Value, state: State, mask: Value | None) -> State:
            cols = [position if a == layout.axis else chosen[a] for a in layout.col_axes]
            point = Point(b, [*self.rows[0].at, *cols], layout.axis, lanes, mask, aligned=True)
            return visitor.at(0, point, state)

        def body(index: Value, states: list[State]) -> list[State]:
            return [visit(b.offset(index, i * lanes), s, None) for i, s in enumerate(states)]

        bounds = _Bounds(b.index(0), b.index(full), width, full // width)
        if self.span is not None and self.splits(layout.axis):
            high = b.binary(BinOp.MIN_S, self.span.high, b.index(full))
            bounds = _Bounds(self.span.low, high, width, layout.chunk // width)
        states = self.loop(bounds, states, body) if full else states
        for chain, start in enumerate(range(full, size, lanes)):
            position, mask = b.index(start), self.tail_mask(start)
            states = [
                visit(position, s, mask) if i == chain % visitor.chains else s
                for i, s in enumerate(states)
            ]
        return states

    def tail_mask(self, start: int) -> Value | None:
        """Lanes of a vector behind the loop that are there, and belong to this part."""
        b, layout = self.b, self.layout
        size, lanes = layout.group.shape[layout.axis], layout.lanes
        mask = lane_mask(b, b.index(start), b.index(size), lanes) if start + lanes > size else None
        if self.span is None or not self.splits(layout.axis):
            return mask
        last = b.splat(self.span.last, lanes)
        return last if mask is None else b.binary(BinOp.AND, mask, last)

    def loop(
        self,
        bounds: _Bounds,
        states: list[State],
        body: Callable[[Value, list[State]], list[State]],
    ) -> list[State]:
        """A loop over ``bounds``: long folds in blocks, blocks of blocks, and so on."""
        b = self.b
        fixed = isinstance(bounds.low, Const) and isinstance(bounds.high, Const)
        if fixed and bounds.count == 1:
            return body(bounds.low, states)
        size = 1
        if _flat(states) and bounds.count > 2 * _BLOCK:
            size = _BLOCK
            while size * _BLOCK < bounds.count:
                size *= _BLOCK
        stride = b.index(bounds.step * size)
        with b.loop(bounds.low, bounds.high, stride, _flat(states), hint="col") as loop:
            inside = _like(states, loop.carried)
            if size == 1:
                inside = body(loop.index, inside)
            else:
                high = b.add(loop.index, stride)
                if bounds.count % size or not fixed:
                    high = b.binary(BinOp.MIN_S, high, bounds.high)
                block = _Bounds(loop.index, high, bounds.step, size)
                inside = self.merged(inside, self.loop(block, self.fresh(states), body))
            loop.yields(*_flat(inside))
        return _like(states, loop.results)

    def fresh(self, states: Sequence[State]) -> list[State]:
        """As many states before anything."""
        return [self.visitor.fresh() for _ in states]

    def merged(self, left: Sequence[State], right: Sequence[State]) -> list[State]:
        """States merged one by one."""
        return [self.visitor.merge(x, y) for x, y in zip(left, right, strict=True)]


def weighted(b: Builder, indices: Sequence[Value], strides: Sequence[int]) -> Value:
    """The sum of indices times strides."""
    where: Value = b.index(0)
    for index, stride in zip(indices, strides, strict=True):
        where = b.add(where, b.scaled(index, stride))
    return where


def is_equal(b: Builder, x: Value, number: int) -> Value:
    """Whether an index is ``number``."""
    return b.compare(CmpOp.EQ, x, b.index(number))


def _flat(states: Sequence[State]) -> list[Value]:
    return [value for state in states for values in state for value in values]


def _like(states: Sequence[State], values: Sequence[Value]) -> list[State]:
    """``values`` in the structure of ``states``."""
    rest = iter(values)
    return [[tuple(next(rest) for _ in part) for part in state] for state in states]
