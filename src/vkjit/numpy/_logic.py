"""Comparison, logic and bits: equal, where, logical_and, bitwise_and, isnan, isclose..."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np

from vkjit import dtypes
from vkjit.dtypes import DType
from vkjit.errors import ArgumentError, DTypeError
from vkjit.ir.primitive import Value
from vkjit.numpy._core import (
    ArrayLike,
    aligned,
    broadcast_value,
    cast,
    inexact,
    is_sequence,
    lift,
    limits_of,
    operand_aval,
    promoted,
    refuse_blocks,
)
from vkjit.numpy._elementwise import abs as abs_
from vkjit.numpy._elementwise import pair, sign_bit
from vkjit.ops import arithmetic, compare, logical
from vkjit.ops.pointwise import scalar_like, zero_like
from vkjit.ops.special import stop_gradient
from vkjit.ops.structural import add, full
from vkjit.trace import aval_of

__all__ = [
    "bitwise_and",
    "bitwise_count",
    "bitwise_invert",
    "bitwise_left_shift",
    "bitwise_not",
    "bitwise_or",
    "bitwise_right_shift",
    "bitwise_xor",
    "equal",
    "greater",
    "greater_equal",
    "invert",
    "isclose",
    "isfinite",
    "isinf",
    "isnan",
    "isneginf",
    "isposinf",
    "left_shift",
    "less",
    "less_equal",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "nan_to_num",
    "not_equal",
    "piecewise",
    "right_shift",
    "select",
    "signbit",
    "where",
]


def equal(x: ArrayLike, y: ArrayLike, /) -> Value:
    """``x == y``."""
    return compare.eq(*pair("equal", x, y))


def not_equal(x: ArrayLike, y: ArrayLike, /) -> Value:
    """``x != y``; true for NaN."""
    return compare.ne(*pair("not_equal", x, y))


def less(x: ArrayLike, y: ArrayLike, /) -> Value:
    """``x < y``."""
    return compare.lt(*pair("less", x, y))


def less_equal(x: ArrayLike, y: ArrayLike, /) -> Value:
    """``x <= y``."""
    return compare.le(*pair("less_equal", x, y))


def greater(x: ArrayLike, y: ArrayLike, /) -> Value:
    """``x > y``."""
    return compare.gt(*pair("greater", x, y))


def greater_equal(x: ArrayLike, y: ArrayLike, /) -> Value:
    """``x >= y``."""
    return compare.ge(*pair("greater_equal", x, y))


def truth(name: str, x: ArrayLike) -> Value:
    """The operand as booleans: whether it differs from 0."""
    of = operand_aval(name, x)
    refuse_blocks(name, of)
    return lift(name, x) if of.dtype == dtypes.bool_ else compare.ne(x, of.dtype.type(0))


def logical_and(x: ArrayLike, y: ArrayLike, /) -> Value:
    """Whether both are nonzero."""
    return logical.and_(*_truths("logical_and", x, y))


def logical_or(x: ArrayLike, y: ArrayLike, /) -> Value:
    """Whether one is nonzero."""
    return logical.or_(*_truths("logical_or", x, y))


def logical_xor(x: ArrayLike, y: ArrayLike, /) -> Value:
    """Whether exactly one is nonzero."""
    return logical.xor(*_truths("logical_xor", x, y))


def logical_not(x: ArrayLike, /) -> Value:
    """Whether ``x`` is zero."""
    return logical.not_(truth("logical_not", x))


def _truths(name: str, x: ArrayLike, y: ArrayLike) -> list[Value]:
    return aligned(name, [truth(name, x), truth(name, y)])


def _whole(name: str, *operands: ArrayLike) -> list[Value]:
    values = aligned(name, promoted(name, *operands))
    of = aval_of(values[0])
    if dtypes.is_float(of.dtype):
        given = ", ".join(str(operand_aval(name, x)) for x in operands)
        raise DTypeError(f"{name}: operands {given}, expected integers or booleans; cast them")
    return values


def bitwise_and(x: ArrayLike, y: ArrayLike, /) -> Value:
    """Bits set in both."""
    return logical.and_(*_whole("bitwise_and", x, y))


def bitwise_or(x: ArrayLike, y: ArrayLike, /) -> Value:
    """Bits set in one."""
    return logical.or_(*_whole("bitwise_or", x, y))


def bitwise_xor(x: ArrayLike, y: ArrayLike, /) -> Value:
    """Bits set in exactly one."""
    return logical.xor(*_whole("bitwise_xor", x, y))


def invert(x: ArrayLike, /) -> Value:
    """Every bit flipped; booleans negated."""
    return logical.not_(*_whole("invert", x))


bitwise_not = bitwise_invert = invert


def left_shift(x: ArrayLike, y: ArrayLike, /) -> Value:
    """Bits moved up by ``y``; 0 where ``y`` is the width or more."""
    return logical.shift_left(*_integers("left_shift", x, y))


def right_shift(x: ArrayLike, y: ArrayLike, /) -> Value:
    """Bits moved down by ``y``, filling with the sign of signed integers."""
    x, y = _integers("right_shift", x, y)
    signed = dtypes.is_signed(aval_of(x).dtype)
    return logical.shift_right_arithmetic(x, y) if signed else logical.shift_right_logical(x, y)


bitwise_left_shift, bitwise_right_shift = left_shift, right_shift


def _integers(name: str, x: ArrayLike, y: ArrayLike) -> list[Value]:
    values = _whole(name, x, y)
    if aval_of(values[0]).dtype == dtypes.bool_:
        return [cast(v, dtypes.default_int()) for v in values]
    return values


def bitwise_count(x: ArrayLike, /) -> Value:
    """Number of set bits of the absolute value, uint8."""
    return cast(logical.population_count(abs_(*_whole("bitwise_count", x))), dtypes.uint8)


def where(condition: ArrayLike, x: ArrayLike | None = None, y: ArrayLike | None = None, /) -> Value:
    """``x`` where ``condition`` is nonzero, else ``y``, broadcast together.

    The side that is not taken gets a gradient of exactly 0, even where it is infinite or NaN
    itself; a derivative that is NaN there still needs the argument guarded, as in JAX.

    Raises:
        ArgumentError: one-argument form: the shape of the result would depend on values.
    """
    if x is None or y is None:
        raise ArgumentError(
            "where: given a condition without x and y, expected all three; the shape of "
            "where(condition) depends on values; use where(condition, x, y)"
        )
    cond = truth("where", condition)
    left, right = promoted("where", x, y)
    cond, left, right = aligned("where", [cond, left, right])
    return logical.select(cond, left, right)


def select(
    condlist: Sequence[ArrayLike], choicelist: Sequence[ArrayLike], default: ArrayLike = 0
) -> Value:
    """The choice of the first condition that holds, else ``default``."""
    if len(condlist) != len(choicelist) or not condlist:
        raise ArgumentError(
            f"select: {len(condlist)} conditions and {len(choicelist)} choices; expected as many"
        )
    *choices, out = promoted("select", *choicelist, default)
    for cond, choice in zip(reversed(condlist), reversed(choices), strict=True):
        out = where(cond, choice, out)
    return out


def piecewise(
    x: ArrayLike,
    condlist: Sequence[ArrayLike] | ArrayLike,
    funclist: Sequence[ArrayLike | Callable[..., ArrayLike]],
    *args: Any,
    **kw: Any,
) -> Value:
    """A function that differs from one region to the next.

    Every function is computed everywhere; elements outside its region pass it constants, so that
    its derivative counts inside only.

    Args:
        x: array.
        condlist: where each function applies; where several conditions hold, the last one does.
        funclist: of ``x`` elementwise, or constants; one more than conditions for the rest, else 0.
        args: further arguments of the functions.
        kw: likewise, by name.

    Raises:
        ArgumentError: there are neither as many functions as conditions nor one more.
    """
    x = lift("piecewise", x)
    of = aval_of(x)
    conds = list(condlist) if is_sequence(condlist) else [condlist]
    *pieces, rest = funclist if len(funclist) == len(conds) + 1 else (*funclist, 0)
    if len(pieces) != len(conds):
        raise ArgumentError(
            f"piecewise: {len(funclist)} functions for {len(conds)} conditions; expected as many, "
            "or one more for the rest"
        )

    def value(piece: Any, at: Value) -> Value:
        made = piece(at, *args, **kw) if callable(piece) else piece
        return broadcast_value(cast(lift("piecewise", made), of.dtype), of.shape)

    wide = [broadcast_value(lift("piecewise", cond), of.shape) for cond in conds]
    elsewhere = logical.not_(reduce(logical.or_, wide, np.False_))
    out = value(rest, _only_where(elsewhere, x))
    for cond, piece in zip(wide, pieces, strict=True):
        out = where(cond, value(piece, _only_where(cond, x)), out)
    return out


def _only_where(cond: Value, x: Value) -> Value:
    """``x``, a constant to differentiation where ``cond`` does not hold."""
    smooth = dtypes.is_float(aval_of(x).dtype)
    return logical.select(cond, x, stop_gradient(x)) if smooth else x


def isnan(x: ArrayLike, /) -> Value:
    """Whether NaN; false for integers."""
    return _floating_test("isnan", x, lambda v: compare.ne(v, v))


def isfinite(x: ArrayLike, /) -> Value:
    """Whether neither infinite nor NaN; true for integers."""
    return _floating_test("isfinite", x, compare.is_finite, otherwise=True)


def isinf(x: ArrayLike, /) -> Value:
    """Whether plus or minus infinity."""
    return _floating_test(
        "isinf", x, lambda v: compare.eq(arithmetic.absolute(v), scalar_like(v, np.inf))
    )


def isposinf(x: ArrayLike, /) -> Value:
    """Whether plus infinity."""
    return _floating_test("isposinf", x, lambda v: compare.eq(v, scalar_like(v, np.inf)))


def isneginf(x: ArrayLike, /) -> Value:
    """Whether minus infinity."""
    return _floating_test("isneginf", x, lambda v: compare.eq(v, scalar_like(v, -np.inf)))


def signbit(x: ArrayLike, /) -> Value:
    """Whether the sign is minus, of zeros and NaN as well."""
    of = operand_aval("signbit", x)
    x = lift("signbit", x)
    if dtypes.is_float(of.dtype):
        return sign_bit(x)
    return compare.lt(x, zero_like(x)) if of.dtype != dtypes.bool_ else full(of.shape, np.False_)


def _floating_test(
    name: str, x: ArrayLike, test: Callable[[Value], Value], *, otherwise: bool = False
) -> Value:
    of = operand_aval(name, x)
    refuse_blocks(name, of)
    if not dtypes.is_float(of.dtype):
        return full(of.shape, np.bool_(otherwise))
    return test(lift(name, x))


def nan_to_num(
    x: ArrayLike,
    copy: bool = True,  # noqa: FBT001  numpy's signature
    nan: ArrayLike = 0.0,
    posinf: ArrayLike | None = None,
    neginf: ArrayLike | None = None,
) -> Value:
    """NaN and infinities replaced: by 0 and the largest finite values, or as given."""
    of = operand_aval("nan_to_num", x)
    if not dtypes.is_float(of.dtype):
        return lift("nan_to_num", x)
    largest = float(finite_limits(of.dtype)[1])
    high = largest if posinf is None else posinf
    low = -largest if neginf is None else neginf
    out = where(isnan(x), nan, x)
    return where(isneginf(x), low, where(isposinf(x), high, out))


def finite_limits(dtype: DType) -> tuple[float, float]:
    """The smallest and largest finite value of a dtype."""
    if not dtypes.is_float(dtype):
        return (0, 1) if dtype == dtypes.bool_ else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    info = limits_of(dtype)
    return float(info.min), float(info.max)


def isclose(
    a: ArrayLike,
    b: ArrayLike,
    rtol: ArrayLike = 1e-5,
    atol: ArrayLike = 1e-8,
    equal_nan: bool = False,  # noqa: FBT001  numpy's signature
) -> Value:
    """Whether ``|a - b| <= atol + rtol * |b|``; infinities only when equal."""
    if not any(dtypes.is_float(operand_aval("isclose", v).dtype) for v in (a, b)):
        a, b = inexact("isclose", a, b)
    a, b = pair("isclose", a, b)
    of = aval_of(a).dtype.type
    bound = add(of(atol), arithmetic.mul(of(rtol), arithmetic.absolute(b)))
    near = compare.le(arithmetic.absolute(arithmetic.sub(a, b)), bound)
    finite = logical.and_(compare.is_finite(a), compare.is_finite(b))
    near = logical.or_(logical.and_(near, finite), compare.eq(a, b))
    if not equal_nan:
        return near
    return logical.or_(near, logical.and_(compare.ne(a, a), compare.ne(b, b)))
