"""Kernels on a Vulkan device against the interpreter, in both addressing modes, validated."""

from __future__ import annotations

import numpy as np
import pytest

from vkjit.lowering.artifact import Launch, Plan, PlannedBuffer, Range, Role
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.interpret import run
from vkjit.lowering.kernel.nodes import Kernel
from vkjit.lowering.kernel.types import (
    F16,
    F32,
    I1,
    I8,
    I16,
    I32,
    Access,
    BinOp,
    CmpOp,
    ConvertOp,
    ScalarType,
    Space,
    UnOp,
    VecType,
)
from vkjit.lowering.legalize.division import exact_division, exact_sqrt

DTYPES = {F32: np.float32, F16: np.float16, I32: np.int32, I16: np.int16, I8: np.int8}


def plan_of(kernel: Kernel) -> Plan:
    """A plan of one launch: read buffers are inputs, the last buffer is the output."""
    sizes = [b.length * b.elem.bytes for b in kernel.buffers]
    planned = [PlannedBuffer(Role.INPUT, sizes[i], i) for i in range(len(sizes) - 1)]
    planned.append(PlannedBuffer(Role.OUTPUT, sizes[-1], 0))
    arguments = tuple(Range(i, 0, size) for i, size in enumerate(sizes))
    return Plan(kernel.name, tuple(planned), (Launch(kernel, arguments),), frozenset(), sum(sizes))


def on_device(device, kernel: Kernel, *arrays: np.ndarray) -> np.ndarray:
    output = kernel.buffers[-1]
    inputs = [device.upload(array) for array in arrays]
    (result,) = device.load(plan_of(kernel)).run(inputs)
    return device.download(result, DTYPES[output.elem], (output.length,))


def interpreted(kernel: Kernel, *arrays: np.ndarray, subgroup: int | None = None) -> np.ndarray:
    output = kernel.buffers[-1]
    result = np.zeros(output.length, DTYPES[output.elem])
    run(kernel, [*(array.copy() for array in arrays), result], subgroup)
    return result


def check(device, kernel: Kernel, *arrays: np.ndarray) -> None:
    """The same bits from the device and from the interpreter."""
    found, wanted = on_device(device, kernel, *arrays), interpreted(kernel, *arrays)
    np.testing.assert_array_equal(found, wanted)


def normal(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


def pointwise(elem: ScalarType, lanes: int) -> Kernel:
    """Y = (x * 3 + 1) - x / 4, with the multiplication and addition not contracted."""
    count = 1024
    b = Builder(f"pointwise_{elem}_{lanes}")
    x = b.buffer("x", elem, count, Access.READ)
    y = b.buffer("y", elem, count, Access.WRITE)
    i = b.scaled(b.add(b.scaled(b.workgroup_id(), 32), b.local_id()), lanes)
    value = b.load(x, i, lanes)
    type_ = value.type
    result = b.add(b.mul(value, b.const(type_, 3)), b.const(type_, 1))
    if elem.kind == "float":
        result = b.sub(result, b.mul(value, b.const(type_, 0.25)))
    b.store(y, i, result)
    return b.finish((count // 32 // lanes, 1, 1), (32, 1, 1))


@pytest.mark.parametrize("lanes", [1, 2, 4])
@pytest.mark.parametrize("elem", [F32, F16, I32, I16, I8], ids=repr)
def test_pointwise(vulkan, elem: ScalarType, lanes: int):
    if elem not in vulkan.target.arithmetic:
        pytest.skip(f"the device has no {elem} arithmetic")
    values = (normal(1024) * 10).astype(DTYPES[elem])
    check(vulkan, pointwise(elem, lanes), values)


@pytest.mark.parametrize("lanes", [3, 4])
def test_unaligned_vectors_and_masks(vulkan, lanes: int):
    b = Builder("unaligned")
    x = b.buffer("x", F32, 101, Access.READ)
    y = b.buffer("y", F32, 101, Access.WRITE)
    i = b.scaled(b.local_id(), lanes)
    from_one = b.offset(i, 1)
    index = b.add(b.splat(from_one, lanes), b.iota(lanes))
    mask = b.compare(CmpOp.LT, index, b.const(VecType(I32, lanes), 101))
    shifted = b.load(x, from_one, lanes, mask=mask)
    b.store(y, index, b.add(shifted, b.const(shifted.type, 1.0)), mask=mask)
    zero = b.compare(CmpOp.EQ, i, b.index(0))
    b.store(y, i, b.const(F32, -1.0), mask=zero)
    check(vulkan, b.finish((1, 1, 1), (34, 1, 1)), normal(101))


@pytest.mark.parametrize("pitch", [12, 9])
@pytest.mark.parametrize("elem", [F32, F16, I32, I8], ids=repr)
def test_vectors_in_shared_memory(vulkan, elem: ScalarType, pitch: int):
    """Written as scalars, read as vectors, from an array of vectors where all are aligned."""
    b = Builder("shared_vectors")
    x = b.buffer("x", elem, 64, Access.READ)
    y = b.buffer("y", elem, 128, Access.WRITE)
    tile = b.scratch("tile", elem, 8 * pitch + 4, Space.SHARED)
    i = b.local_id()
    for part in range(2):
        linear = b.offset(i, 32 * part)
        row, column = (b.binary(op, linear, b.index(8)) for op in (BinOp.DIV_U, BinOp.REM_U))
        b.store(tile, b.add(b.scaled(row, pitch), column), b.load(x, linear))
    b.barrier()
    with b.branch(b.compare(CmpOp.LT, i, b.index(16))).then():
        row, half = (b.binary(op, i, b.index(2)) for op in (BinOp.DIV_U, BinOp.REM_U))
        where = b.add(b.scaled(row, pitch), b.scaled(half, 4))
        value = b.load(tile, where, 4)
        b.store(y, b.scaled(i, 4), value)
        b.store(tile, where, b.add(value, value))
        b.store(y, b.offset(b.scaled(i, 4), 64), b.load(tile, where, 4))
    kernel = b.finish((1, 1, 1), (32, 1, 1))
    if elem not in vulkan.target.arithmetic:
        pytest.skip(f"the device has no {elem} arithmetic")
    check(vulkan, kernel, (normal(64) * 10).astype(DTYPES[elem]))


def test_gather_and_scatter(vulkan):
    b = Builder("gather")
    table = b.buffer("table", F32, 100, Access.READ)
    order = b.buffer("order", I32, 64, Access.READ)
    y = b.buffer("y", F32, 64, Access.WRITE)
    i = b.scaled(b.local_id(), 4)
    lanes = b.add(b.splat(i, 4), b.iota(4))
    reversed_lanes = b.sub(b.const(VecType(I32, 4), 63), lanes)
    b.store(y, reversed_lanes, b.load(table, b.load(order, i, 4)))
    positions = np.random.default_rng(1).integers(0, 100, 64, np.int32)
    check(vulkan, b.finish((1, 1, 1), (16, 1, 1)), normal(100), positions)


def test_loops_and_branches(vulkan):
    """Sums of the even or the odd columns below the row's number, whichever the row is."""
    b = Builder("loops")
    x = b.buffer("x", F32, 64 * 64, Access.READ)
    y = b.buffer("y", F32, 64, Access.WRITE)
    row = b.add(b.scaled(b.workgroup_id(), 16), b.local_id())
    zero = b.const(F32, 0.0)
    with b.loop(b.index(0), row, b.index(1), carried=(zero, b.index(0))) as loop:
        total, seen = loop.carried
        parity = b.binary(BinOp.AND, b.add(loop.index, row), b.index(1))
        branch = b.branch(b.compare(CmpOp.EQ, parity, b.index(0)), (F32, I32))
        with branch.then() as region:
            value = b.load(x, b.add(b.scaled(row, 64), loop.index))
            region.yields = (b.add(total, value), b.offset(seen, 1))
        with branch.otherwise() as region:
            region.yields = (total, seen)
        loop.yields(*branch.results)
    count = b.convert(ConvertOp.SINT_TO_FLOAT, loop.results[1], F32)
    b.store(y, row, b.add(loop.results[0], count))
    check(vulkan, b.finish((4, 1, 1), (16, 1, 1)), normal(64 * 64))


def test_a_loop_that_counts_down(vulkan):
    b = Builder("down")
    x = b.buffer("x", F32, 16, Access.READ)
    y = b.buffer("y", F32, 1, Access.WRITE)
    start = b.const(F32, 0.0)
    with b.loop(b.index(15), b.index(-1), b.index(-1), carried=(start,)) as loop:
        halved = b.mul(loop.carried[0], b.const(F32, 0.5))
        loop.yields(b.add(halved, b.load(x, loop.index)))
    b.store(y, b.index(0), loop.results[0])
    values = normal(16)
    wanted = np.float32(0)
    for value in values[::-1]:
        wanted = wanted * np.float32(0.5) + value
    np.testing.assert_array_equal(on_device(vulkan, b.finish((1, 1, 1)), values), [wanted])


def test_shared_memory_reduction(vulkan):
    """A tree over 64 invocations with a barrier in each of its steps."""
    b = Builder("tree")
    x = b.buffer("x", F32, 256, Access.READ)
    y = b.buffer("y", F32, 4, Access.WRITE)
    partial = b.scratch("partial", F32, 64, Space.SHARED)
    i = b.local_id()
    b.store(partial, i, b.load(x, b.add(b.scaled(b.workgroup_id(), 64), i)))
    b.barrier()
    for width in (32, 16, 8, 4, 2, 1):
        with b.branch(b.compare(CmpOp.LT, i, b.index(width))).then():
            other = b.load(partial, b.offset(i, width))
            b.store(partial, i, b.add(b.load(partial, i), other))
        b.barrier()
    with b.branch(b.compare(CmpOp.EQ, i, b.index(0))).then():
        b.store(y, b.workgroup_id(), b.load(partial, b.index(0)))
    check(vulkan, b.finish((4, 1, 1), (64, 1, 1)), normal(256))


def tiled_gemm(m: int, n: int, k: int) -> Kernel:
    """C = A @ B in 8x8 tiles; each invocation sums its element in order of k."""
    b = Builder("tiled_gemm")
    a = b.buffer("a", F32, m * k, Access.READ)
    w = b.buffer("b", F32, k * n, Access.READ)
    c = b.buffer("c", F32, m * n, Access.WRITE)
    tile_a = b.scratch("tile_a", F32, 64, Space.SHARED)
    tile_b = b.scratch("tile_b", F32, 64, Space.SHARED)
    x, y = b.local_id(0), b.local_id(1)
    row = b.add(b.scaled(b.workgroup_id(1), 8), y)
    column = b.add(b.scaled(b.workgroup_id(0), 8), x)
    place = b.add(b.scaled(y, 8), x)
    start = b.const(F32, 0.0)
    with b.loop(b.index(0), b.index(k), b.index(8), carried=(start,)) as loop:
        b.store(tile_a, place, b.load(a, b.add(b.add(b.scaled(row, k), loop.index), x)))
        b.store(tile_b, place, b.load(w, b.add(b.scaled(b.add(loop.index, y), n), column)))
        b.barrier()
        total = loop.carried[0]
        for step in range(8):
            left = b.load(tile_a, b.offset(b.scaled(y, 8), step))
            right = b.load(tile_b, b.offset(x, 8 * step))
            total = b.add(total, b.mul(left, right))
        b.barrier()
        loop.yields(total)
    b.store(c, b.add(b.scaled(row, n), column), loop.results[0])
    return b.finish((n // 8, m // 8, 1), (8, 8, 1))


def test_tiled_gemm(vulkan):
    m, n, k = 24, 32, 40
    a, w = normal(m * k, 1), normal(k * n, 2)
    kernel = tiled_gemm(m, n, k)
    check(vulkan, kernel, a, w)
    found = on_device(vulkan, kernel, a, w).reshape(m, n)
    np.testing.assert_allclose(found, a.reshape(m, k) @ w.reshape(k, n), rtol=1e-5, atol=1e-5)


def test_data_exchanged_through_a_buffer(vulkan):
    """Invocations read what others of the workgroup wrote to global memory."""
    b = Builder("exchange")
    x = b.buffer("x", F32, 64, Access.READ)
    y = b.buffer("y", F32, 64, Access.READ_WRITE)
    i = b.local_id()
    b.store(y, i, b.load(x, i))
    b.barrier()
    other = b.load(y, b.sub(b.index(63), i))
    b.barrier()
    b.store(y, i, b.sub(b.load(y, i), other))
    check(vulkan, b.finish((1, 1, 1), (64, 1, 1)), normal(64))


def test_narrow_types_are_converted(vulkan):
    """f16 and i8 in memory, f32 in between; ties round to even."""
    b = Builder("narrow")
    x = b.buffer("x", F16, 256, Access.READ)
    scale = b.buffer("scale", I8, 256, Access.READ)
    y = b.buffer("y", F16, 256, Access.WRITE)
    i = b.scaled(b.local_id(), 2)
    wide = b.convert(ConvertOp.FLOAT, b.load(x, i, 2), VecType(F32, 2))
    factor = b.convert(ConvertOp.SEXT, b.load(scale, i, 2), VecType(I32, 2))
    factor = b.convert(ConvertOp.SINT_TO_FLOAT, factor, VecType(F32, 2))
    b.store(y, i, b.convert(ConvertOp.FLOAT, b.mul(wide, factor), VecType(F16, 2)))
    halves = normal(256).astype(np.float16)
    bytes_ = np.random.default_rng(3).integers(-128, 128, 256, np.int8)
    check(vulkan, b.finish((1, 1, 1), (128, 1, 1)), halves, bytes_)


def test_minimum_and_maximum_spread_nan(vulkan):
    b = Builder("nan")
    x = b.buffer("x", F32, 9, Access.READ)
    z = b.buffer("z", F32, 9, Access.READ)
    y = b.buffer("y", F32, 18, Access.WRITE)
    i = b.local_id()
    for half, op in enumerate((BinOp.MIN, BinOp.MAX)):
        b.store(y, b.offset(i, 9 * half), b.binary(op, b.load(x, i), b.load(z, i)))
    special = np.array([np.nan, 1, -np.inf], np.float32)
    first, second = (a.ravel().copy() for a in np.meshgrid(special, special))
    check(vulkan, b.finish((1, 1, 1), (9, 1, 1)), first, second)


def test_integer_arithmetic_wraps_and_keeps_signs(vulkan):
    ops = (
        BinOp.DIV_S,
        BinOp.REM_S,
        BinOp.DIV_U,
        BinOp.REM_U,
        BinOp.MIN_S,
        BinOp.MAX_U,
        BinOp.MUL,
        BinOp.XOR,
    )
    b = Builder("integers")
    x = b.buffer("x", I32, 64, Access.READ)
    z = b.buffer("z", I32, 64, Access.READ)
    y = b.buffer("y", I32, 64 * (len(ops) + 2), Access.WRITE)
    i = b.local_id()
    left, right = b.load(x, i), b.load(z, i)
    results = [b.binary(op, left, right) for op in ops]
    results += [b.unary(UnOp.CLZ, left), b.unary(UnOp.POPCOUNT, left)]
    for part, value in enumerate(results):
        b.store(y, b.offset(i, 64 * part), value)
    generator = np.random.default_rng(4)
    left_values = generator.integers(-(1 << 31), 1 << 31, 64, np.int64).astype(np.int32)
    left_values[:3] = 0, 1, -1
    right_values = generator.integers(-9, 9, 64, np.int32)
    right_values[right_values == 0] = 7
    check(vulkan, b.finish((1, 1, 1), (64, 1, 1)), left_values, right_values)


def test_local_memory(vulkan):
    b = Builder("local")
    x = b.buffer("x", F32, 64, Access.READ)
    y = b.buffer("y", F32, 16, Access.WRITE)
    tmp = b.scratch("tmp", F32, 4, Space.LOCAL)
    i = b.local_id()
    b.store(tmp, b.index(0), b.load(x, b.scaled(i, 4), 4))
    with b.loop(b.index(1), b.index(4)) as loop:
        before = b.load(tmp, b.offset(loop.index, -1))
        b.store(tmp, loop.index, b.add(before, b.load(tmp, loop.index)))
    b.store(y, i, b.load(tmp, b.index(3)))
    check(vulkan, b.finish((1, 1, 1), (16, 1, 1)), normal(64))


def test_subgroups(vulkan):
    size = vulkan.capabilities.default_subgroup
    if not vulkan.target.subgroup_ops:
        pytest.skip("the device has no subgroup arithmetic")
    b = Builder("subgroups")
    x = b.buffer("x", I32, 4 * size, Access.READ)
    y = b.buffer("y", I32, 16 * size, Access.WRITE)
    i = b.local_id()
    value = b.load(x, i)
    results = (
        b.subgroup_reduce(BinOp.ADD, value),
        b.subgroup_reduce(BinOp.MAX_S, value),
        b.subgroup_shuffle(value, 1),
        b.lane(),
    )
    for part, result in enumerate(results):
        b.store(y, b.offset(i, 4 * size * part), result)
    kernel = b.finish((1, 1, 1), (4 * size, 1, 1))
    kernel.subgroup = size
    values = np.random.default_rng(5).integers(-100, 100, 4 * size, np.int32)
    found, wanted = on_device(vulkan, kernel, values), interpreted(kernel, values)
    np.testing.assert_array_equal(found, wanted)


def test_subgroup_maximum_spreads_nan(vulkan):
    size = vulkan.capabilities.default_subgroup
    if not vulkan.target.subgroup_ops or "subgroup_vote" not in vulkan.target.features:
        pytest.skip("the device has no subgroup arithmetic or vote")
    b = Builder("subgroup_nan")
    x = b.buffer("x", F32, 2 * size, Access.READ)
    y = b.buffer("y", F32, 2 * size, Access.WRITE)
    b.store(y, b.local_id(), b.subgroup_reduce(BinOp.MAX, b.load(x, b.local_id())))
    kernel = b.finish((1, 1, 1), (2 * size, 1, 1))
    kernel.subgroup = size
    values = np.arange(2 * size, dtype=np.float32)
    values[1] = np.nan
    found = on_device(vulkan, kernel, values)
    assert np.isnan(found[:size]).all()
    assert (found[size:] == 2 * size - 1).all()


@pytest.mark.parametrize("elem", [I32, F32], ids=repr)
def test_atomic_additions(vulkan, elem: ScalarType):
    if elem is F32 and "atomic_add_f32" not in vulkan.target.features:
        pytest.skip("the device has no atomic additions of f32")
    b = Builder("histogram")
    x = b.buffer("x", I32, 256, Access.READ)
    y = b.buffer("y", elem, 8, Access.READ_WRITE)
    i = b.add(b.scaled(b.workgroup_id(), 64), b.local_id())
    b.atomic_add(y, b.load(x, i), b.const(elem, 1))
    kernel = b.finish((4, 1, 1), (64, 1, 1))
    keys = np.random.default_rng(6).integers(0, 8, 256, np.int32)
    size = 32
    planned = (
        PlannedBuffer(Role.INPUT, 1024, 0),
        PlannedBuffer(Role.INPUT, size, 1),
        PlannedBuffer(Role.OUTPUT, size, 0, donated=1),
    )
    launch = Launch(kernel, (Range(0, 0, 1024), Range(2, 0, size)))
    plan = Plan("histogram", planned, (launch,), frozenset(), 1024 + size)
    zeros = np.zeros(8, DTYPES[elem])
    inputs = [vulkan.upload(keys), vulkan.upload(zeros)]
    (result,) = vulkan.load(plan).run(inputs, donated=(1,))
    found = vulkan.download(result, DTYPES[elem], (8,))
    np.testing.assert_array_equal(found, np.bincount(keys, minlength=8))


def test_division_and_root_are_correctly_rounded(vulkan):
    count = 2048
    b = Builder("exact")
    x = b.buffer("x", F32, count, Access.READ)
    z = b.buffer("z", F32, count, Access.READ)
    y = b.buffer("y", F32, 2 * count, Access.WRITE)
    i = b.add(b.scaled(b.workgroup_id(), 64), b.local_id())
    left, right = b.load(x, i), b.load(z, i)
    b.store(y, i, exact_division(b, left, right))
    b.store(y, b.offset(i, count), exact_sqrt(b, left))
    generator = np.random.default_rng(7)
    bits = generator.integers(0, 1 << 32, (2, count), np.uint32)
    bits[:, ::2] = bits[:, ::2] & 0x807FFFFF | 0x3F800000  # half of them between 1 and 2
    left_values, right_values = bits.view(np.float32)
    found = on_device(
        vulkan, b.finish((count // 64, 1, 1), (64, 1, 1)), left_values.copy(), right_values.copy()
    )
    with np.errstate(all="ignore"):
        wanted = np.concatenate([left_values / right_values, np.sqrt(left_values)])
    nan = np.isnan(wanted)
    np.testing.assert_array_equal(np.isnan(found), nan)
    np.testing.assert_array_equal(found[~nan].view(np.uint32), wanted[~nan].view(np.uint32))


def test_booleans_in_registers(vulkan):
    b = Builder("booleans")
    x = b.buffer("x", F32, 64, Access.READ)
    y = b.buffer("y", I32, 64, Access.WRITE)
    i = b.local_id()
    value = b.load(x, i)
    positive = b.compare(CmpOp.GT, value, b.const(F32, 0.0))
    small = b.compare(CmpOp.LT, b.unary(UnOp.ABS, value), b.const(F32, 1.0))
    both = b.binary(BinOp.AND, positive, b.unary(UnOp.NOT, small))
    chosen = b.select(both, b.const(I1, True), b.compare(CmpOp.NE, value, value))
    b.store(y, i, b.convert(ConvertOp.ZEXT, chosen, I32))
    values = normal(64)
    values[5] = np.nan
    check(vulkan, b.finish((1, 1, 1), (64, 1, 1)), values)
