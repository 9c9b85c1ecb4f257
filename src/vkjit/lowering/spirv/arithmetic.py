"""Scalar and vector arithmetic, comparisons, conversions and lane movement."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

from vkjit.errors import InternalError
from vkjit.lowering.kernel.nodes import (
    Binary,
    Bitcast,
    Compare,
    Convert,
    Extract,
    Fma,
    Insert,
    Reduce,
    Select,
    Shuffle,
    Splat,
    SubgroupReduce,
    SubgroupShuffle,
    Unary,
)
from vkjit.lowering.kernel.types import (
    BF16,
    I1,
    I16,
    BinOp,
    ConvertOp,
    MatType,
    ScalarType,
    Type,
    UnOp,
    VecType,
    lanes_of,
    scalar_of,
    with_elem,
)
from vkjit.lowering.spirv import tables
from vkjit.lowering.spirv.context import Context
from vkjit.lowering.spirv.grammar import (
    Capability,
    Decoration,
    Glsl,
    GroupOperation,
    Op,
    Scope,
)

_K = TypeVar("_K", bound=Enum)


def unsupported(what: Enum, type_: Type) -> InternalError:
    """The fault of a kernel that was not legalized."""
    return InternalError(
        f"spirv: {what.value} on {type_} has no instruction, expected a legalized kernel"
    )


def emit_unary(ctx: Context, node: Unary) -> int:
    """Negation, bit counts, rounding and the functions that GLSL.std.450 offers."""
    elem = scalar_of(node.type)
    type_, x = ctx.type(node.type), ctx.use(node.x)
    module = ctx.module
    if node.op is UnOp.NEG:
        return module.value(Op.FNegate if elem.kind == "float" else Op.SNegate, type_, x)
    if node.op is UnOp.NOT:
        return module.value(Op.LogicalNot if elem is I1 else Op.Not, type_, x)
    if node.op in (UnOp.POPCOUNT, UnOp.CLZ):
        if elem.bits != 32:
            raise unsupported(node.op, node.type)
        return _count_bits(ctx, node, x)
    instruction = tables.GLSL_UNARY.get(node.op)
    narrow_only = node.op in tables.NARROW_GLSL and elem.bits == 64
    if instruction is None or elem.kind != "float" or elem is BF16 or narrow_only:
        raise unsupported(node.op, node.type)
    return module.glsl(instruction, type_, x)


def _count_bits(ctx: Context, node: Unary, x: int) -> int:
    type_ = ctx.type(node.type)
    if node.op is UnOp.POPCOUNT:
        return ctx.module.value(Op.BitCount, type_, x)
    # FindUMsb of 0 is -1, which makes 31 - (-1) = 32: the answer for 0.
    highest = ctx.module.glsl(Glsl.FindUMsb, type_, x)
    return ctx.module.value(Op.ISub, type_, uniform(ctx, node.type, 31), highest)


def uniform(ctx: Context, type_: Type, value: float) -> int:
    """A constant in every lane."""
    scalar = ctx.scalar_constant(scalar_of(type_), value)
    if isinstance(type_, VecType):
        lanes = [scalar] * type_.lanes
        return ctx.module.constant(Op.ConstantComposite, ctx.type(type_), *lanes)
    return scalar


def emit_binary(ctx: Context, node: Binary) -> int:
    """``a op b``, for matrices too where SPIR-V has the operation on them."""
    return combine(ctx, node.op, node.type, ctx.use(node.a), ctx.use(node.b))


def combine(ctx: Context, op: BinOp, type_: Type, a: int, b: int) -> int:
    """``a op b`` for two ids of one type."""
    elem = scalar_of(type_)
    if elem is I1:
        return ctx.module.value(_lookup(tables.BOOL_BINARY, op, type_), ctx.type(type_), a, b)
    if elem.kind == "int":
        return _combine_ints(ctx, op, type_, a, b)
    if elem is BF16 and not isinstance(type_, MatType):
        raise unsupported(op, type_)
    return _combine_floats(ctx, op, type_, a, b)


def _combine_ints(ctx: Context, op: BinOp, type_: Type, a: int, b: int) -> int:
    module, spirv_type = ctx.module, ctx.type(type_)
    if op is BinOp.REM_S:
        # OpSRem of negative operands is undefined in Vulkan without maintenance8.
        quotient = module.value(Op.SDiv, spirv_type, a, b)
        return module.value(Op.ISub, spirv_type, a, module.value(Op.IMul, spirv_type, quotient, b))
    if op in tables.GLSL_INT_BINARY:
        return module.glsl(tables.GLSL_INT_BINARY[op], spirv_type, a, b)
    return module.value(_lookup(tables.INT_BINARY, op, type_), spirv_type, a, b)


def _combine_floats(ctx: Context, op: BinOp, type_: Type, a: int, b: int) -> int:
    module, spirv_type = ctx.module, ctx.type(type_)
    if op in (BinOp.MIN, BinOp.MAX):
        return _spread_nan(ctx, op, type_, a, b)
    if op in tables.GLSL_FLOAT_BINARY:
        if scalar_of(type_).bits == 64:
            raise unsupported(op, type_)
        return module.glsl(tables.GLSL_FLOAT_BINARY[op], spirv_type, a, b)
    result = module.value(_lookup(tables.FLOAT_BINARY, op, type_), spirv_type, a, b)
    module.decorate(result, Decoration.NoContraction)
    return result


def _spread_nan(ctx: Context, op: BinOp, type_: Type, a: int, b: int) -> int:
    """MIN and MAX that give NaN when either side is; FMin may give the other side instead."""
    module, spirv_type = ctx.module, ctx.type(type_)
    bool_type = ctx.type(with_elem(type_, I1))
    better = Op.FOrdLessThan if op is BinOp.MIN else Op.FOrdGreaterThan
    # An ordered comparison with a NaN is false, so the first choice is b, and is NaN if b is.
    chosen = module.value(Op.Select, spirv_type, module.value(better, bool_type, a, b), a, b)
    is_nan = module.value(Op.FUnordNotEqual, bool_type, a, a)
    return module.value(Op.Select, spirv_type, is_nan, a, chosen)


def _lookup(table: Mapping[_K, Op], op: _K, type_: Type) -> Op:
    found = table.get(op)
    if found is None:
        raise unsupported(op, type_)
    return found


def emit_compare(ctx: Context, node: Compare) -> int:
    """``a op b`` as a boolean per lane."""
    elem = scalar_of(node.a.type)
    if elem is I1:
        table = tables.BOOL_COMPARE
    elif elem.kind == "int":
        table = tables.INT_COMPARE
    elif elem is BF16:
        raise unsupported(node.op, node.a.type)
    else:
        table = tables.FLOAT_COMPARE
    op = _lookup(table, node.op, node.a.type)
    return ctx.module.value(op, ctx.type(node.type), ctx.use(node.a), ctx.use(node.b))


def emit_select(ctx: Context, node: Select) -> int:
    """A choice by lane, or of whole vectors by a scalar."""
    cond, a, b = ctx.use(node.cond), ctx.use(node.a), ctx.use(node.b)
    return ctx.module.value(Op.Select, ctx.type(node.type), cond, a, b)


def emit_fma(ctx: Context, node: Fma) -> int:
    """GLSL's Fma: Vulkan lets a driver round the product, so no result may hang on one rounding."""
    if scalar_of(node.type) is BF16:
        raise InternalError(f"spirv: fma on {node.type}, expected a legalized kernel")
    operands = (ctx.use(node.a), ctx.use(node.b), ctx.use(node.c))
    result = ctx.module.glsl(Glsl.Fma, ctx.type(node.type), *operands)
    ctx.module.decorate(result, Decoration.NoContraction)  # no rewriting around it, either
    return result


def emit_convert(ctx: Context, node: Convert) -> int:
    """A conversion between kinds or widths."""
    source, result = scalar_of(node.x.type), scalar_of(node.type)
    if BF16 in (source, result) or result is I1:
        raise unsupported(node.op, node.type)
    if source is I1:
        return _convert_bool(ctx, node)
    full = node.op not in tables.WIDTH_ONLY
    x = ctx.use(node.x, arithmetic=full)
    result = ctx.module.value(tables.CONVERT[node.op], ctx.type(node.type, arithmetic=full), x)
    if node.op is ConvertOp.FLOAT:
        # Or drivers fold a conversion to f16 and back, which would not round.
        ctx.module.decorate(result, Decoration.NoContraction)
    return result


def _convert_bool(ctx: Context, node: Convert) -> int:
    if node.op not in (ConvertOp.ZEXT, ConvertOp.UINT_TO_FLOAT):
        raise unsupported(node.op, node.x.type)
    one, zero = uniform(ctx, node.type, 1), uniform(ctx, node.type, 0)
    return ctx.module.value(Op.Select, ctx.type(node.type), ctx.use(node.x), one, zero)


def emit_bitcast(ctx: Context, node: Bitcast) -> int:
    """The same bits as another type; a bfloat16 already is an i16 here."""
    if _representation(node.x.type) == _representation(node.type):
        return ctx.use(node.x, arithmetic=False)
    return ctx.module.value(Op.Bitcast, ctx.type(node.type), ctx.use(node.x))


def _representation(type_: Type) -> tuple[ScalarType, int]:
    elem = scalar_of(type_)
    return (I16 if elem is BF16 else elem, lanes_of(type_))


def emit_splat(ctx: Context, node: Splat) -> int:
    """A scalar in every lane."""
    x = ctx.use(node.x)
    return ctx.module.value(Op.CompositeConstruct, ctx.type(node.type), *[x] * lanes_of(node.type))


def emit_extract(ctx: Context, node: Extract) -> int:
    """One lane."""
    return extract(ctx, ctx.use(node.x), node.type, node.lane)


def extract(ctx: Context, vector: int, elem: Type, lane: int) -> int:
    """One lane of the vector with id ``vector``."""
    return ctx.module.value(Op.CompositeExtract, ctx.type(elem), vector, lane)


def emit_insert(ctx: Context, node: Insert) -> int:
    """One lane replaced."""
    scalar, x = ctx.use(node.scalar), ctx.use(node.x)
    return ctx.module.value(Op.CompositeInsert, ctx.type(node.type), scalar, x, node.lane)


def emit_shuffle(ctx: Context, node: Shuffle) -> int:
    """Lanes of two vectors; one lane is still a vector for the IR but not for SPIR-V."""
    if len(node.lanes) == 1:
        raise InternalError(f"spirv: shuffle to {node.type}, expected at least 2 lanes")
    a, b = ctx.use(node.a), ctx.use(node.b)
    return ctx.module.value(Op.VectorShuffle, ctx.type(node.type), a, b, *node.lanes)


def emit_reduce(ctx: Context, node: Reduce) -> int:
    """All lanes, from the first to the last."""
    vector, elem = ctx.use(node.x), scalar_of(node.type)
    lanes = [extract(ctx, vector, elem, lane) for lane in range(lanes_of(node.x.type))]
    total = lanes[0]
    for lane in lanes[1:]:
        total = combine(ctx, node.op, elem, total, lane)
    return total


def emit_subgroup_reduce(ctx: Context, node: SubgroupReduce) -> int:
    """All invocations of the subgroup."""
    module, elem = ctx.module, scalar_of(node.type)
    x, type_ = ctx.use(node.x), ctx.type(node.type)
    module.require(Capability.GroupNonUniform)
    module.require(Capability.GroupNonUniformArithmetic)
    if elem is I1:
        table = tables.SUBGROUP_BOOL
    else:
        table = tables.SUBGROUP_FLOAT if elem.kind == "float" else tables.SUBGROUP_INT
    scope = module.uint(Scope.Subgroup)
    op = _lookup(table, node.op, node.type)
    total = module.value(op, type_, scope, GroupOperation.Reduce, x)
    if node.op in (BinOp.MIN, BinOp.MAX):
        total = _nan_if_any(ctx, node, x, total)
    return total


def _nan_if_any(ctx: Context, node: SubgroupReduce, x: int, total: int) -> int:
    """NaN where any invocation has one: GroupNonUniformFMin may pass it over."""
    if isinstance(node.type, VecType):
        raise unsupported(node.op, node.type)
    module, bool_type = ctx.module, ctx.type(I1)
    module.require(Capability.GroupNonUniformVote)
    is_nan = module.value(Op.FUnordNotEqual, bool_type, x, x)
    some = module.value(Op.GroupNonUniformAny, bool_type, module.uint(Scope.Subgroup), is_nan)
    nan = uniform(ctx, node.type, math.nan)
    return module.value(Op.Select, ctx.type(node.type), some, nan, total)


def emit_subgroup_shuffle(ctx: Context, node: SubgroupShuffle) -> int:
    """The value of the invocation at lane xor mask."""
    module = ctx.module
    module.require(Capability.GroupNonUniform)
    module.require(Capability.GroupNonUniformShuffle)
    scope, mask = module.uint(Scope.Subgroup), module.uint(node.mask)
    return module.value(
        Op.GroupNonUniformShuffleXor, ctx.type(node.type), scope, ctx.use(node.x), mask
    )
