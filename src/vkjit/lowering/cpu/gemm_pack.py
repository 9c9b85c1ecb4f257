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

from vkjit.lowering.cpu.gemm_blocks import PIECE, transpose
from vkjit.lowering.cpu.gemm_micro import prefix
from vkjit.lowering.cpu.gemm_operand import Layout, Operand, Panel, Source, dot_product
from vkjit.lowering.cpu.gemm_schedule import vector_lanes
from vkjit.lowering.cpu.gemm_unpack import (
    BlockRows,
    Numbers,
    numbers_at,
    numbers_from,
    turned_rows,
    widened,
)
from vkjit.lowering.cpu.tasks import share, task_count
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.types import Access, BinOp, Memory
from vkjit.lowering.kernel.views import dense_strides
from vkjit.lowering.plan.groups import ContractGroup
from vkjit.lowering.templates.context import Buffers, Lowered, TemplateContext
from vkjit.lowering.templates.space import coordinates


def pack(
    b: Builder, source: Source, panel: Panel, first: Value, steps: tuple[Value, Value | int]
) -> None:
    """Copies indices from ``first`` on, for ``steps[1]`` steps of the sum from ``steps[0]`` on.

    A count of steps that is not the whole depth must be at least one vector, and whole blocks where
    those lie along the sum.
    """
    if source.layout is Layout.ALONG:
        _unpacked(b, source, panel, first, steps)
    elif (
        source.layout is Layout.ACROSS and panel.width % PIECE == 0 and panel.lanes <= source.depth
    ):
        _unpacked_rows(b, source, panel, first, steps)
    elif source.layout is Layout.ACROSS:
        _unpacked_runs(b, source, panel, first, steps)
    elif source.layout is Layout.SCATTERED:
        _picked(b, source, panel, first, steps)
    elif source.along == 1 and source.across != 1 and panel.lanes > 1:
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


def _unpacked(
    b: Builder, source: Source, panel: Panel, first: Value, steps: tuple[Value, Value | int]
) -> None:
    """Blocks along the sum: vectors across the rows, block by block."""
    start, count = steps
    lanes = panel.lanes
    with b.loop(b.index(0), b.index(panel.width), b.index(lanes), hint="i") as group:
        write = None
        if panel.width % lanes:
            write = prefix(b, b.sub(b.index(panel.width), group.index), lanes)
        ragged = source.size % panel.width != 0 or write is not None
        rows = BlockRows(b, source, b.add(first, group.index), lanes, ragged=ragged)
        target = b.add(panel.base, group.index)

        def kept(
            numbers: Numbers, _none: Sequence[Value], write: Value | None = write
        ) -> Sequence[Value]:
            for k, number in numbers:
                b.store(panel.memory, b.add(target, b.scaled(k, panel.width)), number, write)
            return ()

        rows.swept((start, _value(b, count)), panel.elem, (), kept)


def _unpacked_rows(
    b: Builder, source: Source, panel: Panel, first: Value, steps: tuple[Value, Value | int]
) -> None:
    """Blocks along the outer axis: pieces of as many rows as lanes, decoded across and turned.

    The last rows overlap those before them, so that none is ragged.
    """
    start, count = steps
    lanes = panel.lanes
    with b.loop(b.index(0), _value(b, count), b.index(lanes), hint="k") as loop:
        k = loop.index
        if not isinstance(count, int) or count % lanes:
            k = b.binary(BinOp.MIN_S, k, b.offset(_value(b, count), -lanes))
        target = b.add(panel.base, b.scaled(k, panel.width))
        for at in range(0, panel.width, PIECE):
            column = b.offset(first, at)
            if source.size % panel.width:
                column = b.binary(BinOp.MIN_S, column, b.index(source.size - PIECE))
            place = b.add(start, k), column
            vectors = turned_rows(b, source, place, lanes, panel.elem)
            for part, rows in enumerate(vectors):
                for i, row in enumerate(rows):
                    b.store(
                        panel.memory, b.offset(target, i * panel.width + at + part * lanes), row
                    )


def _unpacked_runs(
    b: Builder, source: Source, panel: Panel, first: Value, steps: tuple[Value, Value | int]
) -> None:
    """Blocks along the outer axis: runs of a row, one k after the other.

    A run beyond the end reads the last one again.
    """
    start, count = steps
    lanes = panel.lanes
    parts: list[tuple[int, Value, Value | None]] = []
    for at in range(0, panel.width, lanes):
        index = b.offset(first, at)
        if source.size % panel.width:
            index = b.binary(BinOp.MIN_S, index, b.index(source.size - lanes))
        write = None
        if at + lanes > panel.width:
            write = prefix(b, b.index(panel.width - at), lanes)
        parts.append((at, index, write))
    with b.loop(b.index(0), _value(b, count), hint="k") as loop:
        moved = b.add(source.base, b.scaled(b.add(start, loop.index), source.along))
        target = b.add(panel.base, b.scaled(loop.index, panel.width))
        for at, index, write in parts:
            number = numbers_from(b, source.memory, source.step, b.add(moved, index), lanes)
            b.store(panel.memory, b.offset(target, at), widened(b, number, panel.elem), write)


def _picked(
    b: Builder, source: Source, panel: Panel, first: Value, steps: tuple[Value, Value | int]
) -> None:
    """Numbers of blocks one by one; the last index of the operand stands for those beyond it."""
    start, count = steps
    lanes = panel.lanes
    parts: list[tuple[int, Value, Value | None]] = []
    for at in range(0, panel.width, lanes):
        index = b.offset(first, at)
        if lanes > 1:
            index = b.add(b.splat(index, lanes), b.iota(lanes))
        index = b.binary(BinOp.MIN_S, index, b.const(index.type, source.size - 1))
        write = None
        if at + lanes > panel.width:
            write = prefix(b, b.index(panel.width - at), lanes)
        parts.append((at, b.scaled(index, source.across), write))
    with b.loop(b.index(0), _value(b, count), hint="k") as loop:
        moved = b.add(source.base, b.scaled(b.add(start, loop.index), source.along))
        target = b.add(panel.base, b.scaled(loop.index, panel.width))
        for at, where, write in parts:
            number = numbers_at(b, source.memory, source.step, b.add(where, b.splat(moved, lanes)))
            b.store(panel.memory, b.offset(target, at), widened(b, number, panel.elem), write)


def _value(b: Builder, count: Value | int) -> Value:
    return b.index(count) if isinstance(count, int) else count


@final
@dataclass(frozen=True, slots=True)
class Packed:
    """An operand packed whole; batch items that share it have stride 0."""

    array: int
    strides: tuple[int, ...]

    def item(self, b: Builder, buffers: Buffers, batch: Sequence[Value]) -> tuple[Memory, Value]:
        """Memory and first element of the panels of one batch item."""
        return buffers.of(self.array), dot_product(b, batch, self.strides, 0)


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
    lanes = vector_lanes(group, target)
    with share(b, items, tasks) as item:
        *batch, number = coordinates(b, item, [*own, side.panels])
        source = side.source(b, buffers, batch)
        panel = Panel(buffers.of(array), b.scaled(item, size), side.width, elem, lanes)
        pack(b, source, panel, b.scaled(number, side.width), (b.index(0), group.k))
    kernel = b.finish((tasks, 1, 1), origin=group.origin)
    dense = dense_strides([*own, side.panels * size])[:-1]
    strides = tuple(s if n > 1 else 0 for n, s in zip(own, dense, strict=True))
    return Lowered(kernel, buffers.arrays), Packed(array, strides)
