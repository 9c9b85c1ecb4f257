"""Groups that touch a part of an array, as groups of an array that is only that part.

Layers whose weights are slices of one array, and pieces of a concatenation, differ in where they
read and write. Where the part begins is then the business of the plan, and their kernels are one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

from vkjit.blocks import BlockType
from vkjit.lowering.kernel.elements import memory_type
from vkjit.lowering.kernel.views import View
from vkjit.lowering.plan.groups import (
    IOTA,
    ArrayInfo,
    ContractGroup,
    GatherStep,
    Group,
    LoadStep,
    LoopGroup,
    StoreStep,
    reads,
)


@final
@dataclass(frozen=True, slots=True)
class Part:
    """Elements ``start`` to ``start + length`` - 1 of an array."""

    start: int
    length: int


def rebased(
    group: Group, infos: Sequence[ArrayInfo], alignment: int
) -> tuple[Group, tuple[Part, ...]]:
    """``group`` on the parts of its arrays that it touches, and what parts these are.

    Args:
        group: canonical.
        infos: its arrays.
        alignment: parts begin at multiples of so many bytes.
    """
    whole = tuple([Part(0, info.length) for info in infos])
    if not isinstance(group, (LoopGroup, ContractGroup)):
        return group, whole
    extents = _extents(group)
    whole_blocks = {s.array: (_units(s.blocks),) for s in reads(group) if s.blocks is not None}
    parts = list(whole)
    for array, (low, high) in extents.items():
        info = infos[array]
        step = max(alignment // memory_type(info.elem).bytes, 1)
        step = math.lcm(step, *whole_blocks.get(array, ()))
        start = low // step * step
        parts[array] = Part(start, high + 1 - start)
    if tuple(parts) == whole:
        return group, whole
    return _moved(group, parts), tuple(parts)


def _extents(group: LoopGroup | ContractGroup) -> dict[int, tuple[int, int]]:
    """The first and the last element that each array is read or written at."""
    found: dict[int, tuple[int, int]] = {}
    for step in (*group.stores, *reads(group)):
        if step.array == IOTA or not step.view.size:
            continue
        reach = (step.size - 1) * step.stride if isinstance(step, GatherStep) else 0
        spans = [(n - 1) * s for n, s in zip(step.view.shape, step.view.strides, strict=True)]
        low = step.view.offset + sum(min(s, 0) for s in (*spans, reach))
        high = step.view.offset + sum(max(s, 0) for s in (*spans, reach))
        block = None if isinstance(step, StoreStep) else step.blocks
        if block is not None:
            low, high = low // block.size, high // block.size
            low, high = low * _units(block), (high + 1) * _units(block) - 1
        before = found.get(step.array, (low, high))
        found[step.array] = min(low, before[0]), max(high, before[1])
    return found


def _units(block: BlockType) -> int:
    """Elements of an array that one block takes."""
    return block.nbytes // block.unit


def _moved(group: LoopGroup | ContractGroup, parts: Sequence[Part]) -> Group:
    def view(array: int, of: View, block: BlockType | None = None) -> View:
        start = 0 if array == IOTA else parts[array].start
        if block is not None:
            start = start // _units(block) * block.size
        return View(of.shape, of.strides, of.offset - start) if start and of.size else of

    def load(step: LoadStep) -> LoadStep:
        return replace(step, view=view(step.array, step.view, step.blocks))

    body = tuple(
        replace(s, view=view(s.array, s.view, s.blocks))
        if isinstance(s, (LoadStep, GatherStep))
        else s
        for s in group.body
    )
    stores = tuple(replace(s, view=view(s.array, s.view)) for s in group.stores)
    if isinstance(group, LoopGroup):
        return replace(group, body=body, stores=stores)
    return replace(group, lhs=load(group.lhs), rhs=load(group.rhs), body=body, stores=stores)
