"""Cotangents of hidden states and head from those of the logits, which exist block by block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import vkjit.numpy as jnp
from vkjit.nn import _operands as op
from vkjit.nn._chunks import over_slices

Slope: TypeAlias = Callable[[Any, Any, Any], Any]
"""``(rows, slice of the head, its first row) -> f32 [n,C]``, the cotangent of a block of logits."""


def of_hidden(slope: Slope, rows: tuple[Any, ...], weight: Any, block: tuple[int, int]) -> Any:
    """The cotangent of the hidden states, in their dtype: [N,d].

    Args:
        slope: The cotangent of a block.
        rows: Arrays of N rows that ``slope`` reads; the hidden states [N,d] first.
        weight: [V,d], an array or a quantized one.
        block: Rows and columns of a block of logits.
    """

    def of_rows(carry: Any, given: Any, row: Any) -> tuple[Any, Any]:
        del row
        hidden = given[0]

        def more(total: Any, part: Any, first: Any) -> tuple[Any, None]:
            return total + op.back(slope(given, part, first), part, hidden.dtype), None

        zero = jnp.zeros(hidden.shape, jnp.float32)
        total, _ = over_slices(more, zero, weight, block[1])
        return carry, total.astype(hidden.dtype)

    return over_slices(of_rows, None, rows, block[0])[1]


def of_weight(slope: Slope, rows: tuple[Any, ...], weight: Any, block: tuple[int, int]) -> Any:
    """The cotangent of a head of floats, in its dtype: [V,d]. Arguments are those of `of_hidden`.

    Slices of the head come one by one, each over all rows: their sums do not wait for each other.
    """

    def of_columns(carry: Any, part: Any, first: Any) -> tuple[Any, Any]:
        def more(total: Any, given: Any, row: Any) -> tuple[Any, None]:
            del row
            return total + op.outer(slope(given, part, first), given[0]), None

        zero = jnp.zeros(part.shape, jnp.float32)
        total, _ = over_slices(more, zero, rows, block[0])
        return carry, total.astype(weight.dtype)

    return over_slices(of_columns, None, weight, block[1])[1]
