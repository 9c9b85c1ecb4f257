"""Every function of floats, legalized for the device, against the interpreter."""

from __future__ import annotations

import numpy as np
import pytest

from vkjit.lowering.artifact import Launch, Plan, PlannedBuffer, Range, Role
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.interpret import run
from vkjit.lowering.kernel.nodes import Kernel
from vkjit.lowering.kernel.types import (
    BF16,
    F16,
    F32,
    Access,
    ConvertOp,
    ScalarType,
    UnOp,
    VecType,
)
from vkjit.lowering.legalize import legalize

COUNT = 512
FUNCTIONS = [op for op in UnOp if op not in (UnOp.NOT, UnOp.POPCOUNT, UnOp.CLZ)]
SPECIAL = np.array(
    [0, -0.0, np.inf, -np.inf, np.nan, 1, -1, 0.5, -0.5, 88.7, 89, -104, 1e-8, 3e38], np.float32
)
# A driver may round twice in Fma, which the polynomials use: up to that many ULP of the result.
ULP = {F32: 4, F16: 1, BF16: 1}
PRECISION = {F32: 2.0**-23, F16: 2.0**-10, BF16: 2.0**-7}


def function(op: UnOp, elem: ScalarType, lanes: int) -> Kernel:
    """``op`` in ``elem`` between two conversions."""
    b = Builder(f"{op.value}_{elem}_{lanes}")
    x = b.buffer("x", F32, COUNT, Access.READ)
    y = b.buffer("y", F32, COUNT, Access.WRITE)
    i = b.scaled(b.add(b.scaled(b.workgroup_id(), 32), b.local_id()), lanes)
    value = b.load(x, i, lanes)
    type_ = VecType(elem, lanes) if lanes > 1 else elem
    result = b.unary(op, b.convert(ConvertOp.FLOAT, value, type_))
    b.store(y, i, b.convert(ConvertOp.FLOAT, result, value.type))
    return b.finish((COUNT // 32 // lanes, 1, 1), (32, 1, 1))


@pytest.mark.parametrize("elem", [F32, F16, BF16], ids=repr)
@pytest.mark.parametrize("op", FUNCTIONS, ids=lambda op: op.value)
def test_functions(vulkan, op: UnOp, elem: ScalarType):
    generator = np.random.default_rng(0)
    x = np.concatenate([SPECIAL, generator.standard_normal(COUNT - len(SPECIAL)) * 3])
    x = x.astype(np.float32)
    kernel = legalize(function(op, elem, 2), vulkan.target)
    wanted = np.empty_like(x)
    run(kernel, [x.copy(), wanted])
    size = x.nbytes
    planned = (PlannedBuffer(Role.INPUT, size), PlannedBuffer(Role.OUTPUT, size))
    launch = Launch(kernel, (Range(0, 0, size), Range(1, 0, size)))
    plan = Plan(kernel.name, planned, (launch,), frozenset(), 2 * size)
    (result,) = vulkan.load(plan).run([vulkan.upload(x)])
    found = vulkan.download(result, np.float32, (COUNT,))
    np.testing.assert_allclose(found, wanted, rtol=ULP[elem] * PRECISION[elem], atol=1e-37)
