"""linear_transpose: the transpose of a linear function, which is never run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import vkjit as vj
import vkjit.numpy as jnp
from vkjit.errors import ArgumentError, DTypeError, ShapeError

SCALAR = vj.ShapeDtypeStruct((), np.float32)


def test_scalars_as_in_jax():
    transposed = vj.linear_transpose(lambda x, y: 0.5 * x - 0.5 * y, SCALAR, SCALAR)
    x, y = transposed(1.0)
    assert (float(x), float(y)) == (0.5, -0.5)


def test_products_and_trees():
    a = np.arange(6, dtype=np.float32).reshape(2, 3)

    def f(tree: Any, z: Any) -> Any:
        return {"u": a @ tree["x"], "v": tree["y"].sum() + z[::2].sum()}

    of = vj.ShapeDtypeStruct
    given = {"x": of((3,), np.float32), "y": of((2, 2), np.float32)}
    transposed = vj.linear_transpose(f, given, np.zeros(4, np.float32))
    ct = {"u": np.array([1, 2], np.float32), "v": np.float32(3)}
    tree, z = transposed(ct)
    np.testing.assert_array_equal(tree["x"], a.T @ ct["u"])
    np.testing.assert_array_equal(tree["y"], np.full((2, 2), 3))
    np.testing.assert_array_equal(z, [3, 0, 3, 0])


def test_is_the_adjoint_under_jit_and_vmap(device: str):
    rng = np.random.default_rng(0)
    a, x, ct = (rng.standard_normal(s).astype(np.float32) for s in ((5, 4), (4,), (5,)))

    def f(v: Any) -> Any:
        return jnp.cumsum(a @ v)

    with vj.default_device(device):
        transposed = vj.linear_transpose(f, x)
        (back,) = vj.jit(transposed)(ct)
        np.testing.assert_allclose(np.vdot(back, x), np.vdot(ct, np.asarray(f(x))), rtol=1e-4)
        (many,) = vj.jit(vj.vmap(transposed))(np.stack([ct, -ct]))
        np.testing.assert_allclose(many, np.stack([back, -np.asarray(back)]), rtol=1e-4, atol=1e-6)


def test_closed_over_arrays_are_its_leaves():
    a = jnp.asarray([2.0, 3.0])
    transposed = vj.linear_transpose(lambda x: a * x, np.zeros(2, np.float32))
    assert [np.shape(v) for v in vj.tree.leaves(transposed)] == [(2,)]
    doubled = vj.tree.map(lambda v: v * 2, transposed)
    np.testing.assert_array_equal(doubled(np.ones(2, np.float32))[0], [4, 6])


def test_nothing_runs():
    def f(x: Any) -> Any:
        assert not isinstance(x, np.ndarray)
        return x * 2.0

    (back,) = vj.linear_transpose(f, np.full(2, np.nan, np.float32))(np.ones(2, np.float32))
    np.testing.assert_array_equal(back, [2, 2])


@pytest.mark.parametrize(
    ("f", "name"),
    [(lambda x: x * x, "mul"), (jnp.sin, "cos"), (lambda x: jnp.maximum(x, 0.0), "")],
)
def test_what_is_not_linear_is_refused(f: Any, name: str):
    with pytest.raises(ArgumentError, match=rf"not linear.*argument leaf 0, f32\[3\] \({name}"):
        vj.linear_transpose(f, np.ones(3, np.float32))


def test_what_does_not_fit_is_refused():
    with pytest.raises(DTypeError, match=r"argument \[0\] is i32\[\], expected a float"):
        vj.linear_transpose(lambda x: x * 2, np.int32(1))
    with pytest.raises(DTypeError, match="it returned i32"):
        vj.linear_transpose(lambda x: x.astype("int32"), np.float32(1))
    transposed = vj.linear_transpose(lambda x: x * 2, np.ones(3, np.float32))
    with pytest.raises(ShapeError, match="cotangent"):
        transposed(np.ones(2, np.float32))
