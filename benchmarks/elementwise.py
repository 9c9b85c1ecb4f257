"""Chains of pointwise operations, reductions and a transpose over 2^24 floats: bandwidth."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.case import Array, Case, Namespace, Tree

COUNT = 1 << 24
GPU_COUNT = 1 << 26
SQRT_2_OVER_PI = 0.7978845608028654


def _case(name: str, function: str, words: float, count: int = COUNT) -> Case:
    params = {"function": function, "count": count}
    return Case(name, "forward", params, tolerance=2e-5, byte=4.0 * count * words)


def _gpu(function: str, words: float) -> Case:
    params = {"function": function, "count": GPU_COUNT}
    byte = 4.0 * GPU_COUNT * words
    return Case(f"{function} 2^26", "forward", params, tolerance=2e-5, byte=byte, on="gpu")


CASES = (
    _case("add 2^24", "add", 3),
    _case("chain 2^24", "chain", 2),
    _case("chain 2^10", "chain", 2, 1 << 10),
    _case("exp 2^24", "exp", 2),
    _case("tanh 2^24", "tanh", 2),
    _case("sum of squares 2^24", "sum_squares", 1),
    _case("mean over rows 4096^2", "column_mean", 1),
    _case("max along rows 4096^2", "row_max", 1),
    _case("transpose 4096^2", "transpose", 2),
    _gpu("add", 3),
    _gpu("increment", 2),
    _gpu("chain", 2),
    _gpu("exp", 2),
    _gpu("sum_squares", 1),
    _gpu("column_mean", 1),
    _gpu("row_max", 1),
    _gpu("transpose", 2),
)
SQUARE = ("column_mean", "row_max", "transpose")


def inputs(case: Case) -> tuple[Tree, ...]:
    """One standard normal array, two for ``add``."""
    generator = np.random.default_rng(2)
    x = generator.standard_normal(case.params["count"], dtype=np.float32)
    if case.params["function"] in SQUARE:
        side = math.isqrt(len(x))
        x = x.reshape(side, side)
    return (x, x[::-1].copy()) if case.params["function"] == "add" else (x,)


def _chain(np_: Any) -> Callable[[Array], Array]:
    """gelu(1.25 x + 0.5) + tanh(x) / 2 + exp(-x^2), with the tanh form of gelu."""

    def chain(x: Array) -> Array:
        u = x * 1.25 + 0.5
        gelu = 0.5 * u * (1.0 + np_.tanh(SQRT_2_OVER_PI * (u + 0.044715 * u * u * u)))
        return gelu + 0.5 * np_.tanh(x) + np_.exp(-(x * x))

    return chain


def _function(np_: Any, name: str) -> Callable[..., Array]:
    functions: dict[str, Callable[..., Array]] = {
        "add": lambda x, y: x + y,
        "increment": lambda x: x + 1,
        "chain": _chain(np_),
        "exp": lambda x: np_.exp(x),
        "tanh": lambda x: np_.tanh(x),
        "sum_squares": lambda x: np_.sum(x * x),
        "column_mean": lambda x: np_.mean(x, axis=0),
        "row_max": lambda x: np_.max(x, axis=-1),
        "transpose": lambda x: x.T * 1.0,
    }
    return functions[name]


def program(ns: Namespace, case: Case) -> Callable[..., Array]:
    """The function in an array namespace."""
    return _function(ns.np, case.params["function"])


def torch_program(
    torch: Any, case: Case, given: tuple[Tree, ...], wrap: Callable[..., Any]
) -> Callable[[], Any]:
    """The function in PyTorch."""
    names = SimpleNamespace(
        exp=torch.exp,
        tanh=torch.tanh,
        sum=torch.sum,
        mean=lambda x, axis: x.mean(axis),
        max=lambda x, axis: x.amax(axis),
    )
    function = _function(names, case.params["function"])
    if case.params["function"] == "transpose":
        function = _contiguous_transpose
    function = wrap(function)
    arguments = [torch.from_numpy(x) for x in given]
    return lambda: function(*arguments)


def _contiguous_transpose(x: Any) -> Any:
    return x.T.contiguous()


if __name__ == "__main__":
    from benchmarks import harness

    default = ("vkjit", "jax", "torch", "torch-compile")
    sys.exit(harness.main("elementwise", CASES, default=default))
