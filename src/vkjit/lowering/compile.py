"""From a program to a plan: partition, templates, legalization, memory, barriers, checks."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import assert_never, final

from vkjit.errors import InternalError
from vkjit.ir.program import Program
from vkjit.lowering.artifact import Plan
from vkjit.lowering.assemble import (
    Layout,
    is_copy,
    one_by_one,
    prepack_limit,
    split_constant,
    updated_in_place,
)
from vkjit.lowering.cpu import lower as cpu
from vkjit.lowering.gpu import lower as gpu
from vkjit.lowering.gpu.choose import candidates
from vkjit.lowering.gpu.choose import serves as template_serves
from vkjit.lowering.kernel.check import verify
from vkjit.lowering.legalize import legalize
from vkjit.lowering.nested import Nesting, Place
from vkjit.lowering.plan.canonical import canonical
from vkjit.lowering.plan.cluster import MAX_ARRAYS
from vkjit.lowering.plan.groups import (
    ArrayInfo,
    ContractGroup,
    Group,
    LoopGroup,
    Partition,
    Work,
    reads,
)
from vkjit.lowering.plan.hazards import check_order
from vkjit.lowering.plan.memory import Arena
from vkjit.lowering.plan.partition import partition
from vkjit.lowering.plan.rebase import rebased
from vkjit.lowering.plan.schedule import GpuContract
from vkjit.lowering.plan.turns import check_turns
from vkjit.lowering.plan.workspace import Workspace
from vkjit.lowering.sharing import in_levels, without_copies
from vkjit.lowering.steps import AnyStep, Arrays, KernelStep
from vkjit.lowering.target import Target, TargetKind
from vkjit.lowering.templates.context import Lowered, TemplateContext

DEBUG = bool(os.environ.get("VKJIT_DEBUG"))
"""Whether kernels are verified before legalization too; the tests do."""
_PACKING = 1.1
"""Room that a packed operand takes: its edges are padded to whole tiles."""
_GPU_LANES = 4
"""Longest vector of SPIR-V without special capabilities."""


Choose = Callable[[Group, Sequence[ArrayInfo], Target], GpuContract | None]
"""The schedule of a canonical group with these arrays on a target; None is the default one."""


@final
@dataclass(frozen=True, slots=True)
class Choice:
    """What ``Choose`` said of one group, which occurs ``count`` times in the program."""

    group: Group
    infos: tuple[ArrayInfo, ...]
    schedule: GpuContract | None
    count: int


@final
@dataclass(frozen=True, slots=True)
class Compiled:
    """A plan, and the groups and arena it was made from, for inspection.

    ``choices`` has each group that more than one schedule serves, once, if a ``Choose`` was asked.
    ``setup`` runs once, on the constants: it packs them. Its outputs are the last constants of
    ``plan``.
    """

    plan: Plan
    setup: Plan | None
    groups: tuple[Work, ...]
    arena: Arena
    choices: tuple[Choice, ...] = ()


Known = dict[object, tuple[list[Lowered], list[ArrayInfo]]]
"""Kernels of canonical groups, on one target and with one choice of schedules."""


def compile_program(  # noqa: PLR0913  what is lowered, for what, and how
    program: Program,
    target: Target,
    constants: int = 0,
    donated: Collection[int] = (),
    choose: Choose | None = None,
    known: Known | None = None,
) -> Compiled:
    """Lowers ``program`` for ``target``.

    Args:
        program: simplified; every primitive has a kernel spec.
        target: what the device can do.
        constants: number of leading parameters that are uploaded once with the executable.
        donated: positions, among the other parameters, whose memory results may take over.
        choose: picks schedules; None stands for the defaults.
        known: kernels of earlier calls with this target and choice; new ones are added.

    Raises:
        MissingRuleError: the target lacks a type or an operation.
        InternalError: a kernel or the plan is malformed.
    """
    parts, lowering = _lowered(program, target, constants, choose, {} if known is None else known)
    arrays = lowering.arrays
    steps = split_constant(lowering.steps, constants, parts.results, arrays)
    setup = None
    if steps.once:
        before = Layout(arrays, constants, steps.kept)
        setup, _ = before.plan(f"{program.name}.setup", one_by_one(steps.once))
        check_order(setup)
    layout = Layout(arrays, parts.inputs, parts.results, constants, steps.kept)
    each_call = without_copies(steps.each_call, arrays, layout.outside())
    each_call = layout.donate(each_call, donated)
    levels = one_by_one(each_call)
    if target.kind is TargetKind.GPU:
        levels = in_levels(each_call, arrays, layout.outside())
    plan, space = layout.plan(program.name, levels, target.max_buffer_bytes)
    check_order(plan)
    check_turns(plan)
    return Compiled(plan, setup, parts.groups, space, lowering.choices())


def _lowered(
    program: Program, target: Target, constants: int, choose: Choose | None, known: Known
) -> tuple[Partition, _Lowering]:
    """Groups and their kernels; smaller groups where a kernel has more arrays than can be bound."""
    most = MAX_ARRAYS
    while True:
        parts = partition(program, Workspace(most))
        lowering = _Lowering(target, constants, choose, known)
        lowering.add(parts)
        if most == 0 or not lowering.binds_too_many():
            return parts, lowering
        most //= 2


@final
class _Lowering:
    """Kernels of the groups so far; equal groups share theirs."""

    def __init__(self, target: Target, constants: int, choose: Choose | None, known: Known) -> None:
        self.target = target
        self.choose = choose
        self.chosen: dict[tuple[Group, tuple[ArrayInfo, ...]], GpuContract | None] = {}
        self.uses: Counter[tuple[Group, tuple[ArrayInfo, ...]]] = Counter()
        self.arrays = Arrays()
        self.constants = constants
        self.packing = prepack_limit()
        self.steps: list[AnyStep] = []
        self.known = known
        self.most_bound = 0

    def add(self, parts: Partition) -> None:
        """Adds the arrays and steps of a program; those of its parameters come first."""
        self.steps += Nesting(self.target, self.arrays, self.kernels).program(parts, Place()).steps

    def kernels(self, group: Group, first: int, times: int) -> list[KernelStep]:
        """The steps of one group, whose array 0 has the number ``first``."""
        whole_group, outside = canonical(group)
        outside = tuple([first + a for a in outside])
        fixed = self.packable(whole_group, outside)
        named, copies = updated_in_place(whole_group), is_copy(whole_group)
        infos = tuple([self.arrays.infos[a] for a in outside])
        key_group, parts = rebased(whole_group, infos, self.target.alignment)
        outside = tuple(map(self.arrays.part, outside, parts))
        infos = tuple([self.arrays.infos[a] for a in outside])
        key = (key_group, infos, fixed)
        found = self.known.get(key)
        schedule = self.scheduled(key_group, infos)
        if found is None:
            context = TemplateContext(self.target, list(infos), fixed)
            found = self.known[key] = lower_group(key_group, schedule, context)
        if self.choose is not None:
            self.uses[key_group, infos] += times
        kernels, temporaries = found
        self.most_bound = max([self.most_bound, *(len(i.kernel.buffers) for i in kernels)])
        start = self.arrays.add(temporaries)
        inside = (*outside, *range(start, start + len(temporaries)))
        decodes = any(step.blocks is not None for step in reads(group))
        in_place = frozenset([(inside[a], inside[b]) for a, b in named])
        return [
            KernelStep(
                item.kernel,
                tuple([inside[a] for a in item.arrays]),
                group.origin,
                in_place,
                copies,
                decodes,
            )
            for item in kernels
        ]

    def binds_too_many(self) -> bool:
        """Whether a kernel has more arrays than the target binds."""
        return 0 < self.target.max_bindings < self.most_bound

    def packable(self, group: Group, outside: Sequence[int]) -> frozenset[int]:
        """Constant operands of a canonical product that there is memory to keep packed.

        Those in blocks stay in blocks.
        """
        if not isinstance(group, ContractGroup):
            return frozenset()
        operands = {group.lhs.array, group.rhs.array}
        if group.lhs.blocks is not None or group.rhs.blocks is not None:
            return frozenset()
        fixed = {i for i in operands if outside[i] < self.constants}
        spent = int(sum(self.arrays.size(outside[i]) for i in fixed) * _PACKING)
        if not fixed or len(fixed) == len(operands) or spent > self.packing:
            return frozenset()
        self.packing -= spent
        return frozenset(fixed)

    def scheduled(self, group: Group, infos: tuple[ArrayInfo, ...]) -> GpuContract | None:
        """What was chosen for a canonical group."""
        if self.choose is None or not has_choice(group, self.target):
            return None
        key = group, infos
        if key not in self.chosen:
            self.chosen[key] = self.choose(group, infos, self.target)
        return self.chosen[key]

    def choices(self) -> tuple[Choice, ...]:
        """All that was chosen."""
        return tuple(
            [Choice(*key, schedule, self.uses[key]) for key, schedule in self.chosen.items()]
        )


def has_choice(group: Group, target: Target) -> bool:
    """Whether there is anything to choose for a group."""
    return target.kind is TargetKind.GPU and isinstance(group, ContractGroup)


def schedules(group: Group, infos: Sequence[ArrayInfo], target: Target) -> list[GpuContract]:
    """Every schedule that serves a canonical group, the default first; empty: nothing to choose."""
    if target.kind is TargetKind.GPU and isinstance(group, ContractGroup):
        return candidates(group, TemplateContext(target, list(infos)))
    return []


def serves(group: Group, infos: Sequence[ArrayInfo], schedule: GpuContract, target: Target) -> bool:
    """Whether a canonical group can be lowered under ``schedule``, listed above or not."""
    if target.kind is TargetKind.GPU and isinstance(group, ContractGroup):
        return template_serves(group, schedule, TemplateContext(target, list(infos)))
    return False


def lower_group(
    group: Group, schedule: GpuContract | None, context: TemplateContext
) -> tuple[list[Lowered], list[ArrayInfo]]:
    """Checked and legalized kernels of a canonical group, and the temporaries they add.

    The arrays of ``context`` are those of the group; ``schedule`` replaces the default one.
    """
    target, known = context.target, len(context.arrays)
    kernels: list[Lowered] = []
    if DEBUG:
        check_blocks(group)
    lanes = _GPU_LANES if target.kind is TargetKind.GPU else None
    for item in _lower(group, schedule, context):
        if DEBUG:
            verify(item.kernel, lanes)
        kernel = legalize(item.kernel, target)
        verify(kernel, lanes)
        kernels.append(Lowered(kernel, item.arrays))
    return kernels, context.arrays[known:]


def check_blocks(group: Group) -> None:
    """Checks that only loops and products read numbers out of blocks: other templates cannot.

    Those that can see blocks as integers: ``verify`` refuses a kernel that takes them for numbers.

    Raises:
        InternalError: another group does.
    """
    packed = [step for step in reads(group) if step.blocks is not None]
    if packed and not isinstance(group, (LoopGroup, ContractGroup)):
        raise InternalError(
            f"lower {type(group).__name__}: array {packed[0].array} holds {packed[0].blocks}, "
            "expected numbers"
        )


def _lower(group: Group, schedule: GpuContract | None, context: TemplateContext) -> list[Lowered]:
    match context.target.kind:
        case TargetKind.CPU:
            return cpu.lower(group, context)
        case TargetKind.GPU:
            return gpu.lower(group, context, schedule)
        case _:
            assert_never(context.target.kind)
