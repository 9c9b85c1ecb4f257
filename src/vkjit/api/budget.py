"""Budgets of memory: what is computed again so that the planned peak of a program fits.

A model of the program's arrays over time (``vkjit.passes.timeline``) chooses what to compute again
for a bound; plans tell what that comes to, exactly. The search moves the bound until the planned
peak is within the budget and little below it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from operator import index
from typing import SupportsIndex, final

from vkjit.api.memory import HeldAs, memory_timeline, storage
from vkjit.errors import ArgumentError, MemoryBudgetError
from vkjit.ir.program import Eqn, Program
from vkjit.lowering.compile import Compiled
from vkjit.lowering.plan.partition import partition
from vkjit.lowering.target import Target, TargetKind
from vkjit.passes.evict import Eviction, evict
from vkjit.passes.rematerialize import rematerialize
from vkjit.passes.timeline import Allowed, Rates, Timeline

Planner = Callable[[Program], Compiled]

_RATES = {
    TargetKind.CPU: Rates(flops=1e11, bytes=1e10, start=3e-6),
    TargetKind.GPU: Rates(flops=4e13, bytes=2e12, start=4e-6),
}
"""Only their proportions matter: they say whether a product or a pass over memory is dearer."""
_PLANS = 5
"""Plans that are made for one timeline."""
_ROUNDS = 3
"""How often what was computed again may be evicted again."""
_CLOSE = 0.02
"""Part of the temporaries that may stay unused below the budget."""
_LOWER = (0.5, 0.35, 0.25, 0.18, 0.12, 0.09)
"""Bounds, as parts of the peak without recomputation, on the way to the smallest one."""
_SHOWN = 12
"""Source lines in the message of an error."""
_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_BINARY = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_BUDGET = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:(%)|([kmgt]?)(i?)b?)\s*", re.IGNORECASE)


@final
@dataclass(frozen=True, slots=True)
class Candidate:
    """A program, its plan, and the modelled seconds that it computes again."""

    program: Program
    compiled: Compiled
    seconds: float = 0.0

    @property
    def peak(self) -> int:
        """Bytes of one call."""
        return self.compiled.plan.peak_bytes


@final
@dataclass(frozen=True, slots=True)
class Fit:
    """The cheapest program found within a budget, or None, and the smallest feasible budget.

    ``smallest`` is the one that was made whatever the budget, unless a budget was met before.
    """

    found: Candidate | None
    smallest: Candidate


def parse_budget(budget: int | str, limit: int = 0) -> int:
    """Bytes of a budget such as ``4 << 30``, ``"4GiB"``, ``"512MB"`` or ``"80%"``.

    Args:
        budget: what was asked for.
        limit: bytes of the device, of which percentages are taken; 0 if unknown.

    Raises:
        ArgumentError: it is no positive number of bytes.
    """
    found = _bytes_of(budget, limit)
    if found > 0:
        return found
    raise ArgumentError(
        f"memory_budget: given {budget!r}, expected bytes as a positive int or a string such as "
        "'512MiB', '4GB' or, on a device whose memory is known, '80%'"
    )


def _bytes_of(budget: object, limit: int) -> int:
    """The bytes of a budget; 0 where it says none."""
    if isinstance(budget, SupportsIndex) and not isinstance(budget, bool):
        return index(budget)
    match = _BUDGET.fullmatch(budget) if isinstance(budget, str) else None
    if match is None:
        return 0
    number, percent, prefix, binary = match.groups()
    if percent:
        return int(float(number) / 100 * limit)
    if binary and not prefix:
        return 0
    return int(float(number) * (_BINARY if binary else _UNITS)[prefix.lower()])


def fit(
    program: Program, budget: int, target: Target, plan: Planner, allowed: Allowed | None = None
) -> Fit:
    """The program that computes least again among those found whose planned peak fits.

    Args:
        program: simplified.
        budget: bytes of one call: arguments, results, constants and temporaries.
        target: what is planned for.
        plan: lowers a program.
        allowed: whether the result of an equation may be computed again; all may by default.
    """
    first = Candidate(program, plan(program))
    if first.peak <= budget:
        return Fit(first, first)
    search = _Search(_RATES[target.kind], plan, allowed or _any)
    found = search.within(first, budget)
    if found is not None:
        return Fit(found, found)
    tried = search.smallest(first)
    fitting = [c for c in tried if c.peak <= budget]
    least = min(tried, key=lambda c: (c.peak, c.seconds))
    return Fit(min(fitting, key=lambda c: c.seconds, default=None), least)


def within_budget(program: Program, budget: int, target: Target, plan: Planner) -> Candidate:
    """The candidate that ``fit`` finds.

    Args:
        program: simplified.
        budget: bytes of one call, for which everything may be computed again. With 0 the budgets of
            functions inside count, and only they are computed again; without any the program stays
            as it is.
        target: what is planned for.
        plan: lowers a program.

    Raises:
        MemoryBudgetError: none fits.
    """
    asked = min([b for b in (budget, *map(_budget_of, program.eqns)) if b], default=0)
    if not asked:
        return Candidate(program, plan(program))
    result = fit(program, asked, target, plan, _any if budget else _has_budget)
    if result.found is None:
        raise budget_error(asked, result.smallest)
    return result.found


def _budget_of(eqn: Eqn) -> int:
    return eqn.source.budget if eqn.source is not None else 0


def _has_budget(eqn: Eqn) -> bool:
    return _budget_of(eqn) > 0


def _any(_eqn: Eqn) -> bool:
    return True


def budget_error(budget: int, smallest: Candidate) -> MemoryBudgetError:
    """What the smallest plan takes at its peak: what stays there whatever is computed again."""
    report = memory_timeline(smallest.program, smallest.compiled)
    lines = report.by_line()
    whole = (HeldAs.ARGUMENT, HeldAs.CONSTANT, HeldAs.OUTPUT)
    rows = [
        f"  {sum(line.nbytes for line in lines if line.kind is kind):>15,}  {kind.value}s"
        for kind in whole
        if any(line.kind is kind for line in lines)
    ]
    inside = [line for line in lines if line.kind not in whole]
    rows += [
        f"  {line.nbytes:>15,}  {line.kind.value}: {line.count} of {line.made}"
        f"{' at ' if line.source else ''}{line.source}"
        for line in inside[:_SHOWN]
    ]
    if len(inside) > _SHOWN:
        rest = sum(line.nbytes for line in inside[_SHOWN:])
        rows.append(f"  {rest:>15,}  on {len(inside) - _SHOWN} more lines")
    live = sum(line.nbytes for line in inside)
    between = smallest.compiled.plan.arena_bytes - live
    if between:
        rows.append(f"  {between:>15,}  between temporaries")
    peak = smallest.peak
    return MemoryBudgetError(
        f"memory_budget: given {budget:,} bytes, expected at least {peak:,}; the smallest plan "
        "that was found, with values computed again wherever that helps, takes at its peak\n"
        + "\n".join(rows)
        + "\nuse that budget, donate arguments (donate_argnums), or make a batch smaller",
        peak,
    )


@final
class _Search:
    """Candidates for one program on one target."""

    def __init__(self, rates: Rates, plan: Planner, allowed: Allowed) -> None:
        self._rates = rates
        self._allowed = allowed
        self._plan = plan

    def within(self, first: Candidate, budget: int) -> Candidate | None:
        """The cheapest candidate within a budget, of the first round that has one."""
        current = first
        for _ in range(_ROUNDS):
            timeline = self._timeline(current.program)
            tried = self._round(current, timeline, budget)
            fitting = [c for c in tried if c.peak <= budget]
            if fitting:
                return min(fitting, key=lambda c: c.seconds)
            better = min(tried, key=lambda c: c.peak, default=current)
            if better.peak >= current.peak:
                return None
            current = better
        return None

    def _round(self, start: Candidate, timeline: Timeline, budget: int) -> list[Candidate]:
        """Candidates whose peaks close in on the budget."""
        tried: list[Candidate] = []
        seen: set[frozenset[int]] = set()
        slack = max(int(start.compiled.plan.arena_bytes * _CLOSE), 1)
        peak = int(timeline.base.max(initial=0))
        bound, too_high = peak - (start.peak - budget) - slack // 2, peak
        for _ in range(_PLANS):
            chosen = evict(timeline, max(bound, 0))
            if chosen.arrays in seen:
                break
            seen.add(chosen.arrays)
            made = self._candidate(start, timeline, chosen)
            tried.append(made)
            miss = made.peak - budget
            if miss > 0:
                too_high = min(too_high, bound)
                if chosen.outcome.peak > bound:
                    break
            elif -miss <= slack:
                break
            bound = bound - miss - slack // 2 if miss > 0 else bound + (-miss - slack // 2)
            if bound >= too_high:
                break
        return tried

    def smallest(self, first: Candidate) -> list[Candidate]:
        """Candidates on the way to the smallest peak that is found; no budget has a say in it."""
        tried = [first]
        current = first
        for _ in range(_ROUNDS):
            timeline = self._timeline(current.program)
            peak = int(timeline.base.max(initial=0))
            chosen = [evict(timeline, int(peak * part)) for part in _LOWER]
            least = min(chosen, key=lambda e: (e.outcome.peak, e.outcome.seconds))
            made = self._candidate(current, timeline, least)
            if made.peak >= current.peak:
                break
            tried.append(made)
            current = made
        for _ in range(_ROUNDS):
            below = self.within(first, current.peak - 1)
            if below is None:
                break
            tried.append(below)
            current = below
        return tried

    def _timeline(self, program: Program) -> Timeline:
        return Timeline(program, storage(partition(program)), self._rates, self._allowed)

    def _candidate(self, start: Candidate, timeline: Timeline, chosen: Eviction) -> Candidate:
        program = rematerialize(start.program, timeline, chosen.arrays)
        seconds = start.seconds + chosen.outcome.seconds
        return Candidate(program, self._plan(program), seconds)
