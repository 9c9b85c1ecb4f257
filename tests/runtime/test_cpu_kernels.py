"""Arithmetic of hand-built kernels gives the same bits, or nearly, on CPU and interpreter."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests.runtime.kernels import DTYPES, check, elementwise, run_elementwise, run_on, values
from vkjit.errors import InternalError
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Value
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
    CmpOp,
    ConvertOp,
    ScalarType,
    UnOp,
    VecType,
)

FLOAT_BINARY = (BinOp.ADD, BinOp.SUB, BinOp.MUL, BinOp.DIV, BinOp.MIN, BinOp.MAX)
INT_BINARY = (
    BinOp.ADD, BinOp.SUB, BinOp.MUL, BinOp.MIN_S, BinOp.MIN_U, BinOp.MAX_S, BinOp.MAX_U,
    BinOp.AND, BinOp.OR, BinOp.XOR,
)  # fmt: skip
ROUNDINGS = (
    UnOp.NEG, UnOp.ABS, UnOp.FLOOR, UnOp.CEIL, UnOp.ROUND_EVEN, UnOp.TRUNC, UnOp.SQRT, UnOp.RSQRT,
)  # fmt: skip
LIBM = (
    UnOp.EXP, UnOp.EXP2, UnOp.EXPM1, UnOp.LOG, UnOp.LOG1P, UnOp.SIN, UnOp.COS, UnOp.TAN, UnOp.ATAN,
    UnOp.TANH, UnOp.ERF,
)  # fmt: skip


@pytest.mark.parametrize("elem", [F32, F64], ids=str)
@pytest.mark.parametrize("op", FLOAT_BINARY, ids=str)
def test_float_operations_are_exact(op: BinOp, elem: ScalarType) -> None:
    run_elementwise(elem, elem, lambda b, x, y: b.binary(op, x, y))


@pytest.mark.parametrize("op", [BinOp.ADD, BinOp.SUB, BinOp.MUL, BinOp.DIV], ids=str)
def test_half_operations_are_exact(op: BinOp) -> None:
    run_elementwise(F16, F16, lambda b, x, y: b.binary(op, x, y))


@pytest.mark.parametrize("elem", [I8, I16, I32, I64], ids=str)
@pytest.mark.parametrize("op", INT_BINARY, ids=str)
def test_integer_operations_wrap(op: BinOp, elem: ScalarType) -> None:
    run_elementwise(elem, elem, lambda b, x, y: b.binary(op, x, y))


@pytest.mark.parametrize("elem", [I8, I32], ids=str)
@pytest.mark.parametrize("op", [BinOp.DIV_S, BinOp.DIV_U, BinOp.REM_S, BinOp.REM_U], ids=str)
def test_integer_division(op: BinOp, elem: ScalarType) -> None:
    # 3 is neither 0 nor -1, the divisors whose result is undefined.
    run_elementwise(elem, elem, lambda b, x, y: b.binary(op, x, b.const(x.type, 3)))


@pytest.mark.parametrize("op", [BinOp.DIV_S, BinOp.DIV_U, BinOp.REM_S, BinOp.REM_U], ids=str)
def test_division_never_ends_the_process(op: BinOp) -> None:
    """Zero divisors are undefined; the lowest number by -1 wraps; the others are exact."""
    low = np.iinfo(np.int32).min
    x = np.array([7, -7, low, low, low, 5, -9, 0, 0, 1, 2, 3, 4, 5, 6, -1], np.int32)
    y = np.array([2, 2, -1, 1, low, 0, 0, 0, 1, -1, 3, -3, low, -1, 5, -1], np.int32)
    kernel = elementwise(I32, I32, 4, lambda b, x, y: b.binary(op, x, y))
    (want,) = run_on("reference", kernel, [x, y, np.zeros(16, np.int32)])
    (got,) = run_on("cpu", kernel, [x, y, np.zeros(16, np.int32)])
    np.testing.assert_array_equal(got[y != 0], want[y != 0])


@pytest.mark.parametrize("op", [BinOp.SHL, BinOp.SHR_L, BinOp.SHR_A], ids=str)
def test_shifts(op: BinOp) -> None:
    run_elementwise(
        I32, I32, lambda b, x, y: b.binary(op, x, b.binary(BinOp.AND, y, b.const(y.type, 31)))
    )


@pytest.mark.parametrize("op", ROUNDINGS, ids=str)
def test_float_unary_operations(op: UnOp) -> None:
    run_elementwise(F32, F32, lambda b, x, y: b.unary(op, b.mul(x, x)), ulp=1)


@pytest.mark.parametrize("op", [UnOp.NEG, UnOp.NOT, UnOp.POPCOUNT, UnOp.CLZ], ids=str)
def test_integer_unary_operations(op: UnOp) -> None:
    for elem in (I8, I32):
        run_elementwise(elem, elem, lambda b, x, y: b.unary(op, x))


@pytest.mark.parametrize("op", LIBM, ids=str)
def test_double_functions_come_from_the_c_library(op: UnOp) -> None:
    run_elementwise(F64, F64, lambda b, x, y: b.unary(op, b.unary(UnOp.ABS, x)), ulp=4)


@pytest.mark.parametrize("op", [BinOp.POW, BinOp.ATAN2], ids=str)
def test_double_functions_of_two_operands(op: BinOp) -> None:
    run_elementwise(F64, F64, lambda b, x, y: b.binary(op, b.unary(UnOp.ABS, x), y), ulp=4)


def test_single_precision_functions_must_have_been_expanded() -> None:
    kernel = elementwise(F32, F32, 4, lambda b, x, y: b.unary(UnOp.EXP, x))
    with pytest.raises(InternalError, match="exp of vec<f32,4> in elementwise; legalize"):
        run_on("cpu", kernel, [np.zeros(16, np.float32)] * 3)


@pytest.mark.parametrize("op", list(CmpOp), ids=str)
def test_comparisons(op: CmpOp) -> None:
    def formula(b: Builder, x: Value, y: Value) -> Value:
        near = (
            b.binary(BinOp.AND, x, b.const(x.type, 3)),
            b.binary(BinOp.AND, y, b.const(y.type, 3)),
        )
        kind = VecType(I8, x.type.lanes) if isinstance(x.type, VecType) else I8
        return b.convert(ConvertOp.ZEXT, b.compare(op, *near), kind)

    run_elementwise(I32, I8, formula)


@pytest.mark.parametrize(
    "op", [CmpOp.EQ, CmpOp.NE, CmpOp.LT, CmpOp.LE, CmpOp.GT, CmpOp.GE], ids=str
)
def test_float_comparisons_with_nan(op: CmpOp) -> None:
    x = np.array([np.nan, 1, 1, 2, -0.0, np.inf, np.nan, 0], np.float32)
    y = np.array([np.nan, 1, 2, 1, 0.0, np.inf, 0, np.nan], np.float32)

    def formula(b: Builder, x: Value, y: Value) -> Value:
        return b.convert(ConvertOp.ZEXT, b.compare(op, x, y), VecType(I8, 2))

    check(elementwise(F32, I8, 2, formula), x, y, np.zeros(8, np.int8))


def test_minimum_and_maximum_spread_nan() -> None:
    x = np.array([np.nan, 1, -0.0, 0.0, np.inf, np.nan, -np.inf, 3], np.float32)
    y = np.array([1, np.nan, 0.0, -0.0, np.nan, np.nan, 2, 3], np.float32)
    for op in (BinOp.MIN, BinOp.MAX):
        kernel = elementwise(F32, F32, 2, lambda b, x, y, op=op: b.binary(op, x, y))
        (got,) = check(kernel, x, y, np.zeros(8, np.float32))
        assert np.isnan(got[[0, 1, 4, 5]]).all()
        np.testing.assert_array_equal(got[2:4], 0.0)  # of -0.0 and 0.0 either


CONVERSIONS = [
    (ConvertOp.FLOAT, F32, F64), (ConvertOp.FLOAT, F64, F32), (ConvertOp.FLOAT, F32, F16),
    (ConvertOp.FLOAT, F16, F32), (ConvertOp.FLOAT, F32, BF16), (ConvertOp.FLOAT, BF16, F32),
    (ConvertOp.FLOAT, F16, BF16), (ConvertOp.FLOAT, BF16, F16), (ConvertOp.FLOAT, BF16, F64),
    (ConvertOp.SINT_TO_FLOAT, I8, F32), (ConvertOp.UINT_TO_FLOAT, I8, F32),
    (ConvertOp.SINT_TO_FLOAT, I64, F32), (ConvertOp.SINT_TO_FLOAT, I32, F64),
    (ConvertOp.SINT_TO_FLOAT, I8, BF16), (ConvertOp.SINT_TO_FLOAT, I8, F16),
    (ConvertOp.FLOAT_TO_SINT, F32, I32), (ConvertOp.FLOAT_TO_SINT, BF16, I8),
    (ConvertOp.FLOAT_TO_SINT, F16, I32), (ConvertOp.SEXT, I8, I32), (ConvertOp.ZEXT, I8, I32),
    (ConvertOp.TRUNC, I64, I8),
]  # fmt: skip


@pytest.mark.parametrize(("op", "source", "target"), CONVERSIONS, ids=str)
def test_conversions(op: ConvertOp, source: ScalarType, target: ScalarType) -> None:
    def formula(b: Builder, x: Value, y: Value) -> Value:
        lanes = x.type.lanes if isinstance(x.type, VecType) else 1
        return b.convert(op, x, VecType(target, lanes) if lanes > 1 else target)

    run_elementwise(source, target, formula)


def test_bfloat16_rounds_to_nearest_even() -> None:
    x = np.array([1.00390625, 1.01171875, 1.0, np.inf, -np.inf, 3.4e38, -1e-3, 65504], np.float32)
    kernel = elementwise(
        F32, BF16, 2, lambda b, x, y: b.convert(ConvertOp.FLOAT, x, VecType(BF16, 2))
    )
    (got,) = check(kernel, x, x, np.zeros(8, ml_dtypes.bfloat16))
    assert got[0] == 1.0
    assert got[1] == np.float32(1.015625)


def test_constants_of_every_type() -> None:
    for elem, number in (
        (F32, 0.1), (F64, 0.1), (F16, 0.1), (BF16, 0.1), (F32, float("inf")), (I8, 200), (I64, -1),
    ):  # fmt: skip
        for lanes in (1, 4):
            kernel = elementwise(elem, elem, lanes, lambda b, x, y, n=number: b.const(x.type, n))
            data = values(elem, 4 * lanes)
            (got,) = check(kernel, data, data, np.zeros_like(data))
            assert (got == np.array(number).astype(DTYPES[elem])).all()


REDUCTIONS = [
    *((op, F32) for op in (BinOp.ADD, BinOp.MUL, BinOp.MIN, BinOp.MAX)),
    *((op, I32) for op in (*INT_BINARY[3:], BinOp.ADD, BinOp.MUL)),
]


@pytest.mark.parametrize(("op", "elem"), REDUCTIONS, ids=str)
def test_reductions(op: BinOp, elem: ScalarType) -> None:
    b = Builder("reduce", index_type=I64)
    x = b.buffer("x", elem, 64, Access.READ)
    y = b.buffer("y", elem, 4, Access.WRITE)
    i = b.workgroup_id()
    b.store(y, i, b.reduce(op, b.load(x, b.scaled(i, 16), 16)))
    data = values(elem, 64)
    sums = elem is F32 and op in (BinOp.ADD, BinOp.MUL)
    if sums:  # positive, so that the order of the sum changes only the last bits
        data = np.abs(data)
    check(b.finish((4, 1, 1)), data, np.zeros(4, DTYPES[elem]), ulp=8 if sums else 0)


def test_reduction_of_nan_is_nan() -> None:
    for op in (BinOp.MIN, BinOp.MAX):
        b = Builder("reduce", index_type=I64)
        x = b.buffer("x", F32, 16, Access.READ)
        y = b.buffer("y", F32, 1, Access.WRITE)
        b.store(y, b.index(0), b.reduce(op, b.load(x, b.index(0), 16)))
        data = values(F32, 16)
        data[11] = np.nan
        (got,) = check(b.finish((1, 1, 1)), data, np.zeros(1, np.float32))
        assert np.isnan(got[0])


def test_vector_shapes() -> None:
    def formula(b: Builder, x: Value, y: Value) -> Value:
        both = b.shuffle(x, y, (0, 9, 2, 11, 4, 13, 6, 15))
        lane = b.extract(x, 5)
        swapped = b.insert(both, b.add(lane, lane), 3)
        every = b.splat(b.extract(y, 0), 8)
        cond = b.compare(CmpOp.GT, x, y)
        first = b.extract(cond, 0)
        return b.select(first, b.select(cond, swapped, every), b.fma(x, y, every))

    x, y = values(F32, 32, 1), values(F32, 32, 2)
    check(elementwise(F32, F32, 8, formula), x, y, np.zeros(32, np.float32), ulp=1)


def test_bitcast() -> None:
    run_elementwise(
        F32,
        I32,
        lambda b, x, y: b.bitcast(
            x, VecType(I32, x.type.lanes) if isinstance(x.type, VecType) else I32
        ),
    )


def test_predicates_combine() -> None:
    def formula(b: Builder, x: Value, y: Value) -> Value:
        zero = b.const(x.type, 0)
        a, c = b.compare(CmpOp.GT, x, zero), b.compare(CmpOp.LT, y, zero)
        mixed = b.binary(BinOp.XOR, b.binary(BinOp.AND, a, c), b.unary(UnOp.NOT, a))
        return b.select(mixed, x, b.const(x.type, 1))

    run_elementwise(I16, I16, formula)
