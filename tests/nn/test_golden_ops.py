"""vkjit.nn against PyTorch (golden/ops) on every device, with gradients."""

from __future__ import annotations

from collections.abc import Callable, Generator
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


@pytest.fixture(autouse=True)
def on(device: str) -> Generator[None]:
    with vj.default_device(device):
        yield


def pulled(function: Callable[..., Any], *arguments: Any) -> tuple[Any, tuple[Any, ...]]:
    """The result of the jitted function, and what the last argument is pulled back to."""

    @vj.jit
    def run(*arguments: Any) -> Any:
        *primals, cotangent = arguments
        out, pull = vj.vjp(function, *primals)
        return out, pull(cotangent)

    return run(*arguments)


def close(got: Any, want: np.ndarray, name: str = "") -> None:
    bound = RELATIVE * max(np.abs(want).max(), 1e-3)
    np.testing.assert_allclose(np.asarray(got), want, rtol=0, atol=bound, err_msg=name)


ATTENTION = (
    "causal_gqa", "document", "sliding", "document_sliding", "cached_prefix", "masked_rows",
    "bidirectional",
)  # fmt: skip


INTERPRETED = ("masked_rows", "bidirectional")


@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name: str, load: Callable[[str], dict[str, np.ndarray]], device: str) -> None:
    if device == "reference" and name not in INTERPRETED:
        pytest.skip("ten seconds in the interpreter, which has the smallest ones")
    data = load(f"attention_{name}")
    q, k, v, cotangent = (
        jnp.asarray(data[f"in.{x}"].swapaxes(1, 2).copy()) for x in ("q", "k", "v", "d_o")
    )
    mask = jnp.asarray(data["in.mask"].astype(bool)[:, None])
    out, grads = pulled(partial(nn.dot_product_attention, mask=mask), q, k, v, cotangent)
    close(out, data["out.o"].swapaxes(1, 2))
    for which, grad in zip("qkv", grads, strict=True):
        close(grad, data[f"out.grad.{which}"].swapaxes(1, 2), which)


def test_rms_norm(load: Callable[[str], dict[str, np.ndarray]]) -> None:
    data = load("rms_norm")
    x, w, cotangent = (jnp.asarray(data[f"in.{name}"]) for name in ("x", "w", "d_y"))
    out, grads = pulled(lambda x, w: nn.rms_norm(x, w, eps=1e-5), x, w, cotangent)
    close(out, data["out.y"])
    for which, grad in zip("xw", grads, strict=True):
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
    values, (slopes,) = pulled(function, x, jnp.ones_like(x))
    for got, want in ((values, data[f"out.{name}"]), (slopes, data[f"out.grad.{name}"])):
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=5e-7)
