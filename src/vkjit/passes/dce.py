"""Dead code elimination."""

from __future__ import annotations

from vkjit.ir.primitive import Kind
from vkjit.ir.program import Eqn, Program, Var


def dce(program: Program) -> Program:
    """Drops equations whose results nobody reads; parameters stay.

    Where some results of an equation that runs a program are read, what serves the others goes.

    A write is kept by the readers of its result: the value it returns is the only way to see it.
    What acts, such as a call of the host, is always kept.
    """
    live = {r for r in program.results if isinstance(r, Var)}
    kept: list[Eqn] = []
    for eqn in reversed(program.eqns):
        if not live.isdisjoint(eqn.outs) or eqn.prim.acts():
            if eqn.prim.traits.kind is Kind.CONTROL:
                eqn = eqn.prim.pruned(eqn, [out in live for out in eqn.outs])
            kept.append(eqn)
            live.update([a for a in eqn.args if isinstance(a, Var)])
    return Program(program.params, tuple(reversed(kept)), program.results, program.name)
