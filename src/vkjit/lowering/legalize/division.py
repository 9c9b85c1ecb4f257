"""Correctly rounded division and square root from approximate ones, in integer arithmetic.

Vulkan allows an error of 2.5 ULP in OpFDiv (and more outside the normal range), 2 ULP in
InverseSqrt, which Sqrt inherits, and lets a driver round twice in Fma. So the residual of the
driver's quotient is taken in integers: with 24-bit significands it is small, and 32 bits of
wrapping arithmetic hold it exactly. Nothing here depends on how the device rounds, contracts or
flushes floats, as long as its estimate is within 4 ULP on numbers between 0.5 and 4.
"""

from __future__ import annotations

from collections.abc import Callable

from vkjit.errors import InternalError
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.types import (
    F16,
    F32,
    I32,
    BinOp,
    CmpOp,
    ConvertOp,
    UnOp,
    VecType,
)

_Scalar = Callable[..., Value]

_IMPLICIT = 1 << 23  # the leading bit of a normal f32's significand
_FRACTION = _IMPLICIT - 1
_SIGN = -(1 << 31)
_INFINITY = 0x7F800000
_NAN = 0x7FC00000
_TO_UNIT = 0x3F000000  # a significand plus this is the pattern of the same number in [1, 2)


def exact_division(b: Builder, x: Value, y: Value) -> Value:
    """``x / y`` rounded to nearest even, with IEEE zeros, infinities, NaN and subnormals.

    For f32 and f16, scalars and vectors. f16 goes through f32, whose 24 bits are enough
    (2 * 11 + 2) that rounding twice gives what rounding once gives.
    """
    return _lanes(b, _divide, x, y)


def exact_sqrt(b: Builder, x: Value) -> Value:
    """The square root of ``x`` rounded to nearest even: f32 and f16, scalars and vectors."""
    return _lanes(b, _sqrt, x)


def _lanes(b: Builder, function: _Scalar, *operands: Value) -> Value:
    """Applies a function of f32 scalars to each lane; f16 is widened around it."""
    type_ = operands[0].type
    if isinstance(type_, VecType):
        scalars = [[b.extract(v, lane) for v in operands] for lane in range(type_.lanes)]
        results = [_lanes(b, function, *lane) for lane in scalars]
        total = b.splat(results[0], type_.lanes)
        for lane, result in enumerate(results[1:], start=1):
            total = b.insert(total, result, lane)
        return total
    if type_ is F16:
        wide = [b.convert(ConvertOp.FLOAT, v, F32) for v in operands]
        return b.convert(ConvertOp.FLOAT, function(b, *wide), F16)
    if type_ is not F32:
        raise InternalError(f"exact_division: operands of type {type_}, expected f16 or f32")
    return function(b, *operands)


# -- division -------------------------------------------------------------------------------------


def _divide(b: Builder, *operands: Value) -> Value:
    """Normal operands with a normal quotient on the short path, all others on the long one."""
    x, y = (b.bitcast(v, I32) for v in operands)
    sign = _and(b, b.binary(BinOp.XOR, x, y), _SIGN)
    if b.in_map:  # no branches there
        return b.bitcast(b.binary(BinOp.OR, _divide_any(b, x, y), sign), F32)
    exponent_x, exponent_y = _exponent(b, x), _exponent(b, y)
    exponent = b.offset(b.sub(exponent_x, exponent_y), 127)
    normal_operands = b.binary(
        BinOp.AND, _within(b, exponent_x, 1, 254), _within(b, exponent_y, 1, 254)
    )
    # One away from both ends: the quotient may be below 1, and may round up to a power of two.
    is_simple = b.binary(BinOp.AND, normal_operands, _within(b, exponent, 2, 253))
    branch = b.branch(is_simple, (I32,))
    with branch.then() as region:
        quotient, _, below = _quotient(b, _significand(b, x), _significand(b, y))
        region.yields = (_normal_bits(b, b.sub(exponent, below), quotient),)
    with branch.otherwise() as region:
        region.yields = (_divide_any(b, x, y),)
    return b.bitcast(b.binary(BinOp.OR, branch.results[0], sign), F32)


def _divide_any(b: Builder, x: Value, y: Value) -> Value:
    """The magnitude of the quotient, as bits, for any operands."""
    x, y = _and(b, x, ~_SIGN), _and(b, y, ~_SIGN)
    (significand_x, exponent_x), (significand_y, exponent_y) = _normalised(b, x), _normalised(b, y)
    quotient, residual, below = _quotient(b, significand_x, significand_y)
    exponent = b.sub(b.offset(b.sub(exponent_x, exponent_y), 127), below)
    normal = _normal_bits(b, exponent, quotient)
    subnormal = _subnormal_bits(b, exponent, quotient, residual)
    bits = b.select(_compare(b, CmpOp.GE, exponent, 1), normal, subnormal)
    infinity = b.const(I32, _INFINITY)
    bits = b.select(_compare(b, CmpOp.GE, exponent, 255), infinity, bits)
    x_zero, y_zero = _compare(b, CmpOp.EQ, x, 0), _compare(b, CmpOp.EQ, y, 0)
    x_infinite = _compare(b, CmpOp.EQ, x, _INFINITY)
    y_infinite = _compare(b, CmpOp.EQ, y, _INFINITY)
    bits = b.select(b.binary(BinOp.OR, x_zero, y_infinite), b.const(I32, 0), bits)
    bits = b.select(b.binary(BinOp.OR, x_infinite, y_zero), infinity, bits)
    for undefined in (
        b.binary(BinOp.AND, x_zero, y_zero),
        b.binary(BinOp.AND, x_infinite, y_infinite),
        _compare(b, CmpOp.GT, x, _INFINITY),
        _compare(b, CmpOp.GT, y, _INFINITY),
    ):
        bits = b.select(undefined, b.const(I32, _NAN), bits)
    return bits


def _quotient(b: Builder, x: Value, y: Value) -> tuple[Value, Value, Value]:
    """The nearest integer to ``x / y`` times 2^23 or 2^24, its residual, and which power.

    ``x`` and ``y`` lie in [2^23, 2^24); the power, 23 plus the third result, puts the quotient
    there too (2^24 itself included, by rounding). The residual is ``x * 2^power - q * y``.
    """
    below = b.convert(ConvertOp.ZEXT, b.compare(CmpOp.LT, x, y), I32)
    unit_x, unit_y = (b.bitcast(b.offset(v, _TO_UNIT), F32) for v in (x, y))
    estimate = b.bitcast(b.binary(BinOp.DIV, unit_x, unit_y), I32)
    lowest = b.binary(BinOp.SHL, b.sub(b.const(I32, 127), below), b.const(I32, 23))
    guess = _clamped_significand(b, b.sub(estimate, lowest))
    shifted = b.binary(BinOp.SHL, x, b.offset(below, 23))
    residual = b.sub(shifted, b.mul(guess, y))
    step = _rounded_ratio(b, residual, y)
    guess, residual = b.add(guess, step), b.sub(residual, b.mul(step, y))
    # The step came from floats: near one half it may be off by one.
    doubled = b.scaled(residual, 2)
    up = b.convert(ConvertOp.ZEXT, b.compare(CmpOp.GT, doubled, y), I32)
    down = b.convert(ConvertOp.ZEXT, b.compare(CmpOp.LT, doubled, _negated(b, y)), I32)
    last = b.sub(up, down)
    return b.add(guess, last), b.sub(residual, b.mul(last, y)), below


def _subnormal_bits(b: Builder, exponent: Value, quotient: Value, residual: Value) -> Value:
    """The quotient shifted below the normal range and rounded once, to nearest even."""
    negative = b.convert(ConvertOp.ZEXT, _compare(b, CmpOp.LT, residual, 0), I32)
    floor = b.sub(quotient, negative)
    is_inexact = _compare(b, CmpOp.NE, residual, 0)
    shift = b.sub(b.const(I32, 1), exponent)
    # At 25 nothing is left; below 1 the result is not used, but the shift must be defined.
    shift = b.binary(BinOp.MIN_S, shift, b.const(I32, 25))
    shift = b.binary(BinOp.MAX_S, shift, b.const(I32, 1))
    kept = b.binary(BinOp.SHR_L, floor, shift)
    rest = b.sub(floor, b.binary(BinOp.SHL, kept, shift))
    half = b.binary(BinOp.SHL, b.const(I32, 1), b.offset(shift, -1))
    is_odd = _compare(b, CmpOp.NE, _and(b, kept, 1), 0)
    tie_up = b.binary(
        BinOp.AND, b.compare(CmpOp.EQ, rest, half), b.binary(BinOp.OR, is_inexact, is_odd)
    )
    up = b.binary(BinOp.OR, b.compare(CmpOp.GT, rest, half), tie_up)
    return b.add(kept, b.convert(ConvertOp.ZEXT, up, I32))


# -- square root ----------------------------------------------------------------------------------


def _sqrt(b: Builder, *operands: Value) -> Value:
    """The root of a significand times 2^23 or 2^24, whichever makes the exponent even."""
    bits = b.bitcast(operands[0], I32)
    significand, exponent = _normalised(b, _and(b, bits, ~_SIGN))
    unbiased = b.offset(exponent, -127)
    is_odd = _and(b, unbiased, 1)
    unit = b.offset(significand, _TO_UNIT)
    scaled = b.add(unit, b.binary(BinOp.SHL, is_odd, b.const(I32, 23)))
    estimate = b.bitcast(b.unary(UnOp.SQRT, b.bitcast(scaled, F32)), I32)
    guess = _clamped_significand(b, b.offset(estimate, -_TO_UNIT - _IMPLICIT))
    square = b.binary(BinOp.SHL, significand, b.offset(is_odd, 23))
    residual = b.sub(square, b.mul(guess, guess))
    guess = b.add(guess, _rounded_ratio(b, residual, b.scaled(guess, 2)))
    residual = b.sub(square, b.mul(guess, guess))
    # (s + 1/2)^2 = s^2 + s + 1/4, so s + 1 is nearer when the residual exceeds s.
    up = b.convert(ConvertOp.ZEXT, b.compare(CmpOp.GT, residual, guess), I32)
    down = b.convert(ConvertOp.ZEXT, b.compare(CmpOp.LE, residual, _negated(b, guess)), I32)
    root = b.add(guess, b.sub(up, down))
    halved = b.binary(BinOp.SHR_A, b.sub(unbiased, is_odd), b.const(I32, 1))
    result = _normal_bits(b, b.offset(halved, 127), root)
    is_itself = b.binary(
        BinOp.OR,
        _compare(b, CmpOp.EQ, _and(b, bits, ~_SIGN), 0),
        _compare(b, CmpOp.EQ, bits, _INFINITY),
    )
    is_negative = _compare(b, CmpOp.LT, bits, 0)
    is_nan = _compare(b, CmpOp.GT, bits, _INFINITY)
    result = b.select(b.binary(BinOp.OR, is_negative, is_nan), b.const(I32, _NAN), result)
    return b.bitcast(b.select(is_itself, bits, result), F32)


# -- parts of a number ----------------------------------------------------------------------------


def _exponent(b: Builder, bits: Value) -> Value:
    return _and(b, b.binary(BinOp.SHR_L, bits, b.const(I32, 23)), 255)


def _significand(b: Builder, bits: Value) -> Value:
    return b.binary(BinOp.OR, _and(b, bits, _FRACTION), b.const(I32, _IMPLICIT))


def _normalised(b: Builder, bits: Value) -> tuple[Value, Value]:
    """Significand in [2^23, 2^24) and biased exponent of a magnitude; subnormals are shifted up."""
    exponent, fraction = _exponent(b, bits), _and(b, bits, _FRACTION)
    shift = b.offset(b.unary(UnOp.CLZ, fraction), -8)
    # Zero has 32 leading zeros; its result is not used, but the shift must be defined.
    shift = b.binary(BinOp.MIN_S, shift, b.const(I32, 23))
    is_subnormal = _compare(b, CmpOp.EQ, exponent, 0)
    raised = b.binary(BinOp.SHL, fraction, shift)
    significand = b.select(is_subnormal, raised, _significand(b, bits))
    low = b.sub(b.const(I32, 1), shift)
    return significand, b.select(is_subnormal, low, exponent)


def _normal_bits(b: Builder, exponent: Value, significand: Value) -> Value:
    """The pattern; a significand of 2^24 carries into the exponent, up to infinity."""
    high = b.binary(BinOp.SHL, exponent, b.const(I32, 23))
    return b.add(high, b.offset(significand, -_IMPLICIT))


def _clamped_significand(b: Builder, fraction: Value) -> Value:
    """2^23 plus a fraction that an estimate may have put just outside [0, 2^23]."""
    low = b.binary(BinOp.MAX_S, fraction, b.const(I32, 0))
    return b.offset(b.binary(BinOp.MIN_S, low, b.const(I32, _IMPLICIT)), _IMPLICIT)


def _rounded_ratio(b: Builder, a: Value, c: Value) -> Value:
    """``a / c`` to an integer, for a small ratio; near one half either neighbour."""
    wide_a, wide_c = (b.convert(ConvertOp.SINT_TO_FLOAT, v, F32) for v in (a, c))
    ratio = b.unary(UnOp.ROUND_EVEN, b.binary(BinOp.DIV, wide_a, wide_c))
    return b.convert(ConvertOp.FLOAT_TO_SINT, ratio, I32)


def _within(b: Builder, x: Value, low: int, high: int) -> Value:
    """``low <= x <= high``, as one unsigned comparison."""
    return b.compare(CmpOp.LE_U, b.offset(x, -low), b.const(I32, high - low))


def _and(b: Builder, x: Value, mask: int) -> Value:
    return b.binary(BinOp.AND, x, b.const(I32, mask))


def _compare(b: Builder, op: CmpOp, x: Value, value: int) -> Value:
    return b.compare(op, x, b.const(I32, value))


def _negated(b: Builder, x: Value) -> Value:
    return b.sub(b.const(I32, 0), x)
