"""Loops over slices of rows: what a function of all rows costs in memory, slice by slice."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any, TypeAlias

import vkjit.numpy as jnp
from vkjit import lax, tree
from vkjit.errors import ArgumentError

BLOCK = 2**24
"""Logits that exist at a time where the caller does not say: 64 MiB of float32."""
MOST_ROWS = 2048
"""More rows do not make products faster, only their slices of the vocabulary narrower."""
ALIGNED = 64
"""Slices that cannot be equal are multiples of this but for the last: whole tiles of products."""

Step: TypeAlias = Callable[[Any, Any, Any], tuple[Any, Any]]
"""``(carry, slice, first) -> (carry, results)``; ``first`` is the number of the first row."""


def over_slices(step: Step, carry: Any, rows: Any, size: int) -> tuple[Any, Any]:
    """Runs ``step`` on slices of at most ``size`` rows, handing on the carry.

    Slices of one size are the turns of a loop. Where the rows cannot be divided so, the slices
    stand one after another in the program, because a loop would have to copy the rows it reads.

    Args:
        step: What is done with a slice; its results have the slice's rows as their leading axis.
        carry: Handed to the first slice; a pytree, or None.
        rows: A pytree of arrays with a leading axis of the same size.
        size: At least 1.

    Returns:
        The last carry, and the results of all rows.
    """
    total = tree.leaves(rows)[0].shape[0]
    if total <= size:
        return step(carry, rows, 0)
    size = slice_size(total, size)
    if total % size:
        return _in_sequence(step, carry, rows, size)
    count = total // size

    def split(x: Any) -> Any:
        return jnp.reshape(x, (count, size, *x.shape[1:]))

    def joined(y: Any) -> Any:
        return jnp.reshape(y, (total, *y.shape[2:]))

    def turn(carry: Any, x: tuple[Any, Any]) -> tuple[Any, Any]:
        number, part = x
        return step(carry, part, number * size)

    turns = (jnp.arange(count, dtype=jnp.int32), tree.map(split, rows))
    carry, results = lax.scan(turn, carry, turns)
    return carry, tree.map(joined, results)


def slice_size(total: int, most: int) -> int:
    """Rows of a slice: a divisor of ``total`` from half of ``most`` on, else nearly equal parts."""
    count = -(-total // most)
    for parts in range(count, 2 * count + 1):
        if total % parts == 0:
            return total // parts
    even = -(-total // count)
    return min(-(-even // ALIGNED) * ALIGNED, most)


def sizes(
    op: str, rows: int, vocabulary: int, row_chunk: int | None, vocab_chunk: int | None
) -> tuple[int, int]:
    """Rows and columns of the largest block of logits.

    Raises:
        ArgumentError: A size below 1 was given.
    """
    for name, size in (("row_chunk", row_chunk), ("vocab_chunk", vocab_chunk)):
        if size is not None and size < 1:
            raise ArgumentError(
                f"{op}: {name}={size}, expected a positive number of them; leave it out for a "
                f"block of at most {BLOCK} logits"
            )
    row_chunk = min(rows, row_chunk or MOST_ROWS)
    return row_chunk, min(vocabulary, vocab_chunk or max(1, BLOCK // max(row_chunk, 1)))


def _in_sequence(step: Step, carry: Any, rows: Any, size: int) -> tuple[Any, Any]:
    total, found = tree.leaves(rows)[0].shape[0], list[Any]()
    for first in range(0, total, size):
        part = tree.map(itemgetter(slice(first, first + size)), rows)
        carry, results = step(carry, part, first)
        found.append(results)

    def joined(*parts: Any) -> Any:
        return jnp.concatenate(parts, axis=0)

    return carry, tree.map(joined, *found)
