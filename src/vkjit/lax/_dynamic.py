"""Slices whose start is known at run time only."""

from __future__ import annotations

import builtins
import math
from collections.abc import Sequence
from typing import Any, SupportsIndex, final

import numpy as np

from vkjit import dtypes
from vkjit.errors import DTypeError, IndexingError, ShapeError
from vkjit.ir.primitive import Value
from vkjit.lax._pointwise import same_dtype
from vkjit.lax._shape import index_in_dim
from vkjit.numpy._core import (
    ArrayLike,
    Shape,
    axis_of,
    is_sequence,
    lift,
    operand_aval,
    shape_of,
)
from vkjit.numpy._index import wrapped_index
from vkjit.numpy._shape import slice_axis
from vkjit.ops import arithmetic, compare, indexing, logical, movement, structural, write
from vkjit.ops.extrema import clamp as clamp_op
from vkjit.trace import Tracer, aval_of, is_numpy

_MUCH_SMALLER = 4
"""Of larger updates all elements are chosen anew, which joins what is done with them."""


def dynamic_slice(
    operand: ArrayLike,
    start_indices: Sequence[ArrayLike] | ArrayLike,
    slice_sizes: Sequence[int],
    *,
    allow_negative_indices: bool | Sequence[bool] = True,
) -> Value:
    """``slice_sizes`` elements from ``start_indices`` on.

    Args:
        operand: array.
        start_indices: an integer of rank 0 for each axis, or one vector; clamped so that the slice
            lies inside; negative ones count from the end.
        slice_sizes: static sizes.
        allow_negative_indices: whether negative starts count from the end, for all axes or each;
            else they clamp to 0, and one that is known while tracing is refused.

    Raises:
        ShapeError: a size is larger than its axis, or there is not one for each axis.
        IndexingError: a known start is negative and may not be.
    """
    of = operand_aval("dynamic_slice", operand)
    sizes = shape_of("dynamic_slice", slice_sizes)
    starts = _Starts("dynamic_slice", wraps=allow_negative_indices).of(
        start_indices, of.shape, sizes
    )
    out = lift("dynamic_slice", operand)
    for axis, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        if isinstance(start, int):
            out = slice_axis(out, start, start + size, axis)
        else:
            where = structural.add(movement.iota(dtypes.int32, (size,), 0), start)
            out = indexing.gather(out, where, axis)
    return out


def dynamic_update_slice(
    operand: ArrayLike,
    update: ArrayLike,
    start_indices: Sequence[ArrayLike] | ArrayLike,
    *,
    allow_negative_indices: bool | Sequence[bool] = True,
) -> Value:
    """``operand`` with ``update`` from ``start_indices`` on; clamped as in ``dynamic_slice``."""
    x, new = same_dtype("dynamic_update_slice", operand, update)
    shape, sizes = aval_of(x).shape, aval_of(new).shape
    rule = _Starts("dynamic_update_slice", wraps=allow_negative_indices)
    starts = rule.of(start_indices, shape, sizes)
    if 0 in sizes:
        return x
    part = [axis for axis, size in enumerate(sizes) if size != shape[axis]]
    if len(part) == 1 and math.prod(sizes) * _MUCH_SMALLER <= math.prod(shape):
        (axis,) = part
        start = starts[axis]
        line = movement.iota(dtypes.int32, (sizes[axis],), 0)
        at = structural.add(line, np.int32(start) if isinstance(start, int) else start)
        return write.with_rows(x, at, new, axis)
    inside: Value = np.True_
    for axis, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        if size == shape[axis]:
            continue
        line = movement.iota(dtypes.int32, (shape[axis],), 0)
        at = arithmetic.sub(line, np.int32(start) if isinstance(start, int) else start)
        new = indexing.gather(new, at, axis)
        here = logical.and_(compare.ge(at, np.int32(0)), compare.lt(at, np.int32(size)))
        here = structural.broadcast(here, shape, (axis,))
        inside = here if inside is np.True_ else logical.and_(inside, here)
    return new if inside is np.True_ else logical.select(inside, new, x)


@final
class _Starts:
    """How the starts of one call are read; ``wraps``: negative ones count from the end."""

    def __init__(self, name: str, *, wraps: bool | Sequence[bool]) -> None:
        self.name = name
        self.wraps = wraps

    def of(self, given: Sequence[ArrayLike] | ArrayLike, shape: Shape, sizes: Shape) -> list[Any]:
        """A clamped start for each axis: a Python integer where it is known, else an i32 scalar."""
        if not is_sequence(given):
            of = operand_aval(self.name, given).shape
            count = of[0] if of else 0
            given = [index_in_dim(given, i, 0, keepdims=False) for i in range(count)]
        if not len(given) == len(sizes) == len(shape) or any(
            size > n for size, n in zip(sizes, shape, strict=True)
        ):
            raise ShapeError(
                f"{self.name}: {len(given)} starts and sizes {sizes} for shape {shape}; expected "
                "one start and one size for each axis, no size larger than its axis"
            )
        wraps = self.wraps if is_sequence(self.wraps) else [self.wraps] * len(shape)
        rows = zip(given, shape, sizes, wraps, strict=True)
        return [self._clamped(start, n, n - size, wrap=wrap) for start, n, size, wrap in rows]

    def _clamped(self, start: ArrayLike, size: int, last: int, *, wrap: bool) -> Any:
        of = operand_aval(self.name, start)
        if of.shape or not dtypes.is_int(of.dtype):
            raise DTypeError(f"{self.name}: start {of}, expected an integer of rank 0")
        if not isinstance(start, Tracer) and (isinstance(start, int) or is_numpy(start)):
            at = int(start)
            if at < 0 and not wrap:
                raise IndexingError(
                    f"{self.name}: start {at} with allow_negative_indices=False; expected 0 or more"
                )
            return builtins.min(builtins.max(at + size if at < 0 else at, 0), last)
        if last == 0:
            return 0
        where = wrapped_index(start, size if wrap else 0)
        return clamp_op(np.int32(0), where, np.int32(last))


def dynamic_slice_in_dim(
    operand: ArrayLike,
    start_index: ArrayLike,
    slice_size: int,
    axis: SupportsIndex = 0,
    *,
    allow_negative_indices: bool = True,
) -> Value:
    """``dynamic_slice`` along one axis."""
    shape = operand_aval("dynamic_slice_in_dim", operand).shape
    along = axis_of("dynamic_slice_in_dim", axis, len(shape))
    starts = [start_index if i == along else 0 for i in range(len(shape))]
    sizes = [slice_size if i == along else n for i, n in enumerate(shape)]
    return dynamic_slice(operand, starts, sizes, allow_negative_indices=allow_negative_indices)


def dynamic_index_in_dim(
    operand: ArrayLike,
    index: ArrayLike,
    axis: SupportsIndex = 0,
    keepdims: bool = True,  # noqa: FBT001  jax.lax's signature
    *,
    allow_negative_indices: bool = True,
) -> Value:
    """One position of an axis, clamped to it."""
    along = axis_of("dynamic_index_in_dim", axis, operand_aval("lax", operand).ndim)
    options = {"allow_negative_indices": allow_negative_indices}
    out = dynamic_slice_in_dim(operand, index, 1, along, **options)
    return out if keepdims else movement.squeeze(out, (along,))


def dynamic_update_slice_in_dim(
    operand: ArrayLike,
    update: ArrayLike,
    start_index: ArrayLike,
    axis: SupportsIndex,
    *,
    allow_negative_indices: bool = True,
) -> Value:
    """``dynamic_update_slice`` along one axis."""
    rank = operand_aval("dynamic_update_slice_in_dim", operand).ndim
    along = axis_of("dynamic_update_slice_in_dim", axis, rank)
    starts = [start_index if i == along else 0 for i in range(rank)]
    options = {"allow_negative_indices": allow_negative_indices}
    return dynamic_update_slice(operand, update, starts, **options)


def dynamic_update_index_in_dim(
    operand: ArrayLike,
    update: ArrayLike,
    index: ArrayLike,
    axis: SupportsIndex,
    *,
    allow_negative_indices: bool = True,
) -> Value:
    """``operand`` with one position of an axis replaced; ``update`` may lack that axis."""
    of = operand_aval("dynamic_update_index_in_dim", operand)
    along = axis_of("dynamic_update_index_in_dim", axis, of.ndim)
    if operand_aval("update", update).ndim < of.ndim:
        update = movement.expand_dims(lift("update", update), (along,))
    options = {"allow_negative_indices": allow_negative_indices}
    return dynamic_update_slice_in_dim(operand, update, index, along, **options)
