"""Freezing clusters into groups: one index space, dead steps gone, views over it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import assert_never

from vkjit.lowering.kernel.types import ScalarType
from vkjit.lowering.kernel.views import View, dense
from vkjit.lowering.plan.cluster import (
    Axis,
    Cluster,
    Const,
    Gather,
    Load,
    Product,
    Reduce,
    Scalar,
    Step,
    view_over,
)
from vkjit.lowering.plan.groups import (
    BodyStep,
    ConstStep,
    ContractGroup,
    GatherStep,
    Group,
    LoadStep,
    LoopGroup,
    ProductStep,
    ReduceStep,
    ScalarStep,
    StoreStep,
    Work,
)

NewArray = Callable[[ScalarType, int], int]


def finished(work: Cluster | Work, new_array: NewArray) -> Sequence[Work]:
    """The groups of a cluster: none when it stores nothing, two when its epilogue stands apart."""
    if not isinstance(work, Cluster):
        return [work]
    rows = math.prod(a.size for a in work.rows())
    if not work.stores or rows == 0:
        return []
    if work.contract is None:
        return [_loop(work)]
    return _contract(work, new_array)


def _loop(cluster: Cluster) -> LoopGroup:
    space = cluster.space()
    body, stores = _body(cluster, space)
    shape = tuple(a.size for a in space)
    return LoopGroup(shape, len(cluster.columns()), body, stores, tuple(cluster.origin))


def _contract(cluster: Cluster, new_array: NewArray) -> list[Group]:
    """A contraction with its epilogue, or a bare one and a loop over its stored product."""
    part = cluster.contract
    assert part is not None
    space = cluster.space()
    shape = (*part.batch, part.m, part.n)
    body, stores = _body(cluster, space)
    merged_body, merged_stores = _merged(body, stores, shape)
    origin = tuple(cluster.origin)
    lhs, rhs = LoadStep(*part.lhs), LoadStep(*part.rhs)
    sizes = (part.batch, part.m, part.n, part.k)
    if merged_body is not None and merged_stores is not None:
        work = (merged_body, merged_stores, origin, part.precision)
        return [ContractGroup(*sizes, lhs, rhs, part.accumulate, *work)]
    product = body[0]
    assert isinstance(product, ProductStep)
    array = new_array(product.type, math.prod(shape))
    bare = (StoreStep(0, array, dense(shape)),)
    over = tuple(a.size for a in space)
    load = LoadStep(array, dense(over), product.type)
    return [
        ContractGroup(*sizes, lhs, rhs, part.accumulate, (product,), bare, origin, part.precision),
        LoopGroup(over, 0, (load, *body[1:]), stores, origin),
    ]


def _merged(
    body: Sequence[BodyStep], stores: Sequence[StoreStep], shape: tuple[int, ...]
) -> tuple[tuple[BodyStep, ...] | None, tuple[StoreStep, ...] | None]:
    """Body and stores over (batch, m, n), or None where a view needs a split matrix axis."""
    new_body: list[BodyStep] = []
    for step in body:
        if isinstance(step, (LoadStep, GatherStep)):
            view = merged_view(step.view, shape)
            if view is None:
                return None, None
            new_body.append(_with_view(step, view))
        else:
            new_body.append(step)
    new_stores: list[StoreStep] = []
    for store in stores:
        view = merged_view(store.view, shape)
        if view is None:
            return None, None
        new_stores.append(StoreStep(store.value, store.array, view))
    return tuple(new_body), tuple(new_stores)


def merged_view(view: View, shape: tuple[int, ...]) -> View | None:
    """A view over a finer index space as one over ``shape``; None where strides do not allow it."""
    strides: list[int] = []
    fine = list(zip(view.shape, view.strides, strict=True))
    for size in shape:
        run: list[tuple[int, int]] = []
        while math.prod(n for n, _ in run) < size:
            run.append(fine.pop(0))
        run = [(n, s) for n, s in run if n > 1]
        for (_, outer), (n, inner) in pairwise(run):
            if outer != inner * n:
                return None
        strides.append(run[-1][1] if run else 0)
        while fine and fine[0][0] == 1 and len(fine) > len(shape) - len(strides):
            fine.pop(0)
    return View(shape, tuple(strides), view.offset)


def _with_view(step: LoadStep | GatherStep, view: View) -> LoadStep | GatherStep:
    return replace(step, view=view)


def _body(
    cluster: Cluster, space: Sequence[Axis]
) -> tuple[tuple[BodyStep, ...], tuple[StoreStep, ...]]:
    """Steps that some store needs, renumbered, and the stores."""
    live = _live(cluster)
    numbers: dict[int, int] = {}
    body: list[BodyStep] = []
    for position, step in enumerate(cluster.steps):
        if position in live:
            numbers[position] = len(body)
            body.append(_frozen(step, numbers, space))
    stores = tuple(
        StoreStep(numbers[s.step], s.array, view_over(space, s.view, s.layout))
        for s in cluster.stores
    )
    return tuple(body), stores


def _live(cluster: Cluster) -> set[int]:
    live = {s.step for s in cluster.stores}
    if cluster.contract is not None:
        live.add(0)
    for position in range(len(cluster.steps) - 1, -1, -1):
        if position in live:
            live.update(_uses(cluster.steps[position]))
    return live


def _uses(step: Step) -> tuple[int, ...]:
    match step:
        case Scalar(args=args):
            return args
        case Gather(index=index):
            return (index,)
        case Reduce(arg=arg):
            return (arg,)
        case Load() | Const() | Product():
            return ()
        case _:
            assert_never(step)


def _frozen(step: Step, numbers: dict[int, int], space: Sequence[Axis]) -> BodyStep:
    match step:
        case Load():
            view = view_over(space, step.view, step.layout)
            return LoadStep(step.array, view, step.type, step.blocks)
        case Const():
            return ConstStep(step.value, step.type)
        case Scalar():
            return ScalarStep(step.fn, tuple(numbers[a] for a in step.args), step.type)
        case Gather():
            view = view_over(space, step.view, step.layout)
            at = numbers[step.index], step.stride, step.size
            return GatherStep(step.array, view, *at, step.type, step.blocks)
        case Reduce():
            return ReduceStep(step.rule, numbers[step.arg], step.type)
        case Product():
            return ProductStep(step.type)
        case _:
            assert_never(step)
