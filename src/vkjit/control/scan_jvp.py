"""Forward mode of scan: which carries move, and the body of values and tangents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from vkjit.control.remembered import remembered
from vkjit.control.scan_form import Derived, derive, sections
from vkjit.ir.control import Scan as Form
from vkjit.ir.primitive import Value
from vkjit.ops.structural import zeros
from vkjit.passes.jvp import jvp

Slot = tuple[int, bool]
"""A position among arguments or results, and whether the tangent there is meant."""


@final
@dataclass(frozen=True)
class Derivative:
    """The scan of values and tangents, and what stands at each of its arguments and results."""

    scan: Derived
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]


@remembered(lambda made: made.scan.closed)
def derivative(form: Form, moving: tuple[bool, ...]) -> Derivative:
    """The derivative for arguments of which those flagged in ``moving`` have tangents."""
    flags = list(moving)
    while True:
        made, after = _traced(form, flags)
        start, stop = form.constants, form.constants + form.carries
        before, flags[start:stop] = (
            flags[start:stop],
            [a or b for a, b in zip(flags[start:stop], after, strict=False)],
        )
        if before == flags[start:stop]:
            return made


def _traced(form: Form, moving: Sequence[bool]) -> tuple[Derivative, list[bool]]:
    """The derivative if these and no other arguments move, and which results then do."""
    body, carries = form.body, form.carries
    groups = [_slots(part, moving) for part in sections(form, range(len(moving)))]
    inputs = [slot for group in groups for slot in group]
    filled = sections(form, moving)[1]
    outputs: list[Slot] = []
    moved: list[bool] = []

    def run(*values: Value) -> list[Value]:
        given = dict(zip(inputs, values, strict=True))
        positions = range(len(moving))
        outs, douts = jvp(
            body, [given[i, False] for i in positions], [given.get((i, True)) for i in positions]
        )
        moved[:] = [d is not None for d in douts]
        there = [*filled, *moved[carries:]]
        outputs[:] = [
            *_slots(range(carries), there),
            *_slots(range(carries, len(outs)), there),
        ]
        tangents = [
            zeros(of) if d is None else d for d, of in zip(douts, body.out_avals, strict=True)
        ]
        return [tangents[i] if tangent else outs[i] for i, tangent in outputs]

    of = body.in_avals
    constants, carried, slices = ([of[i] for i, _ in group] for group in groups)
    scan = derive(form, run, (constants, carried, slices), "jvp")
    return Derivative(scan, tuple(inputs), tuple(outputs)), moved


def _slots(positions: Sequence[int], moving: Sequence[bool]) -> list[Slot]:
    return [*[(i, False) for i in positions], *[(i, True) for i in positions if moving[i]]]
