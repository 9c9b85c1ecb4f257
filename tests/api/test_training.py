"""Whole training steps: the same losses on every device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import vkjit as vj
from vkjit import nn
from vkjit import numpy as vnp

Params = dict[str, Any]
Loss = Callable[[Params, Any, Any], Any]

RATE = 0.1


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray[Any, Any]:
    """Weights of variance 1 / fan-in."""
    return (rng.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32)


def mlp_loss(params: Params, x: Any, y: Any) -> Any:
    hidden = nn.gelu(x @ params["w1"] + params["b1"])
    logits = hidden @ params["w2"] + params["b2"]
    return -vnp.mean(vnp.sum(nn.log_softmax(logits) * nn.one_hot(y, 5), -1))


def mlp() -> tuple[Loss, Params, Any, Any]:
    rng = np.random.default_rng(1)
    params = {
        "w1": normal(rng, 12, 33),
        "b1": np.zeros(33, np.float32),
        "w2": normal(rng, 33, 5),
        "b2": np.zeros(5, np.float32),
    }
    x = rng.normal(size=(24, 12)).astype(np.float32)
    return mlp_loss, params, x, rng.integers(0, 5, 24).astype(np.int32)


HEADS, WIDTH = 2, 8


def rope(x: Any, cos: Any, sin: Any) -> Any:
    """Rotates halves of the head axis; x is (batch, time, heads, width)."""
    left, right = x[..., : WIDTH // 2], x[..., WIDTH // 2 :]
    return vnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)


def attention(params: Params, x: Any) -> Any:
    batch, time, _ = x.shape
    angles = np.arange(time)[:, None] * 100.0 ** (-np.arange(WIDTH // 2) / (WIDTH // 2))
    cos, sin = (f(angles).astype(np.float32)[:, None, :] for f in (np.cos, np.sin))
    q, k, v = (
        (x @ params[name]).reshape((batch, time, HEADS, WIDTH)) for name in ("wq", "wk", "wv")
    )
    out = nn.dot_product_attention(rope(q, cos, sin), rope(k, cos, sin), v, is_causal=True)
    return out.reshape((batch, time, HEADS * WIDTH)) @ params["wo"]


def llama_loss(params: Params, tokens: Any, labels: Any) -> Any:
    x = vnp.take(params["embed"], tokens, axis=0)
    x = x + attention(params, nn.rms_norm(x, params["norm1"]))
    h = nn.rms_norm(x, params["norm2"])
    x = x + (nn.silu(h @ params["gate"]) * (h @ params["up"])) @ params["down"]
    logits = nn.rms_norm(x, params["norm3"]) @ params["embed"].T
    picked = vnp.take_along_axis(nn.log_softmax(logits), labels[..., None], axis=-1)
    return -vnp.mean(picked)


def llama() -> tuple[Loss, Params, Any, Any]:
    rng = np.random.default_rng(2)
    size, vocabulary, inner = HEADS * WIDTH, 29, 24
    params: Params = {name: normal(rng, size, size) for name in ("wq", "wk", "wv", "wo")}
    params |= {f"norm{i}": np.ones(size, np.float32) for i in (1, 2, 3)}
    params |= {"gate": normal(rng, size, inner), "up": normal(rng, size, inner)}
    params |= {"down": normal(rng, inner, size), "embed": normal(rng, vocabulary, size)}
    tokens = rng.integers(0, vocabulary, (2, 10)).astype(np.int32)
    return llama_loss, params, tokens[:, :-1], tokens[:, 1:]


MODELS = {"mlp": (mlp, 5), "llama": (llama, 3)}


def train(model: str, device: str) -> tuple[list[float], Params]:
    """Losses of a few steps of gradient descent, and the weights after them."""
    make, steps = MODELS[model]
    loss, params, x, y = make()

    @functools.partial(vj.jit, donate_argnums=0)
    def step(params: Params, x: Any, y: Any) -> tuple[Params, Any]:
        value, grads = vj.value_and_grad(loss)(params, x, y)
        return vj.tree.map(lambda p, g: p - RATE * g, params, grads), value

    losses: list[float] = []
    with vj.default_device(device):
        for _ in range(steps):
            params, value = step(params, x, y)
            losses.append(float(value))
        return losses, vj.tree.map(np.asarray, params)


@functools.cache
def expected(model: str) -> tuple[list[float], Params]:
    """The same steps in float64 by NumPy, operation by operation."""
    make, steps = MODELS[model]
    loss, params, x, y = make()
    losses: list[float] = []
    with vj.enable_x64(), vj.default_device("reference"):
        params = vj.tree.map(lambda p: vnp.asarray(p, np.float64), params)
        for _ in range(steps):
            value, grads = vj.value_and_grad(loss)(params, x, y)
            params = vj.tree.map(lambda p, g: p - RATE * g, params, grads)
            losses.append(float(value))
        return losses, vj.tree.map(np.asarray, params)


@pytest.mark.parametrize("model", list(MODELS))
def test_training_agrees_with_float64(model: str, device: str) -> None:
    losses, params = train(model, device)
    want, weights = expected(model)
    assert want[-1] < want[0], "the model does not learn: the test shows nothing"
    np.testing.assert_allclose(losses, want, 1e-5)
    for name, weight in weights.items():
        np.testing.assert_allclose(params[name], weight, 1e-4, 1e-5, err_msg=name)
