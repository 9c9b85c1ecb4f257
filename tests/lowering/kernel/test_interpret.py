"""The interpreter against plain NumPy, and the faults that it must report."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from vkjit.errors import InternalError
from vkjit.lowering.kernel import interpret_ops as ops
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.interpret import run
from vkjit.lowering.kernel.nodes import BarrierScope, Kernel, MatLayout, Value
from vkjit.lowering.kernel.types import (
    BF16,
    F16,
    F32,
    I8,
    I32,
    I64,
    Access,
    BinOp,
    CmpOp,
    ConvertOp,
    MatScope,
    MatType,
    MatUse,
    ScalarType,
    Space,
    UnOp,
    VecType,
)


def mapped(
    make: Callable[[Builder, Value], Value], x: np.ndarray, source: ScalarType, target: ScalarType
) -> np.ndarray:
    """``make`` applied to each element."""
    b = Builder("map", I64)
    a = b.buffer("x", source, x.size, Access.READ)
    out = b.buffer("out", target, x.size, Access.WRITE)
    i = b.workgroup_id()
    b.store(out, i, make(b, b.load(a, i)))
    made = np.zeros(x.size, ops.DTYPES[target])
    run(b.finish(grid=(x.size, 1, 1)), [x, made])
    return made


# -- arithmetic -----------------------------------------------------------------------------------


def test_signed_division_rounds_towards_zero() -> None:
    x = np.array([7, -7, 8, -8, -1], np.int32)
    got = mapped(lambda b, v: b.binary(BinOp.DIV_S, v, b.const(I32, 3)), x, I32, I32)
    np.testing.assert_array_equal(got, [2, -2, 2, -2, 0])
    rest = mapped(lambda b, v: b.binary(BinOp.REM_S, v, b.const(I32, 3)), x, I32, I32)
    np.testing.assert_array_equal(rest, [1, -1, 2, -2, -1])


def test_operations_choose_the_sign_not_the_array() -> None:
    x = np.array([-1, 1], np.int8)
    got = mapped(lambda b, v: b.binary(BinOp.DIV_U, v, b.const(I8, 2)), x, I8, I8)
    np.testing.assert_array_equal(got, [127, 0])
    same = mapped(lambda b, v: b.binary(BinOp.MAX_U, v, b.const(I8, 2)), x.view(np.uint8), I8, I8)
    np.testing.assert_array_equal(same, [-1, 2])
    wide = mapped(lambda b, v: b.convert(ConvertOp.ZEXT, v, I32), x, I8, I32)
    np.testing.assert_array_equal(wide, [255, 1])
    less = mapped(
        lambda b, v: b.convert(ConvertOp.ZEXT, b.compare(CmpOp.LT_U, v, b.const(I8, 2)), I8),
        x, I8, I8,
    )  # fmt: skip
    np.testing.assert_array_equal(less, [0, 1])


def test_integers_wrap_in_silence() -> None:
    x = np.array([2**31 - 1, -(2**31)], np.int32)
    got = mapped(lambda b, v: b.mul(b.add(v, b.const(I32, 1)), b.const(I32, 3)), x, I32, I32)
    np.testing.assert_array_equal(got, np.array([-(2**31), 3 - 2**31], np.int64).astype(np.int32))


def test_minimum_spreads_nan() -> None:
    x = np.array([np.nan, 2.0], np.float32)
    got = mapped(lambda b, v: b.binary(BinOp.MIN, b.const(F32, 1.0), v), x, F32, F32)
    np.testing.assert_array_equal(got, np.array([np.nan, 1.0], np.float32))


def test_fma_rounds_once_where_float64_would_tie() -> None:
    # 1 + 2**-24 + 2**-60 is just above the middle of two float32; float64 drops the last term.
    one = np.array([1.0], np.float32)
    wide = np.array([2.0**-24 + 2.0**-47], np.float32)
    near = np.array([1.0 - 2.0**-23 + 2.0**-24], np.float32)
    assert ops.fma(wide, near, one)[0] == _fraction_fma(wide[0], near[0], one[0])
    square = np.array([1.0 + 2.0**-12], np.float32)
    assert ops.fma(square, square, -one)[0] == 2.0**-11 + 2.0**-24


def _fraction_fma(x: np.float32, y: np.float32, z: np.float32) -> float:
    """The float32 nearest to the exact result, found among its neighbours."""
    exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
    guess = np.float32(float(exact))
    near = [
        guess,
        np.nextafter(guess, np.float32(-np.inf)),
        np.nextafter(guess, np.float32(np.inf)),
    ]
    return float(min(near, key=lambda v: abs(Fraction(float(v)) - exact)))


@pytest.mark.parametrize("seed", range(3))
def test_fma_against_exact_rational_arithmetic(seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b, c = (np.ldexp(rng.normal(size=300), rng.integers(-20, 20, 300)) for _ in range(3))
    a, b, c = (v.astype(np.float32) for v in (a, b, c))
    c[::3] = (-a[::3].astype(np.float64) * b[::3]).astype(np.float32)
    got = ops.fma(a, b, c)
    for x, y, z, found in zip(a, b, c, got, strict=True):
        assert float(found) == _fraction_fma(x, y, z)


def test_bfloat_arithmetic_rounds_after_each_step() -> None:
    x = np.array([1.0, 3.0, 256.0], ml_dtypes.bfloat16)
    got = mapped(lambda b, v: b.add(v, b.const(BF16, 1.0)), x, BF16, BF16)
    np.testing.assert_array_equal(got.astype(np.float32), [2.0, 4.0, 256.0])


def test_the_inverse_error_function() -> None:
    x = np.concatenate([np.linspace(-0.999999, 0.999999, 2001), [1e-300, -1e-9]])
    np.testing.assert_allclose(ops.erf(ops.erf_inv(x)), x, rtol=4e-15)
    np.testing.assert_array_equal(ops.erf_inv(np.array([1.0, -1.0])), [np.inf, -np.inf])
    assert np.isnan(ops.erf_inv(np.array([1.5, np.nan]))).all()


def test_a_pairwise_sum_keeps_minus_zero() -> None:
    assert np.signbit(ops.reduce_last(BinOp.ADD, np.full((1, 5), -0.0, np.float32)))[0]
    assert ops.reduce_last(BinOp.ADD, np.arange(7, dtype=np.float32)[np.newaxis])[0] == 21


# -- control --------------------------------------------------------------------------------------


def test_a_loop_with_bounds_of_its_own_in_each_invocation() -> None:
    def triangle(b: Builder, v: Value) -> Value:
        with b.loop(b.const(I32, 0), v, b.const(I32, 1), carried=[b.const(I32, 0)]) as loop:
            loop.yields(b.add(loop.carried[0], loop.index))
        return loop.results[0]

    x = np.arange(-2, 20, dtype=np.int32)
    np.testing.assert_array_equal(
        mapped(triangle, x, I32, I32), [sum(range(max(0, int(v)))) for v in x]
    )


def test_a_divergent_branch_stores_only_where_taken() -> None:
    b = Builder("branch", I32)
    x = b.buffer("x", I32, 8, Access.READ_WRITE)
    i = b.local_id()
    odd = b.compare(CmpOp.EQ, b.binary(BinOp.AND, i, b.index(1)), b.index(1))
    branch = b.branch(odd, [I32])
    with branch.then() as region:
        b.store(x, i, b.index(7))
        region.yields = (b.index(1),)
    with branch.otherwise() as region:
        region.yields = (b.load(x, i),)
    b.store(x, i, b.add(b.load(x, i), branch.results[0]))
    data = np.arange(8, dtype=np.int32)
    run(b.finish(grid=(1, 1, 1), workgroup=(8, 1, 1)), [data])
    np.testing.assert_array_equal(data, [0, 8, 4, 8, 8, 8, 12, 8])


def test_many_workgroups_run_in_chunks() -> None:
    count = 300_000
    x = np.arange(count, dtype=np.float32)
    np.testing.assert_array_equal(mapped(lambda b, v: b.add(v, v), x, F32, F32), 2 * x)


def test_grid_and_workgroup_have_three_axes() -> None:
    b = Builder("axes", I32)
    out = b.buffer("out", I32, 2 * 3 * 4 * 5 * 6 * 7, Access.WRITE)
    place = b.index(0)
    indices = [kind(axis) for kind in (b.workgroup_id, b.local_id) for axis in (2, 1, 0)]
    for size, index in zip((4, 3, 2, 7, 6, 5), indices, strict=True):
        place = b.add(b.scaled(place, size), index)
    b.store(out, place, place)
    data = np.zeros(5040, np.int32)
    run(b.finish(grid=(2, 3, 4), workgroup=(5, 6, 7)), [data])
    np.testing.assert_array_equal(data, np.arange(5040))


# -- vectors and memory ---------------------------------------------------------------------------


def test_masked_loads_read_nothing_outside() -> None:
    b = Builder("mask", I64)
    x = b.buffer("x", F32, 6, Access.READ)
    out = b.buffer("out", F32, 8, Access.WRITE)
    lanes = b.iota(8)
    inside = b.compare(CmpOp.LT, lanes, b.const(VecType(I64, 8), 6))
    b.store(out, b.index(0), b.load(x, b.index(0), lanes=8, mask=inside))
    data = np.full(8, -1, np.float32)
    run(b.finish(grid=(1, 1, 1)), [np.arange(6, dtype=np.float32), data])
    np.testing.assert_array_equal(data, [0, 1, 2, 3, 4, 5, 0, 0])


def test_gather_and_scatter() -> None:
    b = Builder("gather", I64)
    x = b.buffer("x", F32, 8, Access.READ)
    out = b.buffer("out", F32, 8, Access.WRITE)
    reverse = b.sub(b.const(VecType(I64, 8), 7), b.iota(8))
    b.store(out, b.iota(8), b.load(x, reverse))
    data = np.zeros(8, np.float32)
    run(b.finish(grid=(1, 1, 1)), [np.arange(8, dtype=np.float32), data])
    np.testing.assert_array_equal(data, np.arange(8)[::-1])


def test_bool_arrays_are_bytes() -> None:
    x = np.array([True, False])
    got = mapped(lambda b, v: b.binary(BinOp.XOR, v, b.const(I8, 1)), x, I8, I8)
    np.testing.assert_array_equal(got, [0, 1])


def test_atomic_addition_counts_everyone() -> None:
    b = Builder("atomic", I32)
    x = b.buffer("x", I32, 2, Access.READ_WRITE)
    b.atomic_add(x, b.binary(BinOp.AND, b.local_id(), b.index(1)), b.index(3))
    data = np.zeros(2, np.int32)
    run(b.finish(grid=(5, 1, 1), workgroup=(8, 1, 1)), [data])
    np.testing.assert_array_equal(data, [60, 60])


# -- subgroups and matrices -----------------------------------------------------------------------


def subgroup_kernel(make: Callable[[Builder, Value], Value], subgroup: int) -> Kernel:
    b = Builder("sub", I32)
    x = b.buffer("x", F32, 64, Access.READ_WRITE)
    i = b.local_id()
    b.store(x, i, make(b, b.load(x, i)))
    kernel = b.finish(grid=(1, 1, 1), workgroup=(64, 1, 1))
    kernel.subgroup = subgroup
    return kernel


def test_subgroup_operations() -> None:
    data = np.arange(64, dtype=np.float32)
    run(subgroup_kernel(lambda b, v: b.subgroup_reduce(BinOp.ADD, v), 16), [data])
    np.testing.assert_array_equal(
        data, np.repeat(np.arange(64.0).reshape(4, 16).sum(1), 16).astype(np.float32)
    )
    data = np.arange(64, dtype=np.float32)
    run(subgroup_kernel(lambda b, v: b.subgroup_shuffle(v, 5), 16), [data])
    np.testing.assert_array_equal(data, np.arange(64) ^ 5)


@pytest.mark.parametrize("scope", MatScope)
@pytest.mark.parametrize("layout", MatLayout)
def test_cooperative_matrices_multiply(scope: MatScope, layout: MatLayout) -> None:
    b = Builder("coop", I32)
    x = b.buffer("x", F16, 16 * 8, Access.READ)
    y = b.buffer("y", F16, 8 * 32, Access.READ)
    out = b.buffer("out", F32, 16 * 32, Access.WRITE)
    zero = b.index(0)
    stride = b.index(8 if layout is MatLayout.ROW else 16)
    left = b.mat_load(x, zero, stride, layout, MatType(F16, 16, 8, MatUse.A, scope))
    right = b.mat_load(y, zero, b.index(32), MatLayout.ROW, MatType(F16, 8, 32, MatUse.B, scope))
    total = b.mat_fill(MatType(F32, 16, 32, MatUse.ACC, scope), 1.0)
    total = b.mat_mul_add(left, right, total)
    b.mat_store(out, zero, b.index(32), MatLayout.ROW, total)
    rng = np.random.default_rng(0)
    m, n = (rng.normal(size=s).astype(np.float16) for s in ((16, 8), (8, 32)))
    data = np.zeros((16, 32), np.float32)
    stored = m if layout is MatLayout.ROW else np.ascontiguousarray(m.T)
    run(b.finish(grid=(1, 1, 1), workgroup=(32, 1, 1)), [stored, n, data])
    np.testing.assert_allclose(data, m.astype(float) @ n.astype(float) + 1, rtol=1e-5, atol=1e-6)


# -- faults ---------------------------------------------------------------------------------------


def shared_kernel(body: Callable[[Builder, Value], None]) -> tuple[Kernel, list[np.ndarray]]:
    b = Builder("shared", I32)
    b.buffer("x", F32, 64, Access.READ_WRITE)
    body(b, b.local_id())
    return b.finish(grid=(2, 1, 1), workgroup=(32, 1, 1)), [np.zeros(64, np.float32)]


def exchange(b: Builder, i: Value, barrier: BarrierScope | None, mask: int) -> None:
    x, shared = b.kernel.buffers[0], b.scratch("tile", F32, 32)
    b.store(shared, i, b.const(F32, 1.0))
    if barrier is not None:
        b.barrier(barrier)
    b.atomic_add(x, i, b.load(shared, b.binary(BinOp.XOR, i, b.index(mask))))


def test_reading_what_another_wrote_needs_a_barrier() -> None:
    kernel, arrays = shared_kernel(lambda b, i: exchange(b, i, None, 1))
    message = r"race on shared tile\[1\]: written by invocation 1 and read by invocation 0"
    with pytest.raises(InternalError, match=message):
        run(kernel, arrays)


def test_a_barrier_ends_the_race() -> None:
    kernel, arrays = shared_kernel(lambda b, i: exchange(b, i, BarrierScope.WORKGROUP, 1))
    run(kernel, arrays)
    np.testing.assert_array_equal(arrays[0][:32], 2.0)


def test_a_subgroup_barrier_orders_only_its_subgroup() -> None:
    kernel, arrays = shared_kernel(lambda b, i: exchange(b, i, BarrierScope.SUBGROUP, 1))
    run(kernel, arrays, subgroup=8)
    kernel, arrays = shared_kernel(lambda b, i: exchange(b, i, BarrierScope.SUBGROUP, 8))
    with pytest.raises(InternalError, match="race on shared tile"):
        run(kernel, arrays, subgroup=8)


def test_two_writers_of_one_element_race() -> None:
    def body(b: Builder, i: Value) -> None:
        b.store(b.scratch("tile", F32, 32), b.index(3), b.convert(ConvertOp.SINT_TO_FLOAT, i, F32))

    kernel, arrays = shared_kernel(body)
    with pytest.raises(InternalError, match=r"race on shared tile\[3\]: written by"):
        run(kernel, arrays)


@pytest.mark.parametrize("index", [4, -1])
def test_an_index_out_of_bounds_is_named(index: int) -> None:
    b = Builder("out", I32)
    x = b.buffer("x", F32, 4, Access.READ_WRITE)
    b.store(x, b.index(0), b.load(x, b.index(index)))
    kernel = b.finish(grid=(1, 1, 1))
    with pytest.raises(InternalError, match=f"load: index {index} is outside x, which has 4"):
        run(kernel, [np.zeros(4, np.float32)])


def test_rights_of_buffers_are_kept() -> None:
    b = Builder("rights", I32)
    x = b.buffer("x", F32, 4, Access.READ)
    b.store(x, b.index(0), b.const(F32, 1.0))
    with pytest.raises(InternalError, match="store: buffer x is read only"):
        run(b.finish(grid=(1, 1, 1)), [np.zeros(4, np.float32)])


def test_arrays_must_fit_their_buffers() -> None:
    b = Builder("fit", I32)
    x = b.buffer("x", F32, 4, Access.READ_WRITE)
    b.store(x, b.index(0), b.unary(UnOp.NEG, b.load(x, b.index(0))))
    kernel = b.finish(grid=(1, 1, 1))
    with pytest.raises(InternalError, match=r"x was given float64\[4\], expected contiguous f32"):
        run(kernel, [np.zeros(4)])
    with pytest.raises(InternalError, match="0 arrays given, expected 1"):
        run(kernel, [])


def test_a_barrier_that_some_skip() -> None:
    def body(b: Builder, i: Value) -> None:
        with b.branch(b.compare(CmpOp.LT, i, b.index(5))).then():
            b.barrier()

    kernel, arrays = shared_kernel(body)
    with pytest.raises(InternalError, match="barrier: some invocations"):
        run(kernel, arrays)


def test_a_barrier_that_whole_workgroups_skip() -> None:
    """Barriers bind the invocations of one workgroup; those without work may all stay away."""
    b = Builder("idle")
    out = b.buffer("out", I32, 3 * 4, Access.WRITE)
    shared = b.scratch("s", I32, 4, Space.SHARED)
    group, i = b.workgroup_id(), b.local_id()
    with b.branch(b.compare(CmpOp.LT, group, b.index(3))).then():
        b.store(shared, i, b.add(b.scaled(group, 10), i))
        b.barrier()
        b.store(out, b.add(b.scaled(group, 4), i), b.load(shared, b.sub(b.index(3), i)))
    made = np.zeros(12, np.int32)
    run(b.finish(grid=(5, 1, 1), workgroup=(4, 1, 1)), [made])
    wanted = [[3, 2, 1, 0], [13, 12, 11, 10], [23, 22, 21, 20]]
    np.testing.assert_array_equal(made.reshape(3, 4), wanted)


def test_a_lane_is_inserted_into_a_constant_vector() -> None:
    """A constant of one value has as many lanes as its type says."""
    b = Builder("insert")
    x = b.buffer("x", F32, 8, Access.READ)
    y = b.buffer("y", F32, 8 * 4, Access.WRITE)
    i = b.local_id()
    half = b.const(VecType(F32, 4), 0.5)
    b.store(y, b.scaled(i, 4), b.insert(half, b.load(x, i), 2))
    made = np.zeros((8, 4), np.float32)
    run(b.finish(workgroup=(8, 1, 1), grid=(1, 1, 1)), [np.arange(8, dtype=np.float32), made])
    np.testing.assert_array_equal(made[:, 2], np.arange(8))
    assert (made[:, [0, 1, 3]] == 0.5).all()


def test_uninitialised_scratch_is_not_zero() -> None:
    b = Builder("junk", I32)
    x = b.buffer("x", F32, 1, Access.WRITE)
    b.store(x, b.index(0), b.load(b.scratch("s", F32, 4, Space.LOCAL), b.index(1)))
    data = np.zeros(1, np.float32)
    run(b.finish(grid=(1, 1, 1)), [data])
    assert np.isnan(data[0])
