"""Contractions: which axes are batch, rows, columns and sum, without moving any data.

Every operand is read through its strides. Free axes of an operand that do not form one run in
memory cannot be one axis of a matrix: the largest run becomes the matrix axis and the others become
batch axes along which the other operand repeats.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

from vkjit.lowering.kernel.specs import ContractSpec
from vkjit.lowering.kernel.types import ScalarType
from vkjit.lowering.kernel.views import View
from vkjit.lowering.plan.cluster import (
    Axis,
    Cluster,
    ContractPart,
    Layout,
    Operand,
    Part,
    Product,
    Repeat,
    through,
)


@final
class _Free:
    """Free axes of one operand: the run that is a matrix axis, and the others."""

    __slots__ = ("axes", "count", "peeled", "run", "sizes")

    def __init__(self, view: View, axes: Sequence[int]) -> None:
        self.axes = tuple(axes)
        self.sizes = tuple(view.shape[a] for a in axes)
        runs = _runs(view, axes)
        self.run = max(runs, key=lambda r: math.prod(view.shape[a] for a in r), default=())
        self.peeled = tuple(a for a in axes if a not in self.run and view.shape[a] != 1)
        self.count = math.prod(view.shape[a] for a in self.run)


def contraction(
    cluster: Cluster, lhs: Operand, rhs: Operand, spec: ContractSpec, out: ScalarType
) -> Layout:
    """Fills an empty cluster with the product of two operands.

    Args:
        cluster: without axes and steps.
        lhs: array, view, element type and blocks; its contracted axes form one run.
        rhs: likewise.
        spec: which axes are batch and contracted.
        out: element type of the result.

    Returns:
        the layout of the result, whose axes are batch, free axes of lhs, free axes of rhs.
    """
    left = _Free(lhs[1], _others(lhs[1], spec.lhs_batch, spec.lhs_contract))
    right = _Free(rhs[1], _others(rhs[1], spec.rhs_batch, spec.rhs_contract))
    batch = [Axis(lhs[1].shape[a]) for a in spec.lhs_batch]
    left_peeled = {a: Axis(lhs[1].shape[a]) for a in left.peeled}
    right_peeled = {a: Axis(rhs[1].shape[a]) for a in right.peeled}
    m, n = Axis(left.count), Axis(right.count)
    extra = (*left_peeled.values(), *right_peeled.values())
    cluster.axes = [*batch, *extra, m, n]
    sizes = tuple(a.size for a in (*batch, *extra))
    k = math.prod(lhs[1].shape[a] for a in spec.lhs_contract)
    lhs_lead = _lead(lhs[1], spec.lhs_batch, left.peeled, 0, len(right.peeled))
    rhs_lead = _lead(rhs[1], spec.rhs_batch, right.peeled, len(left.peeled), 0)
    lhs_m, lhs_k = _run_stride(lhs[1], left.run), _run_stride(lhs[1], spec.lhs_contract)
    rhs_n, rhs_k = _run_stride(rhs[1], right.run), _run_stride(rhs[1], spec.rhs_contract)
    cluster.contract = ContractPart(
        batch=sizes,
        m=m.size,
        n=n.size,
        k=k,
        lhs=(lhs[0], View((*sizes, m.size, k), (*lhs_lead, lhs_m, lhs_k), lhs[1].offset), *lhs[2:]),
        rhs=(rhs[0], View((*sizes, k, n.size), (*rhs_lead, rhs_k, rhs_n), rhs[1].offset), *rhs[2:]),
        accumulate=spec.accumulate,
        precision=spec.precision,
    )
    cluster.add(Product(out))
    lead: Layout = tuple((a,) if a.size > 1 else () for a in batch)
    return lead + _free_layout(left, left_peeled, m) + _free_layout(right, right_peeled, n)


def _others(view: View, batch: Sequence[int], contract: Sequence[int]) -> list[int]:
    return [a for a in range(len(view.shape)) if a not in batch and a not in contract]


def _runs(view: View, axes: Sequence[int]) -> list[tuple[int, ...]]:
    """Neighbouring axes of ``axes`` that form one run in memory; axes of size 1 join any run."""
    runs: list[list[int]] = []
    for a in axes:
        if view.shape[a] == 1:
            continue
        if runs and view.strides[runs[-1][-1]] == view.strides[a] * view.shape[a]:
            runs[-1].append(a)
        else:
            runs.append([a])
    return [tuple(r) for r in runs]


def _run_stride(view: View, run: Sequence[int]) -> int:
    """Stride of a run of axes taken as one: that of its innermost axis of more than one index."""
    for a in reversed(run):
        if view.shape[a] > 1:
            return view.strides[a]
    return 0


def _lead(
    view: View, batch: Sequence[int], peeled: Sequence[int], before: int, after: int
) -> tuple[int, ...]:
    """Strides of the batch axes, then 0 for the other side's peeled axes around this side's own."""
    own = tuple(view.strides[a] for a in peeled)
    return (*(view.strides[a] for a in batch), *(0,) * before, *own, *(0,) * after)


def _free_layout(free: _Free, peeled: dict[int, Axis], matrix: Axis) -> Layout:
    """Where the free axes of one operand lie in the cluster."""
    sizes = tuple(size for a, size in zip(free.axes, free.sizes, strict=True) if a in free.run)
    parts = _split_axis(matrix, sizes)
    layout: Layout = ()
    for a, size in zip(free.axes, free.sizes, strict=True):
        if size == 1:
            layout += ((),)
        elif a in peeled:
            layout += ((peeled[a],),)
        else:
            layout += (parts.pop(0),)
    return layout


def _split_axis(axis: Axis, sizes: Sequence[int]) -> list[tuple[Part, ...]]:
    """A matrix axis as the run of axes that it merges."""
    if len(sizes) <= 1:
        return [(axis,)] if sizes else []
    if axis.size == 0:  # nothing is computed: any parts of these sizes do
        return [(Repeat(size),) for size in sizes]
    layout = through(_Reshape(tuple(sizes)), ((axis,),))
    assert layout is not None
    return [tuple(p for p in parts if isinstance(p, Axis)) for parts in layout]


@final
class _Reshape:
    """The view operation of a reshape to fixed sizes."""

    __slots__ = ("sizes",)

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes

    def __call__(self, view: View) -> View | None:
        return view.reshaped(self.sizes)
