"""Groups that work along one axis of an operand in memory: scans and sorts."""

from __future__ import annotations

import math

from vkjit.lowering.kernel.specs import ScanSpec, SortSpec
from vkjit.lowering.kernel.views import dense
from vkjit.lowering.plan.bindings import Bound, Placed
from vkjit.lowering.plan.groups import ScanGroup, SortGroup
from vkjit.lowering.plan.workspace import Workspace


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
    group = SortGroup(*sizes, spec.key, source, array, (space.origin,))
    return Placed(array, dense(made.shape), space.add_group(group))


def _lines(x: Bound, axis: int) -> tuple[int, int, int]:
    """Elements before, along and after ``axis``."""
    return math.prod(x.shape[:axis]), x.shape[axis], math.prod(x.shape[axis + 1 :])
