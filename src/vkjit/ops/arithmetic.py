"""Arithmetic: sub, mul, div, rem, neg, abs, sign. Integers wrap; division truncates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np

from vkjit import dtypes
from vkjit.dtypes import DType
from vkjit.ir.primitive import (
    Array,
    Kind,
    Linear,
    Producer,
    Sample,
    Simpler,
    Tangent,
    Traits,
    Value,
    without_neutral,
)
from vkjit.ir.program import Atom
from vkjit.lowering.kernel import nodes
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.types import BinOp, CmpOp, UnOp, scalar_of
from vkjit.ops.pointwise import (
    FLOATS,
    INTS,
    Flat,
    apply_wide,
    binary_samples,
    const_like,
    narrowed,
    total,
    unary_samples,
    widened,
)
from vkjit.ops.structural import Pointwise, expand, unbroadcast
from vkjit.trace import aval_of, bind


class _Numbers(Pointwise):
    """An operation on numbers."""

    def accepts(self, dtype: DType) -> bool:
        """Everything but booleans."""
        return dtype != dtypes.bool_


@final
@dataclass(frozen=True)
class Sub(_Numbers):
    """``x - y``; integers wrap."""

    traits: ClassVar[Traits] = Traits(Kind.POINTWISE, linear_in=(0, 1))

    def evaluate(self, *arrays: Array) -> Array:
        """np.subtract."""
        with np.errstate(all="ignore"):
            return np.asarray(np.subtract(*arrays))

    def simplify(self, args: Sequence[Atom], producer: Producer) -> Simpler | None:
        """``x - 0`` is x."""
        return without_neutral(args, 0.0, 1)

    def scalar(self, b: Builder, operands: Sequence[DType], *args: nodes.Value) -> nodes.Value:
        """One node."""
        return b.sub(*args)

    def jvp(self, primals: Sequence[Value], tangents: Sequence[Tangent]) -> tuple[Value, Tangent]:
        """d(x - y) = dx - dy."""
        out = bind(self, *primals)
        shape = aval_of(out).shape
        dx, dy = (None if t is None else expand(t, shape) for t in tangents)
        if dy is None:
            return out, dx
        return out, neg(dy) if dx is None else sub(dx, dy)

    def transpose(
        self, cotangents: Sequence[Value], args: Sequence[Value | Linear]
    ) -> tuple[Tangent, ...]:
        """The cotangent, negated for y."""
        (ct,) = cotangents
        x, y = args
        return (
            unbroadcast(ct, x.aval) if isinstance(x, Linear) else None,
            neg(unbroadcast(ct, y.aval)) if isinstance(y, Linear) else None,
        )

    @classmethod
    def samples(cls) -> list[Sample]:
        """Floats and integers."""
        return binary_samples(cls(), (*FLOATS, *INTS))


@final
@dataclass(frozen=True)
class Mul(Pointwise):
    """``x * y``; integers wrap, booleans and."""

    traits: ClassVar[Traits] = Traits(Kind.POINTWISE, linear_in=(0, 1))

    def evaluate(self, *arrays: Array) -> Array:
        """np.multiply."""
        with np.errstate(all="ignore"):
            return np.asarray(np.multiply(*arrays))

    def simplify(self, args: Sequence[Atom], producer: Producer) -> Simpler | None:
        """``x * 1`` is x."""
        return without_neutral(args, 1.0, 0, 1)

    def scalar(self, b: Builder, operands: Sequence[DType], *args: nodes.Value) -> nodes.Value:
        """One node."""
        return b.binary(BinOp.AND if operands[0] == dtypes.bool_ else BinOp.MUL, *args)

    def jvp(self, primals: Sequence[Value], tangents: Sequence[Tangent]) -> tuple[Value, Tangent]:
        """d(x * y) = dx * y + x * dy."""
        x, y = primals
        dx, dy = tangents
        parts = [None if dx is None else mul(dx, y), None if dy is None else mul(x, dy)]
        return bind(self, x, y), total(parts)

    def transpose(
        self, cotangents: Sequence[Value], args: Sequence[Value | Linear]
    ) -> tuple[Tangent, ...]:
        """The cotangent times the other operand."""
        (ct,) = cotangents
        x, y = args
        if isinstance(x, Linear):
            return unbroadcast(mul(ct, y), x.aval), None
        assert isinstance(y, Linear)
        return None, unbroadcast(mul(x, ct), y.aval)

    @classmethod
    def samples(cls) -> list[Sample]:
        """All dtypes."""
        return binary_samples(cls(), (*FLOATS, *INTS, dtypes.bool_))


@final
@dataclass(frozen=True)
class Div(_Numbers):
    """``x / y``; integers truncate towards zero, and ``x / 0`` is -1 (all bits set), as in XLA."""

    traits: ClassVar[Traits] = Traits(Kind.POINTWISE, linear_in=(0,))

    def evaluate(self, *arrays: Array) -> Array:
        """np.divide, or the truncated integer quotient."""
        x, y = arrays
        with np.errstate(all="ignore"):
            if dtypes.is_float(x.dtype):
                return np.asarray(np.divide(x, y)).astype(x.dtype, copy=False)
            return truncated_quotient(x, y)

    def simplify(self, args: Sequence[Atom], producer: Producer) -> Simpler | None:
        """``x / 1`` is x."""
        return without_neutral(args, 1.0, 1)

    def scalar(self, b: Builder, operands: Sequence[DType], *args: nodes.Value) -> nodes.Value:
        """Zero and -1 never reach integer division: one is undefined, one may overflow."""
        x, y = args
        if dtypes.is_float(operands[0]):
            return b.binary(BinOp.DIV, x, y)
        ones = const_like(b, x, -1)
        by_zero = b.compare(CmpOp.EQ, y, const_like(b, x, 0))
        if not dtypes.is_signed(operands[0]):
            quotient = b.binary(BinOp.DIV_U, x, b.select(by_zero, const_like(b, x, 1), y))
            return b.select(by_zero, ones, quotient)
        by_minus = b.compare(CmpOp.EQ, y, ones)
        guarded = b.select(b.binary(BinOp.OR, by_zero, by_minus), const_like(b, x, 1), y)
        quotient = b.binary(BinOp.DIV_S, x, guarded)
        negated = b.select(by_minus, b.unary(UnOp.NEG, x), quotient)
        return b.select(by_zero, ones, negated)

    def jvp(self, primals: Sequence[Value], tangents: Sequence[Tangent]) -> tuple[Value, Tangent]:
        """d(x / y) = dx / y - (x / y) / y * dy."""
        x, y = primals
        dx, dy = tangents
        out = bind(self, x, y)
        parts = [
            None if dx is None else div(dx, y),
            None if dy is None else mul(neg(div(out, y)), dy),
        ]
        return out, total(parts)

    def transpose(
        self, cotangents: Sequence[Value], args: Sequence[Value | Linear]
    ) -> tuple[Tangent, ...]:
        """The cotangent over the divisor."""
        x, y = args
        assert isinstance(x, Linear)
        return unbroadcast(div(cotangents[0], y), x.aval), None

    @classmethod
    def samples(cls) -> list[Sample]:
        """Floats away from zero; integers of all widths, zero divisors among them."""
        return [
            *binary_samples(cls(), FLOATS, 0.5, 3.0),
            *binary_samples(cls(), INTS, -9, 9),
        ]


def truncated_quotient(x: Array, y: Array) -> Array:
    """Integer ``x / y`` towards zero; -1 for a zero divisor."""
    divisor = np.where(y == 0, y.dtype.type(1), y)
    quotient: Any = np.floor_divide(x, divisor)
    if dtypes.is_signed(x.dtype):
        exact = quotient * divisor == x
        quotient = quotient + ((np.sign(x) * np.sign(divisor) < 0) & ~exact).astype(x.dtype)
    all_bits = np.invert(np.zeros((), x.dtype))
    return np.where(y == 0, all_bits, quotient).astype(x.dtype)


@final
@dataclass(frozen=True)
class Rem(_Numbers):
    """``x - trunc(x / y) * y``, exact, with the sign of ``x``; ``x`` for an integer y of 0.

    Kernels are exact for float quotients below 2**127 and give NaN beyond. Vulkan lets a driver
    round ``fma`` twice; the result may then be off by a unit in the last place of ``x``.
    """

    traits: ClassVar[Traits] = Traits(Kind.POINTWISE)

    def evaluate(self, *arrays: Array) -> Array:
        """np.fmod."""
        x, y = arrays
        if dtypes.is_float(x.dtype):
            return apply_wide(np.fmod, x, y)
        divisor = np.where(y == 0, y.dtype.type(1), y)
        return np.where(y == 0, x, np.fmod(x, divisor)).astype(x.dtype)

    def scalar(self, b: Builder, operands: Sequence[DType], *args: nodes.Value) -> nodes.Value:
        """Guarded integer remainder, or a float reduction by steps."""
        x, y = args
        if dtypes.is_float(operands[0]):
            return narrowed(b, _float_remainder(b, widened(b, x), widened(b, y)), x)
        by_zero = b.compare(CmpOp.EQ, y, const_like(b, x, 0))
        signed = dtypes.is_signed(operands[0])
        avoid = by_zero
        if signed:
            by_minus = b.compare(CmpOp.EQ, y, const_like(b, x, -1))
            avoid = b.binary(BinOp.OR, by_zero, by_minus)
        guarded = b.select(avoid, const_like(b, x, 1), y)
        left = b.binary(BinOp.REM_S if signed else BinOp.REM_U, x, guarded)
        return b.select(by_zero, x, left)

    def jvp(self, primals: Sequence[Value], tangents: Sequence[Tangent]) -> tuple[Value, Tangent]:
        """d(x - n y) = dx - n dy with n = trunc(x / y)."""
        x, y = primals
        dx, dy = tangents
        out = bind(self, x, y)
        shape = aval_of(out).shape
        whole = None if dy is None else div(sub(out, x), y)
        return out, total(
            [
                None if dx is None else expand(dx, shape),
                None if dy is None or whole is None else mul(whole, dy),
            ]
        )

    @classmethod
    def samples(cls) -> list[Sample]:
        """Floats between jumps; integers of all widths."""
        return [
            *binary_samples(cls(), FLOATS, -9.0, 9.0, smooth=False),
            *binary_samples(cls(), INTS, -9, 9),
        ]


def _float_remainder(b: Builder, x: nodes.Value, y: nodes.Value) -> nodes.Value:
    """fmod: each step removes all but the last 23 (or 52) bits of the quotient, exactly.

    ``fma(-q, y, r)`` is exact because the remainder of a rounded quotient fits the type.
    """
    steps = 6 if scalar_of(x.type).bits == 32 else 3
    with b.loop(b.index(0), b.index(steps), carried=(x,), hint="step") as loop:
        (r,) = loop.carried
        quotient = b.unary(UnOp.TRUNC, b.binary(BinOp.DIV, r, y))
        loop.yields(b.fma(b.unary(UnOp.NEG, quotient), y, r))
    left = loop.results[0]
    zero = const_like(b, x, 0.0)
    # The last quotient may have been rounded up across an integer: then signs differ.
    crossed = b.compare(CmpOp.LT, b.mul(_unit(b, left), _unit(b, x)), zero)
    same = b.compare(CmpOp.LT, b.mul(_unit(b, y), _unit(b, x)), zero)
    back = b.select(same, b.unary(UnOp.NEG, y), y)
    left = b.select(crossed, b.add(left, back), left)
    left = b.select(b.compare(CmpOp.EQ, left, zero), b.mul(x, zero), left)
    inf = const_like(b, x, float("inf"))
    far = b.compare(CmpOp.EQ, b.unary(UnOp.ABS, y), inf)
    finite = b.compare(CmpOp.LT, b.unary(UnOp.ABS, x), inf)
    return b.select(b.binary(BinOp.AND, far, finite), x, left)


def _unit(b: Builder, x: nodes.Value) -> nodes.Value:
    """-1, 0 or 1 by the sign of a float; NaN stays."""
    zero, one = const_like(b, x, 0.0), const_like(b, x, 1.0)
    negative = b.select(b.compare(CmpOp.LT, x, zero), const_like(b, x, -1.0), x)
    return b.select(b.compare(CmpOp.GT, x, zero), one, negative)


@final
@dataclass(frozen=True)
class Neg(_Numbers):
    """``-x``; integers wrap."""

    traits: ClassVar[Traits] = Traits(Kind.POINTWISE, linear_in=(0,))

    def evaluate(self, *arrays: Array) -> Array:
        """np.negative."""
        return np.asarray(np.negative(arrays[0]))

    def simplify(self, args: Sequence[Atom], producer: Producer) -> Simpler | None:
        """``-(-x)`` is x."""
        made = producer(args[0])
        return made.args[0] if made is not None and isinstance(made.prim, Neg) else None

    def scalar(self, b: Builder, operands: Sequence[DType], *args: nodes.Value) -> nodes.Value:
        """One node."""
        return b.unary(UnOp.NEG, args[0])

    def jvp(self, primals: Sequence[Value], tangents: Sequence[Tangent]) -> tuple[Value, Tangent]:
        """Linear."""
        return bind(self, primals[0]), bind(self, tangents[0])

    def transpose(
        self, cotangents: Sequence[Value], args: Sequence[Value | Linear]
    ) -> tuple[Tangent, ...]:
        """Negated."""
        return (neg(cotangents[0]),)

    @classmethod
    def samples(cls) -> list[Sample]:
        """Floats and integers."""
        return unary_samples(cls(), (*FLOATS, *INTS))


@final
@dataclass(frozen=True)
class Abs(_Numbers):
    """``|x|``; the smallest integer stays as it is. The derivative at 0 is 0."""

    traits: ClassVar[Traits] = Traits(Kind.POINTWISE)

    def evaluate(self, *arrays: Array) -> Array:
        """np.abs."""
        return np.asarray(np.abs(arrays[0]))

    def scalar(self, b: Builder, operands: Sequence[DType], *args: nodes.Value) -> nodes.Value:
        """One node for floats, a choice for signed integers."""
        (x,) = args
        if dtypes.is_float(operands[0]):
            return b.unary(UnOp.ABS, x)
        if not dtypes.is_signed(operands[0]):
            return x
        negative = b.compare(CmpOp.LT, x, const_like(b, x, 0))
        return b.select(negative, b.unary(UnOp.NEG, x), x)

    def jvp(self, primals: Sequence[Value], tangents: Sequence[Tangent]) -> tuple[Value, Tangent]:
        """Sign(x) * dx."""
        (x,) = primals
        return bind(self, x), mul(tangents[0], sign(x))

    @classmethod
    def samples(cls) -> list[Sample]:
        """Both signs; smooth away from zero."""
        return [
            *unary_samples(cls(), FLOATS, -3.0, -0.5),
            *unary_samples(cls(), (*FLOATS, *INTS), -5, 5, smooth=False),
        ]


@final
@dataclass(frozen=True)
class Sign(Flat):
    """-1, 0 or 1; floats keep ``-0.0`` and NaN."""

    def accepts(self, dtype: DType) -> bool:
        """Everything but booleans."""
        return dtype != dtypes.bool_

    def evaluate(self, *arrays: Array) -> Array:
        """np.sign with signed zeros."""
        (x,) = arrays
        with np.errstate(invalid="ignore"):
            return np.where(x == 0, x, np.sign(x)).astype(x.dtype, copy=False)

    def scalar(self, b: Builder, operands: Sequence[DType], *args: nodes.Value) -> nodes.Value:
        """Two choices."""
        (x,) = args
        if dtypes.is_float(operands[0]):
            return _unit(b, x)
        zero, one = const_like(b, x, 0), const_like(b, x, 1)
        if not dtypes.is_signed(operands[0]):
            return b.select(b.compare(CmpOp.EQ, x, zero), zero, one)
        negative = b.select(b.compare(CmpOp.LT, x, zero), const_like(b, x, -1), zero)
        return b.select(b.compare(CmpOp.GT, x, zero), one, negative)

    @classmethod
    def samples(cls) -> list[Sample]:
        """Floats and integers."""
        return unary_samples(cls(), (*FLOATS, *INTS), -3, 3, smooth=False)


def sub(x: Value, y: Value) -> Value:
    """``x - y``."""
    return bind(Sub(), x, y)


def mul(x: Value, y: Value) -> Value:
    """``x * y``."""
    return bind(Mul(), x, y)


def div(x: Value, y: Value) -> Value:
    """``x / y``; integers truncate towards zero."""
    return bind(Div(), x, y)


def rem(x: Value, y: Value) -> Value:
    """The remainder of ``div``, with the sign of ``x``."""
    return bind(Rem(), x, y)


def neg(x: Value) -> Value:
    """``-x``."""
    return bind(Neg(), x)


def absolute(x: Value) -> Value:
    """``|x|``."""
    return bind(Abs(), x)


def sign(x: Value) -> Value:
    """-1, 0 or 1."""
    return bind(Sign(), x)
