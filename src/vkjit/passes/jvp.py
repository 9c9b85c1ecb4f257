"""Forward-mode differentiation of a program."""

from __future__ import annotations

from collections.abc import Sequence

from vkjit.dtypes import is_float
from vkjit.ir.primitive import Tangent, Value
from vkjit.ir.program import Atom, Program, Var
from vkjit.passes.dce import dce
from vkjit.trace import bind_outs, source_of


def jvp(
    program: Program, primals: Sequence[Value], tangents: Sequence[Tangent]
) -> tuple[list[Value], list[Tangent]]:
    """Evaluates ``program`` and its directional derivative by binding operations.

    Args:
        program: what to differentiate.
        primals: a value for each parameter.
        tangents: a tangent for each parameter; None is zero.

    Returns:
        results and their tangents; a tangent is None where it is zero or the result is not a float.
    """
    values: dict[Var, Value] = dict(zip(program.params, primals, strict=True))
    moving: dict[Var, Value] = {
        v: t for v, t in zip(program.params, tangents, strict=True) if t is not None
    }
    for eqn in dce(program).eqns:  # what nobody reads may have no derivative
        args = [_value(a, values) for a in eqn.args]
        dargs = [moving.get(a) if isinstance(a, Var) else None for a in eqn.args]
        with source_of(eqn):
            if any(d is not None for d in dargs) and eqn.prim.traits.differentiable:
                outs, douts = eqn.prim.jvp_outs(args, dargs)
            else:
                outs, douts = bind_outs(eqn.prim, *args), [None] * len(eqn.outs)
        for var, out, dout in zip(eqn.outs, outs, douts, strict=True):
            values[var] = out
            if dout is not None and is_float(var.aval.dtype):
                moving[var] = dout
    results = [_value(r, values) for r in program.results]
    dresults = [moving.get(r) if isinstance(r, Var) else None for r in program.results]
    return results, dresults


def _value(atom: Atom, values: dict[Var, Value]) -> Value:
    return values[atom] if isinstance(atom, Var) else atom.value
