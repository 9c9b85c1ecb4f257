"""Reductions and running sums against NumPy."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

import vkjit.numpy as jnp
from vkjit.errors import ShapeError

RNG = np.random.default_rng(5)
X = RNG.normal(size=(3, 4, 5)).astype(np.float32)
WHOLE = RNG.integers(-9, 9, (3, 4, 5)).astype(np.int32)
HOLES = X.copy()
HOLES[0, 1, :3] = np.nan
HOLES[2, :, 4] = np.nan
MASK = RNG.integers(0, 2, (4, 5)).astype(bool)

NAMES = ("sum", "prod", "mean", "var", "std", "max", "min", "any", "all", "count_nonzero", "ptp")
AXES = (None, 0, -1, (0, 2), ())


@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("name", NAMES)
def test_reductions(name: str, axis: Any, keepdims: bool, run: Any, same: Any) -> None:  # noqa: FBT001
    want = getattr(np, name)(X, axis=axis, keepdims=keepdims)
    want = np.asarray(want, np.int32) if name == "count_nonzero" else want
    got = run(lambda x: getattr(jnp, name)(x, axis=axis, keepdims=keepdims), jnp.asarray(X))
    same(got, want, rtol=1e-5)


@pytest.mark.parametrize("name", ["sum", "max", "min", "any", "all", "argmax", "argmin"])
def test_integer_reductions(name: str, run: Any, same: Any) -> None:
    for axis in (None, 1):
        got = run(lambda x, a=axis: getattr(x, name)(a), jnp.asarray(WHOLE))
        same(got, getattr(np, name)(WHOLE, axis))


NAN_NAMES = ("nansum", "nanprod", "nanmax", "nanmin", "nanmean", "nanvar", "nanstd")


@pytest.mark.parametrize("name", NAN_NAMES)
def test_reductions_that_skip_nan(name: str, run: Any, same: Any) -> None:
    for axis in (None, 1):
        got = run(lambda x, a=axis: getattr(jnp, name)(x, axis=a), jnp.asarray(HOLES))
        with warnings.catch_warnings(action="ignore"):
            want = getattr(np, name)(HOLES, axis=axis)
        same(got, want, rtol=1e-5)


@pytest.mark.parametrize("axis", [None, 0, 2])
@pytest.mark.parametrize("name", ["cumsum", "cumprod", "nancumsum"])
def test_running_reductions(name: str, axis: Any, run: Any, same: Any) -> None:
    x = HOLES if name.startswith("nan") else X
    got = run(lambda v: getattr(jnp, name)(v, axis), jnp.asarray(x))
    same(got, getattr(np, name)(x, axis), rtol=1e-5)


@pytest.mark.parametrize("name", ["sum", "prod", "mean", "var", "std"])
def test_only_elements_under_the_mask_count(name: str, run: Any, same: Any) -> None:
    want = getattr(np, name)(X, axis=(1, 2), where=MASK)
    got = run(lambda x, m: getattr(jnp, name)(x, axis=(1, 2), where=m), jnp.asarray(X), MASK)
    same(got, want, rtol=1e-5)


def test_extrema_under_a_mask_and_with_a_start(run: Any, same: Any) -> None:
    got = run(lambda x: jnp.max(x, 2, initial=0.5, where=MASK), jnp.asarray(X))
    same(got, np.max(X, 2, initial=0.5, where=MASK))
    empty = np.zeros((0, 3), np.float32)
    same(run(lambda x: jnp.min(x, 0, initial=9), jnp.asarray(empty)), np.full(3, 9, np.float32))


def test_narrow_integers_widen_and_half_floats_accumulate_wide(run: Any, same: Any) -> None:
    small = np.full(300, 100, np.int8)
    same(run(jnp.sum, jnp.asarray(small)), np.int32(30000))
    same(run(lambda x: x.sum(dtype="int8"), jnp.asarray(small)), np.int8(30000 % 256))
    same(run(jnp.prod, jnp.asarray(small[:4])), np.int32(100000000))
    half = np.full(100000, 1, np.float16)
    same(run(jnp.mean, jnp.asarray(half)), np.float16(1))
    big = np.array([300, 300, -300, -300], np.float16)
    same(run(jnp.var, jnp.asarray(big / 2)), np.float16(22500))


def test_ties_and_nan_in_positions(run: Any, same: Any) -> None:
    for x, most, least in (
        ([1, 3, 3, 1], 1, 0),
        ([0, np.nan, 9, np.nan], 1, 1),
        ([np.inf, np.inf], 0, 0),
    ):
        values = jnp.asarray(np.array(x, np.float32))
        same(run(jnp.argmax, values), np.int32(most))
        same(run(jnp.argmin, values), np.int32(least))
    flags = jnp.asarray(np.array([False, True, True]))
    same(run(lambda v: v.argmax(keepdims=True), flags), np.array([1], np.int32))


def test_weighted_average(run: Any, same: Any) -> None:
    weights = abs(X)
    got = run(lambda x, w: jnp.average(x, 1, w), jnp.asarray(X), jnp.asarray(weights))
    same(got, np.average(X, 1, weights), rtol=1e-5)


def test_comparisons_of_whole_arrays(run: Any, same: Any) -> None:
    x = jnp.asarray(X)
    same(run(lambda v: jnp.allclose(v, v + 1e-7), x), np.True_)
    same(run(lambda v: jnp.array_equal(v, v + 1), x), np.False_)
    same(run(lambda v: jnp.array_equal(v, v[0]), x), np.False_)
    holes = jnp.asarray(HOLES)
    same(run(lambda v: jnp.array_equal(v, v, equal_nan=True), holes), np.True_)


def test_mean_of_nothing_is_nan(run: Any, same: Any) -> None:
    same(run(jnp.mean, jnp.zeros((0,))), np.float32(np.nan))
    same(run(jnp.sum, jnp.zeros((0,))), np.float32(0))


@pytest.mark.parametrize("name", ["max", "min", "argmax", "argmin"])
def test_nothing_has_no_extremum(name: str) -> None:
    with pytest.raises(ShapeError, match=f"{name}: operand f32\\[3,0\\] is empty along ax"):
        getattr(jnp, name)(np.zeros((3, 0), np.float32), 1)
