"""Which way of computing products serves a group: candidates in order, and a template for each.

A template of products is a module with ``candidates``, which lists the schedules that the device
can run for a group, and ``contract``, which makes the kernels of one. To add one: its record in
``lowering.plan.schedule``, its module, and its lines here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from vkjit.lowering.gpu import (
    gemm_coop,
    gemm_coop_schedule,
    gemm_naive,
    gemm_schedule,
    gemm_skinny,
    gemm_tensor,
    gemm_tensor_schedule,
    gemm_tiled,
)
from vkjit.lowering.plan.groups import ContractGroup
from vkjit.lowering.plan.schedule import (
    CoopSchedule,
    GpuContract,
    NaiveSchedule,
    SkinnySchedule,
    TensorSchedule,
    TiledSchedule,
)
from vkjit.lowering.templates.context import Lowered, TemplateContext
from vkjit.lowering.templates.products import swapped, with_few_axes

_MOST = 16
"""Plain schedules that are worth a measurement."""
_SHORT = 16
"""An axis so short that matrix units would be mostly idle, as that of an adapter of rank 16. On an
H200 such products took 5 to 9 us plain (float32, queued), and kernels on matrix units of as few
workgroups 7 to 27 us (bfloat16, in a profile); the two were not timed side by side. Long ones have
tiles of their own, see ``gemm_coop_schedule.narrow``."""


def candidates(group: ContractGroup, context: TemplateContext) -> list[GpuContract]:
    """Every schedule worth a try for ``group``; the first is the default where nothing is tuned.

    ``context`` gives the target and the element types of the group's arrays. Matrix units come
    first where they serve the group's types and no axis is so short that they would be mostly idle;
    then what is expected to take the least time.
    """
    group, target = normalised(group), context.target
    clocks = {**gemm_schedule.costs(group, target), **gemm_skinny.costs(group, target)}
    plain = sorted(clocks, key=clocks.__getitem__)[:_MOST]
    matrix = [
        *gemm_tensor_schedule.candidates(group, target),
        *gemm_coop_schedule.candidates(group, target),
        *gemm_tensor_schedule.of_subgroups(group, target),
    ]
    is_short = min(group.m, group.n, group.k) <= _SHORT
    return [
        *gemm_coop_schedule.narrow(group, target),
        *(plain if is_short else matrix),
        *(matrix if is_short else plain),
        *gemm_naive.candidates(target),
    ]


def serves(group: ContractGroup, schedule: GpuContract, context: TemplateContext) -> bool:
    """Whether ``lower_contract`` can make kernels of ``schedule`` for ``group``, fast or slow."""
    group, target = normalised(group), context.target
    match schedule:
        case CoopSchedule():
            able = [
                *gemm_coop_schedule.candidates(group, target),
                *gemm_coop_schedule.narrow(group, target),
            ]
            return replace(schedule, split_k=1) in [replace(s, split_k=1) for s in able]
        case TensorSchedule():
            return gemm_tensor_schedule.serves(group, schedule, target)
        case TiledSchedule():
            return gemm_schedule.fits(group, schedule, target)
        case SkinnySchedule():
            return replace(schedule, split_k=1) in gemm_skinny.costs(group, target)
        case NaiveSchedule():
            return gemm_naive.fits(schedule, target)
        case _:
            assert_never(schedule)


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
        case SkinnySchedule():
            return gemm_skinny.contract(group, schedule, context)
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
