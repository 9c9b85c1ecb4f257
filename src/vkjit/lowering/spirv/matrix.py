"""Cooperative matrices: SPV_KHR_cooperative_matrix.

The signless integers of the kernel IR count as signed here. A bfloat16 matrix reads and writes
arrays of 16-bit integers: the pointee's type need not be the component type.
"""

from __future__ import annotations

from vkjit.errors import InternalError
from vkjit.lowering.kernel.nodes import (
    Const,
    MatConvert,
    MatFill,
    MatLayout,
    MatLoad,
    MatMulAdd,
    MatStore,
)
from vkjit.lowering.kernel.types import BF16, MatType
from vkjit.lowering.spirv.context import Context, literal
from vkjit.lowering.spirv.grammar import CooperativeMatrixLayout, CooperativeMatrixOperands, Op
from vkjit.lowering.spirv.memory import Memories

_LAYOUTS = {
    MatLayout.ROW: CooperativeMatrixLayout.RowMajorKHR,
    MatLayout.COLUMN: CooperativeMatrixLayout.ColumnMajorKHR,
}
_ALL_SIGNED = (
    CooperativeMatrixOperands.MatrixASignedComponentsKHR
    | CooperativeMatrixOperands.MatrixBSignedComponentsKHR
    | CooperativeMatrixOperands.MatrixCSignedComponentsKHR
    | CooperativeMatrixOperands.MatrixResultSignedComponentsKHR
)
_CONVERT = {
    ("float", "float"): Op.FConvert,
    ("int", "int"): Op.SConvert,
    ("int", "float"): Op.ConvertSToF,
    ("float", "int"): Op.ConvertFToS,
}


def emit_fill(ctx: Context, node: MatFill) -> int:
    """One scalar everywhere."""
    type_ = node.type
    assert isinstance(type_, MatType)
    if type_.elem is BF16:
        if not isinstance(node.x, Const) or isinstance(node.x.value, tuple):
            raise InternalError(f"spirv: fill of {type_}, expected a constant")
        bits = literal(BF16, node.x.value)
        scalar = ctx.module.constant(Op.Constant, ctx.matrix_elem(BF16), *bits)
    else:
        scalar = ctx.use(node.x)
    if isinstance(node.x, Const):
        return ctx.module.constant(Op.ConstantComposite, ctx.type(type_), scalar)
    return ctx.module.value(Op.CompositeConstruct, ctx.type(type_), scalar)


def emit_load(ctx: Context, memories: Memories, node: MatLoad) -> int:
    """A matrix from memory."""
    operands = _place(ctx, memories, node)
    return ctx.module.value(Op.CooperativeMatrixLoadKHR, ctx.type(node.type), *operands)


def emit_store(ctx: Context, memories: Memories, node: MatStore) -> None:
    """A matrix to memory."""
    pointer, *rest = _place(ctx, memories, node)
    ctx.module.effect(Op.CooperativeMatrixStoreKHR, pointer, ctx.use(node.value), *rest)


def _place(ctx: Context, memories: Memories, node: MatLoad | MatStore) -> list[int]:
    """Pointer, layout, stride and memory operands, as both instructions want them."""
    pointer, stride = memories.matrix(node.memory, node.index, node.stride)
    layout = ctx.module.uint(_LAYOUTS[node.layout])
    alignment = memories.alignment(node.memory, node.index, 16)
    operands = memories.operands(node.memory, alignment)
    return [pointer, layout, stride, *operands]


def emit_mul_add(ctx: Context, node: MatMulAdd) -> int:
    """``a @ b + c``."""
    a, b, c = ctx.use(node.a), ctx.use(node.b), ctx.use(node.c)
    assert isinstance(node.a.type, MatType)
    signs = (_ALL_SIGNED,) if node.a.type.elem.kind == "int" else ()
    return ctx.module.value(Op.CooperativeMatrixMulAddKHR, ctx.type(node.type), a, b, c, *signs)


def emit_convert(ctx: Context, node: MatConvert) -> int:
    """Another element type; the use stays, as KHR demands."""
    source, result = node.x.type, node.type
    assert isinstance(source, MatType)
    assert isinstance(result, MatType)
    if source.use is not result.use:
        raise InternalError(f"spirv: conversion of {source} to {result}, expected one use")
    op = _CONVERT[source.elem.kind, result.elem.kind]
    return ctx.module.value(op, ctx.type(result), ctx.use(node.x))
