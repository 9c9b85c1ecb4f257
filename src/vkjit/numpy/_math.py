"""Functions of one element: exponentials, trigonometry, rounding; integers become floats."""

from __future__ import annotations

import numpy as np

from vkjit import dtypes
from vkjit.ir.primitive import Value
from vkjit.numpy._core import ArrayLike, cast, inexact, lift, operand_aval
from vkjit.numpy._elementwise import floats, multiply, number, true_divide
from vkjit.ops import arithmetic, compare, logical, math, trigonometry
from vkjit.ops.pointwise import scalar_like, zero_like
from vkjit.trace import is_numpy

__all__ = [
    "acos",
    "acosh",
    "arccos",
    "arccosh",
    "arcsin",
    "arcsinh",
    "arctan",
    "arctan2",
    "arctanh",
    "around",
    "asin",
    "asinh",
    "atan",
    "atan2",
    "atanh",
    "cbrt",
    "ceil",
    "cos",
    "cosh",
    "deg2rad",
    "degrees",
    "exp",
    "exp2",
    "expm1",
    "fix",
    "floor",
    "log",
    "log1p",
    "log2",
    "log10",
    "modf",
    "rad2deg",
    "radians",
    "rint",
    "round",
    "sin",
    "sinc",
    "sinh",
    "sqrt",
    "tan",
    "tanh",
    "trunc",
]


def floating(name: str, x: ArrayLike) -> Value:
    """The operand as a float."""
    of = operand_aval(name, x)
    return x if dtypes.is_float(of.dtype) and not is_numpy(x) else inexact(name, x)[0]


def exp(x: ArrayLike, /) -> Value:
    """The exponential, e to the ``x``."""
    return math.exp(floating("exp", x))


def exp2(x: ArrayLike, /) -> Value:
    """2 to the ``x``."""
    return math.exp2(floating("exp2", x))


def expm1(x: ArrayLike, /) -> Value:
    """``exp(x) - 1``, accurate near 0."""
    return math.expm1(floating("expm1", x))


def log(x: ArrayLike, /) -> Value:
    """Natural logarithm."""
    return math.log(floating("log", x))


def log1p(x: ArrayLike, /) -> Value:
    """``log(1 + x)``, accurate near 0."""
    return math.log1p(floating("log1p", x))


def log2(x: ArrayLike, /) -> Value:
    """Logarithm to base 2."""
    out = math.log(floating("log2", x))
    return arithmetic.div(out, scalar_like(out, float(np.log(2))))


def log10(x: ArrayLike, /) -> Value:
    """Logarithm to base 10."""
    out = math.log(floating("log10", x))
    return arithmetic.div(out, scalar_like(out, float(np.log(10))))


def sqrt(x: ArrayLike, /) -> Value:
    """Square root."""
    return math.sqrt(floating("sqrt", x))


def cbrt(x: ArrayLike, /) -> Value:
    """Cube root; negative for negative ``x``."""
    return math.cbrt(floating("cbrt", x))


def sin(x: ArrayLike, /) -> Value:
    """Sine of radians."""
    return trigonometry.sin(floating("sin", x))


def cos(x: ArrayLike, /) -> Value:
    """Cosine of radians."""
    return trigonometry.cos(floating("cos", x))


def tan(x: ArrayLike, /) -> Value:
    """Tangent of radians."""
    return trigonometry.tan(floating("tan", x))


def arcsin(x: ArrayLike, /) -> Value:
    """Inverse sine in radians."""
    return trigonometry.asin(floating("arcsin", x))


def arccos(x: ArrayLike, /) -> Value:
    """Inverse cosine in radians."""
    return trigonometry.acos(floating("arccos", x))


def arctan(x: ArrayLike, /) -> Value:
    """Inverse tangent in radians."""
    return trigonometry.atan(floating("arctan", x))


def arctan2(y: ArrayLike, x: ArrayLike, /) -> Value:
    """Angle of the point (x, y) in radians, with the signs of zeros as IEEE has them."""
    return trigonometry.atan2(*floats("arctan2", y, x))


def sinh(x: ArrayLike, /) -> Value:
    """Hyperbolic sine."""
    return trigonometry.sinh(floating("sinh", x))


def cosh(x: ArrayLike, /) -> Value:
    """Hyperbolic cosine."""
    return trigonometry.cosh(floating("cosh", x))


def tanh(x: ArrayLike, /) -> Value:
    """Hyperbolic tangent."""
    return trigonometry.tanh(floating("tanh", x))


def arcsinh(x: ArrayLike, /) -> Value:
    """Inverse hyperbolic sine."""
    return trigonometry.asinh(floating("arcsinh", x))


def arccosh(x: ArrayLike, /) -> Value:
    """Inverse hyperbolic cosine."""
    return trigonometry.acosh(floating("arccosh", x))


def arctanh(x: ArrayLike, /) -> Value:
    """Inverse hyperbolic tangent."""
    return trigonometry.atanh(floating("arctanh", x))


asin, acos, atan, atan2 = arcsin, arccos, arctan, arctan2
asinh, acosh, atanh = arcsinh, arccosh, arctanh


def sinc(x: ArrayLike, /) -> Value:
    """``sin(pi x) / (pi x)``, 1 at 0."""
    x = floating("sinc", x)
    zero = compare.eq(x, zero_like(x))
    angle = arithmetic.mul(logical.select(zero, scalar_like(x, 1), x), scalar_like(x, np.pi))
    ratio = arithmetic.div(trigonometry.sin(angle), angle)
    return logical.select(zero, scalar_like(x, 1), ratio)


def deg2rad(x: ArrayLike, /) -> Value:
    """Degrees to radians."""
    x = floating("deg2rad", x)
    return arithmetic.mul(x, scalar_like(x, np.pi / 180))


def rad2deg(x: ArrayLike, /) -> Value:
    """Radians to degrees."""
    x = floating("rad2deg", x)
    return arithmetic.mul(x, scalar_like(x, 180 / np.pi))


radians, degrees = deg2rad, rad2deg


def floor(x: ArrayLike, /) -> Value:
    """The largest whole number not above ``x``; integers stay."""
    return math.floor(x) if _is_float("floor", x) else lift("floor", x)


def ceil(x: ArrayLike, /) -> Value:
    """The smallest whole number not below ``x``; integers stay."""
    return math.ceil(x) if _is_float("ceil", x) else lift("ceil", x)


def trunc(x: ArrayLike, /) -> Value:
    """The whole number next to ``x`` towards 0; integers stay."""
    return math.trunc(x) if _is_float("trunc", x) else lift("trunc", x)


fix = trunc


def rint(x: ArrayLike, /) -> Value:
    """The nearest whole number, halves to even, as a float."""
    return math.round_even(floating("rint", x))


def round(a: ArrayLike, decimals: int = 0) -> Value:
    """Rounded to ``decimals`` places, halves to even; integers stay for ``decimals >= 0``."""
    if not _is_float("round", a):
        number("round", a)
        if decimals >= 0:
            return lift("round", a)
        of = operand_aval("round", a)
        tens = 10**-decimals
        return cast(multiply(math.round_even(true_divide(a, tens)), tens), of.dtype)
    if decimals == 0:
        return math.round_even(lift("round", a))
    a = lift("round", a)
    tens = scalar_like(a, 10.0**decimals)
    return arithmetic.div(math.round_even(arithmetic.mul(a, tens)), tens)


around = round


def modf(x: ArrayLike, /) -> tuple[Value, Value]:
    """Fraction and whole part, both with the sign of ``x``."""
    x = floating("modf", x)
    whole = math.trunc(x)
    infinite = compare.eq(arithmetic.absolute(x), scalar_like(x, np.inf))
    return logical.select(infinite, zero_like(x), arithmetic.sub(x, whole)), whole


def _is_float(name: str, x: ArrayLike) -> bool:
    return dtypes.is_float(operand_aval(name, x).dtype)
