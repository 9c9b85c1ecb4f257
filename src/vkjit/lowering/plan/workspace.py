"""The arrays and clusters of a partition, and how values get into either."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

from vkjit.ir.program import Program
from vkjit.lowering.kernel.specs import ViewSpec
from vkjit.lowering.kernel.types import ScalarType
from vkjit.lowering.kernel.views import View, dense
from vkjit.lowering.plan.bindings import Bound, Lazy, Placed
from vkjit.lowering.plan.cluster import (
    MAX_ARRAYS,
    Axis,
    Cluster,
    Const,
    Layout,
    Load,
    Scalar,
    Store,
    covers,
    has_repeats,
    leaves,
)
from vkjit.lowering.plan.groups import IOTA, ArrayInfo, LoadStep, Partition, Work

_MUCH_LONGER = 4
"""A sum is much longer than one of a fourth of its terms."""


@final
class Workspace:
    """Arrays and clusters so far. ``origin`` names the equation that is being placed.

    No more operations join a cluster that has more than ``max_arrays`` loads and stores, and no
    value of more operations than that is deferred. ``known`` are partitions of programs that run
    inside this one.
    """

    def __init__(
        self, max_arrays: int = MAX_ARRAYS, known: dict[Program, Partition] | None = None
    ) -> None:
        self.max_arrays = max_arrays
        self.known = {} if known is None else known
        self.arrays: list[ArrayInfo] = []
        self.work: list[tuple[float, Cluster | Work]] = []
        self.origin = ""
        self._emitted: dict[object, int] = {}

    def new_array(self, elem: ScalarType, length: int) -> int:
        """A fresh array."""
        self.arrays.append(ArrayInfo(elem, length))
        return len(self.arrays) - 1

    def new_cluster(self, shape: Sequence[int], position: float | None = None) -> Cluster:
        """An empty cluster over ``shape``, run after all clusters so far unless placed earlier."""
        at = float(len(self.work)) if position is None else position
        axes = [Axis(n) for n in shape]
        cluster = Cluster(at, axes, self.max_arrays, origin={self.origin: None})
        self.work.append((at, cluster))
        return cluster

    def put_short_product_last(self, operands: Sequence[Bound]) -> None:
        """Of two products that meet, has the one with the shorter sum come last.

        It gets what is done with both then, and can wait for the other, as long as nobody reads it:
        the long product runs beside whatever makes the short one's operands.
        """
        lazy = [b.lazy.cluster for b in operands if b.lazy is not None]
        met = sorted(dict.fromkeys(lazy), key=lambda c: c.position)
        if len(met) != 2:
            return
        first, short, long = met[0], met[0].contract, met[1].contract
        if short is None or long is None or first.stores:
            return
        if short.k * _MUCH_LONGER <= long.k:
            first.position = float(len(self.work))
            self.work.append((first.position, first))

    def ordered(self) -> list[Cluster | Work]:
        """Clusters and groups in the order in which they run."""
        last = {id(work): at for at, work in self.work}
        latest = [(at, work) for at, work in self.work if last[id(work)] == at]
        return [work for _, work in sorted(latest, key=lambda item: item[0])]

    def in_region(self, bound: Bound, region: int) -> Bound:
        """An operand of an equation; a recomputation reads what other regions made from memory.

        Joining the cluster of the original would compute the value there and keep it until now.
        """
        if region == 0 or bound.lazy is None or bound.region == region:
            return bound
        return Bound(bound.type, bound.shape, placed=self.placed(bound), region=region)

    def placed(self, bound: Bound) -> Placed:
        """The value in memory, stored now if it is not there yet; never numbers in blocks."""
        place = bound.placed
        if place is not None and place.blocks is not None:
            if bound.decoded is None:
                array = self.new_array(bound.type, math.prod(bound.shape))
                view = dense(bound.shape)
                bound.decoded = Placed(array, view, self.store(bound, array, view))
            return bound.decoded
        if place is not None and place.array != IOTA:
            return place
        chain: list[tuple[Bound, ViewSpec]] = []
        root = bound
        while root.seen is not None and root.placed is None:
            chain.append((root, root.seen[1]))
            root = root.seen[0]
        if chain:
            place = self.placed(root)
            for made, spec in reversed(chain):
                view = spec.apply(place.view)
                if view is None:
                    break
                place = made.placed = Placed(place.array, view, place.ready)
            if bound.placed is not None:
                return bound.placed
        array = self.new_array(bound.type, math.prod(bound.shape))
        view = dense(bound.shape)
        ready = self.store(bound, array, view)
        bound.placed = Placed(array, view, ready)
        return bound.placed

    def placed_in_any_order(self, bound: Bound) -> Placed:
        """As ``placed``, for readers that follow any strides and read numbers out of blocks.

        A value that is only now computed gets the order of the array that it is computed from: a
        cast of a transposed matrix is written as it is read.
        """
        if bound.placed is not None and bound.placed.blocks is not None:
            return bound.placed
        if bound.placed is None and bound.deferred is not None and self.storer(bound) is None:
            self._place_leaves(bound)
            strides = _order_of(_leaf_views(bound), bound.shape)
            if strides is not None:
                view = View(bound.shape, strides)
                array = self.new_array(bound.type, math.prod(bound.shape))
                bound.placed = Placed(array, view, self.store(bound, array, view))
        return self.placed(bound)

    def store(self, bound: Bound, array: int, view: View) -> float:
        """Writes a value to ``array`` at ``view``; returns the position that does it."""
        lazy = self.storer(bound)
        if lazy is not None:
            if has_repeats(lazy.layout):
                return self._store_repeated(bound, lazy, array, view)
            lazy.cluster.stores.append(Store(lazy.step, array, view, lazy.layout))
            lazy.cluster.origin.setdefault(self.origin)
            return lazy.cluster.position
        cluster = self.new_cluster(view.shape)
        layout = self.identity(cluster)
        step = self.operand(bound, cluster, layout)
        cluster.stores.append(Store(step, array, view, layout))
        return cluster.position

    def store_parts(self, parts: Sequence[tuple[Bound, View]], array: int) -> float:
        """Writes values to regions of one array; returns the position by which all are written.

        Values of one shape that no cluster has computed yet share a cluster.
        """
        ready = -math.inf
        shared: dict[tuple[int, ...], Cluster] = {}
        apart = [b for b, _ in parts if self.storer(b) is None]
        for bound in apart:
            self._place_leaves(bound)  # before the clusters that read them
        for bound, region in parts:
            cluster = shared.get(bound.shape)
            if bound not in apart or bound.shape != region.shape:
                ready = max(ready, self.store(bound, array, region))
                continue
            if cluster is None or cluster.is_full():
                cluster = shared[bound.shape] = self.new_cluster(bound.shape)
            layout = self.identity(cluster)
            step = self.operand(bound, cluster, layout)
            cluster.stores.append(Store(step, array, region, layout))
            ready = max(ready, cluster.position)
        return ready

    def _place_leaves(self, bound: Bound) -> None:
        """Stores what a deferred value is computed from."""
        if bound.const is not None:
            return
        if bound.deferred is None or bound.placed is not None:
            self.placed(bound)
            return
        for operand in bound.deferred[1]:
            self._place_leaves(operand)

    def storer(self, bound: Bound) -> Lazy | None:
        """Where a value that is not in memory was computed, if it can be stored from there."""
        if bound.placed is not None:
            return None
        return bound.lazy or _storable(bound.emitted)

    def _store_repeated(self, bound: Bound, lazy: Lazy, array: int, view: View) -> float:
        """Stores a value that repeats: once without the repetitions, then spread over the view."""
        flat = [part for parts in leaves(lazy.layout) for part in parts]
        varying = [part for part in flat if isinstance(part, Axis)]
        compact = self.new_array(bound.type, math.prod(a.size for a in varying))
        stored = dense([a.size for a in varying])
        inside = tuple((a,) for a in varying)
        lazy.cluster.stores.append(Store(lazy.step, compact, stored, inside))
        strides = dict(zip(varying, stored.strides, strict=True))
        cluster = self.new_cluster([part.size for part in flat])
        read = View(
            tuple(part.size for part in flat),
            tuple(strides[p] if isinstance(p, Axis) else 0 for p in flat),
        )
        step = cluster.load(Load(compact, read, self.identity(cluster), bound.type))
        rest = iter(cluster.axes)
        spread = tuple(tuple(next(rest) for _ in parts) for parts in leaves(lazy.layout))
        cluster.stores.append(Store(step, array, view, spread))
        return cluster.position

    def identity(self, cluster: Cluster) -> Layout:
        """The layout of a value over exactly the cluster's axes."""
        return tuple((a,) if a.size != 1 else () for a in cluster.axes)

    def operand(self, bound: Bound, cluster: Cluster, layout: Layout) -> int:
        """The step of ``cluster`` that gives an operand whose axes lie at ``layout``."""
        if bound.const is not None:
            return cluster.add(Const(bound.const, bound.type))
        if bound.lazy is not None and bound.lazy.cluster is cluster:
            return bound.lazy.step
        where = layout if bound.shape else ()
        if bound.deferred is not None and bound.placed is None:
            return self.computed(bound, cluster, where)
        place = bound.placed or self.placed(bound)
        return cluster.load(Load(place.array, place.view, where, bound.type, place.blocks))

    def computed(self, bound: Bound, cluster: Cluster, layout: Layout) -> int:
        """The step of ``cluster`` that computes a deferred value there; one for each layout."""
        assert bound.deferred is not None
        spec, operands = bound.deferred
        key = (bound, leaves(layout))
        found = self._emitted.get((cluster, key))
        if found is None:
            args = tuple([self.operand(o, cluster, layout) for o in operands])
            cluster.weight += bound.weight
            if bound.origin:
                cluster.origin.setdefault(bound.origin)
            found = cluster.add(Scalar(spec.scalar, args, bound.type))
            self._emitted[(cluster, key)] = found
            bound.emitted = bound.emitted or Lazy(cluster, found, layout)
        return found

    def dense_view(self, bound: Bound, shape: tuple[int, ...]) -> LoadStep:
        """An operand in memory as a view of another shape, copied where strides cannot say it."""
        place = self.placed(bound)
        view = place.view.reshaped(shape)
        if view is None:
            array = self.new_array(bound.type, math.prod(bound.shape))
            self.store(Bound(bound.type, bound.shape, placed=place), array, dense(bound.shape))
            return LoadStep(array, dense(shape), bound.type)
        return LoadStep(place.array, view, bound.type)

    def add_group(self, group: Work) -> float:
        """Appends a group that is finished already; returns its position."""
        at = float(len(self.work))
        self.work.append((at, group))
        return at


def _leaf_views(bound: Bound) -> list[View]:
    """How the arrays are read that a deferred value is computed from."""
    if bound.deferred is None or bound.placed is not None:
        return [] if bound.placed is None else [bound.placed.view]
    return [view for operand in bound.deferred[1] for view in _leaf_views(operand)]


def _order_of(views: Sequence[View], shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Strides of a dense array of ``shape`` with its axes in the order of the views that fill it.

    None where no view has an element for each index, or where they disagree.
    """
    orders = {
        tuple(sorted(range(len(shape)), key=lambda a: -view.strides[a]))
        for view in views
        if view.shape == shape
        and all(s > 0 for s, n in zip(view.strides, shape, strict=True) if n > 1)
    }
    if len(orders) != 1:
        return None
    (order,) = orders
    strides = [0] * len(shape)
    step = 1
    for axis in reversed(order):
        strides[axis] = step
        step *= shape[axis]
    return tuple(strides)


def _storable(emitted: Lazy | None) -> Lazy | None:
    """Where a deferred value was computed, if each of its elements is computed there once."""
    if emitted is None or has_repeats(emitted.layout):
        return None
    return emitted if covers(leaves(emitted.layout), emitted.cluster) else None
