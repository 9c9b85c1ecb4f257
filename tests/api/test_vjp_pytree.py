"""Pullbacks and pushforwards as pytrees: residuals that are inspected, moved, left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vkjit as vj
import vkjit.numpy as jnp
from vkjit.errors import ArgumentError, DTypeError, ShapeError


def model(params: Any, x: Any) -> Any:
    hidden = jnp.tanh(x @ params["w1"])
    return hidden @ params["w2"]


def arguments() -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(3)

    def draw(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(np.float32)

    return {"w1": draw(4, 5), "w2": draw(5, 3)}, draw(2, 4), draw(2, 3)


def expected(params: Any, x: Any, ct: Any) -> Any:
    hidden = np.tanh(x @ params["w1"])
    back = (ct @ params["w2"].T) * (1 - hidden**2)
    return {"w1": x.T @ back, "w2": hidden.T @ ct}, back @ params["w1"].T


def assert_close(got: Any, want: Any) -> None:
    for g, w in zip(vj.tree.leaves(got), vj.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=2e-5, atol=1e-5)


def test_leaves_are_the_residuals():
    params, x, ct = arguments()
    _, pullback = vj.vjp(model, params, x)
    assert isinstance(pullback, vj.Pullback)
    kept, (inputs) = pullback.args_res
    np.testing.assert_array_equal(kept["w1"], params["w1"])
    np.testing.assert_array_equal(inputs, x)
    shapes = [np.shape(r) for r in pullback.opaque_residuals]
    assert shapes == [(2, 5)]  # the hidden layer, once
    assert len(vj.tree.leaves(pullback)) == 4
    assert "2 residuals" not in repr(pullback)
    assert "residuals" in repr(pullback)
    assert_close(pullback(ct), expected(params, x, ct))


def test_what_is_not_read_is_not_kept():
    _, pullback = vj.vjp(lambda x, y: (jnp.sin(x) + y).sum(), np.ones(3), np.ones(3))
    assert isinstance(pullback.args_res[1], vj.NotNeeded)
    assert pullback.args_res[1] == vj.NotNeeded()
    assert len(vj.tree.leaves(pullback)) == 1


def test_to_numpy_and_back_through_a_file(tmp_path: Path):
    params, x, ct = arguments()
    _, pullback = vj.vjp(model, params, x)
    host = vj.tree.map(np.asarray, pullback)
    assert all(type(leaf) is np.ndarray for leaf in vj.tree.leaves(host))
    assert_close(host(ct), expected(params, x, ct))

    leaves, structure = vj.tree.flatten(host)
    np.savez(tmp_path / "residuals.npz", *leaves)
    del leaves, host, pullback
    with np.load(tmp_path / "residuals.npz") as file:
        loaded = [file[name] for name in file.files]
    assert_close(vj.tree.unflatten(structure, loaded)(ct), expected(params, x, ct))


def test_weights_are_left_out_and_put_back(tmp_path: Path):
    params, x, ct = arguments()
    _, pullback = vj.vjp(model, params, x)
    whole = sum(np.asarray(leaf).nbytes for leaf in vj.tree.leaves(pullback))
    pullback.args_res[0] = None
    left = sum(np.asarray(leaf).nbytes for leaf in vj.tree.leaves(pullback))
    assert whole - left == sum(w.nbytes for w in params.values())

    leaves, structure = vj.tree.flatten(pullback)
    np.savez(tmp_path / "activations.npz", *leaves)
    with np.load(tmp_path / "activations.npz") as file:
        loaded = vj.tree.unflatten(structure, [file[name] for name in file.files])
    with pytest.raises(ArgumentError, match=r"residual args_res\[0\]\['w1'\], f32\[4,5\]"):
        loaded(ct)
    loaded.args_res[0] = params
    assert_close(loaded(ct), expected(params, x, ct))


def test_forward_and_backward_are_compiled_apart(device: str):
    params, x, ct = arguments()
    traced: list[str] = []

    @vj.jit
    def forward(params: Any, x: Any) -> Any:
        traced.append("forward")
        return vj.vjp(model, params, x)

    @vj.jit
    def backward(pullback: Any, ct: Any) -> Any:
        traced.append("backward")
        return pullback(ct)

    with vj.default_device(device):
        for scale in (1.0, 2.0):
            value, pullback = forward(params, x * np.float32(scale))
            assert_close(value, np.tanh(x * scale @ params["w1"]) @ params["w2"])
            spilled = vj.tree.map(np.asarray, pullback)
            assert_close(backward(spilled, ct), expected(params, x * np.float32(scale), ct))
    assert traced == ["forward", "backward"]


def test_equal_derivatives_share_a_compiled_backward():
    _, x, _ = arguments()
    backward = vj.jit(lambda pullback, ct: pullback(ct))
    for factor in (1.0, 2.0):
        _, pullback = vj.vjp(lambda v: (v * v).sum(), x * np.float32(factor))
        (grad,) = backward(pullback, np.float32(1))
        assert_close(grad, 2 * x * np.float32(factor))
    assert backward.cache_size() == 1
    backward(vj.vjp(lambda v: (v * v * v).sum(), x)[1], np.float32(1))
    assert backward.cache_size() == 2


def test_residuals_that_do_not_fit_are_refused():
    params, x, ct = arguments()
    _, pullback = vj.vjp(model, params, x)
    good = pullback.args_res[1]
    pullback.args_res[1] = x[:1]
    with pytest.raises(ShapeError, match=r"args_res\[1\] is f32\[1,4\], expected f32\[2,4\]"):
        pullback(ct)
    pullback.args_res[1] = x.astype(np.float16)
    with pytest.raises(DTypeError, match="is f16"):
        pullback(ct)
    pullback.args_res = [good]
    with pytest.raises(ArgumentError, match="args_res has structure"):
        pullback(ct)


def test_cotangents_that_do_not_fit_are_refused():
    params, x, ct = arguments()
    _, pullback = vj.vjp(model, params, x)
    with pytest.raises(ShapeError, match="structure"):
        pullback((ct, ct))
    with pytest.raises(ShapeError, match=r"a cotangent is f32\[1,3\]"):
        pullback(ct[:1])


def test_linearize_gives_a_pytree_as_well():
    params, x, _ = arguments()
    value, pushforward = vj.linearize(model, params, x)
    moved = vj.tree.map(np.ones_like, params), np.ones_like(x)
    want_value, want = vj.jvp(model, (params, x), moved)
    np.testing.assert_allclose(value, want_value, rtol=1e-6)
    np.testing.assert_allclose(pushforward(*moved), want, rtol=1e-5)
    host = vj.tree.map(np.asarray, pushforward)
    applied = vj.jit(lambda p, *t: p(*t))(host, *moved)
    np.testing.assert_allclose(applied, want, rtol=1e-5)
    with pytest.raises(ShapeError, match="tangents have structure"):
        pushforward(moved[0])


def test_pullbacks_are_batched_and_differentiated():
    params, x, ct = arguments()

    def squared(x: Any) -> Any:
        _, pullback = vj.vjp(model, params, x)
        return (pullback(ct)[1] ** 2).sum()

    def back(x: Any) -> Any:
        return (expected(params, x, ct)[1].astype(np.float64) ** 2).sum()

    h = 1e-3
    bumped = [[(back(x + d) - back(x - d)) / (2 * h) for d in row] for row in unit(x, h)]
    np.testing.assert_allclose(vj.grad(squared)(x), bumped, rtol=2e-2, atol=1e-2)
    _, pullback = vj.vjp(model, params, x)
    many = vj.vmap(pullback)(np.stack([ct, 2 * ct]))
    assert_close(vj.tree.map(lambda v: v[1], many), pullback(2 * ct))


def unit(x: Any, h: float) -> Any:
    eye = np.eye(x.size, dtype=np.float32) * np.float32(h)
    return eye.reshape(*x.shape, *x.shape)


def test_a_cotangent_of_another_dtype_is_refused() -> None:
    _, pullback = vj.vjp(lambda x: (2 * x, jnp.argmax(x)), np.ones(3, np.float32))
    with pytest.raises(DTypeError, match=r"a cotangent is f16\[3\], expected f32\[3\]; cast it"):
        pullback((np.ones(3, np.float16), 0))
    (grad,) = pullback((np.ones(3, np.float32), 0))
    np.testing.assert_array_equal(np.asarray(grad), [2.0, 2.0, 2.0])
