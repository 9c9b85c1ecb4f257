"""Named values stand for what was named, so that saving one saves the other."""

from __future__ import annotations

from collections.abc import Sequence

from vkjit.ir.program import Atom, Eqn, Var
from vkjit.ops.naming import Name


def named_first(known: Sequence[Eqn], linear: Sequence[Eqn]) -> tuple[list[Eqn], list[Eqn]]:
    """Both with every name given where the value is made, and read in the value's place.

    A derivative may read what was named, such as a result of tanh, and not the value with a name:
    both are one.

    Args:
        known: equations that do not depend on tangents.
        linear: the others, which may read results of ``known``.
    """
    names: dict[Var, Eqn] = {}
    for eqn in known:
        operand = eqn.args[0] if isinstance(eqn.prim, Name) else None
        if isinstance(operand, Var):
            names.setdefault(operand, eqn)
    if not names:
        return list(known), list(linear)
    early: list[Eqn] = []
    same: dict[Atom, Var] = {}
    given = {id(eqn) for eqn in names.values()}

    def give(var: Var) -> None:
        eqn = names.get(var)
        if eqn is not None:
            early.append(eqn)
            same[var] = eqn.outs[0]
            give(eqn.outs[0])

    for eqn in known:
        if id(eqn) not in given:
            early.append(_reading(eqn, same))
            for out in eqn.outs:
                give(out)
        elif eqn not in early:  # a parameter has the name
            early.append(eqn)
    return early, [_reading(eqn, same) for eqn in linear]


def _reading(eqn: Eqn, same: dict[Atom, Var]) -> Eqn:
    def final(atom: Atom) -> Atom:
        while atom in same:
            atom = same[atom]
        return atom

    if not any(a in same for a in eqn.args):
        return eqn
    args = tuple([final(a) for a in eqn.args])
    return Eqn(eqn.prim, args, eqn.outs, eqn.source, eqn.region)
