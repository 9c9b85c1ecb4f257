"""Views and placement with explicit axes: reshape, slice, pad, concatenate."""

from __future__ import annotations

import builtins
import itertools
import math
from collections.abc import Sequence
from typing import SupportsIndex

from vkjit.errors import ShapeError
from vkjit.ir.primitive import Value
from vkjit.lax._pointwise import same_dtype
from vkjit.numpy._core import (
    ArrayLike,
    Shape,
    ShapeLike,
    axes_of,
    axis_of,
    index_of,
    lift,
    operand_aval,
    reshaped,
    shape_of,
)
from vkjit.numpy._core import broadcast_shapes as shapes_together
from vkjit.numpy._shape import slice_axis
from vkjit.ops import movement, structural
from vkjit.trace import aval_of


def reshape(operand: ArrayLike, new_sizes: ShapeLike) -> Value:
    """The elements in another shape of the same size."""
    return reshaped(lift("reshape", operand), shape_of("reshape", new_sizes))


def broadcast(operand: ArrayLike, sizes: ShapeLike) -> Value:
    """``operand`` repeated along new leading axes."""
    of, new = operand_aval("broadcast", operand), shape_of("broadcast", sizes)
    axes = tuple(range(len(new), len(new) + of.ndim))
    return structural.broadcast(lift("broadcast", operand), (*new, *of.shape), axes)


def broadcast_in_dim(
    operand: ArrayLike, shape: ShapeLike, broadcast_dimensions: Sequence[int]
) -> Value:
    """``operand`` repeated to ``shape``, its axis ``i`` at ``broadcast_dimensions[i]``."""
    target = shape_of("broadcast_in_dim", shape)
    axes = tuple(index_of("broadcast_in_dim", a) for a in broadcast_dimensions)
    return structural.broadcast(lift("broadcast_in_dim", operand), target, axes)


def broadcast_shapes(*shapes: Sequence[int]) -> Shape:
    """NumPy's broadcast of shapes.

    Raises:
        ShapeError: two sizes differ and neither is 1.
    """
    return shapes_together("broadcast_shapes", *[tuple(shape) for shape in shapes])


def broadcast_to_rank(x: ArrayLike, rank: int) -> Value:
    """``x`` with leading axes of size 1, up to ``rank`` axes; more than it has, or as many."""
    return expand_dims(x, range(rank - operand_aval("broadcast_to_rank", x).ndim))


def collapse(operand: ArrayLike, start_dimension: int, stop_dimension: int | None = None) -> Value:
    """The axes from ``start_dimension`` up to but without ``stop_dimension`` as one.

    Raises:
        ShapeError: there are no axes between them.
    """
    shape = operand_aval("collapse", operand).shape
    start, stop, _ = builtins.slice(start_dimension, stop_dimension).indices(len(shape))
    if stop <= start:
        raise ShapeError(
            f"collapse: axes {start_dimension} to {stop_dimension} of shape {shape}; expected at "
            "least one axis"
        )
    size = math.prod(shape[start:stop])
    return reshape(operand, (*shape[:start], size, *shape[stop:]))


def split(operand: ArrayLike, sizes: Sequence[int], axis: int = 0) -> list[Value]:
    """Parts of ``sizes`` along an axis, which they fill.

    Raises:
        ShapeError: the sizes do not add up to that of the axis.
    """
    shape = operand_aval("split", operand).shape
    along = axis_of("split", axis, len(shape))
    ends = list(itertools.accumulate(shape_of("split", sizes), initial=0))
    if ends[-1] != shape[along]:
        raise ShapeError(
            f"split: sizes {tuple(sizes)} add up to {ends[-1]}, expected {shape[along]}, the size "
            f"of axis {along} of shape {shape}"
        )
    return [slice_in_dim(operand, a, b, axis=along) for a, b in itertools.pairwise(ends)]


def expand_dims(array: ArrayLike, dimensions: Sequence[int]) -> Value:
    """New axes of size 1 at the positions ``dimensions`` of the result."""
    rank = operand_aval("expand_dims", array).ndim + len(dimensions)
    return movement.expand_dims(
        lift("expand_dims", array), axes_of("expand_dims", tuple(dimensions), rank)
    )


def squeeze(array: ArrayLike, dimensions: Sequence[int]) -> Value:
    """Without ``dimensions``, which have size 1."""
    rank = operand_aval("squeeze", array).ndim
    axes = axes_of("squeeze", tuple(dimensions), rank)
    return movement.squeeze(lift("squeeze", array), axes)


def transpose(operand: ArrayLike, permutation: Sequence[int]) -> Value:
    """The axes in the order ``permutation``."""
    rank = operand_aval("transpose", operand).ndim
    axes = axes_of("transpose", tuple(permutation), rank)
    return structural.permute(lift("transpose", operand), axes)


def rev(operand: ArrayLike, dimensions: Sequence[int]) -> Value:
    """The elements in reverse order along ``dimensions``."""
    rank = operand_aval("rev", operand).ndim
    return movement.reverse(lift("rev", operand), axes_of("rev", tuple(dimensions), rank))


def concatenate(operands: Sequence[ArrayLike], dimension: int) -> Value:
    """Operands of one dtype one after another along ``dimension``."""
    values = same_dtype("concatenate", *operands)
    along = axis_of("concatenate", dimension, aval_of(values[0]).ndim)
    return movement.concatenate(values, along)


def pad(
    operand: ArrayLike,
    padding_value: ArrayLike,
    padding_config: Sequence[tuple[int, int, int]],
) -> Value:
    """Elements added (low, high, between) along each axis; negative low and high cut off."""
    x, value = same_dtype("pad", operand, padding_value)
    of = aval_of(x)
    if len(padding_config) != of.ndim:
        raise ShapeError(
            f"pad: {len(padding_config)} entries for operand {of}, expected one (low, high, "
            "interior) for each axis"
        )
    if not of.ndim:
        return x
    low, high, between = zip(*padding_config, strict=True)
    return movement.pad(x, value, low, high, between)


def slice(
    operand: ArrayLike,
    start_indices: Sequence[int],
    limit_indices: Sequence[int],
    strides: Sequence[int] | None = None,
) -> Value:
    """A strided range of each axis."""
    x = lift("slice", operand)
    steps = (1,) * aval_of(x).ndim if strides is None else tuple(strides)
    return movement.slice_(x, tuple(start_indices), tuple(limit_indices), steps)


def slice_in_dim(
    operand: ArrayLike,
    start_index: int | None,
    limit_index: int | None,
    stride: int = 1,
    axis: SupportsIndex = 0,
) -> Value:
    """A range of one axis; negative bounds count from the end, None is an end."""
    of = operand_aval("slice_in_dim", operand)
    along = axis_of("slice_in_dim", axis, of.ndim)
    size = of.shape[along]
    start, stop = (
        default if bound is None else index_of("slice_in_dim", bound)
        for bound, default in ((start_index, 0), (limit_index, size))
    )
    bounds = (start + size if start < 0 else start), (stop + size if stop < 0 else stop)
    return slice_axis(lift("slice_in_dim", operand), *bounds, along, stride)


def index_in_dim(
    operand: ArrayLike,
    index: int,
    axis: SupportsIndex = 0,
    keepdims: bool = True,  # noqa: FBT001  jax.lax's signature
) -> Value:
    """One static position of an axis.

    Raises:
        ShapeError: it is out of range.
    """
    of = operand_aval("index_in_dim", operand)
    along = axis_of("index_in_dim", axis, of.ndim)
    at = index_of("index_in_dim", index)
    size = of.shape[along]
    if not -size <= at < size:
        raise ShapeError(f"index_in_dim: index {at} is out of range for axis {along} of {of}")
    out = slice_axis(lift("index_in_dim", operand), at % size, at % size + 1, along)
    return out if keepdims else movement.squeeze(out, (along,))
