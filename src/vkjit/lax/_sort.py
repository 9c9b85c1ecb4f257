"""Sorts with payloads, and the largest k."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from vkjit.errors import ArgumentError, ShapeError
from vkjit.ir.primitive import Value
from vkjit.numpy._core import ArrayLike, axis_of, index_of, lift, operand_aval
from vkjit.numpy._sort import largest
from vkjit.ops.sort import argsort, reorder


def sort(
    operand: ArrayLike | Sequence[ArrayLike],
    dimension: int = -1,
    is_stable: bool = True,  # noqa: FBT001  JAX's signature
    num_keys: int = 1,
) -> Value | tuple[Value, ...]:
    """The operand in order along ``dimension``; of several, all by the first ``num_keys``.

    Args:
        operand: an array, or arrays of one shape.
        dimension: along which.
        is_stable: elements with equal keys keep their order; they always do.
        num_keys: how many operands are compared, the first one first.

    Returns:
        an array, or a tuple as long as the operands.

    Raises:
        ShapeError: operands of different shapes.
        ArgumentError: more keys than operands, or none.
    """
    many = isinstance(operand, (list, tuple))
    given = cast("Sequence[ArrayLike]", operand if many else (operand,))
    if not 1 <= num_keys <= len(given):
        raise ArgumentError(
            f"sort: {num_keys} keys of {len(given)} operands; expected 1 to {len(given)}"
        )
    avals = [operand_aval("sort", x) for x in given]
    if any(of.shape != avals[0].shape for of in avals):
        shapes = ", ".join(map(str, avals))
        raise ShapeError(f"sort: operands {shapes}, expected one shape; broadcast them first")
    axis = axis_of("sort", dimension, avals[0].ndim)
    values = [lift("sort", x) for x in given]
    order = argsort(values[num_keys - 1], axis)
    for key in reversed(values[: num_keys - 1]):
        # Sorts are stable: the order of later keys remains where earlier ones tie.
        again = argsort(reorder(key, order, axis), axis)
        order = reorder(order, again, axis)
    out = tuple(reorder(x, order, axis) for x in values)
    return out if many else out[0]


def sort_key_val(
    keys: ArrayLike,
    values: ArrayLike,
    dimension: int = -1,
    is_stable: bool = True,  # noqa: FBT001  JAX's signature
) -> tuple[Value, Value]:
    """``keys`` in order along ``dimension``, and ``values`` in the order of their keys."""
    del is_stable  # sorts always are
    first, second = sort((keys, values), dimension)
    return first, second


def top_k(operand: ArrayLike, k: int, *, axis: int = -1) -> tuple[Value, Value]:
    """The ``k`` largest elements along ``axis``, largest first, and their int32 positions.

    NaN counts as larger than everything; of equal elements the first comes first.

    Raises:
        ArgumentError: ``k`` is negative, or more than there are.
    """
    of = operand_aval("top_k", operand)
    along, count = axis_of("top_k", axis, of.ndim), index_of("top_k", k)
    if not 0 <= count <= of.shape[along]:
        raise ArgumentError(
            f"top_k: k = {count} of operand {of} along axis {along}; expected 0 to "
            f"{of.shape[along]}"
        )
    return largest(lift("top_k", operand), count, along)
