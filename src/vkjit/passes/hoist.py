"""Scalars that depend on scalars alone, such as an optimizer's bias corrections, come first.

What uses them can then be computed where its other operands are made: an update joins the product
that makes its gradient instead of waiting for the step count's power.
"""

from __future__ import annotations

from vkjit.ir.primitive import Kind
from vkjit.ir.program import Eqn, Program, Var


def hoist(program: Program) -> Program:
    """Moves equations between single elements to the front, in their order."""
    ready = {p for p in program.params if p.aval.size == 1}
    first: list[Eqn] = []
    rest: list[Eqn] = []
    for eqn in program.eqns:
        fixed = eqn.prim.traits.effect or eqn.prim.traits.kind is Kind.CONTROL
        movable = not fixed and all(v.aval.size == 1 for v in eqn.outs)
        if movable and all(a in ready for a in eqn.args if isinstance(a, Var)):
            ready.update(eqn.outs)
            first.append(eqn)
        else:
            rest.append(eqn)
    return Program(program.params, (*first, *rest), program.results, program.name)
