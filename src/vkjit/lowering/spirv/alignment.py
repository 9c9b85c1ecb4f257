"""Powers of two that are known to divide an index: they tell which vector accesses are aligned.

Also which arrays in shared memory are declared as arrays of vectors: those whose vector accesses
are all aligned and of one width. Elements of them are still reached one by one.
"""

from __future__ import annotations

from typing import final

from vkjit.lowering.kernel.nodes import (
    AtomicAdd,
    Binary,
    Const,
    For,
    Kernel,
    Load,
    MatLoad,
    MatStore,
    Node,
    Select,
    Splat,
    Store,
    TensorLoad,
    TensorStore,
    Value,
)
from vkjit.lowering.kernel.types import BinOp, Memory, Scratch, Space, VecType
from vkjit.lowering.kernel.walk import all_nodes, memory_of

LIMIT = 64
"""No access asks for more; also the answer for the index 0, which everything divides."""
_ACCESSES = (Load, Store, AtomicAdd, MatLoad, MatStore, TensorLoad, TensorStore)
_LANES = 4
"""Lanes of the longest vector."""
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
            case Binary(op=BinOp.ADD | BinOp.SUB | BinOp.MIN_U | BinOp.MIN_S, a=a, b=b):
                return min(self._of(a, depth), self._of(b, depth))
            case Binary(op=BinOp.MUL, a=a, b=b):
                return min(self._of(a, depth) * self._of(b, depth), LIMIT)
            case Binary(op=BinOp.SHL, a=a, b=Const(value=int() as shift)):
                return min(self._of(a, depth) << min(shift, 6), LIMIT)
            case Binary(op=BinOp.SHR_L, a=a, b=Const(value=int() as shift)):
                return max(self._of(a, depth) >> min(shift, 6), 1)
            case Binary(op=BinOp.AND, a=a, b=b):
                return max(self._of(a, depth), self._of(b, depth))
            case Select(a=a, b=b):
                return min(self._of(a, depth), self._of(b, depth))
            case Splat(x=x):
                return self._of(x, depth)
            case _:
                return 1


def shared_widths(kernel: Kernel, multiples: Multiples) -> dict[Memory, int]:
    """Lanes of the vectors that each shared array is made of, where that is more than 1."""
    widths: dict[Memory, int] = {}
    for node in all_nodes(kernel.body):
        if isinstance(node, For):
            multiples.enter_loop(node)
        if isinstance(node, _ACCESSES):
            lanes = _width(node, multiples)
            if lanes is not None and widths.setdefault(node.memory, lanes) != lanes:
                widths[node.memory] = 1
    return {memory: lanes for memory, lanes in widths.items() if lanes > 1}


def _width(node: Node, multiples: Multiples) -> int | None:
    """The width that an access asks of its memory: None for any, 1 where vectors are in the way."""
    memory = memory_of(node)
    if not isinstance(memory, Scratch) or memory.space is not Space.SHARED:
        return 1
    if isinstance(node, (MatLoad, MatStore)):
        # A matrix may start at any vector, and its rows be any number of them apart.
        places = multiples.of(node.index), multiples.of(node.stride)
        return None if min(places) >= _LANES and memory.length % _LANES == 0 else 1
    if not isinstance(node, (Load, Store)):
        return 1
    type_ = node.type if isinstance(node, Load) else node.value.type
    if not isinstance(type_, VecType) or isinstance(node.index.type, VecType):
        return None
    lanes, masked = type_.lanes, node.mask is not None
    aligned = multiples.of(node.index) % lanes == 0 and memory.length % lanes == 0
    return lanes if lanes in (2, 4) and aligned and not masked else 1
