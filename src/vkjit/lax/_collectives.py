"""What the examples of a ``vmap`` compute together, over its named axis; as in ``jax.lax``."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, SupportsIndex, cast

import numpy as np

from vkjit import dtypes, tree
from vkjit.control import collectives
from vkjit.control.collectives import axis_named
from vkjit.errors import ArgumentError, ShapeError
from vkjit.ir.primitive import Value
from vkjit.lax._dynamic import dynamic_slice_in_dim
from vkjit.numpy import asarray, divide, multiply
from vkjit.numpy._core import ArrayLike, axis_of, lift
from vkjit.ops.movement import squeeze
from vkjit.ops.reshaping import reshape
from vkjit.passes.batch import Axis
from vkjit.trace import aval_of

AxisName = Hashable
"""A name given to ``vmap`` as ``axis_name``; most functions take a tuple of names as well."""


def _names(axis_name: AxisName | Sequence[AxisName]) -> Sequence[AxisName]:
    if isinstance(axis_name, (tuple, list)):
        return cast("Sequence[AxisName]", axis_name)
    return (axis_name,)


def psum(x: Any, axis_name: AxisName | Sequence[AxisName]) -> Any:
    """The sum of ``x`` over all examples of a named axis, the same for each.

    Its transpose is ``psum``, as in JAX: a cotangent is that of the sum of every example's result.
    In a branch that not all examples take, the values of all are summed, but gradients flow to
    those that take it only.

    Args:
        x: a pytree; leaves that are Python numbers are multiplied by the axis' size.
        axis_name: a name, or several.

    Raises:
        AxisNameError: no ``vmap`` around maps over that name.
    """
    axes = [axis_named(name, "psum") for name in _names(axis_name)]

    def one(value: Any) -> Any:
        if isinstance(value, (bool, int, float)):
            return value * axis_size(axis_name)
        total: Any = _numeric(value)
        for of, number in axes:
            total = collectives.psum(of, number, total)
        return total

    return tree.map(one, x)


def _numeric(leaf: ArrayLike) -> Value:
    value = lift("psum", leaf)
    return asarray(value, dtypes.int32) if aval_of(value).dtype == dtypes.bool_ else value


def pmean(x: Any, axis_name: AxisName | Sequence[AxisName]) -> Any:
    """The mean of ``x`` over all examples of a named axis; see ``psum``."""
    count = axis_size(axis_name)

    def mean(total: Any) -> Value:
        return divide(total, count)

    return tree.map(mean, psum(x, axis_name))


def pmax(x: Any, axis_name: AxisName | Sequence[AxisName]) -> Any:
    """The largest value of ``x`` of all examples of a named axis; not differentiable, as in JAX."""
    return _extreme("pmax", x, axis_name, partial(collectives.extreme, largest=True))


def pmin(x: Any, axis_name: AxisName | Sequence[AxisName]) -> Any:
    """The smallest value of ``x`` of all examples; see ``pmax``."""
    return _extreme("pmin", x, axis_name, partial(collectives.extreme, largest=False))


def _extreme(
    what: str,
    x: Any,
    axis_name: AxisName | Sequence[AxisName],
    of_all: Callable[[Axis, Value, Value], Value],
) -> Any:
    axes = [axis_named(name, what) for name in _names(axis_name)]

    def one(value: Any) -> Any:
        leaf: Any = value
        for of, number in axes:
            leaf = of_all(of, number, lift(what, leaf))
        return leaf

    return tree.map(one, x)


def axis_index(axis_name: AxisName) -> Value:
    """The number of the example along a named axis, an ``i32`` of rank 0."""
    return axis_named(axis_name, "axis_index")[1]


def axis_size(axis_name: AxisName | Sequence[AxisName]) -> int:
    """The number of examples along a named axis, or their product, as a Python integer."""
    sizes = [axis_named(name, "axis_size")[0].size for name in _names(axis_name)]
    return int(np.prod(sizes, dtype=np.int64))


def all_gather(
    x: Any,
    axis_name: AxisName,
    *,
    axis: SupportsIndex = 0,
    tiled: bool = False,
) -> Any:
    """The arrays of all examples along a new axis, the same for each.

    Args:
        x: a pytree.
        axis_name: over which to gather.
        axis: where the new axis stands; with ``tiled``, along which arrays are joined.
        tiled: whether arrays are joined along an axis that they have.
    """
    of, number = axis_named(axis_name, "all_gather")

    def one(leaf: Any) -> Any:
        value = lift("all_gather", leaf)
        shape = aval_of(value).shape
        place = axis_of("all_gather", axis, len(shape) + (not tiled))
        full = collectives.all_gather(of, number, value, place)
        if not tiled:
            return full
        joined = (*shape[:place], of.size * shape[place], *shape[place + 1 :])
        return reshape(full, joined)

    return tree.map(one, x)


def psum_scatter(
    x: Any,
    axis_name: AxisName,
    *,
    scatter_dimension: int = 0,
    tiled: bool = False,
) -> Any:
    """Each example's part of the sum over all: ``psum`` and a slice at ``axis_index``.

    Args:
        x: a pytree.
        axis_name: over which to sum.
        scatter_dimension: the axis of which each example gets a part; of the axis' size, and taken
            away, unless ``tiled``: then divisible by it.
        tiled: whether parts keep that axis.
    """
    of, number = axis_named(axis_name, "psum_scatter")

    def one(leaf: Any) -> Any:
        shape = aval_of(leaf).shape
        place = axis_of("psum_scatter", scatter_dimension, len(shape))
        part, rest = divmod(shape[place], max(of.size, 1))
        if rest or not (tiled or part == 1):
            raise ShapeError(
                f"psum_scatter: {aval_of(leaf)} along axis {place} for {of.size} examples of "
                f"{axis_name!r}; expected {'a multiple of ' if tiled else ''}that size"
            )
        total = psum(leaf, axis_name)
        own = dynamic_slice_in_dim(total, multiply(number, part), part, place)
        return own if tiled else squeeze(own, (place,))

    return tree.map(one, x)


def ppermute(x: Any, axis_name: AxisName, perm: Sequence[tuple[int, int]]) -> Any:
    """Arrays handed from example to example.

    Args:
        x: a pytree.
        axis_name: along which.
        perm: pairs (source, target); an example that is no target gets zeros.

    Raises:
        ArgumentError: a number is out of range, or a source or target occurs twice.
    """
    of, number = axis_named(axis_name, "ppermute")
    pairs = [(int(source), int(target)) for source, target in perm]
    for column in zip(*pairs, strict=True):
        if len(set(column)) != len(column) or not all(0 <= i < of.size for i in column):
            raise ArgumentError(
                f"ppermute: perm {pairs} over {of.size} examples of {axis_name!r}; expected "
                "distinct sources and distinct targets in range"
            )

    def one(leaf: Any) -> Value:
        return collectives.ppermute(of, number, lift("ppermute", leaf), pairs)

    return tree.map(one, x)
