"""Properties of the derivatives of a program, checked in float64 on the evaluator."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.oracles import arrays_of
from vkjit import jvp, tree, vjp
from vkjit.api.staged import make_ir
from vkjit.ir.check import check
from vkjit.ir.evaluate import evaluate
from vkjit.ir.program import Program
from vkjit.passes.pipeline import simplify
from vkjit.trace import apply_program

Array = np.ndarray[Any, Any]

STEP = 1e-6
"""Of central differences; the third derivatives of random programs stay below some 1e5."""


def run(fn: Any, *args: Any) -> list[Array]:
    """``fn`` traced, checked, simplified and evaluated in NumPy."""
    program = make_ir(fn)(*args)
    check(program)
    return evaluate(simplify(program, checked=True), tree.leaves(args))


def of(program: Program) -> Any:
    """The program as a function of its parameters."""
    return lambda *xs: apply_program(program, xs)


def noise(avals: Any, seed: int) -> list[Array]:
    rng = np.random.default_rng(seed)
    return [np.asarray(rng.uniform(-1, 1, a.shape)).astype(a.dtype) for a in avals]


def assert_near(got: Any, want: Any, rtol: float, scale: float) -> None:
    np.testing.assert_allclose(got, want, rtol, rtol * max(scale, 1.0))


def moved(xs: list[Array], dxs: list[Array], by: float) -> list[Array]:
    return [x + by * d for x, d in zip(xs, dxs, strict=True)]


def assert_pullback_is_adjoint(program: Program, seed: int) -> None:
    """A cotangent times the pushed tangent is the pulled cotangent times the tangent."""
    xs, dxs = arrays_of(program, seed), noise(program.in_avals, seed + 1)
    cts = noise(program.out_avals, seed + 2)

    def both(xs: Any, dxs: Any, cts: Any) -> Any:
        _, dys = jvp(of(program), xs, dxs)
        _, pullback = vjp(of(program), *xs)
        return dys, pullback(cts)

    made = run(both, xs, dxs, cts)
    dys, back = made[: len(cts)], made[len(cts) :]
    ahead = [float(np.vdot(c, d)) for c, d in zip(cts, dys, strict=True)]
    behind = [float(np.vdot(b, d)) for b, d in zip(back, dxs, strict=True)]
    scale = sum(float(np.abs(c * d).sum()) for c, d in zip(cts, dys, strict=True))
    scale += sum(float(np.abs(c * d).sum()) for c, d in zip(back, dxs, strict=True))
    assert_near(sum(behind), sum(ahead), 1e-10, scale)


def assert_pushforward_is_difference(program: Program, seed: int) -> None:
    """The pushed tangent is the central difference along it."""
    xs, dxs = arrays_of(program, seed), noise(program.in_avals, seed + 1)
    dys = run(lambda x, d: jvp(of(program), x, d)[1], xs, dxs)
    ahead, behind = (evaluate(program, moved(xs, dxs, s)) for s in (STEP, -STEP))
    for dy, a, b in zip(dys, ahead, behind, strict=True):
        scale = max(np.abs(a).max(initial=0), np.abs(dy).max(initial=0))
        assert_near((a - b) / (2 * STEP), dy, 1e-4, float(scale))
