"""Common subexpression elimination."""

from __future__ import annotations

from vkjit.ir.program import Atom, Eqn, Literal, Program, Var


def cse(program: Program) -> Program:
    """Computes equal equations once.

    Equations are equal when region, primitive, parameters and arguments are. Writes and calls of
    the host are never merged: each happens exactly as often as the program says.
    """
    known: dict[object, tuple[Var, ...]] = {}
    same: dict[Var, Var] = {}
    eqns: list[Eqn] = []
    for eqn in program.eqns:
        args = tuple([_renamed(a, same) for a in eqn.args])
        if eqn.prim.traits.effect or eqn.prim.acts():
            eqns.append(Eqn(eqn.prim, args, eqn.outs, eqn.source, eqn.region))
            continue
        key = (eqn.region, eqn.prim, *[_key(a) for a in args])
        found = known.get(key)
        if found is None:
            known[key] = eqn.outs
            eqns.append(Eqn(eqn.prim, args, eqn.outs, eqn.source, eqn.region))
        else:
            same.update(zip(eqn.outs, found, strict=True))
    results = tuple([_renamed(r, same) for r in program.results])
    return Program(program.params, tuple(eqns), results, program.name)


def _renamed(atom: Atom, same: dict[Var, Var]) -> Atom:
    return same.get(atom, atom) if isinstance(atom, Var) else atom


def _key(atom: Atom) -> object:
    """Variables by identity; literals by bits, so that 0.0 and -0.0 stay apart."""
    if isinstance(atom, Literal):
        return (atom.aval, atom.value.tobytes())
    return atom
