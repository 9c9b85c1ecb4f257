"""Floating-point operations of a kernel, counted from its body.

An addition, multiplication, comparison of extrema or function counts as one, ``Fma`` as two, a
product of cooperative matrices of m*k and k*n elements as 2*m*n*k. Operations on the padding of
ragged tiles count: they are executed. Of a branch the longer arm counts.
"""

from __future__ import annotations

import math

from vkjit.lowering.kernel.nodes import (
    Binary,
    Const,
    Fma,
    For,
    If,
    Kernel,
    MatMulAdd,
    Node,
    Reduce,
    Region,
    SubgroupReduce,
    Unary,
    Value,
)
from vkjit.lowering.kernel.types import MatScope, MatType, VecType, scalar_of

_SUBGROUP = 32  # invocations that share a matrix, where the kernel does not say


def flops(kernel: Kernel) -> float | None:
    """Floating-point operations of all invocations; None where a loop's length is not constant."""
    each = _of_region(kernel.body, kernel)
    if math.isnan(each):
        return None
    return each * math.prod(kernel.grid) * math.prod(kernel.workgroup)


def _of_region(region: Region, kernel: Kernel) -> float:
    """Per invocation; NaN stands for an unknown number and spreads."""
    return math.fsum(_of_node(node, kernel) for node in region.nodes)


def _of_node(node: Node, kernel: Kernel) -> float:
    match node:
        case Fma():
            return 2.0 * _lanes(node)
        case Binary() | Unary() | SubgroupReduce():
            return _lanes(node)
        case Reduce():
            return _lanes(node.x) - 1.0 if scalar_of(node.type).kind == "float" else 0.0
        case MatMulAdd():
            return _of_product(node, kernel)
        case For():
            return _times(_trips(node), _of_region(node.body, kernel))
        case If():
            arms = [_of_region(arm, kernel) for arm in (node.then, node.otherwise)]
            return math.nan if any(map(math.isnan, arms)) else max(arms)
        case _:
            return 0.0


def _lanes(value: Value) -> float:
    """Elements of a float value; 0 of others."""
    if isinstance(value.type, MatType) or scalar_of(value.type).kind != "float":
        return 0.0
    return float(value.type.lanes) if isinstance(value.type, VecType) else 1.0


def _of_product(node: MatMulAdd, kernel: Kernel) -> float:
    a, c = node.a.type, node.c.type
    assert isinstance(a, MatType)
    assert isinstance(c, MatType)
    shared = (
        math.prod(kernel.workgroup)
        if c.scope is MatScope.WORKGROUP
        else kernel.subgroup or _SUBGROUP
    )
    return 2.0 * c.rows * c.cols * a.cols / shared


def _trips(node: For) -> float:
    bounds = (node.lower, node.upper, node.step)
    numbers = [v.value for v in bounds if isinstance(v, Const) and isinstance(v.value, int)]
    return float(len(range(*numbers))) if len(numbers) == len(bounds) else math.nan


def _times(trips: float, each: float) -> float:
    """A loop of unknown length around nothing is nothing."""
    return 0.0 if each == 0.0 else trips * each
