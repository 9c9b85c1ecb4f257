"""Which GPU template serves which group."""

from __future__ import annotations

from typing import assert_never

from vkjit.lowering.gpu.choose import candidates, lower_contract
from vkjit.lowering.gpu.index import check_sizes, numbers_in_blocks
from vkjit.lowering.gpu.loop_nests import lower_loop
from vkjit.lowering.gpu.scan import scan
from vkjit.lowering.gpu.scatter import scatter_add
from vkjit.lowering.gpu.set_rows import set_rows
from vkjit.lowering.gpu.sort import sort
from vkjit.lowering.gpu.sort_inverse import inverse
from vkjit.lowering.plan.groups import (
    ContractGroup,
    Group,
    InverseGroup,
    LoopGroup,
    ScanGroup,
    ScatterAddGroup,
    SetRowsGroup,
    SortGroup,
)
from vkjit.lowering.plan.schedule import GpuContract
from vkjit.lowering.templates.context import Lowered, TemplateContext


def lower(
    group: Group, context: TemplateContext, schedule: GpuContract | None = None
) -> list[Lowered]:
    """The kernels of one group, in order; ``schedule`` replaces the default one of a product.

    Raises:
        MissingRuleError: an array has more elements than the kernels' indices reach.
    """
    context.numbers = numbers_in_blocks(group)
    match group:
        case LoopGroup():
            return lower_loop(group, context)
        case ContractGroup():
            check_sizes(context, group.k)
            return lower_contract(group, schedule or candidates(group, context)[0], context)
        case ScatterAddGroup():
            return scatter_add(group, context)
        case SetRowsGroup():
            return set_rows(group, context)
        case ScanGroup():
            return scan(group, context)
        case SortGroup():
            return sort(group, context)
        case InverseGroup():
            return inverse(group, context)
        case _:
            assert_never(group)
