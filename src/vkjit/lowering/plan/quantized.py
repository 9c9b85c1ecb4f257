"""Arrays of blocks in a partition: views of whole blocks, and views of the numbers in them.

A block is one element of its array to a program, and a run of units, ``i16`` or ``i32``, to
kernels: the array has one more axis there. Views and copies of such arrays move whole blocks. The
numbers of an array are another view of the same memory, with the blocks beside it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from vkjit.blocks import BlockType
from vkjit.lowering.kernel.specs import DecodeSpec, KernelSpec, PlaceSpec, ViewSpec
from vkjit.lowering.kernel.views import View, dense
from vkjit.lowering.plan.bindings import Bound, Placed
from vkjit.lowering.plan.workspace import Workspace


def of_units(spec: KernelSpec, block: BlockType) -> KernelSpec:
    """The spec of an operation on blocks as one on their units."""
    match spec:
        case ViewSpec():
            return ViewSpec(_WholeBlocks(spec))
        case PlaceSpec():
            units = block.nbytes // block.unit
            return PlaceSpec(tuple([_with_units(r, units) for r in spec.regions]), spec.fill)
        case _:
            return spec


@final
@dataclass(frozen=True, slots=True)
class _WholeBlocks:
    """A view operation on all axes but the last, which is that of the units of a block."""

    spec: ViewSpec

    def __call__(self, view: View) -> View | None:
        *outer, last = view.strides
        seen = self.spec.apply(View(view.shape[:-1], tuple(outer), view.offset))
        if seen is None:
            return None
        return View((*seen.shape, view.shape[-1]), (*seen.strides, last), seen.offset)


def _with_units(view: View, units: int) -> View:
    """A view of blocks as one of the units of an array."""
    strides = tuple([s * units for s in view.strides])
    return View((*view.shape, units), (*strides, 1), view.offset * units)


def decoded(space: Workspace, x: Bound, spec: DecodeSpec) -> Placed:
    """The numbers in the blocks of ``x``, which stay packed: readers decode them."""
    place, block = space.placed(x), spec.blocks
    seen = _numbers(place.view, block)
    if seen is None:  # blocks that do not follow each other are copied, as blocks
        array = space.new_array(x.type, math.prod(x.shape))
        ready = space.store(Bound(x.type, x.shape, placed=place), array, dense(x.shape))
        place = Placed(array, dense(x.shape), ready)
        seen = _numbers(place.view, block)
        assert seen is not None
    return Placed(place.array, seen, place.ready, block)


def _numbers(view: View, block: BlockType) -> View | None:
    """The numbers of the blocks whose units are at ``view``; None where no strides reach them.

    The blocks of a row must follow each other, and begin at a whole block of the array.
    """
    units = block.nbytes // block.unit
    *outer, count, _ = view.shape
    *strides, along, within = view.strides
    follow = within == 1 and (along == units or count == 1)
    if not follow or any(s % units for s in (*strides, view.offset)):
        return None
    scaled = tuple([s // units * block.size for s in strides])
    return View((*outer, count * block.size), (*scaled, 1), view.offset // units * block.size)
