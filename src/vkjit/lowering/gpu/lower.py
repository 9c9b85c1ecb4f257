"""Which GPU template serves which group."""

from __future__ import annotations

from typing import assert_never

from vkjit.errors import MissingRuleError
from vkjit.lowering.gpu.choose import candidates, lower_contract
from vkjit.lowering.gpu.loops import pointwise, scan, scatter_add
from vkjit.lowering.gpu.rows import rows
from vkjit.lowering.gpu.split_rows import part_length, split_rows
from vkjit.lowering.plan.groups import (
    ContractGroup,
    Group,
    LoopGroup,
    ScanGroup,
    ScatterAddGroup,
)
from vkjit.lowering.plan.schedule import GpuContract
from vkjit.lowering.templates.context import Lowered, TemplateContext
from vkjit.lowering.templates.space import compact

_MAX_ELEMENTS = 1 << 31
"""Kernels on the GPU count elements in signed 32-bit indices."""


def lower(
    group: Group, context: TemplateContext, schedule: GpuContract | None = None
) -> list[Lowered]:
    """The kernels of one group, in order; ``schedule`` replaces the default one of a product.

    Raises:
        MissingRuleError: an array has more elements than 32-bit indices reach.
    """
    check_sizes(context)
    match group:
        case LoopGroup(reduced=0):
            return pointwise(group, context)
        case LoopGroup():
            group = compact(group)
            length = part_length(group, context.target)
            return split_rows(group, length, context) if length else rows(group, context)
        case ContractGroup():
            return lower_contract(group, schedule or candidates(group, context)[0], context)
        case ScatterAddGroup():
            return scatter_add(group, context)
        case ScanGroup():
            return scan(group, context)
        case _:
            assert_never(group)


def check_sizes(context: TemplateContext) -> None:
    """Refuses arrays that kernels of the target cannot index."""
    for number, info in enumerate(context.arrays):
        if info.length >= _MAX_ELEMENTS:
            raise MissingRuleError(
                f"gpu: array {number} of the group has {info.length} elements of {info.elem}, "
                f"{context.target.name} indexes fewer than {_MAX_ELEMENTS}; split the array or "
                "run on cpu"
            )
