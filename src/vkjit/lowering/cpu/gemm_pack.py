"""Packing: an operand copied into panels, so that a register tile reads it consecutively.

A panel holds ``width`` indices of the outer axis (m or n) for a run of k: element (i, k) stands at
``k * width + i``. Indices beyond the operand repeat its last one or are zero; no tile stores what
they give.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from vkjit.lowering.cpu.gemm_micro import prefix, widened
from vkjit.lowering.cpu.tasks import share, task_count
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.types import Access, BinOp, Memory, ScalarType
from vkjit.lowering.kernel.views import dense_strides
from vkjit.lowering.plan.groups import ContractGroup, LoadStep
from vkjit.lowering.plan.schedule import ContractSchedule
from vkjit.lowering.templates.context import Buffers, Lowered, TemplateContext
from vkjit.lowering.templates.space import coordinates


@final
@dataclass(frozen=True, slots=True)
class Source:
    """An operand as a matrix in memory: ``size`` x ``depth`` from ``base``, strides in elements."""

    memory: Memory
    base: Value
    size: int
    depth: int
    across: int
    along: int


@final
@dataclass(frozen=True, slots=True)
class Panel:
    """Where a panel goes: ``width`` x ``count`` values of ``elem`` from ``base`` on."""

    memory: Memory
    base: Value
    width: int
    elem: ScalarType
    lanes: int


def pack(
    b: Builder, source: Source, panel: Panel, first: Value, steps: tuple[Value, Value | int]
) -> None:
    """Copies indices from ``first`` on, for ``steps[1]`` steps of the sum from ``steps[0]`` on.

    A count of steps that is not the whole depth must be at least one vector.
    """
    if source.along == 1 and source.across != 1 and panel.lanes > 1:
        _transposed(b, source, panel, first, steps)
    else:
        _copied(b, source, panel, first, steps)


def _copied(
    b: Builder, source: Source, panel: Panel, first: Value, steps: tuple[Value, Value | int]
) -> None:
    """Vectors along the outer axis, consecutive or gathered, one k after the other."""
    start, count = steps
    lanes = panel.lanes
    parts: list[tuple[int, Value, Value | None, Value | None]] = []
    for at in range(0, panel.width, lanes):
        index = b.offset(first, at)
        read = write = None
        if at + lanes > panel.width:
            write = prefix(b, b.index(panel.width - at), lanes)
        if source.size % panel.width or write is not None:
            read = prefix(b, b.sub(b.index(source.size), index), lanes)
        where = b.scaled(index, source.across)
        if source.across != 1:
            where = b.add(b.splat(where, lanes), b.iota(lanes, source.across))
        parts.append((at, where, read, write))
    with b.loop(b.index(0), _value(b, count), hint="k") as loop:
        moved = b.add(source.base, b.scaled(b.add(start, loop.index), source.along))
        target = b.add(panel.base, b.scaled(loop.index, panel.width))
        for at, where, read, write in parts:
            address = b.add(where, moved if source.across == 1 else b.splat(moved, lanes))
            value = widened(b, b.load(source.memory, address, lanes, read), panel.elem)
            b.store(panel.memory, b.offset(target, at), value, write)


def _transposed(
    b: Builder, source: Source, panel: Panel, first: Value, steps: tuple[Value, Value | int]
) -> None:
    """Blocks of ``lanes`` x ``lanes``, read along k and turned in registers.

    The last block overlaps the one before it, so that none is ragged.
    """
    start, count = steps
    lanes = panel.lanes
    short = source.depth < lanes
    read = prefix(b, b.index(source.depth), lanes) if short else None
    with b.loop(b.index(0), b.index(panel.width), b.index(lanes), hint="i") as group:
        index = b.add(first, group.index)
        rows = [_row(b, source, panel, b.offset(index, i)) for i in range(lanes)]
        write = None
        if panel.width % lanes:
            write = prefix(b, b.sub(b.index(panel.width), group.index), lanes)
        with b.loop(b.index(0), _value(b, count), b.index(lanes), hint="k") as loop:
            k = loop.index
            if not short and (not isinstance(count, int) or count % lanes):
                k = b.binary(BinOp.MIN_S, k, b.offset(_value(b, count), -lanes))
            moved = b.add(start, k)
            loaded = [b.load(source.memory, b.add(row, moved), lanes, read) for row in rows]
            columns = transpose(b, [widened(b, x, panel.elem) for x in loaded])
            target = b.add(panel.base, b.add(b.scaled(k, panel.width), group.index))
            for j, column in enumerate(columns[: source.depth] if short else columns):
                b.store(panel.memory, b.offset(target, j * panel.width), column, write)


def _row(b: Builder, source: Source, panel: Panel, index: Value) -> Value:
    """Address of an index at k = 0; beyond the end, of the last one."""
    if source.size % panel.width or panel.width % panel.lanes:
        index = b.binary(BinOp.MIN_S, index, b.index(source.size - 1))
    return b.add(source.base, b.scaled(index, source.across))


def transpose(b: Builder, rows: list[Value]) -> list[Value]:
    """The columns of a square block of vectors; the number of lanes is a power of two.

    Eklundh's method: for each bit of the lane number, pairs of vectors swap the lanes where they
    differ in that bit.
    """
    lanes = len(rows)
    block = list(rows)
    bit = 1
    while bit < lanes:
        low = [lanes + (at ^ bit) if at & bit else at for at in range(lanes)]
        high = [lanes + at if at & bit else at ^ bit for at in range(lanes)]
        for i in range(lanes):
            if not i & bit:
                x, y = block[i], block[i | bit]
                block[i], block[i | bit] = b.shuffle(x, y, low), b.shuffle(x, y, high)
        bit *= 2
    return block


def _value(b: Builder, count: Value | int) -> Value:
    return b.index(count) if isinstance(count, int) else count


@final
@dataclass(frozen=True, slots=True)
class Operand:
    """One side of a product: its memory, and the panels of ``width`` that divide its outer axis."""

    name: str
    step: LoadStep
    size: int
    depth: int
    width: int
    across: int
    along: int

    @property
    def panels(self) -> int:
        """Panels, the last of which may be ragged."""
        return -(-self.size // self.width)

    def source(self, b: Builder, buffers: Buffers, batch: Sequence[Value]) -> Source:
        """The matrix of one batch item."""
        view = self.step.view
        base = _dot_product(b, batch, view.strides, view.offset)
        memory = buffers.of(self.step.array)
        return Source(memory, base, self.size, self.depth, self.across, self.along)


def operand(group: ContractGroup, schedule: ContractSchedule, name: str) -> Operand:
    """Side ``name`` of the product, "lhs" or "rhs"."""
    if name == "lhs":
        across, along = group.lhs.view.strides[-2:]
        return Operand(name, group.lhs, group.m, group.k, schedule.tile_m, across, along)
    along, across = group.rhs.view.strides[-2:]
    return Operand(name, group.rhs, group.n, group.k, schedule.tile_n, across, along)


@final
@dataclass(frozen=True, slots=True)
class Packed:
    """An operand packed whole; batch items that share it have stride 0."""

    array: int
    strides: tuple[int, ...]

    def item(self, b: Builder, buffers: Buffers, batch: Sequence[Value]) -> tuple[Memory, Value]:
        """Memory and first element of the panels of one batch item."""
        return buffers.of(self.array), _dot_product(b, batch, self.strides, 0)


def pack_kernel(
    group: ContractGroup, side: Operand, context: TemplateContext
) -> tuple[Lowered, Packed]:
    """The kernel that packs one operand whole, each panel once, in parallel."""
    target, elem = context.target, group.accumulate
    own = [n if s else 1 for n, s in zip(group.batch, side.step.view.strides, strict=False)]
    size = side.width * group.k
    items = math.prod(own) * side.panels
    array = context.new_array(elem, items * size)
    b = Builder("pack", target.index_type)
    buffers = Buffers(b, context, {side.step.array: Access.READ, array: Access.WRITE})
    tasks = task_count(items, items * size, target)
    lanes = max(1, target.vector_bytes // elem.bytes)
    with share(b, items, tasks) as item:
        *batch, number = coordinates(b, item, [*own, side.panels])
        source = side.source(b, buffers, batch)
        panel = Panel(buffers.of(array), b.scaled(item, size), side.width, elem, lanes)
        pack(b, source, panel, b.scaled(number, side.width), (b.index(0), group.k))
    kernel = b.finish((tasks, 1, 1), origin=group.origin)
    dense = dense_strides([*own, side.panels * size])[:-1]
    strides = tuple(s if n > 1 else 0 for n, s in zip(own, dense, strict=True))
    return Lowered(kernel, buffers.arrays), Packed(array, strides)


def _dot_product(b: Builder, indices: Sequence[Value], strides: Sequence[int], start: int) -> Value:
    total: Value = b.index(start)
    for index, stride in zip(indices, strides, strict=False):
        total = b.add(total, b.scaled(index, stride))
    return total
