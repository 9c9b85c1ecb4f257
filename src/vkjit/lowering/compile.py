"""From a program to a plan: partition, templates, legalization, memory, barriers, checks."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import assert_never, final

from vkjit.ir.program import Program
from vkjit.lowering.artifact import Plan
from vkjit.lowering.assemble import (
    KernelStep,
    Layout,
    is_copy,
    prepack_limit,
    split_constant,
    updated_in_place,
)
from vkjit.lowering.cpu import lower as cpu
from vkjit.lowering.gpu import lower as gpu
from vkjit.lowering.kernel.check import verify
from vkjit.lowering.legalize import legalize
from vkjit.lowering.plan.canonical import canonical
from vkjit.lowering.plan.groups import ArrayInfo, ContractGroup, Group
from vkjit.lowering.plan.hazards import check_order
from vkjit.lowering.plan.memory import Arena
from vkjit.lowering.plan.partition import partition
from vkjit.lowering.target import Target, TargetKind
from vkjit.lowering.templates.context import Lowered, TemplateContext, memory_type

DEBUG = bool(os.environ.get("VKJIT_DEBUG"))
"""Whether kernels are verified before legalization too; the tests do."""
_PACKING = 1.1
"""Room that a packed operand takes: its edges are padded to whole tiles."""
_GPU_LANES = 4
"""Longest vector of SPIR-V without special capabilities."""


@final
@dataclass(frozen=True, slots=True)
class Compiled:
    """A plan, and the groups and arena it was made from, for inspection.

    ``setup`` runs once, on the constants: it packs them. Its outputs are the last constants of
    ``plan``.
    """

    plan: Plan
    setup: Plan | None
    groups: tuple[Group, ...]
    arena: Arena


def compile_program(
    program: Program,
    target: Target,
    constants: int = 0,
    donated: Collection[int] = (),
) -> Compiled:
    """Lowers ``program`` for ``target``.

    Args:
        program: simplified; every primitive has a kernel spec.
        target: what the device can do.
        constants: number of leading parameters that are uploaded once with the executable.
        donated: positions, among the other parameters, whose memory results may take over.

    Raises:
        MissingRuleError: the target lacks a type or an operation.
        InternalError: a kernel or the plan is malformed.
    """
    parts = partition(program)
    lowering = _Lowering(target, parts.arrays, constants)
    for group in parts.groups:
        lowering.add(group)
    steps = split_constant(lowering.steps, constants, parts.results, lowering.size)
    layout = Layout(lowering.size, parts.inputs, parts.results, constants, steps.kept)
    layout.donate(steps.each_call, donated)
    levels = [[step] for step in steps.each_call]
    if target.kind is TargetKind.GPU:
        levels = layout.levels(steps.each_call)
    plan, space = layout.plan(program.name, levels)
    check_order(plan)
    setup = None
    if steps.once:
        before = Layout(lowering.size, constants, steps.kept)
        setup, _ = before.plan(f"{program.name}.setup", [[step] for step in steps.once])
        check_order(setup)
    return Compiled(plan, setup, parts.groups, space)


@final
class _Lowering:
    """Kernels of the groups so far; equal groups share theirs."""

    def __init__(self, target: Target, arrays: Sequence[ArrayInfo], constants: int) -> None:
        self.target = target
        self.arrays = list(arrays)
        self.constants = constants
        self.packing = prepack_limit()
        self.steps: list[KernelStep] = []
        self.known: dict[object, tuple[list[Lowered], list[ArrayInfo]]] = {}

    def add(self, group: Group) -> None:
        """Appends the steps of one group."""
        key_group, outside = canonical(group)
        infos = tuple([self.arrays[a] for a in outside])
        fixed = self.packable(group, outside)
        key = (key_group, infos, fixed)
        found = self.known.get(key)
        if found is None:
            found = self.known[key] = self.lowered(key_group, infos, fixed)
        kernels, temporaries = found
        in_place, copies = updated_in_place(group), is_copy(group)
        inside = list(outside)
        for info in temporaries:
            self.arrays.append(info)
            inside.append(len(self.arrays) - 1)
        for item in kernels:
            arrays = tuple([inside[a] for a in item.arrays])
            self.steps.append(KernelStep(item.kernel, arrays, group.origin, in_place, copies))

    def size(self, array: int) -> int:
        """Bytes of an array."""
        info = self.arrays[array]
        return info.length * memory_type(info.elem).bytes

    def packable(self, group: Group, outside: Sequence[int]) -> frozenset[int]:
        """Constant operands of a product that there is memory to keep packed, by new number."""
        if not isinstance(group, ContractGroup):
            return frozenset()
        operands = {group.lhs.array, group.rhs.array}
        fixed = {a for a in operands if a < self.constants}
        spent = int(sum(self.size(a) for a in fixed) * _PACKING)
        if not fixed or len(fixed) == len(operands) or spent > self.packing:
            return frozenset()
        self.packing -= spent
        return frozenset(i for i, a in enumerate(outside) if a in fixed)

    def lowered(
        self, group: Group, infos: Sequence[ArrayInfo], fixed: frozenset[int]
    ) -> tuple[list[Lowered], list[ArrayInfo]]:
        """Checked and legalized kernels of a canonical group, and the temporaries they add."""
        context = TemplateContext(self.target, list(infos), fixed)
        kernels: list[Lowered] = []
        lanes = _GPU_LANES if self.target.kind is TargetKind.GPU else None
        for item in _lower(group, context):
            if DEBUG:
                verify(item.kernel, lanes)
            kernel = legalize(item.kernel, self.target)
            verify(kernel, lanes)
            kernels.append(Lowered(kernel, item.arrays))
        return kernels, context.arrays[len(infos) :]


def _lower(group: Group, context: TemplateContext) -> list[Lowered]:
    match context.target.kind:
        case TargetKind.CPU:
            return cpu.lower(group, context)
        case TargetKind.GPU:
            return gpu.lower(group, context)
        case _:
            assert_never(context.target.kind)
