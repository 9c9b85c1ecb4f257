"""Sorts of long lines on the CPU, digit by digit of their keys, the lowest digit first.

A pass puts the elements into the order of one digit without changing that of equal digits: all
elements with smaller digits go before, so counts of the digits say where each one goes. The counts
of all digits are made in one walk. Lines are shared by tasks.
"""

from __future__ import annotations

from typing import final

from vkjit.lowering.cpu.tasks import share, task_count, within
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.specs import KeyRule
from vkjit.lowering.kernel.types import I32, Access, BinOp, ConvertOp, Space
from vkjit.lowering.kernel.views import dense
from vkjit.lowering.plan.groups import SortGroup, StoreStep
from vkjit.lowering.templates.body import Point, load, store
from vkjit.lowering.templates.context import Buffers, Lowered, TemplateContext
from vkjit.lowering.templates.space import coordinates

_LONG = 1 << 14
"""Elements of a line from which on wide digits, and so fewer passes, pay for their many counts."""
_COST = 8
"""Additions for an element in one pass."""


@final
class Radix:
    """A kernel that writes and counts keys, and one for each digit that moves the elements."""

    def __init__(self, group: SortGroup, key: KeyRule, context: TemplateContext) -> None:
        self.group = group
        self.key = key
        self.context = context
        self.lines = group.outer * group.inner
        self.size = self.lines * group.length
        self.digit = 11 if group.length >= _LONG else 8
        self.passes = -(-key.type.bits // self.digit)
        cost = self.size * (self.passes + 1) * _COST
        self.tasks = task_count(max(1, self.lines), cost, context.target)
        # Passes go from one array to the other and back.
        self.keys = [context.new_array(key.type, self.size) for _ in range(2)]
        self.positions = [context.new_array(I32, self.size) for _ in range(2)]
        self.counts = context.new_array(I32, self.lines * self.passes << self.digit)

    def kernels(self) -> list[Lowered]:
        """All, in order."""
        return [self.counting(), *[self.moving(number) for number in range(self.passes)]]

    def digit_of(self, b: Builder, key: Value, number: int) -> Value:
        """A digit of a key, as an index; keys are written with their sign inverted."""
        shift = b.const(key.type, number * self.digit)
        low = b.binary(BinOp.SHR_L, key, shift) if number else key
        digit = b.binary(BinOp.AND, low, b.const(key.type, (1 << self.digit) - 1))
        index = b.kernel.index_type
        return b.convert(ConvertOp.ZEXT if digit.type is I32 else ConvertOp.TRUNC, digit, index)

    def table(self, b: Builder, line: Value, number: int) -> Value:
        """Where the counts of a digit begin."""
        return b.offset(b.scaled(line, self.passes << self.digit), number << self.digit)

    def counting(self) -> Lowered:
        """Writes the keys, and for each digit how many elements have smaller ones."""
        b, group = Builder("sort_count", self.context.target.index_type), self.group
        access = {group.source.array: Access.READ, self.keys[0]: Access.WRITE}
        buffers = Buffers(b, self.context, access | {self.counts: Access.WRITE})
        keys, counts = buffers.of(self.keys[0]), buffers.of(self.counts)
        entries = self.passes << self.digit
        mine = b.scratch("counts", I32, entries, Space.LOCAL)
        one, zero = b.const(I32, 1), b.const(I32, 0)
        sign = b.const(self.key.type, -1 << (self.key.type.bits - 1))
        with share(b, self.lines, self.tasks) as line:
            outer, inner = coordinates(b, line, (group.outer, group.inner))
            start = b.scaled(line, group.length)
            with b.loop(b.index(0), b.index(entries), hint="digit") as loop:
                b.store(mine, loop.index, zero)
            with b.loop(b.index(0), b.index(group.length), hint="position") as loop:
                element = load(Point(b, [outer, loop.index, inner]), buffers, group.source)
                key = b.binary(BinOp.XOR, self.key(b, element), sign)
                b.store(keys, b.add(start, loop.index), key)
                for number in range(self.passes):
                    where = b.offset(self.digit_of(b, key, number), number << self.digit)
                    b.store(mine, where, b.add(b.load(mine, where), one))
            for number in range(self.passes):
                first = self.table(b, line, number)
                with b.loop(b.index(0), b.index(1 << self.digit), carried=[zero]) as loop:
                    (before,) = loop.carried
                    b.store(counts, b.add(first, loop.index), before)
                    here = b.load(mine, b.offset(loop.index, number << self.digit))
                    loop.yields(b.add(before, here))
        return Lowered(b.finish((self.tasks, 1, 1), origin=group.origin), buffers.arrays)

    def moving(self, number: int) -> Lowered:
        """Moves keys and positions to the places of a digit; the last one writes the target."""
        b, group = Builder("sort_move", self.context.target.index_type), self.group
        here, after = number % 2, (number + 1) % 2
        access = {self.keys[here]: Access.READ, self.counts: Access.READ_WRITE}
        if number:
            access[self.positions[here]] = Access.READ
        if number < self.passes - 1:
            access |= dict.fromkeys((self.keys[after], self.positions[after]), Access.WRITE)
        else:
            access[group.target] = Access.WRITE
        buffers = Buffers(b, self.context, access)
        with (
            share(b, self.lines, self.tasks) as line,
            b.loop(b.index(0), b.index(group.length), hint="position") as loop,
        ):
            self.move(b, buffers, (line, loop.index), number)
        return Lowered(b.finish((self.tasks, 1, 1), origin=group.origin), buffers.arrays)

    def move(self, b: Builder, buffers: Buffers, at: tuple[Value, Value], number: int) -> None:
        """Moves one element to the place of its digit, the next one of equals behind it."""
        (line, index), group = at, self.group
        here, after = number % 2, (number + 1) % 2
        start = b.scaled(line, group.length)
        where = b.add(start, index)
        key = b.load(buffers.of(self.keys[here]), where)
        found = b.convert(ConvertOp.TRUNC, index, I32)
        if number:
            found = b.load(buffers.of(self.positions[here]), where)
        counts = buffers.of(self.counts)
        entry = b.add(self.table(b, line, number), self.digit_of(b, key, number))
        place = b.load(counts, entry)
        b.store(counts, entry, b.add(place, b.const(I32, 1)))
        moved = b.convert(ConvertOp.SEXT, place, b.kernel.index_type)
        if number == self.passes - 1:
            outer, inner = coordinates(b, line, (group.outer, group.inner))
            write = StoreStep(0, group.target, dense((group.outer, group.count, group.inner)))
            with within(b, moved, group.count, group.length):
                store(Point(b, [outer, moved, inner]), buffers, write, found)
            return
        b.store(buffers.of(self.keys[after]), b.add(start, moved), key)
        b.store(buffers.of(self.positions[after]), b.add(start, moved), found)
