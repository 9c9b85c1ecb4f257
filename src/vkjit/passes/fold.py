"""Constant folding and algebraic simplification."""

from __future__ import annotations

import numpy as np

from vkjit.ir.avals import aval
from vkjit.ir.primitive import Kind
from vkjit.ir.program import Atom, Eqn, Literal, Program, Var


def fold(program: Program) -> Program:
    """Evaluates scalar equations of literals and applies the primitives' own ``simplify`` rules.

    Results of loops that are arguments as they are become these.

    Rules keep every bit for every input, NaN and infinities included: ``x * 0`` stays. Writes are
    left alone.
    """
    made: dict[Var, Eqn] = {}
    known: dict[Var, Atom] = {}
    eqns: list[Eqn] = []

    def producer(atom: Atom) -> Eqn | None:
        return made.get(atom) if isinstance(atom, Var) else None

    for eqn in program.eqns:
        args = tuple([known.get(a, a) if isinstance(a, Var) else a for a in eqn.args])
        if eqn.prim.traits.effect:
            eqns.append(Eqn(eqn.prim, args, eqn.outs, eqn.source, eqn.region))
            continue
        constant = _constant(eqn, args)
        if constant is not None:
            known[eqn.outs[0]] = constant
            continue
        prim = eqn.prim
        simpler = prim.simplify(args, producer)
        while isinstance(simpler, tuple):
            prim, args = simpler
            simpler = prim.simplify(args, producer)
        if simpler is not None:
            known[eqn.outs[0]] = simpler
            continue
        kept = Eqn(prim, args, eqn.outs, eqn.source, eqn.region)
        eqns.append(kept)
        if prim.traits.kind is Kind.CONTROL:
            known.update({kept.outs[i]: atom for i, atom in prim.forwarded(kept).items()})
        for out in eqn.outs:
            made[out] = kept
    results = tuple([known.get(r, r) if isinstance(r, Var) else r for r in program.results])
    return Program(program.params, tuple(eqns), results, program.name)


def _constant(eqn: Eqn, args: tuple[Atom, ...]) -> Literal | None:
    """The value of a rank-0 equation of literals; loops may be long, and are left to run."""
    if not args or len(eqn.outs) != 1 or eqn.outs[0].aval.shape != ():
        return None
    if eqn.prim.traits.kind is Kind.CONTROL:
        return None
    values = [np.asarray(a.value) for a in args if isinstance(a, Literal)]
    if len(values) != len(args):
        return None
    out = eqn.prim.evaluate_outs(*values)[0]
    of = eqn.outs[0].aval
    return Literal(np.asarray(out, of.dtype)[()], aval((), of.dtype, of.weak))
