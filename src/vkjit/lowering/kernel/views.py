"""Strided views of flat memory: how an index space reads or writes a buffer without a copy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, slots=True)
class View:
    """Element ``offset + sum(i * stride)`` of a buffer for index ``i`` in ``shape``; in elements.

    A stride of 0 repeats (broadcast), a negative one runs backwards.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @property
    def size(self) -> int:
        """Number of indices."""
        return math.prod(self.shape)

    def is_dense(self) -> bool:
        """Whether the view is the whole range from 0 in row-major order."""
        return self.offset == 0 and self.strides == dense_strides(self.shape)

    def permuted(self, axes: Sequence[int]) -> View:
        """Axes in another order: axis ``i`` of the result is axis ``axes[i]`` of this view."""
        return View(
            tuple(self.shape[a] for a in axes), tuple(self.strides[a] for a in axes), self.offset
        )

    def sliced(self, starts: Sequence[int], shape: Sequence[int], steps: Sequence[int]) -> View:
        """``shape`` indices from ``starts`` by ``steps``, which may be negative."""
        offset = self.offset + sum(s * st for s, st in zip(starts, self.strides, strict=True))
        strides = tuple(st * k for st, k in zip(self.strides, steps, strict=True))
        return View(tuple(shape), strides, offset)

    def broadcast(self, shape: Sequence[int], axes: Sequence[int]) -> View:
        """Axis ``i`` of this view becomes axis ``axes[i]`` of ``shape``; other axes repeat."""
        strides = [0] * len(shape)
        for axis, size, stride in zip(axes, self.shape, self.strides, strict=True):
            strides[axis] = stride if size == shape[axis] and size != 1 else 0
        return View(tuple(shape), tuple(strides), self.offset)

    def reshaped(self, shape: Sequence[int]) -> View | None:
        """The view with another shape, or None where strides cannot express it."""
        if self.size == 0 or self.size == 1:
            return View(tuple(shape), (0,) * len(shape), self.offset)
        runs = _merged(self.shape, self.strides)
        strides: list[int] = []
        remaining = list(shape)
        for size, stride in runs:
            taken: list[int] = []
            while math.prod(taken) < size:
                if not remaining:
                    return None
                taken.append(remaining.pop(0))
            if math.prod(taken) != size:
                return None
            inner = dense_strides(taken)
            strides.extend(s * stride for s in inner)
        if math.prod(remaining) != 1:
            return None
        return View(tuple(shape), tuple(strides) + (0,) * len(remaining), self.offset)


def dense(shape: Sequence[int]) -> View:
    """The row-major view of a whole buffer."""
    return View(tuple(shape), dense_strides(shape))


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides, in elements."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _merged(shape: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """Axes without those of size 1, neighbours merged where they form one run."""
    runs: list[tuple[int, int]] = []
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if runs and runs[-1][1] == stride * size:
            runs[-1] = (runs[-1][0] * size, stride)
        else:
            runs.append((size, stride))
    return runs


def collapse(
    shape: Sequence[int], strides: Sequence[Sequence[int]]
) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Drops axes of size 1 and merges neighbouring axes that every operand walks as one.

    Args:
        shape: the common index space.
        strides: one row of strides for each operand.

    Returns:
        the smaller index space (at least one axis) and the operands' strides over it.
    """
    kept: list[int] = []
    rows: list[list[int]] = [[] for _ in strides]
    for axis, size in enumerate(shape):
        if size == 1:
            continue
        if kept and all(row[-1] == s[axis] * size for row, s in zip(rows, strides, strict=True)):
            kept[-1] *= size
            for row, s in zip(rows, strides, strict=True):
                row[-1] = s[axis]
        else:
            kept.append(size)
            for row, s in zip(rows, strides, strict=True):
                row.append(s[axis])
    if not kept:
        return (1,), [(0,) for _ in strides]
    return tuple(kept), [tuple(row) for row in rows]
