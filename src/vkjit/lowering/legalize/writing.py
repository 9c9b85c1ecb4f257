"""Short words for writing float32 expansions: constants, bits, polynomials, sign and clamp.

Everything works on scalars and vectors alike. No expansion relies on ``Fma`` being exact: some
GPU drivers compute it with two roundings.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.types import F32, I32, BinOp, CmpOp, ConvertOp, UnOp, with_elem

SIGN = -0x80000000
UPPER_HALF = -0x1000  # keeps 12 of the 24 bits of a significand: products of two such are exact
INFINITY = float("inf")
NAN = float("nan")


def number(b: Builder, like: Value, value: float) -> Value:
    """``value`` rounded to float32, with the lanes of ``like``."""
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return b.const(with_elem(like.type, F32), rounded)


def whole(b: Builder, like: Value, value: int) -> Value:
    """An ``i32`` with the lanes of ``like``."""
    return b.const(with_elem(like.type, I32), value)


def bits(b: Builder, x: Value) -> Value:
    """The bits of a float32."""
    return b.bitcast(x, with_elem(x.type, I32))


def floats(b: Builder, x: Value) -> Value:
    """The float32 of some bits."""
    return b.bitcast(x, with_elem(x.type, F32))


def masked(b: Builder, x: Value, mask: int) -> Value:
    """A float32 with only the bits of ``mask`` kept."""
    i = bits(b, x)
    return floats(b, b.binary(BinOp.AND, i, whole(b, i, mask)))


def sign_of(b: Builder, x: Value) -> Value:
    """The sign bit of a float32, as ``i32``."""
    i = bits(b, x)
    return b.binary(BinOp.AND, i, whole(b, i, SIGN))


def flipped(b: Builder, x: Value, sign: Value) -> Value:
    """``x`` negated where the sign bit in ``sign`` is set."""
    return floats(b, b.binary(BinOp.XOR, bits(b, x), sign))


def magnitude(b: Builder, x: Value) -> Value:
    """``|x|``."""
    return b.unary(UnOp.ABS, x)


def shifted(b: Builder, op: BinOp, x: Value, amount: int) -> Value:
    """An ``i32`` shifted by a constant."""
    return b.binary(op, x, whole(b, x, amount))


def from_whole(b: Builder, x: Value) -> Value:
    """A signed ``i32`` as float32."""
    return b.convert(ConvertOp.SINT_TO_FLOAT, x, with_elem(x.type, F32))


def test(b: Builder, op: CmpOp, x: Value, value: float) -> Value:
    """``x op value``."""
    return b.compare(op, x, number(b, x, value))


def clamp(b: Builder, x: Value, low: float, high: float) -> Value:
    """``x`` between two bounds; NaN stays NaN, and x86 has one instruction for each select."""
    upper, lower = number(b, x, high), number(b, x, low)
    x = b.select(b.compare(CmpOp.GT, x, upper), upper, x)
    return b.select(b.compare(CmpOp.LT, x, lower), lower, x)


def polynomial(b: Builder, x: Value, terms: Sequence[float]) -> Value:
    """Horner's rule; ``terms`` from the constant upwards."""
    made = number(b, x, terms[-1])
    for term in terms[-2::-1]:
        made = b.fma(made, x, number(b, x, term))
    return made
