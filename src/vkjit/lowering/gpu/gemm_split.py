"""Numbers of 32 bits as numbers of 16 bits: one, or a high and a low part that add up to it.

High parts are made with integer operations: compilers of drivers drop a conversion to 16 bits that
is followed by one back, which would leave nothing for the low part. There are as few operations as
can be, for matrix units wait for them. Low parts of infinities and NaN may be anything: the sums
with them are dropped where they are not finite, and such a number shows in the high sum.
"""

from __future__ import annotations

from vkjit.lowering.gpu.gemm_coop_schedule import Scheme
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.types import (
    BF16,
    F16,
    F32,
    I32,
    BinOp,
    CmpOp,
    ConvertOp,
    UnOp,
    VecType,
    lanes_of,
    with_elem,
)

LARGEST = float.fromhex("0x1.fffffep+127")
"""The largest finite float32."""
_F16_NORMAL = 2.0**-14
"""Below it, numbers have fewer bits in float16: they belong to the low part whole."""
_F16_BITS = -(1 << 13)
"""Sign, exponent and the upper 10 bits of the mantissa of a float32."""
_BF16_BITS = -(1 << 16)
_BF16_SPLITTER = 65537.0
_BF16_LARGEST = float.fromhex("0x1.fefffep+127")
"""The largest float32 that rounds to a finite bfloat16."""


def words_of(b: Builder, halves: tuple[Value, Value]) -> Value:
    """Two vectors of four 16-bit numbers as four words."""
    low, high = (b.bitcast(v, VecType(I32, 2)) for v in halves)
    return b.shuffle(low, high, (0, 1, 2, 3))


def parts_in_words(b: Builder, halves: tuple[Value, Value], scheme: Scheme) -> tuple[Value, ...]:
    """The parts of eight float32 numbers, two vectors, that are multiplied under ``scheme``.

    Returns:
        four words for each part. With two of them ``x = high + low * low_scale``, up to the
        rounding of ``low``.
    """
    if scheme.elem is BF16:
        limit = LARGEST if scheme.parts == 1 else _BF16_LARGEST
        highs = tuple(_bfloat(b, x, limit) for x in halves)
        parts = [highs]
        if scheme.parts == 2:
            lows = (b.sub(x, high) for x, high in zip(halves, highs, strict=True))
            parts.append(tuple(_bfloat(b, low, None) for low in lows))
        return tuple(_upper_halves(b, (low, high)) for low, high in parts)
    if scheme.parts == 1:
        return (_as_half(b, halves),)
    highs = tuple(_half(b, x) for x in halves)
    lows = tuple(
        b.mul(b.sub(x, high), _splat(b, x, 1.0 / scheme.low_scale))
        for x, high in zip(halves, highs, strict=True)
    )
    return _as_half(b, (highs[0], highs[1])), _as_half(b, (lows[0], lows[1]))


def decoded_in_words(b: Builder, halves: tuple[Value, Value], scheme: Scheme) -> Value:
    """Eight numbers out of blocks, rounded to the one part of ``scheme``, as words.

    Such numbers are multiples of 2^-24 below 2^29: their upper bits come by T. Dekker's splitting
    ("A floating-point technique for extending the available precision", Numer. Math. 18 (1971)),
    which has no overflow to test for and needs half of the operations on integers.
    """
    if scheme.elem is not BF16:
        return _as_half(b, halves)
    low, high = (_upper_bits(b, x) for x in halves)
    return _upper_halves(b, (low, high))


def _upper_bits(b: Builder, x: Value) -> Value:
    """``x`` rounded to nearest with the 8 bits of a bfloat16."""
    scaled = b.mul(x, _splat(b, x, _BF16_SPLITTER))
    return b.sub(scaled, b.sub(scaled, x))


def _splat(b: Builder, like: Value, value: float) -> Value:
    return b.splat(b.const(F32, value), lanes_of(like.type))


def _as_half(b: Builder, halves: tuple[Value, Value]) -> Value:
    """Float32 numbers rounded to float16, as words."""
    low, high = (b.convert(ConvertOp.FLOAT, x, with_elem(x.type, F16)) for x in halves)
    return words_of(b, (low, high))


def _half(b: Builder, x: Value) -> Value:
    """``x`` with the mantissa of a float16, 0 where that has no normal number so small."""
    small = b.compare(CmpOp.LT, b.unary(UnOp.ABS, x), _splat(b, x, _F16_NORMAL))
    bits = b.bitcast(x, with_elem(x.type, I32))
    kept = b.binary(BinOp.AND, bits, b.const(bits.type, _F16_BITS))
    return b.select(small, _splat(b, x, 0.0), b.bitcast(kept, x.type))


def _bfloat(b: Builder, x: Value, limit: float | None) -> Value:
    """``x`` rounded to a bfloat16, nearest even; cut off beyond ``limit``, as NaN must be."""
    bits = b.bitcast(x, with_elem(x.type, I32))
    one, most = (b.const(bits.type, number) for number in (1, 0x7FFF))
    odd = b.binary(BinOp.AND, b.binary(BinOp.SHR_L, bits, b.const(bits.type, 16)), one)
    rounded = b.add(b.add(bits, most), odd)
    if limit is not None:
        near = b.compare(CmpOp.LE, b.unary(UnOp.ABS, x), _splat(b, x, limit))
        rounded = b.select(near, rounded, bits)
    return b.bitcast(b.binary(BinOp.AND, rounded, b.const(bits.type, _BF16_BITS)), x.type)


def _upper_halves(b: Builder, halves: tuple[Value, Value]) -> Value:
    """Eight float32 numbers whose lower halves are 0, as words of two upper halves."""
    low, high = (b.bitcast(x, with_elem(x.type, I32)) for x in halves)
    even, odd = (b.shuffle(low, high, lanes) for lanes in ((0, 2, 4, 6), (1, 3, 5, 7)))
    return b.binary(BinOp.OR, b.binary(BinOp.SHR_L, even, b.const(even.type, 16)), odd)
