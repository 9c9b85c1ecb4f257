"""Linearization: splitting a derivative program into what is known and what is linear."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from vkjit.ir.primitive import Kind, Parts
from vkjit.ir.program import Eqn, Program, Var


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
    moving = {program.params[i] for i in tangents}
    known: list[Eqn] = []
    linear: list[Eqn] = []
    for eqn in program.eqns:
        flags = [isinstance(a, Var) and a in moving for a in eqn.args]
        if not any(flags):
            known.append(eqn)
            continue
        parts = eqn.prim.partial_eval(eqn, flags) or Parts((), (eqn,))
        known.extend(parts.known)
        linear.extend(parts.linear)
        moving.update([out for part in parts.linear for out in part.outs])
    primal_params = tuple(v for i, v in enumerate(program.params) if i not in set(tangents))
    tangent_params = tuple(program.params[i] for i in tangents)
    read = _read_from_outside(linear, program.results[outputs:], moving)
    saved, again = residuals(known, primal_params, read)
    head = Program(
        primal_params, tuple(known), (*program.results[:outputs], *saved), f"{program.name}.known"
    )
    inputs = (*saved, *tangent_params)
    tail = Program(inputs, (*again, *linear), program.results[outputs:], f"{program.name}.linear")
    return Linearized(head, tail, len(saved))


_MAX_CHAIN = 12
"""Longest chain of operations that is computed again for one residual."""


def residuals(
    known: Sequence[Eqn], params: Sequence[Var], read: Sequence[Var]
) -> tuple[tuple[Var, ...], tuple[Eqn, ...]]:
    """What to save of the values that the linear part reads, and what to compute again.

    A value is computed again when pointwise and view operations give it from parameters and values
    that are saved anyway: then saving it costs memory and traffic, and computing it costs little.
    Casts and views are thus never saved. Writes are never repeated.

    Returns:
        the saved values in order of definition, and the equations to run again, in order.
    """
    wanted = set(read)
    depth: dict[Var, int] = dict.fromkeys(params, 0)
    saved: list[Var] = [p for p in params if p in wanted]
    made: dict[Var, Eqn] = {}
    for eqn in known:
        source = _better_source(eqn, depth, wanted)
        if source is not None:
            depth[source] = 0
            saved.append(source)
        chain = _chain(eqn, depth)
        for out in eqn.outs:
            made[out] = eqn
            if chain is not None:
                depth[out] = chain
            elif out in wanted:
                depth[out] = 0
                saved.append(out)
    return _closed(saved, params, [v for v in read if depth[v] > 0], made, depth)


def _chain(eqn: Eqn, depth: dict[Var, int]) -> int | None:
    """Length of the chain that computes ``eqn`` again, or None where it must be saved."""
    if not _repeatable(eqn):
        return None
    variables = [a for a in eqn.args if isinstance(a, Var)]
    if any(a not in depth for a in variables):
        return None
    chain = max([depth[a] for a in variables], default=0) + (0 if _is_free(eqn) else 1)
    # A chain of free operations alone still has to be computed again.
    return max(chain, 1) if chain <= _MAX_CHAIN else None


def _repeatable(eqn: Eqn) -> bool:
    traits = eqn.prim.traits
    return traits.kind in (Kind.POINTWISE, Kind.VIEW) and not traits.effect and len(eqn.outs) == 1


def _is_free(eqn: Eqn) -> bool:
    """Views, and linear functions of one value such as casts: nothing next to a load."""
    return eqn.prim.traits.kind is Kind.VIEW or (
        len(eqn.args) == 1 and eqn.prim.traits.linear_in == (0,)
    )


def _better_source(eqn: Eqn, depth: dict[Var, int], wanted: set[Var]) -> Var | None:
    """The operand of a view or cast to save in place of its result, when it is no larger."""
    if not _repeatable(eqn) or not _is_free(eqn) or eqn.outs[0] not in wanted:
        return None
    operand = eqn.args[0]
    if not isinstance(operand, Var) or operand in depth:
        return None
    return operand if operand.aval.nbytes <= eqn.outs[0].aval.nbytes else None


def _closed(
    saved: Sequence[Var],
    params: Sequence[Var],
    again: Sequence[Var],
    made: dict[Var, Eqn],
    depth: dict[Var, int],
) -> tuple[tuple[Var, ...], tuple[Eqn, ...]]:
    """Adds the parameters and equations that computing ``again`` needs."""
    kept = dict.fromkeys(saved)
    needed: dict[Eqn, None] = {}
    todo = list(again)
    while todo:
        var = todo.pop()
        if depth[var] == 0:
            kept.setdefault(var)
            continue
        eqn = made[var]
        if eqn not in needed:
            needed[eqn] = None
            todo.extend([a for a in eqn.args if isinstance(a, Var)])
    order = {v: i for i, v in enumerate((*params, *made))}
    positions = {id(e): i for i, e in enumerate(made.values())}
    return (
        tuple(sorted(kept, key=lambda v: order[v])),
        tuple(sorted(needed, key=lambda e: positions[id(e)])),
    )


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
