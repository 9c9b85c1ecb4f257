"""Partition of a program into groups.

Equations are visited in order. A pointwise or gathering equation joins the cluster of its latest
operand when its index space fits there; every other operand is then ready before that cluster runs,
so joining can never make a cycle. A reduction joins the cluster that makes its operand and turns
the axes it folds into reduced axes. View operations make no work: they change how a value is read.
A value is stored only when somebody outside its cluster, or a result, needs it.

The program's primitives are asked for their ``KernelSpec`` alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import assert_never, final

from vkjit.errors import InternalError
from vkjit.ir.primitive import Op, Remat
from vkjit.ir.program import Atom, Eqn, Literal, Program, Var
from vkjit.lowering.kernel.specs import (
    ContractSpec,
    DecodeSpec,
    GatherSpec,
    IotaSpec,
    KernelSpec,
    PlaceSpec,
    PointwiseSpec,
    PutBackSpec,
    ReduceSpec,
    ReorderSpec,
    ScanSpec,
    ScatterAddSpec,
    SetRowsSpec,
    SortSpec,
    ViewSpec,
    WriteSpec,
)
from vkjit.lowering.kernel.types import I1
from vkjit.lowering.kernel.views import View, dense, dense_strides
from vkjit.lowering.plan.bindings import Bound, Lazy, Placed, element, extent, number
from vkjit.lowering.plan.cluster import (
    COSTLY,
    Axis,
    Cluster,
    Const,
    Gather,
    Layout,
    Operand,
    Reduce,
    Repeat,
    Scalar,
    Store,
    leaves,
    through,
    unify,
    whole,
)
from vkjit.lowering.plan.contraction import contraction
from vkjit.lowering.plan.finish import finished
from vkjit.lowering.plan.groups import IOTA, Partition, Work
from vkjit.lowering.plan.lines import Inside, inverse, scan, scattered, sort
from vkjit.lowering.plan.nested import control
from vkjit.lowering.plan.quantized import decoded, of_units
from vkjit.lowering.plan.workspace import Workspace

_MAX_WEIGHT = 40
"""Most operations that are computed on the way instead of by a cluster of their own."""
_FREE_WEIGHT = 4
"""Operations cheap enough to be computed again by every reader."""
_MIN_ROWS = 8
_MANY_COLUMNS = 1 << 15


def partition(program: Program, space: Workspace | None = None) -> Partition:
    """The groups of ``program``, made in an empty workspace, which may bound their arrays.

    Raises:
        InternalError: a primitive has no kernel spec.
    """
    work = _Partitioner(program, space or Workspace())
    for eqn in program.eqns:
        work.equation(eqn)
    return work.result()


@final
class _Partitioner:
    """State of one partition: arrays, clusters and what each variable is bound to."""

    def __init__(self, program: Program, space: Workspace) -> None:
        self.program = program
        self.space = space
        self.env: dict[Var, Bound] = {}
        self.uses = _use_counts(program)
        for var in program.params:
            shape = extent(var.aval)
            array = self.space.new_array(element(var), math.prod(shape))
            place = Placed(array, dense(shape), -math.inf)
            self.env[var] = Bound(element(var), shape, placed=place)

    def bound(self, atom: Atom) -> Bound:
        """The binding of an operand."""
        if isinstance(atom, Literal):
            return Bound(element(atom), (), const=number(atom))
        return self.env[atom]

    # -- equations ------------------------------------------------------------------------------

    def equation(self, eqn: Eqn) -> None:
        """Binds the result of one equation."""
        prim = eqn.prim
        self.space.origin = f"{prim.name} at {eqn.source}" if eqn.source else prim.name
        if not isinstance(prim, Op):
            made = control(self.space, eqn, [self.bound(a) for a in eqn.args], partition)
            self.env.update(zip(eqn.outs, made, strict=True))
            return
        out = eqn.outs[0]
        spec = prim.kernel_spec([a.aval for a in eqn.args], out.aval)
        if out.aval.block is not None and eqn.args[0].aval.block is not None:
            spec = of_units(spec, out.aval.block)
        operands = [self.space.in_region(self.bound(a), eqn.region) for a in eqn.args]
        where = self.space.origin
        made = Bound(element(out), extent(out.aval), region=eqn.region, origin=where)
        self.bind(eqn, spec, operands, made)
        self.env[out] = made

    def bind(  # noqa: C901, PLR0912  one case per spec
        self, eqn: Eqn, spec: KernelSpec, operands: Sequence[Bound], made: Bound
    ) -> None:
        """Fills in where the result ``made`` of one equation is."""
        match spec:
            case PointwiseSpec():
                self.pointwise(eqn, operands, spec, made)
            case IotaSpec(axis):
                strides = tuple(int(i == axis) for i in range(len(made.shape)))
                made.placed = Placed(IOTA, View(made.shape, strides), -math.inf)
            case ViewSpec():
                self.view(operands[0], spec, made)
            case DecodeSpec():
                made.placed = decoded(self.space, operands[0], spec)
            case PlaceSpec():
                made.placed = self.place(operands, spec, made)
            case ReduceSpec():
                made.lazy = self.reduce(operands[0], spec, made)
            case ContractSpec():
                made.lazy = self.contract(operands, spec, made)
            case GatherSpec():
                made.lazy = self.gather(operands, spec, made)
            case ReorderSpec():
                made.lazy = self.reorder(operands, spec, made)
            case ScatterAddSpec() | SetRowsSpec():
                made.placed = scattered(self.space, operands, spec, made)
            case ScanSpec():
                made.placed = scan(self.space, operands[0], spec, made)
            case SortSpec():
                made.placed = sort(self.space, operands[0], spec, made)
            case PutBackSpec():
                made.lazy = self.put_back(operands, spec, made)
            case WriteSpec():
                made.placed = self.write(operands, spec, made)
            case _:
                assert_never(spec)

    def latest(self, operands: Sequence[Bound]) -> Cluster | None:
        """The cluster that an equation may join: the last one that makes any of its operands."""
        found: Cluster | None = None
        ready = -math.inf
        for bound in operands:
            if bound.lazy is not None and (
                found is None or bound.lazy.cluster.position > found.position
            ):
                found = bound.lazy.cluster
        for bound in operands:
            if bound.lazy is None:
                ready = max(ready, bound.ready())
        if found is None or ready >= found.position or found.is_full():
            return None
        return found

    def joined(
        self, operands: Sequence[Bound], layouts: Sequence[Layout | None], shape: Sequence[int]
    ) -> tuple[Cluster, Layout]:
        """The cluster for a result of ``shape`` and the result's layout there.

        ``layouts`` are those of lazy operands, seen over the result's axes; None for others.
        """
        target = self.latest(operands)
        if target is not None:
            inside = [
                layout
                for bound, layout in zip(operands, layouts, strict=True)
                if bound.lazy and bound.lazy.cluster is target and layout is not None
            ]
            found = unify(inside, shape, target)
            if found is not None:
                target.origin.setdefault(self.space.origin)
                return target, found
        for bound in [b for b in operands if b.lazy is not None]:
            self.space.placed(bound)  # before the new cluster, which reads it
        cluster = self.space.new_cluster(shape)
        return cluster, self.space.identity(cluster)

    def pointwise(
        self, eqn: Eqn, operands: Sequence[Bound], spec: PointwiseSpec, made: Bound
    ) -> None:
        """A scalar function: deferred, in the cluster of its latest operand, or in a new one."""
        weight = COSTLY if eqn.prim.traits.remat is Remat.COSTLY else 1
        if all(b.lazy is None for b in operands):
            made.weight = sum(b.weight for b in operands) + weight
            limit = _MAX_WEIGHT if self.uses.get(eqn.outs[0], 0) == 1 else _FREE_WEIGHT
            if made.weight <= min(limit, self.space.max_arrays):
                made.deferred = (spec, tuple(operands))
                return
        layouts = [self.over(b, made.shape) for b in operands]
        self.space.put_short_product_last(operands)
        self.settle(operands)
        cluster, layout = self.joined(operands, layouts, made.shape)
        args = tuple([self.space.operand(b, cluster, layout) for b in operands])
        cluster.weight += weight
        made.lazy = Lazy(cluster, cluster.add(Scalar(spec.scalar, args, made.type)), layout)
        made.weight = 0

    def over(self, bound: Bound, shape: tuple[int, ...]) -> Layout | None:
        """A lazy operand's layout over the axes of a result of ``shape``; rank 0 repeats."""
        if bound.lazy is None:
            return None
        if bound.shape == shape:
            return bound.lazy.layout
        return tuple((Repeat(n),) if n != 1 else () for n in shape)

    def settle(self, operands: Sequence[Bound]) -> None:
        """Stores lazy operands that lie in other clusters than the latest one."""
        target = self.latest(operands)
        for bound in operands:
            if bound.lazy is not None and bound.lazy.cluster is not target and bound.placed is None:
                self.space.placed(bound)

    def view(self, x: Bound, spec: ViewSpec, made: Bound) -> None:
        """The operand's bindings, seen through the view; stored first where no binding survives."""
        if x.const is not None:
            made.const = x.const
            return
        if x.deferred is not None and x.placed is None and self.view_deferred(x, spec, made):
            return
        if x.lazy is not None:
            layout = through(spec.apply, x.lazy.layout)
            if layout is not None:
                made.lazy = Lazy(x.lazy.cluster, x.lazy.step, layout)
        if x.placed is None and made.lazy is not None:
            made.seen = (x, spec)
            return
        place = x.placed or self.space.placed(x)
        seen = spec.apply(place.view)
        if seen is not None:
            made.placed = Placed(place.array, seen, place.ready, place.blocks)
        elif made.lazy is None:
            made.placed = self.view_of_copy(x, spec)

    def view_of_copy(self, x: Bound, spec: ViewSpec) -> Placed:
        """The view of a dense copy of a value whose strides cannot express the view."""
        array = self.space.new_array(x.type, math.prod(x.shape))
        ready = self.space.store(x, array, dense(x.shape))
        seen = spec.apply(dense(x.shape))
        if seen is None:
            raise InternalError("view: the operation cannot read even a dense array")
        return Placed(array, seen, ready)

    def view_deferred(self, x: Bound, spec: ViewSpec, made: Bound) -> bool:
        """The view of a deferred value as the value of viewed operands, where that can be said."""
        assert x.deferred is not None
        scalar, operands = x.deferred
        seen: list[Bound] = []
        for operand in operands:
            part = Bound(operand.type, made.shape if operand.shape else ())
            if not operand.shape or operand.const is not None:
                part = operand
            elif operand.deferred is not None and operand.placed is None:
                if not self.view_deferred(operand, spec, part):
                    return False
            else:
                place = operand.placed or self.space.placed(operand)
                view = spec.apply(place.view)
                if view is None:
                    return False
                part.placed = Placed(place.array, view, place.ready, place.blocks)
            seen.append(part)
        made.deferred, made.weight = (scalar, tuple(seen)), x.weight
        return True

    def place(self, operands: Sequence[Bound], spec: PlaceSpec, made: Bound) -> Placed:
        """Operands stored into regions of a new array, after the fill."""
        array = self.space.new_array(made.type, math.prod(made.shape))
        rest, filled = operands, -math.inf
        if spec.fill:
            if operands[0].const is None:
                for bound in operands:
                    self.space.placed(bound)
            first = self.before([b for b in operands if b.const is None])
            cluster = self.space.new_cluster(made.shape, first)
            layout = self.space.identity(cluster)
            step = self.space.operand(operands[0], cluster, layout)
            cluster.stores.append(Store(step, array, dense(made.shape), layout))
            rest, filled = operands[1:], cluster.position
        parts = [(b, r) for b, r in zip(rest, spec.regions, strict=True) if r.size]
        ready = max(filled, self.space.store_parts(parts, array))
        return Placed(array, dense(made.shape), ready)

    def before(self, operands: Sequence[Bound]) -> float | None:
        """A position ahead of every cluster that would store one of the operands."""
        makers = [self.space.storer(b) for b in operands]
        return min([m.cluster.position - 0.5 for m in makers if m], default=None)

    def reduce(self, x: Bound, spec: ReduceSpec, made: Bound) -> Lazy:
        """A fold in the cluster that makes the operand, or in one of its own."""
        kept = [i for i in range(len(x.shape)) if i not in spec.axes]
        if x.lazy is not None and _may_fold(x.lazy, spec.axes):
            cluster, layout, arg = x.lazy.cluster, leaves(x.lazy.layout), x.lazy.step
            if not cluster.reduced:
                cluster.reduced = [p for i in spec.axes for p in layout[i] if isinstance(p, Axis)]
            cluster.origin.setdefault(self.space.origin)
        else:
            if x.lazy is not None:
                self.space.placed(x)
            cluster = self.space.new_cluster(x.shape)
            cluster.reduced = [cluster.axes[i] for i in spec.axes]
            layout = self.space.identity(cluster)
            source = Bound(x.type, x.shape, x.const, x.placed, None, x.deferred, origin=x.origin)
            arg = self.space.operand(source, cluster, layout)
        step = cluster.add(Reduce(spec.rule, arg, made.type))
        return Lazy(cluster, step, tuple(layout[i] for i in kept))

    def contract(self, operands: Sequence[Bound], spec: ContractSpec, made: Bound) -> Lazy:
        """A product; pointwise consumers may join it as its epilogue."""
        lhs, rhs = (self.contract_operand(b, axes) for b, axes in _contract_axes(operands, spec))
        cluster = self.space.new_cluster(())
        return Lazy(cluster, 0, contraction(cluster, lhs, rhs, spec, made.type))

    def contract_operand(self, bound: Bound, axes: tuple[int, ...]) -> Operand:
        """Stores an operand anew when its contracted axes do not form one run in memory."""
        place = self.space.placed_in_any_order(bound)
        summed = View(
            tuple(place.view.shape[a] for a in axes), tuple(place.view.strides[a] for a in axes)
        )
        if summed.reshaped((summed.size,)) is None:
            # Stored again with the contracted axes innermost and in the order of the sum.
            order = [a for a in range(len(bound.shape)) if a not in axes] + list(axes)
            sizes = dense_strides([bound.shape[a] for a in order])
            strides = tuple(sizes[order.index(a)] for a in range(len(order)))
            array = self.space.new_array(bound.type, math.prod(bound.shape))
            view = View(bound.shape, strides)
            ready = self.space.store(Bound(bound.type, bound.shape, placed=place), array, view)
            place = bound.placed = Placed(array, view, ready)
        return place.array, place.view, bound.type, place.blocks

    def gather(self, operands: Sequence[Bound], spec: GatherSpec, made: Bound) -> Lazy:
        """A read at computed indices, point by point over the result."""
        table, indices = operands
        axis, rank = spec.axis, len(indices.shape)
        spread = partial(View.broadcast, shape=made.shape, axes=range(axis, axis + rank))
        index = Bound(indices.type, made.shape, indices.const)
        self.view(indices, ViewSpec(spread), index)
        return self.read_at(table, index, (axis, rank), made)

    def reorder(self, operands: Sequence[Bound], spec: ReorderSpec, made: Bound) -> Lazy:
        """A read at an index of each element's own."""
        return self.read_at(operands[0], operands[1], (spec.axis, 1), made)

    def put_back(self, operands: Sequence[Bound], spec: PutBackSpec, made: Bound) -> Lazy:
        """A read in the inverse order, zeros at positions that the order does not have."""
        parts, order = operands
        place = inverse(self.space, order, spec.axis, made.shape)
        index = Bound(order.type, made.shape, placed=place)
        lazy = self.read_at(parts, index, (spec.axis, 1), made)
        count = order.shape[spec.axis]
        if count == made.shape[spec.axis]:
            return lazy
        at = self.space.operand(index, lazy.cluster, lazy.layout)
        zero = lazy.cluster.add(Const(False if made.type is I1 else 0, made.type))
        args = (at, lazy.step, zero)
        return Lazy(
            lazy.cluster, lazy.cluster.add(Scalar(Inside(count), args, made.type)), lazy.layout
        )

    def read_at(self, table: Bound, index: Bound, axes: tuple[int, int], made: Bound) -> Lazy:
        """Elements of ``table`` at ``index``; ``axes`` are the first one indexed, and how many."""
        axis, rank = axes
        place = self.space.placed_in_any_order(table)
        probe = [index, Bound(table.type, (), placed=place)]
        self.settle(probe)
        cluster, layout = self.joined(probe, [self.over(index, made.shape), None], made.shape)
        at = self.space.operand(index, cluster, layout)
        strides = place.view.strides
        read = View(
            made.shape, (*strides[:axis], *(0,) * rank, *strides[axis + 1 :]), place.view.offset
        )
        assert len(read.strides) == len(made.shape)
        step = cluster.add(
            Gather(
                place.array,
                read,
                layout,
                at,
                strides[axis],
                table.shape[axis],
                made.type,
                place.blocks,
            )
        )
        return Lazy(cluster, step, layout)

    def write(self, operands: Sequence[Bound], spec: WriteSpec, made: Bound) -> Placed:
        """A copy of the destination with the region overwritten."""
        array = self.space.new_array(made.type, math.prod(made.shape))
        base = Bound(made.type, made.shape, placed=self.space.placed(operands[0]))
        self.space.store(base, array, dense(made.shape))
        value = Bound(operands[1].type, operands[1].shape, operands[1].const)
        if operands[1].const is None:
            value.placed = self.space.placed(operands[1])
        ready = self.space.store(value, array, spec.region)
        return Placed(array, dense(made.shape), ready)

    # -- the end --------------------------------------------------------------------------------

    def result(self) -> Partition:
        """Stores the results and freezes the clusters."""
        inputs = len(self.program.params)
        results: list[int] = []
        self.space.origin = "result"
        for atom in self.program.results:
            results.append(self.result_array(self.bound(atom), inputs, results))
        groups: list[Work] = []
        last: dict[int, int] = {}
        for work in self.space.ordered():
            groups.extend(finished(work, self.space.new_array))
            last[id(work)] = len(groups) - 1
        stored = {v: b.placed.array for v, b in self.env.items() if b.placed is not None}
        made = {v: last[id(b.lazy.cluster)] for v, b in self.env.items() if b.lazy is not None}
        return Partition(
            tuple(self.space.arrays), inputs, tuple(results), tuple(groups), stored, made
        )

    def result_array(self, bound: Bound, inputs: int, taken: Sequence[int]) -> int:
        """A dense array of its own for one result."""
        place = bound.placed if bound.const is None else None
        if (
            place is not None
            and place.blocks is None
            and place.array >= inputs
            and place.array not in taken
            and place.view.is_dense()
            and self.space.arrays[place.array].length == math.prod(bound.shape)
        ):
            return place.array
        array = self.space.new_array(bound.type, math.prod(bound.shape))
        # What is nowhere in memory is written as it is seen: no copy follows a transposed product.
        nowhere = place is None and bound.const is None
        source = bound if nowhere else Bound(bound.type, bound.shape, bound.const, place)
        self.space.store(source, array, dense(bound.shape))
        return array


def _use_counts(program: Program) -> dict[Var, int]:
    """How many arguments and results name each variable."""
    counts: dict[Var, int] = {}
    for eqn in program.eqns:
        for arg in eqn.args:
            if isinstance(arg, Var):
                counts[arg] = counts.get(arg, 0) + 1
    for result in program.results:
        if isinstance(result, Var):
            counts[result] = counts.get(result, 0) + 1
    return counts


def _may_fold(lazy: Lazy, axes: Sequence[int]) -> bool:
    """Whether a reduction over ``axes`` of a lazy value can run in its cluster."""
    cluster, layout = lazy.cluster, leaves(lazy.layout)
    folded = [part for i in axes for part in layout[i]]
    if cluster.contract is not None or not folded or any(isinstance(p, Repeat) for p in folded):
        return False
    if not whole(lazy.layout, cluster):
        return False
    if cluster.reduced:
        return [a for a in cluster.columns() if a.size > 1] == folded
    rows = math.prod(a.size for a in cluster.rows() if a not in folded)
    columns = math.prod(p.size for p in folded)
    # Few long rows would leave cores idle in the other work of the cluster.
    return not cluster.stores or rows >= _MIN_ROWS or columns < _MANY_COLUMNS


def _contract_axes(
    operands: Sequence[Bound], spec: ContractSpec
) -> list[tuple[Bound, tuple[int, ...]]]:
    return [(operands[0], spec.lhs_contract), (operands[1], spec.rhs_contract)]
