"""Shape: reshape, transpose, join, split, repeat, roll, pad, diagonals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, SupportsIndex

import numpy as np

from vkjit import dtypes
from vkjit.errors import ArgumentError, ShapeError
from vkjit.ir.avals import Aval
from vkjit.ir.primitive import Value
from vkjit.numpy._core import (
    ArrayLike,
    Axis,
    DTypeLike,
    Shape,
    ShapeLike,
    axes_of,
    axis_of,
    broadcast_shapes,
    broadcast_value,
    cast,
    cast_axes,
    index_of,
    lift,
    operand_aval,
    promoted,
    reshaped,
    shape_of,
)
from vkjit.ops import movement, structural
from vkjit.trace import aval_of

__all__ = [
    "array_split",
    "atleast_1d",
    "atleast_2d",
    "atleast_3d",
    "broadcast_arrays",
    "broadcast_to",
    "column_stack",
    "concat",
    "concatenate",
    "dstack",
    "expand_dims",
    "flip",
    "fliplr",
    "flipud",
    "hstack",
    "matrix_transpose",
    "moveaxis",
    "ndim",
    "permute_dims",
    "ravel",
    "repeat",
    "reshape",
    "roll",
    "rot90",
    "shape",
    "size",
    "split",
    "squeeze",
    "stack",
    "swapaxes",
    "tile",
    "transpose",
    "unstack",
    "vstack",
]


def shape(a: ArrayLike) -> Shape:
    """Sizes of the axes."""
    return operand_aval("shape", a).shape


def ndim(a: ArrayLike) -> int:
    """Number of axes."""
    return operand_aval("ndim", a).ndim


def size(a: ArrayLike, axis: SupportsIndex | None = None) -> int:
    """Number of elements, or the size of an axis."""
    of = operand_aval("size", a)
    return of.size if axis is None else of.shape[axis_of("size", axis, of.ndim)]


def reshape(a: ArrayLike, shape: ShapeLike, order: str = "C") -> Value:
    """The elements in another shape, row-major; one size may be -1.

    Raises:
        ShapeError: the sizes do not multiply to the number of elements.
        ArgumentError: another order than "C".
    """
    if order != "C":
        raise ArgumentError(f"reshape: order {order!r}, expected 'C'; transpose first")
    of = operand_aval("reshape", a)
    sizes = tuple([index_of("reshape", s) for s in _sequence(shape)])
    known = math.prod(s for s in sizes if s != -1)
    if sizes.count(-1) == 1 and known and of.size % known == 0:
        sizes = tuple(of.size // known if s == -1 else s for s in sizes)
    if any(s < 0 for s in sizes) or math.prod(sizes) != of.size:
        raise ShapeError(
            f"reshape: operand {of} with {of.size} elements to shape {sizes}; expected sizes "
            "with that product, at most one of them -1"
        )
    return reshaped(lift("reshape", a), sizes)


def _sequence(shape: ShapeLike) -> Sequence[SupportsIndex]:
    return shape if isinstance(shape, Sequence) else tuple(cast_axes(shape))


def ravel(a: ArrayLike) -> Value:
    """One axis, row-major."""
    return reshape(a, (operand_aval("ravel", a).size,))


def transpose(a: ArrayLike, axes: Sequence[SupportsIndex] | None = None) -> Value:
    """The axes in the order ``axes``; None reverses them."""
    rank = operand_aval("transpose", a).ndim
    if axes is None:
        return structural.permute(lift("transpose", a), tuple(reversed(range(rank))))
    return structural.permute(lift("transpose", a), axes_of("transpose", tuple(axes), rank))


permute_dims = transpose


def matrix_transpose(x: ArrayLike, /) -> Value:
    """The last two axes swapped."""
    of = operand_aval("matrix_transpose", x)
    if of.ndim < 2:
        raise ShapeError(f"matrix_transpose: operand {of}, expected at least two axes")
    return swapaxes(x, -1, -2)


def swapaxes(a: ArrayLike, axis1: SupportsIndex, axis2: SupportsIndex) -> Value:
    """Two axes exchanged."""
    rank = operand_aval("swapaxes", a).ndim
    first, second = axis_of("swapaxes", axis1, rank), axis_of("swapaxes", axis2, rank)
    perm = list(range(rank))
    perm[first], perm[second] = second, first
    return structural.permute(lift("swapaxes", a), tuple(perm))


def moveaxis(a: ArrayLike, source: Axis, destination: Axis) -> Value:
    """Axes ``source`` at the positions ``destination``, the others in order."""
    rank = operand_aval("moveaxis", a).ndim
    froms, tos = axes_of("moveaxis", source, rank), axes_of("moveaxis", destination, rank)
    if len(froms) != len(tos):
        raise ShapeError(f"moveaxis: source {froms} and destination {tos} differ in length")
    perm = [i for i in range(rank) if i not in froms]
    for to, source_axis in sorted(zip(tos, froms, strict=True)):
        perm.insert(to, source_axis)
    return structural.permute(lift("moveaxis", a), tuple(perm))


def expand_dims(a: ArrayLike, axis: Axis) -> Value:
    """New axes of size 1 at the positions ``axis`` of the result."""
    of = operand_aval("expand_dims", a)
    if axis is None:
        raise ArgumentError("expand_dims: axis None, expected one position or several")
    new = axes_of("expand_dims", axis, of.ndim + len(cast_axes(axis)))
    old = iter(of.shape)
    sizes = tuple(1 if i in new else next(old) for i in range(of.ndim + len(new)))
    return reshaped(lift("expand_dims", a), sizes)


def squeeze(a: ArrayLike, axis: Axis = None) -> Value:
    """Without the axes of size 1, or without ``axis``, which must have size 1."""
    of = operand_aval("squeeze", a)
    if axis is None:
        return reshaped(lift("squeeze", a), tuple(n for n in of.shape if n != 1))
    gone = axes_of("squeeze", axis, of.ndim)
    if any(of.shape[i] != 1 for i in gone):
        raise ShapeError(f"squeeze: axes {gone} of operand {of}, expected sizes of 1")
    return reshaped(lift("squeeze", a), tuple(n for i, n in enumerate(of.shape) if i not in gone))


def broadcast_to(array: ArrayLike, shape: ShapeLike) -> Value:
    """``array`` repeated to ``shape``, aligned at the last axis."""
    of, target = operand_aval("broadcast_to", array), shape_of("broadcast_to", shape)
    aligned = target[len(target) - of.ndim :] if len(target) >= of.ndim else ()
    if len(aligned) != of.ndim or any(
        size not in (1, wanted) for size, wanted in zip(of.shape, aligned, strict=True)
    ):
        raise ShapeError(
            f"broadcast_to: operand {of} to shape {target}; expected sizes of 1 or equal sizes"
        )
    return broadcast_value(lift("broadcast_to", array), target)


def broadcast_arrays(*args: ArrayLike) -> list[Value]:
    """The operands repeated to their common shape."""
    target = broadcast_shapes("broadcast_arrays", *[shape(a) for a in args])
    return [broadcast_value(lift("broadcast_arrays", a), target) for a in args]


def concatenate(
    arrays: Sequence[ArrayLike], axis: SupportsIndex | None = 0, dtype: DTypeLike = None
) -> Value:
    """Arrays joined along an axis; None joins them flattened.

    Raises:
        ShapeError: no arrays, different ranks, or sizes that differ elsewhere.
    """
    if not isinstance(arrays, (list, tuple)):
        arrays = list(arrays)
    if not arrays:
        raise ShapeError("concatenate: no arrays, expected at least one")
    if axis is None:
        arrays, axis = [ravel(a) for a in arrays], 0
    values = promoted("concatenate", *arrays)
    if dtype is not None:
        values = [cast(v, dtypes.canonical(dtype)) for v in values]
    avals = [aval_of(v) for v in values]
    along = axis_of("concatenate", axis, avals[0].ndim)
    if any(_rest(a, along) != _rest(avals[0], along) for a in avals):
        raise ShapeError(
            f"concatenate: operands {', '.join(map(str, avals))} along axis {along}; expected one "
            "rank and equal sizes of the other axes"
        )
    return values[0] if len(values) == 1 else movement.concatenate(values, along)


concat = concatenate


def _rest(of: Aval, axis: int) -> Shape:
    return (of.ndim, *of.shape[:axis], *of.shape[axis + 1 :])


def stack(arrays: Sequence[ArrayLike], axis: SupportsIndex = 0, dtype: DTypeLike = None) -> Value:
    """Arrays of one shape joined along a new axis.

    Raises:
        ShapeError: no arrays, or different shapes.
    """
    values = list(arrays)
    shapes = {shape(a) for a in values}
    if len(shapes) != 1:
        raise ShapeError(f"stack: arrays of shapes {sorted(shapes)}, expected one shape")
    return concatenate([expand_dims(a, axis) for a in values], axis, dtype)


def atleast_1d(*arys: ArrayLike) -> Any:
    """Each operand with at least one axis; a list for several operands."""
    return _at_least(1, arys)


def atleast_2d(*arys: ArrayLike) -> Any:
    """Each operand with at least two axes, new ones in front."""
    return _at_least(2, arys)


def atleast_3d(*arys: ArrayLike) -> Any:
    """Each operand with at least three axes: (n,) becomes (1, n, 1), (m, n) becomes (m, n, 1)."""
    return _at_least(3, arys)


def _at_least(rank: int, operands: Sequence[ArrayLike]) -> Any:
    out = [_raised(rank, lift("atleast_nd", a)) for a in operands]
    return out[0] if len(out) == 1 else out


def _raised(rank: int, a: Value) -> Value:
    old = aval_of(a).shape
    if len(old) >= rank:
        return a
    new = (1,) * (rank - len(old)) + old
    if rank == 3:
        new = {0: (1, 1, 1), 1: (1, *old, 1), 2: (*old, 1)}[len(old)]
    return reshaped(a, new)


def vstack(tup: Sequence[ArrayLike], dtype: DTypeLike = None) -> Value:
    """Arrays with at least two axes joined along the first."""
    return concatenate([atleast_2d(a) for a in tup], 0, dtype)


def hstack(tup: Sequence[ArrayLike], dtype: DTypeLike = None) -> Value:
    """Arrays joined along the second axis, vectors along the first."""
    parts = [atleast_1d(a) for a in tup]
    return concatenate(parts, 0 if parts and ndim(parts[0]) == 1 else 1, dtype)


def dstack(tup: Sequence[ArrayLike], dtype: DTypeLike = None) -> Value:
    """Arrays with at least three axes joined along the third."""
    return concatenate([atleast_3d(a) for a in tup], 2, dtype)


def column_stack(tup: Sequence[ArrayLike]) -> Value:
    """Vectors as columns beside matrices."""
    parts = [atleast_1d(a) for a in tup]
    return concatenate([expand_dims(a, 1) if ndim(a) == 1 else a for a in parts], 1)


def split(
    ary: ArrayLike, indices_or_sections: int | Sequence[int], axis: SupportsIndex = 0
) -> list[Value]:
    """Equal parts along an axis, or parts that end at the given positions.

    Raises:
        ShapeError: the axis does not divide into as many equal parts.
    """
    of = operand_aval("split", ary)
    along = axis_of("split", axis, of.ndim)
    length = of.shape[along]
    if isinstance(indices_or_sections, Sequence) or np.ndim(indices_or_sections) == 1:
        cuts = [_clamped(int(i), length) for i in indices_or_sections]  # type: ignore[union-attr]
    else:
        parts = index_of("split", indices_or_sections)
        if parts <= 0 or length % parts:
            raise ShapeError(
                f"split: axis {along} of operand {of} into {parts} equal parts; expected a "
                "divisor of its size; use array_split for unequal parts"
            )
        cuts = [length // parts * i for i in range(1, parts)]
    return _cut(ary, cuts, along)


def array_split(
    ary: ArrayLike, indices_or_sections: int | Sequence[int], axis: SupportsIndex = 0
) -> list[Value]:
    """As ``split``; the first parts are one longer where the size does not divide."""
    if isinstance(indices_or_sections, Sequence):
        return split(ary, indices_or_sections, axis)
    of = operand_aval("array_split", ary)
    along = axis_of("array_split", axis, of.ndim)
    small, extra = divmod(of.shape[along], index_of("array_split", indices_or_sections))
    cuts = [i * small + min(i, extra) for i in range(1, indices_or_sections)]
    return _cut(ary, cuts, along)


def _clamped(position: int, length: int) -> int:
    return min(max(position + length if position < 0 else position, 0), length)


def _cut(ary: ArrayLike, cuts: Sequence[int], axis: int) -> list[Value]:
    ary = lift("split", ary)
    edges = [0, *cuts, aval_of(ary).shape[axis]]
    return [slice_axis(ary, start, max(start, stop), axis) for start, stop in pairwise(edges)]


def slice_axis(x: Value, start: int, stop: int, axis: int, step: int = 1) -> Value:
    """Positions ``start`` to ``stop`` of one axis; bounds are within it."""
    old = aval_of(x).shape
    if (start, stop, step) == (0, old[axis], 1):
        return x
    starts = tuple(start if i == axis else 0 for i in range(len(old)))
    stops = tuple(stop if i == axis else n for i, n in enumerate(old))
    steps = tuple(step if i == axis else 1 for i in range(len(old)))
    return movement.slice_(x, starts, stops, steps)


def unstack(x: ArrayLike, /, *, axis: SupportsIndex = 0) -> tuple[Value, ...]:
    """The slices along an axis, without that axis."""
    of = operand_aval("unstack", x)
    along = axis_of("unstack", axis, of.ndim)
    return tuple(squeeze(part, along) for part in _cut(x, range(1, of.shape[along]), along))


def tile(A: ArrayLike, reps: ShapeLike) -> Value:
    """``A`` repeated ``reps`` times along each axis."""
    old = shape(A)
    counts = shape_of("tile", reps)
    rank = max(len(old), len(counts))
    old, counts = (1,) * (rank - len(old)) + old, (1,) * (rank - len(counts)) + counts
    spread = tuple(n for pair in zip(counts, old, strict=True) for n in pair)
    lifted = reshape(A, tuple(n for size in old for n in (1, size)))
    return reshape(
        broadcast_value(lifted, spread), tuple(c * n for c, n in zip(counts, old, strict=True))
    )


def repeat(
    a: ArrayLike,
    repeats: int | Sequence[int],
    axis: SupportsIndex | None = None,
    *,
    total_repeat_length: int | None = None,
) -> Value:
    """Each slice along ``axis`` repeated; None flattens first.

    Args:
        a: array.
        repeats: a static count for all, or one for each position.
        axis: along which.
        total_repeat_length: checked against the sum of ``repeats``.

    Raises:
        ShapeError: the number of counts is not the size of the axis.
    """
    if axis is None:
        a, axis = ravel(a), 0
    of = operand_aval("repeat", a)
    along = axis_of("repeat", axis, of.ndim)
    if np.ndim(repeats) == 0:
        count = index_of("repeat", repeats)
        wide = expand_dims(a, along + 1)
        spread = broadcast_value(wide, (*of.shape[: along + 1], count, *of.shape[along + 1 :]))
        return reshape(spread, (*of.shape[:along], of.shape[along] * count, *of.shape[along + 1 :]))
    counts = [index_of("repeat", n) for n in repeats]  # type: ignore[union-attr]
    counts = counts * of.shape[along] if len(counts) == 1 else counts
    if len(counts) != of.shape[along] or total_repeat_length not in (None, sum(counts)):
        raise ShapeError(
            f"repeat: {len(counts)} counts with sum {sum(counts)} along axis {along} of {of}; "
            f"expected {of.shape[along]} counts with sum {total_repeat_length or 'free'}"
        )
    parts = [
        broadcast_to(
            slice_axis(lift("repeat", a), i, i + 1, along),
            (*of.shape[:along], n, *of.shape[along + 1 :]),
        )
        for i, n in enumerate(counts)
    ]
    return concatenate(parts, along) if parts else lift("repeat", a)


def roll(a: ArrayLike, shift: int | Sequence[int], axis: Axis = None) -> Value:
    """Elements moved up by a static ``shift`` along ``axis``, those past the end to the front."""
    of = operand_aval("roll", a)
    if axis is None:
        return reshape(roll(ravel(a), shift, 0), of.shape)
    axes = axes_of("roll", axis, of.ndim)
    shifts = [index_of("roll", s) for s in cast_axes(shift)]
    shifts = shifts * len(axes) if len(shifts) == 1 else shifts
    if len(shifts) != len(axes):
        raise ShapeError(f"roll: shifts {shifts} for axes {axes}; expected one or as many")
    out = lift("roll", a)
    for along, amount in zip(axes, shifts, strict=True):
        length = of.shape[along]
        cut = -amount % length if length else 0
        if cut:
            halves = slice_axis(out, cut, length, along), slice_axis(out, 0, cut, along)
            out = movement.concatenate(halves, along)
    return out


def flip(m: ArrayLike, axis: Axis = None) -> Value:
    """The elements in reverse order along ``axis``; None: along every axis."""
    of = operand_aval("flip", m)
    return movement.reverse(lift("flip", m), axes_of("flip", axis, of.ndim))


def flipud(m: ArrayLike) -> Value:
    """Reversed along the first axis."""
    return flip(m, 0)


def fliplr(m: ArrayLike) -> Value:
    """Reversed along the second axis."""
    return flip(m, 1)


def rot90(m: ArrayLike, k: int = 1, axes: tuple[int, int] = (0, 1)) -> Value:
    """Turned ``k`` times by 90 degrees from the first axis towards the second."""
    first, second = axes_of("rot90", axes, ndim(m))
    turns = k % 4
    if turns == 0:
        return lift("rot90", m)
    if turns == 2:
        return flip(m, (first, second))
    if turns == 1:
        return swapaxes(flip(m, second), first, second)
    return flip(swapaxes(m, first, second), second)
