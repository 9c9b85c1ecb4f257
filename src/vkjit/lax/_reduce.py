"""Products, ranges and reductions with explicit axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from vkjit import dtypes
from vkjit.errors import ShapeError
from vkjit.ir.primitive import Value
from vkjit.lax._pointwise import same_dtype
from vkjit.numpy._core import (
    ArrayLike,
    Axis,
    DTypeLike,
    ShapeLike,
    axes_of,
    axis_of,
    beside,
    cast,
    lift,
    operand_aval,
    shape_of,
)
from vkjit.numpy._linalg import contracted
from vkjit.numpy._reduce import argmax as argmax_
from vkjit.numpy._reduce import argmin as argmin_
from vkjit.ops import movement, reduce, scan, structural

DotDims: TypeAlias = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]
"""((lhs contracting, rhs contracting), (lhs batch, rhs batch))."""


def dot_general(
    lhs: ArrayLike,
    rhs: ArrayLike,
    dimension_numbers: DotDims,
    precision: object = None,
    preferred_element_type: DTypeLike = None,
) -> Value:
    """Batched product: batch axes, free axes of ``lhs``, free axes of ``rhs``.

    Args:
        lhs: array.
        rhs: array of the same dtype.
        dimension_numbers: ((lhs contracting, rhs contracting), (lhs batch, rhs batch)).
        precision: of float32 products; see ``default_matmul_precision``.
        preferred_element_type: dtype of sums and result; None: that of the operands, with float32
            sums for 16-bit floats.
    """
    (contract_lhs, contract_rhs), (batch_lhs, batch_rhs) = dimension_numbers
    x, y = same_dtype("dot_general", *beside(lhs, rhs))
    return contracted(
        x,
        y,
        (tuple(contract_lhs), tuple(contract_rhs)),
        (tuple(batch_lhs), tuple(batch_rhs)),
        preferred_element_type,
        precision,
    )


def dot(
    lhs: ArrayLike,
    rhs: ArrayLike,
    precision: object = None,
    preferred_element_type: DTypeLike = None,
) -> Value:
    """The product of vectors and matrices: the last axis of ``lhs`` with the first of ``rhs``.

    Raises:
        ShapeError: an operand has neither one nor two axes, or the axes differ in size.
    """
    left, right = operand_aval("dot", lhs), operand_aval("dot", rhs)
    if not (1 <= left.ndim <= 2 and 1 <= right.ndim <= 2 and left.shape[-1] == right.shape[0]):
        raise ShapeError(
            f"dot: operands {left} and {right}, expected vectors or matrices, the last axis of the "
            "first as long as the first axis of the second; use dot_general"
        )
    numbers = (((left.ndim - 1,), (0,)), ((), ()))
    return dot_general(lhs, rhs, numbers, precision, preferred_element_type)


def batch_matmul(lhs: ArrayLike, rhs: ArrayLike) -> Value:
    """Matrix products with equal leading axes."""
    rank = operand_aval("batch_matmul", lhs).ndim
    batch = tuple(range(rank - 2))
    return dot_general(lhs, rhs, (((rank - 1,), (rank - 2,)), (batch, batch)))


def iota(dtype: DTypeLike, size: int) -> Value:
    """0, 1, ... below ``size``."""
    return broadcasted_iota(dtype, (size,), 0)


def broadcasted_iota(dtype: DTypeLike, shape: ShapeLike, dimension: int) -> Value:
    """The position along one axis, everywhere in ``shape``."""
    sizes = shape_of("iota", shape)
    return movement.iota(dtypes.canonical(dtype), sizes, axis_of("iota", dimension, len(sizes)))


def full(shape: ShapeLike, fill_value: ArrayLike, dtype: DTypeLike = None) -> Value:
    """A scalar everywhere in ``shape``."""
    value = fill_value if dtype is None else cast(fill_value, dtypes.canonical(dtype))
    return structural.full(shape_of("full", shape), value)


def empty(shape: ShapeLike, dtype: DTypeLike = None) -> Value:
    """Zeros: no array here has values that nobody wrote."""
    return full(shape, 0, dtypes.default_float() if dtype is None else dtype)


def full_like(x: ArrayLike, fill_value: ArrayLike, dtype: DTypeLike = None) -> Value:
    """A scalar everywhere in the shape, and the dtype, of ``x``."""
    of = operand_aval("full_like", x)
    return full(of.shape, fill_value, of.dtype if dtype is None else dtype)


def reduce_sum(operand: ArrayLike, axes: Sequence[int]) -> Value:
    """Sum over ``axes``, in the operand's dtype."""
    return structural.reduce_sum(*_over("reduce_sum", operand, axes))


def reduce_max(operand: ArrayLike, axes: Sequence[int]) -> Value:
    """Largest value over ``axes``."""
    return reduce.reduce_max(*_over("reduce_max", operand, axes))


def reduce_min(operand: ArrayLike, axes: Sequence[int]) -> Value:
    """Smallest value over ``axes``."""
    return reduce.reduce_min(*_over("reduce_min", operand, axes))


def reduce_prod(operand: ArrayLike, axes: Sequence[int]) -> Value:
    """Product over ``axes``, in the operand's dtype."""
    return reduce.reduce_prod(*_over("reduce_prod", operand, axes))


def reduce_and(operand: ArrayLike, axes: Sequence[int]) -> Value:
    """Whether all booleans are true over ``axes``."""
    return reduce.reduce_and(*_over("reduce_and", operand, axes))


def reduce_or(operand: ArrayLike, axes: Sequence[int]) -> Value:
    """Whether any boolean is true over ``axes``."""
    return reduce.reduce_or(*_over("reduce_or", operand, axes))


def _over(name: str, operand: ArrayLike, axes: Axis) -> tuple[Value, tuple[int, ...]]:
    return lift(name, operand), axes_of(name, axes, operand_aval(name, operand).ndim)


def argmax(operand: ArrayLike, axis: int, index_dtype: DTypeLike = np.int32) -> Value:
    """Index of the first NaN, else of the first largest value."""
    return cast(argmax_(operand, axis), dtypes.canonical(index_dtype))


def argmin(operand: ArrayLike, axis: int, index_dtype: DTypeLike = np.int32) -> Value:
    """Index of the first NaN, else of the first smallest value."""
    return cast(argmin_(operand, axis), dtypes.canonical(index_dtype))


def cumsum(operand: ArrayLike, axis: int = 0, reverse: bool = False) -> Value:  # noqa: FBT001
    """Running sum along an axis."""
    return scan.cumsum(lift("cumsum", operand), _axis("cumsum", operand, axis), reverse=reverse)


def cumprod(operand: ArrayLike, axis: int = 0, reverse: bool = False) -> Value:  # noqa: FBT001
    """Running product along an axis."""
    return scan.cumprod(lift("cumprod", operand), _axis("cumprod", operand, axis), reverse=reverse)


def cummax(operand: ArrayLike, axis: int = 0, reverse: bool = False) -> Value:  # noqa: FBT001
    """The largest so far along an axis."""
    return scan.cummax(lift("cummax", operand), _axis("cummax", operand, axis), reverse=reverse)


def cummin(operand: ArrayLike, axis: int = 0, reverse: bool = False) -> Value:  # noqa: FBT001
    """The smallest so far along an axis."""
    return scan.cummin(lift("cummin", operand), _axis("cummin", operand, axis), reverse=reverse)


def _axis(name: str, operand: ArrayLike, axis: int) -> int:
    return axis_of(name, axis, operand_aval(name, operand).ndim)
