"""What a CPU kernel computes for rows and groups of rows: folds, kept values, stores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

from vkjit.lowering.cpu.nest import WRITE_CHAINS, Layout, Nest, Row, Span, State, weighted
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.elements import memory_type
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.types import Scratch, Space, VecType
from vkjit.lowering.kernel.views import dense_strides
from vkjit.lowering.plan.groups import ReduceStep, StoreStep
from vkjit.lowering.templates.body import Point, arguments, evaluate, needed, store
from vkjit.lowering.templates.context import Buffers
from vkjit.lowering.templates.cost import body_costs

_KEEP_COST = 8
"""Full values dearer than this are kept in scratch memory between phases."""
_KEEP_BYTES = 1 << 19
"""Most bytes kept: they should stay in the second-level cache beside what they are made of."""


@final
class RowWork:
    """What is computed in one kernel for rows and groups of rows."""

    def __init__(self, b: Builder, layout: Layout, buffers: Buffers) -> None:
        self.b = b
        self.layout = layout
        self.body = layout.group.body
        self.stores = layout.group.stores
        self.buffers = buffers
        self.nest = Nest(b, layout)
        self.kept: dict[int, Scratch] = {}
        self.per_row = [s for s in self.stores if s.value not in layout.full]
        self.per_element = [s for s in self.stores if s.value in layout.full]

    # -- values kept between passes -------------------------------------------------------------

    def keep_values(self) -> None:
        """Gives scratch rows to full values that are dear and needed again in a later pass.

        Where lanes lie along rows even a load is dear: every step along a column is another page.
        """
        layout = self.layout
        slots = math.prod(layout.group.shape[a] for a in layout.col_axes)
        slots = slots * layout.width() if layout.over_rows else slots + layout.lanes
        costs = body_costs(self.body)
        least = 1 if layout.over_rows else _KEEP_COST
        left = _KEEP_BYTES
        for number in sorted(layout.full):
            elem = self.body[number].type
            passes = [p for p in range(1, layout.last + 1) if number in self.pass_steps(p)]
            if len(passes) < 2 or slots * elem.bytes > left or memory_type(elem) is not elem:
                continue
            chain = needed(self.body, [number], [*self.kept, *layout.phase])
            if sum(costs[n] for n in chain if n in layout.full) >= least:
                left -= slots * elem.bytes
                self.kept[number] = self.b.scratch(f"row{number}", elem, slots, Space.LOCAL)

    def wanted(self, phase: int) -> list[int]:
        """Full and row values that pass number ``phase`` is for."""
        if phase == self.layout.last:
            return [s.value for s in self.stores]
        return [a for n in self.layout.folded(phase) for a in arguments(self.body[n])]

    def pass_steps(self, phase: int) -> set[int]:
        """Steps that pass number ``phase`` evaluates."""
        wanted = [n for n in self.wanted(phase) if n in self.layout.full]
        ready = {n for n, p in self.layout.phase.items() if p < phase}
        return set(needed(self.body, wanted, ready | self.computed_before(phase)))

    def computed_before(self, phase: int) -> set[int]:
        """Kept values that an earlier pass has already computed."""
        done: set[int] = set()
        for earlier in range(1, phase):
            ready = {n for n, p in self.layout.phase.items() if p < earlier} | done
            done |= set(needed(self.body, self.wanted(earlier), ready)) & set(self.kept)
        return done

    def restore(
        self, row: int, point: Point, phase: int, known: dict[int, Value]
    ) -> dict[int, Value]:
        """``known`` and the kept full values that an earlier pass has left in scratch memory."""
        out = dict(known)
        for number in self.computed_before(phase):
            out[number] = self.b.load(self.kept[number], self.slot(row, point), point.lanes)
        return out

    def keep(self, row: int, point: Point, phase: int, values: dict[int, Value]) -> None:
        """Leaves kept values for later passes, those of lanes outside the row too."""
        before = self.computed_before(phase)
        for number, scratch in self.kept.items():
            if number in values and number not in before:
                value = self.b.splat(values[number], point.lanes)
                self.b.store(scratch, self.slot(row, point), value)

    def slot(self, row: int, point: Point) -> Value:
        """Where a kept value of lane 0 lies: the lane axis is innermost there."""
        layout, shape = self.layout, self.layout.group.shape
        order = [a for a in layout.col_axes if a != layout.axis]
        if not layout.over_rows:
            order.append(layout.axis)
        strides = dense_strides([shape[a] for a in order])
        where = weighted(self.b, [point.indices[a] for a in order], strides)
        if not layout.over_rows:
            return where
        return self.b.offset(self.b.scaled(where, layout.width()), row * layout.lanes)

    # -- passes ---------------------------------------------------------------------------------

    def prepared(
        self, rows: Sequence[Row], knowns: Sequence[dict[int, Value]], phase: int
    ) -> list[dict[int, Value]]:
        """Known values of each row with the row values that pass number ``phase`` needs."""
        out: list[dict[int, Value]] = []
        for row, known in zip(rows, knowns, strict=True):
            used = needed(self.body, self.wanted(phase), known)
            wanted = [n for n in used if n not in self.layout.full]
            point = self.nest.row_point(row)
            out.append(evaluate(point, self.buffers, self.body, wanted, known))
        return out

    def folded(
        self,
        rows: Sequence[Row],
        knowns: Sequence[dict[int, Value]],
        phase: int,
        span: Span | None,
    ) -> list[State]:
        """The states of the reductions of one pass, for each row."""
        fold = _Fold(self, phase, knowns)
        states = self.nest.sweep(rows, fold, span)
        if self.layout.over_rows:
            return states
        pairs = zip(fold.steps, states[0], strict=True)
        return [[_across(self.b, step, part) for step, part in pairs]]

    def finished(self, phase: int, state: State) -> dict[int, Value]:
        """The values of the reductions of one pass."""
        out: dict[int, Value] = {}
        for number, part in zip(self.layout.folded(phase), state, strict=True):
            step = self.body[number]
            assert isinstance(step, ReduceStep)
            out[number] = step.rule.finish(self.b, part)
        return out

    def write_rows(self, rows: Sequence[Row], knowns: Sequence[dict[int, Value]]) -> None:
        """Stores row values."""
        for row, known in zip(rows, knowns, strict=True):
            point = self.nest.row_point(row)
            for step in self.per_row:
                store(point, self.buffers, step, known[step.value])

    def write_full(
        self, rows: Sequence[Row], knowns: Sequence[dict[int, Value]], span: Span | None
    ) -> None:
        """Stores full values in one more pass."""
        if self.per_element:
            self.nest.sweep(rows, _Write(self, self.per_element, knowns), span)


@final
class _Fold:
    """Visits points of a reducing pass."""

    def __init__(self, work: RowWork, phase: int, knowns: Sequence[dict[int, Value]]) -> None:
        self.work = work
        self.phase = phase
        self.knowns = knowns
        self.steps = [
            s for n in work.layout.folded(phase) if isinstance(s := work.body[n], ReduceStep)
        ]
        self.chains = work.layout.chains(work.layout.unroll)

    def fresh(self) -> State:
        """The identities."""
        return [s.rule.initial(self.work.b, self.work.layout.lanes) for s in self.steps]

    def merge(self, left: State, right: State) -> State:
        """Both combined."""
        parts = zip(self.steps, left, right, strict=True)
        return [s.rule.merge(self.work.b, x, y) for s, x, y in parts]

    def at(self, row: int, point: Point, state: State) -> State:
        """The state after the elements at ``point``."""
        work, b = self.work, self.work.b
        known = work.restore(row, point, self.phase, self.knowns[row])
        values = evaluate(point, work.buffers, work.body, [s.arg for s in self.steps], known)
        work.keep(row, point, self.phase, values)
        index = work.nest.linear(point)
        out: State = []
        for step, before in zip(self.steps, state, strict=True):
            x = b.splat(values[step.arg], work.layout.lanes)
            after = step.rule.step(b, before, x, index)
            if point.mask is not None and not work.layout.over_rows:
                mask = point.mask
                after = tuple(b.select(mask, a, o) for a, o in zip(after, before, strict=True))
            out.append(after)
        return out


@final
class _Write:
    """Visits points of the pass that stores full values."""

    def __init__(
        self, work: RowWork, stores: Sequence[StoreStep], knowns: Sequence[dict[int, Value]]
    ) -> None:
        self.work = work
        self.stores = stores
        self.knowns = knowns
        self.chains = work.layout.chains(WRITE_CHAINS)

    def fresh(self) -> State:
        """Nothing."""
        return []

    def merge(self, left: State, right: State) -> State:
        """Nothing."""
        return []

    def at(self, row: int, point: Point, state: State) -> State:
        """Stores what belongs at ``point``."""
        work = self.work
        known = work.restore(row, point, work.layout.last, self.knowns[row])
        wanted = [s.value for s in self.stores]
        values = evaluate(point, work.buffers, work.body, wanted, known)
        for step in self.stores:
            store(point, work.buffers, step, values[step.value])
        return state


def _across(b: Builder, step: ReduceStep, state: tuple[Value, ...]) -> tuple[Value, ...]:
    """The state of one lane that holds all lanes of ``state``, merged by halves."""
    type_ = state[0].type
    if not isinstance(type_, VecType):
        return state
    lanes = type_.lanes
    while lanes > 2:
        half = lanes // 2
        low = tuple(b.shuffle(s, s, range(half)) for s in state)
        high = tuple(b.shuffle(s, s, range(half, lanes)) for s in state)
        state = step.rule.merge(b, low, high)
        lanes = half
    first = tuple(b.extract(s, 0) for s in state)
    return step.rule.merge(b, first, tuple(b.extract(s, 1) for s in state))
