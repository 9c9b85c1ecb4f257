"""Clusters: groups while ``partition`` grows them.

The index space of a cluster is a list of axes with identity, so that reshapes of values inside the
cluster can split an axis and every view follows. The axes of a value inside a cluster are tuples of
*parts*, each a cluster axis or a repetition; that is all a view operation has to change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import final

from vkjit.blocks import BlockType
from vkjit.lowering.kernel.specs import Precision, ReduceRule, ScalarFn
from vkjit.lowering.kernel.types import Number, ScalarType
from vkjit.lowering.kernel.views import View, dense

MAX_WEIGHT = 256
"""Operations in one cluster, transcendental ones counted ``COSTLY`` times."""
COSTLY = 16
MAX_ARRAYS = 48
"""Loads and stores in one cluster; devices bind only so many buffers."""


@final
class Axis:
    """One axis of a cluster's index space; split axes point to their parts."""

    __slots__ = ("parts", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.parts: tuple[Axis, Axis] | None = None

    def leaves(self) -> list[Axis]:
        """The axis itself, or the axes it was split into, outermost first."""
        if self.parts is None:
            return [self]
        return [leaf for part in self.parts for leaf in part.leaves()]


@final
@dataclass(frozen=True, slots=True)
class Repeat:
    """A run of indices along which a value does not change."""

    size: int


Part = Axis | Repeat
Layout = tuple[tuple[Part, ...], ...]
"""For each axis of a value, the parts that make it up, outermost first; none for size 1."""


def leaves(layout: Layout) -> Layout:
    """The layout after all splits that happened since it was made."""
    return tuple(tuple(leaf for part in parts for leaf in _part_leaves(part)) for parts in layout)


def has_repeats(layout: Layout) -> bool:
    """Whether a value is the same along some axis that has not just one index."""
    return any(isinstance(part, Repeat) and part.size != 1 for parts in layout for part in parts)


def _part_leaves(part: Part) -> Sequence[Part]:
    return part.leaves() if isinstance(part, Axis) else (part,)


def through(apply: Callable[[View], View | None], layout: Layout) -> Layout | None:
    """The layout of a value seen through a view operation, or None where it must be stored first.

    The operation is tried on a dense array of the value's shape: an axis of the result with stride
    0 is a repetition, any other takes the digits of the row-major index that its stride spans.
    Axes of the cluster are split where a boundary falls inside them.
    """
    shape = tuple(math.prod(p.size for p in parts) for parts in leaves(layout))
    if 0 in shape:  # an empty value: storing it first costs nothing
        return None
    view = apply(dense(shape))
    if view is None or view.offset or any(s < 0 for s in view.strides):
        return None
    kept = [n for n, s in zip(view.shape, view.strides, strict=True) if s]
    if math.prod(kept) != math.prod(shape):
        return None
    digits: list[Part] = [part for parts in leaves(layout) for part in parts]
    out: list[tuple[Part, ...]] = []
    for size, stride in zip(view.shape, view.strides, strict=True):
        if size == 1:
            out.append(())
        elif stride == 0:
            out.append((Repeat(size),))
        else:
            taken = _digits(digits, stride, stride * size)
            if taken is None:
                return None
            out.append(taken)
    return tuple(out)


def _digits(digits: list[Part], low: int, high: int) -> tuple[Part, ...] | None:
    """The parts that span row-major strides ``low`` to ``high``; splits parts in ``digits``."""
    for boundary in (low, high):
        step = 1
        for position in range(len(digits) - 1, -1, -1):
            part = digits[position]
            if step < boundary < step * part.size:
                if boundary % step or (step * part.size) % boundary:
                    return None
                digits[position : position + 1] = _split(part, step * part.size // boundary)
                break
            step *= part.size
    taken: list[Part] = []
    step = math.prod(p.size for p in digits)
    for part in digits:
        step //= part.size
        if low <= step < high:
            taken.append(part)
    return tuple(taken)


def _split(part: Part, outer: int) -> tuple[Part, Part]:
    if isinstance(part, Repeat):
        return Repeat(outer), Repeat(part.size // outer)
    part.parts = (Axis(outer), Axis(part.size // outer))
    return part.parts


@final
@dataclass(frozen=True, slots=True)
class Load:
    """An array read at a view over a value's axes; ``layout`` places them in the cluster."""

    array: int
    view: View
    layout: Layout
    type: ScalarType
    blocks: BlockType | None = None


@final
@dataclass(slots=True)
class Const:
    """A constant."""

    value: Number
    type: ScalarType


@final
@dataclass(slots=True)
class Scalar:
    """A scalar function of earlier steps."""

    fn: ScalarFn
    args: tuple[int, ...]
    type: ScalarType


@final
@dataclass(slots=True)
class Gather:
    """A read at a computed index; ``layout`` places the axes of ``view``."""

    array: int
    view: View
    layout: Layout
    index: int
    stride: int
    size: int
    type: ScalarType
    blocks: BlockType | None = None


@final
@dataclass(slots=True)
class Reduce:
    """A fold of step ``arg`` over the cluster's reduced axes."""

    rule: ReduceRule
    arg: int
    type: ScalarType


@final
@dataclass(slots=True)
class Product:
    """The product of a contraction cluster."""

    type: ScalarType


Step = Load | Const | Scalar | Gather | Reduce | Product


@final
@dataclass(slots=True)
class Store:
    """A step's value written to an array at a view over the value's axes."""

    step: int
    array: int
    view: View
    layout: Layout


Operand = tuple[int, View, ScalarType, BlockType | None]
"""An operand of a contraction: array, view, type of the elements, and the blocks they are in."""


@final
@dataclass(frozen=True, slots=True)
class ContractPart:
    """Operands of a contraction, over (batch..., m, k) and (batch..., k, n)."""

    batch: tuple[int, ...]
    m: int
    n: int
    k: int
    lhs: Operand
    rhs: Operand
    accumulate: ScalarType
    precision: Precision = Precision.HIGHEST


@final
@dataclass(slots=True, eq=False)
class Cluster:
    """A growing group.

    ``position`` orders clusters, ``reduced`` axes are folded by reductions, and ``weight`` counts
    operations: a kernel that computes too much takes long to compile and runs out of registers.
    """

    position: float
    axes: list[Axis]
    max_arrays: int = MAX_ARRAYS
    steps: list[Step] = field(default_factory=list[Step])
    stores: list[Store] = field(default_factory=list[Store])
    reduced: list[Axis] = field(default_factory=list[Axis])
    contract: ContractPart | None = None
    weight: int = 0
    origin: dict[str, None] = field(default_factory=dict[str, None])
    loads: dict[Load, int] = field(default_factory=dict[Load, int])

    def add(self, step: Step) -> int:
        """Appends a step and returns its number."""
        self.steps.append(step)
        return len(self.steps) - 1

    def load(self, load: Load) -> int:
        """The step that reads there; equal reads are one step."""
        if load not in self.loads:
            self.loads[load] = self.add(load)
        return self.loads[load]

    def is_full(self) -> bool:
        """Whether no more operations should join."""
        arrays = len(self.loads) + len(self.stores)
        return self.weight > MAX_WEIGHT or arrays > self.max_arrays

    def rows(self) -> list[Axis]:
        """Leaf axes that are not reduced."""
        folded = {leaf for axis in self.reduced for leaf in axis.leaves()}
        return [leaf for axis in self.axes for leaf in axis.leaves() if leaf not in folded]

    def columns(self) -> list[Axis]:
        """Leaf axes that are reduced."""
        return [leaf for axis in self.reduced for leaf in axis.leaves()]

    def space(self) -> list[Axis]:
        """All leaf axes in the order of the finished group: rows, then reduced ones."""
        return self.rows() + self.columns()


def view_over(space: Sequence[Axis], view: View, layout: Layout) -> View:
    """A view over a value's axes as a view over a cluster's index space."""
    position = {axis: i for i, axis in enumerate(space)}
    strides = [0] * len(space)
    for stride, parts in zip(view.strides, leaves(layout), strict=True):
        step = stride
        for part in reversed(parts):
            if isinstance(part, Axis):
                strides[position[part]] += step
            step *= part.size
    return View(tuple(a.size for a in space), tuple(strides), view.offset)


def unify(layouts: Sequence[Layout], shape: Sequence[int], cluster: Cluster) -> Layout | None:
    """One layout for a value of ``shape`` made from values with ``layouts``, all in ``cluster``.

    Axes along which every operand repeats are given to the cluster's unused axes. None where the
    operands disagree, or where the result would not cover the cluster's rows and all or none of
    its reduced axes.
    """
    merged: list[list[Part]] = []
    for axis, size in enumerate(shape):
        if size == 1:
            merged.append([])
            continue
        found: list[Part] = [Repeat(size)]
        for layout in layouts:
            joined = _joined(found, leaves(layout)[axis])
            if joined is None:
                return None
            found = joined
        merged.append(found)
    used = {p for parts in merged for p in parts if isinstance(p, Axis)}
    free = [axis for axis in cluster.space() if axis not in used and axis.size > 1]
    for parts in merged:
        for position, part in enumerate(parts):
            if isinstance(part, Repeat):
                given = _given(free, part.size)
                if given is None:
                    return None
                parts[position : position + 1] = given
    layout = tuple(tuple(p) for p in merged)
    return layout if covers(layout, cluster) else None


def _joined(a: Sequence[Part], b: Sequence[Part]) -> list[Part] | None:
    """Parts of one axis of two operands, axes before repetitions; None when they disagree."""
    if len(a) == 1 and isinstance(a[0], Repeat):
        return list(b)
    if len(b) == 1 and isinstance(b[0], Repeat):
        return list(a)
    if len(a) != len(b):
        return None
    out: list[Part] = []
    for x, y in zip(a, b, strict=True):
        if x.size != y.size or (isinstance(x, Axis) and isinstance(y, Axis) and x is not y):
            return None
        out.append(x if isinstance(x, Axis) else y)
    return out


def _given(free: list[Axis], size: int) -> list[Part] | None:
    """Leading unused axes that make up ``size``, taken from ``free``."""
    taken: list[Part] = []
    while free and size % free[0].size == 0 and size > 1:
        size //= free[0].size
        taken.append(free.pop(0))
    return taken if size == 1 else None


def covers(layout: Layout, cluster: Cluster) -> bool:
    """Whether a value covers the cluster's rows once, and all or none of its reduced axes."""
    used = [p for parts in layout for p in parts if isinstance(p, Axis)]
    if len(set(used)) != len(used):
        return False
    columns = {a for a in cluster.columns() if a.size > 1}
    rows = {a for a in cluster.rows() if a.size > 1}
    seen = set(used)
    return rows <= seen and (not seen & columns or columns <= seen)


def whole(layout: Layout, cluster: Cluster) -> bool:
    """Whether a value depends on every axis of the cluster's index space."""
    used = {p for parts in leaves(layout) for p in parts}
    return all(a in used for a in cluster.space() if a.size > 1)
