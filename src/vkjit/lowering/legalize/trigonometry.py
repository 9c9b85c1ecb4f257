"""SIN, COS, TAN, ATAN and ATAN2 in float32.

Arguments of any size are reduced exactly (Payne and Hanek): the significand, an integer, times
the bits of 2/pi that matter for its exponent, modulo 4 quarter turns, in 32-bit integers.
"""

from __future__ import annotations

import math
from itertools import pairwise

from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.types import F32, BinOp, CmpOp, ConvertOp, UnOp, with_elem
from vkjit.lowering.legalize.writing import (
    INFINITY,
    NAN,
    SIGN,
    bits,
    flipped,
    from_whole,
    magnitude,
    number,
    polynomial,
    shifted,
    sign_of,
    test,
    whole,
)

# 32 zero bits, then the first 224 bits of 2/pi behind the point.
_TWO_OVER_PI = (0x00000000, 0xA2F9836E, 0x4E441529, 0xFC2757D1, 0xF534DDC0, 0xDB629599,
                0x3C439041, 0xFE5163AB)  # fmt: skip
_SIN = (-0.16666655242443085, 0.00833216030150652, -0.00019515218446031213)
_COS = (0.04166664555668831, -0.0013887315290048718, 2.4433082217001356e-05)
_ATAN = (-0.33333298563957214, 0.19998548924922943, -0.14264242351055145, 0.10952185094356537,
         -0.08403448760509491, 0.057957567274570465, -0.031177815049886703, 0.01091458834707737,
         -0.0017936174990609288)  # fmt: skip
# pi/2 in two parts; the upper has 8 bits, so that its product with 16 bits is exact.
_QUARTER_UPPER = 1.5703125
_QUARTER_LOWER = math.pi / 2 - _QUARTER_UPPER
_HALF_PI = 1.5707963705062866  # nearest float32
_HALF_PI_REST = math.pi / 2 - _HALF_PI


def _window(b: Builder, offset: Value) -> list[Value]:
    """96 bits of the table from bit ``offset`` (0 to 159), as three words, most important first."""
    words = [whole(b, offset, w - (1 << 32) if w >> 31 else w) for w in _TWO_OVER_PI]
    for bit in (7, 6, 5):
        step = 1 << (bit - 5)
        flag = b.binary(BinOp.AND, offset, whole(b, offset, 1 << bit))
        far = b.compare(CmpOp.NE, flag, whole(b, offset, 0))
        keep = len(words) if bit == 7 else 3 + step
        words = [
            b.select(far, words[i + step], word) if i + step < len(words) else word
            for i, word in enumerate(words[:keep])
        ]
    shift = b.binary(BinOp.AND, offset, whole(b, offset, 31))
    rest = b.sub(whole(b, offset, 31), shift)
    made: list[Value] = []
    for upper, lower in pairwise(words[:4]):
        # Shifted by 1 and then by 31 - shift: a shift by 32 would be undefined.
        low = b.binary(BinOp.SHR_L, shifted(b, BinOp.SHR_L, lower, 1), rest)
        made.append(b.binary(BinOp.OR, b.binary(BinOp.SHL, upper, shift), low))
    return made


def _upper_product(b: Builder, small: Value, word: Value) -> Value:
    """Bits 32 and up of a 24-bit times a 32-bit unsigned integer, by halves of 12 and 16 bits."""
    s0 = b.binary(BinOp.AND, small, whole(b, small, 0xFFF))
    s1 = shifted(b, BinOp.SHR_L, small, 12)
    w0 = b.binary(BinOp.AND, word, whole(b, word, 0xFFFF))
    w1 = shifted(b, BinOp.SHR_L, word, 16)
    # small * word = s0 w0 + 2**12 s1 w0 + 2**16 (s0 w1 + 2**12 s1 w1)
    low = b.add(shifted(b, BinOp.SHR_L, b.mul(s0, w0), 12), b.mul(s1, w0))  # times 2**12
    middle = b.add(shifted(b, BinOp.SHR_L, low, 4), b.mul(s0, w1))  # times 2**16
    return shifted(b, BinOp.SHR_L, b.add(shifted(b, BinOp.SHR_L, middle, 12), b.mul(s1, w1)), 4)


def _reduced(b: Builder, x: Value) -> tuple[Value, Value]:
    """Quarter turns (i32, modulo 4) nearest to ``x >= 0``, and what is left, at most pi/4."""
    i = bits(b, x)
    exponent = shifted(b, BinOp.SHR_L, i, 23)
    significand = b.binary(BinOp.AND, i, whole(b, i, 0x7FFFFF))
    significand = b.binary(BinOp.OR, significand, whole(b, i, 0x800000))
    # x = significand * 2**(exponent - 150); the first bit that matters has weight 2 turns/4.
    words = _window(b, b.sub(exponent, whole(b, i, 120)))
    low = _upper_product(b, significand, words[2])
    middle = b.mul(significand, words[1])
    lower = b.add(middle, low)
    carry = b.select(b.compare(CmpOp.LT_U, lower, low), whole(b, i, 1), whole(b, i, 0))
    upper = b.add(b.mul(significand, words[0]), _upper_product(b, significand, words[1]))
    upper = b.add(upper, carry)
    quarters = shifted(b, BinOp.SHR_L, b.add(upper, whole(b, i, 1 << 29)), 30)
    # The fraction in 64 bits, of a quarter turn, signed: the wrapped shift rounds to nearest.
    fraction = b.binary(
        BinOp.OR, shifted(b, BinOp.SHL, upper, 2), shifted(b, BinOp.SHR_L, lower, 30)
    )
    first = b.binary(BinOp.AND, fraction, whole(b, i, -0x10000))
    second = b.binary(
        BinOp.OR, shifted(b, BinOp.SHL, fraction, 16),
        shifted(b, BinOp.SHR_L, shifted(b, BinOp.SHL, lower, 2), 16),
    )  # fmt: skip
    large = b.mul(from_whole(b, first), number(b, x, 2.0**-32))
    small = b.convert(ConvertOp.UINT_TO_FLOAT, second, with_elem(x.type, F32))
    small = b.mul(small, number(b, x, 2.0**-48))
    rest = b.mul(small, number(b, x, math.pi / 2))
    rest = b.fma(large, number(b, x, _QUARTER_LOWER), rest)
    rest = b.fma(large, number(b, x, _QUARTER_UPPER), rest)
    inside = test(b, CmpOp.LE, x, math.pi / 4)
    return b.select(inside, whole(b, i, 0), quarters), b.select(inside, x, rest)


def _sin_cos(b: Builder, r: Value) -> tuple[Value, Value]:
    """Sine and cosine of at most pi/4."""
    square = b.mul(r, r)
    sin = b.fma(b.mul(r, square), polynomial(b, square, _SIN), r)
    cos = b.fma(square, polynomial(b, square, _COS), number(b, r, -0.5))
    return sin, b.fma(square, cos, number(b, r, 1.0))


def _finite(b: Builder, x: Value, made: Value) -> Value:
    """NaN where ``x`` is infinite or NaN."""
    return b.select(test(b, CmpOp.LT, magnitude(b, x), INFINITY), made, number(b, x, NAN))


def _is_odd(b: Builder, quarters: Value) -> Value:
    low = b.binary(BinOp.AND, quarters, whole(b, quarters, 1))
    return b.compare(CmpOp.NE, low, whole(b, quarters, 0))


def _sign_from(b: Builder, quarters: Value) -> Value:
    """The sign bit set for quarters 2 and 3."""
    high = b.binary(BinOp.AND, quarters, whole(b, quarters, 2))
    return shifted(b, BinOp.SHL, high, 30)


def sin(b: Builder, x: Value) -> Value:
    """The sine; exact reduction at any size, NaN at infinity."""
    quarters, rest = _reduced(b, magnitude(b, x))
    s, c = _sin_cos(b, rest)
    made = b.select(_is_odd(b, quarters), c, s)
    sign = b.binary(BinOp.XOR, _sign_from(b, quarters), sign_of(b, x))
    return _finite(b, x, flipped(b, made, sign))


def cos(b: Builder, x: Value) -> Value:
    """The cosine; exact reduction at any size, NaN at infinity."""
    quarters, rest = _reduced(b, magnitude(b, x))
    s, c = _sin_cos(b, rest)
    made = b.select(_is_odd(b, quarters), s, c)
    sign = _sign_from(b, b.add(quarters, whole(b, quarters, 1)))
    return _finite(b, x, flipped(b, made, sign))


def tan(b: Builder, x: Value) -> Value:
    """The tangent; exact reduction at any size, NaN at infinity."""
    quarters, rest = _reduced(b, magnitude(b, x))
    s, c = _sin_cos(b, rest)
    odd = _is_odd(b, quarters)
    made = b.binary(BinOp.DIV, b.select(odd, c, s), b.select(odd, s, c))
    turned = b.select(odd, whole(b, quarters, SIGN), whole(b, quarters, 0))
    return _finite(b, x, flipped(b, made, b.binary(BinOp.XOR, turned, sign_of(b, x))))


def _atan_unit(b: Builder, t: Value) -> Value:
    """``atan t - t`` of at most 1."""
    square = b.mul(t, t)
    return b.mul(b.mul(t, square), polynomial(b, square, _ATAN))


def atan(b: Builder, x: Value) -> Value:
    """The arc tangent."""
    size = magnitude(b, x)
    far = test(b, CmpOp.GT, size, 1.0)
    one, zero = number(b, x, 1.0), number(b, x, 0.0)
    t = b.binary(BinOp.DIV, b.select(far, number(b, x, -1.0), size), b.select(far, size, one))
    rest = b.add(_atan_unit(b, t), b.select(far, number(b, x, _HALF_PI_REST), zero))
    # Beyond 1 the sum starts from pi/2, which is larger than t: two sums, the large parts last.
    made = b.add(b.select(far, number(b, x, _HALF_PI), zero), b.add(t, rest))
    return flipped(b, made, sign_of(b, x))


def atan2(b: Builder, y: Value, x: Value) -> Value:
    """The angle of the point (x, y), with IEEE's signed zeros and infinities."""
    up, across = magnitude(b, y), magnitude(b, x)
    steep = b.compare(CmpOp.GT, up, across)
    zero = number(b, x, 0.0)
    # Equal sides are 45 degrees, whether finite or infinite, except that 0/0 counts as 0.
    ratio = b.binary(
        BinOp.DIV, b.select(steep, b.unary(UnOp.NEG, across), up), b.select(steep, up, across)
    )
    diagonal = b.select(test(b, CmpOp.EQ, across, 0.0), zero, number(b, x, 1.0))
    t = b.select(b.compare(CmpOp.EQ, up, across), diagonal, ratio)
    sign_x = sign_of(b, x)
    back = b.compare(CmpOp.NE, sign_x, whole(b, x, 0))
    far = b.select(back, number(b, x, 2 * _HALF_PI), zero)
    base = b.select(steep, number(b, x, _HALF_PI), far)
    far_rest = b.select(back, number(b, x, 2 * _HALF_PI_REST), zero)
    base_rest = b.select(steep, number(b, x, _HALF_PI_REST), far_rest)
    rest = b.add(flipped(b, _atan_unit(b, t), sign_x), base_rest)
    made = b.add(base, b.add(flipped(b, t, sign_x), rest))
    return flipped(b, made, sign_of(b, y))
