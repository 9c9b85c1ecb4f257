"""tap: gradients of inner values in arrays of the caller's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import vkjit as vj
import vkjit.numpy as jnp
from vkjit import lax
from vkjit.errors import DTypeError, ShapeError, TracerError

W = np.array([[0.5, -1.0, 2.0], [1.5, 0.25, -0.5]], np.float32)
X = np.array([[1.0, -2.0], [0.5, 3.0], [2.0, 0.0]], np.float32)


def loss(w: Any, x: Any, acc: Any = None) -> Any:
    hidden = jnp.tanh(x @ w)
    if acc is not None:
        hidden = vj.tap(hidden, acc)
    return (hidden**3).sum()


def inner() -> Any:
    """The gradient of the hidden layer, by hand."""
    return 3 * np.tanh(X @ W) ** 2


def ref(*shape: int, dtype: Any = np.float32) -> vj.Ref:
    return vj.Ref(jnp.zeros(shape, dtype))


def test_the_gradient_of_an_inner_value_arrives_and_adds_up(device: str):
    with vj.default_device(device):
        acc = ref(3, 3)
        step = vj.jit(lambda w, x, acc: vj.grad(loss)(w, x, acc))
        for times in (1, 2):
            got = step(W, X, acc)
            np.testing.assert_allclose(got, vj.grad(loss)(W, X), rtol=2e-5, atol=1e-6)
            np.testing.assert_allclose(acc[...], times * inner(), rtol=2e-5)


def test_it_equals_a_second_grad():
    acc = ref(3, 3)
    vj.value_and_grad(lambda w: loss(w, X, acc))(W)
    shifted = vj.grad(lambda z: ((jnp.tanh(X @ W) + z) ** 3).sum())(jnp.zeros((3, 3)))
    np.testing.assert_allclose(acc[...], shifted, rtol=1e-6)


def test_a_host_buffer_is_written(device: str):
    with vj.default_device(device):
        acc = np.zeros((3, 3))
        step = vj.jit(vj.value_and_grad(lambda w, x: loss(w, x, acc)))
        for times in (1, 2):
            value, _ = step(W, X)
            np.asarray(value)
            np.testing.assert_allclose(acc, times * inner(), rtol=2e-5)
    assert acc.dtype == np.float64
    eager = np.zeros((3, 3), np.float32)
    vj.grad(lambda w: loss(w, X, eager))(W)
    np.testing.assert_allclose(eager, inner(), rtol=2e-5)


def recurrent(w: Any, x: Any, acc: Any) -> Any:
    def body(c: Any, v: Any) -> Any:
        c = vj.tap(jnp.sin(c * w) + v, acc)
        return c, c**2

    last, ys = lax.scan(body, x, jnp.arange(4.0))
    return last + ys.sum()


def unrolled(w: float, x: float) -> float:
    """The sum of dL/dc over all turns, backward by hand."""
    cs, before = [], []
    c = x
    for t in range(4):
        before.append(c)
        c = np.sin(c * w) + t
        cs.append(c)
    total, g = 0.0, 1.0
    for t in reversed(range(4)):
        g = g + 2 * cs[t]
        total += g
        g = g * np.cos(before[t] * w) * w
    return total


def test_inside_a_scan_all_turns_are_added(device: str):
    with vj.default_device(device):
        acc = ref()
        vj.jit(lambda w, x, a: vj.grad(recurrent)(w, x, a))(0.7, 0.3, acc)
        np.testing.assert_allclose(float(acc[...]), unrolled(0.7, 0.3), rtol=1e-5)
        host = np.zeros(())
        np.asarray(vj.jit(vj.grad(lambda w: recurrent(w, 0.3, host)))(0.7))
        np.testing.assert_allclose(host, unrolled(0.7, 0.3), rtol=1e-5)


def test_around_a_scan_of_steps_the_ref_is_a_carry(device: str):
    @vj.jit
    def train(w: Any, xs: Any, acc: Any) -> Any:
        def step(w: Any, x: Any) -> Any:
            return w - 0.1 * vj.grad(loss)(w, x, acc), None

        return lax.scan(step, w, xs)[0]

    with vj.default_device(device):
        acc = ref(3, 3)
        got = train(W, np.stack([X, -X]), acc)
        w, want = jnp.asarray(W), np.zeros((3, 3), np.float32)
        for x in (X, -X):
            one = ref(3, 3)
            w = w - 0.1 * vj.grad(loss)(w, x, one)
            want += np.asarray(one[...])
        np.testing.assert_allclose(got, w, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(acc[...], want, rtol=1e-4, atol=1e-6)


def test_branches_checkpoints_and_batches():
    acc = ref(2)

    def f(x: Any, flag: Any) -> Any:
        y = lax.cond(flag, lambda v: vj.tap(v * 2, acc), lambda v: v * 3, x)
        return vj.checkpoint(lambda v: vj.tap(jnp.sin(v), acc) * 5)(y).sum()

    x = np.array([0.2, 0.4], np.float32)
    vj.grad(f)(x, True)
    np.testing.assert_allclose(acc[...], 5 + 5 * np.cos(2 * x), rtol=1e-5)
    vj.grad(f)(x, False)
    np.testing.assert_allclose(acc[...], 10 + 5 * np.cos(2 * x), rtol=1e-5)
    total = ref()
    vj.grad(lambda x: vj.vmap(lambda v: vj.tap(v, total) ** 2)(x).sum())(x)
    np.testing.assert_allclose(float(total[...]), 2 * x.sum(), rtol=1e-6)


def test_nothing_is_kept_for_it_and_nothing_is_there_without_a_gradient():
    acc = ref(3, 3)
    plain = vj.vjp(loss, W, X)[1]
    tapped = vj.vjp(lambda w, x: loss(w, x, acc), W, X)[1]
    sizes = [[np.shape(v) for v in vj.tree.leaves(p)] for p in (plain, tapped)]
    assert sizes[0] == sizes[1]
    lowered = vj.jit(lambda w, x: loss(w, x, acc)).lower(W, X)
    assert not lowered.constants
    assert lowered.memory() == vj.jit(loss).lower(W, X).memory()
    assert float(vj.jit(lambda w, x: loss(w, x, acc))(W, X)) == float(vj.jit(loss)(W, X))
    vj.jvp(lambda w: loss(w, X, acc), (W,), (W,))
    assert float(loss(W, X, acc)) == float(loss(W, X))
    np.testing.assert_array_equal(acc[...], np.zeros((3, 3)))
    tapped(np.float32(2))
    np.testing.assert_allclose(acc[...], 2 * inner(), rtol=2e-5)


def test_sums_are_in_the_accumulators_dtype():
    acc = ref(2)
    x = np.array([0.25, 0.5], np.float16)
    vj.grad(lambda x: (vj.tap(x, acc) * 3).sum())(x)
    assert acc.dtype == np.float32
    np.testing.assert_array_equal(acc[...], [3, 3])


def test_what_cannot_be_is_refused():
    with pytest.raises(ShapeError, match=r"tap: x is f32\[3,2\], acc f32\[2\]"):
        vj.tap(X, ref(2))
    with pytest.raises(DTypeError, match="expected floats"):
        vj.tap(X, np.zeros((3, 2), np.int32))
    with pytest.raises(DTypeError, match="expected a Ref or a writable NumPy array"):
        vj.tap(X, jnp.zeros((3, 2)))
    acc = ref()
    with pytest.raises(TracerError, match="made outside the traced function"):
        vj.vmap(vj.grad(lambda v: vj.tap(v, acc) ** 2))(X[0])
    with pytest.raises(TracerError, match="pass the Ref to the jitted function"):
        vj.jit(vj.grad(lambda v: vj.tap(v, acc) ** 2))(1.0)
    assert float(acc[...]) == 0
