"""First calls in a fresh process: trace, passes, code generation, run. Chains must be linear.

The chain of n operations is n/2 times ``tanh(x + c)`` with a different c each time. JAX needs
more than 14 GiB for the chain of 1000 (the harness caps it and reports the failure).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.case import Array, Case, Namespace, Tree, tree_map


def _case(name: str, function: str, equations: int, *, quick: bool = True) -> Case:
    params = {"function": function, "equations": equations}
    return Case(name, "forward", params, tolerance=1e-4, first=True, quick=quick)


CASES = (
    _case("x+1", "chain", 2),
    _case("chain of 100", "chain", 100),
    _case("chain of 1000", "chain", 1000, quick=False),
    _case("chain of 5000", "chain", 5000, quick=False),
    _case("150 dots", "dots", 300),
    _case("1000 inputs", "inputs", 2000, quick=False),
)


def inputs(case: Case) -> tuple[Tree, ...]:
    """A vector, a matrix and a square weight, or a list of vectors."""
    generator = np.random.default_rng(9)
    if case.params["function"] == "dots":
        x = generator.standard_normal((32, 64), dtype=np.float32)
        return x, 0.1 * generator.standard_normal((64, 64), dtype=np.float32)
    if case.params["function"] == "inputs":
        count = case.params["equations"] // 2
        return ([generator.standard_normal(64, dtype=np.float32) for _ in range(count)],)
    return (generator.standard_normal(1000, dtype=np.float32),)


def _function(tanh: Callable[[Array], Array], case: Case) -> Callable[..., Array]:
    rounds = case.params["equations"] // 2

    def chain(x: Array) -> Array:
        for n in range(rounds):
            x = tanh(x + (0.1 + 1e-4 * n))
        return x

    def dots(x: Array, weight: Array) -> Array:
        for _ in range(rounds):
            x = tanh(x @ weight)
        return x

    def many(parts: list[Array]) -> Array:
        total = parts[0]
        for part in parts[1:]:
            total = total + tanh(part)
        return total

    return {"chain": chain, "dots": dots, "inputs": many}[case.params["function"]]


def program(ns: Namespace, case: Case) -> Callable[..., Array]:
    """The chain in an array namespace."""
    return _function(ns.np.tanh, case)


def torch_program(
    torch: Any, case: Case, given: tuple[Tree, ...], wrap: Callable[..., Any]
) -> Callable[[], Any]:
    """The same, eager or compiled."""
    function = wrap(_function(torch.tanh, case))
    tensors = [tree_map(torch.from_numpy, x) for x in given]
    return lambda: function(*tensors)


if __name__ == "__main__":
    from benchmarks import harness

    sys.exit(harness.main("compile_time", CASES, default=("vkjit", "jax")))
