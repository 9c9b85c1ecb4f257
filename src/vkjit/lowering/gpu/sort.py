"""Sorts on the GPU: tiles in shared memory, then merges of sorted runs in global memory.

Keys are sorted together with their positions. An invocation sorts a few neighbours in registers;
then runs of the same length are merged in pairs, again and again. A merge is a search for each
element on its own: it moves to the number of elements before it in its own run plus the number of
those of the other run that go before it. Equal elements of the left run go first: the order is
stable. A workgroup sorts several short lines, or a tile of a long one. Where few elements of long
lines are wanted, all others of each tile are left out, until one tile holds what is left of a line.

The method of merging by ranks is that of Satish, Harris and Garland, "Designing Efficient Sorting
Algorithms for Manycore GPUs", IPDPS 2009.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from vkjit.lowering.gpu.grid import Grid, each_item, invocations, power_of_two, within
from vkjit.lowering.gpu.index import index_type
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.specs import KeyRule
from vkjit.lowering.kernel.types import I32, Access, BinOp, CmpOp, ConvertOp, Memory, ScalarType
from vkjit.lowering.kernel.views import dense
from vkjit.lowering.plan.groups import SortGroup, StoreStep
from vkjit.lowering.target import Target
from vkjit.lowering.templates.body import Point, load, store
from vkjit.lowering.templates.context import Buffers, Lowered, TemplateContext
from vkjit.lowering.templates.network import Pair, sorted_pairs
from vkjit.lowering.templates.space import coordinates

_INVOCATIONS = 512
_EACH = 4
"""Elements that one invocation sorts in registers."""
_FEWER = 4
"""A tile has at least so many times the wanted elements, where the others are left out at once."""


def sort(group: SortGroup, context: TemplateContext) -> list[Lowered]:
    """Kernels that select, where few positions are wanted, then sort tiles, then merge runs."""
    if group.outer * group.count * group.inner == 0:
        return []
    return _Sort(group, context).kernels()


@final
@dataclass(frozen=True, slots=True)
class _Runs:
    """Arrays of keys and of positions, dense over (lines, length)."""

    keys: int
    positions: int
    length: int

    def access(self, how: Access) -> dict[int, Access]:
        """Of both arrays."""
        return {self.keys: how, self.positions: how}


@final
@dataclass(frozen=True, slots=True)
class _Tile:
    """What one workgroup sorts: ``size`` invocations with ``each`` neighbouring elements.

    Lines have ``padded`` places, a power of two; ``span`` of them are sorted together.
    """

    size: int
    each: int
    padded: int

    @property
    def places(self) -> int:
        """Places of all invocations."""
        return self.size * self.each

    @property
    def span(self) -> int:
        """Places that become one run."""
        return min(self.padded, self.places)


def _tile(lines: int, length: int, key: KeyRule, target: Target) -> _Tile:
    """As many places as invocations and shared memory allow, and as there are elements for."""
    padded = power_of_two(length)
    wanted = padded * power_of_two(lines)
    room = target.shared_bytes // (key.type.bytes + I32.bytes)
    each = min(_EACH, padded)
    size = invocations(target, min(_INVOCATIONS, max(1, wanted // each)))
    while size * each > room:
        size //= 2
    return _Tile(size, each, padded)


@final
class _Sort:
    """The kernels of one sort."""

    def __init__(self, group: SortGroup, context: TemplateContext) -> None:
        self.group = group
        self.context = context
        self.lines = group.outer * group.inner
        self.write = StoreStep(0, group.target, dense((group.outer, group.count, group.inner)))

    def kernels(self) -> list[Lowered]:
        """All, in order."""
        group, made = self.group, list[Lowered]()
        before, length = None, group.length
        while True:
            tile = _tile(self.lines, length, group.key, self.context.target)
            if tile.span >= length:
                return [*made, _Tiles(self, tile, before, None).kernel()]
            if _FEWER * group.count > tile.places:
                break
            # What is among the first of a line is among the first of its tile.
            whole, rest = divmod(length, tile.places)
            length = whole * group.count + min(rest, group.count)
            after = self.runs(length)
            made.append(_Tiles(self, tile, before, after).kernel())
            before = after
        runs, width = self.runs(length), tile.span
        made.append(_Tiles(self, tile, before, runs).kernel())
        while width < length:
            after = None if 2 * width >= length else self.runs(length)
            made.append(self.merge(width, runs, after))
            runs, width = after or runs, 2 * width
        return made

    def runs(self, length: int) -> _Runs:
        """New arrays between two kernels."""
        keys = self.context.new_array(self.group.key.type, self.lines * length)
        return _Runs(keys, self.context.new_array(I32, self.lines * length), length)

    def buffers(self, b: Builder, before: _Runs | None, after: _Runs | None) -> Buffers:
        """What a kernel reads, and the runs that it writes, or the target after the last."""
        first = {self.group.source.array: Access.READ}
        read = before.access(Access.READ) if before else first
        written = after.access(Access.WRITE) if after else {self.group.target: Access.WRITE}
        return Buffers(b, self.context, read | written)

    def put(
        self,
        b: Builder,
        buffers: Buffers,
        after: _Runs | None,
        what: tuple[Value, Value, Value, Value],
    ) -> None:
        """Writes an element to its place in the runs, or its position to the target."""
        line, place, found, key = what
        if after is not None:
            where = b.add(b.scaled(line, after.length), place)
            b.store(buffers.of(after.keys), where, key)
            b.store(buffers.of(after.positions), where, found)
            return
        outer, inner = coordinates(b, line, (self.group.outer, self.group.inner))
        with within(b, place, self.group.count, self.group.length):
            store(Point(b, [outer, place, inner]), buffers, self.write, found)

    def merge(self, width: int, before: _Runs, after: _Runs | None) -> Lowered:
        """Merges neighbouring runs of ``width`` elements."""
        length = before.length
        b = Builder("sort_merge", index_type(self.context))
        buffers = self.buffers(b, before, after)
        keys, positions = buffers.of(before.keys), buffers.of(before.positions)

        def visit(item: Value) -> None:
            line, position = coordinates(b, item, (self.lines, length))
            start = b.sub(item, position)
            key = b.load(keys, item)
            side = b.binary(BinOp.AND, position, b.index(width))
            first = b.binary(BinOp.AND, position, b.index(-2 * width))
            other = b.sub(b.offset(first, width), side)
            search = _Search(b, keys, b.index(width), side, length)
            steps = b.index(width.bit_length())
            (count,) = search.counts([key], b.add(start, other), other, steps)
            target = b.add(b.sub(position, side), count)
            self.put(b, buffers, after, (line, target, b.load(positions, item), key))

        grid, workgroup = each_item(b, self.lines * length, self.context.target, visit)
        return Lowered(b.finish(grid, workgroup, self.group.origin), buffers.arrays)


@final
class _Tiles:
    """The kernel that sorts every tile of the source, or of what was selected ``before``.

    Only the first elements of each tile go to ``after`` where it is shorter than what is read.
    """

    def __init__(self, work: _Sort, tile: _Tile, before: _Runs | None, after: _Runs | None) -> None:
        self.work = work
        self.group = work.group
        self.tile = tile
        self.before = before
        self.after = after
        self.length = before.length if before else work.group.length
        self.b = Builder("sort_tile", index_type(work.context))
        self.buffers = work.buffers(self.b, before, after)
        self.shared = _Shared(self.b, work.group.key.type, tile)

    def kernel(self) -> Lowered:
        """Reads, sorts, and writes the elements of a tile in each workgroup."""
        b, tile, shared = self.b, self.tile, self.shared
        if tile.padded <= tile.places:
            count = -(-self.work.lines // (tile.places // tile.padded))
        else:
            count = self.work.lines * -(-self.length // tile.places)
        grid = Grid(count, self.work.context.target)
        with grid.each(b) as number:
            for turn in range(tile.each):
                place = b.offset(b.local_id(), turn * tile.size)
                self.read(place, *self.element(number, place))
            shared.sort()
            for turn in range(tile.each):
                place = b.offset(b.local_id(), turn * tile.size)
                line, position, inside = self.element(number, place)
                with b.branch(inside).then():
                    key, found = b.load(shared.keys, place), b.load(shared.positions, place)
                    self.keep(line, position, found, key)
        kernel = b.finish(grid.shape, (tile.size, 1, 1), self.group.origin)
        return Lowered(kernel, self.buffers.arrays)

    def element(self, number: Value, place: Value) -> tuple[Value, Value, Value]:
        """Line and position of a place of a tile, and whether there is such an element."""
        b, tile = self.b, self.tile
        if tile.padded <= tile.places:
            line = b.binary(BinOp.SHR_L, place, b.index(tile.padded.bit_length() - 1))
            line = b.add(b.scaled(number, tile.places // tile.padded), line)
            position = b.binary(BinOp.AND, place, b.index(tile.padded - 1))
        else:
            parts = -(-self.length // tile.places)
            line, part = coordinates(b, number, (self.work.lines, parts))
            position = b.add(b.scaled(part, tile.places), place)
        inside = b.compare(CmpOp.LT_U, position, b.index(self.length))
        is_line = b.compare(CmpOp.LT_U, line, b.index(self.work.lines))
        return line, position, b.binary(BinOp.AND, inside, is_line)

    def read(self, place: Value, line: Value, position: Value, inside: Value) -> None:
        """The key of an element into shared memory; one that comes last where there is none."""
        b, group, buffers = self.b, self.group, self.buffers
        line = b.binary(BinOp.MIN_U, line, b.index(self.work.lines - 1))
        near = b.binary(BinOp.MIN_U, position, b.index(self.length - 1))
        if self.before is None:
            outer, inner = coordinates(b, line, (group.outer, group.inner))
            key = group.key(b, load(Point(b, [outer, near, inner]), buffers, group.source))
            found = b.convert(ConvertOp.TRUNC, position, I32)
        else:
            where = b.add(b.scaled(line, self.length), near)
            key = b.load(buffers.of(self.before.keys), where)
            found = b.load(buffers.of(self.before.positions), where)
        last = b.const(group.key.type, (1 << (group.key.type.bits - 1)) - 1)
        b.store(self.shared.keys, place, b.select(inside, key, last))
        b.store(self.shared.positions, place, found)

    def keep(self, line: Value, position: Value, found: Value, key: Value) -> None:
        """Writes an element, unless it is not among the first ones of its tile."""
        b, count, places = self.b, self.group.count, self.tile.places
        if self.after is None or self.after.length == self.length:
            self.work.put(b, self.buffers, self.after, (line, position, found, key))
            return
        part = b.binary(BinOp.SHR_L, position, b.index(places.bit_length() - 1))
        within_tile = b.binary(BinOp.AND, position, b.index(places - 1))
        kept = b.add(b.scaled(part, count), within_tile)
        with within(b, within_tile, count, places):
            self.work.put(b, self.buffers, self.after, (line, kept, found, key))


@final
class _Search:
    """Counts the elements of one run that go before elements of its neighbour.

    ``side`` is 0 for elements of the left run, whose equals do not go before them, and ``width``
    for those of the right one. ``length`` of the line is given where runs may end early.
    """

    def __init__(
        self, b: Builder, keys: Memory, width: Value, side: Value, length: int | None = None
    ) -> None:
        self.b = b
        self.keys = keys
        self.width = width
        self.is_right = b.compare(CmpOp.NE, side, b.index(0))
        self.length = length

    def counts(
        self, found: Sequence[Value], start: Value, position: Value, steps: Value
    ) -> tuple[Value, ...]:
        """For each key, how many elements of the run at ``start`` go before it.

        ``position`` is where in its line that run starts; ``steps`` the logarithm of the width, and
        one: the last step of 1 is taken twice, as width + 1 counts are possible.
        """
        b = self.b
        with b.loop(b.index(0), steps, carried=[b.index(0)] * len(found), hint="search") as loop:
            half = b.binary(BinOp.SHR_L, self.width, b.offset(loop.index, 1))
            step = b.binary(BinOp.MAX_S, half, b.index(1))
            probe = b.offset(step, -1)
            after = [
                self.advanced(key, count, (start, position, probe, step))
                for key, count in zip(found, loop.carried, strict=True)
            ]
            loop.yields(*after)
        return loop.results

    def advanced(self, key: Value, count: Value, at: tuple[Value, Value, Value, Value]) -> Value:
        """The count after a step."""
        b, (start, position, probe, step) = self.b, at
        ahead = b.add(count, probe)
        exists = None
        if self.length is not None:
            # Where in the run: no farther than to its last element in the line.
            exists = b.compare(CmpOp.LT, b.add(position, ahead), b.index(self.length))
            last = b.sub(b.index(self.length - 1), position)
            ahead = b.binary(BinOp.MIN_S, ahead, last)
        other = b.load(self.keys, b.add(start, ahead))
        equal = b.binary(BinOp.AND, self.is_right, b.compare(CmpOp.EQ, other, key))
        goes = b.binary(BinOp.OR, b.compare(CmpOp.LT, other, key), equal)
        if exists is not None:
            goes = b.binary(BinOp.AND, goes, exists)
        return b.add(count, b.select(goes, step, b.index(0)))


@final
class _Shared:
    """Keys and positions of one tile in shared memory."""

    def __init__(self, b: Builder, elem: ScalarType, tile: _Tile) -> None:
        self.b = b
        self.tile = tile
        self.keys = b.scratch("keys", elem, tile.places)
        self.positions = b.scratch("positions", I32, tile.places)

    def sort(self) -> None:
        """Sorts all spans of the tile; what is read and written around it is in order."""
        b, tile = self.b, self.tile
        b.barrier()
        first = b.scaled(b.local_id(), tile.each)
        places = [b.offset(first, i) for i in range(tile.each)]
        self.put(places, sorted_pairs(b, self.get(places)))
        b.barrier()
        passes = tile.span.bit_length() - tile.each.bit_length()
        with b.loop(b.index(0), b.index(passes), hint="pass") as loop:
            width = b.binary(BinOp.SHL, b.index(tile.each), loop.index)
            side = b.binary(BinOp.AND, first, width)
            block = b.binary(BinOp.AND, first, b.sub(b.index(0), b.scaled(width, 2)))
            other = b.sub(b.add(block, width), side)
            pairs = self.get(places)
            search = _Search(b, self.keys, width, side)
            steps = b.offset(loop.index, tile.each.bit_length())
            counts = search.counts([key for key, _ in pairs], other, other, steps)
            b.barrier()
            moved = [b.add(b.sub(p, side), c) for p, c in zip(places, counts, strict=True)]
            self.put(moved, pairs)
            b.barrier()

    def get(self, places: Sequence[Value]) -> list[Pair]:
        """Keys and positions at some places."""
        b = self.b
        return [(b.load(self.keys, p), b.load(self.positions, p)) for p in places]

    def put(self, places: Sequence[Value], pairs: Sequence[Pair]) -> None:
        """Writes keys and positions."""
        for place, (key, position) in zip(places, pairs, strict=True):
            self.b.store(self.keys, place, key)
            self.b.store(self.positions, place, position)
