"""Which template serves a group without products: pointwise, rows, columns."""

from __future__ import annotations

from vkjit.lowering.gpu.columns import column_team, columns
from vkjit.lowering.gpu.loops import pointwise
from vkjit.lowering.gpu.rows import rows
from vkjit.lowering.gpu.split_rows import part_length, split_rows
from vkjit.lowering.gpu.transpose import turn_of, turned
from vkjit.lowering.plan.groups import LoopGroup
from vkjit.lowering.templates.context import Lowered, TemplateContext
from vkjit.lowering.templates.space import compact


def lower_loop(group: LoopGroup, context: TemplateContext) -> list[Lowered]:
    """The kernels of a group of pointwise work and reductions, in order."""
    group = compact(group)
    if not group.reduced:
        turn = turn_of(group, context.target)
        return turned(group, turn, context) if turn else pointwise(group, context)
    who = column_team(group, context.target)
    if who is not None:
        return columns(group, who, context)
    length = part_length(group, context.target)
    return split_rows(group, length, context) if length else rows(group, context)
