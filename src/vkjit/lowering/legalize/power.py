"""POW in float32: two to the power of ``y log2 |x|``, with the logarithm in two floats.

The error of a power is the absolute error of that product, which reaches 150: the logarithm needs
eight bits more than a float has. Products of 12-bit halves are exact with or without ``Fma``.
"""

from __future__ import annotations

import math

from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.types import BinOp, CmpOp, UnOp
from vkjit.lowering.legalize.exponential import EXP2, LOG2_E, nearest, scaled
from vkjit.lowering.legalize.logarithm import lifted, parts
from vkjit.lowering.legalize.writing import (
    INFINITY,
    NAN,
    UPPER_HALF,
    clamp,
    flipped,
    from_whole,
    magnitude,
    masked,
    number,
    polynomial,
    sign_of,
    test,
    whole,
)

# 2 atanh(s) = 2 s + s**3 (2/3 + 2/5 s*s + ...): for |s| <= 0.072 Taylor's terms are enough.
_ATANH = (2 / 3, 2 / 5, 2 / 7, 2 / 9)
# Significands near 3/4 and 5/4 are compared with those instead of with 1: from where, to what,
# and the logarithm of that in two parts (the upper has 12 bits behind the point).
_LOW_EDGE, _LOW, _LOW_UPPER = 0.8660254, 0.75, -0.4150390625
_HIGH_EDGE, _HIGH, _HIGH_UPPER = 1.1547005, 1.25, 0.321533203125
_LOW_LOWER = math.log2(_LOW) - _LOW_UPPER
_HIGH_LOWER = math.log2(_HIGH) - _HIGH_UPPER
_LOG2_E_UPPER = 1.4423828125  # 12 bits
_LOG2_E_LOWER = LOG2_E - _LOG2_E_UPPER
_HUGE = 1e12  # an exponent beyond it overflows or vanishes whatever the base, except 1


def _log2(b: Builder, x: Value) -> tuple[Value, Value]:
    """``log2 x`` of a positive number as the sum of a 12-bit and a full float."""
    normal, lift = lifted(b, x)
    k, m = parts(b, normal)
    exponent = b.add(from_whole(b, k), lift)
    near, near_upper, near_lower = _nearby(b, m)
    # log(m / near) = 2 atanh((m - near) / (m + near)), the quotient in two parts.
    f = b.sub(m, near)
    total = b.add(m, near)
    lost = b.sub(m, b.sub(total, near))
    quotient = masked(b, b.binary(BinOp.DIV, f, total), UPPER_HALF)
    upper = masked(b, total, UPPER_HALF)
    lower = b.add(b.sub(total, upper), lost)
    rest = b.sub(b.sub(f, b.mul(quotient, upper)), b.mul(quotient, lower))
    rest = b.binary(BinOp.DIV, rest, total)
    s = b.add(quotient, rest)
    square = b.mul(s, s)
    series = b.mul(b.mul(s, square), polynomial(b, square, _ATANH))
    small = b.add(b.add(rest, rest), series)
    doubled = b.add(quotient, quotient)
    large = b.mul(doubled, number(b, x, _LOG2_E_UPPER))  # exact
    whole_part = b.add(exponent, near_upper)  # exact
    total = b.add(whole_part, large)
    lost = b.add(b.sub(large, b.sub(total, whole_part)), near_lower)
    lost = b.fma(doubled, number(b, x, _LOG2_E_LOWER), lost)
    lost = b.fma(small, number(b, x, LOG2_E), lost)
    high = masked(b, b.add(total, lost), UPPER_HALF)
    return high, b.add(b.sub(total, high), lost)


def _nearby(b: Builder, m: Value) -> tuple[Value, Value, Value]:
    """A number near the significand, and its base-2 logarithm in two parts."""
    low, high = test(b, CmpOp.LT, m, _LOW_EDGE), test(b, CmpOp.GT, m, _HIGH_EDGE)
    rows = ((_LOW, _HIGH, 1.0), (_LOW_UPPER, _HIGH_UPPER, 0.0), (_LOW_LOWER, _HIGH_LOWER, 0.0))
    near, upper, lower = (
        b.select(low, number(b, m, a), b.select(high, number(b, m, c), number(b, m, d)))
        for a, c, d in rows
    )
    return near, upper, lower


def pow_(b: Builder, x: Value, y: Value) -> Value:
    """The power ``x ** y`` with the special cases of IEEE 754 (``powf`` of C)."""
    base = magnitude(b, x)
    high, low = _log2(b, base)
    limited = clamp(b, y, -_HUGE, _HUGE)
    y_high = masked(b, limited, UPPER_HALF)
    y_low = b.sub(limited, y_high)
    z_high = b.mul(y_high, high)  # exact
    z_low = b.add(b.mul(y_low, high), b.mul(limited, low))
    z = b.add(z_high, z_low)
    inside = clamp(b, z, -151.0, 129.0)
    rest = b.add(b.sub(z_high, nearest(b, inside, 1.0)), z_low)
    made = scaled(b, inside, 1.0, polynomial(b, rest, EXP2))
    return _special(b, x, y, _limits(b, base, y, z, made))


def _limits(b: Builder, base: Value, y: Value, z: Value, made: Value) -> Value:
    """Overflow and underflow, and bases 0 and infinity, whose logarithm is neither."""
    infinite, zero = number(b, y, INFINITY), number(b, y, 0.0)
    made = b.select(test(b, CmpOp.GE, z, 129.0), infinite, made)
    made = b.select(test(b, CmpOp.LE, z, -151.0), zero, made)
    y_positive = test(b, CmpOp.GT, y, 0.0)
    at_infinity = b.select(y_positive, infinite, zero)
    made = b.select(test(b, CmpOp.EQ, base, INFINITY), at_infinity, made)
    at_zero = b.select(y_positive, zero, infinite)
    return b.select(test(b, CmpOp.EQ, base, 0.0), at_zero, made)


def _special(b: Builder, x: Value, y: Value, made: Value) -> Value:
    """Signs, NaN, and the two cases that are 1 whatever the other operand."""
    half = b.mul(y, number(b, y, 0.5))
    is_whole = b.compare(CmpOp.EQ, b.unary(UnOp.FLOOR, y), y)
    is_odd = b.binary(BinOp.AND, is_whole, b.compare(CmpOp.NE, b.unary(UnOp.FLOOR, half), half))
    sign = sign_of(b, x)
    made = flipped(b, made, b.select(is_odd, sign, whole(b, sign, 0)))
    nan = number(b, x, NAN)
    finite_negative = b.binary(
        BinOp.AND, test(b, CmpOp.LT, x, 0.0), test(b, CmpOp.GT, x, -INFINITY)
    )
    made = b.select(finite_negative, b.select(is_whole, made, nan), made)
    ordered = b.binary(BinOp.AND, b.compare(CmpOp.EQ, x, x), b.compare(CmpOp.EQ, y, y))
    made = b.select(ordered, made, nan)
    one = number(b, x, 1.0)
    made = b.select(test(b, CmpOp.EQ, x, 1.0), one, made)
    return b.select(test(b, CmpOp.EQ, y, 0.0), one, made)
