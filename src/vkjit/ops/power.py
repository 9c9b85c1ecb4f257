"""Powers: a static integer exponent, float exponents, integer exponents of integers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar, final

import numpy as np

from vkjit import dtypes
from vkjit.dtypes import DType
from vkjit.errors import ArgumentError, DTypeError
from vkjit.ir.avals import aval
from vkjit.ir.primitive import Array, Kind, Remat, Sample, Tangent, Traits, Value
from vkjit.lowering.kernel import nodes
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.types import BinOp, CmpOp, scalar_of
from vkjit.ops.arithmetic import mul, sub
from vkjit.ops.compare import eq
from vkjit.ops.logical import select
from vkjit.ops.math import log
from vkjit.ops.pointwise import (
    FLOATS,
    INTS,
    apply_wide,
    binary_samples,
    const_like,
    narrowed,
    scalar_like,
    total,
    unary_samples,
    widened,
    zero_like,
)
from vkjit.ops.structural import Pointwise, expand
from vkjit.trace import aval_of, bind

T = TypeVar("T")


@final
@dataclass(frozen=True)
class IntegerPow(Pointwise):
    """``x ** exponent`` by repeated squaring; negative exponents of floats only."""

    exponent: int

    traits: ClassVar[Traits] = Traits(Kind.POINTWISE)

    def accepts(self, dtype: DType) -> bool:
        """Numbers; a negative exponent wants floats."""
        if self.exponent < 0 and not dtypes.is_float(dtype):
            raise ArgumentError(
                f"integer_pow: operand of dtype {dtype} with exponent {self.exponent}; expected "
                "an exponent of at least 0; cast the operand to a float dtype"
            )
        return dtype != dtypes.bool_

    def evaluate(self, *arrays: Array) -> Array:
        """The same products as the kernel."""
        return apply_wide(self._numpy, *arrays)

    def _numpy(self, x: Array) -> Array:
        made = _squaring(x, np.ones_like(x), abs(self.exponent), np.multiply)
        return np.asarray(x.dtype.type(1) / made if self.exponent < 0 else made)

    def scalar(self, b: Builder, operands: Sequence[DType], *args: nodes.Value) -> nodes.Value:
        """Products, and one division for a negative exponent."""
        x = widened(b, args[0])
        one = const_like(b, x, 1.0 if scalar_of(x.type).kind == "float" else 1)
        made = _squaring(x, one, abs(self.exponent), b.mul)
        return narrowed(b, b.binary(BinOp.DIV, one, made) if self.exponent < 0 else made, args[0])

    def jvp(self, primals: Sequence[Value], tangents: Sequence[Tangent]) -> tuple[Value, Tangent]:
        """``n x**(n-1) dx``."""
        (x,) = primals
        out = bind(self, x)
        if self.exponent == 0:
            return out, None
        factor = integer_pow(x, self.exponent - 1)
        return out, mul(tangents[0], mul(scalar_like(x, self.exponent), factor))

    @classmethod
    def samples(cls) -> list[Sample]:
        """Positive, zero and negative exponents; integers."""
        made = [Sample(cls(n), (aval((3, 5), dtypes.float32),)) for n in (0, 1, 2, 3, 5, 10)]
        for n in (-1, -3):
            made.append(Sample(cls(n), (aval((3, 5), dtypes.float32),), 0.5, 2.0))
        return made + unary_samples(cls(3), (dtypes.float16, dtypes.bfloat16, *INTS), -4, 4)


def _squaring(x: T, one: T, exponent: int, times: Callable[[T, T], T]) -> T:
    """``x ** exponent`` with about ``2 log2(exponent)`` products; ``one`` for exponent 0."""
    made: T | None = None
    while exponent:
        if exponent & 1:
            made = x if made is None else times(made, x)
        exponent >>= 1
        if exponent:
            x = times(x, x)
    return one if made is None else made


@final
@dataclass(frozen=True)
class Pow(Pointwise):
    """``x ** y`` for operands of one dtype; 0**0 is 1.

    Integers wrap; a negative exponent truncates ``1 / x**-y``, so it gives 0 unless x is 1 or -1.
    The derivative in x is exact at base 0 and at negative bases; the one in y counts log(0) as 0.
    """

    traits: ClassVar[Traits] = Traits(Kind.POINTWISE, Remat.COSTLY)

    def accepts(self, dtype: DType) -> bool:
        """Numbers."""
        return dtype != dtypes.bool_

    def evaluate(self, *arrays: Array) -> Array:
        """np.power for floats, repeated squaring for integers."""
        x, y = arrays
        if dtypes.is_float(x.dtype):
            return apply_wide(np.power, x, y)
        x, y = np.broadcast_arrays(x, y)
        return _integer_power(x, y)

    def scalar(self, b: Builder, operands: Sequence[DType], *args: nodes.Value) -> nodes.Value:
        """One node for floats, a loop over the exponent's bits for integers."""
        x, y = args
        if dtypes.is_float(operands[0]):
            return narrowed(b, b.binary(BinOp.POW, widened(b, x), widened(b, y)), x)
        return _integer_power_scalar(b, operands[0], x, y)

    def jvp(self, primals: Sequence[Value], tangents: Sequence[Tangent]) -> tuple[Value, Tangent]:
        """``y x**(y-1) dx + log(x) x**y dy``, both guarded."""
        x, y = primals
        dx, dy = tangents
        out = bind(self, x, y)
        if not dtypes.is_float(aval_of(x).dtype):
            raise DTypeError(
                f"pow: derivative for operands {aval_of(x)}, {aval_of(y)}; expected floats; "
                "cast with .astype(...)"
            )
        tangent = total(
            [
                None if dx is None else mul(dx, _base_derivative(x, y)),
                None if dy is None else mul(dy, mul(_safe_log(x), out)),
            ]
        )
        return out, None if tangent is None else expand(tangent, aval_of(out).shape)

    @classmethod
    def samples(cls) -> list[Sample]:
        """Positive float bases; integer bases and exponents, negative ones among them."""
        return [
            *binary_samples(cls(), FLOATS, 0.5, 2.5),
            *binary_samples(cls(), INTS, -3, 9),
        ]


def _base_derivative(x: Value, y: Value) -> Value:
    """``y x**(y-1)``; 0 where y is 0, also at x = 0."""
    one = scalar_like(y, 1)
    flat = eq(y, zero_like(y))
    exponent = select(flat, one, sub(y, one))
    return mul(y, power(x, exponent))


def _safe_log(x: Value) -> Value:
    """``log(x)``, and 0 at x = 0."""
    return log(select(eq(x, zero_like(x)), scalar_like(x, 1), x))


def _integer_power(x: Array, y: Array) -> Array:
    signed = dtypes.is_signed(x.dtype)
    negative = y < 0 if signed else np.zeros(y.shape, np.bool_)
    left = np.where(negative, 0, y).astype(y.dtype)
    made, square = np.ones_like(x), np.array(x)
    with np.errstate(over="ignore"):
        while left.any():
            made = np.where(left & 1, made * square, made).astype(x.dtype)
            square = square * square
            left = left >> left.dtype.type(1)
    if not signed:
        return made
    odd = (y & 1) != 0
    unit = np.where(odd & (x == -1), -1, 1).astype(x.dtype)
    return np.where(negative, np.where(np.abs(x) == 1, unit, 0), made).astype(x.dtype)


def _integer_power_scalar(b: Builder, dtype: DType, x: nodes.Value, y: nodes.Value) -> nodes.Value:
    signed = dtypes.is_signed(dtype)
    zero, one = const_like(b, x, 0), const_like(b, x, 1)
    exponent = b.binary(BinOp.MAX_S, y, zero) if signed else y
    bits = scalar_of(x.type).bits
    with b.loop(b.index(0), b.index(bits), carried=(one, x, exponent), hint="bit") as loop:
        made, square, left = loop.carried
        is_set = b.compare(CmpOp.NE, b.binary(BinOp.AND, left, one), zero)
        loop.yields(
            b.select(is_set, b.mul(made, square), made),
            b.mul(square, square),
            b.binary(BinOp.SHR_L, left, one),
        )
    made = loop.results[0]
    if not signed:
        return made
    minus = const_like(b, x, -1)
    odd = b.compare(CmpOp.NE, b.binary(BinOp.AND, y, one), zero)
    flips = b.binary(BinOp.AND, odd, b.compare(CmpOp.EQ, x, minus))
    is_unit = b.binary(BinOp.OR, b.compare(CmpOp.EQ, x, one), b.compare(CmpOp.EQ, x, minus))
    inverse = b.select(is_unit, b.select(flips, minus, one), zero)
    return b.select(b.compare(CmpOp.LT, y, zero), inverse, made)


def integer_pow(x: Value, exponent: int) -> Value:
    """``x ** exponent``; ``x`` itself for 1."""
    return x if exponent == 1 else bind(IntegerPow(exponent), x)


def square(x: Value) -> Value:
    """``x * x``."""
    return integer_pow(x, 2)


def power(x: Value, y: Value) -> Value:
    """``x ** y``, operands of one dtype."""
    return bind(Pow(), x, y)
