"""Products with up to eight rows (or columns): every element of the large operand is read once.

An invocation keeps all rows of a few columns of the output in registers and walks part of the sum.
Where the large operand is contiguous along k, the invocations of a team stand side by side along k
(each reads four steps of its columns); where it is contiguous along n, those of a workgroup stand
side by side along n and the members of a team, one step apart, along y. A team adds its sums up by
shuffles inside subgroups, or by halves in shared memory: in the same order in every run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import final

from vkjit.lowering.gpu.gemm_epilogue import (
    buffers_of,
    finish,
    multiply_add,
    number,
    stores_vectors,
    widened,
)
from vkjit.lowering.gpu.gemm_join import MOST_PARTS, split_sum
from vkjit.lowering.gpu.gemm_operand import LONGEST, nbytes_of, read_run
from vkjit.lowering.gpu.gemm_schedule import cores
from vkjit.lowering.gpu.grid import Grid, within
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.types import F32, I32, BinOp, CmpOp, scalar_of
from vkjit.lowering.plan.groups import ContractGroup, LoadStep
from vkjit.lowering.plan.schedule import SkinnySchedule
from vkjit.lowering.target import Target
from vkjit.lowering.templates.body import Point, load
from vkjit.lowering.templates.context import Buffers, Lowered, TemplateContext
from vkjit.lowering.templates.products import swapped
from vkjit.lowering.templates.space import coordinates

MOST_ROWS = 8
"""Rows that an invocation keeps in registers."""
LANES = 4
"""Elements of a vector."""
_UNROLL = 4
"""Vectors of each column that are on their way at a time."""


def upright(group: ContractGroup) -> ContractGroup:
    """The group with at most ``MOST_ROWS`` rows, if it has so few rows or columns."""
    return swapped(group) if group.m > MOST_ROWS >= group.n else group


def contract(
    group: ContractGroup, schedule: SkinnySchedule, context: TemplateContext
) -> list[Lowered]:
    """A workgroup for some columns of all rows, for each batch index and part of the sum."""
    lower = partial(_kernel, schedule, context)
    return split_sum(upright(group), schedule.split_k, context, lower)


def _kernel(
    schedule: SkinnySchedule, context: TemplateContext, group: ContractGroup
) -> list[Lowered]:
    b = Builder("gemm_skinny", context.target.index_type)
    buffers = buffers_of(b, group, context)
    width = schedule.beside * schedule.columns
    blocks = -(-group.n // width)
    grid = Grid(math.prod(group.batch) * blocks, context.target)
    with grid.each(b) as position:
        *batch, block = coordinates(b, position, (*group.batch, blocks))
        rows = _Rows(b, group, schedule, buffers)
        rows.stand(batch, b.scaled(block, width), context.target)
        totals = rows.met(rows.summed())
        with within(b, rows.member, 1, schedule.team):
            rows.write(totals, blocks * width)
    kernel = b.finish(grid.shape, schedule.workgroup, group.origin)
    kernel.subgroup = rows.subgroup
    return [Lowered(kernel, buffers.arrays)]


@final
class _Rows:
    """All rows of a few columns. ``sums[row][i]`` is a vector: of steps, or of columns."""

    def __init__(
        self, b: Builder, group: ContractGroup, schedule: SkinnySchedule, buffers: Buffers
    ) -> None:
        self.b = b
        self.group = group
        self.s = schedule
        self.buffers = buffers
        self.steps = vector_steps(group) if schedule.along_k else 1
        # Vectors of a column at once; above 1 for blocks only: they share a scale.
        self.run = _run(group) if self.steps > 1 else 1
        self.lanes = self.steps if schedule.along_k else schedule.columns
        self.member = b.index(0) if schedule.team == 1 else b.local_id(int(not schedule.along_k))
        self.beside = b.index(0) if schedule.along_k else b.local_id(0)
        self.batch: Sequence[Value] = ()
        self.column: Value = b.index(0)
        self.subgroup: int | None = None

    def stand(self, batch: Sequence[Value], first: Value, target: Target) -> None:
        """Takes this invocation's columns of a workgroup's that begin at column ``first``."""
        b, s = self.b, self.s
        self.batch = batch
        self.column = b.add(first, b.scaled(self.beside, s.columns))
        size = target.subgroup_sizes[0]
        able = target.subgroup_ops and "subgroup_shuffle" in target.features
        if able and s.along_k and self.group.accumulate in (F32, I32) and s.team % size == 0:
            self.subgroup = size

    # -- the sum ----------------------------------------------------------------------------------

    def summed(self) -> list[list[Value]]:
        """This invocation's part of the sums."""
        b, s, group = self.b, self.s, self.group
        zero = b.splat(number(b, group.accumulate, 0), self.lanes)
        columns = s.columns if s.along_k else 1
        flat = [zero] * (group.m * columns)
        stride = s.team * self.steps * self.run
        turn = stride * _UNROLL // self.run
        whole = group.k // turn * turn
        first = b.scaled(self.member, self.steps * self.run)
        if whole:
            with b.loop(b.index(0), b.index(whole), b.index(turn), flat, hint="k") as loop:
                out = list(loop.carried)
                start = b.add(loop.index, first)
                for ahead in range(0, turn, stride):
                    out = self._step(b.offset(start, ahead), out, None)
                loop.yields(*out)
            flat = list(loop.results)
        for start in range(whole, group.k, stride):
            k = b.offset(first, start)
            inside = None
            if start + stride > group.k:
                inside = b.compare(CmpOp.LT_U, k, b.index(group.k))
            flat = self._step(k, flat, inside)
        return [flat[row * columns : (row + 1) * columns] for row in range(group.m)]

    def _step(self, k: Value, sums: list[Value], inside: Value | None) -> list[Value]:
        """The sums after one vector of the large operand for each column, or a run of them."""
        b, s, group = self.b, self.s, self.group
        if inside is not None:
            k = b.select(inside, k, b.index(0))
        if s.along_k:
            places = [self._bounded(b.offset(self.column, c), 1) for c in range(s.columns)]
            columns = [self._along(k, place, inside) for place in places]
        else:
            columns = [[self._beside(k, inside)]]
        for ahead in range(self.run):
            where = b.offset(k, ahead * self.steps)
            ys, out = [column[ahead] for column in columns], list[Value]()
            for row in range(group.m):
                x = self._read(group.lhs, (b.index(row), where), 1 if s.along_k else None, inside)
                mine = sums[row * len(ys) : (row + 1) * len(ys)]
                out += [multiply_add(b, x, y, total) for y, total in zip(ys, mine, strict=True)]
            sums = out
        return sums

    def _along(self, k: Value, column: Value, inside: Value | None) -> list[Value]:
        """A run of vectors of one column."""
        b, rhs = self.b, self.group.rhs
        if self.run == 1:
            return [self._read(rhs, (k, column), 0, inside)]
        start = Point(b, [*self.batch, k, column]).base(rhs.view)
        return [
            self._masked(value, inside)
            for value in read_run(b, self.buffers, rhs, start, self.run * self.steps)
        ]

    def _beside(self, k: Value, inside: Value | None) -> Value:
        """One step of all columns: a vector, or lane by lane where the last one is not whole."""
        b, s, rhs = self.b, self.s, self.group.rhs
        if s.columns == 1 or self.group.n % s.columns == 0:
            return self._read(rhs, (k, self._bounded(self.column, s.columns)), 1, inside)
        columns = [self._bounded(b.offset(self.column, lane), 1) for lane in range(s.columns)]
        return joined(b, [b.extract(self._read(rhs, (k, c), None, inside), 0) for c in columns])

    def _read(
        self, operand: LoadStep, at: tuple[Value, Value], axis: int | None, inside: Value | None
    ) -> Value:
        """A vector of an operand along its matrix axis ``axis``, or one element in every lane."""
        b = self.b
        lanes = 1 if axis is None else self.lanes
        axis = len(self.batch) + (axis or 0)
        point = Point(b, [*self.batch, *at], axis, lanes, aligned=True)
        return self._masked(load(point, self.buffers, operand), inside)

    def _masked(self, value: Value, inside: Value | None) -> Value:
        """What was read in the type of the sums, zeros where it is not ``inside``."""
        b, elem = self.b, self.group.accumulate
        value = b.splat(widened(b, value, elem), self.lanes)
        if inside is None:
            return value
        return b.select(inside, value, b.splat(number(b, elem, 0), self.lanes))

    def _bounded(self, column: Value, lanes: int) -> Value:
        """The column, or the last one that can be read: sums beyond the edge are not used."""
        b, s, n = self.b, self.s, self.group.n
        if n % (s.beside * s.columns) == 0:
            return column
        return b.binary(BinOp.MIN_U, column, b.index(n - lanes))

    # -- adding up --------------------------------------------------------------------------------

    def met(self, sums: list[list[Value]]) -> list[list[Value]]:
        """The sums of the whole team, known at least to its first member."""
        flat = [value for row in sums for value in row]
        columns = len(sums[0])
        if self.s.along_k:
            flat = [self._folded(value) for value in flat]
        if self.subgroup is not None:
            flat = [self._across_lanes(value) for value in flat]
            if self.s.team > self.subgroup:
                flat = self._across_subgroups(flat)
        elif self.s.team > 1:
            flat = self._by_halves(flat)
        return [flat[i : i + columns] for i in range(0, len(flat), columns)]

    def _folded(self, value: Value) -> Value:
        """The sum of the lanes, halves first."""
        b = self.b
        parts = [b.extract(value, i) for i in range(self.steps)] if self.steps > 1 else []
        while len(parts) > 1:
            half = len(parts) // 2
            parts = [b.add(x, y) for x, y in zip(parts[:half], parts[half:], strict=True)]
        return parts[0] if parts else value

    def _across_lanes(self, value: Value) -> Value:
        assert self.subgroup is not None
        distance = 1
        while distance < self.subgroup:
            value = self.b.add(value, self.b.subgroup_shuffle(value, distance))
            distance *= 2
        return value

    def _across_subgroups(self, values: list[Value]) -> list[Value]:
        assert self.subgroup is not None
        b, count = self.b, self.s.team // self.subgroup
        memory = b.scratch("sums", self.group.accumulate, len(values) * count)
        with b.branch(b.compare(CmpOp.EQ, b.lane(), b.index(0))).then():
            for place, value in enumerate(values):
                b.store(memory, b.offset(b.subgroup_id(), place * count), value)
        b.barrier()
        out: list[Value] = []
        for place in range(len(values)):
            parts = [b.load(memory, b.index(place * count + i)) for i in range(count)]
            total = parts[0]
            for part in parts[1:]:
                total = b.add(total, part)
            out.append(total)
        return out

    def _by_halves(self, values: list[Value]) -> list[Value]:
        b, s = self.b, self.s
        lanes = 1 if s.along_k else self.lanes
        side = s.beside * lanes
        memory = b.scratch("sums", scalar_of(values[0].type), len(values) * s.team * side)
        base = b.add(b.scaled(self.member, side), b.scaled(self.beside, lanes))
        slots = [b.offset(base, place * s.team * side) for place in range(len(values))]
        for slot, value in zip(slots, values, strict=True):
            b.store(memory, slot, value)
        half = s.team // 2
        while half:
            b.barrier()
            with b.branch(b.compare(CmpOp.LT_U, self.member, b.index(half))).then():
                for slot in slots:
                    other = b.load(memory, b.offset(slot, half * side), lanes)
                    b.store(memory, slot, b.add(b.load(memory, slot, lanes), other))
            half //= 2
        # Only the first member goes on, with what it has written itself.
        return [b.load(memory, slot, lanes) for slot in slots]

    # -- results ----------------------------------------------------------------------------------

    def write(self, totals: list[list[Value]], reach: int) -> None:
        """Body and stores of this team's columns, those that the product has."""
        b, s, group, buffers = self.b, self.s, self.group, self.buffers
        vectors = s.columns > 1 and stores_vectors(group, s.columns)
        for row, values in enumerate(totals):
            index = [*self.batch, b.index(row)]
            if vectors:
                with within(b, self.column, group.n, reach):
                    point = Point(b, [*index, self.column], len(index), s.columns)
                    finish(point, buffers, group, self._vector(values))
                continue
            for lane in range(s.columns):
                where = b.offset(self.column, lane)
                with within(b, where, group.n, reach):
                    finish(Point(b, [*index, where]), buffers, group, self._lane(values, lane))

    def _vector(self, values: list[Value]) -> Value:
        return joined(self.b, values) if self.s.along_k else values[0]

    def _lane(self, values: list[Value], lane: int) -> Value:
        if self.s.along_k:
            return values[lane]
        return self.b.extract(values[0], lane) if self.s.columns > 1 else values[0]


def joined(b: Builder, values: Sequence[Value]) -> Value:
    """Scalars as the lanes of a vector."""
    vector = b.splat(values[0], len(values))
    for lane, value in enumerate(values[1:], 1):
        vector = b.insert(vector, value, lane)
    return vector


def vector_steps(group: ContractGroup) -> int:
    """Steps of the sum that the large operand gives as one aligned vector."""
    view = group.rhs.view
    others = (*view.strides[:-2], view.strides[-1], view.offset, group.k)
    return LANES if view.strides[-2] == 1 and all(v % LANES == 0 for v in others) else 1


def _run(group: ContractGroup) -> int:
    """Vectors of steps that the large operand gives at once."""
    view = group.rhs.view
    others = (view.strides[-1], *view.strides[:-2], view.offset, group.k)
    whole = group.rhs.blocks is not None and all(v % LONGEST == 0 for v in others)
    return LONGEST // LANES if whole else 1


def vector_columns(group: ContractGroup) -> int:
    """Columns of one step that the large operand gives as one aligned vector."""
    view = group.rhs.view
    others = (*view.strides[:-1], view.offset, group.n)
    return LANES if view.strides[-1] == 1 and all(v % LANES == 0 for v in others) else 1


# -- choice ---------------------------------------------------------------------------------------

_MOST_SUMS = 16
"""Sums (vectors of them) that an invocation keeps in registers."""
_LAUNCH, _JOIN = 5000.0, 12000.0
"""Clocks from kernel to kernel, and for parts that are written and added up."""
_START, _LATENCY = 1500.0, 1300.0
"""Clocks to start and end a workgroup, and for one turn of the loop."""
_MEMORY = 16.0
"""Bytes that a core's share of memory moves in a clock."""


def costs(group: ContractGroup, target: Target) -> dict[SkinnySchedule, float]:
    """The schedules that serve the group on the target, with the clocks they should take."""
    group = upright(group)
    if group.m > MOST_ROWS or 0 in (group.m, group.n):
        return {}
    count = cores(target)
    return {s: _clocks(group, s, count) for s in _able(group, count) if fits(group, s, target)}


def fits(group: ContractGroup, schedule: SkinnySchedule, target: Target) -> bool:
    """Whether the schedule keeps to the limits of the device."""
    x, y, _ = schedule.workgroup
    sums = upright(group).m * schedule.columns * x * y
    return (
        x * y <= target.max_invocations
        and x <= target.max_workgroup[0]
        and y <= target.max_workgroup[1]
        and sums * group.accumulate.bytes <= target.shared_bytes
    )


def _able(group: ContractGroup, count: int) -> Iterator[SkinnySchedule]:
    """Teams along k or along n, whichever way the large operand lies, and parts of the sum."""
    if group.rhs.view.strides[-2] == 1 or group.rhs.view.strides[-1] != 1:
        for team in (32, 64, 128, 256):
            for columns in (1, 2, 4):
                if group.m * columns <= _MOST_SUMS:
                    yield SkinnySchedule(team, columns, 1, along_k=True)
        return
    columns = vector_columns(group)
    for beside in (4, 8, 16, 32):
        for team in (16, 32, 64, 128):
            if 256 <= beside * team <= 1024:
                one = SkinnySchedule(team, columns, beside, along_k=False)
                yield one
                parts = min(count // max(1, _workgroups(group, one)), MOST_PARTS)
                if parts > 1 and group.k >= 4 * parts * team:
                    yield replace(one, split_k=parts)


def _workgroups(group: ContractGroup, s: SkinnySchedule) -> int:
    blocks = -(-group.n // (s.columns * s.beside))
    return math.prod(group.batch) * blocks * s.split_k


def _clocks(group: ContractGroup, s: SkinnySchedule, count: int) -> float:
    """What the product should take: memory, or the turns of one invocation after another."""
    steps = vector_steps(group) if s.along_k else 1
    turns = -(-group.k // (s.split_k * s.team * steps * _UNROLL))
    threads = s.workgroup[0] * s.workgroup[1]
    rounds = max(1.0, _workgroups(group, s) / (count * max(1, min(16, 1024 // threads))))
    busy = rounds * (_START + turns * _LATENCY)
    nbytes = math.prod(group.batch) * group.n * group.k * nbytes_of(group.rhs)
    join = _JOIN if s.split_k > 1 else 0.0
    return max(busy, nbytes / (_MEMORY * count)) + _LAUNCH + join
