"""Transformations of functions of one number, which keep them functions of each number.

Applied to a function with control flow and to the piece of it that holds at a point, they must give
the same: the oracle has no control flow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import vkjit as vj
import vkjit.numpy as jnp
from vkjit.ir.check import check
from vkjit.ir.evaluate import evaluate
from vkjit.ir.program import Program
from vkjit.passes.pipeline import simplify
from vkjit.trace import aval_of, trace

Function = Callable[..., Any]
Array = np.ndarray[Any, Any]


def forward(fn: Function) -> Function:
    return lambda x: vj.jvp(fn, (x,), (jnp.ones_like(x),))[1]


def reverse(fn: Function) -> Function:
    return vj.grad(lambda x: jnp.sum(fn(x)))


def linear(fn: Function) -> Function:
    return lambda x: vj.linearize(fn, x)[1](jnp.ones_like(x))


def batch(fn: Function) -> Function:
    return vj.vmap(fn)


TRANSFORMS: dict[str, Function] = {
    "jvp": forward,
    "grad": reverse,
    "linearize": linear,
    "vmap": batch,
}


def composed(fn: Function, names: Sequence[str]) -> Function:
    """The transformations of ``fn``, the first one innermost."""
    for name in names:
        fn = TRANSFORMS[name](fn)
    return fn


def at_points(fn: Function, names: Sequence[str], xs: Array, run: Function) -> Array:
    """Values at all points: at once under ``vmap``, else one by one."""
    made = composed(fn, names)
    if "vmap" in names:
        return np.asarray(run(made, xs))
    return np.stack([np.asarray(run(made, x)) for x in xs])


def evaluated(fn: Function, *args: Any) -> Any:
    """``fn`` traced, checked, simplified and evaluated in NumPy: its only result."""
    traced = trace(lambda *values: [fn(*values)], [aval_of(v) for v in args])
    program = traced.program
    check(program)
    pairs = zip((*traced.captured, *args), program.in_avals, strict=True)
    values = [np.asarray(v, of.dtype) for v, of in pairs]
    (out,) = evaluate(simplify(program, checked=True), values)
    return out


def compiled(fn: Function, *args: Any) -> Any:
    return vj.jit(fn)(*args)


def primitives(program: Program) -> list[str]:
    """Names of all primitives, those of inner programs after the one that runs them."""
    found: list[str] = []
    for eqn in program.eqns:
        found.append(eqn.prim.name)
        for inner in eqn.prim.programs():
            found.extend(primitives(inner))
    return found
