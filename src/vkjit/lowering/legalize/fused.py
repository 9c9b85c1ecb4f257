"""Division and square root from approximate ones, corrected by one fused multiply-add.

For devices whose ``Fma`` rounds once, which a probe finds out. The residual of the driver's result
is then exact up to a rounding of its own, and one step of Newton's method leaves less than 2^-19 of
an ULP beside the rounding of the result (Markstein, 1990). The step is left out where it is not
small: zeros, infinities and NaN, subnormal results, and operands at the ends of the range, where
the driver's own result stands.
"""

from __future__ import annotations

from collections.abc import Callable

from vkjit.errors import InternalError
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.types import (
    F16,
    F32,
    BinOp,
    CmpOp,
    ConvertOp,
    UnOp,
    lanes_of,
    scalar_of,
    with_elem,
)

FUSED_FMA = "fused_fma"
"""The feature of a target whose fused multiply-add rounds once."""
_TINY = 2.0**-64
"""Below it the residual of a root may be subnormal, which devices flush."""
_SMALL = 2.0**-20
"""The largest step, of the estimate: 4 ULP, and some."""


def fused_division(b: Builder, x: Value, y: Value) -> Value:
    """``x / y`` within 0.51 ULP where operands and quotient are normal: f32 and f16, any lanes."""
    return _in_f32(b, _divide, x, y)


def fused_sqrt(b: Builder, x: Value) -> Value:
    """The square root of ``x`` within 0.51 ULP: f32 and f16, any lanes."""
    return _in_f32(b, _sqrt, x)


def _in_f32(b: Builder, function: Callable[..., Value], *operands: Value) -> Value:
    type_ = operands[0].type
    elem = scalar_of(type_)
    if elem is F16:
        wide = [b.convert(ConvertOp.FLOAT, v, with_elem(type_, F32)) for v in operands]
        return b.convert(ConvertOp.FLOAT, function(b, *wide), type_)
    if elem is not F32:
        raise InternalError(f"fused_division: operands of type {type_}, expected f16 or f32")
    return function(b, *operands)


def _divide(b: Builder, x: Value, y: Value) -> Value:
    quotient = b.binary(BinOp.DIV, x, y)
    residual = b.fma(b.unary(UnOp.NEG, y), quotient, x)
    reciprocal = b.binary(BinOp.DIV, _number(b, x, 1.0), y)
    return _corrected(b, quotient, b.binary(BinOp.MUL, residual, reciprocal))


def _sqrt(b: Builder, x: Value) -> Value:
    """Small operands are scaled up, so that the residual is not subnormal."""
    is_tiny = b.compare(CmpOp.LT, x, _number(b, x, _TINY))
    scaled = b.binary(BinOp.MUL, x, _number(b, x, 2.0**64))
    x = b.select(is_tiny, scaled, x)
    root = b.unary(UnOp.SQRT, x)
    residual = b.fma(b.unary(UnOp.NEG, root), root, x)
    slope = b.binary(BinOp.DIV, _number(b, x, 0.5), root)
    root = _corrected(b, root, b.binary(BinOp.MUL, residual, slope))
    return b.select(is_tiny, b.binary(BinOp.MUL, root, _number(b, x, 2.0**-32)), root)


def _corrected(b: Builder, estimate: Value, step: Value) -> Value:
    """The estimate plus a step that is small; infinity is not below itself, NaN below nothing."""
    limit = b.binary(BinOp.MUL, b.unary(UnOp.ABS, estimate), _number(b, estimate, _SMALL))
    is_small = b.compare(CmpOp.LT, b.unary(UnOp.ABS, step), limit)
    return b.select(is_small, b.binary(BinOp.ADD, estimate, step), estimate)


def _number(b: Builder, like: Value, value: float) -> Value:
    return b.splat(b.const(F32, value), lanes_of(like.type))
