"""vkjit.nn against PyTorch (golden/ops): attention, norm, activations with their gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import vkjit as vj
import vkjit.numpy as jnp
from vkjit import nn

RELATIVE = 2e-6  # of the array's largest entry: a few f32 roundings


@pytest.fixture
def load(shared: Path) -> Callable[[str], dict[str, np.ndarray]]:
    return lambda name: load_file(shared / "golden" / "ops" / f"{name}.safetensors")


def close(got: Any, want: np.ndarray, name: str = "") -> None:
    bound = RELATIVE * max(np.abs(want).max(), 1e-3)
    np.testing.assert_allclose(np.asarray(got), want, rtol=0, atol=bound, err_msg=name)


ATTENTION = (
    "causal_gqa", "document", "sliding", "document_sliding", "cached_prefix", "masked_rows",
    "bidirectional",
)  # fmt: skip


@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name: str, load: Callable[[str], dict[str, np.ndarray]]) -> None:
    data = load(f"attention_{name}")
    q, k, v, cotangent = (
        jnp.asarray(data[f"in.{x}"].swapaxes(1, 2).copy()) for x in ("q", "k", "v", "d_o")
    )
    mask = jnp.asarray(data["in.mask"].astype(bool)[:, None])
    out, pull = vj.vjp(partial(nn.dot_product_attention, mask=mask), q, k, v)
    close(out, data["out.o"].swapaxes(1, 2))
    for which, grad in zip("qkv", pull(cotangent), strict=True):
        close(grad, data[f"out.grad.{which}"].swapaxes(1, 2), which)


def test_rms_norm(load: Callable[[str], dict[str, np.ndarray]]) -> None:
    data = load("rms_norm")
    x, w, cotangent = (jnp.asarray(data[f"in.{name}"]) for name in ("x", "w", "d_y"))
    out, pull = vj.vjp(lambda x, w: nn.rms_norm(x, w, eps=1e-5), x, w)
    close(out, data["out.y"])
    for which, grad in zip("xw", pull(cotangent), strict=True):
        close(grad, data[f"out.grad.{which}"], which)


UNARY: dict[str, Callable[[Any], Any]] = {
    "gelu_erf": partial(nn.gelu, approximate=False),
    "gelu_tanh": nn.gelu,
    "logsigmoid": nn.log_sigmoid,
    "relu": nn.relu,
    "sigmoid": nn.sigmoid,
    "silu": nn.silu,
    "softplus": nn.softplus,
}


@pytest.mark.parametrize("name", UNARY)
def test_activations(name: str, load: Callable[[str], dict[str, np.ndarray]]) -> None:
    data, function = load("unary"), UNARY[name]
    x = jnp.asarray(data["in.x"])
    slopes = vj.grad(lambda x: function(x).sum())(x)
    for got, want in ((function(x), data[f"out.{name}"]), (slopes, data[f"out.grad.{name}"])):
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=5e-7)
