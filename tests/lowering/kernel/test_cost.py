"""Floating-point operations counted from kernels."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import vkjit as vj
from vkjit.lowering.artifact import Launch
from vkjit.lowering.compile import compile_program
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.cost import flops
from vkjit.lowering.kernel.nodes import Kernel, MatLayout, Value
from vkjit.lowering.kernel.types import F16, F32, I32, Access, BinOp, CmpOp, MatType, MatUse
from vkjit.lowering.target import MINIMAL_GPU


def kernel(body: Callable[[Builder, Value], object]) -> Kernel:
    """6 workgroups of 32 invocations; ``body`` gets the element of each."""
    b = Builder("counted")
    x = b.buffer("x", F32, 192, Access.READ)
    i = b.add(b.scaled(b.workgroup_id(), 32), b.local_id())
    body(b, b.load(x, i))
    return b.finish((3, 2, 1), (32, 1, 1))


def test_scalars_and_index_arithmetic() -> None:
    assert flops(kernel(lambda b, x: None)) == 0
    assert flops(kernel(lambda b, x: b.add(b.mul(x, x), x))) == 2 * 192
    assert flops(kernel(lambda b, x: b.fma(x, x, x))) == 2 * 192
    assert flops(kernel(lambda b, x: b.reduce(BinOp.ADD, b.splat(x, 4)))) == 3 * 192


def test_loops_and_branches() -> None:
    def loop(b: Builder, x: Value) -> None:
        with b.loop(b.index(0), b.index(10), b.index(2), carried=[x]) as nest:
            nest.yields(b.add(nest.carried[0], x))
        branch = b.branch(b.compare(CmpOp.LT, x, b.const(F32, 0.0)))
        with branch.then():
            b.mul(x, x)
        with branch.otherwise():
            b.mul(b.mul(x, x), x)

    assert flops(kernel(loop)) == (5 + 2) * 192


def test_a_loop_of_unknown_length_hides_its_operations() -> None:
    def loop(b: Builder, x: Value) -> None:
        with b.loop(b.index(0), b.local_id()):
            b.mul(x, x)

    def idle(b: Builder, x: Value) -> None:
        with b.loop(b.index(0), b.local_id()):
            b.add(b.local_id(), b.index(1))

    assert flops(kernel(loop)) is None
    assert flops(kernel(idle)) == 0


def test_products_of_matrices() -> None:
    b = Builder("product")
    a = b.buffer("a", F16, 256, Access.READ)
    y = b.buffer("y", F32, 256, Access.WRITE)
    left, right, result = (
        MatType(elem, 16, 16, use)
        for elem, use in ((F16, MatUse.A), (F16, MatUse.B), (F32, MatUse.ACC))
    )
    start, stride = b.index(0), b.index(16)
    total = b.mat_mul_add(
        b.mat_load(a, start, stride, MatLayout.ROW, left),
        b.mat_load(a, start, stride, MatLayout.ROW, right),
        b.mat_fill(result),
    )
    b.mat_store(y, start, stride, MatLayout.ROW, total)
    made = b.finish((5, 1, 1), (64, 1, 1))
    assert flops(made) == 5 * 2 * (2 * 16**3)
    made.subgroup = 64
    assert flops(made) == 5 * (2 * 16**3)


@pytest.mark.parametrize("size", [64, 128])
def test_a_product_of_whole_tiles_is_counted_exactly(size: int) -> None:
    x = np.zeros((size, size), np.float32)
    plan = compile_program(vj.make_ir(lambda a, b: a @ b)(x, x), MINIMAL_GPU).plan
    counted = [flops(s.kernel) for s in plan.steps if isinstance(s, Launch)]
    assert max(c or 0.0 for c in counted) == 2 * size**3  # a sum of parts may follow


def test_integers_do_not_count() -> None:
    b = Builder("integers")
    x = b.buffer("x", I32, 32, Access.READ)
    value = b.load(x, b.local_id())
    b.add(b.mul(value, value), value)
    assert flops(b.finish((1, 1, 1), (32, 1, 1))) == 0
