"""Derivatives of functions over pytrees against formulas, nested in every order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import pytest

import vkjit as vj
from vkjit import numpy as vnp
from vkjit.errors import ArgumentError, DTypeError, ShapeError

X = np.array([0.3, -1.2, 2.0], np.float64)


@pytest.fixture(autouse=True)
def wide() -> Generator[None]:
    """Formulas are compared in float64, on the host."""
    with vj.enable_x64(), vj.default_device("cpu"):
        yield


def cubes(x: Any) -> Any:
    """f(x) = sum x^3: gradient 3 x^2, Hessian diag(6 x)."""
    return vnp.sum(x**3)


def outer(x: Any) -> Any:
    """f(x)_ij = x_i sin x_j."""
    return x[:, None] * vnp.sin(x)[None, :]


def outer_jacobian(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    eye = np.eye(len(x))
    first = np.einsum("ik,j->ijk", eye, np.sin(x))
    return first + np.einsum("i,jk,j->ijk", x, eye, np.cos(x))


def close(got: Any, want: Any) -> None:
    np.testing.assert_allclose(np.asarray(got), want, 1e-12, 1e-12)


# -- gradients -------------------------------------------------------------------------------------


def test_gradient_and_value() -> None:
    close(vj.grad(cubes)(X), 3 * X**2)
    value, gradient = vj.value_and_grad(cubes)(X)
    close(value, (X**3).sum())
    close(gradient, 3 * X**2)


def test_gradients_have_the_structure_of_the_argument() -> None:
    def fn(params: Any, scale: Any) -> Any:
        return vnp.sum(params["a"] * params["b"][0]) * scale

    params = {"a": X, "b": (2 * X, X)}
    gradient = vj.grad(fn)(params, 3.0)
    close(gradient["a"], 6 * X)
    close(gradient["b"][0], 3 * X)
    close(gradient["b"][1], np.zeros(3))
    assert isinstance(gradient["b"], tuple)


def test_argnums() -> None:
    def fn(x: Any, y: Any, z: Any) -> Any:
        return vnp.sum(x * y**2 * z)

    x, y, z = X, X + 1, X + 2
    first, last = vj.grad(fn, (0, 2))(x, y, z)
    close(first, y**2 * z)
    close(last, x * y**2)
    close(vj.grad(fn, -2)(x, y, z), 2 * x * y * z)
    (only,) = vj.grad(fn, (1,))(x, y, z)
    close(only, 2 * x * y * z)
    for bad in (3, (0, 0), (0, -3), -4):
        with pytest.raises(ArgumentError, match=r"argnums .* for a call with 3 positional"):
            vj.grad(fn, bad)(x, y, z)


def test_auxiliary_data() -> None:
    def fn(x: Any) -> Any:
        return cubes(x), {"norm": vnp.sum(x), "count": 3}

    gradient, aux = vj.grad(fn, has_aux=True)(X)
    close(gradient, 3 * X**2)
    close(aux["norm"], X.sum())
    (value, again), _ = vj.value_and_grad(fn, has_aux=True)(X)
    close(value, (X**3).sum())
    assert int(again["count"]) == 3
    with pytest.raises(ArgumentError, match="expected a pair"):
        vj.grad(cubes, has_aux=True)(X)


def test_keyword_arguments_are_held_fixed() -> None:
    close(vj.grad(lambda x, *, scale: cubes(x) * scale)(X, scale=2.0), 6 * X**2)


def test_values_closed_over_are_constants() -> None:
    table = vnp.asarray(X)
    close(vj.grad(lambda x: vnp.sum(x * table * table))(X), X**2)


def test_stop_gradient() -> None:
    close(vj.grad(lambda x: vnp.sum(x * vj.stop_gradient(x)))(X), X)


# -- refusals --------------------------------------------------------------------------------------


def test_a_gradient_needs_a_scalar() -> None:
    with pytest.raises(ShapeError, match=r"returned f64\[3\], expected one float of rank 0"):
        vj.grad(lambda x: x * 2)(X)
    with pytest.raises(ShapeError, match=r"returned f64\[\], f64\[\]"):
        vj.grad(lambda x: (x[0], x[1]))(X)


def test_a_gradient_needs_floats() -> None:
    with pytest.raises(DTypeError, match=r"argument 0\['n'\] is i64\[3\], expected a float"):
        vj.grad(lambda p: vnp.sum(p["n"] * p["x"]))({"n": np.arange(3), "x": X})
    with pytest.raises(DTypeError, match=r"returned i\d+\[\], expected a float"):
        vj.grad(lambda x: vnp.argmax(x))(X)
    close(vj.grad(lambda n, x: vnp.sum(n * x), 1)(np.arange(3), X), np.arange(3))


def test_tangents_must_fit_their_primals() -> None:
    with pytest.raises(ShapeError, match=r"a tangent is f64\[2\], its primal f64\[3\]"):
        vj.jvp(cubes, (X,), (X[:2],))
    with pytest.raises(DTypeError, match=r"a tangent is f32\[3\], its primal f64\[3\]"):
        vj.jvp(cubes, (X,), (X.astype(np.float32),))
    with pytest.raises(ShapeError, match="structure"):
        vj.jvp(cubes, (X,), (X, X))


def test_cotangents_must_fit_the_result() -> None:
    _, pullback = vj.vjp(outer, X)
    with pytest.raises(ShapeError, match=r"a cotangent is f64\[3\], expected f64\[3,3\]"):
        pullback(X)
    with pytest.raises(ShapeError, match="structure"):
        pullback((np.ones((3, 3)),))


# -- the linear maps -------------------------------------------------------------------------------


def test_pushforward_pullback_and_linearize_agree() -> None:
    jacobian = outer_jacobian(X)
    tangent, cotangent = np.array([1.0, -0.5, 2.0]), np.arange(9.0).reshape(3, 3)
    value, moved = vj.jvp(outer, (X,), (tangent,))
    close(value, X[:, None] * np.sin(X))
    close(moved, jacobian @ tangent)
    value, apply = vj.linearize(outer, X)
    close(apply(tangent), jacobian @ tangent)
    close(apply(2 * tangent), 2 * jacobian @ tangent)
    value, pullback = vj.vjp(outer, X)
    close(value, X[:, None] * np.sin(X))
    (back,) = pullback(cotangent)
    close(back, np.einsum("ij,ijk->k", cotangent, jacobian))
    _, _, aux = vj.vjp(lambda x: (outer(x), x.shape[0]), X, has_aux=True)
    assert int(aux) == 3


@pytest.mark.parametrize("jacobian", [vj.jacfwd, vj.jacrev])
def test_jacobians(jacobian: Callable[..., Any]) -> None:
    close(jacobian(outer)(X), outer_jacobian(X))
    close(jacobian(cubes)(X), 3 * X**2)
    nested = jacobian(lambda p, q: {"y": p["a"] * q}, (0, 1))({"a": X}, 2.0)
    close(nested["y"][0]["a"], 2 * np.eye(3))
    close(nested["y"][1], X)


ONCE: dict[str, Callable[[Any], Any]] = {
    "grad": vj.grad,
    "jacfwd": vj.jacfwd,
    "jacrev": vj.jacrev,
    "jit": vj.jit,
}


@pytest.mark.parametrize(
    "order",
    list(itertools.product(("jacfwd", "jacrev"), ("grad", "jacfwd", "jacrev"))),
    ids="-".join,
)
@pytest.mark.parametrize("compiled", ["no", "inner", "middle", "outer"])
def test_second_derivatives_in_every_order(order: tuple[str, str], compiled: str) -> None:
    fn: Any = vj.jit(cubes) if compiled == "inner" else cubes
    fn = ONCE[order[1]](fn)
    fn = vj.jit(fn) if compiled == "middle" else fn
    fn = ONCE[order[0]](fn)
    fn = vj.jit(fn) if compiled == "outer" else fn
    np.testing.assert_allclose(np.asarray(fn(X)), np.diag(6 * X), 1e-5, 1e-12)


def test_hessian_and_third_order() -> None:
    close(vj.hessian(cubes)(X), np.diag(6 * X))
    third = np.zeros((3, 3, 3))
    third[range(3), range(3), range(3)] = 6
    close(vj.jacfwd(vj.hessian(cubes))(X), third)
    close(vj.jacrev(vj.hessian(cubes))(X), third)
    fn: Callable[..., Any] = vnp.sin
    for want in (np.cos, lambda x: -np.sin(x), lambda x: -np.cos(x), np.sin):
        fn = vj.grad(fn)
        close(fn(0.7), want(0.7))


def test_transformations_nest_with_vmap() -> None:
    batch = np.stack([X, 2 * X, -X])
    close(vj.vmap(vj.grad(cubes))(batch), 3 * batch**2)
    close(vj.grad(lambda b: vnp.sum(vj.vmap(cubes)(b)))(batch), 3 * batch**2)
    close(vj.vmap(vj.hessian(cubes))(batch), np.stack([np.diag(6 * x) for x in batch]))
    close(vj.jit(vj.vmap(vj.vmap(vj.grad(vnp.sin))))(batch), np.cos(batch))
    close(vj.jacfwd(vj.vmap(vnp.sin))(X), np.diag(np.cos(X)))
    _, moved = vj.jvp(vj.vmap(cubes), (batch,), (np.ones_like(batch),))
    close(moved, (3 * batch**2).sum(1))


def test_perturbations_are_not_confused() -> None:
    """d/dx (x * d/dy (x + y)) at x = 1 is 1, not 2 (Siskind and Pearlmutter, 2005)."""

    def fn(x: Any) -> Any:
        return x * vj.jvp(lambda y: x + y, (1.0,), (1.0,))[1]

    close(vj.grad(fn)(1.0), 1.0)
    close(vj.jvp(fn, (1.0,), (1.0,))[1], 1.0)


def test_inner_functions_see_outer_tracers() -> None:
    def fn(x: Any) -> Any:
        inner = vj.grad(lambda y: vnp.sum(x * y**2))(x)
        return vnp.sum(inner * x)

    close(vj.grad(fn)(X), 6 * X**2)  # inner = 2 x^2


def test_auxiliary_data_comes_with_every_derivative() -> None:
    x = np.array([0.5, 2.0], np.float32)

    def cubes(v: Any) -> Any:
        return v**3, {"sum": v.sum(), "count": 2}

    value, moved, aux = vj.jvp(cubes, (x,), (x,), has_aux=True)
    np.testing.assert_allclose(np.asarray(moved), 3 * x**3, rtol=1e-6)
    again, push, other = vj.linearize(cubes, x, has_aux=True)
    np.testing.assert_array_equal(np.asarray(again), np.asarray(value))
    np.testing.assert_allclose(np.asarray(push(x)), 3 * x**3, rtol=1e-6)
    assert float(aux["sum"]) == float(other["sum"]) == 2.5
    for jacobian in (vj.jacfwd, vj.jacrev):
        found, more = jacobian(cubes, has_aux=True)(x)
        np.testing.assert_allclose(np.asarray(found), np.diag(3 * x**2), rtol=1e-6)
        assert float(more["sum"]) == 2.5
    second, more = vj.hessian(lambda v: ((v**3).sum(), v), has_aux=True)(x)
    np.testing.assert_allclose(np.asarray(second), np.diag(6 * x), rtol=1e-6)
    np.testing.assert_array_equal(np.asarray(more), x)


def test_jacobians_of_integers_are_refused() -> None:
    for jacobian in (vj.jacfwd, vj.jacrev):
        with pytest.raises(DTypeError, match=r"jacobian of .* expected a float"):
            jacobian(lambda n: n * 2.0)(3)
    with pytest.raises(DTypeError, match=r"jacrev of .* expected floats"):
        vj.jacrev(lambda v: v.astype("int32"))(np.ones(2, np.float32))
