"""A whole plan as one LLVM module: its distinct kernels, and its steps as constant tables.

The module exports ``run(ptr bases)``, where ``bases`` holds the address of every planned buffer
and, in plans that call the host, that of the callback; and ``profile(ptr bases, ptr times)``, which
also adds nanoseconds and a run to the pair that ``times`` has for each row. Both hand the tables
(``vkjit.lowering.llvm.rows``) to ``vkjit_execute`` of the runtime, which runs the steps in order
and lets each finish before the next starts; so barriers need no code.
"""

from __future__ import annotations

from typing import final

from vkjit.errors import InternalError
from vkjit.lowering.artifact import Launch, Plan, Range, Role
from vkjit.lowering.kernel.nodes import Kernel
from vkjit.lowering.kernel.types import Access
from vkjit.lowering.llvm.emit import DOMAIN, EMPTY, kernel_text, scope_number
from vkjit.lowering.llvm.rows import Row, Rows
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

    def text(self) -> str:
        """The module."""
        rows = Rows(self._plan, self._launch)
        return "\n".join(
            (
                *_tables(rows),
                "@vkjit.zero = private constant [64 x i8] zeroinitializer, align 64",
                "declare void @vkjit_execute(ptr, i64, ptr, i64, ptr, i64, ptr, ptr)",
                *self._declarations.lines(),
                *self._functions,
                *_entries(rows),
                f'attributes #0 = {{ nounwind "prefer-vector-width"="{self._vector_bits}" }}',
                *_scopes(self._slots),
                "",
            )
        )

    def _launch(self, step: Launch) -> str:
        """The function of a launch."""
        kernel = step.kernel
        for buffer, given in zip(kernel.buffers, step.arguments, strict=True):
            if buffer.length * buffer.elem.bytes > given.size:
                raise InternalError(
                    f"llvm: kernel {kernel.name} declares {buffer.name} with {buffer.length} "
                    f"{buffer.elem}, but gets {given.size} bytes"
                )
        return "@" + self._function(kernel, self._exposed(step))

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


def _tables(rows: Rows) -> list[str]:
    """The constants that ``vkjit_execute`` reads."""
    return [
        _table("rows", "{ ptr, i64, i64, i64 }", [_row(row) for row in rows.rows]),
        _table("entries", "[2 x i64]", [f"[i64 {a}, i64 {b}]" for a, b in rows.entries]),
        _table(
            "cursors", "[3 x i64]", [f"[i64 {a}, i64 {b}, i64 {c}]" for a, b, c in rows.cursors]
        ),
    ]


def _table(name: str, of: str, elements: list[str]) -> str:
    listed = ", ".join(f"{of} {text}" for text in elements)
    return f"@vkjit.{name} = private constant [{len(elements)} x {of}] [{listed}]"


def _row(row: Row) -> str:
    code = row.code if isinstance(row.code, str) else f"inttoptr (i64 {int(row.code)} to ptr)"
    return f"{{ ptr {code}, i64 {row.n}, i64 {row.first}, i64 {row.used} }}"


def _entries(rows: Rows) -> tuple[str, str]:
    """The exported functions."""
    tables = (
        f"ptr @vkjit.rows, i64 {len(rows.rows)}, ptr @vkjit.entries, i64 {rows.slots}, "
        f"ptr @vkjit.cursors, i64 {len(rows.cursors)}, ptr %bases"
    )
    return (
        "define void @run(ptr %bases) {\n"
        f"  call void @vkjit_execute({tables}, ptr null)\n  ret void\n}}",
        "define void @profile(ptr %bases, ptr %times) {\n"
        f"  call void @vkjit_execute({tables}, ptr %times)\n  ret void\n}}",
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
