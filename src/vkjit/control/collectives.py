"""What the examples of a batch compute together: sums, extremes, gathers and permutations.

``vmap`` of a named axis gives each example its number as one more mapped value. A collective takes
that number as last operand, so whatever runs between it and its ``vmap``, such as the body of a
loop, is batched even where nothing else is. Which batch is meant is told by the axis, an object.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from vkjit.control.batched import spread_over
from vkjit.errors import AxisNameError
from vkjit.ir.avals import Aval, aval
from vkjit.ir.primitive import Array, Kind, Linear, Primitive, Remat, Tangent, Traits, Value
from vkjit.ops.indexing import gather
from vkjit.ops.logical import select
from vkjit.ops.movement import slice_
from vkjit.ops.reduce import reduce_max, reduce_min
from vkjit.ops.reshaping import reshape
from vkjit.ops.structural import broadcast, permute, reduce_sum
from vkjit.passes.batch import Axis, axis
from vkjit.trace import aval_of, bind_outs


@final
class _Open(threading.local):
    """Named axes of the ``vmap`` calls that are being traced, innermost last, and the numbers."""

    def __init__(self) -> None:
        self.axes: list[tuple[Axis, Value]] = []


_open = _Open()


@contextmanager
def named(of: Axis, number: Value) -> Generator[None]:
    """Makes an axis known by its name inside the block; ``number`` is that of the example."""
    _open.axes.append((of, number))
    try:
        yield
    finally:
        _open.axes.pop()


def axis_named(name: object, what: str) -> tuple[Axis, Value]:
    """The innermost axis of that name, and the number of the example along it.

    Raises:
        AxisNameError: there is none.
    """
    for of, number in reversed(_open.axes):
        if of.name == name:
            return of, number
    known = ", ".join(repr(of.name) for of, _ in _open.axes) or "none"
    raise AxisNameError(
        f"{what}: unbound axis name: {name!r}; axes in scope: {known}; map over it with "
        f"vmap(..., axis_name={name!r})"
    )


class Collective(Primitive, ABC):
    """Operands are an array of each example and the number of the example."""

    axis: Axis

    traits: ClassVar[Traits] = Traits(Kind.CONTROL, Remat.COSTLY, linear_in=(0,))

    @abstractmethod
    def together(self, x: Value) -> tuple[Value, bool]:
        """The result for all examples of ``x``, and whether it has the batch axis in front."""

    @abstractmethod
    def back(self, ct: Value, number: Value) -> Value:
        """The transpose."""

    def infer_outs(self, avals: Sequence[Aval]) -> tuple[Aval, ...]:
        """That of the array."""
        return (aval(avals[0].shape, avals[0].dtype),)

    def evaluate_outs(self, *arrays: Array) -> tuple[Array, ...]:
        """None: it has no meaning without its batch."""
        raise self.missing("evaluate", f"its axis {self.axis.name!r} has not been batched")

    def jvp_outs(
        self, primals: Sequence[Value], tangents: Sequence[Tangent]
    ) -> tuple[tuple[Value, ...], tuple[Tangent, ...]]:
        """Linear in the array."""
        x, number = primals
        outs = tuple(bind_outs(self, x, number))
        moved = None if tangents[0] is None else bind_outs(self, tangents[0], number)[0]
        return outs, (moved,)

    def transpose(
        self, cotangents: Sequence[Value], args: Sequence[Value | Linear]
    ) -> tuple[Tangent, ...]:
        """See ``back``."""
        return self.back(cotangents[0], args[1]), None

    def batch_outs(self, args: Sequence[Value], batched: Sequence[bool]) -> tuple[Value, ...]:
        """See ``batch_some``."""
        (out,), (spread,) = self.batch_some(args, batched)
        size = self.axis.size
        return (out if spread else spread_over(out, size),)

    def batch_some(
        self, args: Sequence[Value], batched: Sequence[bool]
    ) -> tuple[tuple[Value, ...], tuple[bool, ...]]:
        """All examples together in the batch of the axis; in any other, batch by batch."""
        x, number = args
        if axis() is self.axis:
            out, spread = self.together(x if batched[0] else spread_over(x, self.axis.size))
            return (out,), (spread,)
        if batched[1]:  # repeated for examples of another axis
            of = aval_of(number)
            first = slice_(number, (0,) * of.ndim, (1, *of.shape[1:]), (1,) * of.ndim)
            number = reshape(first, of.shape[1:])
        if not batched[0]:
            return tuple(bind_outs(self, x, number)), (False,)
        return tuple(bind_outs(self.deeper(), x, number)), (True,)

    def deeper(self) -> Collective:
        """The same for arrays with one more axis in front."""
        return self

    def parameters(self) -> dict[str, object]:
        """The name of the axis."""
        return {"axis": str(self.axis.name)}


@final
@dataclass(frozen=True)
class Psum(Collective):
    """The sum over all examples, the same for each."""

    axis: Axis

    def together(self, x: Value) -> tuple[Value, bool]:
        """The sum over the batch axis."""
        return reduce_sum(x, (0,)), False

    def back(self, ct: Value, number: Value) -> Value:
        """The sum of the cotangents: each example reaches the results of all."""
        return bind_outs(self, ct, number)[0]


@final
@dataclass(frozen=True)
class _Extreme(Collective):
    """The largest or smallest value of all examples, the same for each."""

    axis: Axis
    largest: bool

    traits: ClassVar[Traits] = Traits(Kind.CONTROL, Remat.COSTLY)

    def together(self, x: Value) -> tuple[Value, bool]:
        """The extreme over the batch axis."""
        return (reduce_max if self.largest else reduce_min)(x, (0,)), False

    def back(self, ct: Value, number: Value) -> Value:
        """None, as in JAX."""
        raise self.missing("transpose")

    def jvp_outs(
        self, primals: Sequence[Value], tangents: Sequence[Tangent]
    ) -> tuple[tuple[Value, ...], tuple[Tangent, ...]]:
        """None, as in JAX."""
        name = "pmax" if self.largest else "pmin"
        raise self.missing(
            "jvp", f"{name} is not differentiable; all_gather and take the extreme of that"
        )


@final
@dataclass(frozen=True)
class AllGather(Collective):
    """The arrays of all examples along a new axis at ``place``, the same for each."""

    axis: Axis
    place: int

    def infer_outs(self, avals: Sequence[Aval]) -> tuple[Aval, ...]:
        """With the new axis."""
        shape = avals[0].shape
        full = (*shape[: self.place], self.axis.size, *shape[self.place :])
        return (aval(full, avals[0].dtype),)

    def together(self, x: Value) -> tuple[Value, bool]:
        """The batch axis at its place."""
        others = list(range(1, aval_of(x).ndim))
        others.insert(self.place, 0)
        return permute(x, tuple(others)), False

    def back(self, ct: Value, number: Value) -> Value:
        """The example's part of the sum of the cotangents."""
        (total,) = bind_outs(Psum(self.axis), ct, number)
        return gather(total, number, self.place)

    def deeper(self) -> Collective:
        """The place moves."""
        return AllGather(self.axis, self.place + 1)


@final
@dataclass(frozen=True)
class Ppermute(Collective):
    """The array of another example: ``pairs`` of source and target; zeros where none arrives."""

    axis: Axis
    pairs: tuple[tuple[int, int], ...]

    def together(self, x: Value) -> tuple[Value, bool]:
        """A gather along the batch axis."""
        of = aval_of(x)
        sources = {target: source for source, target in self.pairs}
        where = np.array([sources.get(i, 0) for i in range(self.axis.size)], np.int32)
        arrives = np.array([i in sources for i in range(self.axis.size)])
        moved = gather(x, where, 0) if self.axis.size else x
        if arrives.all():
            return moved, True
        kept = broadcast(arrives, of.shape, (0,))
        return select(kept, moved, of.dtype.type(0)), True

    def back(self, ct: Value, number: Value) -> Value:
        """The way back."""
        turned = tuple((target, source) for source, target in self.pairs)
        return bind_outs(Ppermute(self.axis, turned), ct, number)[0]


def psum(of: Axis, number: Value, x: Value) -> Value:
    """The sum of ``x`` over all examples."""
    return bind_outs(Psum(of), x, number)[0]


def extreme(of: Axis, number: Value, x: Value, *, largest: bool) -> Value:
    """The largest or smallest ``x`` of all examples."""
    return bind_outs(_Extreme(of, largest), x, number)[0]


def all_gather(of: Axis, number: Value, x: Value, place: int) -> Value:
    """The ``x`` of all examples along a new axis."""
    return bind_outs(AllGather(of, place), x, number)[0]


def ppermute(of: Axis, number: Value, x: Value, pairs: Sequence[tuple[int, int]]) -> Value:
    """The ``x`` of another example."""
    return bind_outs(Ppermute(of, tuple(pairs)), x, number)[0]
