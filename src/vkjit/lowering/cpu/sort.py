"""Sorts on the CPU: a line at a time is merged from the bottom up, lines are shared by tasks."""

from __future__ import annotations

from typing import final

from vkjit.lowering.cpu.sort_radix import Radix
from vkjit.lowering.cpu.tasks import share, task_count
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.specs import KeyRule
from vkjit.lowering.kernel.types import I32, Access, BinOp, CmpOp, ConvertOp
from vkjit.lowering.kernel.views import dense
from vkjit.lowering.plan.groups import SortGroup, StoreStep
from vkjit.lowering.templates.body import Point, load, store
from vkjit.lowering.templates.context import Buffers, Lowered, TemplateContext
from vkjit.lowering.templates.network import sorted_pairs
from vkjit.lowering.templates.space import coordinates

_LONG = 1 << 8
"""Elements of a line from which on counting digits is faster than merging."""
_RUN = 4
"""Neighbours that are sorted in registers."""
_KEY_COST = 8
"""Additions for the key of an element."""
_MERGE_COST = 8
"""Additions for an element in one pass."""


def sort(group: SortGroup, context: TemplateContext) -> list[Lowered]:
    """A kernel that writes keys and positions, and one that sorts both together."""
    if group.length >= _LONG:
        return Radix(group, group.key, context).kernels()
    between = _Between(group, group.key, context)
    keys = _keys(group, group.key, context, between)
    return [keys, _Merging(group, context, between).kernel()]


@final
class _Between:
    """Keys and positions of all lines, twice: passes go from one half to the other and back."""

    def __init__(self, group: SortGroup, key: KeyRule, context: TemplateContext) -> None:
        self.lines = group.outer * group.inner
        self.size = self.lines * group.length
        # A merge may look one element past the end of its runs.
        self.keys = context.new_array(key.type, 2 * self.size + 1)
        self.positions = context.new_array(I32, 2 * self.size + 1)

    def access(self, how: Access) -> dict[int, Access]:
        """Of both arrays."""
        return dict.fromkeys((self.keys, self.positions), how)


def _keys(group: SortGroup, key: KeyRule, context: TemplateContext, between: _Between) -> Lowered:
    """Writes the keys and the positions of all lines, every ``_RUN`` of them sorted."""
    b = Builder("sort_keys", context.target.index_type)
    access = {group.source.array: Access.READ, **between.access(Access.WRITE)}
    buffers = Buffers(b, context, access)
    tasks = task_count(max(1, between.lines), between.size * _KEY_COST, context.target)

    def run(line_at: tuple[Value, Value, Value], first: Value, count: int) -> None:
        start, outer, inner = line_at
        places = [b.offset(first, i) for i in range(count)]
        points = [Point(b, [outer, place, inner]) for place in places]
        keys = [key(b, load(point, buffers, group.source)) for point in points]
        positions = [b.convert(ConvertOp.TRUNC, place, I32) for place in places]
        made = sorted_pairs(b, list(zip(keys, positions, strict=True)))
        for place, (found, position) in zip(places, made, strict=True):
            b.store(buffers.of(between.keys), b.add(start, place), found)
            b.store(buffers.of(between.positions), b.add(start, place), position)

    with share(b, between.lines, tasks) as line:
        outer, inner = coordinates(b, line, (group.outer, group.inner))
        start = b.scaled(line, group.length)
        line_at = (start, outer, inner)
        rest = group.length % _RUN
        with b.loop(b.index(0), b.index(group.length - rest), b.index(_RUN), hint="run") as loop:
            run(line_at, loop.index, _RUN)
        run(line_at, b.index(group.length - rest), rest)
    return Lowered(b.finish((tasks, 1, 1), origin=group.origin), buffers.arrays)


@final
class _Merging:
    """The kernel that merges runs of each line, which double in every pass."""

    def __init__(self, group: SortGroup, context: TemplateContext, between: _Between) -> None:
        self.group = group
        self.passes = max(0, -(-group.length // _RUN) - 1).bit_length()
        self.lines, self.size = between.lines, between.size
        self.b = Builder("sort", context.target.index_type)
        access = {**between.access(Access.READ_WRITE), group.target: Access.WRITE}
        self.buffers = Buffers(self.b, context, access)
        self.keys = self.buffers.of(between.keys)
        self.positions = self.buffers.of(between.positions)
        cost = self.size * (self.passes + 1) * _MERGE_COST
        self.tasks = task_count(max(1, self.lines), cost, context.target)

    def kernel(self) -> Lowered:
        """The passes, and the positions written out."""
        b, group = self.b, self.group
        write = StoreStep(0, group.target, dense((group.outer, group.count, group.inner)))
        with share(b, self.lines, self.tasks) as line:
            outer, inner = coordinates(b, line, (group.outer, group.inner))
            start = b.scaled(line, group.length)
            with b.loop(b.index(0), b.index(self.passes), hint="pass") as loop:
                self.merges(start, loop.index)
            last = self.size if self.passes % 2 else 0
            with b.loop(b.index(0), b.index(group.count), hint="position") as loop:
                found = b.load(self.positions, b.offset(b.add(start, loop.index), last))
                store(Point(b, [outer, loop.index, inner]), self.buffers, write, found)
        return Lowered(b.finish((self.tasks, 1, 1), origin=group.origin), self.buffers.arrays)

    def merges(self, start: Value, number: Value) -> None:
        """Merges neighbouring runs, after ``number`` other passes, from one half to the other."""
        b, size = self.b, self.size
        source = b.add(start, b.scaled(b.binary(BinOp.AND, number, b.index(1)), size))
        target = b.sub(b.offset(b.scaled(start, 2), size), source)
        width = b.binary(BinOp.SHL, b.index(_RUN), number)
        length = b.index(self.group.length)
        with b.loop(b.index(0), length, b.scaled(width, 2), hint="run") as loop:
            middle = b.binary(BinOp.MIN_S, b.add(loop.index, width), length)
            end = b.binary(BinOp.MIN_S, b.add(middle, width), length)
            self.merge(source, target, (loop.index, middle, end))

    def merge(self, source: Value, target: Value, run: tuple[Value, Value, Value]) -> None:
        """Merges two runs; of equal keys that of the left run comes first."""
        b, (low, middle, end) = self.b, run
        keys, positions = self.keys, self.positions
        with b.loop(low, end, carried=(low, middle), hint="out") as loop:
            left, right = loop.carried
            ours = b.load(keys, b.add(source, left))
            theirs = b.load(keys, b.add(source, right))
            smaller = b.compare(CmpOp.LT, theirs, ours)
            none_left = b.compare(CmpOp.GE, left, middle)
            some_right = b.compare(CmpOp.LT, right, end)
            wins = b.binary(BinOp.OR, none_left, smaller)
            taken = b.binary(BinOp.AND, some_right, wins)
            where = b.add(target, loop.index)
            b.store(keys, where, b.select(taken, theirs, ours))
            chosen = b.add(source, b.select(taken, right, left))
            b.store(positions, where, b.load(positions, chosen))
            step = b.convert(ConvertOp.ZEXT, taken, b.kernel.index_type)
            loop.yields(b.sub(b.offset(left, 1), step), b.add(right, step))
