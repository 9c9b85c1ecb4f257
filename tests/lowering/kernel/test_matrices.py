"""Tensor loads and stores and maps: text, checks, meaning, and who refuses them."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

from vkjit.errors import InternalError
from vkjit.lowering.artifact import Launch, Plan
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.check import verify
from vkjit.lowering.kernel.interpret import run
from vkjit.lowering.kernel.nodes import Kernel, MatMap, Tensor
from vkjit.lowering.kernel.parse import parse
from vkjit.lowering.kernel.text import text
from vkjit.lowering.kernel.types import (
    BF16,
    F16,
    F32,
    I16,
    I32,
    I64,
    Access,
    BinOp,
    Buffer,
    CmpOp,
    ConvertOp,
    MatScope,
    MatType,
    MatUse,
    ScalarType,
)
from vkjit.lowering.kernel.walk import all_nodes
from vkjit.lowering.legalize import INEXACT_DIVISION, legalize
from vkjit.lowering.llvm.module import emit as emit_llvm
from vkjit.lowering.spirv.emit import emit
from vkjit.lowering.spirv.grammar import Capability
from vkjit.lowering.spirv.validate import disassemble, validate
from vkjit.lowering.target import ALL_SCALARS, REFERENCE, Addressing, Quirk, Target, TargetKind

ROWS, COLUMNS = 20, 12
GROUP = MatType(F32, 16, 8, MatUse.ACC, MatScope.WORKGROUP)


def moved(*, clamped: bool, turned: bool = False, grid: tuple[int, int, int] = (2, 2, 1)) -> Kernel:
    """Copies an array tile by tile, adding 100 row + column of the tile to every element."""
    b = Builder("moved", I32)
    x = b.buffer("x", F32, ROWS * COLUMNS, Access.READ)
    y = b.buffer("y", F32, ROWS * COLUMNS, Access.WRITE)
    shape = (COLUMNS, ROWS) if turned else (ROWS, COLUMNS)
    tensor = Tensor(shape, (shape[1], 1), clamped, turned)
    row, column = b.scaled(b.workgroup_id(1), 16), b.scaled(b.workgroup_id(0), 8)
    at = (column, row) if turned else (row, column)
    loaded = b.tensor_load(x, b.index(0), tensor, at, GROUP)
    with b.mat_map(loaded) as made:
        number = b.add(b.scaled(made.row, 100), made.column)
        whole = b.convert(ConvertOp.SINT_TO_FLOAT, number, F32)
        made.body.yields = (b.add(made.elements[0], whole),)
    b.tensor_store(y, b.index(0), tensor, at, made)
    return b.finish(grid, (32, 1, 1))


def test_the_text_reads_back() -> None:
    for turned in (False, True):
        source = text(moved(clamped=True, turned=turned))
        assert text(parse(source)) == source
    assert "mat_map %" in source
    assert " clamped turned at (" in source


def test_clamped_tiles_read_zeros_and_drop_what_lies_outside() -> None:
    x = np.arange(ROWS * COLUMNS, dtype=np.float32)
    added = 100 * (np.arange(ROWS)[:, None] % 16) + np.arange(COLUMNS) % 8
    y = np.full(x.size, np.nan, np.float32)
    run(moved(clamped=True), [x, y])
    np.testing.assert_array_equal(y.reshape(ROWS, COLUMNS), x.reshape(ROWS, COLUMNS) + added)
    y[:] = np.nan
    run(moved(clamped=True, turned=True), [x, y])
    np.testing.assert_array_equal(y.reshape(COLUMNS, ROWS), x.reshape(COLUMNS, ROWS) + added.T)


def test_tiles_beyond_the_edge_must_be_clamped() -> None:
    arrays = [np.zeros(ROWS * COLUMNS, np.float32) for _ in range(2)]
    run(moved(clamped=False, grid=(1, 1, 1)), arrays)
    with pytest.raises(InternalError, match="expected a clamped tensor"):
        run(moved(clamped=False), arrays)


def test_a_stride_of_zero_repeats_a_row() -> None:
    b = Builder("rows", I32)
    x = b.buffer("x", F32, 8, Access.READ)
    y = b.buffer("y", F32, 16 * 8, Access.WRITE)
    zero = (b.index(0), b.index(0))
    rows = b.tensor_load(x, b.index(0), Tensor((16, 8), (0, 1)), zero, GROUP)
    b.tensor_store(y, b.index(0), Tensor((16, 8), (8, 1)), zero, rows)
    kernel = b.finish((1, 1, 1), (32, 1, 1))
    verify(kernel)
    data, out = np.arange(8, dtype=np.float32), np.zeros((16, 8), np.float32)
    run(kernel, [data, out])
    np.testing.assert_array_equal(out, np.broadcast_to(data, (16, 8)))


def test_maps_run_under_a_branch_and_take_further_matrices() -> None:
    """Workgroup 0 of two stores; the other one computes nothing."""
    b = Builder("branch", I32)
    x = b.buffer("x", F32, 2 * 128, Access.READ)
    y = b.buffer("y", F32, 2 * 128, Access.READ_WRITE)
    start, tensor = b.scaled(b.workgroup_id(0), 128), Tensor((16, 8), (8, 1))
    at = (b.index(0), b.index(0))
    whole = b.tensor_load(x, start, tensor, at, GROUP)
    with b.branch(b.compare(CmpOp.EQ, b.workgroup_id(0), b.index(0))).then():
        with b.mat_map(whole, b.mat_fill(GROUP, 3.0)) as made:
            made.body.yields = (b.mul(made.elements[0], made.elements[1]),)
        b.tensor_store(y, start, tensor, at, made)
    kernel = b.finish((2, 1, 1), (32, 1, 1))
    verify(kernel)
    data, out = np.arange(256, dtype=np.float32), np.zeros(256, np.float32)
    run(kernel, [data, out])
    np.testing.assert_array_equal(out, np.where(np.arange(256) < 128, data * 3, 0))


Body = Callable[[Builder, Buffer, MatMap], object]


def _stores(b: Builder, x: Buffer, made: MatMap) -> None:
    b.store(x, made.row, made.elements[0])


def _multiplies(b: Builder, x: Buffer, made: MatMap) -> None:
    b.mat_fill(GROUP)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (lambda b, x, m: b.load(x, m.row), "loads from x, expected a buffer that is read only"),
        (_stores, "holds Store, expected expressions on scalars and loads"),
        (_multiplies, "holds MatFill, expected expressions"),
        (lambda b, x, m: setattr(m.body, "yields", (m.row,)), "yields [i32], expected [f32]"),
        (lambda b, x, m: setattr(m.body, "yields", ()), "yields [], expected [f32]"),
    ],
)
def test_faulty_maps(body: Body, message: str) -> None:
    b = Builder("bad", I32)
    x = b.buffer("x", F32, 64, Access.READ_WRITE)
    with b.mat_map(b.mat_fill(GROUP)) as made:
        made.body.yields = (made.elements[0],)
        body(b, x, made)
    with pytest.raises(InternalError, match=re.escape(message)):
        verify(b.finish((1, 1, 1), (32, 1, 1)))


def test_faulty_tensors() -> None:
    def fault(tensor: Tensor, elem: ScalarType = F32, index: ScalarType = I32) -> str:
        b = Builder("bad", I32)
        x = b.buffer("x", elem, 512, Access.READ_WRITE)
        zero = (b.index(0), b.const(index, 0))
        b.tensor_store(x, b.index(0), tensor, zero, b.mat_fill(GROUP))
        with pytest.raises(InternalError) as caught:
            verify(b.finish((1, 1, 1), (32, 1, 1)))
        return str(caught.value)

    assert "expected no stride 0 in a store" in fault(Tensor((16, 8), (0, 1)))
    assert "expected a positive shape" in fault(Tensor((0, 8), (8, 1)))
    assert "in x, which holds f16" in fault(Tensor((16, 8), (8, 1)), F16)
    assert "at indices of types i32, i64" in fault(Tensor((16, 8), (8, 1)), index=I64)


def test_bfloat16_matrices_may_lie_as_bits() -> None:
    type_ = MatType(BF16, 16, 8, MatUse.A, MatScope.WORKGROUP)
    b = Builder("bits", I32)
    x = b.buffer("x", I16, 128, Access.READ)
    b.tensor_load(x, b.index(0), Tensor((16, 8), (8, 1)), (b.index(0), b.index(0)), type_)
    verify(b.finish((1, 1, 1), (32, 1, 1)))


def test_the_cpu_refuses_them() -> None:
    for node in all_nodes(moved(clamped=True).body):
        name = type(node).__name__
        if name not in ("TensorLoad", "TensorStore", "MatMap"):
            continue
        kernel = Kernel("matrix", I64)
        kernel.body.nodes.append(node)
        plan = Plan("p", (), (Launch(kernel, ()),), frozenset(), 0)
        with pytest.raises(InternalError, match=f"{name} in matrix"):
            emit_llvm(plan, REFERENCE)


def test_division_in_a_map_is_corrected_without_branches() -> None:
    """Elsewhere a target with inexact division branches to a long path."""
    b = Builder("divide", I32)
    x = b.buffer("x", F32, 128, Access.READ)
    y = b.buffer("y", F32, 128, Access.WRITE)
    tensor, zero = Tensor((16, 8), (8, 1)), (b.index(0), b.index(0))
    with b.mat_map(b.tensor_load(x, b.index(0), tensor, zero, GROUP)) as made:
        made.body.yields = (b.binary(BinOp.DIV, b.const(F32, 1.0), made.elements[0]),)
    b.tensor_store(y, b.index(0), tensor, zero, made)
    scalars = frozenset(ALL_SCALARS)
    quirk = Quirk(INEXACT_DIVISION, "https://example.com", "never")
    target = Target("t", TargetKind.GPU, I32, scalars, scalars, quirks=(quirk,))
    kernel = legalize(b.finish((1, 1, 1), (32, 1, 1)), target)
    verify(kernel)
    validate(emit(kernel, target))
    data = np.random.default_rng(1).normal(size=128).astype(np.float32)
    data[:4] = [0, -0.0, np.inf, 1e-40]
    out = np.zeros_like(data)
    run(kernel, [data, out])
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(out, np.float32(1) / data)


@pytest.mark.parametrize("addressing", Addressing, ids=lambda mode: mode.value)
def test_modules_declare_what_they_use(addressing: Addressing) -> None:
    scalars = frozenset(ALL_SCALARS)
    target = Target("t", TargetKind.GPU, I32, scalars, scalars, addressing=addressing)
    words = emit(moved(clamped=True, turned=True), target)
    validate(words)
    shown = disassemble(words)
    declared = set(re.findall(r"OpCapability (\w+)", shown))
    wanted = {
        Capability.Shader,
        Capability.VulkanMemoryModel,
        Capability.CooperativeMatrixKHR,
        Capability.CooperativeMatrixTensorAddressingNV,
        Capability.CooperativeMatrixPerElementOperationsNV,
        Capability.TensorAddressingNV,
    }
    if addressing is Addressing.DEVICE_ADDRESS:
        wanted.add(Capability.PhysicalStorageBufferAddresses)
    assert declared == {c.name for c in wanted}
    assert set(re.findall(r'OpExtension "(\w+)"', shown)) == {
        "SPV_KHR_cooperative_matrix",
        "SPV_NV_cooperative_matrix2",
        "SPV_NV_tensor_addressing",
    }
    # Setting the dimensions resets the rest, so the order is part of the meaning.
    words_in_order = ("SetDimension", "SetStride", "Slice")
    order = [shown.index(f"OpTensorLayout{word}NV") for word in words_in_order]
    assert order == sorted(order)
    assert shown.count("OpFunction ") == 2
