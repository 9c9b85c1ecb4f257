"""Groups with reductions on the CPU: softmax, norms, sums and all that is fused with them.

Reductions are done in *phases*: a phase folds everything that needs only row values of earlier
phases, in one pass over the reduced axes; a last pass writes the full values. One kernel does all
phases of a row. Where rows are too few for the threads, every phase is a kernel of its own, in
which tasks fold parts of the reduced axes: it writes the states of the parts, and the next kernel
merges them, each task for itself, which costs one short loop.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

from vkjit.lowering.cpu.lanes import vector_lanes
from vkjit.lowering.cpu.nest import Layout, Row, State, is_equal, weighted
from vkjit.lowering.cpu.row_work import RowWork
from vkjit.lowering.cpu.tasks import share, task_count
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.types import Access, BinOp, scalar_of
from vkjit.lowering.kernel.views import dense_strides
from vkjit.lowering.plan.groups import LoopGroup, ReduceStep
from vkjit.lowering.plan.schedule import LoopSchedule
from vkjit.lowering.target import Target
from vkjit.lowering.templates.body import access_of
from vkjit.lowering.templates.context import Buffers, Lowered, TemplateContext
from vkjit.lowering.templates.cost import body_costs
from vkjit.lowering.templates.space import compact

_CHAINS = 4
"""Independent accumulators of a fold, to hide the latency of the addition."""


def default_schedule(group: LoopGroup, target: Target) -> LoopSchedule:
    """Vectors of the widest element; tasks by total cost."""
    cost = sum(body_costs(group.body)) + len(group.stores)
    size = math.prod(group.shape)
    tasks = task_count(max(1, size), size * cost, target)
    return LoopSchedule(vector_lanes(group, target), _CHAINS, tasks)


def rows(
    group: LoopGroup, schedule: LoopSchedule | None, context: TemplateContext
) -> list[Lowered]:
    """The kernels of a group with reduced axes: one, or one a pass where rows are few and long.

    A group that writes over what it reads is one kernel: parts of a row read what others write.
    """
    group = compact(group)
    schedule = schedule or default_schedule(group, context.target)
    layout = Layout(group, schedule)
    in_place = Access.READ_WRITE in access_of(group.body, group.stores).values()
    if layout.parts == 1 or in_place:
        return [_whole(layout, schedule.tasks, context)]
    return _Split(layout, context).kernels()


def _whole(layout: Layout, tasks: int, context: TemplateContext) -> Lowered:
    """One kernel that does all phases of its rows."""
    b = Builder("rows", context.target.index_type)
    group = layout.group
    buffers = Buffers(b, context, access_of(group.body, group.stores))
    work = RowWork(b, layout, buffers)
    work.keep_values()
    tasks = min(tasks, layout.items)
    with share(b, layout.items, tasks) as item:
        rows = work.nest.rows(item)
        knowns: list[dict[int, Value]] = [{} for _ in rows]
        for phase in range(1, layout.last):
            knowns = work.prepared(rows, knowns, phase)
            for known, state in zip(knowns, work.folded(rows, knowns, phase, None), strict=True):
                known.update(work.finished(phase, state))
        knowns = work.prepared(rows, knowns, layout.last)
        work.write_rows(rows, knowns)
        work.write_full(rows, knowns, None)
    return Lowered(b.finish((tasks, 1, 1), origin=group.origin), buffers.arrays)


@final
class _Split:
    """The kernels of one group, and the arrays of states between them."""

    def __init__(self, layout: Layout, context: TemplateContext) -> None:
        self.layout = layout
        self.context = context
        self.states: dict[int, list[tuple[int, ...]]] = {}
        """For each pass so far and each of its reductions: the arrays of the state's values."""
        order = [a for a in layout.row_axes if a != layout.axis]
        self.order = [*order, layout.axis] if layout.over_rows else order
        self.sizes = [layout.group.shape[a] for a in self.order]

    def kernels(self) -> list[Lowered]:
        """All of them, in order."""
        partial = [self.partial(phase) for phase in range(1, self.layout.last)]
        return [*partial, self.final()]

    def partial(self, phase: int) -> Lowered:
        """The kernel that folds one pass, part by part."""
        work = self.work(self.new_states(phase))
        made = self.states[phase]
        b = work.b
        with share(b, self.tasks(), self.tasks()) as task:
            part, rows = self.place(work, task)
            states = work.folded(rows, self.known(work, rows, phase), phase, work.nest.span(part))
            for row, state in zip(rows, states, strict=True):
                where = self.slot(b, part, row)
                for arrays, values in zip(made, state, strict=True):
                    for array, value in zip(arrays, values, strict=True):
                        b.store(work.buffers.of(array), where, value, row.mask)
        return self.lowered(work, self.tasks())

    def final(self) -> Lowered:
        """The kernel that stores everything; only full values are stored part by part."""
        work = self.work(())
        if not work.per_element:
            with share(work.b, self.layout.items, 1) as item:
                rows = work.nest.rows(item)
                work.write_rows(rows, self.known(work, rows, self.layout.last))
            return self.lowered(work, 1)
        with share(work.b, self.tasks(), self.tasks()) as task:
            part, rows = self.place(work, task)
            knowns = self.known(work, rows, self.layout.last)
            if work.per_row:
                with work.b.branch(is_equal(work.b, part, 0)).then():
                    work.write_rows(rows, knowns)
            work.write_full(rows, knowns, work.nest.span(part))
        return self.lowered(work, self.tasks())

    def tasks(self) -> int:
        """One for each part of each item."""
        return self.layout.items * self.layout.parts

    def work(self, written: Sequence[int]) -> RowWork:
        """A new kernel that writes the state arrays ``written``."""
        group = self.layout.group
        access = access_of(group.body, group.stores)
        for arrays in self.states.values():
            access.update({a: Access.READ for part in arrays for a in part})
        access.update(dict.fromkeys(written, Access.WRITE))
        b = Builder("part", self.context.target.index_type)
        return RowWork(b, self.layout, Buffers(b, self.context, access))

    def lowered(self, work: RowWork, tasks: int) -> Lowered:
        """The finished kernel."""
        kernel = work.b.finish((tasks, 1, 1), origin=self.layout.group.origin)
        return Lowered(kernel, work.buffers.arrays)

    def place(self, work: RowWork, task: Value) -> tuple[Value, list[Row]]:
        """Part and rows of a task."""
        b, parts = work.b, self.layout.parts
        item = b.binary(BinOp.DIV_U, task, b.index(parts))
        return b.binary(BinOp.REM_U, task, b.index(parts)), work.nest.rows(item)

    def new_states(self, phase: int) -> list[int]:
        """Arrays for the states that one pass leaves; returns all of them."""
        layout = self.layout
        b = Builder("types", self.context.target.index_type)
        length = layout.parts * math.prod(self.sizes)
        made: list[tuple[int, ...]] = []
        for number in layout.folded(phase):
            step = layout.group.body[number]
            assert isinstance(step, ReduceStep)
            types = [scalar_of(v.type) for v in step.rule.initial(b, 1)]
            made.append(tuple([self.context.new_array(t, length) for t in types]))
        self.states[phase] = made
        return [a for arrays in made for a in arrays]

    def slot(self, b: Builder, part: Value, row: Row) -> Value:
        """Where the state of a row's part lies: rows innermost, the lane axis last."""
        strides = [math.prod(self.sizes), *dense_strides(self.sizes)]
        return weighted(b, [part, *[row.at[a] for a in self.order]], strides)

    def known(self, work: RowWork, rows: Sequence[Row], phase: int) -> list[dict[int, Value]]:
        """For each row the values that pass number ``phase`` needs, with reductions merged."""
        knowns: list[dict[int, Value]] = [{} for _ in rows]
        for row, known in zip(rows, knowns, strict=True):
            for earlier in range(1, phase):
                known.update(work.finished(earlier, self.merged(work, row, earlier)))
        return work.prepared(rows, knowns, phase)

    def merged(self, work: RowWork, row: Row, phase: int) -> State:
        """The state of a row after a pass: those of its parts combined."""
        b, layout = work.b, self.layout
        lanes = layout.lanes if layout.over_rows else 1
        out: State = []
        for number, arrays in zip(layout.folded(phase), self.states[phase], strict=True):
            step = layout.group.body[number]
            assert isinstance(step, ReduceStep)
            first = step.rule.initial(b, lanes)
            with b.loop(b.index(0), b.index(layout.parts), carried=first, hint="part") as loop:
                where = self.slot(b, loop.index, row)
                other = tuple(b.load(work.buffers.of(a), where, lanes, row.mask) for a in arrays)
                loop.yields(*step.rule.merge(b, loop.carried, other))
            out.append(loop.results)
        return out
