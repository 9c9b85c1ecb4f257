"""Numbers of quantized blocks in vectors across rows: lane i holds a number of row i.

Vectors across rows are what a panel of a product and its register tile hold, so nothing is turned
number by number. Four words of each row at a time are turned instead, which hold 16 to 32 codes;
then each shift and mask serves all rows, and so does what a block has once, its scales.

Codes are brought to one form, four unsigned bytes in a word. A number is ``code * scale + bias``
with one rounding: products of codes and scales are exact in float32, so these are the numbers that
``vkjit.blocks.decode`` gives. A block of 256 is read in pieces of 64 numbers, one of 32 in one.
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

PIECE = 64
"""Most numbers of a row that are decoded together."""
_WORDS = 4
"""Words of a row that are read at once: no block is shorter."""


@final
@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive numbers of a piece from ``first``: four codes in each word, scale and bias."""

    first: int
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
        return max(1, self.block.size // PIECE)

    def numbers(self, base: Value, piece: Value) -> Generator[tuple[Value, Value]]:
        """Positions in the block and vectors of float32 across the rows, for one piece.

        Args:
            base: unit where the blocks start, but for ``apart``.
            piece: 0 ... ``pieces`` - 1.
        """
        b = self.b
        start, runs = _READERS[self.block.name](_Reader(self, base), piece)
        for run in runs:
            for at, code in enumerate(_bytes(b, run.words), run.first):
                number = b.convert(ConvertOp.SINT_TO_FLOAT, code, with_elem(code.type, F32))
                yield b.offset(start, at), b.fma(number, run.scale, run.bias)

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
    return b.binary(BinOp.SHL, x, b.const(x.type, bits))


def _and(b: Builder, x: Value, mask: int) -> Value:
    return b.binary(BinOp.AND, x, b.const(x.type, mask))


def _or(b: Builder, x: Value, y: Value) -> Value:
    return b.binary(BinOp.OR, x, y)


@final
class _Reader:
    """What the formats have in common: words at a byte, halves, nibbles."""

    __slots__ = ("_base", "_rows", "b")

    def __init__(self, rows: Rows, base: Value) -> None:
        self.b = rows.b
        self._rows = rows
        self._base = base

    def words(self, byte: int, moved: Value | None = None) -> list[Value]:
        """Four words from ``byte`` of the blocks, ``moved`` times 16 bytes further on."""
        b, unit = self.b, self._rows.block.unit
        at = self._base if moved is None else b.add(self._base, b.scaled(moved, 16 // unit))
        return self._rows.words(b.offset(at, byte // unit))

    def half(self, word: Value, *, upper: bool = False) -> Value:
        """The float16 in the lower or upper half of ``word``."""
        return from_half(self.b, _right(self.b, word, 16) if upper else _and(self.b, word, 0xFFFF))

    def nibbles(self, words: Sequence[Value], *, upper: bool = False) -> list[Value]:
        """The lower or upper four bits of each byte."""
        b = self.b
        return [_and(b, _right(b, w, 4 * upper), 0x0F0F0F0F) for w in words]

    def times(self, x: Value, factor: float) -> Value:
        """``x * factor`` with a constant factor."""
        return self.b.mul(x, self.b.const(x.type, factor))

    def whole(self, x: Value) -> Value:
        """An integer as a float32."""
        return self.b.convert(ConvertOp.SINT_TO_FLOAT, x, with_elem(x.type, F32))

    def small(self, x: Value) -> Value:
        """A piece or another index as an ``i32``."""
        return self.b.convert(ConvertOp.TRUNC, x, I32)


_Found = tuple[Value, Sequence[Run]]


def _halves(
    reader: _Reader, words: Sequence[Value], scale: Value, bias: Value, high: Value | None = None
) -> _Found:
    """A block of 32 whose lower nibbles are its first half, with bits of ``high`` above them."""
    b = reader.b
    runs: list[Run] = []
    for half in range(2):
        codes = reader.nibbles(words, upper=half == 1)
        if high is not None:
            above = [_fifth_bits(b, _right(b, high, 16 * half + 4 * i)) for i in range(_WORDS)]
            codes = [_or(b, x, y) for x, y in zip(codes, above, strict=True)]
        runs.append(Run(16 * half, codes, scale, bias))
    return b.index(0), runs


def _fifth_bits(b: Builder, bits: Value) -> Value:
    """The lowest four bits, one in each byte, at 16: no two terms of the product meet."""
    copies = b.mul(_and(b, bits, 15), b.const(bits.type, 1 << 4 | 1 << 11 | 1 << 18 | 1 << 25))
    return _and(b, copies, 0x10101010)


def _q4_0(reader: _Reader, _piece: Value) -> _Found:
    d = reader.half(reader.words(0)[0])
    return _halves(reader, reader.words(2), d, reader.times(d, -8.0))


def _q4_1(reader: _Reader, _piece: Value) -> _Found:
    head = reader.words(0)[0]
    return _halves(reader, reader.words(4), reader.half(head), reader.half(head, upper=True))


def _q5_0(reader: _Reader, _piece: Value) -> _Found:
    b = reader.b
    first, second, *_ = reader.words(0)
    d = reader.half(first)
    high = _or(b, _right(b, first, 16), _left(b, second, 16))
    return _halves(reader, reader.words(6), d, reader.times(d, -16.0), high)


def _q5_1(reader: _Reader, _piece: Value) -> _Found:
    head, high, *_ = reader.words(0)
    d, m = reader.half(head), reader.half(head, upper=True)
    return _halves(reader, reader.words(8), d, m, high)


def _q8_0(reader: _Reader, _piece: Value) -> _Found:
    """Signed bytes become unsigned when 128 is added, which flips their highest bit."""
    b = reader.b
    d = reader.half(reader.words(0)[0])
    words = [*reader.words(2), *reader.words(18)]
    codes = [b.binary(BinOp.XOR, w, b.const(w.type, 0x80808080)) for w in words]
    return b.index(0), [Run(0, codes, d, reader.times(d, -128.0))]


def _k_scales(reader: _Reader, piece: Value) -> list[tuple[Value, Value]]:
    """Scale and bias of the two runs of 32 in a piece: 6 bits each out of 12 bytes."""
    b = reader.b
    factors, low, middle, high = reader.words(0)
    d, dmin = reader.half(factors), reader.half(factors, upper=True)
    lower = b.compare(CmpOp.LT, piece, b.const(piece.type, 2))

    def six_bits(plain: Value, rest: Value) -> Value:
        """The bytes of this piece and the next from the lowest on."""
        upper = _and(b, _right(b, plain, 2), 0x30303030)
        late = _or(b, _and(b, rest, 0x0F0F0F0F), upper)
        odd = _and(b, reader.small(piece), 1)
        return _right(
            b, b.select(lower, _and(b, plain, 0x3F3F3F3F), late), b.mul(odd, b.const(I32, 16))
        )

    scales, minima = six_bits(low, high), six_bits(middle, _right(b, high, 4))
    found: list[tuple[Value, Value]] = []
    for shift in (0, 8):
        scale, minimum = (_and(b, _right(b, x, shift), 0xFF) for x in (scales, minima))
        product = b.mul(dmin, reader.whole(minimum))
        found.append((b.mul(d, reader.whole(scale)), b.unary(UnOp.NEG, product)))
    return found


def _k_pairs(reader: _Reader, piece: Value, start: int, high: Sequence[Value] = ()) -> _Found:
    """Of 32 bytes from ``start`` the lower nibbles, then the upper ones, two bits above them."""
    b = reader.b
    twice = b.scaled(piece, 2)
    words = [*reader.words(start, twice), *reader.words(start + 16, twice)]
    runs: list[Run] = []
    for half, (scale, bias) in enumerate(_k_scales(reader, piece)):
        codes = reader.nibbles(words, upper=half == 1)
        if high:
            above = [_left(b, _and(b, _right(b, h, half), 0x01010101), 4) for h in high]
            codes = [_or(b, x, y) for x, y in zip(codes, above, strict=True)]
        runs.append(Run(32 * half, codes, scale, bias))
    return b.scaled(piece, PIECE), runs


def _q5_k(reader: _Reader, piece: Value) -> _Found:
    b = reader.b
    shift = reader.small(b.scaled(piece, 2))
    high = [_right(b, w, shift) for w in (*reader.words(16), *reader.words(32))]
    return _k_pairs(reader, piece, 48, high)


def _q6_k(reader: _Reader, piece: Value) -> _Found:
    """Of each half of a block 16 bytes of high bits complete four runs of 16, 32 apart."""
    b = reader.b
    odd = b.binary(BinOp.AND, piece, b.const(piece.type, 1))
    half = b.binary(BinOp.SHR_L, piece, b.const(piece.type, 1))
    at = b.add(b.scaled(half, 4), odd)  # in 16 bytes of low bits
    low = reader.words(0, at), reader.words(32, at)
    high = reader.words(128, piece)
    bits = _left(b, reader.small(odd), 3)
    scales = reader.words(192)
    first = b.compare(CmpOp.LT, piece, b.const(piece.type, 2))
    packed = [_right(b, b.select(first, scales[i], scales[i + 2]), bits) for i in range(2)]
    d = reader.half(reader.words(194)[3], upper=True)
    runs: list[Run] = []
    for quarter in range(4):
        nibbles = reader.nibbles(low[quarter % 2], upper=quarter >= 2)
        above = [_left(b, _and(b, _right(b, h, 2 * quarter), 0x03030303), 4) for h in high]
        codes = [_or(b, x, y) for x, y in zip(nibbles, above, strict=True)]
        byte = _left(b, _right(b, packed[quarter // 2], 16 * (quarter % 2)), 24)
        signed = b.binary(BinOp.SHR_A, byte, b.const(byte.type, 24))
        scale = b.mul(d, reader.whole(signed))
        runs.append(Run(32 * quarter, codes, scale, reader.times(scale, -32.0)))
    return b.add(b.scaled(half, 128), b.scaled(odd, 16)), runs


_READERS: dict[str, Callable[[_Reader, Value], _Found]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": lambda reader, piece: _k_pairs(reader, piece, 16),
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
