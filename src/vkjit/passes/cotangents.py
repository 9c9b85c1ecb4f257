"""Cotangents of variables while a program is transposed: their sums, and what slices leave."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import final

from vkjit.ir.primitive import Linear, Tangent, Value
from vkjit.ir.program import Var
from vkjit.ops.movement import Slice, concatenate, pad
from vkjit.ops.structural import add
from vkjit.trace import aval_of

_Part = tuple[Slice, Value]


@final
class Cotangents:
    """What has reached each variable so far.

    Cotangents of slices are kept apart until they are asked for: slices side by side, such as the
    halves of a rotary embedding, become one concatenation instead of a sum of padded arrays.
    """

    def __init__(self) -> None:
        self._sums: dict[Var, Value] = {}
        self._parts: dict[Var, list[_Part]] = {}

    def add(self, var: Var, ct: Value) -> None:
        """Adds a cotangent of the whole variable."""
        before = self._sums.get(var)
        self._sums[var] = ct if before is None else add(before, ct)

    def add_slice(self, var: Var, part: Slice, ct: Value) -> None:
        """Adds the cotangent of a slice of the variable."""
        self._parts.setdefault(var, []).append((part, ct))

    def take(self, var: Var) -> Tangent:
        """The sum for ``var``, which is forgotten; None is zero."""
        parts = self._parts.pop(var, [])
        axis = _side_by_side(parts, var.aval.shape)
        if axis is not None:
            self.add(var, _joined(parts, axis, var.aval.shape[axis]))
        else:
            for part, ct in parts:
                (padded,) = part.transpose([ct], [Linear(var.aval)])
                assert padded is not None
                self.add(var, padded)
        return self._sums.pop(var, None)


def _side_by_side(parts: Sequence[_Part], shape: Sequence[int]) -> int | None:
    """The axis along which several slices follow each other without a gap; None where none does."""
    if len(parts) < 2 or any(stride != 1 for part, _ in parts for stride in part.strides):
        return None
    differing = [
        axis
        for axis, size in enumerate(shape)
        if any((part.starts[axis], part.limits[axis]) != (0, size) for part, _ in parts)
    ]
    if len(differing) != 1:
        return None
    (axis,) = differing
    ranges = sorted((part.starts[axis], part.limits[axis]) for part, _ in parts)
    follows = all(a[1] == b[0] for a, b in pairwise(ranges))
    return axis if follows else None


def _joined(parts: Sequence[_Part], axis: int, size: int) -> Value:
    ordered = sorted(parts, key=lambda item: (item[0].starts[axis], item[0].limits[axis]))
    value = concatenate([ct for _, ct in ordered], axis)
    low, high = ordered[0][0].starts[axis], size - ordered[-1][0].limits[axis]
    if low == high == 0:
        return value
    rank = len(ordered[0][0].starts)

    def only(amount: int) -> tuple[int, ...]:
        return tuple(amount if a == axis else 0 for a in range(rank))

    zero = aval_of(value).dtype.type(0)
    return pad(value, zero, only(low), only(high), only(0))
