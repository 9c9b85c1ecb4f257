"""Pointwise kernel rules against the NumPy evaluator, through the kernel interpreter."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings

from vkjit import dtypes
from vkjit.ir.primitive import Op, Sample
from vkjit.lowering.kernel import nodes
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.check import verify
from vkjit.lowering.kernel.elements import scalar_type
from vkjit.lowering.kernel.interpret import run
from vkjit.lowering.kernel.types import (
    I1,
    I8,
    I64,
    Access,
    Buffer,
    CmpOp,
    ConvertOp,
    with_elem,
)
from vkjit.ops.registry import PRIMITIVES
from vkjit.ops.structural import Pointwise

from .strategies import draw, seeds, special_values

Array = np.ndarray[Any, Any]

POINTWISE = [p for p in PRIMITIVES if issubclass(p, Pointwise)]
pointwise = pytest.mark.parametrize("prim", POINTWISE, ids=lambda p: p.name)

# Functions composed of several kernel operations, in units of the last place of the result; the
# others have one operation, which the interpreter takes from NumPy.
UNITS = {"erfc": 16.0, "acosh": 16.0, "asinh": 8.0, "atanh": 8.0, "sinh": 16.0, "cosh": 16.0}
UNITS |= {"asin": 4.0, "acos": 4.0}  # the arctangent of a quotient with a square root


def kernel_of(sample: Sample, size: int, lanes: int) -> nodes.Kernel:
    """A kernel of one operation; each workgroup computes ``lanes`` consecutive elements."""
    b = Builder(sample.prim.name, index_type=I64)
    (out,) = sample.prim.infer_outs(sample.avals)
    memory: list[Buffer] = []
    for i, of in enumerate((*sample.avals, out)):
        elem = scalar_type(of.dtype)
        access = Access.WRITE if i == len(sample.avals) else Access.READ
        length = size if of.shape == out.shape else 1
        memory.append(b.buffer(f"x{i}", I8 if elem is I1 else elem, length, access))
    at = b.scaled(b.workgroup_id(), lanes)
    args: list[nodes.Value] = []
    for buffer, of in zip(memory, sample.avals, strict=False):
        whole = of.shape == out.shape
        x = b.load(buffer, at, lanes) if whole else b.splat(b.load(buffer, b.index(0)), lanes)
        if scalar_type(of.dtype) is I1:
            x = b.compare(CmpOp.NE, x, b.splat(b.const(I8, 0), lanes))
        args.append(x)
    assert isinstance(sample.prim, Pointwise)
    made = sample.prim.scalar(b, [a.dtype for a in sample.avals], *args)
    if scalar_type(out.dtype) is I1:
        made = b.convert(ConvertOp.ZEXT, made, with_elem(made.type, I8))
    b.store(memory[-1], at, made)
    return b.finish(grid=(size // lanes, 1, 1))


def assert_kernel_agrees(sample: Sample, values: list[Array], lanes: int) -> None:
    (want,) = (np.asarray(v) for v in sample.prim.evaluate_outs(*values))
    kernel = kernel_of(sample, want.size, lanes)
    verify(kernel)
    got = np.zeros(want.size, want.dtype)
    run(kernel, [*(np.array(v).reshape(-1) for v in values), got])
    assert_near(got.reshape(want.shape), want, sample)


def assert_near(got: Array, want: Array, of: Sample) -> None:
    """Equal; floats within a few units in the last place, the same NaNs, infinities and signs."""
    if not dtypes.is_float(want.dtype):
        np.testing.assert_array_equal(got, want, err_msg=str(of))
        return
    info = ml_dtypes.finfo(want.dtype)
    units = UNITS.get(of.prim.name, 2.0)
    a, b = got.astype(np.float64), want.astype(np.float64)
    least = float(info.smallest_normal)
    np.testing.assert_allclose(a, b, units * float(info.eps), units * least, err_msg=str(of))
    zero = (b == 0) & (a == 0)
    np.testing.assert_array_equal(np.signbit(a[zero]), np.signbit(b[zero]), err_msg=str(of))


def usable(sample: Sample) -> bool:
    (out,) = sample.prim.infer_outs(sample.avals)
    return out.size > 0


@pointwise
@settings(max_examples=2)
@given(seed=seeds)
def test_scalar_rule_on_ordinary_values(prim: type[Op], seed: int) -> None:
    for sample in filter(usable, prim.samples()):
        (out,) = sample.prim.infer_outs(sample.avals)
        for lanes in (1, 3):
            if out.size % lanes == 0:
                assert_kernel_agrees(sample, draw(sample, seed), lanes)


@pointwise
@settings(max_examples=4)
@given(seed=seeds)
def test_scalar_rule_on_special_values(prim: type[Op], seed: int) -> None:
    for sample in filter(usable, prim.samples()):
        values = [special_values(a, seed + i) for i, a in enumerate(sample.avals)]
        assert_kernel_agrees(sample, values, 1)
