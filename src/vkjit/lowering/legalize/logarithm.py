"""LOG and LOG1P in float32."""

from __future__ import annotations

from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.types import BinOp, CmpOp
from vkjit.lowering.legalize.exponential import BIAS, LN2_LOWER, LN2_UPPER
from vkjit.lowering.legalize.writing import (
    INFINITY,
    NAN,
    bits,
    floats,
    from_whole,
    number,
    polynomial,
    shifted,
    test,
    whole,
)

ROOT_HALF = 0x3F3504F3  # the bits of sqrt(1/2)
SMALLEST_NORMAL = 2.0**-126
_LIFT = 25  # subnormals are multiplied by 2**25
# (log(1 + f) - f + f*f/2) / f**3 on [sqrt(1/2) - 1, sqrt(2) - 1], minimax in the relative error.
_LOG = (0.3333333134651184, -0.250008225440979, 0.20001234114170074, -0.16623298823833466,
        0.14201553165912628, -0.1316058337688446, 0.1276332587003708,
        -0.07635651528835297)  # fmt: skip


def parts(b: Builder, x: Value) -> tuple[Value, Value]:
    """``k`` (i32) and ``m`` with ``x = m * 2**k`` and ``m`` in [sqrt(1/2), sqrt(2)); x normal."""
    i = bits(b, x)
    k = shifted(b, BinOp.SHR_A, b.sub(i, whole(b, i, ROOT_HALF)), 23)
    return k, floats(b, b.sub(i, shifted(b, BinOp.SHL, k, 23)))


def lifted(b: Builder, x: Value) -> tuple[Value, Value]:
    """A positive ``x`` made normal, and the exponent (float32) to add for that."""
    tiny = test(b, CmpOp.LT, x, SMALLEST_NORMAL)
    up = b.mul(x, number(b, x, 2.0**_LIFT))
    return b.select(tiny, up, x), b.select(tiny, number(b, x, -_LIFT), number(b, x, 0.0))


def _combined(b: Builder, k: Value, f: Value) -> Value:
    """``k ln 2 + log(1 + f)``."""
    square = b.mul(f, f)
    made = b.mul(b.mul(square, f), polynomial(b, f, _LOG))
    made = b.fma(k, number(b, f, LN2_LOWER), made)
    made = b.fma(square, number(b, f, -0.5), made)
    return b.fma(k, number(b, f, LN2_UPPER), b.add(f, made))


def log(b: Builder, x: Value) -> Value:
    """The natural logarithm; -inf at 0, NaN below."""
    normal, lift = lifted(b, x)
    k, m = parts(b, normal)
    exponent = b.add(from_whole(b, k), lift)
    made = _combined(b, exponent, b.sub(m, number(b, x, 1.0)))
    return _edges(b, x, made, 0.0)


def log1p(b: Builder, x: Value) -> Value:
    """``log(1 + x)`` without cancellation; -inf at -1, NaN below, keeps subnormals and -0.0."""
    one = number(b, x, 1.0)
    total = b.add(x, one)
    # What the sum lost (Knuth's two-sum), brought to the scale of the reduced argument.
    back = b.sub(total, x)
    lost = b.add(b.sub(x, b.sub(total, back)), b.sub(one, back))
    k, m = parts(b, total)
    inverse = floats(b, shifted(b, BinOp.SHL, b.sub(whole(b, k, BIAS), k), 23))
    correction = b.select(test(b, CmpOp.LT, x, 2.0**30), b.mul(lost, inverse), number(b, x, 0.0))
    made = _combined(b, from_whole(b, k), b.add(b.sub(m, one), correction))
    made = _edges(b, x, made, -1.0)
    return b.select(test(b, CmpOp.EQ, x, 0.0), x, made)


def _edges(b: Builder, x: Value, made: Value, pole: float) -> Value:
    """-inf at the pole, NaN below it and for NaN, inf at inf."""
    at_pole = b.select(test(b, CmpOp.EQ, x, pole), number(b, x, -INFINITY), number(b, x, NAN))
    made = b.select(test(b, CmpOp.GT, x, pole), made, at_pole)
    return b.select(test(b, CmpOp.EQ, x, INFINITY), x, made)
