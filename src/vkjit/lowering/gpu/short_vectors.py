"""Long vectors of kernel IR in pieces that SPIR-V has: four lanes each.

Numbers out of quantized blocks are decoded a run at a time, so that the run shares its scale.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import final

from vkjit.errors import InternalError
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import (
    Binary,
    Bitcast,
    Compare,
    Const,
    Convert,
    Fma,
    Load,
    Node,
    Select,
    Shuffle,
    Splat,
    Unary,
    Value,
)
from vkjit.lowering.kernel.types import Type, VecType, lanes_of, scalar_of
from vkjit.lowering.kernel.walk import operands

LANES = 4
"""Lanes of the longest vector of SPIR-V without special capabilities."""


Made = Callable[[Builder], Value]
"""Builds one value out of values of another builder, by reads and by arithmetic lane by lane."""


def in_short_vectors(b: Builder, made: Made) -> list[Value]:
    """The pieces, in order, of the value that ``made`` builds out of values of ``b``.

    Raises:
        InternalError: ``made`` builds something else than ``Made`` says.
    """
    nodes, wide = _built(b, made)
    known: dict[Value, list[Value]] = {}
    _emit(b, known, nodes)
    return known[wide]


def reads(b: Builder, made: Made) -> list[Value]:
    """Only what ``made`` reads from memory: for ``after_reads``, which may stand elsewhere."""
    nodes, _ = _built(b, made)
    known: dict[Value, list[Value]] = {}
    loads = [node for node in nodes if isinstance(node, Load)]
    _emit(b, known, _needed(nodes, loads, {}))
    return [piece for node in loads for piece in known[node]]


def after_reads(b: Builder, made: Made, values: Sequence[Value]) -> list[Value]:
    """As ``in_short_vectors``, where ``reads`` has already read the ``values``."""
    nodes, wide = _built(b, made)
    known: dict[Value, list[Value]] = {}
    rest = list(values)
    for node in nodes:
        if isinstance(node, Load):
            count = _count(node)
            known[node], rest = rest[:count], rest[count:]
    _emit(b, known, _needed(nodes, [wide], known))
    return known[wide]


def _built(b: Builder, made: Made) -> tuple[list[Node], Value]:
    aside = Builder("aside", b.kernel.index_type)
    wide = made(aside)
    return aside.finish((1, 1, 1)).body.nodes, wide


def _needed(nodes: Sequence[Node], wanted: Iterable[Value], known: Collection[Value]) -> list[Node]:
    """The nodes, in order, that ``wanted`` ones are computed from."""
    live: set[object] = set(wanted)
    for node in reversed(nodes):
        if node in live and node not in known:
            live.update(operands(node))
    return [node for node in nodes if node in live and node not in known]


def _count(value: Value) -> int:
    return max(1, lanes_of(value.type) // LANES)


def _emit(b: Builder, known: dict[Value, list[Value]], nodes: Iterable[Node]) -> None:
    for node in nodes:
        if not isinstance(node, Value):
            raise InternalError(f"short vectors: {type(node).__name__}, expected an expression")
        count = _count(node)
        known[node] = [_Piece(b, known, place, count).of(node) for place in range(count)]


@final
@dataclass(frozen=True, slots=True)
class _Piece:
    """Piece number ``place`` of ``count`` of a value, given the pieces of those before it.

    Values that are not known belong to the kernel itself.
    """

    b: Builder
    known: dict[Value, list[Value]]
    place: int
    count: int

    def of(self, node: Node) -> Value:  # noqa: C901  flat cases
        b = self.b
        match node:
            case Const():
                return b.const(self._type(node.type), self._constant(node))
            case Unary():
                return b.unary(node.op, self._part(node.x))
            case Binary():
                return b.binary(node.op, self._part(node.a), self._part(node.b))
            case Fma():
                return b.fma(self._part(node.a), self._part(node.b), self._part(node.c))
            case Compare():
                return b.compare(node.op, self._part(node.a), self._part(node.b))
            case Select():
                return b.select(self._part(node.cond), self._part(node.a), self._part(node.b))
            case Convert():
                return b.convert(node.op, self._part(node.x), self._type(node.type))
            case Bitcast():
                return b.bitcast(self._part(node.x), self._type(node.type))
            case Splat():
                return b.splat(self._part(node.x), lanes_of(node.type) // self.count)
            case Load():
                return self._load(node)
            case Shuffle():
                return self._shuffle(node)
            case _:
                raise InternalError(f"short vectors: {type(node).__name__}, expected arithmetic")

    def _type(self, type_: Type) -> Type:
        lanes = lanes_of(type_) // self.count
        return VecType(scalar_of(type_), lanes) if isinstance(type_, VecType) else type_

    def _part(self, value: Value) -> Value:
        pieces = self.known.get(value)
        return value if pieces is None else pieces[self.place if len(pieces) > 1 else 0]

    def _constant(self, node: Const) -> bool | int | float | tuple[float, ...]:
        if not isinstance(node.value, tuple):
            return node.value
        lanes = lanes_of(node.type) // self.count
        return node.value[self.place * lanes : (self.place + 1) * lanes]

    def _load(self, node: Load) -> Value:
        b, index = self.b, self._part(node.index)
        mask = None if node.mask is None else self._part(node.mask)
        lanes = lanes_of(node.type) // self.count
        if not isinstance(index.type, VecType):
            index = b.offset(index, self.place * lanes)
        return b.load(node.memory, index, lanes, mask)

    def _shuffle(self, node: Shuffle) -> Value:
        """Lanes of one piece, or of two: runs are spread out, so no more are ever needed."""
        pieces = [piece for side in (node.a, node.b) for piece in self.known.get(side, [side])]
        lanes = len(node.lanes) // self.count
        wanted = node.lanes[self.place * lanes : (self.place + 1) * lanes]
        size = lanes_of(pieces[0].type)
        used = sorted({lane // size for lane in wanted})
        if len(used) > 2:
            raise InternalError(f"short vectors: lanes {wanted} out of {len(used)} pieces")
        first, last = used[0], used[-1]
        local = [lane % size + size * (lane // size != first) for lane in wanted]
        if len(set(local)) == 1:
            return self.b.splat(self.b.extract(pieces[first], local[0]), lanes)
        return self.b.shuffle(pieces[first], pieces[last], local)
