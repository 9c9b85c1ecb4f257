"""Reductions and running sums over axes.

Sums and products of narrow integers and booleans widen to int32 or uint32; 16-bit floats
accumulate in float32. Means and variances of 16-bit floats are float32 until the last rounding.
"""

from __future__ import annotations

import math as pymath
from typing import Any, SupportsIndex

import numpy as np

from vkjit import dtypes
from vkjit.dtypes import DType
from vkjit.errors import ShapeError
from vkjit.ir.avals import Aval
from vkjit.ir.primitive import Value
from vkjit.numpy._core import (
    ArrayLike,
    Axis,
    DTypeLike,
    axes_of,
    axis_of,
    cast,
    constant,
    dtype_or,
    inexact,
    lift,
    operand_aval,
    reshaped,
)
from vkjit.numpy._elementwise import maximum, minimum, multiply, subtract, true_divide
from vkjit.numpy._logic import equal, finite_limits, isclose, isnan, truth
from vkjit.numpy._logic import where as where_
from vkjit.numpy._math import sqrt
from vkjit.numpy._shape import broadcast_to
from vkjit.ops import logical, reduce, scan, structural
from vkjit.ops.structural import float_of
from vkjit.trace import aval_of

__all__ = [
    "all",
    "allclose",
    "amax",
    "amin",
    "any",
    "argmax",
    "argmin",
    "array_equal",
    "average",
    "count_nonzero",
    "cumprod",
    "cumsum",
    "max",
    "mean",
    "min",
    "nancumprod",
    "nancumsum",
    "nanmax",
    "nanmean",
    "nanmin",
    "nanprod",
    "nanstd",
    "nansum",
    "nanvar",
    "prod",
    "ptp",
    "std",
    "sum",
    "var",
]


def _widened(dtype: DType) -> DType:
    """The dtype of a sum: at least 32 bits for integers."""
    if dtype == dtypes.bool_ or (dtypes.is_signed(dtype) and dtype.itemsize < 4):
        return dtypes.default_int()
    if dtypes.is_int(dtype) and dtype.itemsize < 4:
        return dtypes.uint32
    return dtype


def _kept(x: Value, of: Aval, axes: tuple[int, ...], *, keepdims: bool) -> Value:
    """A reduced value with axes of size 1 put back where asked."""
    if not keepdims:
        return x
    return reshaped(x, tuple(1 if i in axes else n for i, n in enumerate(of.shape)))


def _masked(x: Value, mask: ArrayLike | None, neutral: Any) -> Value:
    return x if mask is None else where_(mask, x, aval_of(x).dtype.type(neutral))


def sum(
    a: ArrayLike,
    axis: Axis = None,
    dtype: DTypeLike = None,
    *,
    keepdims: bool = False,
    where: ArrayLike | None = None,
) -> Value:
    """Sum over ``axis`` (None: all).

    Args:
        a: array.
        axis: one axis or several.
        dtype: of terms and result; None: that of ``a``, narrow integers widened.
        keepdims: keep reduced axes with size 1.
        where: mask of the elements that count.
    """
    of = operand_aval("sum", a)
    axes = axes_of("sum", axis, of.ndim)
    x = _masked(cast(a, dtype_or(dtype, _widened(of.dtype))), where, 0)
    return _kept(structural.reduce_sum(x, _axes_now(x, of, axes)), of, axes, keepdims=keepdims)


def _axes_now(x: Value, of: Aval, axes: tuple[int, ...]) -> tuple[int, ...]:
    """``axes`` once a mask has broadcast the operand; the mask may not add axes."""
    if aval_of(x).shape != of.shape:
        raise ShapeError(f"reduction: where broadcasts operand {of} to {aval_of(x).shape}")
    return axes


def prod(
    a: ArrayLike,
    axis: Axis = None,
    dtype: DTypeLike = None,
    *,
    keepdims: bool = False,
    where: ArrayLike | None = None,
) -> Value:
    """Product over ``axis``; arguments as in ``sum``."""
    of = operand_aval("prod", a)
    axes = axes_of("prod", axis, of.ndim)
    x = _masked(cast(a, dtype_or(dtype, _widened(of.dtype))), where, 1)
    return _kept(reduce.reduce_prod(x, _axes_now(x, of, axes)), of, axes, keepdims=keepdims)


def _extremum(  # noqa: PLR0913  numpy's arguments
    name: str,
    a: ArrayLike,
    axis: Axis,
    initial: ArrayLike | None,
    mask: ArrayLike | None,
    *,
    keepdims: bool,
) -> Value:
    of = operand_aval(name, a)
    axes = axes_of(name, axis, of.ndim)
    if initial is None and 0 in [of.shape[i] for i in axes]:
        raise ShapeError(
            f"{name}: operand {of} is empty along axes {axes}, which has no {name}; give initial"
        )
    largest = name == "max"
    x = lift(name, a)
    x = cast(x, of.dtype)
    x = _masked(x, mask, _worst(of.dtype, largest=largest)) if mask is not None else x
    over = (reduce.reduce_max if largest else reduce.reduce_min)(x, axes)
    if initial is not None:
        over = (maximum if largest else minimum)(over, cast(initial, of.dtype))
    return _kept(over, of, axes, keepdims=keepdims)


def _worst(dtype: DType, *, largest: bool) -> float:
    if dtypes.is_float(dtype):
        return -np.inf if largest else np.inf
    return finite_limits(dtype)[0 if largest else 1]


def max(
    a: ArrayLike,
    axis: Axis = None,
    *,
    keepdims: bool = False,
    initial: ArrayLike | None = None,
    where: ArrayLike | None = None,
) -> Value:
    """Largest value over ``axis``; NaN spreads; ties share the derivative.

    Raises:
        ShapeError: nothing to reduce and no ``initial``.
    """
    return _extremum("max", a, axis, initial, where, keepdims=keepdims)


def min(
    a: ArrayLike,
    axis: Axis = None,
    *,
    keepdims: bool = False,
    initial: ArrayLike | None = None,
    where: ArrayLike | None = None,
) -> Value:
    """Smallest value over ``axis``; NaN spreads; ties share the derivative.

    Raises:
        ShapeError: nothing to reduce and no ``initial``.
    """
    return _extremum("min", a, axis, initial, where, keepdims=keepdims)


amax, amin = max, min


def any(a: ArrayLike, axis: Axis = None, *, keepdims: bool = False) -> Value:
    """Whether an element over ``axis`` is nonzero."""
    of = operand_aval("any", a)
    axes = axes_of("any", axis, of.ndim)
    return _kept(reduce.reduce_or(truth("any", a), axes), of, axes, keepdims=keepdims)


def all(a: ArrayLike, axis: Axis = None, *, keepdims: bool = False) -> Value:
    """Whether every element over ``axis`` is nonzero."""
    of = operand_aval("all", a)
    axes = axes_of("all", axis, of.ndim)
    return _kept(reduce.reduce_and(truth("all", a), axes), of, axes, keepdims=keepdims)


def count_nonzero(a: ArrayLike, axis: Axis = None, *, keepdims: bool = False) -> Value:
    """Number of nonzero elements, int32."""
    return sum(truth("count_nonzero", a), axis, dtypes.default_int(), keepdims=keepdims)


def mean(
    a: ArrayLike,
    axis: Axis = None,
    dtype: DTypeLike = None,
    *,
    keepdims: bool = False,
    where: ArrayLike | None = None,
) -> Value:
    """Mean over ``axis`` as a float; NaN over nothing; arguments as in ``sum``."""
    of = operand_aval("mean", a)
    wanted = dtype_or(dtype, of.dtype if dtypes.is_float(of.dtype) else dtypes.default_float())
    wide = float_of(wanted)
    total = sum(a, axis, wide, keepdims=keepdims, where=where)
    count = _count(of, axis, wide, where, keepdims=keepdims)
    return cast(true_divide(total, count), wanted)


def _count(of: Aval, axis: Axis, dtype: DType, mask: ArrayLike | None, *, keepdims: bool) -> Value:
    """How many elements a reduction takes in, as a float."""
    if mask is None:
        return dtype.type(pymath.prod(of.shape[i] for i in axes_of("mean", axis, of.ndim)))
    return sum(broadcast_to(truth("mean", mask), of.shape), axis, dtype, keepdims=keepdims)


def var(  # noqa: PLR0913  numpy's signature
    a: ArrayLike,
    axis: Axis = None,
    dtype: DTypeLike = None,
    *,
    ddof: float = 0,
    keepdims: bool = False,
    where: ArrayLike | None = None,
) -> Value:
    """Variance over ``axis`` from centred values, divided by the count less ``ddof``."""
    of = operand_aval("var", a)
    wanted = dtype_or(dtype, of.dtype if dtypes.is_float(of.dtype) else dtypes.default_float())
    wide = float_of(wanted)
    x = cast(a, wide)
    centred = subtract(x, mean(x, axis, keepdims=True, where=where))
    total = sum(multiply(centred, centred), axis, keepdims=keepdims, where=where)
    count = _count(of, axis, wide, where, keepdims=keepdims)
    return cast(true_divide(total, subtract(count, wide.type(ddof))), wanted)


def std(  # noqa: PLR0913  numpy's signature
    a: ArrayLike,
    axis: Axis = None,
    dtype: DTypeLike = None,
    *,
    ddof: float = 0,
    keepdims: bool = False,
    where: ArrayLike | None = None,
) -> Value:
    """Square root of ``var``."""
    return sqrt(var(a, axis, dtype, ddof=ddof, keepdims=keepdims, where=where))


def ptp(a: ArrayLike, axis: Axis = None, *, keepdims: bool = False) -> Value:
    """Largest minus smallest value."""
    return subtract(max(a, axis, keepdims=keepdims), min(a, axis, keepdims=keepdims))


def average(
    a: ArrayLike, axis: Axis = None, weights: ArrayLike | None = None, *, keepdims: bool = False
) -> Value:
    """Mean over ``axis``, weighted where ``weights`` (of the shape of ``a``) are given."""
    if weights is None:
        return mean(a, axis, keepdims=keepdims)
    a, weights = inexact("average", a, weights)
    if aval_of(a).shape != aval_of(weights).shape:
        raise ShapeError(
            f"average: operand {aval_of(a)} and weights {aval_of(weights)}, expected one shape"
        )
    total = sum(multiply(a, weights), axis, keepdims=keepdims)
    return true_divide(total, sum(weights, axis, keepdims=keepdims))


def argmax(a: ArrayLike, axis: SupportsIndex | None = None, *, keepdims: bool = False) -> Value:
    """Index of the first NaN, else of the first largest value; int32.

    Raises:
        ShapeError: nothing to choose from.
    """
    return _position("argmax", a, axis, keepdims=keepdims)


def argmin(a: ArrayLike, axis: SupportsIndex | None = None, *, keepdims: bool = False) -> Value:
    """Index of the first NaN, else of the first smallest value; int32.

    Raises:
        ShapeError: nothing to choose from.
    """
    return _position("argmin", a, axis, keepdims=keepdims)


def _position(name: str, a: ArrayLike, axis: SupportsIndex | None, *, keepdims: bool) -> Value:
    of = operand_aval(name, a)
    x = lift(name, a)
    if of.dtype == dtypes.bool_:
        x = cast(x, dtypes.uint8)
    along = 0 if axis is None else axis_of(name, axis, of.ndim)
    x = reshaped(x, (of.size,)) if axis is None else x
    if aval_of(x).shape[along] == 0:
        raise ShapeError(f"{name}: operand {of} is empty along axis {along}, which has no {name}")
    out = (reduce.argmax if name == "argmax" else reduce.argmin)(x, along)
    axes = tuple(range(of.ndim)) if axis is None else (along,)
    return _kept(out, of, axes, keepdims=keepdims)


def cumsum(a: ArrayLike, axis: SupportsIndex | None = None, dtype: DTypeLike = None) -> Value:
    """Running sum along ``axis`` (None: flattened), in the dtype of ``a``; booleans as int32."""
    x, along = _running("cumsum", a, axis, dtype)
    return scan.cumsum(x, along)


def cumprod(a: ArrayLike, axis: SupportsIndex | None = None, dtype: DTypeLike = None) -> Value:
    """Running product along ``axis`` (None: flattened), in the dtype of ``a``; bool as int32."""
    x, along = _running("cumprod", a, axis, dtype)
    return scan.cumprod(x, along)


def _running(
    name: str, a: ArrayLike, axis: SupportsIndex | None, dtype: DTypeLike
) -> tuple[Value, int]:
    of = operand_aval(name, a)
    own = dtypes.default_int() if of.dtype == dtypes.bool_ else of.dtype
    x = cast(a, dtype_or(dtype, own))
    if axis is None:
        return reshaped(x, (of.size,)), 0
    return x, axis_of(name, axis, of.ndim)


def nansum(
    a: ArrayLike, axis: Axis = None, dtype: DTypeLike = None, *, keepdims: bool = False
) -> Value:
    """Sum with NaN as 0."""
    return sum(_without_nan(a, 0), axis, dtype, keepdims=keepdims)


def nanprod(
    a: ArrayLike, axis: Axis = None, dtype: DTypeLike = None, *, keepdims: bool = False
) -> Value:
    """Product with NaN as 1."""
    return prod(_without_nan(a, 1), axis, dtype, keepdims=keepdims)


def nancumsum(a: ArrayLike, axis: SupportsIndex | None = None, dtype: DTypeLike = None) -> Value:
    """Running sum with NaN as 0."""
    return cumsum(_without_nan(a, 0), axis, dtype)


def nancumprod(a: ArrayLike, axis: SupportsIndex | None = None, dtype: DTypeLike = None) -> Value:
    """Running product with NaN as 1."""
    return cumprod(_without_nan(a, 1), axis, dtype)


def nanmax(a: ArrayLike, axis: Axis = None, *, keepdims: bool = False) -> Value:
    """Largest value that is not NaN; NaN where there is none."""
    return _nan_extremum("max", a, axis, keepdims=keepdims)


def nanmin(a: ArrayLike, axis: Axis = None, *, keepdims: bool = False) -> Value:
    """Smallest value that is not NaN; NaN where there is none."""
    return _nan_extremum("min", a, axis, keepdims=keepdims)


def _nan_extremum(name: str, a: ArrayLike, axis: Axis, *, keepdims: bool) -> Value:
    of = operand_aval(name, a)
    fold = max if name == "max" else min
    if not dtypes.is_float(of.dtype):
        return fold(a, axis, keepdims=keepdims)
    filled = _without_nan(a, _worst(of.dtype, largest=name == "max"))
    out = fold(filled, axis, keepdims=keepdims)
    nothing = all(isnan(a), axis, keepdims=keepdims)
    return where_(nothing, of.dtype.type(np.nan), out)


def nanmean(
    a: ArrayLike, axis: Axis = None, dtype: DTypeLike = None, *, keepdims: bool = False
) -> Value:
    """Mean of the elements that are not NaN."""
    return mean(a, axis, dtype, keepdims=keepdims, where=_is_number(a))


def nanvar(a: ArrayLike, axis: Axis = None, *, ddof: float = 0, keepdims: bool = False) -> Value:
    """Variance of the elements that are not NaN."""
    return var(a, axis, ddof=ddof, keepdims=keepdims, where=_is_number(a))


def nanstd(a: ArrayLike, axis: Axis = None, *, ddof: float = 0, keepdims: bool = False) -> Value:
    """Standard deviation of the elements that are not NaN."""
    return sqrt(nanvar(a, axis, ddof=ddof, keepdims=keepdims))


def _without_nan(a: ArrayLike, value: float) -> Value:
    of = operand_aval("nan", a)
    return where_(isnan(a), of.dtype.type(value), a) if dtypes.is_float(of.dtype) else a


def _is_number(a: ArrayLike) -> Value:
    return logical.not_(isnan(a))


def allclose(
    a: ArrayLike,
    b: ArrayLike,
    rtol: ArrayLike = 1e-5,
    atol: ArrayLike = 1e-8,
    equal_nan: bool = False,  # noqa: FBT001  numpy's signature
) -> Value:
    """Whether ``isclose`` everywhere, as a boolean array."""
    return all(isclose(a, b, rtol, atol, equal_nan))


def array_equal(a1: ArrayLike, a2: ArrayLike, equal_nan: bool = False) -> Value:  # noqa: FBT001
    """Whether both have one shape and equal elements, as a boolean array."""
    if operand_aval("array_equal", a1).shape != operand_aval("array_equal", a2).shape:
        return constant(np.asarray(False))
    same = equal(a1, a2)
    if equal_nan:
        same = logical.or_(same, logical.and_(isnan(a1), isnan(a2)))
    return all(same)
