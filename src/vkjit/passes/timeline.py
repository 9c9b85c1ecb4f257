"""A model of when arrays are alive and what it costs to compute one of them again.

Time is the number of a step; where arrays lie and which step uses them is told by ``Storage``,
which comes from the planner. An array that is *evicted* is not kept over the longest time in which
nobody uses it: it is computed again before the first use after that gap, from what is alive then,
and from what has to be computed again with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import final

import numpy as np
from numpy.typing import NDArray

from vkjit.ir.primitive import Kind, Op, Primitive, Remat
from vkjit.ir.program import Eqn, Program, Source, Var
from vkjit.lowering.kernel.specs import ContractSpec

Profile = NDArray[np.int64]


@final
@dataclass(frozen=True, slots=True)
class Storage:
    """Where the variables of a program lie.

    Attributes:
        stored: the array of each variable in memory; negative numbers take no memory.
        made: the step that computes a variable; what is in neither is computed by its readers.
        sizes: bytes of each array.
        uses: for each array the steps that use it, in order.
        fixed: arrays that take memory all the time: parameters and results.
        steps: how many there are.
    """

    stored: Mapping[Var, int]
    made: Mapping[Var, int]
    sizes: Sequence[int]
    uses: Sequence[Sequence[int]]
    fixed: Collection[int]
    steps: int


@final
@dataclass(frozen=True, slots=True)
class Rates:
    """What a device does in a second: operations of products, bytes moved; seconds to start."""

    flops: float
    bytes: float
    start: float


@final
@dataclass(frozen=True, slots=True)
class Buffer:
    """An array of temporaries and how to compute it again.

    ``end`` and ``late`` are the uses before and after the longest gap; ``operands`` are the arrays
    that it is computed from in ``seconds``, negative where it cannot be repeated. ``kind`` is equal
    for arrays that are alike, such as those of the layers of a model.
    """

    array: int
    size: int
    start: int
    end: int
    late: int
    last: int
    seconds: float
    operands: tuple[int, ...]
    kind: object

    @property
    def repeatable(self) -> bool:
        """Whether it can be computed again."""
        return self.seconds >= 0

    @property
    def gap(self) -> int:
        """Steps for which it need not be alive."""
        return self.late - self.end - 1


@final
@dataclass(frozen=True, slots=True)
class Outcome:
    """What evicting some arrays comes to.

    ``profile`` has the bytes alive at each step, ``again`` the steps between which the second
    computation of an array is alive, ``longer`` how long arrays that are not evicted live.
    """

    profile: Profile
    seconds: float
    again: Mapping[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    longer: Mapping[int, int] = field(default_factory=dict[int, int])

    @property
    def peak(self) -> int:
        """Most bytes alive at once."""
        return int(self.profile.max(initial=0))

    def excess(self, bound: int) -> int:
        """Bytes above ``bound``, summed over the steps."""
        return int(np.maximum(self.profile - bound, 0).sum())


Allowed = Callable[[Eqn], bool]
"""Whether the result of an equation may be computed again."""


def _any(_eqn: Eqn) -> bool:
    return True


@final
class Timeline:
    """The arrays of a program over time; those that ``allowed`` equations make may be evicted."""

    def __init__(
        self, program: Program, storage: Storage, rates: Rates, allowed: Allowed = _any
    ) -> None:
        self.storage = storage
        self.makers: dict[Var, Eqn] = {v: eqn for eqn in program.eqns for v in eqn.outs}
        recipes = _Recipes(program, storage, (rates, allowed))
        self.buffers: dict[int, Buffer] = {}
        for array, uses in enumerate(storage.uses):
            if uses and array not in storage.fixed:
                self.buffers[array] = recipes.buffer(array, uses)
        self.base = self._profile([(b.start, b.last, b.size) for b in self.buffers.values()])

    def candidates(self) -> list[Buffer]:
        """Arrays that can be evicted."""
        return [b for b in self.buffers.values() if b.repeatable and b.gap > 0 and b.size > 0]

    def outcome(self, evicted: Collection[int]) -> Outcome:
        """What evicting these arrays comes to."""
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        longer: dict[int, int] = {}
        for array in evicted:
            first[array], last[array] = self.buffers[array].late, self.buffers[array].last
        # Consumers before what they are made from, so that all needs of an array are known.
        todo = sorted(first, key=lambda a: self.buffers[a].start)
        changes: list[tuple[int, int, int]] = []
        seconds = 0.0
        while todo:
            item = self.buffers[todo.pop()]
            seconds += item.seconds
            now = first[item.array]
            changes.append((now, last[item.array], item.size))
            if item.array in evicted:
                changes.append((item.end + 1, item.last, -item.size))
            for array in item.operands:
                known = array in first
                if self._need(array, now, evicted, (first, last, longer)) and not known:
                    _insert(todo, array, self.buffers)
        for array, until in longer.items():
            changes.append((self.buffers[array].last + 1, until, self.buffers[array].size))
        profile = self.base + self._profile(changes)
        again = {a: (first[a], last[a]) for a in first}
        return Outcome(profile, seconds, again, longer)

    def _need(
        self,
        array: int,
        now: int,
        evicted: Collection[int],
        state: tuple[dict[int, int], dict[int, int], dict[int, int]],
    ) -> bool:
        """Whether an operand has to be computed again for use at step ``now``; notes that."""
        first, last, longer = state
        found = self.buffers.get(array)
        if found is None or now <= (found.end if array in evicted else found.last):
            return False
        if not found.repeatable:
            longer[array] = max(longer.get(array, 0), now)
            return False
        first[array] = min(first.get(array, now), now)
        last[array] = max(last.get(array, now), now)
        return True

    def _profile(self, spans: Sequence[tuple[int, int, int]]) -> Profile:
        change = np.zeros(self.storage.steps + 1, np.int64)
        if spans:
            begins, ends, sizes = np.array(spans, np.int64).T
            np.add.at(change, begins, sizes)
            np.add.at(change, ends + 1, -sizes)
        return np.cumsum(change)[:-1]


def _insert(todo: list[int], array: int, buffers: Mapping[int, Buffer]) -> None:
    """Puts an array among others, ordered by when they are first made."""
    at, start = len(todo), buffers[array].start
    while at and buffers[todo[at - 1]].start > start:
        at -= 1
    todo.insert(at, array)


@final
class _Recipes:
    """How arrays are computed again."""

    def __init__(self, program: Program, storage: Storage, terms: tuple[Rates, Allowed]) -> None:
        self._storage = storage
        self._makers = {v: eqn for eqn in program.eqns for v in eqn.outs}
        self._rates, self._allowed = terms
        self._inputs = {storage.stored[v] for v in program.params if v in storage.stored}
        self._roots: dict[int, list[Var]] = {}
        for eqn in program.eqns:
            for out in eqn.outs:
                array = storage.stored.get(out, -1)
                if array >= 0 and not self._is_view_of(eqn, array):
                    self._roots.setdefault(array, []).append(out)

    def buffer(self, array: int, uses: Sequence[int]) -> Buffer:
        """The array with its recipe; ``uses`` are all steps that use it."""
        size, roots = self._storage.sizes[array], self._roots.get(array, [])
        end, late = max(pairwise(uses), key=lambda p: p[1] - p[0], default=(uses[-1], uses[-1]))
        span = uses[0], end, late, uses[-1]
        if len(roots) != 1:
            return Buffer(array, size, *span, -1.0, (), None)
        eqns, operands = self._recipe(roots[0])
        root = self._makers[roots[0]]
        if not self._allowed(root) or not all(can_repeat(e.prim) for e in eqns):
            return Buffer(array, size, *span, -1.0, (), None)
        moved = size + sum(self._storage.sizes[a] for a in operands)
        flops = sum(_flops(e) for e in eqns)
        seconds = self._rates.start + moved / self._rates.bytes + flops / self._rates.flops
        kind = (size, root.prim, _place(root.source), len(eqns))
        made = tuple(sorted(operands - self._inputs))
        return Buffer(array, size, *span, seconds, made, kind)

    def _is_view_of(self, eqn: Eqn, array: int) -> bool:
        sources = [self._storage.stored.get(a) for a in eqn.args if isinstance(a, Var)]
        return eqn.prim.traits.kind is Kind.VIEW and array in sources

    def _recipe(self, root: Var) -> tuple[list[Eqn], set[int]]:
        """The equations behind a variable back to what is in memory, and the arrays there."""
        eqns: dict[int, Eqn] = {}
        operands: set[int] = set()
        todo = [root]
        while todo:
            eqn = self._makers[todo.pop()]
            if id(eqn) in eqns:
                continue
            eqns[id(eqn)] = eqn
            for arg in eqn.args:
                if not isinstance(arg, Var):
                    continue
                array = self._storage.stored.get(arg)
                if array is None:
                    todo.append(arg)
                elif array >= 0:
                    operands.add(array)
        return list(eqns.values()), operands


def can_repeat(prim: Primitive) -> bool:
    """Whether computing it again gives the same bits and changes nothing else."""
    traits = prim.traits
    kinds = (Kind.WRITE, Kind.CONTROL)
    once = traits.effect or traits.remat is Remat.ONCE or traits.kind in kinds
    return isinstance(prim, Op) and not once and not prim.acts()


def _flops(eqn: Eqn) -> float:
    """Operations of a product; of other equations those that take long beside their traffic."""
    out = eqn.outs[0].aval
    prim = eqn.prim
    if prim.traits.kind is Kind.CONTRACT and isinstance(prim, Op):
        spec = prim.kernel_spec([a.aval for a in eqn.args], out)
        if isinstance(spec, ContractSpec):
            summed = math.prod(eqn.args[0].aval.shape[a] for a in spec.lhs_contract)
            return 2.0 * out.size * summed
    return 8.0 * out.size if prim.traits.remat is Remat.COSTLY else 0.0


def _place(source: Source | None) -> object:
    return (source.code, source.last) if source is not None else None
