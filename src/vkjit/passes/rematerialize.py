"""Rematerialization: values computed again right before late uses instead of being kept until then.

Which arrays are *evicted* is chosen elsewhere (``vkjit.passes.evict``); here the program is
rewritten. Each burst of recomputation is a region of its own, so that neither equal equations nor
fusion join it to the original.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import final

from vkjit.ir.primitive import Kind
from vkjit.ir.program import Atom, Eqn, Program, Var
from vkjit.passes.dce import dce
from vkjit.passes.timeline import Timeline

_BURST = 8
"""Steps over which recomputations may share what is computed on the way."""


def rematerialize(program: Program, timeline: Timeline, evicted: Collection[int]) -> Program:
    """``program`` with the evicted arrays computed again after their longest gap.

    Args:
        program: flat, as the timeline was made from.
        timeline: where its variables lie and when they are used.
        evicted: arrays among ``timeline.candidates()``.

    Returns:
        a program with the same results, bit for bit, and as many writes and calls.
    """
    if not evicted:
        return program
    rewriter = _Rewriter(program, timeline, evicted)
    for eqn in program.eqns:
        rewriter.visit(eqn)
    results = rewriter.results()
    return dce(Program(program.params, tuple(rewriter.eqns), results, program.name))


@final
class _Rewriter:
    """The equations so far, and the copies of variables that were computed again."""

    def __init__(self, program: Program, timeline: Timeline, evicted: Collection[int]) -> None:
        self._program = program
        self._timeline = timeline
        self._stored, self._made = timeline.storage.stored, timeline.storage.made
        self._evicted = frozenset(evicted)
        self._makers = timeline.makers
        self._order = {id(e): i for i, e in enumerate(program.eqns)}
        self._regions = max((e.region for e in program.eqns), default=0)
        self._region = 0
        self._since = -math.inf
        self._kept: dict[Var, Var] = {}  # copies in memory
        self._passing: dict[Var, Var] = {}  # copies of this burst alone
        self.eqns: list[Eqn] = []

    def visit(self, eqn: Eqn) -> None:
        """Appends an equation after what it needs again."""
        now = self._time(eqn)
        if now is None:
            self.eqns.append(eqn)
            return
        args = self._arguments(eqn.args, now)
        self.eqns.append(Eqn(eqn.prim, args, eqn.outs, eqn.source, eqn.region))

    def results(self) -> tuple[Atom, ...]:
        """The results of the program, read at its end."""
        return self._arguments(self._program.results, self._timeline.storage.steps)

    def _time(self, eqn: Eqn) -> int | None:
        """The step that computes an equation; None if its readers do, or if it is a view."""
        found = [self._made[v] for v in eqn.outs if v in self._made]
        if found:
            return found[0]
        if eqn.prim.traits.kind is Kind.VIEW:
            return None
        uses = self._timeline.storage.uses
        arrays = [self._stored.get(v, -1) for v in eqn.outs]
        times = [uses[a][0] for a in arrays if a >= 0 and uses[a]]
        return min(times, default=None)

    def _arguments(self, args: Sequence[Atom], now: int) -> tuple[Atom, ...]:
        late = [a for a in args if isinstance(a, Var) and self._is_late(a, now)]
        if not late:
            return tuple(args)
        again = self._again(late, now)
        return tuple([again.get(a, a) if isinstance(a, Var) else a for a in args])

    def _is_late(self, var: Var, now: int) -> bool:
        """Whether a step reads a variable, or what it is made from, after it was evicted."""
        seen: set[Var] = set()
        todo = [var]
        while todo:
            item = todo.pop()
            array = self._stored.get(item)
            if array is not None:
                if array in self._evicted and now >= self._timeline.buffers[array].late:
                    return True
            elif item not in self._made and item in self._makers and item not in seen:
                seen.add(item)
                todo.extend(a for a in self._makers[item].args if isinstance(a, Var))
        return False

    def _is_gone(self, var: Var, now: int) -> bool:
        """Whether what is computed again at step ``now`` cannot read a variable."""
        if var not in self._makers:
            return False
        array = self._stored.get(var)
        if array is None:
            return True
        found = self._timeline.buffers.get(array)
        if found is None or not found.repeatable:
            return False
        return now > (found.end if array in self._evicted else found.last)

    def _again(self, wanted: Sequence[Var], now: int) -> dict[Var, Var]:
        """Copies of variables at this place, made with all that they need."""
        if now - self._since > _BURST or now < self._since:
            self._regions += 1
            self._region, self._since, self._passing = self._regions, now, {}
        needed: dict[int, Eqn] = {}
        todo = list(wanted)
        while todo:
            var = todo.pop()
            eqn = self._makers[var]
            if var in self._kept or var in self._passing or id(eqn) in needed:
                continue
            needed[id(eqn)] = eqn
            todo.extend(a for a in eqn.args if isinstance(a, Var) and self._is_gone(a, now))
        for eqn in sorted(needed.values(), key=lambda e: self._order[id(e)]):
            args = tuple([self._copy(a, now) if isinstance(a, Var) else a for a in eqn.args])
            outs = tuple([Var(v.aval) for v in eqn.outs])
            self.eqns.append(Eqn(eqn.prim, args, outs, eqn.source, self._region))
            for old, new in zip(eqn.outs, outs, strict=True):
                copies = self._kept if old in self._stored else self._passing
                copies[old] = new
        return {v: self._copy(v, now, gone=True) for v in wanted}

    def _copy(self, var: Var, now: int, *, gone: bool | None = None) -> Var:
        """The variable to read at step ``now``: the original as long as it is there."""
        if not (self._is_gone(var, now) if gone is None else gone):
            return var
        return self._kept.get(var) or self._passing[var]
