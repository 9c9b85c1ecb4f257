"""Counter-based random bits: the Threefry-2x32 block function, elementwise.

Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3": 20 rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, final

import numpy as np

from vkjit import dtypes
from vkjit.dtypes import DType
from vkjit.ir.avals import aval
from vkjit.ir.primitive import Array, Kind, Remat, Sample, Tangent, Traits, Value
from vkjit.lowering.kernel import nodes
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.elements import scalar_type
from vkjit.lowering.kernel.types import BinOp, with_elem
from vkjit.ops.structural import Pointwise
from vkjit.trace import bind

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA
"""Skein's key schedule constant, xored into the third key word."""


class Word(Enum):
    """Which 32 bits of the 64-bit block are wanted."""

    FIRST = "first"
    SECOND = "second"
    BOTH = "both"  # their exclusive or


@final
@dataclass(frozen=True)
class Threefry(Pointwise):
    """32 bits of the Threefry-2x32 block of (key word 1, key word 2, count 1, count 2), all u32."""

    word: Word

    traits: ClassVar[Traits] = Traits(Kind.POINTWISE, Remat.COSTLY, differentiable=False)

    def __post_init__(self) -> None:
        # The text form writes an enum member as its value.
        object.__setattr__(self, "word", Word(self.word))

    def accepts(self, dtype: DType) -> bool:
        """Only uint32."""
        return dtype == dtypes.uint32

    def evaluate(self, *arrays: Array) -> Array:
        """Wrapping uint32 arithmetic."""
        key1, key2, x, y = (np.asarray(a, np.uint32) for a in arrays)
        keys = (key1, key2, key1 ^ key2 ^ np.uint32(PARITY))
        with np.errstate(over="ignore"):
            x, y = x + keys[0], y + keys[1]
            for group in range(5):
                for turn in ROTATIONS[group % 2]:
                    x = x + y
                    y = ((y << np.uint32(turn)) | (y >> np.uint32(32 - turn))) ^ x
                x = x + keys[(group + 1) % 3]
                y = y + keys[(group + 2) % 3] + np.uint32(group + 1)
        match self.word:
            case Word.FIRST:
                return np.asarray(x)
            case Word.SECOND:
                return np.asarray(y)
            case Word.BOTH:
                return np.asarray(x ^ y)

    def scalar(self, b: Builder, operands: Sequence[DType], *args: nodes.Value) -> nodes.Value:
        """The rounds, unrolled."""
        key1, key2, x, y = args
        keys = (key1, key2, _xor(b, _xor(b, key1, key2), _constant(b, PARITY, key1)))
        x, y = b.add(x, keys[0]), b.add(y, keys[1])
        for group in range(5):
            for turn in ROTATIONS[group % 2]:
                x = b.add(x, y)
                y = _xor(b, _rotated(b, y, turn), x)
            x = b.add(x, keys[(group + 1) % 3])
            y = b.add(b.add(y, keys[(group + 2) % 3]), _constant(b, group + 1, y))
        match self.word:
            case Word.FIRST:
                return x
            case Word.SECOND:
                return y
            case Word.BOTH:
                return _xor(b, x, y)

    def jvp(self, primals: Sequence[Value], tangents: Sequence[Tangent]) -> tuple[Value, Tangent]:
        """Bits have no derivative."""
        return bind(self, *primals), None

    @classmethod
    def samples(cls) -> list[Sample]:
        """Each word, with scalar and with array keys."""
        one, many = aval((), dtypes.uint32), aval((3, 5), dtypes.uint32)
        return [
            Sample(cls(word), avals, 0.0, 1e9)
            for word in Word
            for avals in ((one, one, many, many), (many, many, many, many))
        ]


def threefry(key: tuple[Value, Value], count: tuple[Value, Value], word: Word) -> Value:
    """Random bits u32 for each count; keys and counts are u32, of one shape or rank 0."""
    return bind(Threefry(word), *key, *count)


def _xor(b: Builder, x: nodes.Value, y: nodes.Value) -> nodes.Value:
    return b.binary(BinOp.XOR, x, y)


def _constant(b: Builder, value: int, like: nodes.Value) -> nodes.Value:
    return b.const(with_elem(like.type, scalar_type(dtypes.uint32)), value)


def _rotated(b: Builder, x: nodes.Value, turn: int) -> nodes.Value:
    left = b.binary(BinOp.SHL, x, _constant(b, turn, x))
    return b.binary(BinOp.OR, left, b.binary(BinOp.SHR_L, x, _constant(b, 32 - turn, x)))
