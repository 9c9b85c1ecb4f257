"""vmap of named axes and what the examples compute together; vmap's own arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import vkjit as vj
import vkjit.numpy as jnp
from vkjit import lax
from vkjit.errors import ArgumentError, AxisNameError, MissingRuleError, ShapeError

X = np.array([[1.0, 2.0, 4.0], [-3.0, 5.0, 0.5]], np.float32)


def over(fn: Any, **how: Any) -> Any:
    return vj.vmap(fn, axis_name="i", **how)


def same(got: Any, want: Any) -> None:
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


def test_reductions_over_the_examples(device: str):
    def f(x: Any) -> Any:
        sums = lax.psum({"x": x, "one": 1, "flag": x > 0}, "i")
        return sums, lax.pmean(x, "i"), lax.pmax(x, "i"), lax.pmin(x, "i")

    with vj.default_device(device):
        for call in (over(f), vj.jit(over(f))):
            sums, mean, most, least = call(X)
            same(sums["x"], np.tile(X.sum(0), (2, 1)))
            same(sums["one"], [2, 2])
            same(sums["flag"], np.tile((X > 0).sum(0), (2, 1)))
            same(mean, np.tile(X.mean(0), (2, 1)))
            same(most, np.tile(X.max(0), (2, 1)))
            same(least, np.tile(X.min(0), (2, 1)))


def test_results_that_are_equal_may_be_returned_once():
    total, gathered = over(lambda x: (lax.psum(x, "i"), lax.all_gather(x, "i")), out_axes=None)(X)
    same(total, X.sum(0))
    same(gathered, X)
    with pytest.raises(ArgumentError, match="out_axes is None for a result that varies"):
        over(lambda x: lax.axis_index("i"), out_axes=None)(X)


def test_index_size_and_values_that_are_not_mapped():
    y = np.float32(3)
    out = over(lambda x, y: (lax.axis_index("i"), lax.psum(y, "i"), x), in_axes=(0, None))(X, y)
    same(out[0], [0, 1])
    same(out[1], [6, 6])
    assert np.asarray(out[0]).dtype == np.int32
    sizes: list[int] = []
    over(lambda x: sizes.append(lax.axis_size("i")) or x)(X)
    assert sizes == [2]
    same(over(lambda: lax.axis_index("i"), axis_size=3)(), [0, 1, 2])


def test_gathers_scatters_and_permutations():
    def f(x: Any) -> Any:
        return (
            lax.all_gather(x, "i"),
            lax.all_gather(x, "i", axis=1),
            lax.all_gather(x, "i", axis=-1, tiled=True),
            lax.psum_scatter(jnp.stack([x, x * 10]), "i"),
            lax.psum_scatter(jnp.concatenate([x, x * 10]), "i", tiled=True),
            lax.ppermute(x, "i", [(0, 1), (1, 0)]),
            lax.ppermute(x, "i", [(0, 1)]),
        )

    out = over(f)(X)
    same(out[0], np.stack([X, X]))
    same(out[1], np.stack([X.T, X.T]))
    same(out[2], np.tile(X.reshape(6), (2, 1)))
    same(out[3], np.stack([X.sum(0), 10 * X.sum(0)]))
    same(out[4], np.stack([X.sum(0), 10 * X.sum(0)]))
    same(out[5], X[::-1])
    same(out[6], np.stack([np.zeros(3), X[0]]))


def test_gradients_inside_and_outside_follow_jax():
    w = np.array([1.0, 2.0], np.float32)

    def inside(x: Any, w: Any) -> Any:
        return lax.psum(x.sum() ** 2 * w, "i")

    # JAX transposes psum to psum: every example's result counts, hence the factor 2.
    got = over(vj.grad(inside))(X, w)
    same(got, (2 * 2 * X.sum(1) * w)[:, None] * np.ones(3))
    outside = vj.grad(lambda x: over(inside)(x, w).sum())(X)
    same(outside, got)
    once = vj.grad(lambda x: over(inside, out_axes=None)(x, w))(X)
    same(once, np.asarray(got) / 2)

    def others(x: Any) -> Any:
        rows = lax.all_gather(x, "i")
        moved = lax.ppermute(x, "i", [(0, 1), (1, 0)])
        return (rows[1] * x + moved * lax.axis_index("i")).sum()

    got = vj.grad(lambda x: over(others)(x).sum())(X)
    same(got, np.stack([X[1] + 1, X[0] + 2 * X[1]]))
    _, tangent = vj.jvp(over(lambda x: lax.pmean(x, "i")), (X,), (np.ones_like(X),))
    same(tangent, np.ones_like(X))
    with pytest.raises(MissingRuleError, match="pmax is not differentiable"):
        over(vj.grad(lambda x: lax.pmax(x, "i").sum()))(X)


def test_axes_nest_and_shadow():
    def inner(x: Any) -> Any:
        both = lax.psum(x, ("i", "j"))
        return (
            both,
            lax.psum(x, "i"),
            lax.psum(x, "j"),
            lax.axis_index("i") * 10 + lax.axis_index("j"),
        )

    out = over(vj.vmap(inner, axis_name="j"))(X)
    same(out[0], np.full((2, 3), X.sum()))
    same(out[1], np.tile(X.sum(0), (2, 1)))
    same(out[2], np.tile(X.sum(1)[:, None], (1, 3)))
    same(out[3], [[0, 1, 2], [10, 11, 12]])
    same(over(over(lambda x: lax.psum(x, "i")))(X), np.tile(X.sum(1)[:, None], (1, 3)))
    middle = over(vj.vmap(lambda x: lax.psum(x, "i")))(X)  # a map without a name between
    same(middle, np.tile(X.sum(0), (2, 1)))
    gathered = over(vj.vmap(lambda x: lax.all_gather(x, "i")))(X)
    same(gathered, np.tile(X.T, (2, 1, 1)))


def test_inside_control_flow_and_rules():
    def f(x: Any) -> Any:
        def body(c: Any, v: Any) -> Any:
            return c + lax.psum(v, "i"), lax.axis_index("i")

        last, numbers = lax.scan(body, 0.0, x)
        picked = lax.cond(
            x[0] > 0,
            lambda v: lax.psum(v, "i"),
            lambda v: v * lax.axis_index("i"),
            x[1],
        )
        again = vj.checkpoint(lambda v: jnp.sin(lax.pmean(v, "i")))(x[2])
        return last + picked + again, numbers

    out, numbers = over(f)(X)
    picked = np.array([X[:, 1].sum(), X[1, 1] * 1])
    same(out, X.sum() + picked + np.sin(X[:, 2].mean()))
    same(numbers, [[0] * 3, [1] * 3])
    same(vj.jit(over(f))(X)[0], out)
    grads = vj.grad(lambda x: over(f)(x)[0].sum())(X)
    want = np.full((2, 3), 2.0)
    want[:, 1] += 1  # who does not take a branch passes it constants
    want[:, 2] += np.cos(X[:, 2].mean())
    same(grads, want)
    same(vj.jit(vj.grad(lambda x: over(f)(x)[0].sum()))(X), want)

    @vj.custom_vjp
    def normal(x: Any) -> Any:
        return x - lax.pmean(x, "i")

    normal.defvjp(lambda x: (normal(x), None), lambda _, g: (lax.psum(g, "i") * 100,))
    same(vj.grad(lambda x: over(normal)(x).sum())(X), np.full((2, 3), 200))
    same(over(vj.grad(lambda x: normal(x).sum()))(X), np.full((2, 3), 200))


def test_unknown_names_are_told():
    with pytest.raises(AxisNameError, match=r"psum: unbound axis name: 'k'; axes in scope: 'i'"):
        over(lambda x: lax.psum(x, "k"))(X)
    with pytest.raises(NameError, match="axes in scope: none"):
        lax.axis_index("i")
    over(lambda x: x)(X)
    with pytest.raises(NameError):
        lax.psum(1.0, "i")
    with pytest.raises(ArgumentError, match="ppermute: perm"):
        over(lambda x: lax.ppermute(x, "i", [(0, 1), (1, 1)]))(X)
    with pytest.raises(ShapeError, match="psum_scatter"):
        over(lambda x: lax.psum_scatter(x, "i"))(X)


def test_axes_as_trees_and_negative_axes():
    tree = {"a": X, "b": (X.T, np.float32(2))}
    f = vj.vmap(
        lambda t, s: t["a"].sum() + t["b"][0].sum() * t["b"][1] + s,
        in_axes=({"a": 0, "b": (-1, None)}, None),
    )
    same(f(tree, 1.0), X.sum(1) * 3 + 1)
    out = vj.vmap(lambda x: (x, {"y": x}), out_axes=(-1, {"y": 0}))(X)
    same(out[0], X.T)
    same(out[1]["y"], X)


@pytest.mark.parametrize(
    ("in_axes", "says"),
    [
        (({"a": 0},), r"in_axes\[0\] has"),
        (({"a": 0, "b": (0,)},), r"in_axes\[0\] has"),
        ({"a": 0}, "in_axes is a dict, expected an integer, None, or a tuple"),
        ((0, 0), "for 1 arguments"),
    ],
)
def test_axes_that_do_not_fit_are_told(in_axes: Any, says: str):
    with pytest.raises(ArgumentError, match=says):
        vj.vmap(lambda t: t["a"], in_axes=in_axes)({"a": X, "b": (X, X)})


def test_result_axes_that_do_not_fit_are_told():
    with pytest.raises(ShapeError, match=r"out_axes 2 for a result"):
        vj.vmap(lambda x: x.sum(), out_axes=2)(X)
    with pytest.raises(ArgumentError, match="out_axes has"):
        vj.vmap(lambda x: (x, x), out_axes=(0, 0, 0))(X)
    with pytest.raises(ShapeError, match="mapped axes differ in size"):
        vj.vmap(lambda x, y: x + y)(X, X.T)


def test_batches_of_nothing_and_of_one():
    none = np.zeros((0, 3), np.float32)
    for call in (over(lambda x: x.sum()), vj.jit(over(lambda x: x.sum()))):
        assert np.shape(call(none)) == (0,)
    total = over(lambda x: lax.psum(x, "i"), out_axes=None)(none)
    same(total, np.zeros(3))
    assert np.shape(vj.grad(lambda x: vj.vmap(jnp.sin)(x).sum())(none)) == (0, 3)
    same(over(lambda x: lax.psum(x, "i"))(X[:1]), X[:1])
    same(vj.vmap(lambda: jnp.float32(2), axis_size=3)(), [2, 2, 2])
