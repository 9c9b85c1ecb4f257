"""Sums of products over the turns of a scan: taken behind it where that is cheap."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import vkjit as vj
import vkjit.numpy as jnp
from vkjit import lax
from vkjit.api.staged import make_ir
from vkjit.control.scan import Scan
from vkjit.ir.program import Eqn
from vkjit.passes.pipeline import simplify

LENGTH, BATCH, WIDTH = 6, 2, 16


def values(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32) / 4


W, U = values(WIDTH, WIDTH), values(WIDTH, WIDTH, seed=1)
XS = values(LENGTH, BATCH, WIDTH, seed=2)


def recurrent(w: Any, u: Any, xs: Any, **how: Any) -> Any:
    def turn(h: Any, x: Any) -> Any:
        h = jnp.tanh(h @ w + x @ u)
        return h, h

    return lax.scan(turn, jnp.zeros_like(xs[0]), xs, **how)[1].sum()


def written(w: Any, u: Any, xs: Any) -> Any:
    h, total = jnp.zeros_like(xs[0]), 0.0
    for i in range(xs.shape[0]):
        h = jnp.tanh(h @ w + xs[i] @ u)
        total = total + h.sum()
    return total


def scans(fn: Any, *args: Any) -> list[Eqn]:
    """The loops of the simplified program, outermost ones."""
    return [e for e in simplify(make_ir(fn)(*args)).eqns if isinstance(e.prim, Scan)]


def carried(eqn: Eqn) -> list[tuple[int, ...]]:
    assert isinstance(eqn.prim, Scan)
    return [out.aval.shape for out in eqn.outs[: eqn.prim.carries]]


def test_gradients_of_weights_are_one_product_behind_the_loop(device: str) -> None:
    grads = vj.grad(recurrent, argnums=(0, 1))
    _, backward = scans(grads, W, U, XS)
    assert carried(backward) == [(BATCH, WIDTH)]
    want = vj.grad(written, argnums=(0, 1))(W, U, XS)
    with vj.default_device(device):
        for got, expected in zip(vj.jit(grads)(W, U, XS), want, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reverse", [False, True])
def test_one_factor_may_be_an_operand(device: str, reverse: Any) -> None:
    """Both directions; the other factor is the cotangent of a stacked result, an operand, too."""

    def fn(w: Any, xs: Any) -> Any:
        def turn(total: Any, x: Any) -> Any:
            y = x @ w
            return total + y, y * total

        return lax.scan(turn, jnp.zeros_like(xs[0]), xs, reverse=reverse)[1].sum()

    def by_hand(w: Any, xs: Any) -> Any:
        ys = (xs @ w)[::-1] if reverse else xs @ w
        return sum((ys[i] * ys[:i].sum(0)).sum() for i in range(1, LENGTH))

    backward = scans(vj.grad(fn), W, XS)[-1]
    assert carried(backward) == [(BATCH, WIDTH)]
    with vj.default_device(device):
        got = vj.jit(vj.grad(fn))(W, XS)
    np.testing.assert_allclose(got, vj.grad(by_hand)(W, XS), rtol=1e-4, atol=1e-5)


def test_sums_that_the_program_wrote_stay() -> None:
    """Gradients of micro-batches add up so that activations need not be kept."""

    def fn(total: Any, xs: Any) -> Any:
        return lax.scan(lambda total, x: (total + x.T @ x, None), total, xs)[0]

    (loop,) = scans(fn, W, XS)
    assert carried(loop) == [W.shape]


def test_stacks_stay_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """No factors that are large against the sum, or beyond a number of bytes."""
    weights = (WIDTH, WIDTH)
    grads = vj.grad(recurrent, argnums=(0, 1))
    many = np.zeros((LENGTH, 4 * WIDTH, WIDTH), np.float32)
    assert carried(scans(grads, W, U, many)[-1]).count(weights) == 2
    with monkeypatch.context() as patch:
        patch.setattr("vkjit.control.scan_sink.MOST_STACKED", 4 * LENGTH * BATCH * WIDTH - 1)
        assert carried(scans(grads, W, U, XS)[-1]).count(weights) == 2


def test_what_is_computed_again_is_not_kept() -> None:
    def fn(w: Any, u: Any, xs: Any) -> Any:
        def turn(h: Any, x: Any) -> Any:
            h = jnp.tanh(h @ w + x @ u)
            return h, h

        return lax.scan(vj.checkpoint(turn), jnp.zeros_like(xs[0]), xs)[1].sum()

    backward = scans(vj.grad(fn, argnums=(0, 1)), W, U, XS)[-1]
    assert carried(backward).count((WIDTH, WIDTH)) == 2


def test_chunks_keep_what_they_promise() -> None:
    """The outer of two loops sums the gradients of chunks: what those stack is not kept."""

    def fn(w: Any, u: Any, xs: Any) -> Any:
        return recurrent(w, u, xs, chunk=2)

    backward = scans(vj.grad(fn, argnums=(0, 1)), W, U, XS)[-1]
    assert carried(backward).count((WIDTH, WIDTH)) == 2
    (inner,) = [e for e in backward.prim.programs()[0].eqns if isinstance(e.prim, Scan)][-1:]
    assert carried(inner) == [(BATCH, WIDTH)]
    want = vj.grad(written)(W, U, XS)
    np.testing.assert_allclose(vj.jit(vj.grad(fn))(W, U, XS), want, rtol=1e-4, atol=1e-5)
