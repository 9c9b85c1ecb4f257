"""Roots, exponentials, logarithms and rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np

from vkjit.ir.primitive import Array, Tangent, Traits, Value
from vkjit.lowering.kernel import nodes
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.types import BinOp, CmpOp, UnOp
from vkjit.ops.arithmetic import div, mul
from vkjit.ops.pointwise import CHEAP, const_like, scalar_like, with_sign_of
from vkjit.ops.structural import add
from vkjit.ops.unary import FloatStep, FloatUnary, KernelUnary
from vkjit.trace import bind

Function = Callable[[Array], Any]


def plus_one(x: Value) -> Value:
    """``x + 1``."""
    return add(x, scalar_like(x, 1))


@final
@dataclass(frozen=True)
class Exp(KernelUnary):
    """e to the x. Overflows above 88.7 (f32) and 11.0 (f16): subtract the maximum first."""

    function: ClassVar[Function] = np.exp
    kernel: ClassVar[UnOp] = UnOp.EXP

    def derivative(self, x: Value, out: Value) -> Value:
        """Itself."""
        return out


@final
@dataclass(frozen=True)
class Exp2(KernelUnary):
    """2 to the x."""

    function: ClassVar[Function] = np.exp2
    kernel: ClassVar[UnOp] = UnOp.EXP2

    def derivative(self, x: Value, out: Value) -> Value:
        """``log(2) 2**x``."""
        return mul(out, scalar_like(out, math.log(2.0)))


@final
@dataclass(frozen=True)
class Expm1(KernelUnary):
    """``exp(x) - 1``, accurate near 0."""

    function: ClassVar[Function] = np.expm1
    kernel: ClassVar[UnOp] = UnOp.EXPM1

    def derivative(self, x: Value, out: Value) -> Value:
        """``exp(x)``."""
        return plus_one(out)


@final
@dataclass(frozen=True)
class Log(KernelUnary):
    """The natural logarithm; -inf at 0, NaN below."""

    function: ClassVar[Function] = np.log
    kernel: ClassVar[UnOp] = UnOp.LOG
    domain: ClassVar[tuple[float, float]] = (0.2, 5.0)

    def derivative(self, x: Value, out: Value) -> Value:
        """``1 / x``."""
        return div(scalar_like(x, 1), x)

    def jvp(self, primals: Sequence[Value], tangents: Sequence[Tangent]) -> tuple[Value, Tangent]:
        """``dx / x``, rounded once."""
        (x,) = primals
        return bind(self, x), div(tangents[0], x)


@final
@dataclass(frozen=True)
class Log1p(KernelUnary):
    """``log(1 + x)``, accurate near 0."""

    function: ClassVar[Function] = np.log1p
    kernel: ClassVar[UnOp] = UnOp.LOG1P
    domain: ClassVar[tuple[float, float]] = (-0.8, 5.0)

    def derivative(self, x: Value, out: Value) -> Value:
        """``1 / (1 + x)``."""
        return div(scalar_like(x, 1), plus_one(x))


@final
@dataclass(frozen=True)
class Sqrt(KernelUnary):
    """The square root; NaN below 0."""

    traits: ClassVar[Traits] = CHEAP
    function: ClassVar[Function] = np.sqrt
    kernel: ClassVar[UnOp] = UnOp.SQRT
    domain: ClassVar[tuple[float, float]] = (0.2, 5.0)

    def derivative(self, x: Value, out: Value) -> Value:
        """``1 / (2 sqrt(x))``."""
        return div(scalar_like(out, 0.5), out)


def _np_rsqrt(x: Array) -> Any:
    return 1 / np.sqrt(x)


@final
@dataclass(frozen=True)
class Rsqrt(KernelUnary):
    """``1 / sqrt(x)``."""

    traits: ClassVar[Traits] = CHEAP
    function: ClassVar[Function] = _np_rsqrt
    kernel: ClassVar[UnOp] = UnOp.RSQRT
    domain: ClassVar[tuple[float, float]] = (0.2, 5.0)

    def derivative(self, x: Value, out: Value) -> Value:
        """``-rsqrt(x) / (2 x)``."""
        return mul(scalar_like(out, -0.5), div(out, x))


@final
@dataclass(frozen=True)
class Cbrt(FloatUnary):
    """The cube root, of negative numbers too."""

    function: ClassVar[Function] = np.cbrt
    domain: ClassVar[tuple[float, float]] = (0.2, 5.0)

    def wide_scalar(self, b: Builder, x: nodes.Value) -> nodes.Value:
        """``exp(log(|x|) / 3)`` and one Newton step; 0, inf and NaN stay."""
        size = b.unary(UnOp.ABS, x)
        third = const_like(b, x, 1.0 / 3.0)
        guess = b.unary(UnOp.EXP, b.mul(b.unary(UnOp.LOG, size), third))
        over = b.sub(guess, b.binary(BinOp.DIV, size, b.mul(guess, guess)))
        root = b.sub(guess, b.mul(over, third))
        inside = b.binary(
            BinOp.AND,
            b.compare(CmpOp.GT, size, const_like(b, x, 0.0)),
            b.compare(CmpOp.LT, size, const_like(b, x, math.inf)),
        )
        return b.select(inside, with_sign_of(b, root, x), x)

    def derivative(self, x: Value, out: Value) -> Value:
        """``cbrt(x) / (3 x)``."""
        return mul(scalar_like(out, 1.0 / 3.0), div(out, x))


@final
@dataclass(frozen=True)
class Floor(FloatStep):
    """The largest whole number not above x."""

    function: ClassVar[Function] = np.floor
    kernel: ClassVar[UnOp] = UnOp.FLOOR


@final
@dataclass(frozen=True)
class Ceil(FloatStep):
    """The smallest whole number not below x."""

    function: ClassVar[Function] = np.ceil
    kernel: ClassVar[UnOp] = UnOp.CEIL


@final
@dataclass(frozen=True)
class Round(FloatStep):
    """The nearest whole number, halves to even."""

    function: ClassVar[Function] = np.rint
    kernel: ClassVar[UnOp] = UnOp.ROUND_EVEN


@final
@dataclass(frozen=True)
class Trunc(FloatStep):
    """The whole number next to x towards zero."""

    function: ClassVar[Function] = np.trunc
    kernel: ClassVar[UnOp] = UnOp.TRUNC


def exp(x: Value) -> Value:
    """The exponential."""
    return bind(Exp(), x)


def exp2(x: Value) -> Value:
    """2 to the x."""
    return bind(Exp2(), x)


def expm1(x: Value) -> Value:
    """``exp(x) - 1``."""
    return bind(Expm1(), x)


def log(x: Value) -> Value:
    """The natural logarithm."""
    return bind(Log(), x)


def log1p(x: Value) -> Value:
    """``log(1 + x)``."""
    return bind(Log1p(), x)


def sqrt(x: Value) -> Value:
    """The square root."""
    return bind(Sqrt(), x)


def rsqrt(x: Value) -> Value:
    """``1 / sqrt(x)``."""
    return bind(Rsqrt(), x)


def cbrt(x: Value) -> Value:
    """The cube root."""
    return bind(Cbrt(), x)


def floor(x: Value) -> Value:
    """The largest whole number not above x."""
    return bind(Floor(), x)


def ceil(x: Value) -> Value:
    """The smallest whole number not below x."""
    return bind(Ceil(), x)


def round_even(x: Value) -> Value:
    """The nearest whole number, halves to even."""
    return bind(Round(), x)


def trunc(x: Value) -> Value:
    """The whole number next to x towards zero."""
    return bind(Trunc(), x)
