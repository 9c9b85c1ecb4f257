"""Numbers of quantized blocks in vectors across rows: lane i holds a number of row i.

Vectors across rows are what a panel of a product and its register tile hold, so nothing is turned
number by number. Four words of each row at a time are turned instead, which hold 16 to 32 codes;
then each shift and mask serves all rows, and so does what a block has once, its scales.

Codes are brought to one form, four unsigned bytes in a word. A number is ``code * scale + bias``
with one rounding: products of codes and scales are exact in float32, so these are the numbers that
``vkjit.blocks.decode`` gives. Blocks are read in pieces of 32 numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import final

from vkjit.blocks import BlockType
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.decode import from_half
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.types import (
    F32,
    I32,
    BinOp,
    CmpOp,
    ConvertOp,
    Memory,
    UnOp,
    VecType,
    lanes_of,
    with_elem,
)

PIECE = 32
"""Numbers of a row that are decoded together."""
_WORDS = 4
"""Words of a row that are read at once: no block is shorter."""


@final
@dataclass(frozen=True, slots=True)
class Run:
    """The next numbers of a piece: four codes in each word, scale and bias."""

    words: Sequence[Value]
    scale: Value
    bias: Value


@final
@dataclass(frozen=True, slots=True)
class Rows:
    """Blocks at one place of several rows; ``apart`` are units from that of row 0, say, to each."""

    b: Builder
    memory: Memory
    block: BlockType
    apart: tuple[Value, ...]

    @property
    def pieces(self) -> int:
        """Pieces of a block."""
        return self.block.size // PIECE

    def numbers(self, base: Value, piece: Value) -> Generator[Value]:
        """Vectors of float32 across the rows, one for each number of a piece.

        Args:
            base: unit where the blocks start, but for ``apart``.
            piece: 0 ... ``pieces`` - 1.
        """
        b = self.b
        for run in _READERS[self.block.name](_Reader(self, base), piece):
            for code in _bytes(b, run.words):
                number = b.convert(ConvertOp.SINT_TO_FLOAT, code, with_elem(code.type, F32))
                yield b.fma(number, run.scale, run.bias)

    def words(self, unit: Value) -> list[Value]:
        """Four words of every row from ``unit`` of its block on: a vector for each word."""
        b = self.b
        rows: list[Value] = []
        for apart in self.apart:
            loaded = b.load(self.memory, b.add(unit, apart), _WORDS * 4 // self.memory.elem.bytes)
            rows.append(b.bitcast(loaded, VecType(I32, _WORDS)))
        return transpose(b, [_joined(b, rows[i::_WORDS]) for i in range(_WORDS)])


def transpose(b: Builder, rows: Sequence[Value]) -> list[Value]:
    """Vectors with each square block of lanes turned: as many rows as lanes make one such block.

    Eklundh's method: for each bit of the row number, pairs of vectors swap the lanes where they
    differ in that bit. Row and lane counts are powers of two.
    """
    lanes = lanes_of(rows[0].type)
    block = list(rows)
    bit = 1
    while bit < len(block):
        low = [lanes + (at ^ bit) if at & bit else at for at in range(lanes)]
        high = [lanes + at if at & bit else at ^ bit for at in range(lanes)]
        for i in range(len(block)):
            if not i & bit:
                x, y = block[i], block[i | bit]
                block[i], block[i | bit] = b.shuffle(x, y, low), b.shuffle(x, y, high)
        bit *= 2
    return block


def _joined(b: Builder, parts: Sequence[Value]) -> Value:
    """One vector of all parts, a power of two of them."""
    parts = list(parts)
    while len(parts) > 1:
        count = 2 * lanes_of(parts[0].type)
        parts = [
            b.shuffle(x, y, range(count)) for x, y in zip(parts[::2], parts[1::2], strict=True)
        ]
    return parts[0]


def _bytes(b: Builder, words: Sequence[Value]) -> Generator[Value]:
    """The four bytes of each word, in order."""
    for word in words:
        for shift in (0, 8, 16, 24):
            moved = _right(b, word, shift)
            yield moved if shift == 24 else _and(b, moved, 0xFF)


def _right(b: Builder, x: Value, bits: int | Value) -> Value:
    """``x >> bits``, zeros moved in."""
    if isinstance(bits, int):
        return b.binary(BinOp.SHR_L, x, b.const(x.type, bits)) if bits else x
    return b.binary(BinOp.SHR_L, x, b.splat(bits, lanes_of(x.type)))


def _left(b: Builder, x: Value, bits: int) -> Value:
    return b.binary(BinOp.SHL, x, b.const(x.type, bits)) if bits else x


def _and(b: Builder, x: Value, mask: int) -> Value:
    return b.binary(BinOp.AND, x, b.const(x.type, mask))


@final
class _Reader:
    """What the formats have in common: words at a byte, halves, nibbles."""

    __slots__ = ("_base", "_rows", "b")

    def __init__(self, rows: Rows, base: Value) -> None:
        self.b = rows.b
        self._rows = rows
        self._base = base

    def words(self, byte: int, moved: Value | None = None, by: int = 16) -> list[Value]:
        """Four words from ``byte`` of the blocks, ``moved`` times ``by`` bytes further on."""
        b, unit = self.b, self._rows.block.unit
        at = self._base if moved is None else b.add(self._base, b.scaled(moved, by // unit))
        return self._rows.words(b.offset(at, byte // unit))

    def half(self, word: Value, *, upper: bool = False) -> Value:
        """The float16 in the lower or upper half of ``word``."""
        return from_half(self.b, _right(self.b, word, 16) if upper else _and(self.b, word, 0xFFFF))

    def nibbles(self, words: Sequence[Value], shift: int | Value) -> list[Value]:
        """Four bits of each byte, from bit ``shift`` on."""
        return [_and(self.b, _right(self.b, w, shift), 0x0F0F0F0F) for w in words]

    def times(self, x: Value, factor: float) -> Value:
        """``x * factor`` with a constant factor."""
        return self.b.mul(x, self.b.const(x.type, factor))

    def whole(self, x: Value) -> Value:
        """An integer as a float32."""
        return self.b.convert(ConvertOp.SINT_TO_FLOAT, x, with_elem(x.type, F32))

    def small(self, x: Value) -> Value:
        """An index as an ``i32``."""
        return self.b.convert(ConvertOp.TRUNC, x, I32)

    def above(self, codes: Sequence[Value], high: Sequence[Value]) -> list[Value]:
        """Codes with more bits, at 16 and above in each byte."""
        return [self.b.binary(BinOp.OR, x, y) for x, y in zip(codes, high, strict=True)]


def _halves(
    reader: _Reader, words: Sequence[Value], factors: tuple[Value, Value], high: Value | None = None
) -> list[Run]:
    """A block of 32 whose lower nibbles are its first half, with bits of ``high`` above them."""
    b = reader.b
    runs: list[Run] = []
    for half in range(2):
        codes = reader.nibbles(words, 4 * half)
        if high is not None:
            at = [16 * half + 4 * i for i in range(_WORDS)]
            codes = reader.above(codes, [_fifth_bits(b, _right(b, high, bit)) for bit in at])
        runs.append(Run(codes, *factors))
    return runs


def _fifth_bits(b: Builder, bits: Value) -> Value:
    """The lowest four bits, one in each byte, at 16: no two terms of the product meet."""
    copies = b.mul(_and(b, bits, 15), b.const(bits.type, 1 << 4 | 1 << 11 | 1 << 18 | 1 << 25))
    return _and(b, copies, 0x10101010)


def _q4_0(reader: _Reader, _piece: Value) -> list[Run]:
    d = reader.half(reader.words(0)[0])
    return _halves(reader, reader.words(2), (d, reader.times(d, -8.0)))


def _q4_1(reader: _Reader, _piece: Value) -> list[Run]:
    head = reader.words(0)[0]
    return _halves(reader, reader.words(4), (reader.half(head), reader.half(head, upper=True)))


def _q5_0(reader: _Reader, _piece: Value) -> list[Run]:
    b = reader.b
    first, second, *_ = reader.words(0)
    d = reader.half(first)
    high = b.binary(BinOp.OR, _right(b, first, 16), _left(b, second, 16))
    return _halves(reader, reader.words(6), (d, reader.times(d, -16.0)), high)


def _q5_1(reader: _Reader, _piece: Value) -> list[Run]:
    head, high, *_ = reader.words(0)
    return _halves(
        reader, reader.words(8), (reader.half(head), reader.half(head, upper=True)), high
    )


def _q8_0(reader: _Reader, _piece: Value) -> list[Run]:
    """Signed bytes become unsigned when 128 is added, which flips their highest bit."""
    b = reader.b
    d = reader.half(reader.words(0)[0])
    words = [*reader.words(2), *reader.words(18)]
    codes = [b.binary(BinOp.XOR, w, b.const(w.type, 0x80808080)) for w in words]
    return [Run(codes, d, reader.times(d, -128.0))]


def _k_factors(reader: _Reader, piece: Value) -> tuple[Value, Value]:
    """Scale and bias of a piece: 6 bits each out of 12 bytes."""
    b = reader.b
    head, low, middle, high = reader.words(0)
    early = b.compare(CmpOp.LT, piece, b.const(piece.type, 4))
    shift = b.mul(_and(b, reader.small(piece), 3), b.const(I32, 8))

    def six_bits(plain: Value, rest: Value) -> Value:
        upper = _and(b, _right(b, plain, 2), 0x30303030)
        late = b.binary(BinOp.OR, _and(b, rest, 0x0F0F0F0F), upper)
        byte = _right(b, b.select(early, plain, late), shift)
        return reader.whole(_and(b, byte, 63))

    scale = b.mul(reader.half(head), six_bits(low, high))
    minimum = b.mul(reader.half(head, upper=True), six_bits(middle, _right(b, high, 4)))
    return scale, b.unary(UnOp.NEG, minimum)


def _k_codes(reader: _Reader, piece: Value, start: int) -> list[Value]:
    """Nibbles of a piece: of each 32 bytes from ``start`` the lower ones, then the upper ones."""
    b = reader.b
    one = b.const(piece.type, 1)
    moved = b.binary(BinOp.XOR, b.binary(BinOp.OR, piece, one), one)
    words = [*reader.words(start, moved), *reader.words(start + 16, moved)]
    shift = b.mul(_and(b, reader.small(piece), 1), b.const(I32, 4))
    return reader.nibbles(words, shift)


def _q4_k(reader: _Reader, piece: Value) -> list[Run]:
    return [Run(_k_codes(reader, piece, 16), *_k_factors(reader, piece))]


def _q5_k(reader: _Reader, piece: Value) -> list[Run]:
    """Piece p has bit p of each of 32 bytes above its nibbles."""
    b = reader.b
    words = [_right(b, w, reader.small(piece)) for w in (*reader.words(16), *reader.words(32))]
    high = [_left(b, _and(b, w, 0x01010101), 4) for w in words]
    codes = reader.above(_k_codes(reader, piece, 48), high)
    return [Run(codes, *_k_factors(reader, piece))]


def _q6_k(reader: _Reader, piece: Value) -> list[Run]:
    """Each half of a block has four pieces; pieces 0 and 2, 1 and 3 of it share low bytes.

    All of them share 32 bytes of high bits; 16 numbers share a scale.
    """
    b = reader.b

    def bits(shift: int, mask: int) -> Value:
        moved = b.binary(BinOp.SHR_L, piece, b.const(piece.type, shift))
        return b.binary(BinOp.AND, moved, b.const(piece.type, mask))

    half = bits(2, 1)
    low_at = b.add(b.scaled(half, 4), b.scaled(bits(0, 1), 2))
    low = [*reader.words(0, low_at), *reader.words(16, low_at)]
    low = reader.nibbles(low, reader.small(b.scaled(bits(1, 1), 4)))
    high_at, shift = b.scaled(half, 2), reader.small(b.scaled(bits(0, 3), 2))
    high = [*reader.words(128, high_at), *reader.words(144, high_at)]
    high = [_left(b, _and(b, _right(b, w, shift), 0x03030303), 4) for w in high]
    codes = reader.above(low, high)
    d = reader.half(reader.words(194)[3], upper=True)
    scales = reader.words(178, piece, 2)[3]  # two bytes at 192, at the end of what is read
    runs: list[Run] = []
    for i in range(2):
        byte = b.binary(BinOp.SHR_A, _left(b, scales, 8 - 8 * i), b.const(scales.type, 24))
        scale = b.mul(d, reader.whole(byte))
        runs.append(Run(codes[4 * i : 4 * i + 4], scale, reader.times(scale, -32.0)))
    return runs


_READERS: dict[str, Callable[[_Reader, Value], list[Run]]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
