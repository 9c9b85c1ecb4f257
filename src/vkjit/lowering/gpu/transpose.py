"""Pointwise groups whose arrays are contiguous along different axes: turned in shared memory.

A workgroup has a square tile of two axes. Arrays that are contiguous along the other axis than most
are read along their own, in vectors, put into shared memory, and read from there along the common
axis; everything else of the body happens at that point. A padding column keeps the invocations of a
subgroup on different banks either way. Two 16-bit neighbours along the common axis share a word of
that memory.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

from vkjit.lowering.gpu.grid import Grid
from vkjit.lowering.gpu.index import index_type
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.types import (
    F32,
    I1,
    I16,
    I32,
    BinOp,
    CmpOp,
    ConvertOp,
    ScalarType,
    Scratch,
    VecType,
    with_elem,
)
from vkjit.lowering.plan.groups import IOTA, LoadStep, LoopGroup
from vkjit.lowering.target import Target
from vkjit.lowering.templates.body import Point, access_of, evaluate, load, store
from vkjit.lowering.templates.context import Buffers, Lowered, TemplateContext
from vkjit.lowering.templates.space import coordinates, lane_axis, views_of

_SIDE = 32
"""Invocations along a side of the tile; each has ``lanes`` elements of it."""
_ROWS = 8
"""Invocations along the other side, which they walk in turns."""
_FROM = 1 << 14
"""Elements from which on a transposed read is worth a detour."""
_WORD = 4


@final
@dataclass(frozen=True, slots=True)
class Turn:
    """``loads`` are contiguous along ``across``, most other views along ``along``."""

    along: int
    across: int
    loads: tuple[int, ...]
    lanes: int

    @property
    def side(self) -> int:
        """Elements along a side of the tile."""
        return _SIDE * self.lanes


def turns_of(group: LoopGroup, target: Target) -> list[Turn]:
    """How a compact group without reductions can be turned; nothing where it need not be."""
    if math.prod(group.shape) < _FROM or not _has_room(target):
        return []
    along = lane_axis(views_of(group.body, group.stores), range(len(group.shape)), 4)
    found: dict[int, list[int]] = {}
    for number, step in enumerate(group.body):
        if isinstance(step, LoadStep) and step.array != IOTA and step.view.strides[along] > 1:
            for axis, stride in enumerate(step.view.strides):
                if stride == 1 and group.shape[axis] >= _SIDE // 2:
                    found.setdefault(axis, []).append(number)
    if not found or group.shape[along] < _SIDE // 2:
        return []
    across = max(found, key=lambda axis: (len(found[axis]), group.shape[axis]))
    loads = tuple(found[across])
    turns = [Turn(along, across, loads, lanes) for lanes in (4, 2, 1)]
    return [turn for turn in turns if _fits(group, turn, target)]


def _has_room(target: Target) -> bool:
    wide, high, _ = target.max_workgroup
    return target.max_invocations >= _SIDE * _ROWS and wide >= _SIDE and high >= _ROWS


def _fits(group: LoopGroup, turn: Turn, target: Target) -> bool:
    """Whether the tiles fit into shared memory, and vectors into the arrays."""
    side, lanes = turn.side, turn.lanes
    # A quarter of the memory, so that several workgroups share a core.
    room = target.shared_bytes if lanes == 1 else target.shared_bytes // 4
    held = sum(_held(group.body[n].type).bytes for n in turn.loads)
    if held * side * (side + 1) > room:
        return False
    if lanes == 1:
        return True
    if any(group.shape[a] % lanes for a in (turn.along, turn.across)):
        return False
    if max(group.body[n].type.bytes for n in turn.loads) * lanes > _WORD:
        return False
    turned = {id(group.body[n]) for n in turn.loads}
    views = [
        (s.view, turn.across if id(s) in turned else turn.along)
        for s in (*[s for s in group.body if isinstance(s, LoadStep)], *group.stores)
    ]
    return all(
        v.offset % lanes == 0 and all(s % lanes == 0 for a, s in enumerate(v.strides) if a != axis)
        for v, axis in views
        if v.strides[axis] == 1
    )


def turned(group: LoopGroup, turn: Turn, context: TemplateContext) -> list[Lowered]:
    """One kernel that computes every store of a compact group."""
    b = Builder("transpose", index_type(context))
    buffers = Buffers(b, context, access_of(group.body, group.stores))
    work = _Turned(b, group, turn, buffers)
    grid = Grid(math.prod(work.tiles), context.target)
    with grid.each(b) as position:
        work.tile(position)
    kernel = b.finish(grid.shape, (_SIDE, _ROWS, 1), group.origin)
    return [Lowered(kernel, buffers.arrays)]


@final
class _Turned:
    """One group on its way to a kernel."""

    def __init__(self, b: Builder, group: LoopGroup, turn: Turn, buffers: Buffers) -> None:
        self.b = b
        self.group = group
        self.turn = turn
        self.buffers = buffers
        tiled = (turn.along, turn.across)
        self.others = [a for a in range(len(group.shape)) if a not in tiled]
        blocks = [-(-group.shape[a] // turn.side) for a in tiled]
        self.tiles = [*[group.shape[a] for a in self.others], *reversed(blocks)]
        self.is_packed = _packs(group, turn)
        self.pitch = turn.side // 2 + 1 if self.is_packed else turn.side + 1
        self.memory: dict[int, Scratch] = {
            n: b.scratch(f"tile{n}", self.held(n), turn.side * self.pitch) for n in turn.loads
        }

    def held(self, number: int) -> ScalarType:
        """The type in shared memory of what a turned load reads."""
        return I32 if self.is_packed else _held(self.group.body[number].type)

    def tile(self, position: Value) -> None:
        """Fills the tiles of all turned arrays, then computes the elements of the tile."""
        b, turn = self.b, self.turn
        found = coordinates(b, position, self.tiles)
        outer = dict(zip(self.others, found, strict=False))
        start = {
            turn.across: b.scaled(found[-2], turn.side),
            turn.along: b.scaled(found[-1], turn.side),
        }
        if self.is_packed:
            self.fill_packed(outer, start)
        else:
            for at, slot in self.points(turn.across, turn.along, outer, start):
                with self.inside(at):
                    for number in turn.loads:
                        self.keep(at, slot, number)
        b.barrier()
        points = self.points(turn.along, turn.across, outer, start)
        if self.is_whole:
            # All reads before the first write: the driver may not change their order.
            values = [self.values(at, slot) for at, slot in points]
            for (at, _), found in zip(points, values, strict=True):
                self.write(at, found)
            return
        for at, slot in points:
            with self.inside(at):
                self.write(at, self.values(at, slot))

    @property
    def is_whole(self) -> bool:
        """Whether every tile lies inside the group."""
        shape, turn = self.group.shape, self.turn
        return not any(shape[a] % turn.side for a in (turn.along, turn.across))

    def values(self, at: Point, slots: Sequence[Value]) -> dict[int, Value]:
        """All values that are stored, at one point."""
        known = {n: self.kept(slots, n) for n in self.turn.loads}
        wanted = {s.value for s in self.group.stores}
        return evaluate(at, self.buffers, self.group.body, wanted, known)

    def write(self, at: Point, values: dict[int, Value]) -> None:
        """Stores them."""
        for step in self.group.stores:
            store(at, self.buffers, step, values[step.value])

    def points(
        self, fast: int, slow: int, outer: dict[int, Value], start: dict[int, Value]
    ) -> list[tuple[Point, list[Value]]]:
        """This invocation's points, neighbours along ``fast``; and where each lies in a tile."""
        b, turn, out = self.b, self.turn, list[tuple[Point, list[Value]]]()
        quick = b.scaled(b.local_id(0), turn.lanes)
        for first in range(0, turn.side, _ROWS):
            steady = b.offset(b.local_id(1), first)
            indices = {**outer, fast: b.add(start[fast], quick), slow: b.add(start[slow], steady)}
            at = Point(b, [indices[a] for a in range(len(indices))], fast, turn.lanes)
            lanes = [b.offset(quick, lane) for lane in range(turn.lanes)]
            pitch = self.pitch
            # Tiles are rows along ``across``, one for each index along ``along``.
            if self.is_packed:
                row = self.packed_row(steady)
                slots = [b.add(b.scaled(row, pitch), b.local_id(0))]
            elif fast == turn.across:
                slots = [b.add(b.scaled(steady, pitch), lane) for lane in lanes]
            else:
                slots = [b.add(b.scaled(lane, pitch), steady) for lane in lanes]
            out.append((at, slots))
        return out

    def packed_row(self, across: Value) -> Value:
        """The row of words for an index along ``across``: even ones first, then odd ones."""
        b = self.b
        half = b.binary(BinOp.SHR_L, across, b.index(1))
        odd = b.binary(BinOp.AND, across, b.index(1))
        return b.add(half, b.scaled(odd, self.turn.side // 2))

    def fill_packed(self, outer: dict[int, Value], start: dict[int, Value]) -> None:
        """Fills tiles of words: two vectors of two elements become two words, turned."""
        b, turn = self.b, self.turn
        across = b.add(start[turn.across], b.scaled(b.local_id(0), turn.lanes))
        for first in range(0, turn.side // 2, _ROWS):
            pair = b.offset(b.local_id(1), first)
            along = b.add(start[turn.along], b.scaled(pair, turn.lanes))
            points = [
                self.point(outer, {turn.across: across, turn.along: b.offset(along, lane)})
                for lane in range(turn.lanes)
            ]
            with self.inside(points[0]):
                for number in turn.loads:
                    low, high = (self.halves(at, number) for at in points)
                    for lane in range(turn.lanes):
                        row = b.offset(b.local_id(0), lane * turn.side // 2)
                        upper = b.binary(BinOp.SHL, high[lane], b.const(I32, 16))
                        word = b.binary(BinOp.OR, low[lane], upper)
                        slot = b.add(b.scaled(row, self.pitch), pair)
                        b.store(self.memory[number], slot, word)

    def point(self, outer: dict[int, Value], tiled: dict[int, Value]) -> Point:
        """A point whose lanes lie along ``across``."""
        indices = {**outer, **tiled}
        where = [indices[a] for a in range(len(indices))]
        return Point(self.b, where, self.turn.across, self.turn.lanes)

    def halves(self, at: Point, number: int) -> list[Value]:
        """The bits of the elements that a turned load reads, each in the low half of a word."""
        b, step = self.b, self.group.body[number]
        assert isinstance(step, LoadStep)
        bits = b.bitcast(load(at, self.buffers, step), VecType(I16, at.lanes))
        wide = b.convert(ConvertOp.ZEXT, bits, VecType(I32, at.lanes))
        return [b.extract(wide, lane) for lane in range(at.lanes)]

    @contextmanager
    def inside(self, at: Point) -> Generator[None]:
        """Runs the block where the point lies inside the group."""
        b, tests = self.b, list[Value]()
        for axis in (self.turn.along, self.turn.across):
            if self.group.shape[axis] % self.turn.side:
                limit = b.index(self.group.shape[axis])
                tests.append(b.compare(CmpOp.LT_U, at.indices[axis], limit))
        if not tests:
            yield
            return
        holds = tests[0] if len(tests) == 1 else b.binary(BinOp.AND, *tests)
        with b.branch(holds).then():
            yield

    def keep(self, at: Point, slots: Sequence[Value], number: int) -> None:
        """Puts the elements that a turned load reads into its tile."""
        b, step = self.b, self.group.body[number]
        assert isinstance(step, LoadStep)
        value = _widened(b, load(at, self.buffers, step))
        for lane, slot in enumerate(slots):
            part = b.extract(value, lane) if isinstance(value.type, VecType) else value
            b.store(self.memory[number], slot, part)

    def kept(self, slots: Sequence[Value], number: int) -> Value:
        """The elements of a turned load at a point of the common axis."""
        b, memory, elem = self.b, self.memory[number], self.group.body[number].type
        parts = [b.load(memory, slot) for slot in slots]
        if self.is_packed:
            (word,) = parts
            parts = [word, b.binary(BinOp.SHR_L, word, b.const(I32, 16))]
        value = b.splat(parts[0], len(parts))
        for lane, part in enumerate(parts[1:], start=1):
            value = b.insert(value, part, lane)
        if self.is_packed:
            bits = b.convert(ConvertOp.TRUNC, value, VecType(I16, len(parts)))
            return b.bitcast(bits, VecType(elem, len(parts)))
        return _narrowed(b, value, elem)


def _packs(group: LoopGroup, turn: Turn) -> bool:
    """Whether two elements of every turned load share a word."""
    return turn.lanes == 2 and all(group.body[n].type.bits == 16 for n in turn.loads)


def _held(elem: ScalarType) -> ScalarType:
    """The type in shared memory: words, because 8 and 16 bits need a feature there."""
    if elem.bits >= F32.bits:
        return elem
    return F32 if elem.kind == "float" else I32


def _widened(b: Builder, value: Value) -> Value:
    elem = value.type.elem if isinstance(value.type, VecType) else value.type
    assert isinstance(elem, ScalarType)
    op = ConvertOp.FLOAT if elem.kind == "float" else ConvertOp.ZEXT
    return b.convert(op, value, with_elem(value.type, _held(elem)))


def _narrowed(b: Builder, value: Value, elem: ScalarType) -> Value:
    if elem is I1:
        return b.compare(CmpOp.NE, value, b.const(value.type, 0))
    op = ConvertOp.FLOAT if elem.kind == "float" else ConvertOp.TRUNC
    return b.convert(op, value, with_elem(value.type, elem))
