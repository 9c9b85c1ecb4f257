"""Which CPU template serves which group."""

from __future__ import annotations

from typing import assert_never

from vkjit.lowering.cpu.gemm import contract
from vkjit.lowering.cpu.loops import pointwise
from vkjit.lowering.cpu.rows import rows
from vkjit.lowering.cpu.sequential import scan, scatter_add, set_rows
from vkjit.lowering.cpu.sort import sort
from vkjit.lowering.cpu.sort_inverse import inverse
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
from vkjit.lowering.templates.context import Lowered, TemplateContext


def lower(group: Group, context: TemplateContext) -> list[Lowered]:
    """The kernels of one group, in order, with default schedules."""
    match group:
        case LoopGroup(reduced=0):
            return pointwise(group, None, context)
        case LoopGroup():
            return rows(group, None, context)
        case ContractGroup():
            return contract(group, None, context)
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
