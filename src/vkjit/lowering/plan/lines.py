"""Groups that work along one axis of operands in memory: scatters, scans, sorts, inverses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.specs import ScanSpec, ScatterAddSpec, SetRowsSpec, SortSpec
from vkjit.lowering.kernel.types import CmpOp
from vkjit.lowering.kernel.views import dense
from vkjit.lowering.plan.bindings import Bound, Placed
from vkjit.lowering.plan.groups import (
    InverseGroup,
    ScanGroup,
    ScatterAddGroup,
    SetRowsGroup,
    SortGroup,
)
from vkjit.lowering.plan.workspace import Workspace


def scattered(
    space: Workspace, operands: Sequence[Bound], spec: ScatterAddSpec | SetRowsSpec, made: Bound
) -> Placed:
    """The first operand copied to a new array, then updated in place."""
    base, indices, updates = operands
    array = space.new_array(made.type, math.prod(made.shape))
    space.store(base, array, dense(made.shape))
    outer, size, inner = _lines(made, spec.axis)
    count = math.prod(indices.shape)
    kind = ScatterAddGroup if isinstance(spec, ScatterAddSpec) else SetRowsGroup
    group = kind(
        outer=outer,
        size=size,
        inner=inner,
        count=count,
        target=array,
        indices=space.dense_view(indices, (count,)),
        updates=space.dense_view(updates, (outer, count, inner)),
        origin=(space.origin,),
    )
    return Placed(array, dense(made.shape), space.add_group(group))


def scan(space: Workspace, x: Bound, spec: ScanSpec, made: Bound) -> Placed:
    """A running reduction into a new array."""
    array = space.new_array(made.type, math.prod(made.shape))
    outer, length, inner = _lines(x, spec.axis)
    group = ScanGroup(
        outer,
        length,
        inner,
        reverse=spec.reverse,
        rule=spec.rule,
        source=space.dense_view(x, (outer, length, inner)),
        target=array,
        target_type=made.type,
        origin=(space.origin,),
    )
    return Placed(array, dense(made.shape), space.add_group(group))


def sort(space: Workspace, x: Bound, spec: SortSpec, made: Bound) -> Placed:
    """The positions of a sort, in a new array."""
    array = space.new_array(made.type, math.prod(made.shape))
    sizes = _lines(x, spec.axis)
    source = space.dense_view(x, sizes)
    group = SortGroup(*sizes, spec.count, spec.key, source, array, (space.origin,))
    return Placed(array, dense(made.shape), space.add_group(group))


def inverse(space: Workspace, order: Bound, axis: int, shape: tuple[int, ...]) -> Placed:
    """The inverse of an order of some of the positions of an array of ``shape``."""
    array = space.new_array(order.type, math.prod(shape))
    outer, count, inner = _lines(order, axis)
    source = space.dense_view(order, (outer, count, inner))
    group = InverseGroup(outer, shape[axis], inner, count, source, array, (space.origin,))
    return Placed(array, dense(shape), space.add_group(group))


@final
@dataclass(frozen=True, slots=True)
class Inside:
    """A value where its position is below ``count``, else another one."""

    count: int

    def __call__(self, b: Builder, position: Value, value: Value, other: Value) -> Value:
        """The choice."""
        limit = b.const(position.type, self.count)
        return b.select(b.compare(CmpOp.LT, position, limit), value, other)


def _lines(x: Bound, axis: int) -> tuple[int, int, int]:
    """Elements before, along and after ``axis``."""
    return math.prod(x.shape[:axis]), x.shape[axis], math.prod(x.shape[axis + 1 :])
