"""Cotangents of slices: joined where they follow each other, padded and added elsewhere."""

from __future__ import annotations

import numpy as np
import pytest

import vkjit as vj
import vkjit.numpy as jnp

X = np.arange(24, dtype=np.float32).reshape(2, 12) - 7


def rotated(x):
    low, high = x[:, :6], x[:, 6:]
    return jnp.concatenate([-high * 2, low * 3], axis=-1)


def middle(x):
    return jnp.concatenate([x[:, 3:5] * 2, x[:, 5:9] * x[:, 5:9]], axis=1)


def apart(x):
    return jnp.concatenate([x[:, :3] * 2, x[:, 5:] * 5], axis=1)


def overlapping(x):
    return x[:, :8] * x[:, 4:]


def both_axes(x):
    return x[:1, :6] * x[1:, 6:]


def strided(x):
    return x[:, ::2] * x[:, 1::2]


def whole_too(x):
    return jnp.concatenate([x[:, :6] * x[:, 6:], x * x], axis=1)


@pytest.mark.parametrize(
    "function", [rotated, middle, apart, overlapping, both_axes, strided, whole_too]
)
def test_gradients_equal_differences(function):
    def loss(x):
        y = function(x)
        return jnp.sum(y * y)

    with vj.enable_x64():
        x = X.astype(np.float64)
        grad = np.asarray(vj.grad(loss)(x))
        step = np.random.default_rng(0).standard_normal(x.shape)
        slope = (float(loss(x + 1e-6 * step)) - float(loss(x - 1e-6 * step))) / 2e-6
    np.testing.assert_allclose(np.sum(grad * step), slope, rtol=1e-6)


def primitives(function) -> list[str]:
    program = vj.make_ir(vj.grad(lambda x: jnp.sum(function(x) * X)))(X)
    return [eqn.prim.name for eqn in program.eqns]


def test_slices_side_by_side_become_one_concatenation():
    assert "pad" not in primitives(rotated)


def test_a_run_inside_the_array_is_padded_once():
    def inner(x):
        return jnp.concatenate([x[:, 3:5] * 2, x[:, 5:9] * 3, x[:, :6] * 0], axis=1)

    def alone(x):
        return jnp.pad(jnp.concatenate([x[:, 3:5] * 2, x[:, 5:9] * 3], axis=1), ((0, 0), (0, 6)))

    assert primitives(alone).count("pad") == 2  # the function's own and that of the run
    assert primitives(inner).count("pad") == 3  # they overlap
