"""Trigonometric and hyperbolic functions and their inverses; angles are in radians."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np

from vkjit import dtypes
from vkjit.dtypes import DType
from vkjit.ir.primitive import Array, Sample, Tangent, Traits, Value
from vkjit.lowering.kernel import nodes
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.types import BinOp, CmpOp, UnOp, scalar_of
from vkjit.ops.arithmetic import div, mul, neg, sub
from vkjit.ops.math import plus_one, rsqrt
from vkjit.ops.pointwise import (
    COSTLY,
    FLOATS,
    apply_wide,
    binary_samples,
    const_like,
    narrowed,
    scalar_like,
    total,
    widened,
    with_sign_of,
)
from vkjit.ops.structural import Pointwise, add, expand
from vkjit.ops.unary import FloatUnary, KernelUnary
from vkjit.trace import aval_of, bind

Function = Callable[[Array], Any]


def _one_minus_square(x: Value) -> Value:
    """``1 - x * x`` as a product, which does not cancel near 1."""
    return mul(plus_one(x), sub(scalar_like(x, 1), x))


@final
@dataclass(frozen=True)
class Sin(KernelUnary):
    """The sine, radians."""

    function: ClassVar[Function] = np.sin
    kernel: ClassVar[UnOp] = UnOp.SIN

    def derivative(self, x: Value, out: Value) -> Value:
        """``cos(x)``."""
        return cos(x)


@final
@dataclass(frozen=True)
class Cos(KernelUnary):
    """The cosine, radians."""

    function: ClassVar[Function] = np.cos
    kernel: ClassVar[UnOp] = UnOp.COS

    def derivative(self, x: Value, out: Value) -> Value:
        """``-sin(x)``."""
        return neg(sin(x))


@final
@dataclass(frozen=True)
class Tan(KernelUnary):
    """The tangent, radians."""

    function: ClassVar[Function] = np.tan
    kernel: ClassVar[UnOp] = UnOp.TAN
    domain: ClassVar[tuple[float, float]] = (-1.2, 1.2)

    def derivative(self, x: Value, out: Value) -> Value:
        """``1 + tan(x)**2``."""
        return plus_one(mul(out, out))


def _sine_leg(b: Builder, x: nodes.Value) -> nodes.Value:
    """``sqrt((1 - x) (1 + x))``: the other leg of a right triangle with hypotenuse 1."""
    one = const_like(b, x, 1.0)
    return b.unary(UnOp.SQRT, b.mul(b.sub(one, x), b.add(one, x)))


@final
@dataclass(frozen=True)
class Asin(FloatUnary):
    """The inverse sine; NaN outside [-1, 1]."""

    function: ClassVar[Function] = np.arcsin
    domain: ClassVar[tuple[float, float]] = (-0.9, 0.9)

    def wide_scalar(self, b: Builder, x: nodes.Value) -> nodes.Value:
        """The angle of a right triangle, which keeps accuracy at both ends."""
        return b.binary(BinOp.ATAN2, x, _sine_leg(b, x))

    def derivative(self, x: Value, out: Value) -> Value:
        """``1 / sqrt(1 - x**2)``."""
        return rsqrt(_one_minus_square(x))


@final
@dataclass(frozen=True)
class Acos(FloatUnary):
    """The inverse cosine; NaN outside [-1, 1]."""

    function: ClassVar[Function] = np.arccos
    domain: ClassVar[tuple[float, float]] = (-0.9, 0.9)

    def wide_scalar(self, b: Builder, x: nodes.Value) -> nodes.Value:
        """The angle of a right triangle, which keeps accuracy at both ends."""
        return b.binary(BinOp.ATAN2, _sine_leg(b, x), x)

    def derivative(self, x: Value, out: Value) -> Value:
        """``-1 / sqrt(1 - x**2)``."""
        return neg(rsqrt(_one_minus_square(x)))


@final
@dataclass(frozen=True)
class Atan(KernelUnary):
    """The inverse tangent."""

    function: ClassVar[Function] = np.arctan
    kernel: ClassVar[UnOp] = UnOp.ATAN

    def derivative(self, x: Value, out: Value) -> Value:
        """``1 / (1 + x**2)``."""
        return div(scalar_like(x, 1), plus_one(mul(x, x)))


@final
@dataclass(frozen=True)
class Tanh(KernelUnary):
    """The hyperbolic tangent; -1 and 1 far out."""

    function: ClassVar[Function] = np.tanh
    kernel: ClassVar[UnOp] = UnOp.TANH

    def derivative(self, x: Value, out: Value) -> Value:
        """``1 - tanh(x)**2``."""
        return _one_minus_square(out)


def _half_exp_squared(b: Builder, size: nodes.Value) -> nodes.Value:
    """``exp(size) / 2`` in two halves, so that it overflows only where the result does."""
    root = b.unary(UnOp.EXP, b.mul(size, const_like(b, size, 0.5)))
    return b.mul(b.mul(root, const_like(b, size, 0.5)), root)


def _beyond_exp(b: Builder, size: nodes.Value) -> nodes.Value:
    """Where ``exp(size)`` is about to overflow."""
    limit = 88.0 if scalar_of(size.type).bits == 32 else 709.0
    return b.compare(CmpOp.GT, size, const_like(b, size, limit))


@final
@dataclass(frozen=True)
class Sinh(FloatUnary):
    """The hyperbolic sine."""

    function: ClassVar[Function] = np.sinh

    def wide_scalar(self, b: Builder, x: nodes.Value) -> nodes.Value:
        """With e = expm1(|x|): ``(e + e / (e + 1)) / 2``, which is accurate near 0."""
        size = b.unary(UnOp.ABS, x)
        e = b.unary(UnOp.EXPM1, size)
        folded = b.add(e, b.binary(BinOp.DIV, e, b.add(e, const_like(b, x, 1.0))))
        near = b.mul(folded, const_like(b, x, 0.5))
        return with_sign_of(b, b.select(_beyond_exp(b, size), _half_exp_squared(b, size), near), x)

    def derivative(self, x: Value, out: Value) -> Value:
        """``cosh(x)``."""
        return cosh(x)


@final
@dataclass(frozen=True)
class Cosh(FloatUnary):
    """The hyperbolic cosine."""

    function: ClassVar[Function] = np.cosh

    def wide_scalar(self, b: Builder, x: nodes.Value) -> nodes.Value:
        """With e = exp(|x|): ``(e + 1 / e) / 2``."""
        size = b.unary(UnOp.ABS, x)
        e = b.unary(UnOp.EXP, size)
        near = b.mul(b.add(e, b.binary(BinOp.DIV, const_like(b, x, 1.0), e)), const_like(b, x, 0.5))
        return b.select(_beyond_exp(b, size), _half_exp_squared(b, size), near)

    def derivative(self, x: Value, out: Value) -> Value:
        """``sinh(x)``."""
        return sinh(x)


def _log_twice(b: Builder, size: nodes.Value) -> nodes.Value:
    """``log(2 size)`` without doubling first."""
    return b.add(b.unary(UnOp.LOG, size), const_like(b, size, math.log(2.0)))


@final
@dataclass(frozen=True)
class Asinh(FloatUnary):
    """The inverse hyperbolic sine."""

    function: ClassVar[Function] = np.arcsinh

    def wide_scalar(self, b: Builder, x: nodes.Value) -> nodes.Value:
        """``log1p(a + a**2 / (1 + sqrt(a**2 + 1)))`` with a = |x|; ``log(2 a)`` from 1e8 on."""
        size, one = b.unary(UnOp.ABS, x), const_like(b, x, 1.0)
        square = b.mul(size, size)
        root = b.unary(UnOp.SQRT, b.add(square, one))
        near = b.unary(UnOp.LOG1P, b.add(size, b.binary(BinOp.DIV, square, b.add(one, root))))
        far = b.compare(CmpOp.GT, size, const_like(b, x, 1e8))
        return with_sign_of(b, b.select(far, _log_twice(b, size), near), x)

    def derivative(self, x: Value, out: Value) -> Value:
        """``1 / sqrt(x**2 + 1)``."""
        return rsqrt(plus_one(mul(x, x)))


@final
@dataclass(frozen=True)
class Acosh(FloatUnary):
    """The inverse hyperbolic cosine; NaN below 1."""

    function: ClassVar[Function] = np.arccosh
    domain: ClassVar[tuple[float, float]] = (1.3, 5.0)

    def wide_scalar(self, b: Builder, x: nodes.Value) -> nodes.Value:
        """``log1p(t + sqrt(2 t + t**2))`` with t = x - 1; ``log(2 x)`` from 1e8 on."""
        one = const_like(b, x, 1.0)
        t = b.sub(x, one)
        root = b.unary(UnOp.SQRT, b.add(b.add(t, t), b.mul(t, t)))
        near = b.unary(UnOp.LOG1P, b.add(t, root))
        far = b.compare(CmpOp.GT, x, const_like(b, x, 1e8))
        value = b.select(far, _log_twice(b, x), near)
        return b.select(b.compare(CmpOp.LT, x, one), const_like(b, x, math.nan), value)

    def derivative(self, x: Value, out: Value) -> Value:
        """``1 / sqrt((x - 1) (x + 1))``."""
        return rsqrt(mul(sub(x, scalar_like(x, 1)), plus_one(x)))


@final
@dataclass(frozen=True)
class Atanh(FloatUnary):
    """The inverse hyperbolic tangent; infinite at -1 and 1, NaN beyond."""

    function: ClassVar[Function] = np.arctanh
    domain: ClassVar[tuple[float, float]] = (-0.9, 0.9)

    def wide_scalar(self, b: Builder, x: nodes.Value) -> nodes.Value:
        """``log1p(2 a / (1 - a)) / 2`` with a = |x|."""
        size = b.unary(UnOp.ABS, x)
        ratio = b.binary(BinOp.DIV, b.add(size, size), b.sub(const_like(b, x, 1.0), size))
        return with_sign_of(b, b.mul(b.unary(UnOp.LOG1P, ratio), const_like(b, x, 0.5)), x)

    def derivative(self, x: Value, out: Value) -> Value:
        """``1 / (1 - x**2)``."""
        return div(scalar_like(x, 1), _one_minus_square(x))


@final
@dataclass(frozen=True)
class Atan2(Pointwise):
    """The angle of the point (x, y), operands in the order (y, x), in [-pi, pi]."""

    traits: ClassVar[Traits] = COSTLY

    def accepts(self, dtype: DType) -> bool:
        """Floats."""
        return dtypes.is_float(dtype)

    def evaluate(self, *arrays: Array) -> Array:
        """np.arctan2."""
        return apply_wide(np.arctan2, *arrays)

    def scalar(self, b: Builder, operands: Sequence[DType], *args: nodes.Value) -> nodes.Value:
        """One node."""
        y, x = (widened(b, a) for a in args)
        return narrowed(b, b.binary(BinOp.ATAN2, y, x), args[0])

    def jvp(self, primals: Sequence[Value], tangents: Sequence[Tangent]) -> tuple[Value, Tangent]:
        """``(x dy - y dx) / (x**2 + y**2)``."""
        y, x = primals
        dy, dx = tangents
        norm = add(mul(x, x), mul(y, y))
        out = bind(self, y, x)
        parts = [
            None if dy is None else mul(dy, div(x, norm)),
            None if dx is None else mul(dx, neg(div(y, norm))),
        ]
        tangent = total(parts)
        return out, None if tangent is None else expand(tangent, aval_of(out).shape)

    @classmethod
    def samples(cls) -> list[Sample]:
        """The first quadrant, away from the cut."""
        return binary_samples(cls(), FLOATS, 0.3, 3.0)


def sin(x: Value) -> Value:
    """The sine."""
    return bind(Sin(), x)


def cos(x: Value) -> Value:
    """The cosine."""
    return bind(Cos(), x)


def tan(x: Value) -> Value:
    """The tangent."""
    return bind(Tan(), x)


def asin(x: Value) -> Value:
    """The inverse sine."""
    return bind(Asin(), x)


def acos(x: Value) -> Value:
    """The inverse cosine."""
    return bind(Acos(), x)


def atan(x: Value) -> Value:
    """The inverse tangent."""
    return bind(Atan(), x)


def sinh(x: Value) -> Value:
    """The hyperbolic sine."""
    return bind(Sinh(), x)


def cosh(x: Value) -> Value:
    """The hyperbolic cosine."""
    return bind(Cosh(), x)


def tanh(x: Value) -> Value:
    """The hyperbolic tangent."""
    return bind(Tanh(), x)


def asinh(x: Value) -> Value:
    """The inverse hyperbolic sine."""
    return bind(Asinh(), x)


def acosh(x: Value) -> Value:
    """The inverse hyperbolic cosine."""
    return bind(Acosh(), x)


def atanh(x: Value) -> Value:
    """The inverse hyperbolic tangent."""
    return bind(Atanh(), x)


def atan2(y: Value, x: Value) -> Value:
    """The angle of the point (x, y)."""
    return bind(Atan2(), y, x)
