"""The register tile of a product: a block of the output kept in vectors over the whole sum.

Two forms. The *outer* form keeps ``rows`` x ``vectors`` vectors along n and adds, for each k, a
scalar of lhs times vectors of rhs. The *dot* form keeps ``rows`` x ``columns`` vectors along k and
adds up the lanes at the end; it serves operands that are both contiguous along k and too small to
be worth packing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from vkjit.lowering.cpu.gemm_unpack import (
    BlockRows,
    Numbers,
    numbers_at,
    numbers_from,
    widened,
)
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.types import (
    BinOp,
    CmpOp,
    Memory,
    ScalarType,
    VecType,
    scalar_of,
)
from vkjit.lowering.plan.groups import LoadStep

_CHAINS = 4
"""Sums under way that hide the latency of an addition."""


@final
@dataclass(frozen=True, slots=True)
class Tile:
    """``rows`` x ``columns`` outputs in vectors of ``lanes``, summed in ``elem``.

    ``unroll`` steps of the sum stand in one iteration of the outer form.
    """

    rows: int
    columns: int
    lanes: int
    elem: ScalarType
    unroll: int = 1

    @property
    def vectors(self) -> int:
        """Vectors in a row of the outer form."""
        return self.columns // self.lanes

    @property
    def size(self) -> int:
        """Elements of the tile."""
        return self.rows * self.columns

    def zeros(self, b: Builder, count: int) -> tuple[Value, ...]:
        """``count`` empty accumulators."""
        zero = 0.0 if self.elem.kind == "float" else 0
        return (b.const(self.vector_type, zero),) * count

    @property
    def vector_type(self) -> VecType | ScalarType:
        """Type of an accumulator."""
        return VecType(self.elem, self.lanes) if self.lanes > 1 else self.elem


@final
@dataclass(frozen=True, slots=True)
class Strip:
    """One operand of a tile in memory: index ``i`` across the tile, ``k`` along the sum.

    Its element stands at ``base + i * across + k * along``. ``masks`` guard the vectors of a strip
    that is narrower than the tile. With ``step`` it lies in blocks, those of rhs along the tile.
    """

    memory: Memory
    base: Value
    across: int
    along: int
    masks: tuple[Value | None, ...] = ()
    step: LoadStep | None = None

    def load(self, b: Builder, elem: ScalarType, k: Value, i: int, lanes: int = 1) -> Value:
        """``lanes`` consecutive elements from index ``i`` at ``k``, as ``elem``."""
        start = b.add(self.base, b.scaled(k, self.along))
        at = b.offset(start, i * self.across)
        if self.step is None:
            mask = self.masks[i // lanes] if self.masks else None
            loaded = b.load(self.memory, at, lanes, mask)
        elif lanes == 1:
            loaded = numbers_at(b, self.memory, self.step, at)
        else:
            loaded = numbers_from(b, self.memory, self.step, at, lanes)
        return widened(b, loaded, elem)


def multiply_add(b: Builder, x: Value, y: Value, total: Value) -> Value:
    """``x * y + total``, fused for floats."""
    if scalar_of(x.type).kind == "float":
        return b.fma(x, y, total)
    return b.add(b.mul(x, y), total)


def outer(
    b: Builder,
    tile: Tile,
    operands: tuple[Strip, Strip],
    depth: Value | int,
    start: Sequence[Value],
) -> tuple[Value, ...]:
    """Accumulators, row by row, after ``depth`` more steps of the sum than ``start``."""
    lhs, rhs = operands

    def step(k: Value, totals: list[Value]) -> None:
        columns = range(0, tile.columns, tile.lanes)
        right = [rhs.load(b, tile.elem, k, c, tile.lanes) for c in columns]
        for i in range(tile.rows):
            left = b.splat(lhs.load(b, tile.elem, k, i), tile.lanes)
            for v, x in enumerate(right, i * tile.vectors):
                totals[v] = multiply_add(b, left, x, totals[v])

    if not isinstance(depth, int):
        return _summed(b, (b.index(0), depth), 1, start, step)
    whole = depth - depth % tile.unroll
    totals = tuple(start)
    if whole:
        totals = _summed(b, (b.index(0), b.index(whole)), tile.unroll, totals, step)
    if whole < depth:
        totals = _summed(b, (b.index(whole), b.index(depth)), 1, totals, step)
    return totals


def outer_blocks(
    b: Builder,
    tile: Tile,
    operands: tuple[Strip, BlockRows],
    steps: tuple[Value, Value],
    start: Sequence[Value],
) -> tuple[Value, ...]:
    """The outer form for one vector of rows of rhs, whose blocks lie along the sum.

    ``steps`` are the first one and their count. Few rows of lhs sum in several chains, so that no
    addition waits for the one before.
    """
    lhs, rhs = operands
    chains = -(-_CHAINS // tile.rows)

    def add(numbers: Numbers, totals: Sequence[Value]) -> Sequence[Value]:
        sums = [[total, *tile.zeros(b, chains - 1)] for total in totals]
        for at, (k, number) in enumerate(numbers):
            for i, chain in enumerate(sums):
                left = b.splat(lhs.load(b, tile.elem, k, i), tile.lanes)
                chain[at % chains] = multiply_add(b, left, number, chain[at % chains])
        return [_added(b, chain) for chain in sums]

    return rhs.swept(steps, tile.elem, start, add)


def _added(b: Builder, values: Sequence[Value]) -> Value:
    total = values[0]
    for value in values[1:]:
        total = b.add(total, value)
    return total


def _summed(
    b: Builder,
    bounds: tuple[Value, Value],
    unroll: int,
    start: Sequence[Value],
    step: Callable[[Value, list[Value]], None],
) -> tuple[Value, ...]:
    with b.loop(*bounds, b.index(unroll), start, hint="k") as loop:
        totals = list(loop.carried)
        for u in range(unroll):
            step(b.offset(loop.index, u), totals)
        loop.yields(*totals)
    return loop.results


def dot(b: Builder, tile: Tile, operands: tuple[Strip, Strip], depth: int) -> list[Value]:
    """Scalars, row by row: the sums over ``depth`` steps of operands contiguous along k."""
    whole = depth - depth % tile.lanes
    totals = tile.zeros(b, tile.size)
    if whole:
        bounds = (b.index(0), b.index(whole))
        with b.loop(*bounds, b.index(tile.lanes), totals, hint="k") as loop:
            loop.yields(*_dot_step(b, tile, operands, loop.index, loop.carried))
        totals = loop.results
    if whole < depth:
        mask = prefix(b, b.index(depth - whole), tile.lanes)
        totals = _dot_step(b, tile, operands, b.index(whole), totals, mask)
    return [b.reduce(BinOp.ADD, total) for total in totals]


def _dot_step(  # noqa: PLR0913  a step of the loop in ``dot``, which has its parameters
    b: Builder,
    tile: Tile,
    operands: tuple[Strip, Strip],
    k: Value,
    totals: Sequence[Value],
    mask: Value | None = None,
) -> tuple[Value, ...]:
    def vectors(strip: Strip, count: int) -> list[Value]:
        start = b.add(strip.base, k)
        addresses = [b.offset(start, i * strip.across) for i in range(count)]
        loaded = [b.load(strip.memory, at, tile.lanes, mask) for at in addresses]
        return [widened(b, x, tile.elem) for x in loaded]

    left, right = vectors(operands[0], tile.rows), vectors(operands[1], tile.columns)
    pairs = [(x, y) for x in left for y in right]
    return tuple(multiply_add(b, x, y, t) for (x, y), t in zip(pairs, totals, strict=True))


def prefix(b: Builder, count: Value, lanes: int) -> Value:
    """The mask of the first ``count`` of ``lanes`` lanes."""
    positions = b.iota(lanes) if lanes > 1 else b.index(0)
    return b.compare(CmpOp.LT, positions, b.splat(count, lanes))
