"""Products written in another way: operands exchanged, batch axes merged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vkjit.lowering.kernel.views import View, collapse
from vkjit.lowering.plan.groups import ContractGroup, GatherStep, LoadStep
from vkjit.lowering.templates.space import views_of


def swapped(group: ContractGroup) -> ContractGroup:
    """The group with m and n exchanged: transposing, lhs becomes rhs."""

    def turned(view: View) -> View:
        axes = list(range(len(view.shape)))
        axes[-2:] = axes[-1], axes[-2]
        return view.permuted(axes)

    turned_group = _with_views(group, [turned(view) for view in _views(group)])
    return replace(turned_group, m=group.n, n=group.m, lhs=turned_group.rhs, rhs=turned_group.lhs)


def with_few_axes(group: ContractGroup) -> ContractGroup:
    """The group with batch axes of size 1 dropped and neighbours merged."""
    views = _views(group)
    rank = len(group.batch)
    batch, leads = collapse(group.batch, [v.strides[:rank] for v in views])
    merged = [
        View((*batch, *v.shape[rank:]), (*lead, *v.strides[rank:]), v.offset)
        for v, lead in zip(views, leads, strict=True)
    ]
    return replace(_with_views(group, merged), batch=batch)


def _views(group: ContractGroup) -> list[View]:
    return [group.lhs.view, group.rhs.view, *views_of(group.body, group.stores)]


def _with_views(group: ContractGroup, views: Sequence[View]) -> ContractGroup:
    """The group with its views replaced, in the order of ``_views``."""
    rest = iter(views)
    return replace(
        group,
        lhs=replace(group.lhs, view=next(rest)),
        rhs=replace(group.rhs, view=next(rest)),
        body=tuple(
            replace(s, view=next(rest)) if isinstance(s, (LoadStep, GatherStep)) else s
            for s in group.body
        ),
        stores=tuple(replace(s, view=next(rest)) for s in group.stores),
    )
