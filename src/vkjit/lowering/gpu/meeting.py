"""Where the invocations that walk one row put their partial results together."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import final

from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.specs import ReduceRule
from vkjit.lowering.kernel.types import F32, I32, BinOp, CmpOp, Scratch, Type, scalar_of
from vkjit.lowering.target import Target

State = tuple[Value, ...]
_SHUFFLED = (F32, I32)
"""Types that every device with shuffles can pass between invocations."""


class Stand(Enum):
    """How the invocations of a workgroup are given to its rows."""

    ALONE = "alone"
    """One row, its members along x."""
    BESIDE = "beside"
    """Rows along x, the members of a row along y: rows lie side by side in memory."""
    CLUSTER = "cluster"
    """Runs of invocations of a subgroup: rows are contiguous and short."""


@final
@dataclass(frozen=True, slots=True)
class Team:
    """``rows`` rows in a workgroup, ``size`` invocations for each, ``lanes`` elements at a time.

    ``axis`` is the row axis along which neighbouring rows lie. Members keep up to ``keep`` vectors
    each of the row in registers from one pass to the next; 0 walks the row anew in every pass,
    ``unroll`` vectors a turn.
    """

    rows: int
    size: int
    lanes: int
    axis: int
    stand: Stand = Stand.ALONE
    keep: int = 0
    unroll: int = 1

    @property
    def workgroup(self) -> tuple[int, int, int]:
        """Invocations along each axis."""
        if self.stand is Stand.BESIDE:
            return (self.rows, self.size, 1)
        return (self.rows * self.size, 1, 1)


def shuffles(target: Target) -> bool:
    """Whether invocations of a subgroup can read each other's values."""
    has = target.subgroup_ops and "subgroup_shuffle" in target.features
    return has and target.subgroup_sizes[0] > 1


def can_shuffle(types: list[Type]) -> bool:
    """Whether values of these types can be passed between invocations of a subgroup."""
    return all(scalar_of(t) in _SHUFFLED for t in types)


def state_types(rule: ReduceRule) -> list[Type]:
    """Types of the state of a reduction."""
    return [v.type for v in rule.initial(Builder("types"), 1)]


@final
class Meeting:
    """Invocations of a workgroup in a ``Team``.

    A workgroup of one row meets by shuffles inside subgroups and once in shared memory, where the
    device has them; a cluster by shuffles alone; all others by halves in shared memory. Either way
    the order of the additions is the same in every run.
    """

    def __init__(self, b: Builder, who: Team, target: Target) -> None:
        self.b = b
        self.who = who
        self.size = who.size
        self.width = target.subgroup_sizes[0]
        whole = who.size % self.width == 0
        self.shuffles = shuffles(target) and who.stand is Stand.ALONE and whole
        is_cluster = who.stand is Stand.CLUSTER
        self.subgroup: int | None = self.width if is_cluster else None
        self._memories = 0

    @property
    def member(self) -> Value:
        """This invocation's position among those of its row."""
        b = self.b
        if self.size == 1:
            return b.index(0)
        match self.who.stand:
            case Stand.ALONE:
                return b.local_id(0)
            case Stand.BESIDE:
                return b.local_id(1)
            case Stand.CLUSTER:
                if self.size == self.width:
                    return b.lane()
                return b.binary(BinOp.AND, b.lane(), b.index(self.size - 1))

    @property
    def row(self) -> Value:
        """The row of this invocation among those of its workgroup."""
        b = self.b
        match self.who.stand:
            case Stand.ALONE:
                return b.index(0)
            case Stand.BESIDE:
                return b.local_id(0)
            case Stand.CLUSTER:
                each = self.width // self.size
                first = b.scaled(b.subgroup_id(), each)
                if each == 1:
                    return first
                shift = b.index(self.size.bit_length() - 1)
                return b.add(first, b.binary(BinOp.SHR_L, b.lane(), shift))

    def merged(self, rule: ReduceRule, state: State, lanes: int) -> State:
        """The states of all members and lanes as one, the same in every member."""
        state = across_lanes(self.b, rule, state, lanes)
        if self.size == 1:
            return state
        if self.who.stand is Stand.CLUSTER:
            return self._butterfly(rule, state, self.size)
        if self.shuffles and can_shuffle([v.type for v in state]):
            self.subgroup = self.width
            return self._across_subgroups(rule, state)
        return self._by_halves(rule, state)

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
        b, rows = self.b, self.who.rows
        memory = self._memory(state, rows * self.size)
        slot, first = self.member, b.index(0)
        if rows > 1:
            first = b.local_id(0)
            slot = b.add(b.scaled(slot, rows), first)
        for where, value in zip(memory, state, strict=True):
            b.store(where, slot, value)
        half = self.size // 2
        while half:
            b.barrier()
            with b.branch(b.compare(CmpOp.LT_U, self.member, b.index(half))).then():
                other = b.offset(slot, half * rows)
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


def across_lanes(b: Builder, rule: ReduceRule, state: State, lanes: int) -> State:
    """The states of all lanes of a vector as one."""
    if lanes == 1:
        return state
    parts = [tuple(b.extract(v, lane) for v in state) for lane in range(lanes)]
    while len(parts) > 1:
        parts = [rule.merge(b, *parts[i : i + 2]) for i in range(0, len(parts), 2)]
    return parts[0]
