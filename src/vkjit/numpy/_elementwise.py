"""Arithmetic on elements: binary operators with promotion and broadcasting, powers, rounding."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from vkjit import dtypes
from vkjit.dtypes import DType
from vkjit.errors import DTypeError
from vkjit.ir.avals import Aval
from vkjit.ir.primitive import Value
from vkjit.numpy._core import (
    ArrayLike,
    aligned,
    cast,
    float_like,
    inexact,
    lift,
    operand_aval,
    promoted,
)
from vkjit.ops import arithmetic, compare, extrema, logical, math, structural
from vkjit.ops import power as powers
from vkjit.ops.pointwise import scalar_like, zero_like
from vkjit.trace import aval_of, is_numpy

__all__ = [
    "abs",
    "absolute",
    "add",
    "clip",
    "copysign",
    "divide",
    "divmod",
    "fabs",
    "float_power",
    "floor_divide",
    "fmax",
    "fmin",
    "fmod",
    "heaviside",
    "hypot",
    "logaddexp",
    "logaddexp2",
    "maximum",
    "minimum",
    "mod",
    "multiply",
    "negative",
    "nextafter",
    "positive",
    "pow",
    "power",
    "reciprocal",
    "remainder",
    "sign",
    "square",
    "subtract",
    "true_divide",
]


Binary: TypeAlias = Callable[[Value, Value], Value]


def pair(name: str, x: ArrayLike, y: ArrayLike) -> list[Value]:
    """Two operands of one dtype and shape."""
    a, b = getattr(x, "aval", None), getattr(y, "aval", None)
    if a is b and a is not None:
        return [x, y]
    if b is None and isinstance(y, float) and a is not None and _takes_float(a):
        return [x, float_like(a.dtype, y)]
    if a is None and isinstance(x, float) and b is not None and _takes_float(b):
        return [float_like(b.dtype, x), y]
    return aligned(name, promoted(name, x, y))


def _takes_float(of: Aval) -> bool:
    """Whether a Python float becomes a scalar of the operand's own dtype."""
    return not of.weak and dtypes.is_float(of.dtype)


def numbers(name: str, x: ArrayLike, y: ArrayLike) -> list[Value]:
    """As ``pair``; booleans become integers."""
    x, y = pair(name, x, y)
    if aval_of(x).dtype == dtypes.bool_:
        return [cast(x, dtypes.default_int()), cast(y, dtypes.default_int())]
    return [x, y]


def floats(name: str, x: ArrayLike, y: ArrayLike) -> list[Value]:
    """As ``pair``; integers and booleans become floats."""
    if dtypes.is_float(operand_aval(name, x).dtype) and dtypes.is_float(
        operand_aval(name, y).dtype
    ):
        return pair(name, x, y)
    return aligned(name, inexact(name, x, y))


def number(name: str, x: ArrayLike) -> Value:
    """One operand, lifted.

    Raises:
        DTypeError: it is boolean.
    """
    of = operand_aval(name, x)
    if of.dtype == dtypes.bool_:
        raise DTypeError(f"{name}: given {of}, expected numbers; use vkjit.numpy.logical_not")
    return lift(name, x)


def add(x: ArrayLike, y: ArrayLike, /) -> Value:
    """Sum; booleans or."""
    return structural.add(*pair("add", x, y))


def subtract(x: ArrayLike, y: ArrayLike, /) -> Value:
    """Difference of numbers.

    Raises:
        DTypeError: both are boolean.
    """
    x, y = pair("subtract", x, y)
    return arithmetic.sub(number("subtract", x), y)


def multiply(x: ArrayLike, y: ArrayLike, /) -> Value:
    """Product; booleans and."""
    x, y = pair("multiply", x, y)
    return logical.and_(x, y) if aval_of(x).dtype == dtypes.bool_ else arithmetic.mul(x, y)


def true_divide(x: ArrayLike, y: ArrayLike, /) -> Value:
    """Quotient as a float."""
    return arithmetic.div(*floats("divide", x, y))


divide = true_divide


def floor_divide(x: ArrayLike, y: ArrayLike, /) -> Value:
    """Quotient rounded to minus infinity, in the operands' dtype."""
    x, y = numbers("floor_divide", x, y)
    dtype = aval_of(x).dtype
    if dtypes.is_float(dtype):
        exact = _float_divmod(x, y)[0]
        return select(compare.eq(y, zero_like(y)), arithmetic.div(x, y), exact)
    quotient = arithmetic.div(x, y)
    if not dtypes.is_signed(dtype):
        return quotient
    crossed = logical.and_(
        compare.ne(arithmetic.sign(x), arithmetic.sign(y)), _nonzero(arithmetic.rem(x, y))
    )
    return select(crossed, arithmetic.sub(quotient, scalar_like(x, 1)), quotient)


def remainder(x: ArrayLike, y: ArrayLike, /) -> Value:
    """What ``floor_divide`` leaves; has the sign of ``y``."""
    x, y = numbers("remainder", x, y)
    rest = arithmetic.rem(x, y)
    if not dtypes.is_float(aval_of(x).dtype) and not dtypes.is_signed(aval_of(x).dtype):
        return rest
    other_side = compare.ne(_negative(rest), _negative(y))
    return select(logical.and_(other_side, _nonzero(rest)), structural.add(rest, y), rest)


mod = remainder


def fmod(x: ArrayLike, y: ArrayLike, /) -> Value:
    """Remainder with the sign of ``x``."""
    return arithmetic.rem(*numbers("fmod", x, y))


def divmod(x: ArrayLike, y: ArrayLike, /) -> tuple[Value, Value]:
    """``floor_divide`` and ``remainder``."""
    return floor_divide(x, y), remainder(x, y)


def _float_divmod(x: Value, y: Value) -> tuple[Value, Value]:
    rest = arithmetic.rem(x, y)
    quotient = arithmetic.div(arithmetic.sub(x, rest), y)
    crossed = logical.and_(_nonzero(rest), compare.ne(_negative(rest), _negative(y)))
    rest = select(crossed, structural.add(rest, y), rest)
    less = arithmetic.sub(quotient, scalar_like(quotient, 1))
    return math.round_even(select(crossed, less, quotient)), rest


def negative(x: ArrayLike, /) -> Value:
    """``-x``; unsigned integers wrap."""
    return arithmetic.neg(number("negative", x))


def positive(x: ArrayLike, /) -> Value:
    """``x``."""
    return lift("positive", x)


def abs(x: ArrayLike, /) -> Value:
    """Absolute value; the derivative at 0 is 0."""
    of = operand_aval("abs", x)
    plain = of.dtype == dtypes.bool_ or (dtypes.is_int(of.dtype) and not dtypes.is_signed(of.dtype))
    return lift("abs", x) if plain else arithmetic.absolute(lift("abs", x))


absolute = abs


def fabs(x: ArrayLike, /) -> Value:
    """Absolute value as a float."""
    return arithmetic.absolute(inexact("fabs", x)[0])


def sign(x: ArrayLike, /) -> Value:
    """-1, 0 or 1; NaN stays NaN."""
    return arithmetic.sign(number("sign", x))


def square(x: ArrayLike, /) -> Value:
    """``x * x``; booleans as integers."""
    return integer_power(x, 2)


def reciprocal(x: ArrayLike, /) -> Value:
    """``1 / x`` as a float."""
    x = inexact("reciprocal", x)[0]
    return arithmetic.div(scalar_like(x, 1), x)


def maximum(x: ArrayLike, y: ArrayLike, /) -> Value:
    """The larger of both; NaN spreads; ties share the derivative."""
    return extrema.maximum(*pair("maximum", x, y))


def minimum(x: ArrayLike, y: ArrayLike, /) -> Value:
    """The smaller of both; NaN spreads; ties share the derivative."""
    return extrema.minimum(*pair("minimum", x, y))


def fmax(x: ArrayLike, y: ArrayLike, /) -> Value:
    """The larger of both; the other one where one is NaN."""
    x, y = pair("fmax", x, y)
    return select(_is_nan(y), x, select(_is_nan(x), y, extrema.maximum(x, y)))


def fmin(x: ArrayLike, y: ArrayLike, /) -> Value:
    """The smaller of both; the other one where one is NaN."""
    x, y = pair("fmin", x, y)
    return select(_is_nan(y), x, select(_is_nan(x), y, extrema.minimum(x, y)))


def clip(arr: ArrayLike, /, min: ArrayLike | None = None, max: ArrayLike | None = None) -> Value:
    """``arr`` limited to ``[min, max]``; None is no limit; NaN spreads."""
    out = lift("clip", arr)
    if min is not None:
        out = maximum(min, out)
    return out if max is None else minimum(max, out)


def power(x: ArrayLike, y: ArrayLike, /) -> Value:
    """``x`` to the power ``y``.

    Exponents that are Python integers become products, exact and differentiable everywhere.
    Integers to integer powers wrap; a negative exponent of an integer array gives the truncated
    quotient.

    Raises:
        ArgumentError: an integer base and a negative Python exponent.
    """
    if not isinstance(y, bool) and (isinstance(y, int) or (is_numpy(y) and _is_whole(y))):
        return integer_power(x, operator.index(y))
    x, y = numbers("power", x, y)
    return powers.power(x, y)


pow = power


def float_power(x: ArrayLike, y: ArrayLike, /) -> Value:
    """``x`` to the power ``y`` as a float."""
    return powers.power(*floats("float_power", x, y))


def _is_whole(y: np.ndarray[Any, Any]) -> bool:
    return y.ndim == 0 and y.dtype.kind in "iu"


def integer_power(x: ArrayLike, y: int) -> Value:
    """``x`` to a static integer power by repeated squaring; 1 for a power of 0.

    Raises:
        ArgumentError: a negative power of integers.
    """
    of = operand_aval("power", x)
    if of.dtype == dtypes.bool_ or isinstance(x, int):
        x = cast(x, dtypes.default_int(), weak=isinstance(x, int))
    return powers.integer_pow(lift("power", x), y)


def logaddexp(x: ArrayLike, y: ArrayLike, /) -> Value:
    """``log(exp(x) + exp(y))`` without overflow; infinities as in the limit."""
    return _logaddexp("logaddexp", x, y, math.exp, math.log1p)


def logaddexp2(x: ArrayLike, y: ArrayLike, /) -> Value:
    """``log2(2 ** x + 2 ** y)`` without overflow."""

    def log2_1p(value: Value) -> Value:
        return arithmetic.div(math.log1p(value), scalar_like(value, float(np.log(2))))

    return _logaddexp("logaddexp2", x, y, math.exp2, log2_1p)


def _logaddexp(
    name: str,
    x: ArrayLike,
    y: ArrayLike,
    raised: Callable[[Value], Value],
    log1p: Callable[[Value], Value],
) -> Value:
    x, y = floats(name, x, y)
    top, gap = extrema.maximum(x, y), arithmetic.sub(x, y)
    undefined = _is_nan(gap)  # equal infinities, or an operand is NaN
    gap = arithmetic.absolute(select(undefined, zero_like(gap), gap))
    return select(
        undefined, structural.add(x, y), structural.add(top, log1p(raised(arithmetic.neg(gap))))
    )


def hypot(x: ArrayLike, y: ArrayLike, /) -> Value:
    """``sqrt(x² + y²)`` without overflow."""
    x, y = floats("hypot", x, y)
    x, y = arithmetic.absolute(x), arithmetic.absolute(y)
    big, small = extrema.maximum(x, y), extrema.minimum(x, y)
    plain = logical.or_(compare.eq(big, zero_like(big)), compare.eq(big, scalar_like(big, np.inf)))
    ratio = arithmetic.div(small, select(plain, scalar_like(big, 1), big))
    root = math.sqrt(structural.add(arithmetic.mul(ratio, ratio), scalar_like(ratio, 1)))
    return select(plain, big, arithmetic.mul(big, root))


def copysign(x: ArrayLike, y: ArrayLike, /) -> Value:
    """The magnitude of ``x`` with the sign of ``y``, zeros and NaN included."""
    x, y = floats("copysign", x, y)
    size = arithmetic.absolute(x)
    return select(sign_bit(y), arithmetic.neg(size), size)


def heaviside(x: ArrayLike, y: ArrayLike, /) -> Value:
    """0 below 0, ``y`` at 0, 1 above; NaN spreads."""
    x, y = floats("heaviside", x, y)
    zero, one = zero_like(x), scalar_like(x, 1)
    step = select(compare.gt(x, zero), one, select(compare.lt(x, zero), zero, y))
    return select(_is_nan(x), x, step)


def nextafter(x: ArrayLike, y: ArrayLike, /) -> Value:
    """The float next to ``x`` in the direction of ``y``.

    It computes with integers, so that devices which take subnormals for zeros step through them.
    """
    x, y = floats("nextafter", x, y)
    bits_dtype = INT_OF_WIDTH[aval_of(x).dtype.itemsize]
    bits = _bits_of(x, bits_dtype)
    one, top = bits_dtype.type(1), _top_bit(bits_dtype)
    at, to = _rank(x, bits_dtype), _rank(y, bits_dtype)
    zero = zero_like(at)
    away = compare.eq(compare.gt(at, zero), compare.gt(to, at))
    moved = select(away, structural.add(bits, one), arithmetic.sub(bits, one))
    smallest = logical.or_(one, logical.and_(_bits_of(y, bits_dtype), top))
    moved = select(compare.eq(at, zero), smallest, moved)
    out = logical.bitcast_convert_type(moved, aval_of(x).dtype)
    undefined = logical.or_(_is_nan(x), _is_nan(y))
    return select(undefined, structural.add(x, y), select(compare.eq(at, to), y, out))


def _rank(x: Value, dtype: DType) -> Value:
    """Integers in the order of the floats; 0 for both zeros."""
    bits = _bits_of(x, dtype)
    return select(compare.lt(bits, zero_like(bits)), arithmetic.sub(_top_bit(dtype), bits), bits)


INT_OF_WIDTH: dict[int, DType] = {2: dtypes.int16, 4: dtypes.int32, 8: dtypes.int64}
"""The signed integer dtype with as many bytes as a float dtype."""


def sign_bit(x: Value) -> Value:
    """Whether the sign bit of a float is set."""
    bits = _bits_of(x, INT_OF_WIDTH[aval_of(x).dtype.itemsize])
    return compare.lt(bits, zero_like(bits))


def _bits_of(x: Value, dtype: DType) -> Value:
    return logical.bitcast_convert_type(x, dtype)


def _top_bit(dtype: DType) -> np.generic[Any]:
    return dtype.type(np.iinfo(dtype).min)


def select(cond: Value, on_true: Value, on_false: Value) -> Value:
    """``ops.logical.select``, here so that this module reads in one voice."""
    return logical.select(cond, on_true, on_false)


def _nonzero(x: Value) -> Value:
    return compare.ne(x, zero_like(x))


def _negative(x: Value) -> Value:
    return compare.lt(x, zero_like(x))


def _is_nan(x: Value) -> Value:
    return compare.ne(x, x)
