"""Batching of scan: which carries have the batch axis, and the body over it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import final

from vkjit.control.batched import spread_over
from vkjit.control.inner import with_axis
from vkjit.control.scan_form import Derived, derive, sections
from vkjit.ir.control import Scan as Form
from vkjit.ir.primitive import Value
from vkjit.passes.batch import batch


@final
@dataclass(frozen=True)
class Batched:
    """The scan over a batch, and which of its carries and stacked results have the batch axis."""

    scan: Derived
    carries: tuple[bool, ...]
    ys: tuple[bool, ...]


@lru_cache(maxsize=256)
def batched_scan(form: Form, flags: tuple[bool, ...], size: int, *, wide: bool) -> Batched:
    """The scan for arguments that have a batch axis of ``size``, or not.

    ``wide`` says whether 64-bit dtypes are on; the body traced may differ.
    """
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
