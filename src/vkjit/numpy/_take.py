"""Elements chosen by index arrays, diagonals, and padding by rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, SupportsIndex

import numpy as np

from vkjit import dtypes
from vkjit.errors import ArgumentError, DTypeError, ShapeError
from vkjit.ir.primitive import Value
from vkjit.numpy._core import (
    ArrayLike,
    axes_of,
    axis_of,
    broadcast_shapes,
    broadcast_value,
    cast,
    constant,
    index_of,
    lift,
    operand_aval,
    reshaped,
)
from vkjit.numpy._elementwise import remainder
from vkjit.numpy._index import positions
from vkjit.numpy._reduce import sum as sum_
from vkjit.numpy._scatter import fill_of, refuse_mode
from vkjit.numpy._shape import moveaxis, ravel, slice_axis
from vkjit.ops import arithmetic, compare, indexing, logical, movement, structural
from vkjit.trace import aval_of, is_numpy

__all__ = [
    "diag",
    "diagflat",
    "diagonal",
    "pad",
    "take",
    "take_along_axis",
    "trace",
]


def _indices(name: str, indices: ArrayLike) -> Value:
    of = operand_aval(name, indices)
    if not dtypes.is_int(of.dtype):
        raise DTypeError(f"{name}: indices {of}, expected integers; cast with .astype(...)")
    return np.asarray(indices) if isinstance(indices, int) else lift(name, indices)


def take(
    a: ArrayLike,
    indices: ArrayLike,
    axis: SupportsIndex | None = None,
    *,
    mode: str | None = None,
    fill_value: Any = None,
) -> Value:
    """Slices of ``a`` at ``indices`` along ``axis`` (None: of the flattened array).

    Args:
        a: array.
        indices: integers of any shape; negative ones count from the end.
        axis: along which; the axes of the indices take its place.
        mode: out of range: "fill" (default) reads ``fill_value``, "clip" the nearest end, "wrap"
            around.
        fill_value: None: NaN, or the lowest integer (highest unsigned, True).
    """
    refuse_mode("take", mode, ("fill", "clip", "wrap"))
    if axis is None:
        a, axis = ravel(a), 0
    x, of = lift("take", a), operand_aval("take", a)
    along = axis_of("take", axis, of.ndim)
    picks, size = _indices("take", indices), of.shape[along]
    if mode == "wrap":
        picks = remainder(picks, max(size, 1))
    where = positions([picks], (size,), aval_of(picks).shape, drop=True)
    out = indexing.gather(x, where, along)
    if mode in ("clip", "wrap") or _within(picks, size):
        return out
    return _filled(out, _inside(where, size), along, fill_value)


def _within(picks: Value, size: int) -> bool:
    """Whether static indices are all in range."""
    return is_numpy(picks) and bool(np.all((picks >= -size) & (picks < size)))


def _inside(where: Value, size: int) -> Value:
    return logical.and_(compare.ge(where, np.int32(0)), compare.lt(where, np.int32(size)))


def _filled(out: Value, inside: Value, axis: int, fill_value: Any) -> Value:
    of = aval_of(out)
    fill = fill_of(of.dtype) if fill_value is None else cast(fill_value, of.dtype)
    axes = tuple(range(axis, axis + aval_of(inside).ndim))
    return logical.select(structural.broadcast(inside, of.shape, axes), out, fill)


def take_along_axis(
    arr: ArrayLike,
    indices: ArrayLike,
    axis: SupportsIndex | None = -1,
    mode: str | None = None,
    fill_value: Any = None,
) -> Value:
    """One element of each line of ``arr`` along ``axis`` for each index.

    Args:
        arr: array.
        indices: integers of the same rank; other axes broadcast.
        axis: of the lines; None: of both flattened.
        mode: as in ``take``.
        fill_value: as in ``take``.

    Raises:
        ShapeError: ranks differ.
    """
    refuse_mode("take_along_axis", mode, ("fill", "clip", "wrap"))
    if axis is None:
        arr, indices, axis = ravel(arr), ravel(indices), 0
    x, of = lift("take_along_axis", arr), operand_aval("take_along_axis", arr)
    picks = _indices("take_along_axis", indices)
    if aval_of(picks).ndim != of.ndim:
        raise ShapeError(
            f"take_along_axis: operand {of} and indices {aval_of(picks)}, expected one rank; "
            "use expand_dims on the indices"
        )
    along = axis_of("take_along_axis", axis, of.ndim)
    size = of.shape[along]
    if mode == "wrap":
        picks = remainder(picks, max(size, 1))
    x, picks = _matched(x, picks, along)
    where = positions([picks], (size,), aval_of(picks).shape, drop=True)
    inside = _inside(where, size)
    last = np.int32(max(size - 1, 0))
    clipped = logical.select(inside, where, _clip(where, last))
    out = reshaped(_lines(x, clipped, along), aval_of(picks).shape)
    if mode in ("clip", "wrap") or _within(picks, size):
        return out
    return _filled(out, inside, 0, fill_value)


def _clip(where: Value, last: np.int32) -> Value:
    return logical.select(compare.lt(where, np.int32(0)), np.int32(0), last)


def _matched(x: Value, picks: Value, axis: int) -> tuple[Value, Value]:
    """Both broadcast to one shape except along ``axis``."""
    mine, theirs = list(aval_of(x).shape), list(aval_of(picks).shape)
    mine[axis] = theirs[axis] = 1
    shape = list(broadcast_shapes("take_along_axis", tuple(mine), tuple(theirs)))
    full, wide = shape.copy(), shape.copy()
    full[axis], wide[axis] = aval_of(x).shape[axis], aval_of(picks).shape[axis]
    return broadcast_value(x, tuple(full)), broadcast_value(picks, tuple(wide))


def _lines(x: Value, where: Value, axis: int) -> Value:
    """Gather from the flattened array at the flat position of each element."""
    shape, wide = aval_of(x).shape, aval_of(where).shape
    flat, stride = where, 1
    strides = [0] * len(shape)
    for i in reversed(range(len(shape))):
        strides[i] = stride
        stride *= shape[i]
    flat = arithmetic.mul(flat, np.int32(strides[axis]))
    for i, step in enumerate(strides):
        if i != axis and wide[i] > 1:
            offset = arithmetic.mul(movement.iota(dtypes.int32, wide, i), np.int32(step))
            flat = structural.add(flat, offset)
    one_of_each = axis == len(shape) - 1 and wide[axis] == 1 and shape[axis] > 0
    line = shape[axis] if one_of_each else 0
    return indexing.gather(reshaped(x, (int(np.prod(shape, dtype=np.int64)),)), flat, 0, line)


def diagonal(
    a: ArrayLike, offset: int = 0, axis1: SupportsIndex = 0, axis2: SupportsIndex = 1
) -> Value:
    """The diagonal of two axes as last axis; ``offset`` above the main one.

    Raises:
        ShapeError: fewer than two axes.
    """
    of = operand_aval("diagonal", a)
    if of.ndim < 2:
        raise ShapeError(f"diagonal: operand {of}, expected at least two axes")
    first, second = axes_of("diagonal", (axis1, axis2), of.ndim)
    shift = index_of("diagonal", offset)
    x = moveaxis(lift("diagonal", a), (first, second), (-2, -1))
    rows, columns = aval_of(x).shape[-2:]
    start = -shift * columns if shift < 0 else shift
    count = max(0, min(rows + min(shift, 0), columns - max(shift, 0)))
    lead = aval_of(x).shape[:-2]
    flat = reshaped(x, (*lead, rows * columns))
    if not count:
        return slice_axis(flat, 0, 0, len(lead))
    stop = start + (count - 1) * (columns + 1) + 1
    return slice_axis(flat, start, stop, len(lead), columns + 1)


def trace(
    a: ArrayLike, offset: int = 0, axis1: SupportsIndex = 0, axis2: SupportsIndex = 1
) -> Value:
    """Sum of a diagonal."""
    return sum_(diagonal(a, offset, axis1, axis2), axis=-1)


def diag(v: ArrayLike, k: int = 0) -> Value:
    """The ``k``-th diagonal of a matrix, or a matrix with a vector on it."""
    of = operand_aval("diag", v)
    if of.ndim == 2:
        return diagonal(v, k)
    if of.ndim != 1:
        raise ShapeError(f"diag: operand {of}, expected one or two axes")
    shift = index_of("diag", k)
    size = of.shape[0] + abs(shift)
    # A row of size + 1 elements per entry, the entry first, is the diagonal read row by row.
    column = reshaped(lift("diag", v), (of.shape[0], 1))
    flat = reshaped(_padded(column, [(0, 0), (0, size)]), (of.shape[0] * (size + 1),))
    start = -shift * size if shift < 0 else shift
    return reshaped(
        _padded(flat, [(start, size * size - start - of.shape[0] * (size + 1))]), (size, size)
    )


def diagflat(v: ArrayLike, k: int = 0) -> Value:
    """A matrix with the flattened operand on its ``k``-th diagonal."""
    return diag(ravel(v), k)


def _padded(x: Value, widths: Sequence[tuple[int, int]], value: Any = 0) -> Value:
    low, high = zip(*widths, strict=True)
    fill = cast(value, aval_of(x).dtype)
    return movement.pad(x, fill, low, high, (0,) * len(widths))


_RULES = ("edge", "reflect", "symmetric", "wrap", "empty")


def pad(
    array: ArrayLike, pad_width: Any, mode: str = "constant", constant_values: Any = 0
) -> Value:
    """``array`` with elements before and after it along each axis.

    Args:
        array: array.
        pad_width: (before, after) for each axis, one pair for all, or one number.
        mode: "constant", "edge", "reflect", "symmetric", "wrap" or "empty" (zeros).
        constant_values: what "constant" adds; one value, or pairs like ``pad_width``.

    Raises:
        ArgumentError: another mode or a negative width.
    """
    of = operand_aval("pad", array)
    widths = _pairs("pad", pad_width, of.ndim)
    if any(index_of("pad", n) < 0 for pair in widths for n in pair):
        raise ArgumentError(f"pad: widths {widths}, expected at least 0; slice to remove elements")
    x = lift("pad", array)
    if mode in ("constant", "empty"):
        return _constant_pad(x, widths, 0 if mode == "empty" else constant_values)
    if mode not in _RULES:
        raise ArgumentError(f"pad: mode {mode!r}, expected constant or {', '.join(_RULES)}")
    for axis, (before, after) in enumerate(widths):
        if before or after:
            picked = np.pad(np.arange(of.shape[axis]), (before, after), mode=mode)  # type: ignore[call-overload]
            x = indexing.gather(x, constant(picked.astype(np.int32)), axis)
    return x


def _constant_pad(x: Value, widths: Sequence[tuple[int, int]], values: Any) -> Value:
    if np.ndim(values) == 0:
        return _padded(x, widths, values)
    pairs = _pairs("pad", values, len(widths))
    none = (0, 0)
    for axis, (width, value) in enumerate(zip(widths, pairs, strict=True)):
        for side in (0, 1):
            one = (width[0], 0) if side == 0 else (0, width[1])
            x = _padded(x, [one if i == axis else none for i in range(len(widths))], value[side])
    return x


def _pairs(name: str, given: Any, rank: int) -> list[tuple[Any, Any]]:
    """One pair for each axis, by NumPy's broadcasting of a number, a pair or pairs."""
    if isinstance(given, dict):
        return [tuple(given.get(i, given.get(i - rank, (0, 0)))) for i in range(rank)]  # type: ignore[misc]
    try:
        table = np.broadcast_to(np.asarray(given), (rank, 2))
    except ValueError:
        raise ArgumentError(
            f"{name}: {given} for {rank} axes; expected a number, a pair, or a pair for each axis"
        ) from None
    return [(row[0].item(), row[1].item()) for row in table]
