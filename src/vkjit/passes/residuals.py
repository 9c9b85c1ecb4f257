"""Residuals: what a linear part keeps of the values that it reads, and what it computes again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vkjit.ir.primitive import Kind, Primitive, Remat
from vkjit.ir.program import Eqn, Var

_MAX_CHAIN = 12
"""Longest chain of operations that is computed again for one residual."""

Residuals = tuple[tuple[Var, ...], tuple[Eqn, ...]]
"""The saved values in order of definition, and the equations to run again, in order."""


def residuals(known: Sequence[Eqn], params: Sequence[Var], read: Sequence[Var]) -> Residuals:
    """What to save of the values that the linear part reads, and what to compute again.

    A value is computed again when pointwise and view operations give it from parameters and values
    that are saved anyway: then saving it costs memory and traffic, and computing it costs little.
    Casts and views are thus never saved. Writes are never repeated.

    Args:
        known: equations that do not depend on tangents.
        params: variables that are there anyway.
        read: variables that the linear part reads.
    """
    wanted = _with_sources(known, read)
    depth: dict[Var, int] = dict.fromkeys(params, 0)
    kept: list[Var] = []
    for eqn in known:
        chain = _chain(eqn, depth)
        for out in eqn.outs:
            if out in depth:
                continue
            if chain is not None:
                depth[out] = chain
            elif out in wanted:
                depth[out] = 0
                kept.append(out)
    return closed(known, params, read, kept)


def once(prim: Primitive) -> bool:
    """Whether a primitive must run exactly as often as the program says.

    So do writes, calls of the host, and what runs a program in which one occurs.
    """
    if prim.traits.effect or prim.traits.remat is Remat.ONCE or prim.acts():
        return True
    return any(once(eqn.prim) for inner in prim.programs() for eqn in inner.eqns)


def chosen(
    known: Sequence[Eqn],
    params: Sequence[Var],
    read: Sequence[Var],
    saveable: Callable[[Eqn], bool],
    forced: Callable[[Eqn], bool],
) -> Residuals:
    """Residuals where a policy says what may be saved; all else is computed again.

    Args:
        known: equations that do not depend on tangents.
        params: variables that are there anyway.
        read: variables that the linear part reads.
        saveable: whether results of an equation may be saved. Those that are cheap to compute from
            other residuals are computed again nevertheless.
        forced: whether saveable results are saved even then.
    """
    made = {out: eqn for eqn in known for out in eqn.outs}
    always = [
        out
        for eqn in known
        if once(eqn.prim) or (forced(eqn) and saveable(eqn))
        for out in eqn.outs
    ]
    seen = {*params, *always}
    maybe: list[Var] = []
    todo = list(read)
    while todo:
        var = todo.pop()
        if var in seen:
            continue
        seen.add(var)
        if saveable(made[var]):
            maybe.append(var)
        else:
            todo.extend([a for a in made[var].args if isinstance(a, Var)])
    kept, _ = residuals(known, (*params, *always), maybe)
    return closed(known, params, read, (*always, *kept))


def closed(
    known: Sequence[Eqn], params: Sequence[Var], read: Sequence[Var], kept: Sequence[Var]
) -> Residuals:
    """The saved values and equations that give ``read``, where ``kept`` values may be saved.

    Parameters count as saved; only those that are needed are among the residuals.
    """
    made = {out: eqn for eqn in known for out in eqn.outs}
    there = {*params, *kept}
    saved: set[Var] = set()
    needed: set[Eqn] = set()
    todo = list(read)
    while todo:
        var = todo.pop()
        if var in there:
            saved.add(var)
        elif made[var] not in needed:
            needed.add(made[var])
            todo.extend([a for a in made[var].args if isinstance(a, Var)])
    ordered = (*params, *[out for eqn in known for out in eqn.outs])
    return (
        tuple([v for v in dict.fromkeys(ordered) if v in saved]),
        tuple([eqn for eqn in known if eqn in needed]),
    )


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
    kind = eqn.prim.traits.kind
    return kind in (Kind.POINTWISE, Kind.VIEW) and not once(eqn.prim) and len(eqn.outs) == 1


def _is_free(eqn: Eqn) -> bool:
    """Views, and linear functions of one value such as casts: nothing next to a load."""
    return eqn.prim.traits.kind is Kind.VIEW or (
        len(eqn.args) == 1 and eqn.prim.traits.linear_in == (0,)
    )


def _with_sources(known: Sequence[Eqn], read: Sequence[Var]) -> set[Var]:
    """Values that are read, and operands to save in place of views and casts of them.

    Operands that are larger than the result are none of these.
    """
    wanted = set(read)
    for eqn in reversed(known):
        if _repeatable(eqn) and _is_free(eqn) and eqn.outs[0] in wanted:
            operand = eqn.args[0]
            if isinstance(operand, Var) and operand.aval.nbytes <= eqn.outs[0].aval.nbytes:
                wanted.add(operand)
    return wanted
