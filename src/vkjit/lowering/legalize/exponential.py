"""EXP, EXP2 and EXPM1 in float32, largest errors in ``tests/lowering/legalize/test_accuracy.py``.

Coefficients are minimax fits of the relative error (weighted least squares, Lawson's iteration).
"""

from __future__ import annotations

import math

from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.types import BinOp, CmpOp
from vkjit.lowering.legalize.writing import bits, clamp, floats, number, polynomial, shifted, test

LOG2_E = 1.0 / math.log(2.0)
# ln 2 in two parts: the upper has 10 bits, so that its product with an exponent is exact.
LN2_UPPER = 0.693359375
LN2_LOWER = -2.12194440054690583e-4
# Adding it to a small float leaves the nearest integer in the low bits of the sum.
ROUNDER = 12582912.0  # 1.5 * 2**23
BIAS = 127

_EXP = (1.0, 1.0, 0.4999999403953552, 0.1666652113199234, 0.04166838899254799,
        0.008368735201656818, 0.001381455920636654)  # fmt: skip
EXP2 = (1.0, 0.6931471824645996, 0.24022647738456726, 0.055503323674201965, 0.009618437848985195,
        0.0013398900628089905, 0.00015353341586887836)  # fmt: skip
_EXPM1 = (0.5, 0.1666666567325592, 0.041666362434625626, 0.008333389647305012,
          0.0013940654462203383, 0.0001984588016057387)  # fmt: skip


def scaled(b: Builder, x: Value, factor: float, mantissa: Value) -> Value:
    """``mantissa * 2**round(x * factor)``, for exponents from -150 to 128.

    Two factors of about half the exponent each keep the first product normal, so that a
    subnormal result is rounded once and an overflow is infinite. The rounding constants carry the
    bias of the exponent, which saves adding it.
    """
    total = bits(b, b.fma(x, number(b, x, factor), number(b, x, ROUNDER + 2 * BIAS)))
    half = bits(b, b.fma(x, number(b, x, factor / 2), number(b, x, ROUNDER + BIAS)))
    first = floats(b, shifted(b, BinOp.SHL, half, 23))
    second = floats(b, shifted(b, BinOp.SHL, b.sub(total, half), 23))
    return b.mul(b.mul(mantissa, first), second)


def nearest(b: Builder, x: Value, factor: float) -> Value:
    """``round(x * factor)``, to even, rounding as ``scaled`` does."""
    rounder = number(b, x, ROUNDER + 2 * BIAS)
    return b.sub(b.fma(x, number(b, x, factor), rounder), rounder)


def _without_powers(b: Builder, x: Value, n: Value) -> Value:
    """``x - n ln 2``."""
    x = b.fma(n, number(b, x, -LN2_UPPER), x)
    return b.fma(n, number(b, x, -LN2_LOWER), x)


def exp(b: Builder, x: Value) -> Value:
    """The exponential; infinite above 88.72, gradual underflow, exactly 1 at 0."""
    vanishes, x = _vanishing(b, x, -104.0, 89.0)
    rest = _without_powers(b, x, nearest(b, x, LOG2_E))
    made = scaled(b, x, LOG2_E, polynomial(b, rest, _EXP))
    return b.select(vanishes, number(b, x, 0.0), made)


def exp2(b: Builder, x: Value) -> Value:
    """2 to the x; exact at integers."""
    vanishes, x = _vanishing(b, x, -151.0, 128.0)
    rest = b.sub(x, nearest(b, x, 1.0))
    made = scaled(b, x, 1.0, polynomial(b, rest, EXP2))
    return b.select(vanishes, number(b, x, 0.0), made)


def _vanishing(b: Builder, x: Value, low: float, high: float) -> tuple[Value, Value]:
    """Where the result is 0, and ``x`` clamped with such lanes set to 0.

    Computing a 0 by underflow costs x86 over a hundred cycles, and masked softmax is full of them.
    """
    vanishes = test(b, CmpOp.LT, x, low)
    x = b.select(vanishes, number(b, x, 0.0), x)
    return vanishes, b.select(test(b, CmpOp.GT, x, high), number(b, x, high), x)


def expm1(b: Builder, x: Value) -> Value:
    """The exponential minus 1, without cancellation; keeps subnormals and -0.0."""
    x = clamp(b, x, -25.0, 89.0)
    n = nearest(b, x, LOG2_E)
    rest = _without_powers(b, x, n)
    small = b.fma(b.mul(rest, rest), polynomial(b, rest, _EXPM1), rest)
    # 2**(n-1) is finite where 2**n is not: double the whole at the end.
    half = scaled_once(b, n)
    double = b.fma(small, half, b.sub(half, number(b, x, 0.5)))
    large = b.mul(double, number(b, x, 2.0))
    made = b.select(test(b, CmpOp.EQ, n, 0.0), small, large)
    return b.select(test(b, CmpOp.EQ, x, 0.0), x, made)


def scaled_once(b: Builder, n: Value) -> Value:
    """``2**(n - 1)`` of a whole float from -125 to 128."""
    return floats(b, shifted(b, BinOp.SHL, bits(b, b.add(n, number(b, n, ROUNDER + BIAS - 1))), 23))
