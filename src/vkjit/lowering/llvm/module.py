"""A whole plan as one LLVM module: its distinct kernels, and its steps as constant tables.

The module exports ``run(ptr bases)``, where ``bases`` holds the address of every planned buffer,
and ``profile(ptr bases, ptr nanoseconds)``, which also writes the duration of each step. Both hand
the tables to ``vkjit_execute`` of the runtime, which runs the steps in order and lets each finish
before the next starts; so barriers need no code.
"""

from __future__ import annotations

from typing import assert_never, final

from vkjit.errors import InternalError
from vkjit.lowering.artifact import Copy, Launch, Plan, Range, Role
from vkjit.lowering.kernel.nodes import Kernel
from vkjit.lowering.kernel.types import Access
from vkjit.lowering.llvm.emit import DOMAIN, EMPTY, kernel_text, scope_number
from vkjit.lowering.llvm.spelling import LIBM_SYMBOLS
from vkjit.lowering.llvm.writer import Declarations
from vkjit.lowering.target import Target, TargetKind

RUNTIME_SYMBOLS = ("vkjit_execute", "vkjit_scratch")
"""What the runtime gives to every module."""

LIBRARY_SYMBOLS = ("memcpy", "memmove", "memset", "fmod", "fmodf", *LIBM_SYMBOLS)
"""What a module may take from the C library."""

EXPORTS = ("run", "profile")


def emit(plan: Plan, target: Target) -> str:
    """The LLVM text of ``plan``, without triple and data layout.

    Equal plans give equal text, whatever the names of their kernels, so the text can be a cache
    key.

    Raises:
        InternalError: a kernel is not one of a CPU schedule, or a launch gives a buffer less
            memory than its kernel declares.
    """
    if target.kind is not TargetKind.CPU:
        raise InternalError(f"llvm: target {target.name} is a {target.kind.value}, expected a cpu")
    return _Module(plan, target).text()


@final
class _Module:
    """Collects the kernels and the table rows of one plan."""

    def __init__(self, plan: Plan, target: Target) -> None:
        self._plan = plan
        self._vector_bits = target.vector_bytes * 8
        self._declarations = Declarations()
        self._seen: dict[tuple[int, frozenset[int]], str] = {}
        self._named: dict[str, str] = {}  # text of a kernel called @k, to its name
        self._functions: list[str] = []
        self._slots = 0
        self._steps: list[str] = []
        self._ranges: list[str] = []

    def text(self) -> str:
        """The module."""
        widest = 1
        for step in self._plan.steps:
            match step:
                case Launch():
                    widest = max(widest, len(step.arguments))
                    self._launch(step)
                case Copy():
                    self._row("null", step.target.size, (step.source, step.target))
                case _:
                    assert_never(step)
        return "\n".join(
            (
                *self._tables(),
                "@vkjit.zero = private constant [64 x i8] zeroinitializer, align 64",
                "declare void @vkjit_execute(ptr, i64, ptr, i64, ptr, ptr)",
                *self._declarations.lines(),
                *self._functions,
                *self._entries(widest),
                f'attributes #0 = {{ nounwind "prefer-vector-width"="{self._vector_bits}" }}',
                *_scopes(self._slots),
                "",
            )
        )

    def _launch(self, step: Launch) -> None:
        kernel = step.kernel
        for buffer, given in zip(kernel.buffers, step.arguments, strict=True):
            if buffer.length * buffer.elem.bytes > given.size:
                raise InternalError(
                    f"llvm: kernel {kernel.name} declares {buffer.name} with {buffer.length} "
                    f"{buffer.elem}, but gets {given.size} bytes"
                )
        name = self._function(kernel, self._exposed(step))
        x, y, z = kernel.grid
        self._row(f"@{name}", x * y * z, step.arguments)

    def _function(self, kernel: Kernel, exposed: frozenset[int]) -> str:
        """The name of the function of ``kernel``, which kernels of equal text share."""
        key = (id(kernel), exposed)
        name = self._seen.get(key)
        if name is None:
            body = kernel_text(kernel, "k", exposed, self._declarations)
            name = self._named.get(body)
            if name is None:
                name = self._named[body] = f"k{len(self._named)}"
                self._functions.append(body.replace("@k(", f"@{name}(", 1))
                self._slots = max(self._slots, len(kernel.buffers) + len(kernel.scratch))
            self._seen[key] = name
        return name

    def _exposed(self, step: Launch) -> frozenset[int]:
        """Positions of arguments that share memory with another one while either is written."""
        accesses = [buffer.access for buffer in step.kernel.buffers]
        found: set[int] = set()
        for i, a in enumerate(step.arguments):
            for j in range(i):
                read_only = accesses[i] is Access.READ and accesses[j] is Access.READ
                if not read_only and self._may_overlap(a, step.arguments[j]):
                    found |= {i, j}
        return frozenset(found)

    def _may_overlap(self, a: Range, b: Range) -> bool:
        """Whether two ranges share bytes, also through an output that takes over an input."""
        if a.buffer == b.buffer:
            return a.overlaps(b)
        return self._owner(a.buffer) == self._owner(b.buffer)

    def _owner(self, index: int) -> int | tuple[str, int]:
        """What two buffers have in common when they are one memory."""
        buffer = self._plan.buffers[index]
        if buffer.role is Role.INPUT:
            return ("input", buffer.position)
        if buffer.donated is not None:
            return ("input", buffer.donated)
        return index

    def _row(self, function: str, tasks: int, ranges: tuple[Range, ...]) -> None:
        first = len(self._ranges)
        self._steps.append(
            f"{{ ptr, i64, i64, i64 }} {{ ptr {function}, i64 {tasks}, i64 {first}, "
            f"i64 {len(ranges)} }}"
        )
        self._ranges.extend(f"[2 x i64] [i64 {r.buffer}, i64 {r.offset}]" for r in ranges)

    def _tables(self) -> tuple[str, str]:
        steps, ranges = ", ".join(self._steps), ", ".join(self._ranges)
        return (
            f"@vkjit.steps = private constant [{len(self._steps)} x {{ ptr, i64, i64, i64 }}] "
            f"[{steps}]",
            f"@vkjit.ranges = private constant [{len(self._ranges)} x [2 x i64]] [{ranges}]",
        )

    def _entries(self, widest: int) -> tuple[str, str]:
        tables = (
            f"ptr @vkjit.steps, i64 {len(self._steps)}, ptr @vkjit.ranges, i64 {widest}, ptr %bases"
        )
        return (
            "define void @run(ptr %bases) {\n"
            f"  call void @vkjit_execute({tables}, ptr null)\n  ret void\n}}",
            "define void @profile(ptr %bases, ptr %nanoseconds) {\n"
            f"  call void @vkjit_execute({tables}, ptr %nanoseconds)\n  ret void\n}}",
        )


def _scopes(slots: int) -> list[str]:
    """Alias scopes: each memory is apart from all others, exposed buffers only from the rest."""
    order: list[int | None] = [None, *range(slots)]
    numbers = [scope_number(slot) for slot in order]
    lines = [f"!{EMPTY} = !{{}}", f'!{DOMAIN} = distinct !{{!{DOMAIN}, !"memory"}}']
    for scope in numbers:
        others = ", ".join(f"!{other}" for other in numbers if other != scope)
        lines.append(f"!{scope} = distinct !{{!{scope}, !{DOMAIN}}}")
        lines.append(f"!{scope + 1} = !{{!{scope}}}")
        lines.append(f"!{scope + 2} = !{{{others}}}")
    return lines
