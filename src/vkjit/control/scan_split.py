"""Partial evaluation of scan: the loop that is known, and the loop that is linear in what moves.

The linear loop reads residuals. Constants and stacked operands are residuals as they are; what the
body computes from constants alone is computed once, before the loop; only the rest, such as a carry
as it was in each turn, is stacked by the known loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import assert_never, final

from vkjit.control.remembered import remembered
from vkjit.control.scan_form import outside, reordered, sections, stacked
from vkjit.ir.control import Scan as Form
from vkjit.ir.primitive import Parts, Primitive
from vkjit.ir.program import Atom, Eqn, Program, Var
from vkjit.passes.dce import dce
from vkjit.passes.linearize import linearize, separate
from vkjit.passes.residuals import once


class Where(Enum):
    """Where the linear loop finds a value of the known body."""

    OPERAND = "operand"  # of the equation: a constant, or slices of a stacked array
    BEFORE = "before"  # computed from constants before the loop
    STACKED = "stacked"  # a stacked result of the known loop


@final
@dataclass(frozen=True)
class Residual:
    """A value that the linear body reads, ``sliced`` where it differs from turn to turn."""

    where: Where
    position: int
    sliced: bool


@final
@dataclass(frozen=True)
class Split:
    """Two loops in place of one.

    ``before`` computes what depends on constants alone from the operands at ``before_args``. The
    known loop takes the operands at ``known_args``, with the results of ``before`` as its last
    constants, and gives the results at ``known_outs``, then stacked residuals. The linear loop
    takes residuals and moving operands, ``linear_args``, and gives the results at ``linear_outs``.
    """

    before: Program
    before_args: tuple[int, ...]
    known: Form
    known_args: tuple[int, ...]
    known_outs: tuple[int, ...]
    linear: Form
    linear_args: tuple[Residual | int, ...]
    linear_outs: tuple[int, ...]

    def parts(self, eqn: Eqn, of: Callable[[Form], Primitive]) -> Parts:
        """The equations in place of ``eqn``."""
        first, made = outside(self.before, [eqn.args[i] for i in self.before_args], eqn)
        known: list[Eqn] = [*first]
        body, length = self.known.body, self.known.length
        extra = body.out_avals[len(self.known_outs) :]
        stacks = [Var(stacked(a, length)) for a in extra]
        given = [eqn.args[i] for i in self.known_args]
        split = self.known.constants - len(made)
        args = (*given[:split], *made, *given[split:])
        outs = (*[eqn.outs[i] for i in self.known_outs], *stacks)
        if outs or any(e.prim.acts() for e in body.eqns):
            known.append(Eqn(of(self.known), args, outs, eqn.source, eqn.region))
        ys = outs[self.known.carries :]

        def value(found: Residual | int) -> Atom:
            if isinstance(found, int):
                return eqn.args[found]
            match found.where:
                case Where.OPERAND:
                    return eqn.args[found.position]
                case Where.BEFORE:
                    return made[found.position]
                case Where.STACKED:
                    return ys[found.position]
                case _:
                    assert_never(found.where)

        args = tuple(value(a) for a in self.linear_args)
        outs = tuple(eqn.outs[i] for i in self.linear_outs)
        return Parts(tuple(known), (Eqn(of(self.linear), args, outs, eqn.source, eqn.region),))


@remembered()
def moving_carries(form: Form, moving: tuple[bool, ...]) -> tuple[list[bool], list[bool]]:
    """Which arguments move, carries that do so in a later turn included; and which results."""
    flags = list(moving)
    params, results = form.body.params, form.body.results
    start, stop = form.constants, form.constants + form.carries
    while True:
        found = {v for v, flag in zip(params, flags, strict=True) if flag}
        separate(form.body.eqns, found)
        after = [isinstance(r, Var) and r in found for r in results]
        grown = [a or b for a, b in zip(flags[start:stop], after, strict=False)]
        after[: form.carries] = grown
        if grown == flags[start:stop]:
            return flags, after
        flags[start:stop] = grown


@remembered()
def split(form: Form, moving: tuple[bool, ...]) -> Split:
    """The two loops for operands of which some move."""
    flags, results = moving_carries(form, moving)
    known_outs = tuple(i for i, flag in enumerate(results) if not flag)
    linear_outs = tuple(i for i, flag in enumerate(results) if flag)
    body = form.body
    ordered = tuple(body.results[i] for i in (*known_outs, *linear_outs))
    program = Program(body.params, body.eqns, ordered, body.name)
    movers = [i for i, flag in enumerate(flags) if flag]
    made = linearize(program, movers, len(known_outs))
    return _Splitter(form, flags, made.known, len(known_outs)).split(
        made.linear, known_outs, linear_outs
    )


@final
class _Splitter:
    """The known body of a loop, and where its values are found outside."""

    def __init__(self, form: Form, flags: Sequence[bool], known: Program, results: int) -> None:
        self.form = form
        self.flags = flags
        self.known = known
        self.results = results
        self.saved = [r for r in known.results[results:] if isinstance(r, Var)]
        constants, _, slices = sections(form, list(enumerate(form.body.params)))
        self.fixed = {v: i for i, v in constants if not flags[i]}
        self.slices = {v: i for i, v in slices if not flags[i]}
        self.before = _lifted(known, list(self.fixed), self.saved)
        self.stacks: list[Var] = []

    def split(
        self, linear: Program, known_outs: tuple[int, ...], linear_outs: tuple[int, ...]
    ) -> Split:
        """The two loops; ``linear`` takes what is saved, then what moves."""
        residuals = [self.residual(v) for v in self.saved]
        loop, args = self._linear(linear, residuals)
        known_args = tuple(i for i, flag in enumerate(self.flags) if not flag)
        return Split(
            self.before,
            tuple(self.fixed[p] for p in self.before.params),
            self._known(known_args, known_outs),
            known_args,
            known_outs,
            loop,
            args,
            linear_outs,
        )

    def residual(self, var: Var) -> Residual:
        """Where a saved value is found outside the body."""
        if var in self.fixed:
            return Residual(Where.OPERAND, self.fixed[var], sliced=False)
        if var in self.slices:
            return Residual(Where.OPERAND, self.slices[var], sliced=True)
        if var in self.before.results:
            return Residual(Where.BEFORE, self.before.results.index(var), sliced=False)
        outs = self.known.results[: self.results]
        carries = self._carries(range(len(self.form.body.results)))
        stacked = [*outs[carries:], *self.stacks]
        if var not in stacked:
            self.stacks.append(var)
            stacked.append(var)
        return Residual(Where.STACKED, stacked.index(var), sliced=True)

    def _carries(self, positions: Sequence[int]) -> int:
        """How many of the results at these positions are carries that are known."""
        start = self.form.constants
        return sum(i < self.form.carries and not self.flags[start + i] for i in positions)

    def _known(self, args: Sequence[int], outs: Sequence[int]) -> Form:
        form, params = self.form, self.form.body.params
        constants = sum(i < form.constants for i in args)
        before = [v for v in self.before.results if isinstance(v, Var)]
        inputs = [params[i] for i in args]
        inputs[constants:constants] = before
        computed = set(before)
        eqns = tuple(e for e in self.known.eqns if computed.isdisjoint(e.outs))
        results = (*self.known.results[: self.results], *self.stacks)
        body = dce(Program(tuple(inputs), eqns, results, self.known.name))
        return Form(body, form.length, constants + len(before), self._carries(outs), form.reverse)

    def _linear(
        self, linear: Program, residuals: Sequence[Residual]
    ) -> tuple[Form, tuple[Residual | int, ...]]:
        form = self.form
        movers = [i for i, flag in enumerate(self.flags) if flag]
        sources: list[Residual | int] = [*residuals, *movers]
        first, second = form.constants, form.constants + form.carries

        def section(source: Residual | int) -> int:
            if isinstance(source, Residual):
                return 2 if source.sliced else 0
            return (source >= first) + (source >= second)

        order = sorted(range(len(sources)), key=lambda k: section(sources[k]))
        body = reordered(linear, order, range(len(linear.results)))
        where = [section(source) for source in sources]
        made = Form(dce(body), form.length, where.count(0), where.count(1), form.reverse)
        return made, tuple(sources[k] for k in order)


def _lifted(known: Program, fixed: Sequence[Var], saved: Sequence[Var]) -> Program:
    """What of ``saved`` depends on ``fixed`` alone, as a program of those.

    All results of an equation come with one of them, so that nothing is computed in both places.
    """
    reach = set(fixed)
    eqns: list[Eqn] = []
    for eqn in known.eqns:
        if all(a in reach for a in eqn.args if isinstance(a, Var)) and not once(eqn.prim):
            reach.update(eqn.outs)
            eqns.append(eqn)
    read = set(saved)
    wanted = tuple(v for e in eqns if not read.isdisjoint(e.outs) for v in e.outs)
    program = dce(Program(tuple(fixed), tuple(eqns), wanted, f"{known.name}.before"))
    operands = {a for e in program.eqns for a in e.args}
    params = tuple(p for p in fixed if p in operands)
    return Program(params, program.eqns, wanted, program.name)
