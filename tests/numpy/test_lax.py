"""The functions with explicit axes, and slices whose start is known at run time only."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import vkjit.numpy as jnp
from vkjit import lax
from vkjit.errors import DTypeError, ShapeError

X = np.arange(24, dtype=np.float32).reshape(4, 6)

POSITIONS = np.array([[0, 1, 2], [0, 1, 2]], np.int32)


@pytest.mark.parametrize("start", [0, 3, 100, -1, -100])
def test_dynamic_slices_clamp(start: int, run: Any, same: Any) -> None:
    at = min(max(start + 6 if start < 0 else start, 0), 2)
    want, new = X[1:3, at : at + 4], -np.ones((2, 4), np.float32)
    changed = X.copy()
    changed[1:3, at : at + 4] = new
    for begin in (start, jnp.asarray(start)):
        got = run(lambda x, s=begin: lax.dynamic_slice(x, (1, s), (2, 4)), jnp.asarray(X))
        same(got, want)
        out = run(lambda x, s=begin: lax.dynamic_update_slice(x, new, (1, s)), jnp.asarray(X))
        same(out, changed)


def test_dynamic_positions_of_one_axis(run: Any, same: Any) -> None:
    x, two = jnp.asarray(X), jnp.asarray(2)
    same(run(lambda v, i: lax.dynamic_index_in_dim(v, i, 1), x, two), X[:, 2:3])
    same(run(lambda v, i: lax.dynamic_index_in_dim(v, i, 0, keepdims=False), x, two), X[2])
    same(run(lambda v, i: lax.dynamic_slice_in_dim(v, i, 3, 1), x, two), X[:, 2:5])
    want = X.copy()
    want[2] = 7
    row = np.full(6, 7, np.float32)
    same(run(lambda v, i: lax.dynamic_update_index_in_dim(v, row, i, 0), x, two), want)
    starts = jnp.asarray(np.array([1, 2], np.int32))
    same(run(lambda v, s: lax.dynamic_slice(v, s, (2, 2)), x, starts), X[1:3, 2:4])


CALLS: dict[str, Any] = {
    "slice": (lambda x: lax.slice(x, (1, 0), (4, 6), (2, 3)), X[1:4:2, 0:6:3]),
    "slice_in_dim": (lambda x: lax.slice_in_dim(x, -4, None, 2, 1), X[:, -4::2]),
    "index_in_dim": (lambda x: lax.index_in_dim(x, -1, 0), X[-1:]),
    "pad": (
        lambda x: lax.pad(x, 9.0, ((0, 1, 0), (-1, -2, 0))),
        np.pad(X, ((0, 1), (0, 0)), constant_values=9)[:, 1:-2],
    ),
    "rev": (lambda x: lax.rev(x, (0,)), X[::-1]),
    "transpose": (lambda x: lax.transpose(x, (1, 0)), X.T),
    "reshape": (lambda x: lax.reshape(x, (3, 8)), X.reshape(3, 8)),
    "broadcast": (lambda x: lax.broadcast(x, (2,)), np.stack([X, X])),
    "broadcast_in_dim": (
        lambda x: lax.broadcast_in_dim(x, (4, 2, 6), (0, 2)),
        np.stack([X, X], 1),
    ),
    "expand_dims": (lambda x: lax.expand_dims(x, (1,)), X[:, None]),
    "squeeze": (lambda x: lax.squeeze(x[:, :1], (1,)), X[:, 0]),
    "concatenate": (lambda x: lax.concatenate([x, x], 1), np.concatenate([X, X], 1)),
    "clamp": (lambda x: lax.clamp(2.0, x, 5.0), np.clip(X, 2, 5)),
    "select": (lambda x: lax.select(x > 3, x, -x), np.where(X > 3, X, -X)),
    "reduce_sum": (lambda x: lax.reduce_sum(x, (0,)), X.sum(0)),
    "reduce_max": (lambda x: lax.reduce_max(x, (1,)), X.max(1)),
    "argmax": (lambda x: lax.argmax(x, 1, np.int32), X.argmax(1).astype(np.int32)),
    "cumsum": (lambda x: lax.cumsum(x, 1, reverse=True), X[:, ::-1].cumsum(1)[:, ::-1]),
    "cummax": (lambda x: lax.cummax(-x, 0), np.maximum.accumulate(-X)),
    "rsqrt": (lambda x: lax.rsqrt(x + 1), 1 / np.sqrt(X + 1)),
    "logistic": (lambda x: lax.logistic(x - 9), 1 / (1 + np.exp(9 - X))),
    "erf": (lambda x: lax.erf(x / 9), np.vectorize(math.erf)(X / 9).astype(np.float32)),
    "erf_inv": (lambda x: lax.erf_inv(lax.erf(x / 9)), X / 9),
    "integer_pow": (lambda x: lax.integer_pow(x, 3), X**3),
    "full_like": (lambda x: lax.full_like(x, 3), np.full_like(X, 3)),
    "iota": (
        lambda x: lax.broadcasted_iota("int32", (2, 3), 1),
        np.array([[0, 1, 2]] * 2, np.int32),
    ),
    "bitcast": (lambda x: lax.bitcast_convert_type(x, "int32"), X.view(np.int32)),
    "convert": (lambda x: lax.convert_element_type(x, "int8"), X.astype(np.int8)),
    "stop_gradient": (lambda x: lax.stop_gradient({"a": x})["a"], X),
    "batch_matmul": (lambda x: lax.batch_matmul(x[None], x.T[None]), (X @ X.T)[None]),
    "dot_general": (
        lambda x: lax.dot_general(x, x, (((1,), (1,)), ((0,), (0,)))),
        (X * X).sum(1),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_functions_with_explicit_axes(name: str, run: Any, same: Any) -> None:
    call, want = CALLS[name]
    same(run(call, jnp.asarray(X)), want, rtol=1e-5)


def test_integer_division_truncates(run: Any, same: Any) -> None:
    x, y = jnp.asarray([-7, 7, 5]), jnp.asarray([2, -2, 0])
    same(run(lax.div, x, y), np.array([-3, -3, -1], np.int32))
    same(run(lax.rem, x, y), np.array([-1, 1, 5], np.int32))
    bits = jnp.asarray(np.array([1, 255, 0], np.uint32))
    same(run(lax.clz, bits), np.array([31, 24, 32], np.uint32))
    same(run(lax.population_count, bits), np.array([1, 8, 0], np.uint32))
    same(run(lambda v: lax.shift_right_logical(v, 1), x), np.array([2147483644, 3, 2], np.int32))


def test_dtypes_and_shapes_that_do_not_fit_are_named() -> None:
    with pytest.raises(DTypeError, match=r"div: operands f32\[4,6\], i32\[2\] have different"):
        lax.div(X, np.array([1, 2], np.int32))
    with pytest.raises(ShapeError, match=r"dynamic_slice: 2 starts and sizes \(5, 1\)"):
        lax.dynamic_slice(X, (0, 0), (5, 1))
    with pytest.raises(DTypeError, match="expected an integer of rank 0"):
        lax.dynamic_slice(X, (0.5, 0), (1, 1))
    with pytest.raises(ShapeError, match=r"one \(low, high, interior\)"):
        lax.pad(X, 0.0, ((0, 0, 0),))
    with pytest.raises(ShapeError, match=r"index 9 is out of range for axis 0"):
        lax.index_in_dim(X, 9)
