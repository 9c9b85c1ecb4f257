"""Equations that run programs: operands and results in memory, a partition for each program."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import assert_never

from vkjit.errors import InternalError
from vkjit.ir.control import Branch, Call, Control, Inline, Scan, Transfer, While
from vkjit.ir.program import Eqn, Program
from vkjit.lowering.kernel.views import dense
from vkjit.lowering.plan.bindings import Bound, Placed, element, extent
from vkjit.lowering.plan.groups import IOTA, ControlGroup, Partition
from vkjit.lowering.plan.workspace import Workspace

MakePartition = Callable[[Program, Workspace], Partition]


def control(
    space: Workspace, eqn: Eqn, operands: Sequence[Bound], partition: MakePartition
) -> list[Bound]:
    """The results of an equation whose primitive says its control form.

    Raises:
        MissingRuleError: it says none.
        InternalError: it stands for its body, which no pass has put in its place.
    """
    form = eqn.prim.control()
    if isinstance(form, Inline):
        raise InternalError(f"{eqn.prim.name}: its body must be spliced in before lowering")
    given = [_dense_array(space, b) for b in operands]
    made = [space.new_array(element(out), math.prod(extent(out.aval))) for out in eqn.outs]
    inner = tuple([_inner(space, program, partition) for program in programs_of(form)])
    types = tuple([(a.aval.dtype, a.aval.shape) for a in eqn.args])
    group = ControlGroup(form, inner, tuple(given), tuple(made), types, (space.origin,))
    at = space.add_group(group)
    return [
        Bound(
            element(out),
            extent(out.aval),
            placed=Placed(array, dense(extent(out.aval)), at),
            region=eqn.region,
            origin=space.origin,
        )
        for out, array in zip(eqn.outs, made, strict=True)
    ]


def programs_of(form: Control) -> tuple[Program, ...]:
    """The programs of a control form, in the order in which lowering names them."""
    match form:
        case Scan() | Inline():
            return (form.body,)
        case While():
            return (form.condition, form.body)
        case Branch():
            return form.branches
        case Call() | Transfer():
            return ()
        case _:
            assert_never(form)


def _inner(space: Workspace, program: Program, partition: MakePartition) -> Partition:
    """The partition of an inner program, made once however often it is run."""
    found = space.known.get(program)
    if found is None:
        found = partition(program, Workspace(space.max_arrays, space.known))
        space.known[program] = found
    return found


def _dense_array(space: Workspace, bound: Bound) -> int:
    """An array that holds one operand, dense and whole."""
    size = math.prod(bound.shape)
    place = bound.placed
    if place is not None and place.blocks is not None:
        place = space.placed(bound)
    if place is not None and place.array != IOTA:
        if place.view.is_dense() and space.arrays[place.array].length == size:
            return place.array
        bound = Bound(bound.type, bound.shape, placed=place)
    array = space.new_array(bound.type, size)
    ready = space.store(bound, array, dense(bound.shape))
    if place is None:  # what is nowhere in memory yet is read from here by others, too
        bound.placed = Placed(array, dense(bound.shape), ready)
    return array
