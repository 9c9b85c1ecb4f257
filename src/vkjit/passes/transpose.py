"""Transposition of a linear program: from tangents forward to cotangents backward."""

from __future__ import annotations

from collections.abc import Sequence

from vkjit.ir.primitive import Linear, Tangent, Value
from vkjit.ir.program import Atom, Eqn, Program, Var
from vkjit.ops.structural import add, zeros
from vkjit.trace import bind_outs, source_of


def transpose(
    program: Program, residuals: Sequence[Value], cotangents: Sequence[Tangent]
) -> list[Tangent]:
    """Evaluates the transpose of a program that is linear in its last parameters.

    Args:
        program: parameters are ``len(residuals)`` known values, then the linear ones.
        residuals: values of the known parameters.
        cotangents: one for each result; None is zero.

    Returns:
        a cotangent for each linear parameter; None is zero.
    """
    count = len(residuals)
    known: dict[Var, Value] = dict(zip(program.params[:count], residuals, strict=True))
    linear = set(program.params[count:])
    pending = _forward(program, known, linear)
    sums: dict[Var, Value] = {}
    for result, ct in zip(program.results, cotangents, strict=True):
        if isinstance(result, Var) and result in linear and ct is not None:
            _accumulate(sums, result, ct)
    for eqn in reversed(pending):
        cts = [sums.pop(v, None) for v in eqn.outs]
        if all(ct is None for ct in cts):
            continue
        with source_of(eqn):
            filled = [
                zeros(v.aval) if ct is None else ct for v, ct in zip(eqn.outs, cts, strict=True)
            ]
            args = [_argument(a, known, linear) for a in eqn.args]
            outs = eqn.prim.transpose(filled, args)
            for arg, ct in zip(eqn.args, outs, strict=True):
                if ct is not None and isinstance(arg, Var):
                    _accumulate(sums, arg, ct)
    return [sums.get(v) for v in program.params[count:]]


def _forward(program: Program, known: dict[Var, Value], linear: set[Var]) -> list[Eqn]:
    """Runs what is known, marks what is linear, and returns the linear equations."""
    pending: list[Eqn] = []
    for eqn in program.eqns:
        if any([a in linear for a in eqn.args if isinstance(a, Var)]):
            linear.update(eqn.outs)
            pending.append(eqn)
            continue
        args = [known[a] if isinstance(a, Var) else a.value for a in eqn.args]
        with source_of(eqn):
            known.update(zip(eqn.outs, bind_outs(eqn.prim, *args), strict=True))
    return pending


def _argument(atom: Atom, known: dict[Var, Value], linear: set[Var]) -> Value | Linear:
    if isinstance(atom, Var):
        return Linear(atom.aval) if atom in linear else known[atom]
    return atom.value


def _accumulate(sums: dict[Var, Value], var: Var, ct: Value) -> None:
    before = sums.get(var)
    sums[var] = ct if before is None else add(before, ct)
