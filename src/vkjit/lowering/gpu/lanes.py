"""Which axis neighbouring invocations walk, and how many elements of it each takes at once."""

from __future__ import annotations

from collections.abc import Sequence

from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.elements import memory_type
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.types import I1, ScalarType
from vkjit.lowering.kernel.views import View
from vkjit.lowering.plan.groups import (
    IOTA,
    GatherStep,
    LoadStep,
    LoopGroup,
)
from vkjit.lowering.templates.context import TemplateContext
from vkjit.lowering.templates.space import coordinates, views_of

BYTES = 16
"""The widest access of one invocation."""
LANES = 4
"""The longest vector of SPIR-V without special capabilities."""


def vector_lanes(group: LoopGroup, axis: int) -> int:
    """Elements along ``axis`` that every view reads or writes as one vector; 1 where one does not.

    A view serves whose stride is 1, or 0 (one element for all lanes); the axis must be made of
    whole vectors.
    """
    lanes = widest_lanes(group, axis)
    return lanes if group.shape[axis] % lanes == 0 else 1


def widest_lanes(group: LoopGroup, axis: int) -> int:
    """``vector_lanes`` of a group whose axis need not be made of whole vectors."""
    views = views_of(group.body, group.stores)
    if any(v.strides[axis] not in (0, 1) for v in views):
        return 1
    widest = max((s.type.bytes for s in group.body if s.type is not I1), default=4)
    return min(LANES, BYTES // max(widest, 4))


def aligned(group: LoopGroup, axis: int, lanes: int) -> bool:
    """Whether vectors along ``axis`` start at multiples of ``lanes`` in every array."""
    return all(
        v.offset % lanes == 0 and all(s % lanes == 0 for a, s in enumerate(v.strides) if a != axis)
        for v in views_of(group.body, group.stores)
        if v.strides[axis] == 1
    )


def vectors_at_once(group: LoopGroup, lanes: int, context: TemplateContext) -> int:
    """Vectors that one invocation takes so that its widest access is about 16 bytes."""
    widest = max((t.bytes for t in stored_types(group, context)), default=4)
    return max(1, min(4, BYTES // (widest * lanes)))


def stored_types(group: LoopGroup, context: TemplateContext) -> list[ScalarType]:
    """Element types in memory of everything a group reads or writes."""
    arrays = [
        s.array for s in group.body if isinstance(s, (LoadStep, GatherStep)) and s.array != IOTA
    ] + [s.array for s in group.stores]
    return [memory_type(context.arrays[a].elem) for a in arrays]


def spread(b: Builder, linear: Value, shape: Sequence[int], axis: int, lanes: int) -> list[Value]:
    """Indices along ``shape`` for invocation ``linear``: neighbours are neighbours along ``axis``.

    Every invocation has ``lanes`` elements of that axis; the index is that of the first.
    """
    others = [a for a in range(len(shape)) if a != axis]
    found = coordinates(b, linear, [*[shape[a] for a in others], shape[axis] // lanes])
    indices = dict(zip(others, found, strict=False))
    indices[axis] = b.scaled(found[-1], lanes)
    return [indices[a] for a in range(len(shape))]


def contiguous(views: Sequence[View], axis: int) -> int:
    """How many views have neighbouring elements along ``axis``."""
    return sum(v.strides[axis] == 1 for v in views)
