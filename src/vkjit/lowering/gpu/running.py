"""A scan over the invocations of a workgroup, or of each of its rows."""

from __future__ import annotations

from typing import final

from vkjit.lowering.gpu.meeting import State, can_shuffle, shuffles, state_types
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.specs import ReduceRule
from vkjit.lowering.kernel.types import BinOp, CmpOp, Scratch, scalar_of
from vkjit.lowering.target import Target


@final
class Running:
    """``rows`` rows of ``size`` members, both powers of two, in a workgroup along x.

    With shuffles members scan inside their subgroup by exchanging with partners at growing
    distances, and rows of several subgroups add those of the subgroups before theirs from shared
    memory. Without, rows double the distance in shared memory.
    """

    def __init__(
        self, b: Builder, rule: ReduceRule, shape: tuple[int, int], target: Target
    ) -> None:
        self.b = b
        self.rule = rule
        self.rows, self.size = shape
        self.width = target.subgroup_sizes[0]
        whole = (self.rows * self.size) % self.width == 0
        self.shuffles = whole and shuffles(target) and can_shuffle(state_types(rule))
        self.subgroup: int | None = self.width if self.shuffles else None
        self._memories = 0

    @property
    def number(self) -> Value:
        """This invocation's position in the workgroup."""
        b = self.b
        if not self.shuffles:
            return b.local_id(0)
        if self.rows * self.size == self.width:
            return b.lane()
        return b.add(b.scaled(b.subgroup_id(), self.width), b.lane())

    @property
    def member(self) -> Value:
        """This invocation's position in its row."""
        if self.rows == 1:
            return self.number
        return self.b.binary(BinOp.AND, self.number, self.b.index(self.size - 1))

    @property
    def row(self) -> Value:
        """The row of this invocation."""
        b = self.b
        if self.rows == 1:
            return b.index(0)
        return b.binary(BinOp.SHR_L, self.number, b.index(self.size.bit_length() - 1))

    def scanned(self, state: State) -> tuple[State, State]:
        """The states of all members before this one, and those of all members, as one each."""
        if self.size == 1:
            return self.rule.initial(self.b, 1), state
        if not self.shuffles:
            return self._by_doubling(state)
        prefix, total = self._in_subgroup(state, min(self.width, self.size))
        if self.size <= self.width:
            return prefix, total
        return self._across_subgroups(prefix, total)

    def _in_subgroup(self, state: State, width: int) -> tuple[State, State]:
        b, rule = self.b, self.rule
        prefix, total, distance = rule.initial(b, 1), state, 1
        while distance < width:
            other = tuple(b.subgroup_shuffle(v, distance) for v in total)
            bit = b.binary(BinOp.AND, b.lane(), b.index(distance))
            upper = b.compare(CmpOp.NE, bit, b.index(0))
            longer = rule.merge(b, other, prefix)
            prefix = tuple(b.select(upper, x, y) for x, y in zip(longer, prefix, strict=True))
            total = rule.merge(b, total, other)
            distance *= 2
        return prefix, total

    def _across_subgroups(self, prefix: State, total: State) -> tuple[State, State]:
        b, rule, count = self.b, self.rule, self.size // self.width
        memory = self._memory(total, self.rows * count)
        with b.branch(b.compare(CmpOp.EQ, b.lane(), b.index(0))).then():
            for where, value in zip(memory, total, strict=True):
                b.store(where, b.subgroup_id(), value)
        b.barrier()
        mine = b.binary(BinOp.AND, b.subgroup_id(), b.index(count - 1))
        first = b.sub(b.subgroup_id(), mine)
        before, whole = rule.initial(b, 1), rule.initial(b, 1)
        for number in range(count):
            other = tuple(b.load(m, b.offset(first, number)) for m in memory)
            longer = rule.merge(b, before, other)
            is_before = b.compare(CmpOp.LT_U, b.index(number), mine)
            before = tuple(b.select(is_before, x, y) for x, y in zip(longer, before, strict=True))
            whole = rule.merge(b, whole, other)
        return rule.merge(b, before, prefix), whole

    def _by_doubling(self, state: State) -> tuple[State, State]:
        b, rule, distance = self.b, self.rule, 1
        slot, member = self.number, self.member
        banks = [self._memory(state, self.rows * self.size) for _ in range(2)]
        turn = 0
        for where, value in zip(banks[0], state, strict=True):
            b.store(where, slot, value)
        while distance < self.size:
            b.barrier()
            reach = b.compare(CmpOp.GE_U, member, b.index(distance))
            back = b.select(reach, b.sub(slot, b.index(distance)), slot)
            other = tuple(b.load(m, back) for m in banks[turn])
            longer = rule.merge(b, other, state)
            state = tuple(b.select(reach, x, y) for x, y in zip(longer, state, strict=True))
            turn, distance = 1 - turn, distance * 2
            for where, value in zip(banks[turn], state, strict=True):
                b.store(where, slot, value)
        b.barrier()
        is_first = b.compare(CmpOp.EQ, member, b.index(0))
        back = b.select(is_first, slot, b.sub(slot, b.index(1)))
        previous = tuple(b.load(m, back) for m in banks[turn])
        nothing = rule.initial(b, 1)
        prefix = tuple(b.select(is_first, x, y) for x, y in zip(nothing, previous, strict=True))
        last = b.offset(b.sub(slot, member), self.size - 1)
        return prefix, tuple(b.load(m, last) for m in banks[turn])

    def _memory(self, state: State, length: int) -> list[Scratch]:
        self._memories += 1
        return [
            self.b.scratch(f"s{self._memories}_{part}", scalar_of(value.type), length)
            for part, value in enumerate(state)
        ]
