"""First calls of a train step over a stack of layers: a Python loop, and a scan that compiles one.

Loss and gradient of all weights of a small causal transformer in a fresh process, cold caches. The
loop must grow linearly with its layers; the scan must not grow.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.case import Array, Case, Namespace, Tree

WIDTH, HEADS, HIDDEN, TOKENS = 128, 4, 256, 64
EPSILON = 1e-5


def _case(form: str, layers: int, *, quick: bool = False) -> Case:
    params = {"form": form, "layers": layers}
    name = f"{layers} layers as a {form}"
    return Case(
        name, "value_and_gradient", params, tolerance=1e-4, argnums=0, first=True, quick=quick
    )


CASES = (
    _case("loop", 2, quick=True),
    _case("scan", 2, quick=True),
    *(_case("loop", layers) for layers in (10, 20, 30)),
    *(_case("scan", layers) for layers in (10, 20, 30, 300)),
)


def inputs(case: Case) -> tuple[Tree, ...]:
    """Weights stacked over layers, and the rows x f32[1,TOKENS,WIDTH]."""
    generator, count = np.random.default_rng(11), case.params["layers"]

    def normal(*shape: int) -> np.ndarray:
        scale = np.float32(0.5 / shape[-2] ** 0.5)
        return generator.standard_normal((count, *shape), dtype=np.float32) * scale

    weights = {
        "qkv": normal(WIDTH, 3 * WIDTH),
        "out": normal(WIDTH, WIDTH),
        "up": normal(WIDTH, HIDDEN),
        "down": normal(HIDDEN, WIDTH),
        "norm": np.ones((count, 2, WIDTH), np.float32),
    }
    return weights, generator.standard_normal((1, TOKENS, WIDTH), dtype=np.float32)


def _layer(ns: Namespace) -> Callable[[Array, Tree], Array]:
    np_ = ns.np

    def norm(x: Array, weight: Array) -> Array:
        return x * ns.lax.rsqrt(np_.mean(x * x, -1, keepdims=True) + EPSILON) * weight

    def layer(x: Array, w: Tree) -> Array:
        mixed = norm(x, w["norm"][0]) @ w["qkv"]
        q, k, v = (
            np_.reshape(part, (1, TOKENS, HEADS, WIDTH // HEADS))
            for part in np_.split(mixed, 3, axis=-1)
        )
        seen = ns.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + np_.reshape(seen, (1, TOKENS, WIDTH)) @ w["out"]
        return x + ns.nn.silu(norm(x, w["norm"][1]) @ w["up"]) @ w["down"]

    return layer


def program(ns: Namespace, case: Case) -> Callable[..., Array]:
    """Mean square of what the layers make of x."""
    layer, count = _layer(ns), case.params["layers"]

    def looped(weights: Tree, x: Array) -> Array:
        for n in range(count):
            x = layer(x, {name: stack[n] for name, stack in weights.items()})
        return ns.np.mean(x * x)

    def scanned(weights: Tree, x: Array) -> Array:
        x, _ = ns.lax.scan(lambda carry, w: (layer(carry, w), None), x, weights)
        return ns.np.mean(x * x)

    return looped if case.params["form"] == "loop" else scanned


def torch_program(
    torch: Any, case: Case, given: tuple[Tree, ...], wrap: Callable[..., Any]
) -> Callable[[], Any]:
    """The loop; PyTorch has no scan that is differentiated."""
    del torch, case, given, wrap
    raise NotImplementedError("layers: vkjit and JAX only")


if __name__ == "__main__":
    from benchmarks import harness

    sys.exit(harness.main("layers", CASES, default=("vkjit", "jax")))
