"""Powers of two that are known to divide an index: they tell which vector accesses are aligned."""

from __future__ import annotations

from typing import final

from vkjit.lowering.kernel.nodes import Binary, Const, For, Select, Splat, Value
from vkjit.lowering.kernel.types import BinOp

LIMIT = 64
"""No access asks for more; also the answer for the index 0, which everything divides."""
_DEPTH = 24  # index expressions are shallow; a longer chain is not worth the time


@final
class Multiples:
    """Remembers what is known about loop indices; everything else follows from the expression."""

    def __init__(self) -> None:
        self._known: dict[Value, int] = {}

    def enter_loop(self, node: For) -> None:
        """Learns the index of ``node``: lower + n * step."""
        self._known[node.index] = min(self.of(node.lower), self.of(node.step))

    def of(self, value: Value) -> int:
        """The largest power of two, up to ``LIMIT``, known to divide ``value`` in every lane."""
        return self._of(value, _DEPTH)

    def _of(self, value: Value, depth: int) -> int:
        known = self._known.get(value)
        if known is not None or depth == 0:
            return known or 1
        found = self._compute(value, depth - 1)
        self._known[value] = found
        return found

    def _compute(self, value: Value, depth: int) -> int:
        match value:
            case Const(value=int() as number):
                return LIMIT if number == 0 else min(number & -number, LIMIT)
            case Binary(op=BinOp.ADD | BinOp.SUB, a=a, b=b):
                return min(self._of(a, depth), self._of(b, depth))
            case Binary(op=BinOp.MUL, a=a, b=b):
                return min(self._of(a, depth) * self._of(b, depth), LIMIT)
            case Binary(op=BinOp.SHL, a=a, b=Const(value=int() as shift)):
                return min(self._of(a, depth) << min(shift, 6), LIMIT)
            case Binary(op=BinOp.AND, a=a, b=b):
                return max(self._of(a, depth), self._of(b, depth))
            case Select(a=a, b=b):
                return min(self._of(a, depth), self._of(b, depth))
            case Splat(x=x):
                return self._of(x, depth)
            case _:
                return 1
