"""What an index expression means: NumPy's basic and advanced indexing in a plain form.

An index is split into *axes* steps (integers and slices, known at trace time) and *arrays* of
integers. Basic indexing becomes slices, reversals and reshapes; arrays become one gather over the
axes they name, moved to the front.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import numpy as np

from vkjit import dtypes
from vkjit.errors import ArgumentError, IndexingError
from vkjit.ir.avals import Aval
from vkjit.ir.primitive import Value
from vkjit.numpy._core import (
    Shape,
    broadcast_shapes,
    broadcast_value,
    cast,
    constant,
    is_sequence,
)
from vkjit.ops import arithmetic, compare, logical, structural
from vkjit.ops.extrema import clamp
from vkjit.trace import Tracer, aval_of, is_numpy


@final
@dataclass(frozen=True, slots=True)
class Run:
    """``count`` positions of an axis from ``start``, ``step`` apart (may be negative)."""

    start: int
    step: int
    count: int


@final
@dataclass(frozen=True, slots=True)
class Point:
    """One static position of an axis, which disappears."""

    at: int


@final
@dataclass(frozen=True, slots=True)
class Pick:
    """Positions given by an integer array."""

    indices: Value


@final
@dataclass(frozen=True, slots=True)
class New:
    """A new axis of size 1."""


Step: TypeAlias = Run | Point | Pick | New

_FAR = 2**30
"""Beyond every axis, and so that sizes can be added to it in 32 bits."""


def parse(of: Aval, index: Any, *, strict: bool = True, wrap: bool = True) -> list[Step]:
    """One step for each axis of an array of aval ``of``, and for each new axis.

    Args:
        of: aval of the array.
        index: NumPy's basic or advanced index.
        strict: refuse static integers out of range; else they count as index arrays.
        wrap: static integers below zero count from the end; else they are out of range.

    Raises:
        IndexingError: too many indices, a static one out of range, or a kind that cannot index.
        ArgumentError: a boolean mask that is traced.
    """
    parts = [step for part in _parts(index) for step in _expanded(of, part)]
    used = sum(1 for p in parts if p is not None and p is not Ellipsis)
    if used > of.ndim:
        raise IndexingError(f"index: {used} indices for an array {of} with {of.ndim} axes")
    if sum(p is Ellipsis for p in parts) > 1:
        raise IndexingError("index: more than one '...'; expected at most one")
    where = next((i for i, p in enumerate(parts) if p is Ellipsis), len(parts))
    parts[where : where + 1] = [slice(None)] * (of.ndim - used)
    steps: list[Step] = []
    axis = 0
    for part in parts:
        if part is None:
            steps.append(New())
            continue
        steps.append(_step(of, axis, part, _Static(strict, wrap)))
        axis += 1
    return steps


def _parts(index: Any) -> Sequence[Any]:
    return index if isinstance(index, tuple) else (index,)  # pyright: ignore[reportUnknownVariableType]


def _expanded(of: Aval, part: Any) -> list[Any]:
    """A boolean mask as the integer arrays of its true positions; anything else as it is."""
    if is_sequence(part):
        raise IndexingError(
            f"index: {_kind(part)}; a sequence cannot index; make an "
            "array of it with vkjit.numpy.asarray(...)"
        )
    if isinstance(part, (bool, np.bool_)):
        raise IndexingError("index: a boolean scalar; expected integers, slices or arrays")
    if part is None or part is Ellipsis or isinstance(part, (int, slice)):
        return [part]
    if not _is_array(part) or aval_of(part).dtype != dtypes.bool_:
        return [part]
    if isinstance(part, Tracer):
        raise ArgumentError(
            f"index: a traced mask {aval_of(part)} selects a number of elements that depends on "
            "values; use vkjit.numpy.where(mask, x, y)"
        )
    mask = np.asarray(part)
    return [positions.astype(np.int32) for positions in np.nonzero(mask)]


def _kind(part: object) -> str:
    return type(part).__name__


def _is_array(part: Any) -> bool:
    return is_numpy(part) or hasattr(part, "aval")


@final
@dataclass(frozen=True, slots=True)
class _Static:
    """How static integers count, as ``parse`` says."""

    strict: bool
    wrap: bool

    def step(self, of: Aval, axis: int, at: int) -> Point | Pick:
        """The step of one integer."""
        size = of.shape[axis]
        if (-size if self.wrap else 0) <= at < size:
            return Point(at % size)
        if self.strict:
            raise IndexingError(f"index: {at} is out of range for axis {axis} of {of}")
        return Pick(np.asarray(min(max(at, -_FAR), _FAR), np.int32))


def _step(of: Aval, axis: int, part: Any, static: _Static) -> Step:
    size = of.shape[axis]
    if isinstance(part, slice):
        return _run(part, size)
    if _is_array(part):
        kind = aval_of(part)
        if not dtypes.is_int(kind.dtype):
            raise IndexingError(f"index: array {kind} for axis {axis}, expected integers")
        if is_numpy(part) and not part.ndim:
            return static.step(of, axis, int(part))
        return Pick(part)
    try:
        return static.step(of, axis, operator.index(part))
    except TypeError:
        raise IndexingError(
            f"index: {type(part).__name__} for axis {axis} of {of}; expected an integer, a slice, "
            "None, '...' or an array of integers or booleans"
        ) from None


def _run(part: Any, size: int) -> Run:
    bounds: list[int | None] = []
    for bound in (part.start, part.stop, part.step):
        if isinstance(bound, Tracer):
            raise IndexingError(
                "index: a slice with a traced bound has no static size; use "
                "vkjit.lax.dynamic_slice(x, start_indices, slice_sizes)"
            )
        bounds.append(None if bound is None else operator.index(bound))
    if bounds[2] == 0:
        raise IndexingError("index: a slice with step 0")
    start, stop, step = slice(*bounds).indices(size)
    return Run(start, step, len(range(start, stop, step)))


@final
@dataclass(frozen=True, slots=True)
class Layout:
    """How arrays in an index act on the axes of the (already sliced) operand.

    ``picked`` are the axes they name; these move next to each other to ``axis`` and flatten, and
    the axes of the ``broadcast`` indices take their place. In the result, ``runs_before`` of the
    operand's other axes stand before those; with new axes they begin at axis ``place``.
    """

    picked: tuple[int, ...]
    axis: int
    broadcast: Shape
    runs_before: int
    place: int

    def order(self, rank: int) -> tuple[int, ...]:
        """The permutation of axes that brings the picked ones together."""
        others = [i for i in range(rank) if i not in self.picked]
        return (*others[: self.axis], *self.picked, *others[self.axis :])


def layout(steps: Sequence[Step]) -> Layout:
    """Where the axes of index arrays go.

    Arrays (and static integers beside them) next to each other are replaced where they stand;
    otherwise the axes of the indices come first. NumPy, "Combining advanced and basic indexing".
    """
    indices = [s.indices for s in steps if isinstance(s, Pick)]
    broadcast = broadcast_shapes("index", *[aval_of(i).shape for i in indices])
    advanced = [i for i, s in enumerate(steps) if isinstance(s, (Pick, Point))]
    adjacent = advanced == list(range(advanced[0], advanced[-1] + 1))
    before = steps[: advanced[0] if adjacent else 0]
    runs = sum(isinstance(s, Run) for s in before)
    place = sum(isinstance(s, (Run, New)) for s in before)
    axes = [s for s in steps if not isinstance(s, New)]
    picked = tuple(i for i, s in enumerate(axes) if isinstance(s, Pick))
    together = picked == tuple(range(picked[0], picked[0] + len(picked)))
    return Layout(picked, picked[0] if together else 0, broadcast, runs, place)


def result_shape(steps: Sequence[Step], at: Layout | None) -> Shape:
    """Shape of the indexed array: runs and new axes in order, index axes in their place."""
    sizes = [1 if isinstance(s, New) else s.count for s in steps if isinstance(s, (New, Run))]
    return tuple(sizes) if at is None else (*sizes[: at.place], *at.broadcast, *sizes[at.place :])


def positions(
    picks: Sequence[Value], sizes: Shape, broadcast: Shape, *, drop: bool, wrap: bool = True
) -> Value:
    """Flat row-major i32 positions in the picked axes.

    Args:
        picks: an index array for each axis; negative ones count from the end.
        sizes: of the picked axes.
        broadcast: common shape of the index arrays.
        drop: give -1 where an index is out of range; otherwise it clamps to the nearest end.
        wrap: negative indices count from the end; else they are out of range.
    """
    wrapped = [wrapped_index(p, n if wrap else 0) for p, n in zip(picks, sizes, strict=True)]
    if len(wrapped) == 1:
        return broadcast_value(wrapped[0], broadcast)
    total: Value = np.int32(0)
    inside: Value = np.True_
    for index, size in zip(wrapped, sizes, strict=True):
        wide = broadcast_value(index, broadcast)
        if drop:
            fits = logical.and_(compare.ge(wide, np.int32(0)), compare.lt(wide, np.int32(size)))
            inside = logical.and_(inside, fits)
        else:
            wide = clamp(np.int32(0), wide, np.int32(max(size - 1, 0)))
        total = structural.add(arithmetic.mul(total, np.int32(size)), wide)
    return logical.select(inside, total, np.int32(-1)) if drop else total


def wrapped_index(indices: Value, size: int) -> Value:
    """Indices as i32, negative ones counted from the end of ``size`` elements."""
    of = aval_of(indices)
    if is_numpy(indices):
        whole = indices.astype(np.int64)
        return constant(np.asarray(np.where(whole < 0, whole + size, whole), np.int32))
    indices = cast(_in_reach(indices), dtypes.int32)
    if not dtypes.is_signed(of.dtype) or not size:
        return indices
    below = compare.lt(indices, np.int32(0))
    return logical.select(below, structural.add(indices, np.int32(size)), indices)


def _in_reach(indices: Value) -> Value:
    """Indices of a dtype that int32 does not hold, those beyond every axis brought nearer."""
    of = aval_of(indices).dtype
    if of.itemsize + (not dtypes.is_signed(of)) <= dtypes.int32.itemsize:
        return indices
    low = -_FAR if dtypes.is_signed(of) else 0
    return clamp(of.type(low), indices, of.type(_FAR))
