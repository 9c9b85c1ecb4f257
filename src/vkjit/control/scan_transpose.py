"""Transposition of scan: the loop in the opposite direction.

The carries of the transposed loop are the cotangents of constants, which add up turn by turn, and
those of carries; it takes the cotangents of stacked results and gives those of stacked operands.
What is zero in every turn has no place in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import assert_never, final

from vkjit.control.remembered import remembered
from vkjit.control.scan_form import Derived, derive, reordered, sections, stacked
from vkjit.control.scan_split import moving_carries, split
from vkjit.ir.control import Scan as Form
from vkjit.ir.primitive import Linear, Primitive, Tangent, Value
from vkjit.ir.program import Eqn, Program, Var
from vkjit.ops.structural import add, zeros
from vkjit.passes.transpose import transpose


def known_carries(form: Form, linear: tuple[bool, ...]) -> bool:
    """Whether a carry stays known in every turn: it must be computed forward first."""
    flags, _ = moving_carries(form, linear)
    return not all(sections(form, flags)[1])


def apart(
    of: Callable[[Form], Primitive], form: Form, linear: tuple[bool, ...]
) -> tuple[Program, list[int]]:
    """The loop as a program of its known loop and the linear one, in which every carry is linear.

    Returns:
        the program, of the known operands followed by the linear ones, and which those known are.
    """
    prim = of(form)
    first, carried, slices = sections(form, form.body.in_avals)
    avals = [*first, *carried, *[stacked(a, form.length) for a in slices]]
    params = [Var(a) for a in avals]
    outs = tuple(Var(a) for a in prim.infer_outs(avals))
    eqn = Eqn(prim, tuple(params), outs)
    parts = split(form, linear).parts(eqn, of)
    known = [i for i, flag in enumerate(linear) if not flag]
    order = [*known, *[i for i, flag in enumerate(linear) if flag]]
    inputs = tuple(params[i] for i in order)
    return Program(inputs, (*parts.known, *parts.linear), outs, form.body.name), known


class Meaning(Enum):
    """What stands at an argument of the transposed loop."""

    KNOWN = "known"  # a known operand of the loop
    TOTAL = "total"  # zero, where the cotangents of a linear constant add up
    COTANGENT = "cotangent"  # that of a result


@final
@dataclass(frozen=True)
class Transposed:
    """The transposed loop; ``outputs`` are the operands whose cotangents it gives."""

    scan: Derived
    inputs: tuple[tuple[Meaning, int], ...]
    outputs: tuple[int, ...]

    def arguments(
        self, form: Form, args: Sequence[Value | Linear], cotangents: Sequence[Tangent]
    ) -> list[Value]:
        """Its arguments from those of the loop and the cotangents of the loop's results."""
        carries = sections(form, form.body.in_avals)[1]
        values: list[Value] = []
        for meaning, position in self.inputs:
            match meaning:
                case Meaning.KNOWN:
                    values.append(args[position])
                case Meaning.TOTAL:
                    values.append(zeros(form.body.in_avals[position]))
                case Meaning.COTANGENT:
                    ct = cotangents[position]
                    values.append(zeros(carries[position]) if ct is None else ct)
                case _:
                    assert_never(meaning)
        return values


@remembered(lambda made: made.scan.closed)
def transposed(form: Form, linear: tuple[bool, ...], live: tuple[bool, ...]) -> Transposed:
    """The transposed loop of one in which every carry is linear.

    Args:
        form: a loop that is linear in the operands flagged in ``linear``; where the first value of
            a carry is known, it does not count.
        linear: which operands are linear.
        live: which results have a cotangent.
    """
    totals: frozenset[int] = frozenset()
    carries = frozenset(i for i in range(form.carries) if live[i])
    while True:
        traced = _Traced(form, linear, live, totals, carries)
        made = traced.made()
        if traced.totals == totals and traced.carries == carries:
            return made
        totals, carries = traced.totals, traced.carries


@final
class _Traced:
    """The transposed loop with sums for ``totals`` and cotangents of ``carries``.

    Once it is traced, the two are what turned out to be there.
    """

    def __init__(
        self,
        form: Form,
        linear: Sequence[bool],
        live: Sequence[bool],
        totals: frozenset[int],
        carries: frozenset[int],
    ) -> None:
        self.form = form
        self.totals = totals
        self.carries = carries
        constants, self.carried, slices = sections(form, range(len(linear)))
        self.known = [
            [i for i in constants if not linear[i]],
            [i for i in slices if not linear[i]],
        ]
        self.constants = [i for i in constants if linear[i]]
        self.slices = [i for i in slices if linear[i]]
        self.ys = [i for i in range(form.carries, len(live)) if live[i]]
        self.outputs: list[int] = []
        linear_params = [*self.constants, *self.carried, *self.slices]
        order = [*self.known[0], *self.known[1], *linear_params]
        self.program = reordered(form.body, order, range(len(live)))

    def made(self) -> Transposed:
        """Traces the body."""
        of, outs = self.form.body.in_avals, self.form.body.out_avals
        totals, carries = sorted(self.totals), sorted(self.carries)
        carried = [*[of[i] for i in totals], *[of[self.carried[i]] for i in carries]]
        slices = [*[of[i] for i in self.known[1]], *[outs[i] for i in self.ys]]
        avals = ([of[i] for i in self.known[0]], carried, slices)
        scan = derive(self.form, self.turn, avals, "transpose", backward=True)
        inputs = (
            *[(Meaning.KNOWN, i) for i in self.known[0]],
            *[(Meaning.TOTAL, i) for i in totals],
            *[(Meaning.COTANGENT, i) for i in carries],
            *[(Meaning.KNOWN, i) for i in self.known[1]],
            *[(Meaning.COTANGENT, i) for i in self.ys],
        )
        return Transposed(scan, inputs, tuple(self.outputs))

    def turn(self, *values: Value) -> list[Value]:
        """One turn backward."""
        given = iter(values)
        constants = [next(given) for _ in self.known[0]]
        sums = {i: next(given) for i in sorted(self.totals)}
        carried = {i: next(given) for i in sorted(self.carries)}
        slices = [next(given) for _ in self.known[1]]
        stacked = {i: next(given) for i in self.ys}
        cts = [(carried | stacked).get(i) for i in range(len(self.program.results))]
        found = iter(transpose(self.program, [*constants, *slices], cts))
        to_constants = {i: ct for i in self.constants if (ct := next(found)) is not None}
        to_carries = {i: ct for i, _ in enumerate(self.carried) if (ct := next(found)) is not None}
        to_slices = {i: ct for i in self.slices if (ct := next(found)) is not None}
        of = self.form.body.in_avals
        totals = [add(x, to_constants[i]) if i in to_constants else x for i, x in sums.items()]
        last = [to_carries[i] if i in to_carries else zeros(of[self.carried[i]]) for i in carried]
        self.outputs = [*sums, *[self.carried[i] for i in carried], *to_slices]
        self.totals, self.carries = self.totals | {*to_constants}, self.carries | {*to_carries}
        return [*totals, *last, *to_slices.values()]
