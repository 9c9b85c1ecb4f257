"""vkjit.nn on every device: values, gradients and behaviour at the extremes."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import numpy as np
import pytest

import vkjit as vj
import vkjit.numpy as jnp
from vkjit import nn
from vkjit.errors import ShapeError

INF, NAN = np.inf, np.nan
POINTS = np.array([-1e4, -200, -30, -3, -0.5, 0, 0.25, 2, 30, 200, 1e4])


def np_sigmoid(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))


def np_gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def np_gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


UNARY: dict[str, tuple[Callable[..., Any], Callable[[np.ndarray], np.ndarray]]] = {
    "relu": (nn.relu, lambda x: np.maximum(x, 0)),
    "sigmoid": (nn.sigmoid, np_sigmoid),
    "softplus": (nn.softplus, lambda x: np.logaddexp(x, 0)),
    "log_sigmoid": (nn.log_sigmoid, lambda x: -np.logaddexp(-x, 0)),
    "silu": (nn.silu, lambda x: x * np_sigmoid(x)),
    "gelu": (lambda x: nn.gelu(x, approximate=False), np_gelu),
    "gelu_tanh": (nn.gelu, np_gelu_tanh),
}


@pytest.fixture(autouse=True)
def on(device: str) -> Generator[None]:
    with vj.default_device(device):
        yield


def f32(values: Any) -> Any:
    return jnp.asarray(np.asarray(values, np.float32))


@pytest.mark.parametrize("name", UNARY)
def test_values_and_slopes(name: str) -> None:
    ours, reference = UNARY[name]
    np.testing.assert_allclose(vj.jit(ours)(f32(POINTS)), reference(POINTS), rtol=2e-6, atol=2e-7)
    slope = vj.jit(vj.grad(lambda x: ours(x).sum()))(f32(POINTS))
    step = 1e-6
    want = (reference(POINTS + step) - reference(POINTS - step)) / (2 * step)
    if name == "relu":
        want[POINTS == 0] = 0.0  # the convention
    np.testing.assert_allclose(slope, want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", UNARY)
def test_nan_spreads(name: str) -> None:
    assert np.isnan(np.asarray(vj.jit(UNARY[name][0])(f32([NAN]))))


def test_sigmoid_keeps_its_relative_accuracy_far_to_the_left() -> None:
    np.testing.assert_allclose(
        vj.jit(nn.sigmoid)(f32([-50.0])), [math.exp(-50.0)], rtol=1e-5, atol=0
    )


def test_logsumexp_with_infinities() -> None:
    rows = f32([[-INF, -INF, -INF], [-INF, 0, math.log(3)], [INF, 1, -INF], [NAN, 0, 0]])
    want = [-INF, math.log(4), INF, NAN]
    np.testing.assert_allclose(vj.jit(partial(nn.logsumexp, axis=1))(rows), want, rtol=1e-6)
    np.testing.assert_allclose(vj.jit(vj.grad(nn.logsumexp))(rows[1]), [0, 0.25, 0.75], rtol=1e-6)


def test_logsumexp_axes() -> None:
    x = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    want = np.log(np.exp(x.astype(np.float64)).sum((0, 2)))
    np.testing.assert_allclose(vj.jit(partial(nn.logsumexp, axis=(0, 2)))(f32(x)), want, rtol=1e-6)
    assert nn.logsumexp(f32(x), axis=-1, keepdims=True).shape == (2, 3, 1)
    assert nn.logsumexp(f32(x)).shape == ()


def test_softmax_and_log_softmax_at_the_extremes() -> None:
    np.testing.assert_allclose(vj.jit(nn.log_softmax)(f32([1000, 0, -1000])), [0, -1000, -2000])
    np.testing.assert_allclose(vj.jit(nn.softmax)(f32([1e4, 1e4, -1e30])), [0.5, 0.5, 0])
    slope = vj.jit(vj.grad(lambda v: -nn.log_softmax(v)[2]))(f32([1000, 0, -1000]))
    np.testing.assert_allclose(slope, [1, 0, -1])
    columns = vj.jit(partial(nn.softmax, axis=0))(f32([[0, 0], [math.log(3), 0]]))
    np.testing.assert_allclose(columns, [[0.25, 0.5], [0.75, 0.5]], rtol=1e-6)


def test_one_hot() -> None:
    got = nn.one_hot(jnp.asarray(np.array([0, 2, 5, -1], np.int32)), 3)
    np.testing.assert_array_equal(got, [[1, 0, 0], [0, 0, 1], [0, 0, 0], [0, 0, 0]])
    first = nn.one_hot(jnp.asarray(np.array([0, 2], np.int32)), 3, dtype=jnp.int32, axis=0)
    np.testing.assert_array_equal(first, [[1, 0], [0, 0], [0, 1]])
    assert first.dtype == np.int32


def test_norms_match_float64() -> None:
    rng = np.random.default_rng(1)
    x, w, b = rng.normal(3, 2, (4, 16)), rng.normal(size=16), rng.normal(size=16)
    rms = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w
    got = vj.jit(nn.rms_norm)(f32(x), f32(w))
    np.testing.assert_allclose(got, rms, rtol=2e-6, atol=1e-6)
    centred = x - x.mean(-1, keepdims=True)
    layer = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * w + b
    got = vj.jit(nn.layer_norm)(f32(x), f32(w), f32(b))
    np.testing.assert_allclose(got, layer, rtol=2e-5, atol=2e-6)


def test_rms_norm_does_not_overflow_in_f16_nor_vanish_near_zero() -> None:
    big = vj.jit(nn.rms_norm)(jnp.full((2, 512), 1000, jnp.float16), jnp.ones(512, jnp.float16))
    assert big.dtype == np.float16
    np.testing.assert_allclose(np.asarray(big, np.float32), 1.0, rtol=1e-3)
    zero = f32(np.zeros((1, 8)))
    np.testing.assert_array_equal(vj.jit(nn.rms_norm)(zero), np.zeros((1, 8)))
    slope = vj.jit(vj.grad(lambda t: nn.rms_norm(t).sum()))(zero)
    np.testing.assert_allclose(slope, np.full((1, 8), 1e3), rtol=1e-5)


def test_layer_norm_of_a_large_mean_does_not_cancel() -> None:
    x = (4096 + np.arange(16) * 2.0**-4).astype(np.float32)[None]
    want = (np.arange(16) - 7.5) * 2.0**-4
    want = want / np.sqrt((want**2).mean() + 1e-5)
    np.testing.assert_allclose(vj.jit(nn.layer_norm)(f32(x))[0], want, rtol=1e-5)


def attention_reference(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, allowed: np.ndarray, scale: float
) -> np.ndarray:
    """[B,T,N,H] attention in float64, one head after the other; an unseeing row is 0."""
    out = np.zeros(q.shape)
    group = q.shape[2] // k.shape[2]
    for b, t, n in np.ndindex(q.shape[:3]):
        seen = allowed[b, n, t]
        if seen.any():
            s = k[b, seen, n // group] @ q[b, t, n] * scale
            p = np.exp(s - s.max())
            out[b, t, n] = p @ v[b, seen, n // group] / p.sum()
    return out


def attention_operands() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(2)
    q, k, v = (rng.normal(size=s) for s in ((2, 5, 4, 8), (2, 6, 2, 8), (2, 6, 2, 8)))
    mask = rng.random((2, 1, 5, 6)) > 0.4
    mask[0, 0, 2] = False
    return q, k, v, mask


def test_grouped_attention_with_a_mask_and_a_row_that_sees_nothing() -> None:
    q, k, v, mask = attention_operands()
    attend = partial(nn.dot_product_attention, mask=jnp.asarray(mask), scale=0.3)
    got = vj.jit(attend)(f32(q), f32(k), f32(v))
    want = attention_reference(q, k, v, np.broadcast_to(mask, (2, 4, 5, 6)), 0.3)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert not np.asarray(got)[0, 2].any()


def test_causal_attention_with_bias_and_without_batch() -> None:
    q, k, v, _ = attention_operands()
    causal = np.tril(np.ones((5, 6), bool))
    want = attention_reference(q, k, v, np.broadcast_to(causal, (2, 4, 5, 6)), 8**-0.5)
    attend = vj.jit(partial(nn.dot_product_attention, is_causal=True))
    got = attend(f32(q), f32(k), f32(v))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    single = attend(f32(q[0]), f32(k[0]), f32(v[0]))
    np.testing.assert_allclose(single, want[0], rtol=1e-5, atol=1e-6)
    far = np.where(causal, 0.0, -1e9)[None, None]
    biased = vj.jit(partial(nn.dot_product_attention, bias=f32(far)))(f32(q), f32(k), f32(v))
    np.testing.assert_allclose(biased, want, rtol=1e-5, atol=1e-6)


def test_attention_gradients_are_finite_and_right_beside_a_row_that_sees_nothing() -> None:
    q, k, v, mask = attention_operands()

    def loss(q: Any, k: Any, v: Any) -> Any:
        out = nn.dot_product_attention(q, k, v, mask=jnp.asarray(mask))
        return (out * out).sum()

    grads = vj.jit(vj.grad(loss, argnums=(0, 1, 2)))(f32(q), f32(k), f32(v))
    assert not np.asarray(grads[0])[0, 2].any()
    allowed = np.broadcast_to(mask, (2, 4, 5, 6))
    rng = np.random.default_rng(3)
    for which, grad in enumerate(grads):
        operands = [q, k, v]
        direction, step = rng.normal(size=operands[which].shape), 1e-6
        ends = []
        for sign in (1, -1):
            moved = list(operands)
            moved[which] = operands[which] + sign * step * direction
            out = attention_reference(moved[0], moved[1], moved[2], allowed, 8**-0.5)
            ends.append((out**2).sum())
        want = (ends[0] - ends[1]) / (2 * step)
        np.testing.assert_allclose((np.asarray(grad) * direction).sum(), want, rtol=1e-4)


def test_attention_of_float16_whose_products_have_no_value_in_float16() -> None:
    """Logits and sums over many keys pass 65504; only their cotangents are rounded."""
    q = jnp.full((4, 1, 64), 60.0, jnp.float16)
    k = jnp.concatenate([q, -q])
    v = jnp.full((8, 1, 64), 3e4, jnp.float16)
    attend = vj.jit(nn.dot_product_attention)
    np.testing.assert_array_equal(attend(q, k, v), np.full((4, 1, 64), 3e4))
    grads = vj.jit(vj.grad(lambda *a: attend(*a)[..., 0].sum(), argnums=(0, 2)))
    to_query, to_value = grads(q, k, v)
    np.testing.assert_array_equal(to_query, np.zeros((4, 1, 64)))
    np.testing.assert_array_equal(to_value[:, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0])


def test_attention_names_the_shapes_that_do_not_fit() -> None:
    q, k = f32(np.zeros((1, 2, 3, 4))), f32(np.zeros((1, 2, 2, 4)))
    with pytest.raises(ShapeError, match=r"query \(1, 2, 3, 4\), key \(1, 2, 2, 4\)"):
        nn.dot_product_attention(q, k, k)
