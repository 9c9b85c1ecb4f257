"""Numbers out of quantized blocks, as kernel IR: what ``vkjit.blocks.decode`` defines.

An array of blocks is a buffer of units, ``i32`` or ``i16`` by the alignment of its blocks. Whatever
a block holds once for many numbers (scales, minima, a word of high bits) is read once for a run of
lanes; codes are read as units, spread over the lanes and shifted by constants.

Every product of scale and code is exact in float32, so it makes no difference whether a sum with it
is fused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from vkjit.blocks import BlockType
from vkjit.errors import InternalError
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.types import (
    F32,
    I16,
    I32,
    BinOp,
    CmpOp,
    ConvertOp,
    Memory,
    ScalarType,
    UnOp,
    VecType,
    lanes_of,
    with_elem,
)

LANES = (1, 2, 4, 8, 16)
"""Runs that ``decode`` reads: all numbers of a run of 16 share their scale."""


def unit_type(block_type: BlockType) -> ScalarType:
    """The element type of a buffer that holds such blocks."""
    return I32 if block_type.unit == 4 else I16


def longest(block_type: BlockType) -> int:
    """Numbers of the longest run that ``decode`` reads: those that share a scale."""
    return 16 if block_type.name == "Q6_K" else 32


Half = Callable[[Builder, Value], Value]
"""Makes float32 numbers of the float16 in the low halves of ``i32`` values, zeros above them."""


def decode(  # noqa: PLR0913  what is read, and how
    b: Builder,
    memory: Memory,
    block_type: BlockType,
    start: Value,
    lanes: int = 1,
    half: Half | None = None,
) -> Value:
    """The ``lanes`` consecutive numbers from number ``start``, in float32.

    Args:
        b: builder.
        memory: holds units of ``block_type``.
        block_type: of the blocks.
        start: scalar of the index type, a multiple of ``lanes``.
        lanes: one of ``LANES``, or ``longest``.
        half: converts scales, by default ``from_half``.
    """
    is_run = lanes in LANES or lanes == longest(block_type)
    if not is_run or lanes_of(start.type) != 1:
        raise InternalError(f"decode: {lanes} lanes from {start.type}; expected {LANES} and scalar")
    return _DECODERS[block_type.name](_Run(b, memory, block_type, start, lanes, half))


def decode_at(b: Builder, memory: Memory, block_type: BlockType, where: Value) -> Value:
    """The number at index ``where``, or those at a vector of indices, in float32."""
    return _DECODERS[block_type.name](_Run(b, memory, block_type, where, 1))


@final
class _Run:
    """Numbers of one block from position ``j``; or one number each of as many blocks as lanes.

    Positions and bytes in a block are ``i32`` values: scalars in a run, vectors where each lane has
    a block of its own. ``lanes`` is the length of the run, 1 where there is none.
    """

    def __init__(  # noqa: PLR0913  as ``decode``
        self,
        b: Builder,
        memory: Memory,
        block_type: BlockType,
        start: Value,
        lanes: int,
        half: Half | None = None,
    ) -> None:
        self.b = b
        self.from_half = half or from_half
        self.lanes = lanes
        self._memory = memory
        self._unit = block_type.unit
        shift = block_type.size.bit_length() - 1
        block = self.b.binary(BinOp.SHR_L, start, b.const(start.type, shift))
        self._base = b.scaled(block, block_type.nbytes // block_type.unit)
        inside = b.binary(BinOp.AND, start, b.const(start.type, block_type.size - 1))
        self.j = b.convert(ConvertOp.TRUNC, inside, with_elem(start.type, I32))

    # -- integer arithmetic ---------------------------------------------------------------------

    def fixed(self, value: int) -> Value:
        """A constant beside ``j``."""
        return self.b.const(self.j.type, value)

    def right(self, x: Value, bits: int | Value) -> Value:
        """``x >> bits``, zeros moved in."""
        if isinstance(bits, int):
            if bits == 0:
                return x
            bits = self.b.const(x.type, bits)
        return self.b.binary(BinOp.SHR_L, x, bits)

    def left(self, x: Value, bits: int) -> Value:
        """``x << bits``."""
        return self.b.binary(BinOp.SHL, x, self.b.const(x.type, bits)) if bits else x

    def low(self, x: Value, mask: int) -> Value:
        """The bits of ``x`` that are in ``mask``."""
        return self.b.binary(BinOp.AND, x, self.b.const(x.type, mask))

    def both(self, x: Value, y: Value) -> Value:
        """``x | y``."""
        return self.b.binary(BinOp.OR, x, y)

    def signed(self, x: Value, bits: int) -> Value:
        """The low ``bits`` of ``x`` as a signed number."""
        away = self.b.const(x.type, 32 - bits)
        return self.b.binary(BinOp.SHR_A, self.b.binary(BinOp.SHL, x, away), away)

    def whole(self, x: Value) -> Value:
        """An integer as a float32."""
        return self.b.convert(ConvertOp.SINT_TO_FLOAT, x, with_elem(x.type, F32))

    def spread(self, x: Value) -> Value:
        """What the run has once, in every lane."""
        return self.b.splat(x, self.lanes)

    # -- reads ----------------------------------------------------------------------------------

    def unit(self, byte: Value | int) -> Value:
        """The unit that holds ``byte`` of the block, zeros above it."""
        b = self.b
        return self._wide(b.load(self._memory, self._address(byte)))

    def word(self, byte: int) -> Value:
        """Four bytes from a constant ``byte``, a multiple of the unit."""
        if self._unit == 4:
            return self.unit(byte)
        return self.both(self.unit(byte), self.left(self.unit(byte + 2), 16))

    def byte(self, at: Value) -> Value:
        """The byte at ``at``."""
        return self.low(self.right(self.unit(at), self._bits(at)), 255)

    def half(self, byte: int) -> Value:
        """The float16 at a constant, even ``byte``, in float32."""
        bits = self.low(self.right(self.unit(byte), byte % self._unit * 8), 0xFFFF)
        return self.from_half(self.b, bits)

    def codes(self, first: Value, mask: int, shift: Value | None = None, wrap: int = 32) -> Value:
        """``byte >> shift & mask`` of the bytes of the run from ``first``.

        A run begins at a multiple of its length, in bytes too. After ``wrap`` bytes it goes on with
        the upper halves of the same bytes.
        """
        word, shifts = self._spread_bytes(first, shift, wrap)
        return self.low(self.right(word, shifts), mask)

    def signed_bytes(self, first: Value) -> Value:
        """The bytes of the run from ``first`` as signed numbers."""
        b = self.b
        word, shifts = self._spread_bytes(first, None, 32)
        top = b.const(word.type, 24)
        return b.binary(BinOp.SHR_A, b.binary(BinOp.SHL, word, b.sub(top, shifts)), top)

    def _spread_bytes(self, first: Value, shift: Value | None, wrap: int) -> tuple[Value, Value]:
        """The unit of each byte, and how far to the right the byte has to move."""
        b, lanes, unit = self.b, self.lanes, self._unit
        if lanes < unit:
            amount = self._bits(first)
            word = self.spread(self.unit(first))
            shifts = self.spread(amount if shift is None else b.add(amount, shift))
        else:
            count = min(lanes, wrap) // unit
            word = self._wide(b.load(self._memory, self._address(first), count))
            shifts = self.fixed(0) if shift is None else shift
            if count == 1:
                word = b.splat(word, lanes)
            else:
                word = b.shuffle(word, word, [i % wrap // unit for i in range(lanes)])
            shifts = b.splat(shifts, lanes)
        if lanes > 1:
            own = tuple(8 * (i % unit) + 4 * (i // wrap) for i in range(lanes))
            shifts = b.add(shifts, b.const(VecType(I32, lanes), own))
        return word, shifts

    def bits_of(self, word: Value) -> Value:
        """Bit ``j`` of ``word`` for each number of the run."""
        at = self.j
        if self.lanes > 1:
            at = self.b.add(
                self.spread(at), self.b.const(VecType(I32, self.lanes), tuple(range(self.lanes)))
            )
        return self.low(self.right(self.spread(word), at), 1)

    def _bits(self, byte: Value) -> Value:
        """Bits below ``byte`` in its unit."""
        return self.left(self.low(byte, self._unit - 1), 3)

    def _address(self, byte: Value | int) -> Value:
        b, base = self.b, self._base
        if isinstance(byte, int):
            return b.offset(base, byte // self._unit)
        units = self.right(byte, self._unit.bit_length() - 1)
        return b.add(base, b.convert(ConvertOp.SEXT, units, base.type))

    def _wide(self, x: Value) -> Value:
        return self.b.convert(ConvertOp.ZEXT, x, with_elem(x.type, I32))


def from_half(b: Builder, bits: Value) -> Value:
    """The float16 with the low 16 ``bits`` of ``i32`` values, others 0, in float32.

    Written in integers because processors and drivers may flush the subnormal scales of small
    weights to zero: those are sums of 2^-24, which float32 holds as normal numbers.
    """

    def const(value: int) -> Value:
        return b.const(bits.type, value)

    single = with_elem(bits.type, F32)
    size = b.binary(BinOp.AND, bits, const(0x7FFF))
    special = b.compare(CmpOp.GE, size, const(0x7C00))
    bias = b.select(special, const(224 << 23), const(112 << 23))
    normal = b.add(b.binary(BinOp.SHL, size, const(13)), bias)
    tiny = b.mul(b.convert(ConvertOp.SINT_TO_FLOAT, size, single), b.const(single, 2.0**-24))
    subnormal = b.compare(CmpOp.LT, size, const(0x400))
    magnitude = b.select(subnormal, b.bitcast(tiny, bits.type), normal)
    sign = b.binary(BinOp.SHL, b.binary(BinOp.AND, bits, const(0x8000)), const(16))
    return b.bitcast(b.binary(BinOp.OR, magnitude, sign), single)


def _nibbles(run: _Run, start: int) -> Value:
    """Codes of a block of 32: low nibbles are its first half, high ones the other."""
    first = run.b.offset(run.low(run.j, 15), start)
    return run.codes(first, 15, run.low(run.right(run.j, 2), 4), 16)


def _symmetric(run: _Run, codes: Value, zero: int) -> Value:
    about = run.b.offset(codes, -zero) if zero else codes
    return run.b.mul(run.spread(run.half(0)), run.whole(about))


def _affine(run: _Run, codes: Value) -> Value:
    scale, minimum = run.spread(run.half(0)), run.spread(run.half(2))
    return run.b.fma(scale, run.whole(codes), minimum)


def _fifths(run: _Run, start: int) -> Value:
    high = run.left(run.bits_of(run.word(start)), 4)
    return run.both(_nibbles(run, start + 4), high)


def _q8_0(run: _Run) -> Value:
    return _symmetric(run, run.signed_bytes(run.b.offset(run.j, 2)), 0)


def _k_pairs(run: _Run, start: int) -> Value:
    """Codes of a block of 256: of each 32 bytes the low nibbles, then the high ones."""
    b, j = run.b, run.j
    first = b.add(run.left(run.right(j, 6), 5), run.low(j, 31))
    return run.codes(b.offset(first, start), 15, run.low(run.right(j, 3), 4))


def _k_affine(run: _Run, codes: Value) -> Value:
    """``d * scale * code - dmin * minimum`` with scale and minimum of 6 bits out of 12 bytes."""
    b = run.b
    group = run.right(run.j, 5)
    at = run.left(run.low(group, 3), 3)
    low, middle, high = (run.right(run.unit(4 * i), at) for i in (1, 2, 3))
    later = b.compare(CmpOp.GE, group, run.fixed(4))

    def six_bits(plain: Value, rest: Value) -> Value:
        upper = run.low(run.right(plain, 2), 48)
        return run.whole(b.select(later, run.both(run.low(rest, 15), upper), run.low(plain, 63)))

    factors = run.unit(0)
    d = run.from_half(b, run.low(factors, 0xFFFF))
    dmin = run.from_half(b, run.right(factors, 16))
    scale = b.mul(d, six_bits(low, high))
    offset = b.unary(UnOp.NEG, b.mul(dmin, six_bits(middle, run.right(high, 4))))
    return b.fma(run.spread(scale), run.whole(codes), run.spread(offset))


def _q5_k(run: _Run) -> Value:
    first = run.b.offset(run.low(run.j, 31), 16)
    high = run.codes(first, 1, run.right(run.j, 5))
    return _k_affine(run, run.both(_k_pairs(run, 48), run.left(high, 4)))


def _q6_k(run: _Run) -> Value:
    """Each half of a block has four quarters of 32; quarters 0 and 2, 1 and 3 share low bytes."""
    b, j = run.b, run.j
    half, quarter, inside = run.right(j, 7), run.low(run.right(j, 5), 3), run.low(j, 31)
    low_at = b.add(run.left(half, 6), run.low(j, 63))
    low = run.codes(low_at, 15, run.left(run.right(quarter, 1), 2))
    high_at = b.offset(b.add(run.left(half, 5), inside), 128)
    high = run.codes(high_at, 3, run.left(quarter, 1))
    codes = b.offset(run.both(low, run.left(high, 4)), -32)
    scale = run.signed(run.byte(b.offset(run.right(j, 4), 192)), 8)
    return b.mul(run.spread(b.mul(run.half(208), run.whole(scale))), run.whole(codes))


_DECODERS: dict[str, Callable[[_Run], Value]] = {
    "Q4_0": lambda run: _symmetric(run, _nibbles(run, 2), 8),
    "Q4_1": lambda run: _affine(run, _nibbles(run, 4)),
    "Q5_0": lambda run: _symmetric(run, _fifths(run, 2), 16),
    "Q5_1": lambda run: _affine(run, _fifths(run, 4)),
    "Q8_0": _q8_0,
    "Q4_K": lambda run: _k_affine(run, _k_pairs(run, 16)),
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
