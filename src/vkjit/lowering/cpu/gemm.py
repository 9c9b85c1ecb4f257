"""Products on the CPU: register tiles over packed or strided operands, with a fused epilogue.

A task computes a block of tiles of one batch item: it packs what it must, and for each column of
tiles, for each tile, sums into registers, leaves the sums in a small scratch tile and runs the
body of the group over it in vectors along n. A sum too long for the cache runs in blocks; its
partial sums then wait in scratch memory, and the body runs at the end. An operand in quantized
blocks stays in them: tasks decode it as they pack, or as they sum where rows are few.
"""

from __future__ import annotations

import math
from dataclasses import replace

from vkjit.lowering.cpu import gemm_schedule as schedules
from vkjit.lowering.cpu.gemm_operand import operand
from vkjit.lowering.cpu.gemm_pack import Packed, pack_kernel
from vkjit.lowering.cpu.gemm_task import Task
from vkjit.lowering.plan.groups import ContractGroup
from vkjit.lowering.plan.schedule import ContractSchedule
from vkjit.lowering.templates.context import Lowered, TemplateContext
from vkjit.lowering.templates.products import swapped, with_few_axes

_MOST_PACKED = 1 << 23
"""Elements of a large operand of a blocked sum: 32 MiB of f32."""
_NARROW = 16
"""Columns of a narrow output."""


def contract(
    group: ContractGroup, schedule: ContractSchedule | None, context: TemplateContext
) -> list[Lowered]:
    """Kernels that compute a product and the body on it, packing first; none for an empty output.

    A ``schedule`` is for the group as ``normalised`` gives it.

    Raises:
        InternalError: the schedule does not fit the group or the target.
    """
    if 0 in (*group.batch, group.m, group.n):
        return []
    group = normalised(group)
    schedule = schedule or schedules.default_schedule(group, context.target)
    fixed = _constant_operands(group, schedule, context)
    schedule = replace(
        schedule,
        pack_lhs=schedule.pack_lhs or "lhs" in fixed,
        pack_rhs=schedule.pack_rhs or "rhs" in fixed,
    )
    schedules.validate(group, schedule, context.target)
    kernels: list[Lowered] = []
    packed: dict[str, Packed] = {}
    for name in dict.fromkeys([*_packed_apart(group, schedule), *fixed]):
        side = operand(group, schedule, name, schedules.vector_lanes(group, context.target))
        lowered, packed[name] = pack_kernel(group, side, context)
        kernels.append(lowered)
    return [*kernels, Task(group, schedule, context, packed).lowered()]


def normalised(group: ContractGroup) -> ContractGroup:
    """The same group with its stores along n where possible, over few batch axes."""
    return with_few_axes(swapped(group) if _prefers_m(group) else group)


def _prefers_m(group: ContractGroup) -> bool:
    """Whether vectors should run along m.

    So they should for blocks of lhs, unless rhs has blocks, too: those of rhs are decoded once for
    many rows. Of numbers they should where the first store is contiguous along m and not along n,
    and where n is so small that writing columns costs little, while lhs can be read along m as it
    lies.
    """
    if group.rhs.blocks or group.lhs.blocks:
        return group.rhs.blocks is None
    strides = group.stores[0].view.strides
    along_n = group.n > 1 and strides[-1] == 1
    if group.m > 1 and not along_n and strides[-2] == 1:
        return True
    narrow = group.n <= _NARROW and group.m >= 4 * group.n and group.k >= 4 * _NARROW
    return narrow and group.lhs.view.strides[-2] == 1


def _constant_operands(
    group: ContractGroup, schedule: ContractSchedule, context: TemplateContext
) -> list[str]:
    """Operands worth packing because it is done once and for all: constants of a whole sum.

    Blocks stay as they are: packed, they would take the memory of the numbers.
    """
    if schedule.block_k or schedules.is_dot(group, schedule):
        return []
    steps = {"lhs": group.lhs, "rhs": group.rhs}
    return [
        name
        for name, step in steps.items()
        if step.array in context.constants and step.blocks is None
    ]


def _packed_apart(group: ContractGroup, schedule: ContractSchedule) -> list[str]:
    """The operands that a kernel of their own packs, because several tasks read them.

    A very large operand is packed by each task, block by block: copying it whole would cost more
    than the time that sharing saves. Blocks are unpacked by each task, panel by panel.
    """
    shared = {
        "lhs": schedule.pack_lhs and 0 < schedule.block_n < group.n,
        "rhs": schedule.pack_rhs and not group.rhs.blocks and 0 < schedule.block_m < group.m,
    }
    elements = {"lhs": group.m * group.k, "rhs": group.k * group.n}
    return [
        name
        for name, several in shared.items()
        if several and 0 < elements[name] <= (_MOST_PACKED if schedule.block_k else math.inf)
    ]
