"""Derivatives and batches of random programs, in float64 on the evaluator."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings

import vkjit.numpy as vnp
from tests.derivatives import (
    STEP,
    assert_near,
    assert_pullback_is_adjoint,
    assert_pushforward_is_difference,
    moved,
    noise,
    of,
    run,
)
from tests.oracles import arrays_of
from tests.strategies import programs, seeds
from vkjit import dtypes
from vkjit.api.autodiff import grad, jvp
from vkjit.api.batching import vmap
from vkjit.ir.evaluate import evaluate
from vkjit.ir.program import Program

smooth = programs(max_steps=30, kinds=(dtypes.float64,), smooth=True)


@pytest.fixture(autouse=True)
def wide() -> Any:
    with dtypes.enable_x64():
        yield


@settings(max_examples=20)
@given(program=smooth, seed=seeds)
def test_pullback_is_the_adjoint_of_the_pushforward(program: Program, seed: int) -> None:
    assert_pullback_is_adjoint(program, seed)


@settings(max_examples=20)
@given(program=smooth, seed=seeds)
def test_pushforward_agrees_with_differences(program: Program, seed: int) -> None:
    assert_pushforward_is_difference(program, seed)


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
