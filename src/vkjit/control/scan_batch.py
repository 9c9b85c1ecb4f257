"""Batching of scan: which carries have the batch axis, and the body over it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from vkjit.control.batched import spread_over
from vkjit.control.inner import with_axis
from vkjit.control.remembered import remembered
from vkjit.control.scan_form import Derived, derive, sections
from vkjit.ir.control import Scan as Form
from vkjit.ir.primitive import Value
from vkjit.passes.batch import Axis, axis, batch, masks


@final
@dataclass(frozen=True)
class Batched:
    """The scan over a batch, and which of its carries and stacked results have the batch axis."""

    scan: Derived
    carries: tuple[bool, ...]
    ys: tuple[bool, ...]


def batched_scan(form: Form, flags: tuple[bool, ...], size: int) -> Batched:
    """The scan for arguments that have a batch axis of ``size``, or not."""
    return _along(form, flags, size, axis(), bool(masks()))


@remembered(lambda made: made.scan.closed)
def _along(
    form: Form, flags: tuple[bool, ...], size: int, of: Axis | None, masked: object
) -> Batched:
    """The scan over a batch along one axis, to which its collectives refer.

    Where it is ``masked``, what acts in it does so for some examples.
    """
    del of, masked
    constants, carries, slices = sections(form, flags)
    while True:
        scan, spread = _traced(form, [*constants, *carries, *slices], size)
        grown = [a or b for a, b in zip(carries, spread, strict=False)]
        if grown == list(carries):
            return Batched(scan, tuple(carries), tuple(spread[form.carries :]))
        carries = grown


def _traced(form: Form, flags: Sequence[bool], size: int) -> tuple[Derived, list[bool]]:
    """The scan if these carries have the axis, and which results of its body then do."""
    carried = sections(form, flags)[1]
    spread: list[bool] = []

    def run(*values: Value) -> list[Value]:
        outs, spread[:] = batch(form.body, values, flags)
        for i, flag in enumerate(carried):
            if flag and not spread[i]:
                outs[i] = spread_over(outs[i], size)
        return outs

    avals = [
        with_axis(of, size) if flag else of
        for of, flag in zip(form.body.in_avals, flags, strict=True)
    ]
    return derive(form, run, sections(form, avals), "batch"), spread
