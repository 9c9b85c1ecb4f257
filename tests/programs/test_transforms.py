"""Derivatives and batches of random programs, in float64 on the evaluator."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings

import vkjit.numpy as vnp
from tests.oracles import arrays_of
from tests.strategies import programs, seeds
from vkjit import dtypes, tree
from vkjit.api.autodiff import grad, jvp
from vkjit.api.batching import vmap
from vkjit.api.pullback import vjp
from vkjit.api.staged import make_ir
from vkjit.ir.check import check
from vkjit.ir.evaluate import evaluate
from vkjit.ir.program import Program
from vkjit.passes.pipeline import simplify
from vkjit.trace import apply_program

Array = np.ndarray[Any, Any]

STEP = 1e-6
"""Of central differences; the third derivatives of these programs stay below some 1e5."""
smooth = programs(max_steps=30, kinds=(dtypes.float64,), smooth=True)


@pytest.fixture(autouse=True)
def wide() -> Any:
    with dtypes.enable_x64():
        yield


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


@settings(max_examples=20)
@given(program=smooth, seed=seeds)
def test_pullback_is_the_adjoint_of_the_pushforward(program: Program, seed: int) -> None:
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


def moved(xs: list[Array], dxs: list[Array], by: float) -> list[Array]:
    return [x + by * d for x, d in zip(xs, dxs, strict=True)]


@settings(max_examples=20)
@given(program=smooth, seed=seeds)
def test_pushforward_agrees_with_differences(program: Program, seed: int) -> None:
    xs, dxs = arrays_of(program, seed), noise(program.in_avals, seed + 1)
    dys = run(lambda x, d: jvp(of(program), x, d)[1], xs, dxs)
    ahead, behind = (evaluate(program, moved(xs, dxs, s)) for s in (STEP, -STEP))
    for dy, a, b in zip(dys, ahead, behind, strict=True):
        scale = max(np.abs(a).max(initial=0), np.abs(dy).max(initial=0))
        assert_near((a - b) / (2 * STEP), dy, 1e-4, float(scale))


@settings(max_examples=12)
@given(program=programs(max_steps=15, kinds=(dtypes.float64,), smooth=True), seed=seeds)
def test_second_order_agrees_in_every_nesting(program: Program, seed: int) -> None:
    """The Hessian along a direction, in three nestings of modes, and by differences."""
    xs, dxs = arrays_of(program, seed), noise(program.in_avals, seed + 1)
    count = len(xs)

    def total(*args: Any) -> Any:
        return sum((vnp.sum(vnp.tanh(y)) for y in of(program)(*args)), vnp.zeros((), "float64"))

    gradient = grad(total, tuple(range(count)))

    def dot(left: Any, right: Any) -> Any:
        return sum((vnp.sum(a * b) for a, b in zip(left, right, strict=True)), 0.0)

    def nestings(xs: Any, dxs: Any) -> Any:
        forward_reverse = jvp(lambda *a: gradient(*a), xs, dxs)[1]
        reverse_reverse = grad(lambda *a: dot(gradient(*a), dxs), tuple(range(count)))(*xs)
        reverse_forward = grad(lambda *a: jvp(total, a, dxs)[1], tuple(range(count)))(*xs)
        return list(forward_reverse), list(reverse_reverse), list(reverse_forward)

    made = run(nestings, xs, dxs)
    first = made[:count]
    scale = max((float(np.abs(v).max(initial=0)) for v in first), default=0.0)
    for start in (count, 2 * count):
        for got, want in zip(made[start : start + count], first, strict=True):
            assert_near(got, want, 1e-9, scale)
    ahead, behind = (run(lambda *x: list(gradient(*x)), *moved(xs, dxs, s)) for s in (STEP, -STEP))
    for got, a, b in zip(first, ahead, behind, strict=True):
        size = max(scale, float(np.abs(a).max(initial=0)))
        assert_near((a - b) / (2 * STEP), got, 1e-4, size)


@settings(max_examples=20)
@given(program=programs(max_steps=20, kinds=(dtypes.float64, dtypes.int32)), seed=seeds)
def test_vmap_equals_a_loop(program: Program, seed: int) -> None:
    rows = [arrays_of(program, seed + i) for i in range(3)]
    stacked = [np.stack(column) for column in zip(*rows, strict=True)]
    got = run(lambda *xs: vmap(of(program))(*xs), *stacked)
    wanted = [evaluate(program, row) for row in rows]
    for position, batch in enumerate(got):
        want = np.stack([w[position] for w in wanted])
        if not dtypes.is_float(want.dtype):
            np.testing.assert_array_equal(batch, want)
            continue
        a, b = batch.astype(np.float64), want.astype(np.float64)
        size = float(np.abs(b[np.isfinite(b)]).max(initial=0))
        unit = 512 * float(ml_dtypes.finfo(want.dtype).eps)
        np.testing.assert_allclose(a, b, unit, unit * max(size, 1.0))
