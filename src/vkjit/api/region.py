"""Where an index points in memory: a region known while tracing, or rows at computed positions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from vkjit import dtypes
from vkjit.errors import IndexingError, ShapeError
from vkjit.ir.avals import Aval
from vkjit.ir.primitive import Value
from vkjit.numpy import add, arange, asarray, broadcast_to
from vkjit.numpy._core import axis_of, broadcast_shapes
from vkjit.numpy._index import Pick, Point, Run, Step, parse, wrapped_index
from vkjit.numpy._scatter import last_only
from vkjit.ops import compare, indexing, logical
from vkjit.ops.arithmetic import mul
from vkjit.ops.movement import slice_
from vkjit.ops.reshaping import reshape
from vkjit.ops.structural import add as plus
from vkjit.ops.structural import broadcast
from vkjit.ops.write import copy_into, set_rows
from vkjit.trace import aval_of

Shape = tuple[int, ...]


def placed(dest: Value, index: Any, value: Value) -> Value:
    """``dest`` with ``value`` broadcast over ``index``, written in place.

    Raises:
        IndexingError: a write cannot go there.
        ShapeError: the value does not fit.
    """
    of = aval_of(dest)
    steps = _steps(of, index)
    if any(isinstance(step, Pick) for step in steps):
        rows = _Rows.of(of, index, steps)
        where = rows.where if rows.unique else last_only(rows.where, rows.size)
        return rows.back(set_rows(rows.lines(dest), where, rows.values(value, of), 1), of)
    return _Region.of(steps).write(dest, value)


def added(dest: Value, index: Any, value: Value) -> Value:
    """``dest`` with ``value`` broadcast over ``index`` and added, written in place."""
    of = aval_of(dest)
    steps = _steps(of, index)
    if any(isinstance(step, Pick) for step in steps):
        rows = _Rows.of(of, index, steps)
        values = rows.values(value, of)
        if not rows.unique:
            return rows.back(indexing.scatter_add(rows.lines(dest), rows.where, values, 1), of)
        before = indexing.gather(rows.lines(dest), rows.where, 1)
        return rows.back(set_rows(rows.lines(dest), rows.where, add(before, values), 1), of)
    region = _Region.of(steps)
    return region.write(dest, add(region.read(dest), value))


def set_rows_at(
    dest: Value,
    indices: Any,
    rows: Value,
    axis: int,
    *,
    unique: bool,
) -> Value:
    """``dest`` with ``rows`` at ``indices`` along ``axis``, written in place."""
    of = aval_of(dest)
    along = axis_of("set_rows", axis, of.ndim)
    where = asarray(indices)
    if not dtypes.is_int(aval_of(where).dtype):
        raise IndexingError(f"set_rows: indices {aval_of(where)}, expected integers")
    where = wrapped_index(where, of.shape[along])
    shape = indexing.joined(of.shape, aval_of(where).shape, along)
    values = _spread(rows, shape, of)
    if not unique and aval_of(where).size > 1:
        where = last_only(where, of.shape[along])
    return set_rows(dest, where, values, along)


def _steps(of: Aval, index: Any) -> list[Step]:
    steps = parse(of, index)
    if not all(isinstance(s, (Point, Pick)) or (isinstance(s, Run) and s.step > 0) for s in steps):
        raise IndexingError(
            f"ref: {index!r} cannot say where to write in {of}; expected integers, slices with "
            "positive steps and integer arrays"
        )
    return steps


def _spread(value: Value, shape: Shape, of: Aval) -> Value:
    try:
        return broadcast_to(value, shape)
    except ShapeError as error:
        raise ShapeError(
            f"ref: value {aval_of(value)} does not fit the region {shape} of {of}"
        ) from error


@final
@dataclass(frozen=True)
class _Region:
    """A strided region; ``visible`` is its shape without the axes that integers take away."""

    starts: Shape
    strides: Shape
    counts: Shape
    visible: Shape

    @staticmethod
    def of(steps: Sequence[Step]) -> _Region:
        """The region of integers and slices."""
        runs = [Run(s.at, 1, 1) if isinstance(s, Point) else s for s in steps]
        runs = [run for run in runs if isinstance(run, Run)]
        return _Region(
            tuple(run.start for run in runs),
            tuple(run.step for run in runs),
            tuple(run.count for run in runs),
            tuple(s.count for s in steps if isinstance(s, Run)),
        )

    def write(self, dest: Value, value: Value) -> Value:
        """``dest`` with ``value`` there."""
        spread = _spread(value, self.visible, aval_of(dest))
        return copy_into(dest, reshape(spread, self.counts), self.starts, self.strides)

    def read(self, dest: Value) -> Value:
        """What is there."""
        bounds = zip(self.starts, self.counts, self.strides, strict=True)
        limits = tuple(start + (n - 1) * step + 1 if n else start for start, n, step in bounds)
        return reshape(slice_(dest, self.starts, limits, self.strides), self.visible)


@final
@dataclass(frozen=True)
class _Rows:
    """Rows of an array seen as [outer, size, inner]: axes that slices take whole lie outside.

    ``where`` are positions along ``size``, -1 where an index is out of range; ``visible`` is the
    shape of the values.
    """

    outer: int
    size: int
    inner: int
    where: Value
    visible: Shape
    unique: bool

    @staticmethod
    def of(of: Aval, index: Any, steps: Sequence[Step]) -> _Rows:
        """The rows of an index with integer arrays."""
        whole = [isinstance(s, Run) and s.count == n for s, n in zip(steps, of.shape, strict=True)]
        lead = whole.index(False)
        last = len(whole) - whole[::-1].index(False)
        middle = steps[lead:last]
        picks = [s.indices for s in middle if isinstance(s, Pick)]
        block = broadcast_shapes("ref", *[aval_of(p).shape for p in picks])
        arrays = [i for i, s in enumerate(middle) if not isinstance(s, Run)]
        if block and arrays != list(range(arrays[0], arrays[-1] + 1)):
            raise IndexingError(
                f"ref: {index!r} has arrays on both sides of a slice; expected index arrays and "
                "integers next to each other in a write"
            )
        sizes = of.shape[lead:last]
        where, shape = _positions(middle, sizes, block)
        outer, inner = of.shape[:lead], of.shape[last:]
        return _Rows(
            math.prod(outer),
            math.prod(sizes),
            math.prod(inner),
            where,
            (*outer, *shape, *inner),
            math.prod(block) <= 1,
        )

    def lines(self, dest: Value) -> Value:
        """``dest`` as [outer, size, inner]."""
        return reshape(dest, (self.outer, self.size, self.inner))

    def back(self, lines: Value, of: Aval) -> Value:
        """The inverse of ``lines``."""
        return reshape(lines, of.shape)

    def values(self, value: Value, of: Aval) -> Value:
        """``value`` as [outer, positions, inner]."""
        count = aval_of(self.where).size
        return reshape(_spread(value, self.visible, of), (self.outer, count, self.inner))


def _positions(steps: Sequence[Step], sizes: Shape, block: Shape) -> tuple[Value, Shape]:
    """Flat positions in the axes of ``steps``, as one axis, and the axes that they stand for."""
    shape: list[int] = []
    at: list[int] = []
    first = next(i for i, s in enumerate(steps) if isinstance(s, Pick))
    for i, step in enumerate(steps):
        at.append(len(shape))
        if isinstance(step, Run):
            shape.append(step.count)
        elif i == first:
            shape.extend(block)
    if len(steps) == 1 and isinstance(steps[0], Pick):  # the write itself drops what is outside
        return reshape(wrapped_index(steps[0].indices, sizes[0]), (math.prod(shape),)), tuple(shape)
    start = at[first]
    total: Value = np.int32(0)
    inside: Value = np.True_
    for step, size, axis in zip(steps, sizes, at, strict=True):
        if isinstance(step, Pick):
            picked = wrapped_index(step.indices, size)
            lined = range(start + len(block) - aval_of(picked).ndim, start + len(block))
            part = _over(picked, shape, tuple(lined))
            fits = logical.and_(compare.ge(part, np.int32(0)), compare.lt(part, np.int32(size)))
            inside = logical.and_(inside, fits)
        elif isinstance(step, Run):
            stop = step.start + step.count * step.step
            line = asarray(arange(step.start, stop, step.step), dtypes.int32)
            part = _over(line, shape, (axis,))
        else:
            part = np.int32(step.at) if isinstance(step, Point) else np.int32(0)
        total = plus(mul(total, np.int32(size)), part)
    where = logical.select(inside, total, np.int32(-1))
    return reshape(where, (math.prod(shape),)), tuple(shape)


def _over(value: Value, shape: Sequence[int], axes: Shape) -> Value:
    """``value`` with its axes at ``axes``, repeated over the others; sizes of 1 repeat, too."""
    given = aval_of(value).shape
    kept = [i for i, (n, a) in enumerate(zip(given, axes, strict=True)) if n == shape[a]]
    squeezed = reshape(value, tuple(given[i] for i in kept))
    return broadcast(squeezed, tuple(shape), tuple(axes[i] for i in kept))
