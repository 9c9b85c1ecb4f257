"""Index spaces made small: axes of size 1 dropped, neighbours merged, views following."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.types import BinOp
from vkjit.lowering.kernel.views import View, collapse
from vkjit.lowering.plan.groups import BodyStep, GatherStep, LoadStep, LoopGroup, StoreStep


def compact(group: LoopGroup) -> LoopGroup:
    """The same group over fewer axes.

    Rows and reduced axes are merged apart; each part keeps at least one axis when it has any.
    """
    rows = len(group.shape) - group.reduced
    views = views_of(group.body, group.stores)
    row_shape, row_strides = collapse(group.shape[:rows], [v.strides[:rows] for v in views])
    if group.reduced:
        col_shape, col_strides = collapse(group.shape[rows:], [v.strides[rows:] for v in views])
    else:
        col_shape, col_strides = (), [() for _ in views]
    shape = (*row_shape, *col_shape)
    merged = [
        View(shape, (*r, *c), v.offset)
        for v, r, c in zip(views, row_strides, col_strides, strict=True)
    ]
    return with_views(group, shape, len(col_shape), merged)


def views_of(body: Sequence[BodyStep], stores: Sequence[StoreStep]) -> list[View]:
    """All views of a group: of its loads and gathers, then of its stores."""
    return [s.view for s in body if isinstance(s, (LoadStep, GatherStep))] + [
        s.view for s in stores
    ]


def with_views(
    group: LoopGroup, shape: tuple[int, ...], reduced: int, views: Sequence[View]
) -> LoopGroup:
    """``group`` over another index space, its views replaced in the order of ``views_of``."""
    rest = iter(views)
    body = tuple(
        replace(s, view=next(rest)) if isinstance(s, (LoadStep, GatherStep)) else s
        for s in group.body
    )
    stores = tuple(replace(s, view=next(rest)) for s in group.stores)
    return LoopGroup(shape, reduced, body, stores, group.origin)


def coordinates(b: Builder, linear: Value, shape: Sequence[int]) -> list[Value]:
    """The indices along ``shape`` of a row-major position."""
    out: list[Value] = []
    rest = linear
    for axis, size in enumerate(shape):
        inner = math.prod(shape[axis + 1 :])
        if size == 1:
            out.append(b.index(0))
        elif inner == 1:
            out.append(rest)
        else:
            out.append(b.binary(BinOp.DIV_U, rest, b.index(inner)))
            rest = b.binary(BinOp.REM_U, rest, b.index(inner))
    return out


_SMOOTH = {1: 1.0, 0: 0.5}
"""How well a stride along the lanes serves: consecutive elements, or one for all."""


def lane_axis(views: Sequence[View], axes: Sequence[int], lanes: int) -> int:
    """The axis along which most views are contiguous or constant; later axes win ties."""

    def score(axis: int) -> tuple[float, int]:
        size = views[0].shape[axis] if views else 1
        smooth = sum(_SMOOTH.get(v.strides[axis], 0.0) for v in views)
        return smooth * min(size, lanes) / lanes, axis

    return max(axes, key=score)
