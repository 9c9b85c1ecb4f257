"""Work that depends on constants alone is done once, when the function is compiled."""

from __future__ import annotations

import numpy as np
import pytest

import vkjit as vj
import vkjit.numpy as jnp
from vkjit.errors import ArgumentError

WEIGHTS = np.random.default_rng(0).standard_normal((96, 80)).astype(np.float32)
X = np.random.default_rng(1).standard_normal((64, 80)).astype(np.float32)


def _product():
    weights = vj.device_put(WEIGHTS, "cpu")
    return vj.jit(lambda x: jnp.tanh(x @ weights.T))


def test_constant_weights_are_packed_once():
    with vj.default_device("cpu"):
        fn = _product()
        lowered = fn.lower(X)
        assert lowered.compiled.setup is not None
        assert [s.kernel.name for s in lowered.compiled.setup.steps] == ["pack"]
        assert [s.kernel.name for s in lowered.plan.steps] == ["gemm"]
        assert lowered.memory().constants >= 2 * WEIGHTS.nbytes
        want = np.tanh(X.astype(np.float64) @ WEIGHTS.T)
        np.testing.assert_allclose(fn(X), want, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(fn(X), fn(X))


def test_a_constant_of_several_products_is_packed_once_for_all():
    square = np.random.default_rng(2).standard_normal((96, 96)).astype(np.float32)

    def layers(x):
        for _ in range(4):
            x = jnp.tanh(x @ weights)
        return x

    with vj.default_device("cpu"):
        weights = vj.device_put(square, "cpu")
        x = np.random.default_rng(3).standard_normal((64, 96)).astype(np.float32)
        fn = vj.jit(layers)
        lowered = fn.lower(x)
        assert lowered.compiled.setup is not None
        assert [s.kernel.name for s in lowered.compiled.setup.steps] == ["pack"]
        assert lowered.memory().constants < 3 * square.nbytes
        want = x.astype(np.float64)
        for _ in range(4):
            want = np.tanh(want @ square)
        np.testing.assert_allclose(fn(x), want, rtol=1e-4, atol=1e-4)


def test_packed_constants_keep_to_their_memory(monkeypatch):
    monkeypatch.setenv("VKJIT_PREPACK_BYTES", "0")
    with vj.default_device("cpu"):
        assert _product().lower(X).compiled.setup is None


def test_an_impossible_limit_is_refused(monkeypatch):
    monkeypatch.setenv("VKJIT_PREPACK_BYTES", "lots")
    with vj.default_device("cpu"), pytest.raises(ArgumentError, match="lots"):
        _product().lower(X)
