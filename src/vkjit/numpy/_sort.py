"""Sorting along an axis, and what is read off sorted elements."""

from __future__ import annotations

from typing import SupportsIndex

import numpy as np

from vkjit import dtypes
from vkjit.errors import ArgumentError
from vkjit.ir.primitive import Value
from vkjit.numpy._core import (
    ArrayLike,
    Axis,
    axes_of,
    axis_of,
    cast,
    inexact,
    lift,
    operand_aval,
    reshaped,
    scalar_of,
)
from vkjit.numpy._elementwise import add, multiply
from vkjit.numpy._logic import isnan
from vkjit.numpy._shape import moveaxis, slice_axis
from vkjit.numpy._take import take_along_axis
from vkjit.ops import logical
from vkjit.ops.reduce import argmax
from vkjit.ops.sort import argsort as argsort_op
from vkjit.ops.sort import reorder
from vkjit.trace import aval_of

__all__ = ["argsort", "median", "sort"]


def sort(  # noqa: PLR0913  numpy's signature
    a: ArrayLike,
    axis: SupportsIndex | None = -1,
    *,
    kind: None = None,
    order: None = None,
    stable: bool = True,
    descending: bool = False,
) -> Value:
    """The elements in order along ``axis`` (None: flattened), NaN last.

    Args:
        a: array.
        axis: along which.
        kind: None.
        order: None.
        stable: equal elements, such as zeros of both signs, keep their order; they always do.
        descending: the largest first, and NaN before them.

    The derivative moves with the elements: those that tie do as the stable sort does.
    """
    x, along = _operand("sort", a, axis, (kind, order))
    return reorder(x, argsort_op(x, along, descending=descending), along)


def argsort(  # noqa: PLR0913  numpy's signature
    a: ArrayLike,
    axis: SupportsIndex | None = -1,
    *,
    kind: None = None,
    order: None = None,
    stable: bool = True,
    descending: bool = False,
) -> Value:
    """The int32 positions that sort ``axis``; arguments as in ``sort``."""
    x, along = _operand("argsort", a, axis, (kind, order))
    return argsort_op(x, along, descending=descending)


def _operand(
    name: str, a: ArrayLike, axis: SupportsIndex | None, unused: tuple[object, object]
) -> tuple[Value, int]:
    if unused != (None, None):
        raise ArgumentError(
            f"{name}: kind {unused[0]!r} and order {unused[1]!r}, expected None; sorts are stable"
        )
    x, of = lift(name, a), operand_aval(name, a)
    if axis is None:
        return reshaped(x, (of.size,)), 0
    return x, axis_of(name, axis, of.ndim)


def largest(x: Value, k: int, axis: int) -> tuple[Value, Value]:
    """The ``k`` first elements along ``axis`` of a descending sort, and their int32 positions."""
    of = aval_of(x)
    if k == 1 and of.dtype != dtypes.bool_:
        shape = (*of.shape[:axis], 1, *of.shape[axis + 1 :])
        found = reshaped(argmax(x, axis), shape)
        return take_along_axis(x, found, axis, mode="clip"), found
    order = argsort_op(x, axis, descending=True, count=k)
    return reorder(x, order, axis), order


def median(a: ArrayLike, axis: Axis = None, *, keepdims: bool = False) -> Value:
    """The middle element along ``axis`` (None: of all), or the mean of the two in the middle.

    Args:
        a: array; integers count as floats.
        axis: one or several axes, which are taken together.
        keepdims: keep the axes, with one element.

    Raises:
        ArgumentError: there are no elements.
    """
    of = operand_aval("median", a)
    axes = axes_of("median", axis, of.ndim)
    (x,) = inexact("median", a)
    kept = tuple(n for i, n in enumerate(of.shape) if i not in axes)
    length = int(np.prod([of.shape[i] for i in axes], dtype=np.int64))
    if not length:
        raise ArgumentError(f"median: operand {of} has no elements along axes {axes}")
    moved = reshaped(moveaxis(x, axes, range(len(kept), of.ndim)), (*kept, length))
    ordered = sort(moved)
    last = len(kept)
    low, high, end = (
        slice_axis(ordered, i, i + 1, last) for i in ((length - 1) // 2, length // 2, length - 1)
    )
    dtype = aval_of(x).dtype
    half = scalar_of(0.5, dtype)
    middle = low if length % 2 else add(multiply(low, half), multiply(high, half))
    middle = cast(logical.select(isnan(end), scalar_of(np.nan, dtype), middle), dtype)
    shape = tuple(1 if i in axes else n for i, n in enumerate(of.shape)) if keepdims else kept
    return reshaped(middle, shape)
