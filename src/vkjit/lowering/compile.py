"""From a program to a plan: partition, templates, legalization, memory, barriers, checks."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import assert_never, final

from vkjit.ir.program import Program
from vkjit.lowering.artifact import Launch, Plan, PlannedBuffer, Range, Role
from vkjit.lowering.cpu import lower as cpu
from vkjit.lowering.gpu import lower as gpu
from vkjit.lowering.kernel.check import verify
from vkjit.lowering.kernel.nodes import Kernel
from vkjit.lowering.legalize import legalize
from vkjit.lowering.plan.canonical import canonical
from vkjit.lowering.plan.groups import ArrayInfo, Group
from vkjit.lowering.plan.hazards import barriers, check_order
from vkjit.lowering.plan.memory import Arena, arena, lifetimes
from vkjit.lowering.plan.partition import partition
from vkjit.lowering.target import Target, TargetKind
from vkjit.lowering.templates.context import Lowered, TemplateContext, memory_type


_GPU_LANES = 4
"""Longest vector of SPIR-V without special capabilities."""


@final
@dataclass(frozen=True, slots=True)
class Compiled:
    """A plan, and the groups and arena it was made from, for inspection."""

    plan: Plan
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
    lowering = _Lowering(target, parts.arrays)
    for group in parts.groups:
        lowering.add(group)
    layout = _Layout(lowering.arrays, parts.inputs, parts.results, constants)
    layout.donate(lowering.steps, donated)
    plan, space = layout.plan(program.name, lowering.steps)
    check_order(plan)
    return Compiled(plan, parts.groups, space)


@final
@dataclass(frozen=True, slots=True)
class _Step:
    """A legalized kernel, the arrays behind its buffers, and what it computes."""

    kernel: Kernel
    arrays: tuple[int, ...]
    origin: tuple[str, ...]


@final
class _Lowering:
    """Kernels of the groups so far; equal groups share theirs."""

    def __init__(self, target: Target, arrays: Sequence[ArrayInfo]) -> None:
        self.target = target
        self.arrays = list(arrays)
        self.steps: list[_Step] = []
        self.known: dict[object, tuple[list[Lowered], list[ArrayInfo]]] = {}

    def add(self, group: Group) -> None:
        """Appends the steps of one group."""
        key_group, outside = canonical(group)
        infos = tuple([self.arrays[a] for a in outside])
        key = (key_group, infos)
        found = self.known.get(key)
        if found is None:
            found = self.known[key] = self.lowered(key_group, infos)
        kernels, temporaries = found
        inside = list(outside)
        for info in temporaries:
            self.arrays.append(info)
            inside.append(len(self.arrays) - 1)
        for item in kernels:
            arrays = tuple([inside[a] for a in item.arrays])
            self.steps.append(_Step(item.kernel, arrays, group.origin))

    def lowered(
        self, group: Group, infos: Sequence[ArrayInfo]
    ) -> tuple[list[Lowered], list[ArrayInfo]]:
        """Checked and legalized kernels of a canonical group, and the temporaries they add."""
        context = TemplateContext(self.target, list(infos))
        kernels: list[Lowered] = []
        lanes = _GPU_LANES if self.target.kind is TargetKind.GPU else None
        for item in _lower(group, context):
            verify(item.kernel, lanes)
            kernel = legalize(item.kernel, self.target)
            if kernel is not item.kernel:
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


@final
class _Layout:
    """Buffers of the plan: constants, inputs, results and the arena, and which array lies where."""

    def __init__(
        self, arrays: Sequence[ArrayInfo], inputs: int, results: Sequence[int], constants: int
    ) -> None:
        self.arrays = arrays
        self.inputs = inputs
        self.results = list(results)
        self.constants = constants
        self.taken: dict[int, int] = {}

    def size(self, array: int) -> int:
        """Bytes of an array."""
        info = self.arrays[array]
        return info.length * memory_type(info.elem).bytes

    def donate(self, lowered: Sequence[_Step], donated: Collection[int]) -> None:
        """Lets results take over donated inputs of their size whose last reader comes first.

        A kernel may read the input and write the result only if it touches each element once, which
        is not known here: the reader must be an earlier kernel than the first writer.
        """
        last_read, first_write = _spans(lowered)
        free = [self.constants + d for d in donated]
        for result in self.results:
            for candidate in free:
                fits = self.size(candidate) == self.size(result)
                before = last_read.get(candidate, -1) < first_write.get(result, math.inf)
                if fits and before:
                    free.remove(candidate)
                    self.taken[result] = candidate - self.constants
                    break

    def plan(self, name: str, lowered: Sequence[_Step]) -> tuple[Plan, Arena]:
        """The finished plan and its arena."""
        named = {*range(self.inputs), *self.results}
        temporary = {a: self.size(a) for a in range(len(self.arrays)) if a not in named}
        space = arena(lifetimes([item.arrays for item in lowered], temporary))
        buffers: list[PlannedBuffer] = []
        where: dict[int, Range] = {}
        for array in range(self.inputs):
            constant = array < self.constants
            role = Role.CONSTANT if constant else Role.INPUT
            position = array if constant else array - self.constants
            where[array] = Range(len(buffers), 0, self.size(array))
            buffers.append(PlannedBuffer(role, self.size(array), position))
        for position, array in enumerate(self.results):
            taken = self.taken.get(array)
            if taken is None:
                where[array] = Range(len(buffers), 0, self.size(array))
            else:
                where[array] = where[taken + self.constants]
            buffers.append(PlannedBuffer(Role.OUTPUT, self.size(array), position, taken))
        for array, offset in space.offsets.items():
            where[array] = Range(len(buffers), offset, self.size(array))
        if space.size:
            buffers.append(PlannedBuffer(Role.ARENA, space.size))
        steps = tuple(Launch(item.kernel, tuple(where[a] for a in item.arrays)) for item in lowered)
        peak = sum(b.size for b in buffers if b.donated is None)
        return Plan(name, tuple(buffers), steps, barriers(steps), peak, space.size), space


def _spans(lowered: Sequence[_Step]) -> tuple[dict[int, int], dict[int, int]]:
    """Last step that uses each array, and the first that does."""
    last: dict[int, int] = {}
    first: dict[int, int] = {}
    for position, item in enumerate(lowered):
        for array in item.arrays:
            last[array] = position
            first.setdefault(array, position)
    return last, first
