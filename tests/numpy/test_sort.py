"""Sorts against NumPy's stable sort: dtypes, axes, special values, payloads, derivatives."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import vkjit as vj
import vkjit.numpy as jnp
from vkjit import dtypes, lax
from vkjit.errors import ArgumentError, ShapeError

Array = np.ndarray[Any, Any]

RNG = np.random.default_rng(11)
X = RNG.normal(size=(3, 4, 5)).astype(np.float32)
TIES = RNG.integers(0, 3, (4, 7)).astype(np.int32)
SPECIAL = np.array([1, np.nan, -0.0, 0.0, 2, -np.nan, -np.inf, np.inf, 0.0, -0.0], np.float32)


def bits(x: Any) -> bytes:
    return np.asarray(x).tobytes()


@pytest.mark.parametrize("axis", [None, 0, 1, -1])
@pytest.mark.parametrize("name", ["sort", "argsort"])
def test_sorts_along_any_axis(name: str, axis: int | None, run: Any, same: Any) -> None:
    want = np.asarray(getattr(np, name)(X, axis=axis))
    same(run(lambda x: getattr(jnp, name)(x, axis=axis), X), _narrowed(want))


def _narrowed(x: Array) -> Array:
    return x.astype(np.int32) if x.dtype == np.int64 else x


def test_equal_elements_keep_their_order(run: Any, same: Any) -> None:
    want = np.argsort(TIES, axis=1, kind="stable").astype(np.int32)
    same(run(jnp.argsort, TIES), want)
    down = np.argsort(-TIES, axis=1, kind="stable").astype(np.int32)
    same(run(lambda x: jnp.argsort(x, descending=True), TIES), down)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_nan_is_largest_and_zeros_are_equal(dtype: Any, run: Any) -> None:
    x = SPECIAL.astype(dtype)
    assert run(jnp.argsort, x).tolist() == [6, 2, 3, 8, 9, 0, 4, 7, 1, 5]
    assert bits(run(jnp.sort, x)) == bits(x[[6, 2, 3, 8, 9, 0, 4, 7, 1, 5]])
    down = run(lambda v: jnp.argsort(v, descending=True), x)
    assert down.tolist() == [1, 5, 7, 4, 0, 2, 3, 8, 9, 6]


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32])
def test_limits_of_integers(dtype: Any, run: Any, same: Any) -> None:
    limits = np.iinfo(dtype)
    x = np.array([limits.max, 0, limits.min, 1, limits.max - 1, limits.max // 2, 7], dtype)
    same(run(jnp.sort, x), np.sort(x))
    same(run(lambda v: jnp.sort(v, descending=True), x), np.sort(x)[::-1])


def test_64_bits() -> None:
    with vj.enable_x64():
        for x in (
            np.array([2**62, -(2**62), 0, -1, 1, 2**40], np.int64),
            np.array([2**63, 2**63 - 1, 0, 2**64 - 1], np.uint64),
            np.array([1e300, -1e-300, -0.0, 0.0, np.nan, -np.inf], np.float64),
        ):
            got = vj.jit(jnp.sort)(x)
            assert got.dtype == x.dtype
            assert bits(got) == bits(np.sort(x, kind="stable"))


def test_booleans_and_nothing(run: Any, same: Any) -> None:
    x = np.array([True, False, True])
    same(run(jnp.sort, x), np.sort(x))
    same(run(jnp.sort, np.zeros((0, 3), np.float32)), np.zeros((0, 3), np.float32))
    same(run(lambda v: jnp.sort(v, axis=0), np.zeros((0, 3), np.int32)), np.zeros((0, 3), np.int32))
    same(run(jnp.argsort, np.ones((2, 1), np.float32)), np.zeros((2, 1), np.int32))


def test_payloads_follow_the_keys(run: Any, same: Any) -> None:
    key, payload = TIES, np.arange(28, dtype=np.float32).reshape(4, 7)
    order = np.argsort(key, axis=0, kind="stable")
    got = run(lambda k, v: lax.sort((k, v), dimension=0), key, payload)
    same(got[0], np.take_along_axis(key, order, 0))
    same(got[1], np.take_along_axis(payload, order, 0))


def test_several_keys_are_compared_in_order(run: Any, same: Any) -> None:
    first, second = RNG.integers(0, 3, (2, 50)).astype(np.int32)
    payload = np.arange(50, dtype=np.int32)
    got = run(lambda *v: lax.sort(v, num_keys=2), first, second, payload)
    order = np.lexsort((second, first)).astype(np.int32)
    same(got[0], first[order])
    same(got[1], second[order])
    same(got[2], order)


@pytest.mark.parametrize("k", [0, 1, 3, 7])
@pytest.mark.parametrize("axis", [0, -1])
def test_largest_k(k: int, axis: int, run: Any, same: Any) -> None:
    k = min(k, TIES.shape[axis])
    values, positions = run(lambda x: lax.top_k(x, k, axis=axis), TIES)
    want = np.argsort(-TIES, axis=axis, kind="stable").astype(np.int32)
    want = np.take(want, range(k), axis)
    same(positions, want)
    same(values, np.take_along_axis(TIES, want, axis))


def test_largest_takes_nan_first() -> None:
    for k in (1, 2):
        assert np.asarray(lax.top_k(SPECIAL, k)[1]).tolist() == [1, 5][:k]
    assert np.asarray(lax.top_k(np.array([False, True, True]), 1)[1]).tolist() == [1]


@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("axis", [None, 0, -1, (0, 2)])
def test_median(axis: Any, keepdims: bool, run: Any, same: Any) -> None:  # noqa: FBT001
    want = np.asarray(np.median(X, axis=axis, keepdims=keepdims), np.float32)
    same(run(lambda x: jnp.median(x, axis=axis, keepdims=keepdims), X), want, rtol=1e-6)


def test_median_of_nan_is_nan() -> None:
    x = np.array([[1, np.nan, 3], [1, 2, 3]], np.float32)
    np.testing.assert_array_equal(np.asarray(jnp.median(x, axis=1)), [np.nan, 2])
    with pytest.raises(ArgumentError, match="no elements"):
        jnp.median(np.zeros((0,), np.float32))


def test_derivatives_move_with_the_elements() -> None:
    x = np.array([1, 1, 0, 1], np.float32)
    weights = np.arange(4, dtype=np.float32)
    for function in (jnp.sort, lambda v: lax.top_k(v, 4)[0][::-1]):
        got = vj.grad(lambda v, f=function: (f(v) * weights).sum())(x)
        stable = [1, 2, 0, 3] if function is jnp.sort else [3, 2, 0, 1]
        assert np.asarray(got).tolist() == stable
    tangent = vj.jvp(jnp.sort, (x,), (weights,))[1]
    assert np.asarray(tangent).tolist() == [2, 0, 1, 3]


@pytest.mark.parametrize("axis", [0, 1])
def test_derivatives_are_slopes(axis: int) -> None:
    with vj.enable_x64():
        x = RNG.permutation(20).reshape(4, 5) * 1.0
        weights = RNG.normal(size=(4, 5))

        def value(v: Any) -> Any:
            return (jnp.sort(v, axis=axis) * weights).sum() + lax.top_k(v, 2, axis=axis)[0].sum()

        got = np.asarray(vj.grad(value)(x))
        for at in np.ndindex(x.shape):
            step = np.zeros_like(x)
            step[at] = 1e-3
            slope = (float(value(x + step)) - float(value(x - step))) / 2e-3
            assert abs(slope - got[at]) < 1e-8


def test_second_derivatives() -> None:
    x = RNG.permutation(12).reshape(2, 6).astype(np.float32)

    def cube(v: Any) -> Any:
        return (lax.top_k(v, 2)[0] ** 3).sum() + (jnp.sort(v, axis=0) ** 3).sum()

    got = np.asarray(vj.grad(lambda v: (vj.grad(cube)(v) * x).sum())(x))
    inside = np.argsort(np.argsort(-x, axis=1), axis=1) < 2
    np.testing.assert_allclose(got, 6 * x * x * (1 + inside), rtol=1e-6)


def test_batches_of_sorts(same: Any) -> None:
    want = np.sort(X, axis=1)
    for fn in (vj.vmap(lambda v: jnp.sort(v, axis=0)), vj.jit(vj.vmap(lambda v: jnp.sort(v, 0)))):
        same(np.asarray(fn(X)), want)
    grads = vj.vmap(vj.grad(lambda v: (jnp.sort(v) * np.arange(5)).sum()))(X[0])
    ranks = np.argsort(np.argsort(X[0], axis=1), axis=1)
    same(np.asarray(grads), ranks.astype(np.float32))


def test_errors_name_what_was_given() -> None:
    with pytest.raises(ShapeError, match="axis 2"):
        jnp.sort(TIES, axis=2)
    with pytest.raises(ShapeError, match="one shape"):
        lax.sort((TIES, TIES[0]))
    with pytest.raises(ArgumentError, match="3 keys of 2"):
        lax.sort((TIES, TIES), num_keys=3)
    with pytest.raises(ArgumentError, match="k = 8"):
        lax.top_k(TIES, 8)
    with pytest.raises(ArgumentError, match="stable"):
        jnp.sort(TIES, kind="quicksort")  # type: ignore[arg-type]


LENGTHS = (1, 2, 3, 7, 8, 9, 31, 33, 64, 65, 127, 130)


def test_lengths_about_powers_of_two(device: str) -> None:
    arrays = [RNG.integers(0, 20, (2, n)).astype(np.float32) for n in LENGTHS]
    arrays = [vj.device_put(a, device) for a in arrays]
    got = vj.jit(lambda *xs: [jnp.argsort(x) for x in xs])(*arrays)
    for x, order in zip(arrays, got, strict=True):
        want = np.argsort(np.asarray(x), axis=1, kind="stable")
        np.testing.assert_array_equal(np.asarray(order), want)


ALL = (np.float32, np.float16, ml_dtypes.bfloat16, np.int8, np.uint8, np.int16, np.uint16)


def test_every_dtype_in_both_directions(device: str) -> None:
    def both(*xs: Any) -> Any:
        return [jnp.argsort(x, axis=0, descending=d) for x in xs for d in (False, True)]

    arrays = [_edges(np.dtype(d)) for d in (*ALL, np.int32, np.uint32, np.bool_)]
    got = vj.jit(both)(*[vj.device_put(a, device) for a in arrays])
    for number, order in enumerate(got):
        x = arrays[number // 2].astype(np.float64)
        down = np.argsort(np.flip(x, 0), axis=0, kind="stable")
        down = np.flip(len(x) - 1 - down, 0)
        want = down if number % 2 else np.argsort(x, axis=0, kind="stable")
        np.testing.assert_array_equal(np.asarray(order), want, str(arrays[number // 2].dtype))


def _edges(dtype: np.dtype[Any]) -> Array:
    if dtypes.is_float(dtype):
        return RNG.choice(np.append(SPECIAL, [1e-3, -7, 100]).astype(dtype), (19, 3))
    if dtype == np.bool_:
        return RNG.random((19, 3)) < 0.5
    limits = np.iinfo(dtype)
    edges = [limits.min, limits.max, 0, 1, limits.max // 2, limits.max // 2 + 1]
    return RNG.choice(np.array(edges, dtype), (19, 3))


def test_cotangents_go_back_where_elements_came_from(device: str) -> None:
    x = RNG.permutation(60).reshape(4, 5, 3).astype(np.float32)
    weights = RNG.normal(size=x.shape).astype(np.float32)

    def value(v: Any, w: Any) -> Any:
        top = lax.top_k(v, 2, axis=1)[0]
        return (jnp.sort(v, axis=1) * w).sum() + (top * w[:, :2]).sum()

    operands = [vj.device_put(a, device) for a in (x, weights)]
    got = np.asarray(vj.jit(vj.grad(value))(*operands))
    ranks = np.argsort(np.argsort(x, axis=1), axis=1)
    want = np.take_along_axis(weights, ranks, 1)
    first = np.take_along_axis(weights, np.maximum(4 - ranks, 0), 1)
    want = want + np.where(ranks >= 3, first, 0)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    each = vj.vmap(vj.grad(lambda v, w: (jnp.sort(v, axis=0) * w).sum()))
    got = np.asarray(vj.jit(each)(*operands))
    np.testing.assert_array_equal(got, np.take_along_axis(weights, ranks, 1))


def test_gradients_of_long_sorts_add_nothing() -> None:
    grad = vj.make_ir(vj.grad(lambda v: (jnp.sort(v) * v).sum()))(np.ones(9, np.float32))
    assert "put_back" in str(grad)
    assert "scatter_add" not in str(grad)


def test_long_lines_on_the_cpu() -> None:
    x = RNG.normal(size=100_000).astype(np.float32)
    x[::97] = x[5]
    with vj.default_device("cpu"):
        values, order = vj.jit(lambda v: (jnp.sort(v), jnp.argsort(v)))(x)
    assert bits(values) == bits(np.sort(x))
    np.testing.assert_array_equal(np.asarray(order), np.argsort(x, kind="stable"))


@pytest.mark.parametrize("shape", [(700, 40), (90, 300)], ids=str)
def test_lines_are_shared_by_tasks(shape: tuple[int, int]) -> None:
    x = RNG.permutation(shape[0] * shape[1]).reshape(shape).astype(np.float32)
    weights = np.arange(shape[1], dtype=np.float32)
    with vj.default_device("cpu"):
        order = vj.jit(jnp.argsort)(x)
        grad = vj.jit(vj.grad(lambda v: (jnp.sort(v) * weights).sum()))(x)
    want = np.argsort(x, axis=1)
    np.testing.assert_array_equal(np.asarray(order), want)
    np.testing.assert_array_equal(np.asarray(grad), np.argsort(want, axis=1))


WORDS = [np.float32, np.float64, np.int8, np.uint64]


@pytest.mark.parametrize(
    ("place", "dtype"), [("reference", np.float32), *[("cpu", d) for d in WORDS]]
)
def test_long_lines_are_sorted_by_digits(place: str, dtype: Any) -> None:
    with vj.enable_x64():
        x = (RNG.normal(size=(520, 2)) * 100).astype(np.int64).astype(dtype)
        if dtype == np.float32:
            x[::7], x[3::9] = np.nan, -0.0
        get = vj.jit(lambda v: [jnp.argsort(v, 0), jnp.argsort(v, 0, descending=True)])
        up, down = get(vj.device_put(x, place))
    np.testing.assert_array_equal(np.asarray(up), np.argsort(x, axis=0, kind="stable"))
    want = 519 - np.argsort(x[::-1], axis=0, kind="stable")[::-1]
    np.testing.assert_array_equal(np.asarray(down), want)
