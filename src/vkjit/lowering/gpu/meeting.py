"""Where the invocations that walk one row put their partial results together."""

from __future__ import annotations

from typing import final

from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.specs import ReduceRule
from vkjit.lowering.kernel.types import F32, I32, BinOp, CmpOp, Scratch, scalar_of
from vkjit.lowering.target import Target

State = tuple[Value, ...]
_SHUFFLED = (F32, I32)
"""Types that every device with shuffles can pass between invocations."""


@final
class Meeting:
    """``size`` invocations for each of the ``rows`` rows of a workgroup.

    The members of a row stand along y where there are several rows, else along x. A workgroup of
    one row meets by shuffles inside subgroups and once in shared memory, where the device has them;
    all others by halves in shared memory. Either way the order of the additions is the same in
    every run.
    """

    def __init__(self, b: Builder, rows: int, size: int, target: Target) -> None:
        self.b = b
        self.rows = rows
        self.size = size
        self.width = target.subgroup_sizes[0]
        shuffles = target.subgroup_ops and "subgroup_shuffle" in target.features
        whole = size % self.width == 0
        self.shuffles = shuffles and rows == 1 and self.width > 1 and whole
        self.subgroup: int | None = None
        self._memories = 0

    @property
    def member(self) -> Value:
        """This invocation's position among those of its row."""
        if self.size == 1:
            return self.b.index(0)
        return self.b.local_id(0 if self.rows == 1 else 1)

    def merged(self, rule: ReduceRule, state: State, lanes: int) -> State:
        """The states of all members and lanes as one, the same in every member."""
        state = self._across_lanes(rule, state, lanes)
        if self.size == 1:
            return state
        if self.shuffles and all(v.type in _SHUFFLED for v in state):
            self.subgroup = self.width
            return self._across_subgroups(rule, state)
        return self._by_halves(rule, state)

    def _across_lanes(self, rule: ReduceRule, state: State, lanes: int) -> State:
        if lanes == 1:
            return state
        b = self.b
        parts = [tuple(b.extract(v, lane) for v in state) for lane in range(lanes)]
        while len(parts) > 1:
            parts = [rule.merge(b, *parts[i : i + 2]) for i in range(0, len(parts), 2)]
        return parts[0]

    def _butterfly(self, rule: ReduceRule, state: State, width: int) -> State:
        """Merged over aligned runs of ``width`` invocations of a subgroup."""
        b, distance = self.b, 1
        while distance < width:
            other = tuple(b.subgroup_shuffle(v, distance) for v in state)
            state = rule.merge(b, state, other)
            distance *= 2
        return state

    def _across_subgroups(self, rule: ReduceRule, state: State) -> State:
        b, count = self.b, self.size // self.width
        state = self._butterfly(rule, state, self.width)
        if count == 1:
            return state
        memory = self._memory(state, count)
        with b.branch(b.compare(CmpOp.EQ, b.lane(), b.index(0))).then():
            for where, value in zip(memory, state, strict=True):
                b.store(where, b.subgroup_id(), value)
        b.barrier()
        # Every subgroup reads the results of all.
        mine = b.binary(BinOp.AND, b.lane(), b.index(count - 1))
        state = tuple(b.load(m, mine) for m in memory)
        for more in range(self.width, count, self.width):
            others = tuple(b.load(m, b.offset(mine, more)) for m in memory)
            state = rule.merge(b, state, others)
        return self._butterfly(rule, state, min(count, self.width))

    def _by_halves(self, rule: ReduceRule, state: State) -> State:
        b = self.b
        memory = self._memory(state, self.rows * self.size)
        slot, first = self.member, b.index(0)
        if self.rows > 1:
            first = b.local_id(0)
            slot = b.add(b.scaled(slot, self.rows), first)
        for where, value in zip(memory, state, strict=True):
            b.store(where, slot, value)
        half = self.size // 2
        while half:
            b.barrier()
            with b.branch(b.compare(CmpOp.LT_U, self.member, b.index(half))).then():
                other = b.offset(slot, half * self.rows)
                left = tuple(b.load(m, slot) for m in memory)
                right = tuple(b.load(m, other) for m in memory)
                for where, value in zip(memory, rule.merge(b, left, right), strict=True):
                    b.store(where, slot, value)
            half //= 2
        b.barrier()
        return tuple(b.load(m, first) for m in memory)

    def _memory(self, state: State, length: int) -> list[Scratch]:
        """Shared memory of its own for each meeting: no barrier is needed between two."""
        self._memories += 1
        return [
            self.b.scratch(f"s{self._memories}_{part}", scalar_of(value.type), length)
            for part, value in enumerate(state)
        ]
