"""Few long rows on the GPU: a first kernel folds parts of them, a second one the parts.

One workgroup per row would leave most of the device idle. The parts do not depend on the device's
state, so the order of the additions is the same in every run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import final

from vkjit.lowering.gpu.grid import Grid, invocations, within
from vkjit.lowering.gpu.index import index_type
from vkjit.lowering.gpu.meeting import State, Team
from vkjit.lowering.gpu.rows import Nest
from vkjit.lowering.gpu.teams import default_team
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.specs import ReduceRule
from vkjit.lowering.kernel.types import Access, BinOp, CmpOp, scalar_of
from vkjit.lowering.plan.groups import LoopGroup, ReduceStep
from vkjit.lowering.target import Target
from vkjit.lowering.templates.body import access_of
from vkjit.lowering.templates.context import Buffers, Lowered, TemplateContext
from vkjit.lowering.templates.phases import full_values, phases

_FEW_WORKGROUPS = 64
"""With more, each core of a GPU has about one, and parts gain little."""
_PART = 1 << 13
"""Elements of a row that one workgroup folds, at least."""
_MOST_PARTS = 512
_UNROLL = 4
"""Vectors of one turn."""


@final
@dataclass(frozen=True, slots=True)
class Parts:
    """``who`` folds parts of ``length`` elements of a row."""

    who: Team
    length: int


def part_lengths(group: LoopGroup, target: Target) -> list[Parts]:
    """Ways to cut a compact group's rows into parts, the default first; none where they stay whole.

    Only groups that end with their reductions are split: nothing is written for each element, and
    no reduction waits for another.
    """
    split = len(group.shape) - group.reduced
    count, length = math.prod(group.shape[:split]), math.prod(group.shape[split:])
    who = default_team(group, target)
    full = full_values(group)
    one_pass = max(phases(group).values(), default=0) == 1
    plain = one_pass and all(s.value not in full for s in group.stores)
    workgroups = -(-count // who.rows)
    if who.size == 1 or not plain or workgroups >= _FEW_WORKGROUPS or length < 4 * _PART:
        return []
    parts = min(length // _PART, _MOST_PARTS)
    found: list[Parts] = []
    for size in (who.size, who.size // 2, who.size // 4):
        for number in (parts, 2 * parts):
            team = replace(who, size=max(target.subgroup_sizes[0], size), keep=0, unroll=_UNROLL)
            step = team.size * team.lanes * _UNROLL
            found.append(Parts(team, -(-length // (number * step)) * step))
    return list(dict.fromkeys(found))


def split_rows(group: LoopGroup, parts: Parts, context: TemplateContext) -> list[Lowered]:
    """Two kernels: the states of parts of rows, then the rows' results."""
    work = _Split(group, parts, context)
    return [work.fold(), work.join()]


@final
class _Split:
    """What both kernels share: the parts, and the arrays between the kernels."""

    def __init__(self, group: LoopGroup, parts: Parts, context: TemplateContext) -> None:
        self.group = group
        self.context = context
        self.who = parts.who
        self.length = parts.length
        split = len(group.shape) - group.reduced
        self.count = math.prod(group.shape[:split])
        self.whole = math.prod(group.shape[split:])
        self.parts = -(-self.whole // parts.length)
        # For each reduction, an array for each value of its state.
        self.between: dict[int, tuple[int, ...]] = {}

    def buffers(self, b: Builder, access: Access) -> Buffers:
        """The arrays of the group, and those between the kernels."""
        arrays = dict.fromkeys([a for found in self.between.values() for a in found], access)
        return Buffers(b, self.context, access_of(self.group.body, self.group.stores) | arrays)

    def fold(self) -> Lowered:
        """A workgroup for each part of each row, or of each run of rows side by side."""
        context, target = self.context, self.context.target
        b = Builder("rows_part", index_type(self.context, self.whole))
        for number in phases(self.group):
            initial = self.rule(number).initial(b, 1)
            self.between[number] = tuple(
                context.new_array(scalar_of(v.type), self.count * self.parts) for v in initial
            )
        buffers = self.buffers(b, Access.WRITE)
        who = self.who
        nest = Nest(b, self.group, buffers, who, target)
        grid = Grid(-(-self.count // who.rows) * self.parts, target)
        with grid.each(b) as position:
            block = b.binary(BinOp.DIV_U, position, b.index(self.parts))
            part = b.binary(BinOp.REM_U, position, b.index(self.parts))
            first = b.scaled(part, self.length)
            end = b.binary(BinOp.MIN_U, b.offset(first, self.length), b.index(self.whole))
            nest.part = first, end
            at, number = nest.place(block)
            steps = list(phases(self.group))
            states = nest.states(at, steps, nest.before(at, steps, {}))
            with within(b, number, self.count, nest.reach()):
                self.keep(nest, b.add(b.scaled(number, self.parts), part), states)
        kernel = b.finish(grid.shape, who.workgroup, self.group.origin)
        kernel.subgroup = nest.meeting.subgroup
        return Lowered(kernel, buffers.arrays)

    def rule(self, number: int) -> ReduceRule:
        """How reduction ``number`` folds."""
        step = self.group.body[number]
        assert isinstance(step, ReduceStep)
        return step.rule

    def keep(self, nest: Nest, where: Value, states: dict[int, tuple[ReduceRule, State]]) -> None:
        """Stores the states of one part, from its first invocation."""
        b, buffers = nest.b, nest.buffers
        with b.branch(b.compare(CmpOp.EQ, nest.meeting.member, b.index(0))).then():
            for number, (_, state) in states.items():
                for array, value in zip(self.between[number], state, strict=True):
                    b.store(buffers.of(array), where, value)

    def join(self) -> Lowered:
        """A workgroup for each row folds the states of its parts and writes the results."""
        target = self.context.target
        b = Builder("rows_join", index_type(self.context, self.whole))
        buffers = self.buffers(b, Access.READ)
        size = invocations(target, max(32, min(256, self.parts)))
        who = Team(1, size, 1, 0)
        nest = Nest(b, self.group, buffers, who, target)
        grid = Grid(self.count, target)
        with grid.each(b) as position:
            at, number = nest.place(position)
            first = b.scaled(number, self.parts)
            known = {n: self.rule(n).finish(b, self.joined(nest, first, n)) for n in self.between}
            nest.write(at, known)
        kernel = b.finish(grid.shape, who.workgroup, self.group.origin)
        kernel.subgroup = nest.meeting.subgroup
        return Lowered(kernel, buffers.arrays)

    def joined(self, nest: Nest, first: Value, number: int) -> State:
        """The state of a whole row, whose parts' states start at ``first``."""
        b, buffers, meeting, rule = nest.b, nest.buffers, nest.meeting, self.rule(number)
        end, step = b.index(self.parts), b.index(meeting.size)
        with b.loop(meeting.member, end, step, rule.initial(b, 1), hint="part") as loop:
            where = b.add(first, loop.index)
            other = tuple(b.load(buffers.of(a), where) for a in self.between[number])
            loop.yields(*rule.merge(b, loop.carried, other))
        return meeting.merged(rule, loop.results, 1)
