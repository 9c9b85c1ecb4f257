"""Operands of a product on matrix units, on their way from global to shared memory.

A tile lies in shared memory as it lies in memory: in rows along the sum, or across it. It is moved
in *units*: eight consecutive elements of 16 bits, so one vector of four words. Rows of shared
memory are a unit longer than the tile's, which keeps the banks of eight rows apart.

An invocation first fetches its units to registers, so that they are under way while the previous
tile is used. There they are as they were in memory; numbers of 32 bits are narrowed, or split, on
the way to shared memory, and numbers in quantized blocks are decoded. Of those an invocation takes
neighbouring units, which share a scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

from vkjit.lowering.gpu.gemm_coop_schedule import (
    UNIT,
    UNIT_WORDS,
    Scheme,
    along_sum,
    pitch,
)
from vkjit.lowering.gpu.gemm_operand import decoding, read_at, read_types, run_of
from vkjit.lowering.gpu.gemm_split import decoded_in_words, parts_in_words, words_of
from vkjit.lowering.gpu.short_vectors import Made, after_reads, reads
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import MatLayout, Value
from vkjit.lowering.kernel.types import (
    F32,
    I32,
    BinOp,
    CmpOp,
    MatType,
    MatUse,
    Type,
    VecType,
)
from vkjit.lowering.plan.groups import ContractGroup, LoadStep
from vkjit.lowering.plan.schedule import CoopSchedule
from vkjit.lowering.templates.context import Buffers
from vkjit.lowering.templates.space import coordinates

_LANES = 4

_Bounds = tuple[tuple[Value, int | None], tuple[Value, int | None]]
"""Row and column of a unit, each with the end that it must be below, if any."""


@final
@dataclass(frozen=True, slots=True)
class _Unit:
    """Where a run of an invocation's units begins: ``ahead`` rows after ``row``, in ``column``.

    ``word`` is its place in shared memory. ``exists`` is None where every invocation has the run.
    """

    row: Value
    column: Value
    ahead: int
    word: Value
    exists: Value | None


@final
class Tile:
    """One operand, the left (``side`` 0) or the right one (1).

    Rows of its tile run along the sum if ``summed``, else across it.
    """

    def __init__(
        self,
        b: Builder,
        group: ContractGroup,
        side: int,
        schedule: CoopSchedule,
        scheme: Scheme,
    ) -> None:
        self.b = b
        self.operand: LoadStep = (group.lhs, group.rhs)[side]
        self.scheme = scheme
        self.k = group.k
        axes = len(group.batch)
        self.size = (group.m, group.n)[side]
        self.block = (schedule.block_m, schedule.block_n)[side]
        self.depth = schedule.block_k
        self._axes = (axes + side, axes + 1 - side)
        free, total = (self.operand.view.strides[a] for a in self._axes)
        self.summed = along_sum(free, total)
        self.rows = self.block if self.summed else self.depth
        self.columns = self.depth if self.summed else self.block
        self.pitch = pitch(self.columns)
        name = ("lhs", "rhs")[side]
        names = (name,) if scheme.parts == 1 else (f"{name}_high", f"{name}_low")
        self.memories = tuple(b.scratch(n, I32, self.rows * self.pitch) for n in names)
        self.run = self._run(schedule.invocations)
        self._reads = read_types(self.operand, self.run * UNIT) if self._decodes else []
        self.units = self._units(schedule.invocations)

    # -- places -----------------------------------------------------------------------------------

    def _run(self, count: int) -> int:
        """Units of a run: more than one where they share a scale and no invocation goes without."""
        blocks = self.operand.blocks
        if blocks is not None:
            for length in (run_of(blocks), run_of(blocks) // 2):
                enough = self.rows * self.columns >= count * length
                if enough and self.columns % length == 0 and self._is_whole(length):
                    return length // UNIT
        return 1

    def _units(self, count: int) -> list[_Unit]:
        """The runs of units of one invocation."""
        b, each = self.b, self.columns // (self.run * UNIT)
        total, local = self.rows * each, b.local_id(0)
        aligned = count % each == 0  # all units in one column: addresses differ by constants
        found: list[_Unit] = []
        row = column = word = local
        for start in range(0, total, count):
            ahead = start // each if aligned else 0
            if start == 0 or not aligned:
                row, column = coordinates(b, b.offset(local, start), (self.rows, each))
                between, along = self.pitch, self.run * UNIT_WORDS
                word = b.add(b.scaled(row, between), b.scaled(column, along))
                column = b.scaled(column, self.run * UNIT)
            exists: Value | None = None
            if start + count > total:
                exists = b.compare(CmpOp.LT_U, b.offset(row, ahead), b.index(self.rows))
            at = b.offset(word, ahead * self.pitch)
            found.append(_Unit(row, column, ahead, at, exists))
        return found

    @property
    def is_whole(self) -> bool:
        """Whether units are read as vectors: always aligned, never across an edge."""
        return self._is_whole(UNIT)

    def _is_whole(self, count: int) -> bool:
        """Whether runs of ``count`` elements are always aligned and never cross an edge."""
        view = self.operand.view
        free, total = self._axes
        along, size = (total, self.k) if self.summed else (free, self.size)
        others = [
            stride for a, stride in enumerate(view.strides) if a != along and view.shape[a] > 1
        ]
        aligned = all(number % count == 0 for number in (size, view.offset, *others))
        return view.strides[along] == 1 and aligned

    @property
    def in_words(self) -> bool:
        """Whether units are already words in registers."""
        return self.operand.type is not F32

    # -- from global memory to registers ----------------------------------------------------------

    @property
    def types(self) -> list[Type]:
        """What ``fetch`` gives: for every unit a vector of words, or two of float32.

        For every run out of blocks what of these is read.
        """
        if self._decodes:
            return self._reads * len(self.units)
        each: list[Type] = [VecType(I32, UNIT_WORDS)]
        if not self.in_words:
            each = [VecType(F32, _LANES)] * 2
        return each * len(self.units)

    def is_inside(self, first: Value, step: Value) -> list[Value]:
        """What holds where the whole tile is inside the operand; nothing where it always is."""
        b = self.b
        ends = ((first, self.block, self.size), (step, self.depth, self.k))
        return [
            b.compare(CmpOp.LE_U, b.offset(start, length), b.index(size))
            for start, length, size in ends
            if size % length
        ]

    def fetch(
        self,
        buffers: Buffers,
        batch: Sequence[Value],
        place: tuple[Value, Value],
        *,
        guarded: bool,
    ) -> list[Value]:
        """This invocation's units of the tile at a ``place`` along m (or n) and along the sum.

        Beyond the edges there are zeros, if ``guarded``.
        """
        read = self._gathered
        if self.is_whole:
            read = self._packed if self._decodes else self._whole
        found: list[Value] = []
        for where, bounds in self._places(batch, place, guarded=guarded):
            found += read(buffers, where, bounds)
        return found

    def _places(
        self, batch: Sequence[Value], place: tuple[Value, Value], *, guarded: bool
    ) -> Iterator[tuple[Value, _Bounds]]:
        """Where in memory each run of this invocation begins, and what tells whether it is there.

        To be used before the next one is asked for.
        """
        b, view = self.b, self.operand.view
        start = b.index(view.offset)
        for index, stride in zip(batch, view.strides, strict=False):
            start = b.add(start, b.scaled(index, stride))
        begin = place if self.summed else (place[1], place[0])
        ends = self._ends(guarded=guarded)
        between, along = self._strides()
        row = column = base = start
        for unit in self.units:
            if unit.ahead == 0:
                row, column = b.add(begin[0], unit.row), b.add(begin[1], unit.column)
                base = b.add(b.add(start, b.scaled(row, between)), b.scaled(column, along))
            where = b.offset(base, unit.ahead * between)
            yield where, ((b.offset(row, unit.ahead), ends[0]), (column, ends[1]))

    def _ends(self, *, guarded: bool) -> tuple[int | None, int | None]:
        """Ends of rows and of columns, where the units may reach beyond them."""
        free = self.size if guarded and self.size % self.block else None
        total = self.k if guarded and self.k % self.depth else None
        ends = (free, total) if self.summed else (total, free)
        if any(unit.exists is not None for unit in self.units):
            return (self.size if self.summed else self.k), ends[1]
        return ends

    def _strides(self) -> tuple[int, int]:
        """Distances in memory from row to row, and along a row."""
        free, total = (self.operand.view.strides[a] for a in self._axes)
        return (free, total) if self.summed else (total, free)

    def _inside(self, bounds: _Bounds) -> Value | None:
        """Whether a run is inside; None if it always is."""
        b = self.b
        inside: Value | None = None
        for value, end in bounds:
            if end is not None:
                is_in = b.compare(CmpOp.LT_U, value, b.index(end))
                inside = is_in if inside is None else b.binary(BinOp.AND, inside, is_in)
        return inside

    def _whole(self, buffers: Buffers, where: Value, bounds: _Bounds) -> list[Value]:
        """One unit by vectors."""
        b, buffer, inside = self.b, buffers.of(self.operand.array), self._inside(bounds)
        if inside is not None:
            where = b.select(inside, where, b.index(0))  # somewhere: what is read is not used
        if not self.in_words:
            values = [b.load(buffer, b.offset(where, at), _LANES) for at in (0, _LANES)]
        else:
            values = [b.load_words(buffer, where, UNIT_WORDS)]
        if inside is None:
            return values
        return [b.select(inside, value, _zeros(b, value)) for value in values]

    @property
    def _decodes(self) -> bool:
        """Whether units are decoded from blocks on the way to shared memory."""
        return self.operand.blocks is not None and self.is_whole

    def _packed(self, buffers: Buffers, where: Value, bounds: _Bounds) -> list[Value]:
        """What a run out of blocks is decoded from."""
        made, _ = self._decoding(buffers, where, bounds)
        return reads(self.b, made)

    def _decoding(
        self, buffers: Buffers, where: Value, bounds: _Bounds
    ) -> tuple[Made, Value | None]:
        """What decodes a run, and whether that is inside; None if it always is."""
        b, inside = self.b, self._inside(bounds)
        if inside is not None:
            where = b.select(inside, where, b.index(0))
        return decoding(buffers, self.operand, where, self.run * UNIT), inside

    def _decoded(
        self, buffers: Buffers, where: Value, bounds: _Bounds, values: Sequence[Value]
    ) -> list[Value]:
        """A run as ``types`` are without blocks, from what ``_packed`` has read of it."""
        b = self.b
        made, inside = self._decoding(buffers, where, bounds)
        found = after_reads(b, made, values)
        if self.in_words:
            pairs = zip(found[::2], found[1::2], strict=True)
            found = [decoded_in_words(b, pair, self.scheme) for pair in pairs]
        if inside is None:
            return found
        return [b.select(inside, value, _zeros(b, value)) for value in found]

    def _gathered(self, buffers: Buffers, where: Value, bounds: _Bounds) -> list[Value]:
        """One unit element by element, through any strides."""
        b, ((row, row_end), (column, column_end)) = self.b, bounds
        _, along = self._strides()
        found: list[Value] = []
        for at in (0, _LANES):
            mask: Value | None = None
            if column_end is not None:
                lanes = b.add(b.splat(b.offset(column, at), _LANES), b.iota(_LANES))
                mask = b.compare(CmpOp.LT_U, lanes, b.splat(b.index(column_end), _LANES))
            if row_end is not None:
                is_in = b.splat(b.compare(CmpOp.LT_U, row, b.index(row_end)), _LANES)
                mask = is_in if mask is None else b.binary(BinOp.AND, mask, is_in)
            lanes = b.splat(b.offset(where, at * along), _LANES)
            lanes = b.add(lanes, b.iota(_LANES, along)) if along else lanes
            found.append(read_at(b, buffers, self.operand, lanes, mask))
        if not self.in_words:
            return found
        return [words_of(b, (found[0], found[1]))]

    # -- from registers to shared memory ----------------------------------------------------------

    def put(
        self,
        values: Sequence[Value],
        buffers: Buffers,
        batch: Sequence[Value],
        place: tuple[Value, Value],
    ) -> None:
        """Writes units that were fetched at ``place`` to shared memory."""
        b, each = self.b, len(values) // len(self.units)
        runs = [values[at : at + each] for at in range(0, len(values), each)]
        if self._decodes:
            places = self._places(batch, place, guarded=True)
            runs = [self._decoded(buffers, *at, run) for run, at in zip(runs, places, strict=True)]
        for unit, run in zip(self.units, runs, strict=True):
            if unit.exists is None:
                self._store(unit, run)
            else:
                with b.branch(unit.exists).then():
                    self._store(unit, run)

    def _store(self, unit: _Unit, run: Sequence[Value]) -> None:
        each = len(run) // self.run
        for place in range(self.run):
            where = self.b.offset(unit.word, place * UNIT_WORDS)
            parts = self._parts(run[place * each : (place + 1) * each])
            for memory, words in zip(self.memories, parts, strict=True):
                self.b.store(memory, where, words)

    def _parts(self, values: Sequence[Value]) -> list[Value]:
        """A fetched unit as words, one vector of them for each memory."""
        if len(values) == 1:
            return list(values)
        return list(parts_in_words(self.b, (values[0], values[1]), self.scheme))

    # -- from shared memory to fragments ----------------------------------------------------------

    def fragment(self, part: int, free: Value, step: int, type_: MatType) -> Value:
        """The fragment at ``free`` words along m (or n) of the tile and ``step`` along the sum.

        Args:
            part: of the operand, 0 or 1.
            free: its place along m (or n), from ``place``.
            step: its first step of the sum.
            type_: of the fragment.
        """
        b = self.b
        where = b.offset(free, step // 2 if self.summed else step * self.pitch)
        rows_are_free = type_.use is MatUse.A
        layout = MatLayout.ROW if rows_are_free == self.summed else MatLayout.COLUMN
        return b.mat_load(self.memories[part], where, b.index(self.pitch), layout, type_)

    def place(self, subgroup: Value, span: int, at: int) -> Value:
        """Words from the start of the tile to element ``subgroup * span + at`` along m (or n)."""
        b = self.b
        if self.summed:
            return b.offset(b.scaled(subgroup, span * self.pitch), at * self.pitch)
        return b.offset(b.scaled(subgroup, span // 2), at // 2)


def _zeros(b: Builder, like: Value) -> Value:
    type_ = like.type
    assert isinstance(type_, VecType)
    return b.const(type_, 0.0 if type_.elem.kind == "float" else 0)
