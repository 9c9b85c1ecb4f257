"""Memory and control of hand-built kernels: masks, gathers, loops, branches, scratch."""

from __future__ import annotations

import numpy as np
import pytest

from tests.runtime.kernels import DTYPES, check, values
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.types import (
    BF16,
    F32,
    I8,
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
