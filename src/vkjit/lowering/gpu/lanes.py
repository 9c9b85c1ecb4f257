"""Which axis neighbouring invocations walk, and how many elements of it each takes at once."""

from __future__ import annotations

from collections.abc import Sequence

from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.types import I1
from vkjit.lowering.kernel.views import View
from vkjit.lowering.plan.groups import LoopGroup
from vkjit.lowering.templates.space import coordinates, views_of

_BYTES = 16
"""The widest access of one invocation."""
_LANES = 4
"""The longest vector of SPIR-V without special capabilities."""


def vector_lanes(group: LoopGroup, axis: int) -> int:
    """Elements along ``axis`` that every view reads or writes as one vector; 1 where one does not.

    A view serves whose stride is 1, or 0 (one element for all lanes); the axis must be made of
    whole vectors.
    """
    views = views_of(group.body, group.stores)
    if any(v.strides[axis] not in (0, 1) for v in views):
        return 1
    widest = max((s.type.bytes for s in group.body if s.type is not I1), default=4)
    lanes = min(_LANES, _BYTES // max(widest, 4))
    return lanes if group.shape[axis] % lanes == 0 else 1


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
