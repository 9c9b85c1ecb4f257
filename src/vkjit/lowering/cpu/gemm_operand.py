"""Operands of a product: matrices in memory, their panels, and how blocks lie in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import final

from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.types import Memory, ScalarType
from vkjit.lowering.plan.groups import ContractGroup, LoadStep
from vkjit.lowering.plan.schedule import ContractSchedule
from vkjit.lowering.templates.context import Buffers

_BLOCK_LANES = (4, 8, 16)
"""Lanes for which there are decoders of runs and of columns."""


class Layout(Enum):
    """How the numbers of an operand lie."""

    PLAIN = "numbers, at any strides"
    ALONG = "whole blocks along the sum"
    ACROSS = "whole blocks along the outer axis, which is m or n"
    SCATTERED = "numbers of blocks, at any strides"


@final
@dataclass(frozen=True, slots=True)
class Source:
    """An operand as a matrix in memory: ``size`` x ``depth`` from ``base``, strides in numbers.

    ``step`` says of which type they are, and in what blocks.
    """

    memory: Memory
    base: Value
    size: int
    depth: int
    across: int
    along: int
    step: LoadStep
    layout: Layout


@final
@dataclass(frozen=True, slots=True)
class Panel:
    """Where a panel goes: ``width`` x ``count`` values of ``elem`` from ``base`` on."""

    memory: Memory
    base: Value
    width: int
    elem: ScalarType
    lanes: int


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
    layout: Layout

    @property
    def panels(self) -> int:
        """Panels, the last of which may be ragged."""
        return -(-self.size // self.width)

    def source(self, b: Builder, buffers: Buffers, batch: Sequence[Value]) -> Source:
        """The matrix of one batch item."""
        view = self.step.view
        return Source(
            buffers.of(self.step.array),
            dot_product(b, batch, view.strides, view.offset),
            self.size,
            self.depth,
            self.across,
            self.along,
            self.step,
            self.layout,
        )


def operand(group: ContractGroup, schedule: ContractSchedule, name: str, lanes: int) -> Operand:
    """Side ``name`` of the product, "lhs" or "rhs", for vectors of ``lanes``."""
    if name == "lhs":
        size, width, step = group.m, schedule.tile_m, group.lhs
        across, along = step.view.strides[-2:]
    else:
        size, width, step = group.n, schedule.tile_n, group.rhs
        along, across = step.view.strides[-2:]
    layout = _layout(step, (size, across), (group.k, along), lanes)
    return Operand(name, step, size, group.k, width, across, along, layout)


def rhs_layout(group: ContractGroup, lanes: int) -> Layout:
    """How rhs lies, for vectors of ``lanes``."""
    along, across = group.rhs.view.strides[-2:]
    return _layout(group.rhs, (group.n, across), (group.k, along), lanes)


def _layout(step: LoadStep, outer: tuple[int, int], total: tuple[int, int], lanes: int) -> Layout:
    """The layout of an operand from size and stride of its outer axis and of the sum."""
    block = step.blocks
    if block is None:
        return Layout.PLAIN
    lead = (step.view.offset, *step.view.strides[:-2])
    for layout, (length, stride), (_, other) in (
        (Layout.ALONG, total, outer),
        (Layout.ACROSS, outer, total),
    ):
        whole = all(x % block.size == 0 for x in (*lead, other, length))
        if stride == 1 and length and whole and lanes in _BLOCK_LANES:
            return layout
    return Layout.SCATTERED


def dot_product(b: Builder, indices: Sequence[Value], strides: Sequence[int], start: int) -> Value:
    """``start`` plus each index times its stride."""
    total: Value = b.index(start)
    for index, stride in zip(indices, strides, strict=False):
        total = b.add(total, b.scaled(index, stride))
    return total
