"""Which way of computing products serves a group: candidates in order, and a template for each.

A template of products is a module with ``candidates``, which lists the schedules that the device
can run for a group, and ``contract``, which makes the kernels of one. To add one: its record in
``lowering.plan.schedule``, its module, and its two lines here.
"""

from __future__ import annotations

from typing import assert_never

from vkjit.lowering.gpu import (
    gemm_coop,
    gemm_coop_schedule,
    gemm_naive,
    gemm_schedule,
    gemm_tensor,
    gemm_tensor_schedule,
    gemm_tiled,
)
from vkjit.lowering.plan.groups import ContractGroup
from vkjit.lowering.plan.schedule import (
    CoopSchedule,
    GpuContract,
    NaiveSchedule,
    TensorSchedule,
    TiledSchedule,
)
from vkjit.lowering.templates.context import Lowered, TemplateContext
from vkjit.lowering.templates.products import swapped, with_few_axes


def candidates(group: ContractGroup, context: TemplateContext) -> list[GpuContract]:
    """Every schedule worth a try for ``group``; the first is the default where nothing is tuned.

    ``context`` gives the target and the element types of the group's arrays. Matrix units come
    first where they serve the group's types; then what is expected to take the least time.
    """
    group = normalised(group)
    return [
        *gemm_tensor_schedule.candidates(group, context.target),
        *gemm_coop_schedule.candidates(group, context.target),
        *gemm_schedule.candidates(group, context.target),
        *gemm_naive.candidates(context.target),
    ]


def lower_contract(
    group: ContractGroup, schedule: GpuContract, context: TemplateContext
) -> list[Lowered]:
    """The kernels of a product under ``schedule``, in order."""
    group = normalised(group)
    match schedule:
        case CoopSchedule():
            return gemm_coop.contract(group, schedule, context)
        case TensorSchedule():
            return gemm_tensor.contract(group, schedule, context)
        case TiledSchedule():
            return gemm_tiled.contract(group, schedule, context)
        case NaiveSchedule():
            return gemm_naive.contract(group, schedule, context)
        case _:
            assert_never(schedule)


def normalised(group: ContractGroup) -> ContractGroup:
    """The group as templates are given it: few batch axes, stores along n rather than along m."""
    strides = group.stores[0].view.strides
    along_n = group.n > 1 and strides[-1] == 1
    along_m = group.m > 1 and strides[-2] == 1
    return with_few_axes(swapped(group) if along_m and not along_n else group)
