"""The NumPy evaluator: the definition of what a program computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np

from vkjit.errors import InternalError
from vkjit.ir.primitive import Array
from vkjit.ir.program import Literal, Program, Var


def evaluate(program: Program, inputs: Sequence[Array]) -> list[Array]:
    """Runs ``program`` on NumPy arrays, equation by equation.

    Args:
        program: what to run.
        inputs: one array for each parameter, of its shape and dtype.

    Returns:
        one array for each result.
    """
    return Evaluator(program).run(inputs)


@final
class Evaluator:
    """A program prepared for being run many times, as the body of a loop is."""

    __slots__ = ("_dead", "program")

    def __init__(self, program: Program) -> None:
        self.program = program
        self._dead = _last_uses(program)

    def run(self, inputs: Sequence[Array]) -> list[Array]:
        """The results for one array for each parameter."""
        env: dict[Var, Array] = {}
        for var, value in zip(self.program.params, inputs, strict=True):
            env[var] = _checked(np.asarray(value), var, "parameter")
        for position, eqn in enumerate(self.program.eqns):
            args = [a.value if isinstance(a, Literal) else env[a] for a in eqn.args]
            outs = eqn.prim.evaluate_outs(*[np.asarray(a) for a in args])
            for var, value in zip(eqn.outs, outs, strict=True):
                env[var] = _checked(np.asarray(value), var, eqn.prim.name)
            for dead in self._dead.get(position, ()):
                del env[dead]
        results = self.program.results
        return [np.asarray(r.value) if isinstance(r, Literal) else env[r] for r in results]


def _checked(value: Array, var: Var, what: str) -> Array:
    if value.shape != var.aval.shape or value.dtype != var.aval.dtype:
        raise InternalError(
            f"{what}: evaluated to {value.dtype}{list(value.shape)}, inferred {var.aval}"
        )
    return value


def _last_uses(program: Program) -> dict[int, list[Var]]:
    """Variables that die after each equation, so that a long program needs little memory."""
    last: dict[Var, int] = {}
    for position, eqn in enumerate(program.eqns):
        for out in eqn.outs:
            last[out] = position
        for arg in eqn.args:
            if isinstance(arg, Var):
                last[arg] = position
    kept = {r for r in program.results if isinstance(r, Var)}
    dead: dict[int, list[Var]] = {}
    for var, position in last.items():
        if var not in kept:
            dead.setdefault(position, []).append(var)
    return dead
