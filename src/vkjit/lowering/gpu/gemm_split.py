"""Numbers of 32 bits as numbers of 16 bits: one, or a high and a low part that add up to it.

High parts are made with integer operations: compilers of drivers drop a conversion to 16 bits that
is followed by one back, which would leave nothing for the low part.
"""

from __future__ import annotations

from vkjit.errors import InternalError
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
    ScalarType,
    UnOp,
    VecType,
    lanes_of,
    with_elem,
)

_F16_NORMAL = 2.0**-14
"""Below it, numbers have fewer bits in float16: they belong to the low part whole."""
LARGEST = float.fromhex("0x1.fffffep+127")
"""The largest finite float32."""


def words_of(b: Builder, halves: tuple[Value, Value]) -> Value:
    """Two vectors of four 16-bit numbers as four words."""
    low, high = (b.bitcast(v, VecType(I32, 2)) for v in halves)
    return b.shuffle(low, high, (0, 1, 2, 3))


def narrowed(b: Builder, x: Value, elem: ScalarType) -> Value:
    """Float32 numbers rounded to the nearest of type ``elem``."""
    return b.convert(ConvertOp.FLOAT, x, with_elem(x.type, elem))


def split(b: Builder, x: Value, scheme: Scheme) -> tuple[Value, ...]:
    """The parts of float32 numbers ``x`` that are multiplied under ``scheme``.

    With two parts, ``x = high + low * low_scale`` up to the rounding of ``low``. Where ``x`` is
    infinite or NaN the low part is 0, so that the high parts alone say what comes of it.
    """
    if scheme.parts == 1:
        return (narrowed(b, x, scheme.elem),)
    if scheme.elem is BF16:
        high = _bfloat_high(b, x)
    elif scheme.elem is F16:
        high = _half_high(b, x)
    else:
        raise InternalError(f"split: parts of {scheme.elem}, expected f16 or bf16")
    rest = b.mul(b.sub(x, high), _splat(b, x, 1.0 / scheme.low_scale))
    finite = b.compare(CmpOp.LE, b.unary(UnOp.ABS, x), _splat(b, x, LARGEST))
    low = b.select(finite, rest, _splat(b, x, 0.0))
    return narrowed(b, high, scheme.elem), narrowed(b, low, scheme.elem)


def _splat(b: Builder, like: Value, value: float) -> Value:
    return b.splat(b.const(F32, value), lanes_of(like.type))


def _bfloat_high(b: Builder, x: Value) -> Value:
    """``x`` with the mantissa of a bfloat16, cut off where rounding would overflow."""
    near = _kept(b, x, 16, rounded=True)
    finite = b.compare(CmpOp.LE, b.unary(UnOp.ABS, near), _splat(b, x, LARGEST))
    return b.select(finite, near, _kept(b, x, 16, rounded=False))


def _half_high(b: Builder, x: Value) -> Value:
    """``x`` with the mantissa of a float16, 0 where that has no normal number so small."""
    small = b.compare(CmpOp.LT, b.unary(UnOp.ABS, x), _splat(b, x, _F16_NORMAL))
    return b.select(small, _splat(b, x, 0.0), _kept(b, x, 13, rounded=True))


def _kept(b: Builder, x: Value, low: int, *, rounded: bool) -> Value:
    """``x`` without its ``low`` last mantissa bits; NaN stays NaN, whichever bits say so."""
    bits = b.bitcast(x, with_elem(x.type, I32))
    if rounded:
        bits = b.add(bits, b.const(bits.type, 1 << (low - 1)))
    bits = b.binary(BinOp.AND, bits, b.const(bits.type, -(1 << low)))
    return b.select(b.compare(CmpOp.EQ, x, x), b.bitcast(bits, x.type), x)
