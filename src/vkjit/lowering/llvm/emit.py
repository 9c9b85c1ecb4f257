"""One kernel as one LLVM function ``void @name(ptr args, i64 begin, i64 end)``.

``args`` is a table of buffer pointers in the order of ``kernel.buffers``; the function runs the
workgroups ``begin <= t < end`` of the grid, x fastest, and at least one. A workgroup has one
invocation, so barriers are nothing and both kinds of scratch are memory of the running thread.
"""

from __future__ import annotations

from typing import final

from vkjit.errors import InternalError
from vkjit.lowering.kernel.nodes import (
    AtomicAdd,
    Barrier,
    Const,
    For,
    If,
    Index,
    Kernel,
    Load,
    MatConvert,
    MatFill,
    MatLoad,
    MatMap,
    MatMulAdd,
    MatStore,
    Node,
    Region,
    Store,
    SubgroupReduce,
    SubgroupShuffle,
    TensorLoad,
    TensorStore,
    Value,
)
from vkjit.lowering.kernel.types import (
    I1,
    I64,
    IndexKind,
    Memory,
    VecType,
    scalar_of,
)
from vkjit.lowering.llvm import spelling
from vkjit.lowering.llvm.arithmetic import expression
from vkjit.lowering.llvm.spelling import mangled, type_text
from vkjit.lowering.llvm.writer import Declarations, Writer

STACK_LIMIT = 64 * 1024
"""Scratch up to this many bytes lives on the stack, more in the thread's own block."""

SCRATCH_ALIGN = 64


# Metadata numbers: 0 is the empty node, 1 the alias domain, then three for each scope: the scope,
# the list of it alone, the list of all others. All kernels of a module share the scopes.
EMPTY, DOMAIN = 0, 1


def scope_number(slot: int | None) -> int:
    """Number of the alias scope of a memory slot; None is the scope of all exposed buffers."""
    return 2 if slot is None else 5 + 3 * slot


def kernel_text(
    kernel: Kernel, name: str, exposed: frozenset[int], declarations: Declarations
) -> str:
    """The definition of ``kernel`` under ``name``.

    ``exposed`` are the positions of buffers that may overlap each other; all other memory is taken
    to be apart.
    """
    return _Function(kernel, exposed, declarations).text(name)


@final
class _Function:
    """Writes one function: its memory and control; ``expression`` writes the rest."""

    def __init__(self, kernel: Kernel, exposed: frozenset[int], declarations: Declarations) -> None:
        if kernel.workgroup != (1, 1, 1):
            raise InternalError(
                f"llvm: kernel {kernel.name} has workgroups of {kernel.workgroup}, expected "
                "(1, 1, 1); only kernels of CPU schedules run on a CPU"
            )
        self._kernel = kernel
        self._exposed = exposed
        self._w = Writer(kernel.name, declarations)
        self._pointers: dict[Memory, str] = {}
        self._metadata: dict[Memory, str] = {}

    def text(self, name: str) -> str:
        """The whole function."""
        self._open_buffers()
        self._open_scratch()
        self._w.line("br label %task")
        self._w.start("task")
        self._w.line("%t = phi i64 [ %begin, %entry ], [ %t.next, %done ]")
        self._region(self._kernel.body)
        self._w.line("br label %done")
        self._w.start("done")
        self._w.line("%t.next = add nuw nsw i64 %t, 1")
        self._w.line("%more = icmp slt i64 %t.next, %end")
        self._w.line("br i1 %more, label %task, label %exit")
        self._w.start("exit")
        self._w.line("ret void")
        head = f"define internal void @{name}(ptr noalias readonly %args, i64 %begin, i64 %end) #0"
        return "\n".join((f"{head} {{", "entry:", *self._w.lines, "}"))

    # -- memory ---------------------------------------------------------------------------------

    def _open_buffers(self) -> None:
        for slot, buffer in enumerate(self._kernel.buffers):
            at = self._w.value(f"getelementptr inbounds ptr, ptr %args, i64 {slot}")
            size = buffer.length * buffer.elem.bytes
            self._pointers[buffer] = self._w.value(
                f"load ptr, ptr {at}, align 8, !invariant.load !0, !nonnull !0, !noundef !0, "
                f"!dereferenceable !{{i64 {size}}}"
            )
            shown = None if slot in self._exposed else slot
            self._metadata[buffer] = _aliasing(shown)

    def _open_scratch(self) -> None:
        offsets: list[int] = []
        total = 0
        for scratch in self._kernel.scratch:
            offsets.append(total)
            size = scratch.length * scratch.elem.bytes
            total += -(-size // SCRATCH_ALIGN) * SCRATCH_ALIGN
        if total == 0:
            return
        base = ""
        if total > STACK_LIMIT:
            self._w.declarations.need("vkjit_scratch", "noalias nonnull align 64 ptr", "i64")
            base = self._w.value(f"call ptr @vkjit_scratch(i64 {total})")
        first = len(self._kernel.buffers)
        for position, scratch in enumerate(self._kernel.scratch):
            size = scratch.length * scratch.elem.bytes
            if total > STACK_LIMIT:
                pointer = self._w.value(
                    f"getelementptr inbounds i8, ptr {base}, i64 {offsets[position]}"
                )
            else:
                pointer = self._w.value(f"alloca [{size} x i8], align {SCRATCH_ALIGN}")
            self._pointers[scratch] = pointer
            self._metadata[scratch] = _aliasing(first + position)

    def _address(self, node: Load | Store | AtomicAdd) -> str:
        """A pointer, or a vector of pointers, to the elements that ``node`` may touch.

        A masked access may have an address outside its memory where the mask is false.
        """
        memory, index = node.memory, node.index
        elem = type_text(memory.elem)
        operand = f"{type_text(index.type)} {self._w.use(index)}"
        opcode = "getelementptr" if _is_masked(node) else "getelementptr inbounds"
        return self._w.value(f"{opcode} {elem}, ptr {self._pointers[memory]}, {operand}")

    def _mask(self, mask: Value | None, lanes: int) -> str:
        """A vector mask operand, with its type; a scalar mask holds for all lanes."""
        type_ = VecType(I1, lanes)
        if mask is None:
            return f"{type_text(type_)} splat (i1 true)"
        if isinstance(mask.type, VecType):
            return f"{type_text(type_)} {self._w.use(mask)}"
        return f"{type_text(type_)} {self._w.splat(self._w.use(mask), type_)}"

    def _load(self, node: Load) -> str:
        align = node.memory.elem.bytes
        address = self._address(node)
        tail = self._metadata[node.memory]
        text = type_text(node.type)
        if isinstance(node.type, VecType) and (
            node.mask is not None or isinstance(node.index.type, VecType)
        ):
            return self._masked_load(node, node.type, address)
        if node.mask is not None:
            zero = "@vkjit.zero"
            address = self._w.value(
                f"select i1 {self._w.use(node.mask)}, ptr {address}, ptr {zero}"
            )
            return self._w.value(f"load {text}, ptr {address}, align {align}")
        return self._w.value(f"load {text}, ptr {address}, align {align}{tail}")

    def _masked_load(self, node: Load, type_: VecType, address: str) -> str:
        gathers = isinstance(node.index.type, VecType)
        lanes, text = type_.lanes, type_text(type_)
        pointer = f"<{lanes} x ptr>" if gathers else "ptr"
        suffix = f"{mangled(type_)}.v{lanes}p0" if gathers else f"{mangled(type_)}.p0"
        name = f"llvm.masked.{'gather' if gathers else 'load'}.{suffix}"
        self._w.declarations.need(name, text, f"{pointer}, <{lanes} x i1>, {text}")
        return self._w.value(
            f"call {text} @{name}({pointer} align {type_.elem.bytes} {address}, "
            f"{self._mask(node.mask, lanes)}, {text} zeroinitializer)"
            f"{self._metadata[node.memory]}"
        )

    def _store(self, node: Store) -> None:
        address = self._address(node)
        tail = self._metadata[node.memory]
        type_ = node.value.type
        text, align = type_text(type_), node.memory.elem.bytes
        value = f"{text} {self._w.use(node.value)}"
        scatters = isinstance(node.index.type, VecType)
        if isinstance(type_, VecType) and (node.mask is not None or scatters):
            lanes = type_.lanes
            pointer = f"<{lanes} x ptr>" if scatters else "ptr"
            suffix = f"{mangled(type_)}.v{lanes}p0" if scatters else f"{mangled(type_)}.p0"
            name = f"llvm.masked.{'scatter' if scatters else 'store'}.{suffix}"
            self._w.declarations.need(name, "void", f"{text}, {pointer}, <{lanes} x i1>")
            self._w.line(
                f"call void @{name}({value}, {pointer} align {align} {address}, "
                f"{self._mask(node.mask, lanes)}){tail}"
            )
            return
        store = f"store {value}, ptr {address}, align {align}{tail}"
        if node.mask is None:
            self._w.line(store)
            return
        write, after = self._w.label(), self._w.label()
        self._w.line(f"br i1 {self._w.use(node.mask)}, label %{write}, label %{after}")
        self._w.start(write)
        self._w.line(store)
        self._w.line(f"br label %{after}")
        self._w.start(after)

    def _atomic_add(self, node: AtomicAdd) -> None:
        address = self._address(node)
        elem = scalar_of(node.value.type)
        opcode = "fadd" if elem.kind == "float" else "add"
        self._w.line(
            f"atomicrmw {opcode} ptr {address}, {type_text(elem)} {self._w.use(node.value)} "
            f"monotonic{self._metadata[node.memory]}"
        )

    # -- control --------------------------------------------------------------------------------

    def _region(self, region: Region) -> None:
        for node in region.nodes:
            self._node(node)

    def _for(self, node: For) -> None:
        """A bottom-tested loop; the guard before it goes where the bounds are constant."""
        before = self._w.block
        body, latch, after = self._w.label(), self._w.label(), self._w.label()
        type_ = type_text(node.index.type)
        lower, upper = self._w.use(node.lower), self._w.use(node.upper)
        runs = _surely_runs(node)
        if runs:
            self._w.line(f"br label %{body}")
        else:
            guard = self._w.value(f"icmp slt {type_} {lower}, {upper}")
            self._w.line(f"br i1 {guard}, label %{body}, label %{after}")
        self._w.start(body)
        index = self._w.fresh(node.index)
        following = f"{index}.next"
        self._w.line(f"{index} = phi {type_} [ {lower}, %{before} ], [ {following}, %{latch} ]")
        phis = len(self._w.lines)
        for carried in node.carried:
            self._w.fresh(carried)
        self._region(node.body)
        yields = [self._w.use(value) for value in node.body.yields]
        self._w.line(f"br label %{latch}")
        self._w.start(latch)
        # An index never wraps: buffers are far smaller than the index type.
        self._w.line(f"{following} = add nsw {type_} {index}, {self._w.use(node.step)}")
        more = self._w.value(f"icmp slt {type_} {following}, {upper}")
        self._w.line(f"br i1 {more}, label %{body}, label %{after}")
        self._w.lines[phis:phis] = [
            f"  {self._w.names[inside]} = phi {type_text(inside.type)} "
            f"[ {self._w.use(first)}, %{before} ], [ {last}, %{latch} ]"
            for inside, first, last in zip(node.carried, node.inits, yields, strict=True)
        ]
        self._w.start(after)
        for result, first, last in zip(node.results, node.inits, yields, strict=True):
            entry = "" if runs else f"[ {self._w.use(first)}, %{before} ], "
            name = self._w.fresh(result)
            self._w.line(f"{name} = phi {type_text(result.type)} {entry}[ {last}, %{latch} ]")

    def _if(self, node: If) -> None:
        then, otherwise, after = self._w.label(), self._w.label(), self._w.label()
        self._w.line(f"br i1 {self._w.use(node.cond)}, label %{then}, label %{otherwise}")
        ends: list[tuple[str, list[str]]] = []
        for label, region in ((then, node.then), (otherwise, node.otherwise)):
            self._w.start(label)
            self._region(region)
            ends.append((self._w.block, [self._w.use(value) for value in region.yields]))
            self._w.line(f"br label %{after}")
        self._w.start(after)
        (block_a, from_a), (block_b, from_b) = ends
        for result, a, b in zip(node.results, from_a, from_b, strict=True):
            name = self._w.fresh(result)
            self._w.line(
                f"{name} = phi {type_text(result.type)} [ {a}, %{block_a} ], [ {b}, %{block_b} ]"
            )

    def _node(self, node: Node) -> None:  # noqa: C901  one case per kind of a closed union
        match node:
            case Store():
                self._store(node)
            case AtomicAdd():
                self._atomic_add(node)
            case Barrier():
                pass
            case For():
                self._for(node)
            case If():
                self._if(node)
            case (
                MatStore()
                | MatFill()
                | MatLoad()
                | MatMulAdd()
                | MatConvert()
                | MatMap()
                | TensorLoad()
                | TensorStore()
            ):
                raise InternalError(
                    f"llvm: {type(node).__name__} in {self._kernel.name}; CPU schedules use "
                    "vectors, not cooperative matrices"
                )
            case SubgroupShuffle():
                raise InternalError(
                    f"llvm: subgroup shuffle in {self._kernel.name}; a CPU invocation is alone"
                )
            case Index():
                self._w.names[node] = self._index(node)
            case Load():
                self._w.names[node] = self._load(node)
            case Const():
                self._w.names[node] = spelling.constant(node.type, node.value)
            case SubgroupReduce():
                self._w.names[node] = self._w.use(node.x)
            case _:
                self._w.names[node] = expression(self._w, node)

    def _index(self, node: Index) -> str:
        if node.kind is not IndexKind.WORKGROUP:
            return "0"
        x, y, z = self._kernel.grid
        position = "%t"
        if (y, z) == (1, 1):
            position = "0" if node.axis else "%t"
        else:
            below = (1, x, x * y)[node.axis]
            if below > 1:
                position = self._w.value(f"udiv i64 {position}, {below}")
            if node.axis < 2:
                position = self._w.value(f"urem i64 {position}, {(x, y)[node.axis]}")
        if node.type is I64 or position == "0":
            return position
        return self._w.value(f"trunc i64 {position} to {type_text(node.type)}")


def _aliasing(slot: int | None) -> str:
    scope = scope_number(slot)
    return f", !alias.scope !{scope + 1}, !noalias !{scope + 2}"


def _is_masked(node: Load | Store | AtomicAdd) -> bool:
    return not isinstance(node, AtomicAdd) and node.mask is not None


def _surely_runs(node: For) -> bool:
    """Whether the constant bounds say that the loop runs at least once."""
    lower, upper = node.lower, node.upper
    return (
        isinstance(lower, Const)
        and isinstance(upper, Const)
        and isinstance(lower.value, int)
        and isinstance(upper.value, int)
        and lower.value < upper.value
    )
