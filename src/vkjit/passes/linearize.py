"""Linearization: splitting a derivative program into what is known and what is linear."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from vkjit.ir.program import Eqn, Program, Var


@final
class Linearized:
    """``known`` computes results and residuals; ``linear`` maps residuals and tangents to tangents.

    ``linear`` has the residuals as its first parameters, in the order of ``known``'s last results.
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
    moving = {program.params[i] for i in tangents}
    known: list[Eqn] = []
    linear: list[Eqn] = []
    for eqn in program.eqns:
        if any([a in moving for a in eqn.args if isinstance(a, Var)]):
            moving.update(eqn.outs)
            linear.append(eqn)
        else:
            known.append(eqn)
    primal_params = tuple(v for i, v in enumerate(program.params) if i not in set(tangents))
    tangent_params = tuple(program.params[i] for i in tangents)
    saved = _read_from_outside(linear, program.results[outputs:], moving)
    head = Program(
        primal_params, tuple(known), (*program.results[:outputs], *saved), f"{program.name}.known"
    )
    tail = Program(
        (*saved, *tangent_params),
        tuple(linear),
        program.results[outputs:],
        f"{program.name}.linear",
    )
    return Linearized(head, tail, len(saved))


def _read_from_outside(
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
