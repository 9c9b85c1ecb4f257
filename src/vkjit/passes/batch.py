"""Batching: a program over one example becomes a program over a leading axis of examples."""

from __future__ import annotations

from collections.abc import Sequence

from vkjit.ir.primitive import Value
from vkjit.ir.program import Atom, Program, Var
from vkjit.trace import bind_outs, source_of


def batch(
    program: Program, values: Sequence[Value], batched: Sequence[bool]
) -> tuple[list[Value], list[bool]]:
    """Evaluates ``program`` once for a whole batch by binding operations.

    Args:
        program: over one example.
        values: one for each parameter.
        batched: whether the value has the batch axis in front; others are shared.

    Returns:
        results, and whether each has the batch axis in front.
    """
    env: dict[Var, Value] = dict(zip(program.params, values, strict=True))
    spread = {v for v, flag in zip(program.params, batched, strict=True) if flag}
    for eqn in program.eqns:
        args = [_value(a, env) for a in eqn.args]
        flags = [isinstance(a, Var) and a in spread for a in eqn.args]
        with source_of(eqn):
            if any(flags):
                outs = eqn.prim.batch_outs(args, flags)
                spread.update(eqn.outs)
            else:
                outs = bind_outs(eqn.prim, *args)
        env.update(zip(eqn.outs, outs, strict=True))
    results = [_value(r, env) for r in program.results]
    return results, [isinstance(r, Var) and r in spread for r in program.results]


def _value(atom: Atom, env: dict[Var, Value]) -> Value:
    return env[atom] if isinstance(atom, Var) else atom.value
