"""POPCOUNT and CLZ from shifts, masks and additions, for targets without such instructions."""

from __future__ import annotations

from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.types import BinOp, UnOp, scalar_of


def _pattern(bits: int, byte_pairs: int) -> int:
    """A mask that repeats ``byte_pairs`` (16 bits) over the width, or its low bits, as signed."""
    made = sum(byte_pairs << at for at in range(0, bits, 16)) & ((1 << bits) - 1)
    return made - (1 << bits) if made >> (bits - 1) else made


def _shifted(b: Builder, x: Value, amount: int) -> Value:
    return b.binary(BinOp.SHR_L, x, b.const(x.type, amount))


def _kept(b: Builder, x: Value, byte_pairs: int) -> Value:
    mask = b.const(x.type, _pattern(scalar_of(x.type).bits, byte_pairs))
    return b.binary(BinOp.AND, x, mask)


def popcount(b: Builder, x: Value) -> Value:
    """Number of set bits of an ``i32`` or ``i64``: sums of neighbours, twice as wide each time."""
    x = b.sub(x, _kept(b, _shifted(b, x, 1), 0x5555))
    x = b.add(_kept(b, x, 0x3333), _kept(b, _shifted(b, x, 2), 0x3333))
    x = _kept(b, b.add(x, _shifted(b, x, 4)), 0x0F0F)
    amount = 8
    while amount < scalar_of(x.type).bits:
        x = b.add(x, _shifted(b, x, amount))
        amount *= 2
    return b.binary(BinOp.AND, x, b.const(x.type, 0x7F))


def count_leading_zeros(b: Builder, x: Value) -> Value:
    """Number of zero bits above the highest set one; the width for 0."""
    amount = 1
    while amount < scalar_of(x.type).bits:
        x = b.binary(BinOp.OR, x, _shifted(b, x, amount))
        amount *= 2
    return popcount(b, b.unary(UnOp.NOT, x))
