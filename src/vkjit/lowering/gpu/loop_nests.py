"""Which template serves a group without products, and with which schedule.

A schedule is one of the records of the templates: ``Elements`` (pointwise), ``Turn`` (transposes
in shared memory), ``Team`` (rows), ``Parts`` (few long rows), ``ColumnTeam`` (columns).
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from vkjit.lowering.gpu.columns import ColumnTeam, column_team, columns
from vkjit.lowering.gpu.loops import Elements, default_elements, pointwise
from vkjit.lowering.gpu.meeting import Stand, Team
from vkjit.lowering.gpu.rows import rows
from vkjit.lowering.gpu.split_rows import Parts, part_lengths, split_rows
from vkjit.lowering.gpu.teams import default_team, kept, meets_by_shuffles, walked
from vkjit.lowering.gpu.transpose import Turn, turned, turns_of
from vkjit.lowering.plan.groups import LoopGroup
from vkjit.lowering.target import Target
from vkjit.lowering.templates.context import Lowered, TemplateContext
from vkjit.lowering.templates.space import compact

_MANY_REGISTERS = 64
"""Values that members of a row may keep where a measurement says that it pays."""

LoopChoice = Elements | Turn | Team | Parts | ColumnTeam
"""The schedules of groups without products."""


def default_schedule(group: LoopGroup, context: TemplateContext) -> LoopChoice:
    """How a compact group runs where nothing is tuned."""
    target = context.target
    if not group.reduced:
        turns = turns_of(group, target)
        return turns[0] if turns else default_elements(group, context)
    who = column_team(group, target)
    if who is not None:
        return who
    parts = part_lengths(group, target)
    return parts[0] if parts else default_team(group, target)


def candidates(group: LoopGroup, context: TemplateContext) -> list[LoopChoice]:
    """Every schedule worth a try for ``group``; the first is the default where nothing is tuned."""
    group, target = compact(group), context.target
    default = default_schedule(group, context)
    if not group.reduced:
        found = [*turns_of(group, target), *_elements(group, context)]
    elif isinstance(default, ColumnTeam):
        found = _column_teams(default, target)
    else:
        found = [*part_lengths(group, target), *_teams(group, target)]
    return [default, *[f for f in found if f != default]]


def lower_loop(
    group: LoopGroup, context: TemplateContext, schedule: LoopChoice | None = None
) -> list[Lowered]:
    """The kernels of a group of pointwise work and reductions, in order."""
    group = compact(group)
    match schedule or default_schedule(group, context):
        case Elements() as elements:
            return pointwise(group, context, elements)
        case Turn() as turn:
            return turned(group, turn, context)
        case Team() as who:
            return rows(group, context, who)
        case Parts() as parts:
            return split_rows(group, parts, context)
        case ColumnTeam() as who:
            return columns(group, who, context)
        case _ as never:
            assert_never(never)


def _elements(group: LoopGroup, context: TemplateContext) -> list[Elements]:
    default = default_elements(group, context)
    most = min(context.target.max_invocations, context.target.max_workgroup[0])
    options = [
        replace(default, unroll=unroll, workgroup=size)
        for unroll in (1, 2, 4)
        for size in (128, 256, 512)
        if size <= most
    ]
    return [default, *[o for o in options if o != default]]


def _teams(group: LoopGroup, target: Target) -> list[Team]:
    default = default_team(group, target)
    found = [default]
    if default.stand is not Stand.BESIDE and default.size > 1:
        alone = replace(default, rows=1, stand=Stand.ALONE)
        most = min(target.max_invocations, target.max_workgroup[0])
        for size in (64, 128, 256, 512, 1024):
            if target.subgroup_sizes[0] <= size <= most:
                who = replace(alone, size=size, keep=0, unroll=1)
                found += [kept(group, who), kept(group, who, _MANY_REGISTERS)]
                found += [walked(who, unroll) for unroll in (1, 2, 4)]
    if default.stand is Stand.CLUSTER and default.size > 1:
        half = replace(default, size=default.size // 2, rows=default.rows * 2)
        found += [kept(group, half), walked(default, 1)]
    width = target.subgroup_sizes[0]
    if default.stand is Stand.ALONE and default.keep and meets_by_shuffles(group, target):
        cluster = replace(default, rows=1, size=width, stand=Stand.CLUSTER)
        found += [kept(group, cluster)] if default.size <= 8 * width else []
    return list(dict.fromkeys(found))


def _column_teams(default: ColumnTeam, target: Target) -> list[ColumnTeam]:
    found: list[ColumnTeam] = []
    for members in (default.members // 4, default.members // 2):
        for parts in (default.parts, default.parts * 2, default.parts * 4):
            if members >= 1:
                found.append(replace(default, members=members, parts=parts))
    if default.beside >= 8:
        found.append(replace(default, beside=default.beside // 2, parts=1))
    found.append(replace(default, parts=1))
    wide = replace(default, beside=2 * default.beside, members=max(1, default.members // 2))
    if wide.beside <= target.max_workgroup[0]:
        found += [wide, replace(wide, parts=2 * default.parts)]
    return found
