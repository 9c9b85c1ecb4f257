"""Groups with reductions on the CPU: softmax, norms, sums and all that is fused with them.

Reductions are done in *phases*: a phase folds everything that needs only row values of earlier
phases, in one pass over the reduced axes; a last pass writes the full values. Vectors lie along a
reduced axis when that is contiguous, else along a row axis, where no lanes need to be combined.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

from vkjit.lowering.cpu.loops import lane_mask, vector_lanes
from vkjit.lowering.cpu.tasks import share, task_count
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.types import Scratch, Space, VecType
from vkjit.lowering.kernel.views import dense_strides
from vkjit.lowering.plan.groups import LoopGroup, ReduceStep, StoreStep
from vkjit.lowering.plan.schedule import LoopSchedule
from vkjit.lowering.target import Target
from vkjit.lowering.templates.body import Point, access_of, arguments, evaluate, needed, store
from vkjit.lowering.templates.context import Buffers, Lowered, TemplateContext, memory_type
from vkjit.lowering.templates.cost import body_costs
from vkjit.lowering.templates.phases import full_values, phases
from vkjit.lowering.templates.space import compact, coordinates, lane_axis, views_of

_KEEP_COST = 8
"""Full values dearer than this are kept in scratch memory between phases."""
_KEEP_BYTES = 1 << 16
_CHAINS = 4
"""Independent accumulators of a cheap fold, to hide the latency of the addition."""


def default_schedule(group: LoopGroup, target: Target) -> LoopSchedule:
    """Vectors of the widest element; tasks by total cost."""
    cost = sum(body_costs(group.body)) + len(group.stores)
    size = math.prod(group.shape)
    rows = math.prod(group.shape[: len(group.shape) - group.reduced])
    return LoopSchedule(
        vector_lanes(group, target), _CHAINS, task_count(max(1, rows), size * cost, target)
    )


def rows(
    group: LoopGroup, schedule: LoopSchedule | None, context: TemplateContext
) -> list[Lowered]:
    """One kernel for a group with reduced axes."""
    group = compact(group)
    schedule = schedule or default_schedule(group, context.target)
    b = Builder("rows", context.target.index_type)
    buffers = Buffers(b, context, access_of(group.body, group.stores))
    nest = _Nest(b, group, buffers, schedule)
    tasks = nest.emit()
    return [Lowered(b.finish((tasks, 1, 1), origin=group.origin), buffers.arrays)]


@final
class _Nest:
    """One group on its way to a kernel."""

    def __init__(
        self, b: Builder, group: LoopGroup, buffers: Buffers, schedule: LoopSchedule
    ) -> None:
        self.b = b
        self.group = group
        self.buffers = buffers
        self.schedule = schedule
        self.rank = len(group.shape)
        self.row_axes = range(self.rank - group.reduced)
        self.col_axes = range(self.rank - group.reduced, self.rank)
        self.axis = self.choose_axis()
        self.over_rows = self.axis in self.row_axes
        self.phase = phases(group)
        self.full = full_values(group)
        self.kept = {} if self.over_rows else self.choose_kept()

    def choose_axis(self) -> int:
        """The lane axis: a reduced one unless a row axis is the contiguous one."""
        views = views_of(self.group.body, self.group.stores)
        best = lane_axis(views, range(self.rank), self.schedule.lanes)
        sizes = self.group.shape
        if best in self.row_axes and sizes[best] < self.schedule.lanes:
            best = max(self.col_axes, key=lambda a: sizes[a])
        return best

    def choose_kept(self) -> dict[int, Scratch]:
        """Scratch rows for full values that are dear and needed again in a later pass."""
        columns = math.prod(self.group.shape[a] for a in self.col_axes)
        costs = body_costs(self.group.body)
        kept: dict[int, Scratch] = {}
        last = max(self.phase.values(), default=0) + 1
        for number in sorted(self.full):
            step = self.group.body[number]
            passes = {p for p in range(1, last + 1) if number in self.pass_steps(p, kept)}
            if len(passes) < 2:
                continue
            chain = needed(self.group.body, [number], [*kept, *self.phase])
            cost = sum(costs[n] for n in chain if n in self.full)
            elem = memory_type(step.type)
            if cost >= _KEEP_COST and columns * elem.bytes <= _KEEP_BYTES and elem is step.type:
                padded = columns + self.schedule.lanes
                kept[number] = self.b.scratch(f"row{number}", elem, padded, Space.LOCAL)
        return kept

    def pass_steps(self, phase: int, kept: dict[int, Scratch]) -> set[int]:
        """Steps that pass number ``phase`` evaluates; the last one writes full values."""
        body = self.group.body
        folded = [n for n, p in self.phase.items() if p == phase]
        wanted = [a for n in folded for a in arguments(body[n])]
        if phase == max(self.phase.values(), default=0) + 1:
            wanted = [s.value for s in self.group.stores if s.value in self.full]
        ready = {n for n, p in self.phase.items() if p < phase}
        return set(needed(body, wanted, ready | self.computed_before(phase, kept)))

    def computed_before(self, phase: int, kept: dict[int, Scratch]) -> set[int]:
        """Kept values that an earlier pass has already computed."""
        done: set[int] = set()
        for earlier in range(1, phase):
            folded = [n for n, p in self.phase.items() if p == earlier]
            wanted = [a for n in folded for a in arguments(self.group.body[n])]
            ready = {n for n, p in self.phase.items() if p < earlier} | done
            done |= set(needed(self.group.body, wanted, ready)) & set(kept)
        return done

    # -- loops ----------------------------------------------------------------------------------

    def emit(self) -> int:
        """The whole kernel; returns the number of tasks."""
        b, shape = self.b, self.group.shape
        sizes = [shape[a] for a in self.row_axes]
        lanes = self.schedule.lanes
        if self.over_rows:
            sizes[self.axis] = -(-sizes[self.axis] // lanes)
        items = math.prod(sizes)
        tasks = min(self.schedule.tasks, items)
        with share(b, items, tasks) as item:
            at = coordinates(b, item, sizes)
            mask: Value | None = None
            if self.over_rows:
                at[self.axis] = b.scaled(at[self.axis], lanes)
                if shape[self.axis] % lanes:
                    mask = lane_mask(b, at[self.axis], b.index(shape[self.axis]), lanes)
            self.row(at, mask)
        return tasks

    def row(self, at: list[Value], mask: Value | None) -> None:
        """All phases of one row, or of one vector of rows."""
        known: dict[int, Value] = {}
        for phase in range(1, max(self.phase.values(), default=0) + 1):
            steps = [n for n, p in self.phase.items() if p == phase]
            known = self.row_values(at, mask, steps, known)
            known.update(self.fold(at, mask, steps, phase, known))
        self.write(at, mask, known)

    def row_point(self, at: list[Value], mask: Value | None) -> Point:
        """A point of the row itself; reduced indices are 0 and must not matter."""
        indices = [*at, *[self.b.index(0)] * len(self.col_axes)]
        if self.over_rows:
            return Point(self.b, indices, self.axis, self.schedule.lanes, mask)
        return Point(self.b, indices)

    def row_values(
        self, at: list[Value], mask: Value | None, steps: Sequence[int], known: dict[int, Value]
    ) -> dict[int, Value]:
        """``known`` and the row values that the next pass over the reduced axes needs."""
        body = self.group.body
        used = needed(body, [a for n in steps for a in arguments(body[n])], known)
        wanted = [n for n in used if n not in self.full]
        return evaluate(self.row_point(at, mask), self.buffers, body, wanted, known)

    def fold(
        self,
        at: list[Value],
        mask: Value | None,
        steps: Sequence[int],
        phase: int,
        known: dict[int, Value],
    ) -> dict[int, Value]:
        """One pass over the reduced axes; gives the values of the reductions ``steps``."""
        lanes = self.schedule.lanes
        rules = [s for n in steps if isinstance(s := self.group.body[n], ReduceStep)]
        chains = 1 if self.over_rows else self.chains()
        states: list[Value] = []
        for _ in range(chains):
            for step in rules:
                states.extend(step.rule.initial(self.b, lanes))
        final = self.passes(
            at,
            mask,
            _Fold(self, rules, known, phase, chains),
            states,
        )
        width = len(final) // chains
        parts = [final[i * width : (i + 1) * width] for i in range(chains)]
        return self.combine(steps, rules, parts)

    def chains(self) -> int:
        """Accumulators side by side: several when the lane axis holds enough whole vectors."""
        whole = self.group.shape[self.axis] // self.schedule.lanes
        return self.schedule.unroll if whole >= 2 * self.schedule.unroll else 1

    def combine(
        self, steps: Sequence[int], rules: Sequence[ReduceStep], parts: list[list[Value]]
    ) -> dict[int, Value]:
        """Chains merged, lanes merged, results finished."""
        b = self.b
        out: dict[int, Value] = {}
        for number, step in zip(steps, rules, strict=True):
            width = len(step.rule.initial(b, self.schedule.lanes))
            states = [tuple(part[:width]) for part in parts]
            parts = [part[width:] for part in parts]
            state = states[0]
            for other in states[1:]:
                state = step.rule.merge(b, state, other)
            if not self.over_rows:
                state = _across(b, step, state)
            out[number] = step.rule.finish(b, state)
        return out

    def passes(
        self, at: list[Value], mask: Value | None, visit: _Fold | _Write, states: list[Value]
    ) -> list[Value]:
        """Loops over the reduced axes, calling ``visit`` at every point."""
        outer = [a for a in self.col_axes if a != self.axis]
        return self.nest(at, mask, visit, states, outer, {})

    def nest(  # noqa: PLR0913  the state of a loop nest
        self,
        at: list[Value],
        mask: Value | None,
        visit: _Fold | _Write,
        states: list[Value],
        outer: list[int],
        chosen: dict[int, Value],
    ) -> list[Value]:
        """One loop for each axis of ``outer``, then the lane axis."""
        b = self.b
        if outer:
            axis, *rest = outer
            size = b.index(self.group.shape[axis])
            with b.loop(b.index(0), size, carried=states, hint="col") as loop:
                inner = {**chosen, axis: loop.index}
                loop.yields(*self.nest(at, mask, visit, list(loop.carried), rest, inner))
            return list(loop.results)
        if self.over_rows:
            cols = [chosen[a] for a in self.col_axes]
            point = Point(b, [*at, *cols], self.axis, self.schedule.lanes, mask)
            return visit.at(point, states, 0)
        return self.lane_loop(at, visit, states, chosen)

    def lane_loop(
        self, at: list[Value], visit: _Fold | _Write, states: list[Value], chosen: dict[int, Value]
    ) -> list[Value]:
        """Whole vectors, several per step, then single ones, then a masked rest."""
        b, lanes = self.b, self.schedule.lanes
        size = self.group.shape[self.axis]
        chains = visit.chains
        full = size - size % (lanes * chains)

        def at_lane(position: Value, mask: Value | None) -> Point:
            cols = [position if a == self.axis else chosen[a] for a in self.col_axes]
            return Point(b, [*at, *cols], self.axis, lanes, mask)

        if full:
            step = b.index(lanes * chains)
            with b.loop(b.index(0), b.index(full), step, states) as loop:
                inside = list(loop.carried)
                for chain in range(chains):
                    here = at_lane(b.offset(loop.index, chain * lanes), None)
                    inside = visit.at(here, inside, chain)
                loop.yields(*inside)
            states = list(loop.results)
        for start in range(full, size - size % lanes, lanes):
            states = visit.at(at_lane(b.index(start), None), states, 0)
        if size % lanes:
            start = b.index(size - size % lanes)
            mask = lane_mask(b, start, b.index(size), lanes)
            states = visit.at(at_lane(start, mask), states, 0)
        return states

    def write(self, at: list[Value], mask: Value | None, known: dict[int, Value]) -> None:
        """Stores row values, then full values in one more pass."""
        body = self.group.body
        per_row = [s for s in self.group.stores if s.value not in self.full]
        per_element = [s for s in self.group.stores if s.value in self.full]
        point = self.row_point(at, mask)
        used = needed(body, [s.value for s in self.group.stores], known)
        rows_needed = [n for n in used if n not in self.full]
        values = evaluate(point, self.buffers, body, rows_needed, known)
        for step in per_row:
            store(point, self.buffers, step, values[step.value])
        if per_element:
            last = max(self.phase.values(), default=0) + 1
            self.passes(at, mask, _Write(self, per_element, values, last), [])

    def linear(self, point: Point) -> Value:
        """Position along the reduced axes in row-major order, per lane."""
        b = self.b
        strides = dense_strides([self.group.shape[a] for a in self.col_axes])
        where: Value = b.index(0)
        for axis, stride in zip(self.col_axes, strides, strict=True):
            where = b.add(where, b.scaled(point.indices[axis], stride))
        lanes = self.schedule.lanes
        if self.over_rows:
            return b.splat(where, lanes)
        return point.spread(where, strides[self.axis - len(self.row_axes)])

    def restore(self, point: Point, phase: int, known: dict[int, Value]) -> dict[int, Value]:
        """``known`` and the kept full values that an earlier pass has left in scratch memory."""
        out = dict(known)
        for number in self.computed_before(phase, self.kept):
            scratch = self.kept[number]
            out[number] = self.b.load(scratch, self.slot(point), point.lanes, point.mask)
        return out

    def keep(self, point: Point, phase: int, values: dict[int, Value]) -> None:
        """Leaves kept values for later passes."""
        before = self.computed_before(phase, self.kept)
        for number, scratch in self.kept.items():
            if number in values and number not in before:
                value = self.b.splat(values[number], point.lanes)
                self.b.store(scratch, self.slot(point), value, point.mask)

    def slot(self, point: Point) -> Value:
        """Where a kept value of lane 0 lies: the lane axis is innermost there."""
        order = [a for a in self.col_axes if a != self.axis] + [self.axis]
        strides = dense_strides([self.group.shape[a] for a in order])
        where: Value = self.b.index(0)
        for axis, stride in zip(order, strides, strict=True):
            where = self.b.add(where, self.b.scaled(point.indices[axis], stride))
        return where


@final
class _Fold:
    """Visits points of a reducing pass."""

    def __init__(
        self,
        nest: _Nest,
        rules: Sequence[ReduceStep],
        known: dict[int, Value],
        phase: int,
        chains: int,
    ) -> None:
        self.nest = nest
        self.rules = rules
        self.known = known
        self.phase = phase
        self.chains = chains

    def at(self, point: Point, states: list[Value], chain: int) -> list[Value]:
        """The states after the elements at ``point``, added to accumulator ``chain``."""
        nest, b = self.nest, self.nest.b
        known = nest.restore(point, self.phase, self.known)
        wanted = [s.arg for s in self.rules]
        values = evaluate(point, nest.buffers, nest.group.body, wanted, known)
        nest.keep(point, self.phase, values)
        lanes = nest.schedule.lanes
        out = list(states)
        place = chain * (len(states) // self.chains)
        index = nest.linear(point)
        for step in self.rules:
            width = len(step.rule.initial(b, lanes))
            before = tuple(out[place : place + width])
            after = step.rule.step(b, before, b.splat(values[step.arg], lanes), index)
            if point.mask is not None and not nest.over_rows:
                mask = point.mask
                after = tuple(b.select(mask, a, o) for a, o in zip(after, before, strict=True))
            out[place : place + width] = after
            place += width
        return out


@final
class _Write:
    """Visits points of the pass that stores full values."""

    chains = 1

    def __init__(
        self, nest: _Nest, stores: Sequence[StoreStep], known: dict[int, Value], phase: int
    ) -> None:
        self.nest = nest
        self.stores = stores
        self.known = known
        self.phase = phase

    def at(self, point: Point, states: list[Value], chain: int) -> list[Value]:
        """Stores what belongs at ``point``."""
        del chain
        nest = self.nest
        known = nest.restore(point, self.phase, self.known)
        wanted = [s.value for s in self.stores]
        values = evaluate(point, nest.buffers, nest.group.body, wanted, known)
        for step in self.stores:
            store(point, nest.buffers, step, values[step.value])
        return states


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
