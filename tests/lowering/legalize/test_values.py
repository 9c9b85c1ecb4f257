"""A legalized kernel computes what the original does, to the bit, and uses only what is there."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lowering.kernel.strategies import arrays_for, kernels
from vkjit.errors import MissingRuleError
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.check import verify
from vkjit.lowering.kernel.interpret import run
from vkjit.lowering.kernel.nodes import Binary, Fma, Kernel, Unary
from vkjit.lowering.kernel.text import text
from vkjit.lowering.kernel.types import (
    BF16,
    F16,
    F32,
    F64,
    I8,
    I16,
    I32,
    I64,
    Access,
    BinOp,
    ConvertOp,
    ScalarType,
    UnOp,
    scalar_of,
)
from vkjit.lowering.kernel.walk import all_nodes
from vkjit.lowering.legalize import legalize
from vkjit.lowering.target import ALL_SCALARS, MINIMAL_GPU, REFERENCE, Target

SMALL_GPU = dataclasses.replace(
    MINIMAL_GPU, name="small-gpu", storage=frozenset({F32, I32, I8, I16, F16, BF16})
)
CPU = dataclasses.replace(REFERENCE, name="cpu-test", arithmetic=ALL_SCALARS - {BF16})
SMALL = (F32, I32, I8, I16, F16, BF16)


def raw(arrays: list[np.ndarray], kernel: Kernel) -> list[np.ndarray]:
    """The arrays as a legalized kernel takes them: ``bf16`` may have become ``i16``."""
    return [
        a.view(np.int16) if a.dtype == ml_dtypes.bfloat16 and m.elem is I16 else a
        for a, m in zip(arrays, kernel.buffers, strict=True)
    ]


def check_same(kernel: Kernel, target: Target, seed: int) -> None:
    before = text(kernel)
    made = legalize(kernel, target)
    assert text(kernel) == before
    verify(made)
    want, got = arrays_for(kernel, seed), arrays_for(kernel, seed)
    run(kernel, want)
    run(made, raw(got, made))
    for a, b in zip(want, got, strict=True):
        wide = np.float64 if a.dtype.kind in "fV" or a.dtype == ml_dtypes.bfloat16 else a.dtype
        np.testing.assert_array_equal(a.astype(wide), b.astype(wide))
        if wide is np.float64:
            numbers = ~np.isnan(a.astype(wide))
            np.testing.assert_array_equal(np.signbit(a)[numbers], np.signbit(b)[numbers])


def arithmetic_types(kernel: Kernel) -> set[ScalarType]:
    nodes = all_nodes(kernel.body)
    return {scalar_of(n.type) for n in nodes if isinstance(n, Unary | Binary | Fma)}


@settings(max_examples=30, deadline=None)
@given(kernels(SMALL, (I32,)), st.integers(0, 99))
def test_narrow_types_in_32_bits(kernel: Kernel, seed: int) -> None:
    check_same(kernel, SMALL_GPU, seed)
    used = arithmetic_types(legalize(kernel, SMALL_GPU))
    assert used <= {F32, I32, kernel.index_type} | {t for t in used if t.kind == "bool"}


@settings(max_examples=30, deadline=None)
@given(kernels((F32, I64, F64, I8, BF16)), st.integers(0, 99))
def test_only_bfloat_is_lacking(kernel: Kernel, seed: int) -> None:
    check_same(kernel, CPU, seed)


def convert_kernel(source: ScalarType, target: ScalarType, op: ConvertOp, n: int) -> Kernel:
    b = Builder("convert", I32)
    x = b.buffer("x", source, n, Access.READ)
    y = b.buffer("y", target, n, Access.WRITE)
    i = b.workgroup_id()
    b.store(y, i, b.convert(op, b.load(x, i), target))
    return b.finish(grid=(n, 1, 1))


def test_rounding_to_bfloat_is_that_of_the_hardware() -> None:
    bits = np.arange(0, 1 << 32, 65521, dtype=np.uint64).astype(np.uint32)
    ties = np.arange(0, 1 << 16, dtype=np.uint32) << 16 | np.uint32(0x8000)
    x = np.concatenate((bits, ties, ties + np.uint32(1), ties - np.uint32(1))).view(np.float32)
    y = np.zeros(len(x), np.int16)
    run(legalize(convert_kernel(F32, BF16, ConvertOp.FLOAT, len(x)), CPU), [x, y])
    with np.errstate(all="ignore"):
        want = x.astype(ml_dtypes.bfloat16)
    got = y.view(ml_dtypes.bfloat16)
    numbers = ~np.isnan(x)
    np.testing.assert_array_equal(got.view(np.int16)[numbers], want.view(np.int16)[numbers])
    assert np.isnan(got[~numbers].astype(np.float32)).all()


def test_bfloat_buffers_become_16_bit_integers() -> None:
    made = legalize(convert_kernel(F32, BF16, ConvertOp.FLOAT, 4), CPU)
    assert made.buffers[1].elem is I16
    assert BF16 not in verify(made).types


def test_native_bfloat_conversion_stays() -> None:
    made = legalize(convert_kernel(F32, BF16, ConvertOp.FLOAT, 4), REFERENCE)
    assert made.buffers[1].elem is BF16
    assert "convert float" in text(made)


@pytest.mark.parametrize("elem", [I8, I16, I32, I64])
@pytest.mark.parametrize("op", [UnOp.POPCOUNT, UnOp.CLZ])
def test_bit_counts(op: UnOp, elem: ScalarType) -> None:
    b = Builder("count", I32)
    x = b.buffer("x", elem, 200, Access.READ)
    y = b.buffer("y", elem, 200, Access.WRITE)
    b.store(y, b.workgroup_id(), b.unary(op, b.load(x, b.workgroup_id())))
    kernel = b.finish(grid=(200, 1, 1))
    target = dataclasses.replace(
        SMALL_GPU, storage=ALL_SCALARS, arithmetic=frozenset({F32, I32, I64})
    )
    made = legalize(kernel, target)
    assert op.value not in text(made)
    arrays = arrays_for(kernel, 3)
    arrays[0][:4] = (0, 1, -1, np.iinfo(arrays[0].dtype).min)
    width = elem.bits
    run(made, arrays)
    strings = [format(int(v) & ((1 << width) - 1), f"0{width}b") for v in arrays[0]]
    count = [s.count("1") if op is UnOp.POPCOUNT else len(s) - len(s.lstrip("0")) for s in strings]
    np.testing.assert_array_equal(arrays[1], count)


def unary_kernel(op: UnOp, elem: ScalarType) -> Kernel:
    b = Builder("f", I32)
    x = b.buffer("x", elem, 4, Access.READ_WRITE)
    b.store(x, b.workgroup_id(), b.unary(op, b.load(x, b.workgroup_id())))
    return b.finish(grid=(4, 1, 1))


def test_functions_of_float64_stay_on_the_cpu() -> None:
    assert "exp " in text(legalize(unary_kernel(UnOp.EXP, F64), CPU))


def test_the_inverse_error_function_of_float64() -> None:
    x = np.array([0.3, -0.999, 1.0, -0.0])
    kernel = unary_kernel(UnOp.ERF_INV, F64)
    want, got = x.copy(), x.copy()
    run(kernel, [want])
    made = legalize(kernel, CPU)
    assert "erf_inv" not in text(made)
    run(made, [got])
    np.testing.assert_allclose(got, want, rtol=1e-15, atol=0)
    assert np.signbit(got[3])


def test_functions_of_float64_are_missing_on_a_gpu() -> None:
    gpu = dataclasses.replace(SMALL_GPU, storage=ALL_SCALARS, arithmetic=ALL_SCALARS)
    with pytest.raises(MissingRuleError, match="exp of f64, which small-gpu has no function for"):
        legalize(unary_kernel(UnOp.EXP, F64), gpu)


@pytest.mark.parametrize("elem", [I8, I64, F16])
def test_a_type_that_cannot_be_stored_is_named(elem: ScalarType) -> None:
    b = Builder("f", I32)
    x = b.buffer("x", elem, 4, Access.READ_WRITE)
    b.store(x, b.index(0), b.load(x, b.index(1)))
    with pytest.raises(MissingRuleError, match=f"x holds {elem}, which minimal-gpu cannot store"):
        legalize(b.finish(grid=(1, 1, 1)), MINIMAL_GPU)


def test_arithmetic_in_64_bits_is_named() -> None:
    b = Builder("f", I32)
    x = b.buffer("x", I32, 4, Access.READ_WRITE)
    wide = b.convert(ConvertOp.SEXT, b.load(x, b.index(1)), I64)
    b.store(x, b.index(0), b.convert(ConvertOp.TRUNC, b.mul(wide, wide), I32))
    with pytest.raises(MissingRuleError, match="a value of type i64"):
        legalize(b.finish(grid=(1, 1, 1)), MINIMAL_GPU)


def test_half_functions_go_through_float32() -> None:
    b = Builder("f", I64)
    x = b.buffer("x", F16, 256, Access.READ_WRITE)
    y = b.buffer("y", F16, 256, Access.READ)
    i = b.workgroup_id()
    b.store(x, i, b.binary(BinOp.POW, b.unary(UnOp.EXP, b.load(x, i)), b.load(y, i)))
    kernel = b.finish(grid=(256, 1, 1))
    rng = np.random.default_rng(0)
    x_, y_ = (rng.normal(size=256).astype(np.float16) for _ in range(2))
    want, got = x_.copy(), x_.copy()
    run(kernel, [want, y_])
    run(legalize(kernel, CPU), [got, y_])
    np.testing.assert_allclose(got.astype(float), want.astype(float), rtol=2e-3)
