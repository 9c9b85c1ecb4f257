"""What ``partition`` knows of a variable: constant, in memory, in a cluster, or deferred."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from vkjit.blocks import BlockType
from vkjit.ir.avals import Aval
from vkjit.ir.program import Atom, Literal
from vkjit.lowering.kernel.decode import unit_type
from vkjit.lowering.kernel.elements import scalar_type
from vkjit.lowering.kernel.specs import PointwiseSpec, ViewSpec
from vkjit.lowering.kernel.types import Number, ScalarType
from vkjit.lowering.kernel.views import View
from vkjit.lowering.plan.cluster import Cluster, Layout


def element(atom: Atom) -> ScalarType:
    """The kernel type of an atom's elements; of blocks the units that they are made of."""
    block = atom.aval.block
    return scalar_type(atom.aval.dtype) if block is None else unit_type(block)


def extent(of: Aval) -> tuple[int, ...]:
    """The shape of an array in elements: blocks have one more axis, their units."""
    block = of.block
    return of.shape if block is None else (*of.shape, block.nbytes // block.unit)


@final
@dataclass(slots=True)
class Placed:
    """A value in memory: ``array`` at ``view``, written by clusters up to position ``ready``.

    With ``blocks`` the view counts the numbers that the blocks of the array hold.
    """

    array: int
    view: View
    ready: float
    blocks: BlockType | None = None


@final
@dataclass(slots=True)
class Lazy:
    """A value inside a cluster that nobody has stored."""

    cluster: Cluster
    step: int
    layout: Layout


@final
@dataclass(slots=True, eq=False)
class Bound:
    """What is known of a variable: a constant, a place in memory, a step of a cluster, or both.

    ``deferred`` is a pointwise function of other bindings that no cluster computes yet: whoever
    uses it computes it on the way. ``weight`` counts the operations of that, and
    ``emitted`` is where it was first computed. ``seen`` is the value
    that this one is a view of. ``region`` and ``origin`` are those of the equation. ``decoded`` is
    where numbers that lie in blocks were stored for readers that take no blocks.
    """

    type: ScalarType
    shape: tuple[int, ...]
    const: Number | None = None
    placed: Placed | None = None
    lazy: Lazy | None = None
    deferred: tuple[PointwiseSpec, tuple[Bound, ...]] | None = None
    emitted: Lazy | None = None
    weight: int = 0
    region: int = 0
    origin: str = ""
    seen: tuple[Bound, ViewSpec] | None = None
    decoded: Placed | None = None

    def ready(self) -> float:
        """The position after which the memory that gives the value is there."""
        if self.deferred is not None and self.placed is None:
            return max([o.ready() for o in self.deferred[1]], default=-math.inf)
        return self.placed.ready if self.placed is not None else -math.inf


def number(literal: Literal) -> Number:
    """A literal's value; integers as the signed ones with the same bits."""
    value = literal.value.item()
    bits = element(literal).bits
    if isinstance(value, int) and not isinstance(value, bool) and value >> (bits - 1) > 0:
        return value - (1 << bits)
    return value
