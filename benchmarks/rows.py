"""Softmax, layer norm, RMS norm and the language-model loss, forward and backward.

The backward of the norms contracts the result with a given cotangent, so that all participants
compute the same vector-Jacobian product. Cross-entropy is value and gradient of the mean loss.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from benchmarks.case import Array, Case, Namespace, Tree

EPSILON = 1e-5
ROWS, WIDTH = 4096, 1024
VOCABULARY = 49152
Kind = Literal["forward", "gradient", "value_and_gradient"]


def _case(name: str, function: str, kind: Kind, shape: tuple[int, int], words: int) -> Case:
    weights = {"softmax": 1, "layer_norm": 3, "rms_norm": 2, "cross_entropy": 1}[function]
    argnums: int | tuple[int, ...] = tuple(range(weights)) if weights > 1 else 0
    params = {"function": function, "shape": shape}
    byte = 4.0 * shape[0] * shape[1] * words
    on: Literal["cpu", "gpu", "both"] = "cpu"
    if function == "cross_entropy":
        on = "both"
    elif shape[0] > ROWS:
        on = "gpu"
    return Case(name, kind, params, tolerance=2e-5, byte=byte, argnums=argnums, on=on)


# Words per element: the forward reads x and writes y; the backward reads x and the cotangent and
# writes dx; the loss reads x once, keeps nothing, and writes dx.
CASES = (
    _case("softmax 4096x1024", "softmax", "forward", (ROWS, WIDTH), 2),
    _case("softmax 4096x1024 backward", "softmax", "gradient", (ROWS, WIDTH), 3),
    _case("layer norm 4096x1024", "layer_norm", "forward", (ROWS, WIDTH), 2),
    _case("layer norm 4096x1024 backward", "layer_norm", "gradient", (ROWS, WIDTH), 3),
    _case("RMS norm 4096x1024", "rms_norm", "forward", (ROWS, WIDTH), 2),
    _case("RMS norm 4096x1024 backward", "rms_norm", "gradient", (ROWS, WIDTH), 3),
    _case("cross-entropy 512x49152", "cross_entropy", "value_and_gradient", (512, VOCABULARY), 2),
    _case("softmax 16384x2048", "softmax", "forward", (16384, 2048), 2),
    _case("softmax 16384x2048 backward", "softmax", "gradient", (16384, 2048), 3),
    _case("layer norm 16384x2048", "layer_norm", "forward", (16384, 2048), 2),
    _case("layer norm 16384x2048 backward", "layer_norm", "gradient", (16384, 2048), 3),
    _case("RMS norm 16384x2048", "rms_norm", "forward", (16384, 2048), 2),
    _case("RMS norm 16384x2048 backward", "rms_norm", "gradient", (16384, 2048), 3),
)


def inputs(case: Case) -> tuple[Tree, ...]:
    """x, the weights of a norm, and last the cotangent (gradient) or the labels."""
    generator = np.random.default_rng(3)
    rows, width = case.params["shape"]
    function = case.params["function"]
    x = generator.standard_normal((rows, width), dtype=np.float32)
    if function == "cross_entropy":
        return x, generator.integers(0, width, rows).astype(np.int32)
    given = [x]
    if function != "softmax":
        given.append(1 + 0.1 * generator.standard_normal(width, dtype=np.float32))
    if function == "layer_norm":
        given.append(0.1 * generator.standard_normal(width, dtype=np.float32))
    if case.kind == "gradient":
        given.append(generator.standard_normal((rows, width), dtype=np.float32))
    return tuple(given)


def _layer_norm(ns: Namespace) -> Callable[..., Array]:
    def layer_norm(x: Array, weight: Array, bias: Array) -> Array:
        centred = x - ns.np.mean(x, axis=-1, keepdims=True)
        variance = ns.np.mean(centred * centred, axis=-1, keepdims=True)
        return centred * ns.lax.rsqrt(variance + EPSILON) * weight + bias

    return layer_norm


def _rms_norm(ns: Namespace) -> Callable[..., Array]:
    def rms_norm(x: Array, weight: Array) -> Array:
        return x * ns.lax.rsqrt(ns.np.mean(x * x, axis=-1, keepdims=True) + EPSILON) * weight

    return rms_norm


def _cross_entropy(ns: Namespace) -> Callable[..., Array]:
    def cross_entropy(x: Array, labels: Array) -> Array:
        top = ns.lax.stop_gradient(ns.np.max(x, axis=-1, keepdims=True))
        total = ns.np.log(ns.np.sum(ns.np.exp(x - top), axis=-1)) + top[:, 0]
        picked = ns.np.take_along_axis(x, labels[:, None], axis=-1)[:, 0]
        return ns.np.mean(total - picked)

    return cross_entropy


def program(ns: Namespace, case: Case) -> Callable[..., Array]:
    """The function; for a backward case its contraction with the last argument."""
    function: Callable[..., Array] = {
        "softmax": lambda x: ns.nn.softmax(x, axis=-1),
        "layer_norm": _layer_norm(ns),
        "rms_norm": _rms_norm(ns),
        "cross_entropy": _cross_entropy(ns),
    }[case.params["function"]]
    if case.kind != "gradient":
        return function
    return lambda *given: ns.np.sum(function(*given[:-1]) * given[-1])


def torch_program(
    torch: Any, case: Case, given: tuple[Tree, ...], wrap: Callable[..., Any]
) -> Callable[[], Any]:
    """The library's own functions and autograd."""
    functional, width = torch.nn.functional, case.params["shape"][1]
    function = wrap(
        {
            "softmax": lambda x: functional.softmax(x, -1),
            "layer_norm": lambda x, w, b: functional.layer_norm(x, (width,), w, b, EPSILON),
            "rms_norm": lambda x, w: functional.rms_norm(x, (width,), w, EPSILON),
            "cross_entropy": functional.cross_entropy,
        }[case.params["function"]]
    )
    tensors = [torch.from_numpy(x) for x in given]
    if case.kind == "forward":
        return _without_gradient(torch, function, tensors)
    *inputs_, last = tensors
    for tensor in inputs_:
        tensor.requires_grad_()
    if case.kind == "gradient":
        return lambda: torch.autograd.grad(function(*inputs_), inputs_, last)

    def value_and_gradient() -> Any:
        loss = function(inputs_[0], labels)
        return (loss, *torch.autograd.grad(loss, inputs_))

    labels = last.long()
    return value_and_gradient


def _without_gradient(torch: Any, function: Callable[..., Any], tensors: list[Any]) -> Any:
    def call() -> Any:
        with torch.no_grad():
            return function(*tensors)

    return call


if __name__ == "__main__":
    from benchmarks import harness

    default = ("vkjit", "jax", "torch", "torch-compile")
    sys.exit(harness.main("rows", CASES, default=default))
