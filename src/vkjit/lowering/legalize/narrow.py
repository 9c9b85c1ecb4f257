"""Arithmetic on types that a target lacks: computed in 32 bits and brought back after each step.

``bf16`` that a target cannot convert becomes ``i16`` everywhere: its bits are the upper half of a
float32. Integers wrap as before, because the low bits of a result depend only on the low bits of
its operands, or because the operands are extended by the sign that the operation reads them with.
"""

from __future__ import annotations

from typing import final

from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import (
    Binary,
    Bitcast,
    Compare,
    Const,
    Convert,
    Expr,
    Fma,
    Reduce,
    Select,
    SubgroupReduce,
    SubgroupShuffle,
    Unary,
    Value,
)
from vkjit.lowering.kernel.types import (
    BF16,
    F16,
    F32,
    I8,
    I16,
    I32,
    BinOp,
    CmpOp,
    ConvertOp,
    MatType,
    ScalarType,
    Type,
    UnOp,
    scalar_of,
    with_elem,
)
from vkjit.lowering.legalize.rewrite import Get

_SIGNED = frozenset({BinOp.DIV_S, BinOp.REM_S, BinOp.MIN_S, BinOp.MAX_S, BinOp.SHR_A})
_SIGNED_COMPARISONS = frozenset({CmpOp.LT, CmpOp.LE, CmpOp.GT, CmpOp.GE})
# Conversions that read an integer, by the sign that they read it with.
_READS = {
    ConvertOp.SINT_TO_FLOAT: ConvertOp.SEXT,
    ConvertOp.SEXT: ConvertOp.SEXT,
    ConvertOp.UINT_TO_FLOAT: ConvertOp.ZEXT,
    ConvertOp.ZEXT: ConvertOp.ZEXT,
    ConvertOp.TRUNC: ConvertOp.ZEXT,
}
NARROW = frozenset({I8, I16, F16, BF16})


@final
class Narrow:
    """The rule for one target: ``lacking`` types have no arithmetic."""

    def __init__(self, arithmetic: frozenset[ScalarType]) -> None:
        self._lacking = (NARROW - arithmetic) | {BF16}
        self._emulated = BF16 not in arithmetic

    @property
    def retyped(self) -> dict[ScalarType, ScalarType]:
        """Types that vanish from the kernel."""
        return {BF16: I16} if self._emulated else {}

    def rule(self, b: Builder, node: Expr, get: Get) -> Value | None:  # noqa: C901  flat cases
        """The replacement of an expression with a lacking type, else None."""
        if isinstance(node.type, MatType):
            return None
        match node:
            case Unary() if self._lacks(node.type):
                return self._unary(b, node, get)
            case Binary() if self._lacks(node.type):
                signed = node.op in _SIGNED
                a, c = (self._widened(b, v, get(v), signed=signed) for v in (node.a, node.b))
                return self._back(b, b.binary(node.op, a, c), node.type)
            case Fma() if self._lacks(node.type):
                wide = [self._widened(b, v, get(v)) for v in (node.a, node.b, node.c)]
                return self._back(b, b.fma(*wide), node.type)
            case Compare() if self._lacks(node.a.type):
                signed = node.op in _SIGNED_COMPARISONS
                a, c = (self._widened(b, v, get(v), signed=signed) for v in (node.a, node.b))
                return b.compare(node.op, a, c)
            case Select() if self._lacks(node.type):
                a, c = (self._widened(b, v, get(v)) for v in (node.a, node.b))
                return self._back(b, b.select(get(node.cond), a, c), node.type)
            case Const() if self._lacks(node.type):
                return self._back(b, b.const(_wide(node.type), node.value), node.type)
            case Reduce() | SubgroupReduce() | SubgroupShuffle() if self._lacks(node.type):
                return self._across(b, node, get)
            case Convert() if self._lacks(node.type) or self._lacks(node.x.type):
                return self._convert(b, node, get(node.x))
            case Bitcast() if self._emulated and BF16 in (
                scalar_of(node.type), scalar_of(node.x.type)
            ):  # fmt: skip
                target = I16 if scalar_of(node.type) is BF16 else scalar_of(node.type)
                return b.bitcast(get(node.x), with_elem(node.type, target))
            case _:
                return None

    def _lacks(self, type_: Type) -> bool:
        return scalar_of(type_) in self._lacking

    def _widened(self, b: Builder, old: Value, new: Value, *, signed: bool = False) -> Value:
        """An operand of lacking type in 32 bits."""
        elem = scalar_of(old.type)
        if elem not in self._lacking:
            return new
        if elem.kind == "int":
            op = ConvertOp.SEXT if signed else ConvertOp.ZEXT
            return b.convert(op, new, _wide(old.type))
        if elem is BF16 and self._emulated:
            bits = b.convert(ConvertOp.ZEXT, new, with_elem(new.type, I32))
            bits = b.binary(BinOp.SHL, bits, b.const(bits.type, 16))
            return b.bitcast(bits, with_elem(new.type, F32))
        return b.convert(ConvertOp.FLOAT, new, _wide(old.type))

    def _back(self, b: Builder, wide: Value, type_: Type) -> Value:
        """A 32-bit result as the lacking ``type_``."""
        elem = scalar_of(type_)
        if elem.kind == "int":
            return b.convert(ConvertOp.TRUNC, wide, type_)
        if elem is BF16 and self._emulated:
            return rounded_bfloat(b, wide)
        return b.convert(ConvertOp.FLOAT, wide, type_)

    def _unary(self, b: Builder, node: Unary, get: Get) -> Value:
        wide = self._widened(b, node.x, get(node.x))
        made = b.unary(node.op, wide)
        elem = scalar_of(node.type)
        if node.op is UnOp.CLZ:
            made = b.sub(made, b.const(made.type, 32 - elem.bits))
        return self._back(b, made, node.type)

    def _across(
        self, b: Builder, node: Reduce | SubgroupReduce | SubgroupShuffle, get: Get
    ) -> Value:
        match node:
            case Reduce():
                wide = self._widened(b, node.x, get(node.x), signed=node.op in _SIGNED)
                made = b.reduce(node.op, wide)
            case SubgroupReduce():
                wide = self._widened(b, node.x, get(node.x), signed=node.op in _SIGNED)
                made = b.subgroup_reduce(node.op, wide)
            case SubgroupShuffle():
                made = b.subgroup_shuffle(self._widened(b, node.x, get(node.x)), node.mask)
        return self._back(b, made, node.type)

    def _convert(self, b: Builder, node: Convert, x: Value) -> Value:
        """A conversion by way of 32 bits on the side, or sides, that lack arithmetic."""
        source, target = scalar_of(node.x.type), scalar_of(node.type)
        signed = _READS.get(node.op) is ConvertOp.SEXT
        wide = self._widened(b, node.x, x, signed=signed)
        if target not in self._lacking:
            return _converted(b, node.op, wide, node.type)
        middle = _wide(node.type)
        if source.kind == target.kind == "int" and scalar_of(wide.type).bits >= 32:
            op = ConvertOp.TRUNC if scalar_of(wide.type).bits > 32 else node.op
            return self._back(b, b.convert(op, wide, middle), node.type)
        return self._back(b, _converted(b, node.op, wide, middle), node.type)


def _converted(b: Builder, op: ConvertOp, x: Value, type_: Type) -> Value:
    """A conversion whose operand may have become wider than its result."""
    source, target = scalar_of(x.type), scalar_of(type_)
    if source.kind == target.kind == "int" and source.bits > target.bits:
        op = ConvertOp.TRUNC
    return b.convert(op, x, type_)


def _wide(type_: Type) -> Type:
    elem = scalar_of(type_)
    return with_elem(type_, I32 if elem.kind == "int" else F32)


def rounded_bfloat(b: Builder, x: Value) -> Value:
    """The bits, as ``i16``, of a float32 rounded to ``bf16``: nearest even, NaN kept quiet."""
    bits = b.bitcast(x, with_elem(x.type, I32))
    upper = b.binary(BinOp.SHR_L, bits, b.const(bits.type, 16))
    odd = b.binary(BinOp.AND, upper, b.const(bits.type, 1))
    rounded = b.add(b.add(bits, b.const(bits.type, 0x7FFF)), odd)
    rounded = b.binary(BinOp.SHR_L, rounded, b.const(bits.type, 16))
    quiet = b.binary(BinOp.OR, upper, b.const(bits.type, 0x40))
    made = b.select(b.compare(CmpOp.EQ, x, x), rounded, quiet)
    return b.convert(ConvertOp.TRUNC, made, with_elem(x.type, I16))
