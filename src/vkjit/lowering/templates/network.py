"""A few keys sorted in registers."""

from __future__ import annotations

from collections.abc import Sequence

from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.types import CmpOp

Pair = tuple[Value, Value]
"""A key and the position it came from."""


def sorted_pairs(b: Builder, pairs: Sequence[Pair]) -> list[Pair]:
    """Pairs by their keys: only neighbours in the wrong order change places, so equals never do."""
    found = list(pairs)
    for turn in range(len(found)):
        for i in range(turn % 2, len(found) - 1, 2):
            (a, at), (c, ct) = found[i], found[i + 1]
            swap = b.compare(CmpOp.LT, c, a)
            found[i] = b.select(swap, c, a), b.select(swap, ct, at)
            found[i + 1] = b.select(swap, a, c), b.select(swap, at, ct)
    return found
