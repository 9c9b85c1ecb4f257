"""Hand-built kernels give the same bits, or nearly, on the CPU and in the interpreter."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np
import pytest

from vkjit.errors import InternalError
from vkjit.lowering.artifact import Launch, Plan, PlannedBuffer, Range, Role
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Kernel, Value
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
    Space,
    UnOp,
    VecType,
)
from vkjit.runtime import get_device

DTYPES = {
    I8: np.int8,
    I16: np.int16,
    I32: np.int32,
    I64: np.int64,
    F16: np.float16,
    BF16: ml_dtypes.bfloat16,
    F32: np.float32,
    F64: np.float64,
}


def plan_of(kernel: Kernel) -> Plan:
    """One launch: what is only read is an input, all else an output that takes over an input."""
    buffers: list[PlannedBuffer] = []
    outputs: list[PlannedBuffer] = []
    arguments: list[Range] = []
    for position, buffer in enumerate(kernel.buffers):
        size = buffer.length * buffer.elem.bytes
        buffers.append(PlannedBuffer(Role.INPUT, size, position))
        place = position
        if buffer.access is not Access.READ:
            place = len(kernel.buffers) + len(outputs)
            outputs.append(PlannedBuffer(Role.OUTPUT, size, len(outputs), donated=position))
        arguments.append(Range(place, 0, size))
    step = Launch(kernel, tuple(arguments))
    return Plan(kernel.name, (*buffers, *outputs), (step,), frozenset(), 0)


def run_on(name: str, kernel: Kernel, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The written arrays after one run, in order."""
    device = get_device(name)
    plan = plan_of(kernel)
    written = [i for i, b in enumerate(kernel.buffers) if b.access is not Access.READ]
    inputs = [device.upload(a) for a in arrays]
    results = device.load(plan).run(inputs, donated=written)
    return [
        np.array(device.download(r, arrays[i].dtype, arrays[i].shape))
        for r, i in zip(results, written, strict=True)
    ]


def check(kernel: Kernel, *arrays: np.ndarray, ulp: int = 0) -> list[np.ndarray]:
    """Runs on both devices; equal up to ``ulp`` units of f32; returns the CPU's."""
    want = run_on("reference", kernel, arrays)
    got = run_on("cpu", kernel, arrays)
    for w, g in zip(want, got, strict=True):
        if ulp:
            np.testing.assert_array_max_ulp(g, w, maxulp=ulp)
        else:
            np.testing.assert_array_equal(g, w)
    return got


def values(elem: ScalarType, count: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if elem.kind == "float":
        return (rng.standard_normal(count) * 3).astype(DTYPES[elem])
    info = np.iinfo(DTYPES[elem])
    return rng.integers(info.min, info.max, count, DTYPES[elem], endpoint=True)


def elementwise(
    elem: ScalarType, out: ScalarType, lanes: int, formula: Callable[[Builder, Value, Value], Value]
) -> Kernel:
    """``z[i] = formula(x[i], y[i])`` over 4 tasks of ``lanes`` elements."""
    b = Builder("elementwise", index_type=I64)
    count = 4 * lanes
    x = b.buffer("x", elem, count, Access.READ)
    y = b.buffer("y", elem, count, Access.READ)
    z = b.buffer("z", out, count, Access.WRITE)
    i = b.scaled(b.workgroup_id(), lanes)
    b.store(z, i, formula(b, b.load(x, i, lanes), b.load(y, i, lanes)))
    return b.finish((4, 1, 1))


def run_elementwise(
    elem: ScalarType,
    out: ScalarType,
    formula: Callable[[Builder, Value, Value], Value],
    ulp: int = 0,
) -> None:
    for lanes in (1, 16):
        x, y = values(elem, 4 * lanes, 1), values(elem, 4 * lanes, 2)
        z = np.zeros(4 * lanes, DTYPES[out])
        check(elementwise(elem, out, lanes, formula), x, y, z, ulp=ulp)


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


def test_minimum_and_maximum_spread_nan_and_order_zeros() -> None:
    x = np.array([np.nan, 1, -0.0, 0.0, np.inf, np.nan, -np.inf, 3], np.float32)
    y = np.array([1, np.nan, 0.0, -0.0, np.nan, np.nan, 2, 3], np.float32)
    for op in (BinOp.MIN, BinOp.MAX):
        kernel = elementwise(F32, F32, 2, lambda b, x, y, op=op: b.binary(op, x, y))
        (got,) = check(kernel, x, y, np.zeros(8, np.float32))
        assert np.isnan(got[[0, 1, 4, 5]]).all()
        assert list(np.signbit(got[2:4])) == ([True, True] if op is BinOp.MIN else [False, False])


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


def test_masked_edge_reads_and_writes_nothing_beyond() -> None:
    count, lanes = 37, 16
    b = Builder("edge", index_type=I64)
    x = b.buffer("x", F32, count, Access.READ)
    y = b.buffer("y", F32, count, Access.WRITE)
    i = b.scaled(b.workgroup_id(), lanes)
    ids = b.add(b.splat(i, lanes), b.iota(lanes))
    mask = b.compare(CmpOp.LT, ids, b.const(ids.type, count))
    loaded = b.load(x, i, lanes, mask)
    b.store(y, i, b.mul(loaded, loaded), mask)
    (got,) = check(b.finish((3, 1, 1)), values(F32, count), np.zeros(count, np.float32))
    assert np.count_nonzero(got) == count


def test_masked_addresses_may_lie_outside() -> None:
    """Before the start and far beyond the end, as at the edges of a window."""
    count, lanes = 32, 8
    b = Builder("window", index_type=I64)
    x = b.buffer("x", F32, count, Access.READ)
    y = b.buffer("y", F32, 6 * lanes, Access.WRITE)
    i = b.scaled(b.workgroup_id(), lanes)
    start = b.mul(b.offset(b.workgroup_id(), -1), b.index(12))  # -12, 0, 12, 24, 36, 48
    ids = b.add(b.splat(start, lanes), b.iota(lanes))
    low = b.compare(CmpOp.GE, ids, b.const(ids.type, 0))
    mask = b.binary(BinOp.AND, low, b.compare(CmpOp.LT, ids, b.const(ids.type, count)))
    near = b.load(x, start, lanes, mask)
    gathered = b.load(x, b.scaled(ids, 1), 1, mask)
    b.store(y, i, b.add(near, gathered))
    (got,) = check(b.finish((6, 1, 1)), values(F32, count), np.zeros(6 * lanes, np.float32))
    assert not got[:8].any()
    assert not got[-16:].any()


def test_masked_scalars() -> None:
    b = Builder("scalars", index_type=I64)
    x = b.buffer("x", I32, 8, Access.READ)
    y = b.buffer("y", I32, 16, Access.READ_WRITE)
    i = b.workgroup_id()
    mask = b.compare(CmpOp.LT, i, b.index(8))
    b.store(y, i, b.load(x, i, mask=mask))  # zero where x ends
    odd = b.compare(CmpOp.EQ, b.binary(BinOp.AND, i, b.index(1)), b.index(1))
    b.store(y, i, b.const(I32, 7), odd)
    check(b.finish((16, 1, 1)), values(I32, 8), np.full(16, 5, np.int32))


@pytest.mark.parametrize("elem", [F32, I8, BF16, I64], ids=str)
def test_gather_and_scatter(elem: ScalarType) -> None:
    count, lanes = 64, 8
    b = Builder("gather", index_type=I64)
    x = b.buffer("x", elem, count, Access.READ)
    where = b.buffer("where", I64, count, Access.READ)
    y = b.buffer("y", elem, count, Access.WRITE)
    i = b.scaled(b.workgroup_id(), lanes)
    picked = b.load(where, i, lanes)
    mask = b.compare(CmpOp.LT, picked, b.const(picked.type, count))
    target = b.add(b.splat(i, lanes), b.iota(lanes))
    b.store(y, b.binary(BinOp.XOR, target, b.const(target.type, 1)), b.load(x, picked, 1, mask))
    permutation = np.random.default_rng(0).permutation(count)
    permutation[5] = 1_000_000  # masked off
    (got,) = check(
        b.finish((8, 1, 1)), values(elem, count), permutation, np.zeros(count, DTYPES[elem])
    )
    assert got[4] == 0


def test_loop_carries_vectors() -> None:
    rows, lanes = 9, 8
    b = Builder("columns", index_type=I64)
    x = b.buffer("x", F32, rows * lanes, Access.READ)
    y = b.buffer("y", F32, 2 * lanes, Access.WRITE)
    zero = b.const(VecType(F32, lanes), 0.0)
    low = b.const(VecType(F32, lanes), float("-inf"))
    with b.loop(b.index(0), b.index(rows), carried=(zero, low)) as loop:
        row = b.load(x, b.scaled(loop.index, lanes), lanes)
        loop.yields(b.add(loop.carried[0], row), b.binary(BinOp.MAX, loop.carried[1], row))
    b.store(y, b.index(0), loop.results[0])
    b.store(y, b.index(lanes), loop.results[1])
    check(b.finish((1, 1, 1)), values(F32, rows * lanes), np.zeros(2 * lanes, np.float32))


def test_loops_of_zero_and_stepped_iterations_nest() -> None:
    b = Builder("nest", index_type=I64)
    bounds = b.buffer("bounds", I64, 4, Access.READ)
    y = b.buffer("y", I64, 4, Access.WRITE)
    i = b.workgroup_id()
    upper = b.load(bounds, i)
    with b.loop(b.index(1), upper, b.index(3), carried=(b.index(100),)) as outer:
        with b.loop(b.index(0), outer.index, carried=(outer.carried[0],)) as inner:
            inner.yields(b.add(inner.carried[0], b.mul(inner.index, outer.index)))
        outer.yields(b.offset(inner.results[0], 1))
    b.store(y, i, outer.results[0])
    (got,) = check(b.finish((4, 1, 1)), np.array([0, 1, 5, 11]), np.zeros(4, np.int64))
    assert list(got[:2]) == [100, 100]


def test_branches_yield_values() -> None:
    b = Builder("branch", index_type=I64)
    x = b.buffer("x", F32, 8, Access.READ)
    y = b.buffer("y", F32, 8, Access.WRITE)
    i = b.workgroup_id()
    value = b.load(x, i)
    branch = b.branch(b.compare(CmpOp.GT, value, b.const(F32, 0.0)), (F32,))
    with branch.then() as region:
        with b.loop(b.index(0), i, carried=(value,)) as loop:
            loop.yields(b.add(loop.carried[0], loop.carried[0]))
        region.yields = (loop.results[0],)
    with branch.otherwise() as region:
        region.yields = (b.const(F32, -1.0),)
    b.store(y, i, branch.results[0])
    check(b.finish((8, 1, 1)), values(F32, 8), np.zeros(8, np.float32))


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


def test_three_dimensional_grid() -> None:
    b = Builder("grid", index_type=I64)
    y = b.buffer("y", I64, 24, Access.WRITE)
    x_id, y_id, z_id = (b.workgroup_id(axis) for axis in range(3))
    place = b.add(x_id, b.add(b.scaled(y_id, 4), b.scaled(z_id, 12)))
    code = b.add(b.scaled(x_id, 100), b.add(b.scaled(y_id, 10), z_id))
    b.store(y, place, code)
    check(b.finish((4, 3, 2)), np.zeros(24, np.int64))


@pytest.mark.parametrize("length", [64, 1 << 20])
def test_scratch_on_the_stack_and_in_the_thread(length: int) -> None:
    """4 KiB of f32 on the stack; 4 MiB in the block of the thread, in both kinds of space."""
    b = Builder("scratch", index_type=I64)
    x = b.buffer("x", F32, 64, Access.READ)
    y = b.buffer("y", F32, 64, Access.WRITE)
    first = b.scratch("first", F32, length, Space.LOCAL)
    second = b.scratch("second", F32, length, Space.SHARED)
    i = b.scaled(b.workgroup_id(), 16)
    value = b.load(x, i, 16)
    b.store(first, b.index(length - 16), value)
    b.store(second, b.index(length - 16), b.add(value, value))
    b.barrier()
    b.store(
        y,
        i,
        b.add(b.load(first, b.index(length - 16), 16), b.load(second, b.index(length - 16), 16)),
    )
    check(b.finish((4, 1, 1)), values(F32, 64), np.zeros(64, np.float32))


def test_atomic_add() -> None:
    for elem in (I32, F32):
        b = Builder("atomic", index_type=I64)
        y = b.buffer("y", elem, 4, Access.READ_WRITE)
        b.atomic_add(y, b.binary(BinOp.AND, b.workgroup_id(), b.index(3)), b.const(elem, 2))
        (got,) = check(b.finish((1000, 1, 1)), np.zeros(4, DTYPES[elem]))
        assert list(got) == [500] * 4


def test_bool_memory_is_bytes() -> None:
    b = Builder("bools", index_type=I64)
    x = b.buffer("x", I8, 16, Access.READ)
    y = b.buffer("y", I8, 16, Access.WRITE)
    loaded = b.load(x, b.index(0), 16)
    truth = b.compare(CmpOp.NE, loaded, b.const(loaded.type, 0))
    b.store(y, b.index(0), b.convert(ConvertOp.ZEXT, b.unary(UnOp.NOT, truth), VecType(I8, 16)))
    data = np.arange(16) % 3 == 0
    (got,) = check(b.finish((1, 1, 1)), data, np.zeros(16, np.bool_))
    np.testing.assert_array_equal(got, ~data)
