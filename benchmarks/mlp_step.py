"""One AdamW step of a classifier: 784-512-512-10 at batch 128, and a tiny one (dispatch)."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.case import ADAMW, Array, Case, Namespace, Tree


def _case(name: str, batch: int, widths: tuple[int, ...]) -> Case:
    products = [2.0 * batch * a * b for a, b in itertools.pairwise(widths)]
    flop = 3.0 * sum(products) - products[0]  # the input needs no gradient
    weights = sum(a * b + b for a, b in itertools.pairwise(widths))
    byte = 4.0 * weights * 6  # parameters and two moments, read and written
    params = {"batch": batch, "widths": widths}
    return Case(name, "step", params, tolerance=2e-5, flop=flop, byte=byte, memory=True, on="both")


CASES = (
    _case("784-512-512-10 batch 128", 128, (784, 512, 512, 10)),
    _case("32-32-10 batch 8", 8, (32, 32, 10)),
)


def inputs(case: Case) -> tuple[Tree, ...]:
    """Layers (He normal weights, zero biases), images, labels."""
    generator = np.random.default_rng(5)
    widths, batch = case.params["widths"], case.params["batch"]
    layers = [
        {
            "w": generator.standard_normal((a, b), dtype=np.float32) * np.float32((2 / a) ** 0.5),
            "b": np.zeros(b, np.float32),
        }
        for a, b in itertools.pairwise(widths)
    ]
    images = generator.standard_normal((batch, widths[0]), dtype=np.float32)
    return layers, images, generator.integers(0, widths[-1], batch).astype(np.int32)


def program(ns: Namespace, case: Case) -> Callable[..., Array]:
    """Mean cross-entropy of the classifier."""
    depth = len(case.params["widths"]) - 1

    def loss(layers: Tree, images: Array, labels: Array) -> Array:
        x = images
        for number, layer in enumerate(layers):
            x = ns.np.matmul(x, layer["w"]) + layer["b"]
            if number < depth - 1:
                x = ns.np.maximum(x, 0)
        top = ns.lax.stop_gradient(ns.np.max(x, axis=-1, keepdims=True))
        total = ns.np.log(ns.np.sum(ns.np.exp(x - top), axis=-1)) + top[:, 0]
        return ns.np.mean(total - ns.np.take_along_axis(x, labels[:, None], axis=-1)[:, 0])

    return loss


def _network(torch: Any, layers: Tree) -> Any:
    parts: list[Any] = []
    for layer in layers:
        linear = torch.nn.Linear(*layer["w"].shape)
        linear.weight.data = torch.from_numpy(layer["w"].T.copy())
        linear.bias.data = torch.from_numpy(layer["b"].copy())
        parts += [linear, torch.nn.ReLU()]
    return torch.nn.Sequential(*parts[:-1])


def torch_program(
    torch: Any, case: Case, given: tuple[Tree, ...], wrap: Callable[..., Any]
) -> Callable[[], Any]:
    """torch.nn with the fused AdamW."""
    del case
    network = _network(torch, given[0])
    images, labels = torch.from_numpy(given[1]), torch.from_numpy(given[2]).long()
    optimizer = torch.optim.AdamW(
        network.parameters(), lr=ADAMW.rate, weight_decay=ADAMW.decay, fused=True
    )
    forward = wrap(lambda x, y: torch.nn.functional.cross_entropy(network(x), y))

    def step() -> Any:
        optimizer.zero_grad(set_to_none=True)
        loss = forward(images, labels)
        loss.backward()
        optimizer.step()
        return loss

    return step


def torch_gradient(torch: Any, case: Case, given: tuple[Tree, ...]) -> Callable[[], Any]:
    """Loss and gradient, in the layout and order of `inputs`."""
    del case
    network = _network(torch, given[0])
    images, labels = torch.from_numpy(given[1]), torch.from_numpy(given[2]).long()

    def value_and_gradient() -> Any:
        loss = torch.nn.functional.cross_entropy(network(images), labels)
        loss.backward()
        linears = [part for part in network if isinstance(part, torch.nn.Linear)]
        return [loss, *(g for part in linears for g in (part.bias.grad, part.weight.grad.T))]

    return value_and_gradient


if __name__ == "__main__":
    from benchmarks import harness

    default = ("vkjit", "jax", "torch", "torch-compile")
    sys.exit(harness.main("mlp_step", CASES, default=default))
