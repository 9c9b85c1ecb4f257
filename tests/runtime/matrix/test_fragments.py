"""Loads, products and stores of single fragments, in every small shape that the device lists."""

from __future__ import annotations

import numpy as np
import pytest

from tests.runtime.vulkan.test_kernels import DTYPES, on_device
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Kernel, MatLayout
from vkjit.lowering.kernel.types import Access, BinOp, MatType, MatUse, Space
from vkjit.lowering.target import CoopShape

pytestmark = pytest.mark.matrix


def coop_gemm(shape: CoopShape, tiles: tuple[int, int, int], lanes: int, staged: bool) -> Kernel:  # noqa: FBT001  one parameter of the test
    """C = A @ B, one subgroup per tile; B's columns are rows in memory. Staged through shared."""
    m, n, k = shape.m * tiles[0], shape.n * tiles[1], shape.k * tiles[2]
    b = Builder("coop_gemm")
    a = b.buffer("a", shape.a, m * k, Access.READ)
    w = b.buffer("b", shape.b, n * k, Access.READ)
    c = b.buffer("c", shape.accumulator, m * n, Access.WRITE)
    row, column = b.scaled(b.workgroup_id(1), shape.m), b.scaled(b.workgroup_id(0), shape.n)
    type_a = MatType(shape.a, shape.m, shape.k, MatUse.A)
    type_b = MatType(shape.b, shape.k, shape.n, MatUse.B)
    start = b.mat_fill(MatType(shape.accumulator, shape.m, shape.n, MatUse.ACC))
    stride = b.index(k)
    with b.loop(b.index(0), stride, b.index(shape.k), carried=(start,)) as loop:
        at_a, at_b = (b.add(b.scaled(v, k), loop.index) for v in (row, column))
        left = b.mat_load(a, at_a, stride, MatLayout.ROW, type_a)
        right = b.mat_load(w, at_b, stride, MatLayout.COLUMN, type_b)
        loop.yields(b.mat_mul_add(left, right, loop.carried[0]))
    place = b.add(b.scaled(row, n), column)
    if staged:
        tile = b.scratch("tile", shape.accumulator, shape.m * shape.n, Space.SHARED)
        b.mat_store(tile, b.index(0), b.index(shape.n), MatLayout.ROW, loop.results[0])
        b.barrier()
        with b.loop(b.local_id(), b.index(shape.m * shape.n), b.index(lanes)) as copy:
            line = b.binary(BinOp.DIV_U, copy.index, b.index(shape.n))
            cell = b.binary(BinOp.REM_U, copy.index, b.index(shape.n))
            b.store(c, b.add(place, b.add(b.scaled(line, n), cell)), b.load(tile, copy.index))
    else:
        b.mat_store(c, place, b.index(n), MatLayout.ROW, loop.results[0])
    kernel = b.finish((tiles[1], tiles[0], 1), (lanes, 1, 1))
    kernel.subgroup = lanes
    return kernel


@pytest.mark.parametrize("staged", [False, True], ids=["direct", "staged"])
def test_cooperative_matrices(in_both_modes, staged: bool):  # noqa: FBT001  one parameter of the test
    """2 x 3 distinct tiles of every small shape that the device lists."""
    device = in_both_modes
    shapes = [s for s in device.target.coop_shapes if s.m * s.n * s.k <= 16**3 and s.a in DTYPES]
    assert shapes
    for shape in shapes:
        m, n, k = 2 * shape.m, 3 * shape.n, 2 * shape.k
        lanes = device.capabilities.default_subgroup
        kernel = coop_gemm(shape, (2, 3, 2), lanes, staged)
        generator = np.random.default_rng(8)
        # Small integers: every sum is exact in every type, in any order.
        a = generator.integers(-3, 4, (m, k)).astype(DTYPES[shape.a])
        w = generator.integers(-3, 4, (n, k)).astype(DTYPES[shape.b])
        found = on_device(device, kernel, a.ravel(), w.ravel()).reshape(m, n)
        wanted = a.astype(np.float32) @ w.astype(np.float32).T
        np.testing.assert_array_equal(found, wanted)
