"""custom_jvp and custom_vjp: rules of the user's own, under every transformation."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

import vkjit as vj
import vkjit.numpy as jnp
from vkjit.errors import ArgumentError, DTypeError, MissingRuleError, ShapeError, TracerError


@vj.custom_jvp
def log1pexp(x: Any) -> Any:
    return jnp.log(1.0 + jnp.exp(x))


@log1pexp.defjvp
def _log1pexp_jvp(primals: Any, tangents: Any) -> Any:
    (x,), (t,) = primals, tangents
    return log1pexp(x), (1 - 1 / (1 + jnp.exp(x))) * t


@vj.custom_vjp
def scaled_sine(x: Any, y: Any) -> Any:
    return jnp.sin(x) * y


def _scaled_sine_fwd(x: Any, y: Any) -> Any:
    return scaled_sine(x, y), (jnp.cos(x), jnp.sin(x), y)


def _scaled_sine_bwd(saved: Any, g: Any) -> Any:
    cosine, sine, y = saved
    return g * cosine * y, sine * g


scaled_sine.defvjp(_scaled_sine_fwd, _scaled_sine_bwd)


def clip_gradient() -> Any:
    """Identity, with a gradient no larger than 1: not the derivative of what it computes."""
    clipped = vj.custom_vjp(lambda x: x)
    clipped.defvjp(lambda x: (x, ()), lambda saved, g: (jnp.clip(g, -1, 1),))
    return clipped


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-np.asarray(x, np.float64)))


def close(got: Any, want: Any) -> None:
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-6)


X = np.array([-1.5, 0.0, 2.0], np.float32)


# -- custom_jvp ---------------------------------------------------------------------------------


def test_jvp_rule_is_used_in_both_modes_and_is_stable():
    close(vj.grad(log1pexp)(100.0), 1.0)
    out, tangent = vj.jvp(log1pexp, (1.0,), (2.0,))
    close(out, np.log1p(np.e))
    close(tangent, 2 * sigmoid(1.0))


def test_jvp_rule_to_second_and_third_order():
    s = sigmoid(0.5)
    close(vj.grad(vj.grad(log1pexp))(0.5), s * (1 - s))
    close(vj.hessian(log1pexp)(0.5), s * (1 - s))
    third = vj.grad(vj.grad(vj.grad(log1pexp)))(0.5)
    close(third, s * (1 - s) * (1 - 2 * s))


def test_jvp_rule_under_vmap_inside_and_outside():
    close(vj.vmap(vj.grad(log1pexp))(X), sigmoid(X))
    close(vj.grad(lambda x: vj.vmap(log1pexp)(x).sum())(X), sigmoid(X))
    _, tangents = vj.jvp(vj.vmap(vj.vmap(log1pexp)), (X[None],), (np.ones_like(X)[None],))
    close(tangents, sigmoid(X)[None])


def test_jvps_for_each_argument_with_none_for_zero():
    @vj.custom_jvp
    def product(x: Any, y: Any) -> Any:
        return x * y

    product.defjvps(lambda t, out, x, y: t * y * 10, None)
    close(vj.grad(product, (0, 1))(2.0, 3.0), (30, 0))
    out, tangent = vj.jvp(product, (2.0, 3.0), (1.0, 1.0))
    close((out, tangent), (6, 30))


def test_jvp_nondiff_arguments_come_first():
    @functools.partial(vj.custom_jvp, nondiff_argnums=(0, 2))
    def apply(f: Any, x: Any, n: Any) -> Any:
        return f(x) * n

    @apply.defjvp
    def rule(f: Any, n: Any, primals: Any, tangents: Any) -> Any:
        (x,), (t,) = primals, tangents
        return f(x) * n, t * n * 100

    close(vj.grad(lambda x: apply(jnp.sin, x, 3))(1.0), 300)
    close(apply(jnp.sin, 1.0, n=2), 2 * np.sin(1.0))


def test_jvp_with_integer_arguments_and_results():
    @vj.custom_jvp
    def shift(x: Any, n: Any) -> Any:
        return {"value": x + n, "count": n + 1}

    @shift.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        (x, n), (t, dn) = primals, tangents
        assert np.dtype(dn.dtype) == np.int32
        return shift(x, n), {"value": 3 * t, "count": n * 0}

    close(vj.grad(lambda x: shift(x, 4)["value"])(1.0), 3)
    out = vj.vmap(shift)(X, np.arange(3, dtype=np.int32))
    close(out["value"], X + np.arange(3))
    np.testing.assert_array_equal(out["count"], [1, 2, 3])


@pytest.mark.parametrize(
    ("rule", "error", "says"),
    [
        (lambda p, t: p[0], ArgumentError, "a pair"),
        (lambda p, t: (p, t[0]), ShapeError, "the result of the rule has structure"),
        (lambda p, t: (p[0], jnp.zeros(7)), ShapeError, "tangent from the rule is f32"),
        (lambda p, t: (p[0], t[0].astype("float16")), DTypeError, "tangent from the rule is f16"),
    ],
)
def test_jvp_rules_that_do_not_fit_are_named(rule: Any, error: Any, says: str):
    f = vj.custom_jvp(lambda x: x)
    f.defjvp(rule)
    with pytest.raises(error, match=says):
        vj.grad(lambda x: f(x).sum())(X)


# -- custom_vjp ---------------------------------------------------------------------------------


def test_vjp_rule_replaces_the_derivative():
    clipped = clip_gradient()
    close(vj.grad(lambda x: (clipped(x) ** 2).sum())(X), np.clip(2 * X, -1, 1))
    close(clipped(X), X)


def test_vjp_rule_to_third_order():
    close(vj.grad(scaled_sine, (0, 1))(1.0, 2.0), (2 * np.cos(1), np.sin(1)))
    close(vj.grad(vj.grad(scaled_sine))(1.0, 2.0), -2 * np.sin(1))
    close(vj.grad(vj.grad(vj.grad(scaled_sine)))(1.0, 2.0), -2 * np.cos(1))
    close(vj.jacrev(vj.grad(scaled_sine), 1)(1.0, 2.0), np.cos(1))


def test_vjp_rule_under_vmap_inside_and_outside():
    y = np.float32(2)
    gx, gy = vj.vmap(vj.grad(scaled_sine, (0, 1)), (0, None))(X, y)
    close(gx, np.cos(X) * y)
    close(gy, np.sin(X))

    def total(x: Any, y: Any) -> Any:
        return vj.vmap(scaled_sine, (0, None))(x, y).sum()

    gx, gy = vj.grad(total, (0, 1))(X, y)
    close(gx, np.cos(X) * y)
    close(gy, np.sin(X).sum())
    second = vj.grad(lambda x: vj.grad(total)(x, y).sum())(X)
    close(second, -np.sin(X) * y)


def test_vjp_rule_under_nested_vmap():
    both = vj.vmap(vj.vmap(vj.grad(scaled_sine, 1), (0, None)), (None, 0))
    close(both(X, X), np.tile(np.sin(X), (3, 1)))

    def total(x: Any, y: Any) -> Any:
        return vj.vmap(vj.vmap(scaled_sine, (0, None)), (None, 0))(x, y).sum()

    gx, gy = vj.grad(total, (0, 1))(X, X)
    close(gx, np.cos(X) * X.sum())
    close(gy, np.full(3, np.sin(X).sum()))


def test_vjp_nondiff_argument_order():
    @functools.partial(vj.custom_vjp, nondiff_argnums=1, nondiff_argnames="n")
    def f(x: Any, name: Any, y: Any, n: Any = 4) -> Any:
        return x * y

    def fwd(x: Any, name: Any, y: Any, n: Any) -> Any:
        assert (name, n) == ("name", 4)
        return x * y, (x, y)

    def bwd(name: Any, n: Any, saved: Any, g: Any) -> Any:
        assert (name, n) == ("name", 4)
        x, y = saved
        return g * y * n, g * x

    f.defvjp(fwd, bwd)
    close(vj.grad(lambda x, y: f(x, "name", y), (0, 1))(2.0, 3.0), (12, 2))


def test_vjp_of_trees_with_none_and_integers():
    @vj.custom_vjp
    def f(params: Any, index: Any) -> Any:
        return {"y": params["w"] * 2 + params["b"]["c"], "n": index + 1}

    def bwd(saved: Any, g: Any) -> Any:
        assert np.dtype(g["n"].dtype) == np.int32
        return {"w": g["y"] * 5, "b": None}, None

    f.defvjp(lambda p, i: (f(p, i), None), bwd)
    params = {"w": X, "b": {"c": X}}
    got = vj.grad(lambda p: f(p, 3)["y"].sum())(params)
    close(got["w"], np.full(3, 5))
    close(got["b"]["c"], np.zeros(3))


def test_vjp_rules_may_close_over_traced_values():
    def loss(x: Any, labels: Any) -> Any:
        mask = x > 0  # traced, and no float

        @vj.custom_vjp
        def masked(v: Any) -> Any:
            return v * labels

        def fwd(v: Any) -> Any:
            return jnp.where(mask, v * labels, v * labels), v

        masked.defvjp(fwd, lambda v, g: (jnp.where(mask, g * labels, 0.0),))
        return masked(x).sum()

    labels = np.array([5, 6, 7], np.float32)
    close(vj.grad(loss)(X, labels), np.where(X > 0, labels, 0))
    close(vj.vmap(vj.grad(loss))(X, labels), np.where(X > 0, labels, 0))


def test_derivatives_with_respect_to_closed_over_values_are_refused():
    @vj.custom_vjp
    def f(x: Any) -> Any:
        return x

    f.defvjp(lambda x: (x, None), lambda saved, g: (g,))

    def closes(w: Any) -> Any:
        inner = vj.custom_vjp(lambda x: x * w)
        inner.defvjp(lambda x: (x * w, None), lambda saved, g: (g,))
        return inner(1.0)

    with pytest.raises(TracerError, match="closes over"):
        vj.grad(closes)(2.0)

    def fixed(w: Any) -> Any:
        still = vj.stop_gradient(w)
        inner = vj.custom_vjp(lambda x: x * still)
        inner.defvjp(lambda x: (x * still, None), lambda saved, g: (g,))
        return inner(1.0) * f(w)

    close(vj.grad(fixed)(2.0), 2)


def test_forward_mode_of_a_backward_rule_is_refused():
    for attempt in (
        lambda: vj.jvp(scaled_sine, (1.0, 2.0), (1.0, 0.0)),
        lambda: vj.jacfwd(scaled_sine)(1.0, 2.0),
        lambda: vj.hessian(lambda x: scaled_sine(scaled_sine(x, 2.0), 2.0))(1.0),
        lambda: vj.jit(lambda x: vj.jvp(scaled_sine, (x, 2.0), (1.0, 0.0)))(1.0),
    ):
        with pytest.raises(MissingRuleError, match="custom_vjp scaled_sine: forward-mode"):
            attempt()


def _dead_in_scan(x: Any) -> Any:
    def turn(c: Any, a: Any) -> Any:
        scaled_sine(c, a)
        return c * a, scaled_sine(c, a)

    return vj.lax.scan(turn, x, jnp.full(3, 2.0))[0]


def _dead_in_map(x: Any) -> Any:
    def twice(y: Any) -> Any:
        scaled_sine(y, y)
        return 2 * y

    return vj.lax.map(twice, jnp.stack([x, x]))


def _stopped_in_while(x: Any) -> Any:
    def turn(c: Any) -> Any:
        return c[0] + 1, c[1] * vj.stop_gradient(scaled_sine(c[1], 2.0))

    return vj.lax.while_loop(lambda c: c[0] < 2, turn, (0, x))[1]


def _stopped_in_cond(x: Any) -> Any:
    def yes(x: Any) -> Any:
        return x * vj.stop_gradient(scaled_sine(x, 2.0))

    return vj.lax.cond(x > 0, yes, lambda x: x, x)


@vj.checkpoint
def _dead_in_checkpoint(x: Any) -> Any:
    scaled_sine(x, x)
    return 3 * x


DEAD = [_dead_in_scan, _dead_in_map, _stopped_in_while, _stopped_in_cond, _dead_in_checkpoint]


@pytest.mark.parametrize("fn", DEAD, ids=lambda fn: fn.__name__.strip("_"))
def test_forward_mode_passes_by_a_backward_rule_that_nobody_reads(fn: Any) -> None:
    want = vj.linearize(fn, 2.0)[1](1.0)
    for forward in (vj.jvp, vj.jit(vj.jvp, static_argnums=0)):
        out, tangent = forward(fn, (2.0,), (1.0,))
        close(out, fn(2.0))
        close(tangent, want)


def test_forward_mode_of_a_gradient_differentiates_the_backward_rule() -> None:
    """The gradient does not read the value that the forward rule computes."""
    for hessian in (vj.hessian(scaled_sine), vj.jit(vj.hessian(scaled_sine))):
        close(hessian(1.0, 2.0), -2 * np.sin(1.0))


@pytest.mark.parametrize(
    ("fwd", "bwd", "error", "says"),
    [
        (lambda x: x, None, ArgumentError, "fwd returned TracedArray, expected a pair"),
        (lambda x: ((x, x), None), None, ShapeError, "the result of fwd has structure"),
        (lambda x: (x[:2], None), None, ShapeError, r"the result of fwd is f32\[2\], expected f32"),
        (lambda x: (x, None), lambda s, g: g, ShapeError, "bwd returned TracedArray, expected a"),
        (lambda x: (x, None), lambda s, g: (g, g), ShapeError, "bwd returned 2 values"),
        (
            lambda x: (x, None),
            lambda s, g: (g[:1],),
            ShapeError,
            r"bwd: the cotangent of argument \[0\] is f32\[1\], expected f32\[3\]",
        ),
        (
            lambda x: (x, None),
            lambda s, g: (g.astype("float16"),),
            DTypeError,
            r"bwd: the cotangent of argument \[0\] is f16",
        ),
        (lambda x: (x, None), lambda s, g: ((g,),), DTypeError, "tuple"),
    ],
)
def test_vjp_rules_that_do_not_fit_are_named(fwd: Any, bwd: Any, error: Any, says: str):
    f = vj.custom_vjp(lambda x: x)
    f.defvjp(fwd, bwd)
    with pytest.raises(error, match=says):
        vj.grad(lambda x: f(x).sum())(X)


def test_calls_that_cannot_be_are_named():
    f = vj.custom_vjp(lambda x: x)
    with pytest.raises(ArgumentError, match="has no rule"):
        f(1.0)
    f.defvjp(lambda x: (x, None), lambda s, g: (g,))
    with pytest.raises(DTypeError, match=r"argument 0 is a str.*nondiff_argnums"):
        vj.jit(lambda x: f("name"))(1.0)


def test_names_of_arguments_must_exist():
    with pytest.raises(ArgumentError, match=r"nondiff_argnames 'z', expected one of \['x'\]"):
        vj.custom_jvp(lambda x: x, nondiff_argnames=("z",))


def test_methods_have_rules():
    class Layer:
        scale = 3.0

        @functools.partial(vj.custom_vjp, nondiff_argnums=(0,))
        def apply(self, x: Any) -> Any:
            return x * self.scale

        apply.defvjp(
            lambda self, x: (x * self.scale, None), lambda self, saved, g: (g * 10 * self.scale,)
        )

    layer = Layer()
    close(vj.grad(lambda x: layer.apply(x))(1.0), 30)


def test_rules_are_compiled(device: str):
    clipped = clip_gradient()

    def loss(x: Any, y: Any) -> Any:
        return (clipped(scaled_sine(x, y)) ** 2 + log1pexp(x)).sum()

    both = vj.grad(loss, (0, 1))
    with vj.default_device(device):
        close(vj.jit(loss)(X, X), loss(X, X))
        for got, want in zip(vj.jit(both)(X, X), both(X, X), strict=True):
            close(got, want)
        per_row = vj.vmap(both)
        rows = np.stack([X, X + 1])
        for got, want in zip(vj.jit(per_row)(rows, rows), per_row(rows, rows), strict=True):
            close(got, want)


def test_rules_inside_a_scan():
    def total(x: Any, ys: Any) -> Any:
        def body(carry: Any, y: Any) -> Any:
            return scaled_sine(carry, y) + log1pexp(carry), carry

        last, _ = vj.lax.scan(body, x, ys)
        return last

    def unrolled(x: Any, ys: Any) -> Any:
        for i in range(3):
            x = jnp.sin(x) * ys[i] + jnp.log1p(jnp.exp(x))
        return x

    both = vj.value_and_grad(total, (0, 1))
    want = vj.value_and_grad(unrolled, (0, 1))(np.float32(0.3), X)
    rows = np.stack([X, X + 1])
    many = vj.vmap(both, in_axes=(None, 0))
    for got in (both(np.float32(0.3), X), vj.jit(both)(np.float32(0.3), X)):
        close(got[0], want[0])
        close(got[1][0], want[1][0])
        close(got[1][1], want[1][1])
    for got in (many(np.float32(0.3), rows), vj.jit(many)(np.float32(0.3), rows)):
        close(got[1][1][0], want[1][1])
    second = vj.jit(vj.grad(lambda x: vj.grad(total)(x, X)))(np.float32(0.3))
    close(second, vj.grad(lambda x: vj.grad(unrolled)(x, X))(np.float32(0.3)))


def test_jit_around_grad_of_a_custom_function_compiles_grad() -> None:
    @vj.custom_vjp
    def square(x: Any) -> Any:
        return x * x

    square.defvjp(lambda x: (x * x, x), lambda x, g: (7 * g * x,))
    assert float(vj.jit(vj.grad(square))(3.0)) == 21.0


def test_a_rule_that_makes_constants_and_applies_its_function_is_derived_twice() -> None:
    @vj.custom_vjp
    def f(x: Any, w: Any) -> Any:
        return jnp.sin(x) * w

    def fwd(x: Any, w: Any) -> Any:
        return f(x, w), (x, w, jnp.ones(()) * 5)

    def bwd(saved: Any, g: Any) -> Any:
        x, w, five = saved
        return g * jnp.cos(x) * w * five, g * jnp.sin(x)

    f.defvjp(fwd, bwd)

    def slopes(w: Any) -> Any:
        return vj.vmap(vj.grad(f), in_axes=(0, None))(X, w).sum()

    close(vj.grad(slopes)(2.0), 5 * np.cos(X).sum())
    close(vj.jit(vj.grad(slopes))(2.0), 5 * np.cos(X).sum())
