"""Seconds per call of a compiled function that does next to nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.case import Array, Case, Namespace, Tree

CASES = (
    Case("x+1, 10 floats", "forward", {"count": 1, "size": 10}, on="both"),
    Case("20 arguments, 20 results", "forward", {"count": 20, "size": 10}, on="both"),
)


def inputs(case: Case) -> tuple[Tree, ...]:
    """`count` small vectors."""
    generator = np.random.default_rng(9)
    size = case.params["size"]
    return tuple(
        generator.standard_normal(size, dtype=np.float32) for _ in range(case.params["count"])
    )


def _increment(*given: Array) -> Any:
    return given[0] + 1 if len(given) == 1 else tuple(x + 1 for x in given)


def program(ns: Namespace, case: Case) -> Callable[..., Array]:
    """Adds one to every argument."""
    del ns, case
    return _increment


def torch_program(
    torch: Any, case: Case, given: tuple[Tree, ...], wrap: Callable[..., Any]
) -> Callable[[], Any]:
    """The same, eager or compiled."""
    del case
    function, tensors = wrap(_increment), [torch.from_numpy(x) for x in given]
    return lambda: function(*tensors)


if __name__ == "__main__":
    from benchmarks import harness

    default = ("vkjit", "jax", "torch", "torch-compile")
    sys.exit(harness.main("call_overhead", CASES, default=default))
