"""Linearization: splitting a derivative program into what is known and what is linear."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from vkjit.ir.primitive import Parts
from vkjit.ir.program import Eqn, Program, Var
from vkjit.passes.dce import dce
from vkjit.passes.residuals import residuals


@final
class Linearized:
    """``known`` computes results and residuals; ``linear`` maps residuals and tangents to tangents.

    ``linear`` has the residuals as its first parameters, in the order of ``known``'s last results;
    its first equations compute again what was not worth saving.
    """

    __slots__ = ("known", "linear", "residuals")

    def __init__(self, known: Program, linear: Program, residuals: int) -> None:
        self.known = known
        self.linear = linear
        self.residuals = residuals


def linearize(program: Program, tangents: Sequence[int], outputs: int) -> Linearized:
    """Splits a program that computes results and tangents.

    Args:
        program: results are ``outputs`` values followed by tangents.
        tangents: positions of the parameters that are tangents; all that depends on them is linear.
        outputs: number of leading results that do not depend on tangents.
    """
    program = dce(program)  # what nobody reads must not make residuals
    moving = {program.params[i] for i in tangents}
    known, linear = separate(program.eqns, moving)
    primal_params = tuple(v for i, v in enumerate(program.params) if i not in set(tangents))
    tangent_params = tuple(program.params[i] for i in tangents)
    read = read_from_outside(linear, program.results[outputs:], moving)
    saved, again = residuals(known, primal_params, read)
    head = Program(
        primal_params, tuple(known), (*program.results[:outputs], *saved), f"{program.name}.known"
    )
    inputs = (*saved, *tangent_params)
    tail = Program(inputs, (*again, *linear), program.results[outputs:], f"{program.name}.linear")
    return Linearized(head, tail, len(saved))


def separate(eqns: Sequence[Eqn], moving: set[Var]) -> tuple[list[Eqn], list[Eqn]]:
    """The equations that do not depend on ``moving`` variables, and those that do.

    Results of the latter are added to ``moving``.
    """
    known: list[Eqn] = []
    linear: list[Eqn] = []
    for eqn in eqns:
        flags = [isinstance(a, Var) and a in moving for a in eqn.args]
        if not any(flags):
            known.append(eqn)
            continue
        parts = eqn.prim.partial_eval(eqn, flags) or Parts((), (eqn,))
        known.extend(parts.known)
        linear.extend(parts.linear)
        moving.update([out for part in parts.linear for out in part.outs])
    return known, linear


def read_from_outside(
    eqns: Sequence[Eqn], results: Sequence[object], moving: set[Var]
) -> tuple[Var, ...]:
    """Known variables that the linear part reads: the residuals, in order of first use."""
    found: dict[Var, None] = {}
    for eqn in eqns:
        for arg in eqn.args:
            if isinstance(arg, Var) and arg not in moving:
                found[arg] = None
    for result in results:
        if isinstance(result, Var) and result not in moving:
            found[result] = None
    return tuple(found)
