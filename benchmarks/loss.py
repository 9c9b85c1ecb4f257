"""The head and its cross-entropy: loss and gradient of the hidden states, the head being frozen.

vkjit has the loss that makes logits block by block; JAX and PyTorch have theirs of whole logits.
Memory is half of what is compared: N x V logits and their gradient are the widest arrays of a
language model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from benchmarks.case import Array, Case, Namespace, Tree

HEADS = ((49152, 576), (49152, 1536), (151936, 576), (151936, 1536))
ROWS = (256, 2048)
CPU_FLOP = 3e11
"""More than this is a GPU's case: tens of seconds a call on two cores."""


def _case(rows: int, vocabulary: int, width: int) -> Case:
    shape = (rows, vocabulary, width)
    flop = 4.0 * rows * vocabulary * width  # logits, and the gradient of what they are made of
    on: Literal["cpu", "gpu", "both"] = "both" if flop < CPU_FLOP else "gpu"
    return Case(
        f"{rows} rows of a {vocabulary}x{width} head",
        "value_and_gradient",
        {"shape": shape},
        tolerance=2e-5,
        flop=flop,
        byte=4.0 * (vocabulary * width + 2 * rows * width),  # the head once, states and gradient
        check=shape == (256, 49152, 576),  # float64 references of the others take minutes
        memory=True,
        quick=shape == (256, 49152, 576),
        on=on,
    )


CASES = tuple(_case(rows, *head) for head in HEADS for rows in ROWS)


def inputs(case: Case) -> tuple[Tree, ...]:
    """States [N,d], head [V,d] so scaled that logits vary by about 1, and targets [N]."""
    generator = np.random.default_rng(7)
    rows, vocabulary, width = case.params["shape"]
    states = generator.standard_normal((rows, width), dtype=np.float32)
    head = generator.standard_normal((vocabulary, width), dtype=np.float32)
    head *= np.float32(width**-0.5)
    return states, head, generator.integers(0, vocabulary, rows).astype(np.int32)


def program(ns: Namespace, case: Case) -> Callable[..., Array]:
    """Mean cross-entropy."""
    del case
    if ns.name == "vkjit":
        return lambda states, head, targets: ns.np.mean(
            ns.nn.linear_cross_entropy(states, head, targets)
        )

    def of_logits(states: Array, head: Array, targets: Array) -> Array:
        logits = states @ head.T
        top = ns.lax.stop_gradient(ns.np.max(logits, axis=-1, keepdims=True))
        total = ns.np.log(ns.np.sum(ns.np.exp(logits - top), axis=-1)) + top[:, 0]
        picked = ns.np.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
        return ns.np.mean(total - picked)

    return of_logits


def torch_program(
    torch: Any, case: Case, given: tuple[Tree, ...], wrap: Callable[..., Any]
) -> Callable[[], Any]:
    """The library's linear layer, cross-entropy and autograd."""
    del case
    functional = torch.nn.functional
    states, head, targets = (torch.from_numpy(x) for x in given)
    states.requires_grad_()
    labels = targets.long()
    function = wrap(lambda x, w, y: functional.cross_entropy(functional.linear(x, w), y))

    def value_and_gradient() -> Any:
        loss = function(states, head, labels)
        return (loss, *torch.autograd.grad(loss, (states,)))

    return value_and_gradient


if __name__ == "__main__":
    from benchmarks import harness

    default = ("vkjit", "jax", "torch", "torch-compile")
    sys.exit(harness.main("loss", CASES, default=default))
