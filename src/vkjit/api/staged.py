"""A function on its way to a device: program, groups, kernels, plan, memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

from vkjit.api.budget import within_budget
from vkjit.api.costs import CostAnalysis, cost_analysis
from vkjit.api.flat import flatten_call
from vkjit.api.memory import MemoryTimeline, memory_timeline
from vkjit.control.offload import at_home
from vkjit.dtypes import DType, of_array
from vkjit.errors import ArgumentError
from vkjit.ir.avals import Aval, aval
from vkjit.ir.primitive import Value
from vkjit.ir.program import Program
from vkjit.ir.text import text
from vkjit.lowering.artifact import Launch, Plan, Role, leaves
from vkjit.lowering.compile import Choose, Compiled, Known, compile_program
from vkjit.lowering.kernel.text import text as kernel_text
from vkjit.lowering.plan.groups_text import groups_text
from vkjit.lowering.plan_text import plan_text
from vkjit.lowering.spirv.emit import emit
from vkjit.lowering.spirv.text import text as assembly
from vkjit.lowering.target import Target, TargetKind
from vkjit.passes.pipeline import simplify
from vkjit.trace import Traced


@final
@dataclass(frozen=True)
class MemoryReport:
    """Bytes of one call, known before it runs.

    ``peak`` is the sum of the others: nothing else is allocated on the device. ``live_temporaries``
    is the largest sum of temporaries alive at once; ``temporaries`` is what their arena takes.
    ``host`` bytes of offloaded values come on top, in memory of the host.
    """

    inputs: int
    outputs: int
    donated: int
    constants: int
    temporaries: int
    live_temporaries: int
    peak: int
    host: int = 0

    def __str__(self) -> str:
        rows = [(k, getattr(self, k)) for k in self.__dataclass_fields__]
        return "\n".join(f"{k.replace('_', ' '):<17} {v:>14,} bytes" for k, v in rows)


@final
class Lowered:
    """What ``jit`` would run; everything here can be printed without a device."""

    __slots__ = ("compiled", "compiler", "constants", "donated", "program", "target")

    def __init__(
        self,
        program: Program,
        constants: Sequence[Value],
        compiled: Compiled,
        target: Target,
        donated: tuple[int, ...],
    ) -> None:
        self.program = program
        self.constants = tuple(constants)
        self.compiled = compiled
        self.target = target
        self.donated = donated
        self.compiler: Callable[[], Any] | None = None

    def compile(self) -> Any:
        """What can be called with arguments of these shapes and dtypes (``CompiledCall``).

        Raises:
            ArgumentError: this was not made by ``jit(f).lower`` or ``jit(f).trace(...).lower``.
        """
        if self.compiler is None:
            raise ArgumentError("compile: expected what jit(f).lower(...) or .trace(...) made")
        return self.compiler()

    def cost_analysis(self) -> CostAnalysis:
        """Operations and bytes of one call, counted from program and plan."""
        return cost_analysis(self.program, self.plan)

    @property
    def plan(self) -> Plan:
        """Buffers, steps and barriers."""
        return self.compiled.plan

    def as_text(self, stage: str = "program") -> str:
        """The text of a stage: ``program``, ``groups``, ``kernels``, ``plan`` or ``spirv``.

        Raises:
            ArgumentError: there is no such stage, or the target takes no SPIR-V.
        """
        match stage:
            case "program":
                return text(self.program, lines=True)
            case "groups":
                return groups_text(self.compiled.groups)
            case "kernels":
                steps = [s for s in leaves(self.plan.steps) if isinstance(s, Launch)]
                distinct = dict.fromkeys(kernel_text(s.kernel) for s in steps)
                return "\n\n".join(distinct)
            case "plan":
                return plan_text(self.plan)
            case "spirv":
                return self.spirv()
            case _:
                raise ArgumentError(
                    f"as_text: stage {stage!r}, expected 'program', 'groups', 'kernels', 'plan' or "
                    "'spirv'"
                )

    def spirv(self, target: Target | None = None) -> str:
        """The SPIR-V of every kernel as assembly text, with names and source lines.

        ``OpName`` names kernels, buffers and loop variables, ``OpSource`` the operations of all
        launches of a kernel, ``OpLine`` the line of the first. Where there is no GPU, give a target
        to lower for, such as ``MINIMAL_GPU`` of ``vkjit.lowering.target``::

            print(vj.jit(f).lower(x).spirv(MINIMAL_GPU))

        Args:
            target: a GPU; by default the one that was lowered for.

        Raises:
            ArgumentError: the target is no GPU.
        """
        chosen = target or self.target
        if chosen.kind is not TargetKind.GPU:
            raise ArgumentError(
                f"spirv: {chosen.name} takes no SPIR-V; lower with default_device('vulkan:0'), or "
                "give a GPU target, such as spirv(vkjit.lowering.target.MINIMAL_GPU)"
            )
        plan = self.plan
        if chosen is not self.target:
            plan = compile_program(self.program, chosen, len(self.constants), self.donated).plan
        return spirv_text(plan, chosen)

    def memory_report(self) -> MemoryTimeline:
        """What is alive when, by source line: the peak and what makes it; ``save`` draws it."""
        return memory_timeline(self.program, self.compiled)

    def memory(self) -> MemoryReport:
        """Bytes of one call."""

        def total(role: Role) -> int:
            return sum(b.size for b in self.plan.buffers if b.role is role and b.donated is None)

        taken = sum(b.size for b in self.plan.buffers if b.donated is not None)
        return MemoryReport(
            inputs=total(Role.INPUT),
            outputs=total(Role.OUTPUT),
            donated=taken,
            constants=total(Role.CONSTANT),
            temporaries=self.plan.arena_bytes,
            live_temporaries=self.compiled.arena.live_peak,
            peak=self.plan.peak_bytes,
            host=self.plan.host_bytes,
        )


def lower(
    traced: Traced,
    target: Target,
    donated: tuple[int, ...] = (),
    choose: Choose | None = None,
    budget: int = 0,
) -> Lowered:
    """Simplifies and lowers a traced function; captured values become constants.

    ``choose`` picks schedules of products; ``budget`` bounds the bytes of a call, unless 0.

    Raises:
        MemoryBudgetError: no plan was found that fits the budget.
    """
    known: Known = {}
    simple = simplify(traced.program)
    if target.kind is TargetKind.CPU:
        simple = at_home(simple)
    program, constants = _read(simple, traced.captured)

    def plan(program: Program) -> Compiled:
        return compile_program(program, target, len(constants), donated, choose, known)

    made = within_budget(program, budget, target, plan)
    return Lowered(made.program, constants, made.compiled, target, donated)


def _read(program: Program, captured: Sequence[Value]) -> tuple[Program, tuple[Value, ...]]:
    """The program without the captured values that nothing reads, and the others."""
    used: set[object] = {a for eqn in program.eqns for a in eqn.args}
    used.update(program.results)
    lead = len(captured)
    pairs = [(v, c) for v, c in zip(program.params, captured, strict=False) if v in used]
    params = (*[v for v, _ in pairs], *program.params[lead:])
    made = Program(params, program.eqns, program.results, program.name)
    return made, tuple([c for _, c in pairs])


def lower_program(
    program: Program, constants: Sequence[Value], target: Target, donated: tuple[int, ...]
) -> Lowered:
    """Lowers a simplified program whose first parameters are ``constants``."""
    compiled = compile_program(program, target, len(constants), donated)
    return Lowered(program, constants, compiled, target, donated)


def spirv_text(plan: Plan, target: Target) -> str:
    """The modules of a plan's kernels, each once, with the origins of all its launches.

    Steps are numbered as the leaves of the plan are.
    """
    launches: dict[int, list[tuple[int, Launch]]] = {}
    for position, step in enumerate(leaves(plan.steps)):
        if isinstance(step, Launch):
            launches.setdefault(id(step.kernel), []).append((position, step))
    modules: list[str] = []
    for found in launches.values():
        kernel = copy.copy(found[0][1].kernel)
        kernel.origin = tuple(dict.fromkeys(text for _, step in found for text in step.origin))
        steps = ", ".join(str(position) for position, _ in found)
        modules.append(
            f"; kernel {kernel.name}, grid {kernel.grid}, steps {steps} of {plan.name}\n"
            f"{assembly(emit(kernel, target))}"
        )
    return "\n".join(modules)


def make_ir(fn: Callable[..., Any]) -> Callable[..., Program]:
    """A function that returns the Program of ``fn`` for its arguments; print it to read it.

    Values that ``fn`` closes over are the first parameters.
    """

    def wrapped(*args: Any, **kwargs: Any) -> Program:
        flat, leaves = flatten_call(fn, args, kwargs)
        return flat.trace(leaves).program

    return wrapped


@final
@dataclass(frozen=True)
class ShapeDtypeStruct:
    """A shape and dtype in the place of an array."""

    shape: tuple[int, ...]
    dtype: DType
    weak_type: bool = False

    def __init__(self, shape: Sequence[int], dtype: object, *, weak_type: bool = False) -> None:
        object.__setattr__(self, "shape", tuple(shape))
        object.__setattr__(self, "dtype", of_array(dtype))
        object.__setattr__(self, "weak_type", weak_type)

    @property
    def aval(self) -> Aval:
        """The abstract value."""
        return aval(self.shape, self.dtype, self.weak_type)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.aval.size


def eval_shape(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Shapes and dtypes of ``fn``'s result, without computing anything.

    Arguments may be arrays or anything with a shape and dtype, such as ``ShapeDtypeStruct``.
    """
    flat, leaves = flatten_call(fn, args, kwargs)
    traced = flat.trace(leaves)
    outs = [ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak) for a in traced.program.out_avals]
    return flat.result(outs)
