"""Kernels as text that people read and ``parse`` reads back.

kernel add_one grid=(1024,1,1) workgroup=(1,1,1) index=i64 {
  buffer x: f32[1024] r
  buffer y: f32[1024] w
  %0: i64 = workgroup_id 0
  %1: f32 = load x[%0]
  %2: f32 = const 1.0
  %3: f32 = add %1, %2
  store y[%0], %3
}

Values are numbered in the order of the text; loop indices, carried values and results carry a
name as well (``%i.4``). Floats are printed so that they read back to the same bits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import assert_never, final

from vkjit.lowering.kernel.nodes import (
    AtomicAdd,
    Barrier,
    Binary,
    Bitcast,
    BlockArg,
    Compare,
    Const,
    Convert,
    Expr,
    Extract,
    Fma,
    For,
    If,
    Index,
    Insert,
    Kernel,
    Load,
    MatConvert,
    MatFill,
    MatLoad,
    MatMap,
    MatMulAdd,
    MatStore,
    Node,
    Reduce,
    Region,
    Select,
    Shuffle,
    Splat,
    Store,
    SubgroupReduce,
    SubgroupShuffle,
    TensorLoad,
    TensorStore,
    Unary,
    Value,
)
from vkjit.lowering.kernel.types import IndexKind, Number

_AXES = frozenset({IndexKind.WORKGROUP, IndexKind.LOCAL})


def text(kernel: Kernel) -> str:
    """The kernel as text; equal kernels give equal text, and ``parse`` reads it back."""
    printer = _Printer()
    lines = [_header(kernel)]
    lines += [f"  origin {json.dumps(source)}" for source in kernel.origin]
    lines += [f"  buffer {m.name}: {m.elem}[{m.length}] {m.access.value}" for m in kernel.buffers]
    lines += [f"  scratch {m.name}: {m.elem}[{m.length}] {m.space.value}" for m in kernel.scratch]
    printer.region(kernel.body, "  ", lines.append)
    return "\n".join([*lines, "}", ""])


def node_text(nodes: Iterable[Node]) -> str:
    """Nodes alone, for messages; values defined elsewhere are numbered where they first appear."""
    printer = _Printer()
    lines: list[str] = []
    for node in nodes:
        printer.node(node, "  ", lines.append)
    return "\n".join(lines)


def number(value: Number) -> str:
    """A constant that reads back to the same bits: ``1.0``, ``-0.0``, ``inf``, ``7``, ``true``."""
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _header(kernel: Kernel) -> str:
    def triple(sizes: Sequence[int]) -> str:
        return "(" + ",".join(map(str, sizes)) + ")"

    subgroup = "" if kernel.subgroup is None else f" subgroup={kernel.subgroup}"
    return (
        f"kernel {kernel.name} grid={triple(kernel.grid)} workgroup={triple(kernel.workgroup)} "
        f"index={kernel.index_type}{subgroup} {{"
    )


@final
class _Printer:
    def __init__(self) -> None:
        self._names: dict[Value, str] = {}

    def name(self, value: Value) -> str:
        found = self._names.get(value)
        if found is None:
            hint = f"{value.hint}." if isinstance(value, BlockArg) else ""
            found = self._names[value] = f"%{hint}{len(self._names)}"
        return found

    def _list(self, values: Iterable[Value]) -> str:
        return ", ".join(map(self.name, values))

    def _typed(self, values: Iterable[Value]) -> str:
        return ", ".join(f"{self.name(v)}: {v.type}" for v in values)

    def region(self, region: Region, indent: str, out: Callable[[str], None]) -> None:
        for node in region.nodes:
            self.node(node, indent, out)
        if region.yields:
            out(f"{indent}yield {self._list(region.yields)}")

    def node(self, node: Node, indent: str, out: Callable[[str], None]) -> None:
        n = self.name
        match node:
            case Store():
                line = f"store {self._place(node)}, {n(node.value)}{self._mask(node)}"
                out(indent + line)
            case AtomicAdd():
                out(f"{indent}atomic_add {self._place(node)}, {n(node.value)}")
            case MatStore():
                out(f"{indent}mat_store {self._strided(node)}, {n(node.value)}")
            case TensorStore():
                out(f"{indent}tensor_store {self._tensor(node)}, {n(node.value)}")
            case MatMap():
                self._map(node, indent, out)
            case Barrier():
                out(f"{indent}barrier {node.scope.value}")
            case For():
                self._for(node, indent, out)
            case If():
                self._if(node, indent, out)
            case _:
                right = self._expr(node)
                out(f"{indent}{n(node)}: {node.type} = {right}")

    def _for(self, node: For, indent: str, out: Callable[[str], None]) -> None:
        bounds = f"{self.name(node.lower)}..{self.name(node.upper)} step {self.name(node.step)}"
        inits = [self.name(v) for v in node.inits]
        head = f"{indent}for {self._typed((node.index,))} in {bounds}"
        if inits:
            pairs = zip(node.carried, inits, strict=True)
            carried = ", ".join(f"{self._typed((c,))} = {init}" for c, init in pairs)
            head += f" carry ({carried}) -> ({self._typed(node.results)})"
        out(head + " {")
        self.region(node.body, indent + "  ", out)
        out(indent + "}")

    def _if(self, node: If, indent: str, out: Callable[[str], None]) -> None:
        results = f" -> ({self._typed(node.results)})" if node.results else ""
        out(f"{indent}if {self.name(node.cond)}{results} {{")
        self.region(node.then, indent + "  ", out)
        if node.otherwise.nodes or node.otherwise.yields:
            out(indent + "} else {")
            self.region(node.otherwise, indent + "  ", out)
        out(indent + "}")

    def _map(self, node: MatMap, indent: str, out: Callable[[str], None]) -> None:
        head = f"{self.name(node)}: {node.type} = {self._expr(node)}"
        inside = self._list((node.row, node.column, *node.elements))
        out(f"{indent}{head} as ({inside}) {{")
        self.region(node.body, indent + "  ", out)
        out(indent + "}")

    def _place(self, node: Load | Store | AtomicAdd) -> str:
        return f"{node.memory.name}[{self.name(node.index)}]"

    def _mask(self, node: Load | Store) -> str:
        return "" if node.mask is None else f" mask {self.name(node.mask)}"

    def _strided(self, node: MatLoad | MatStore) -> str:
        place = f"{node.memory.name}[{self.name(node.index)}]"
        return f"{place} stride {self.name(node.stride)} {node.layout.value}"

    def _tensor(self, node: TensorLoad | TensorStore) -> str:
        tensor, n = node.tensor, self.name
        shape, strides = (f"({a},{b})" for a, b in (tensor.shape, tensor.strides))
        flags = (" clamped" if tensor.clamped else "") + (" turned" if tensor.turned else "")
        place = f"{node.memory.name}[{n(node.index)}]"
        return f"{place} shape {shape} strides {strides}{flags} at ({self._list(node.at)})"

    def _expr(self, node: Expr) -> str:  # noqa: C901, PLR0912  one flat case each
        n = self.name
        match node:
            case Const():
                if isinstance(node.value, tuple):
                    return f"const ({', '.join(map(number, node.value))})"
                return f"const {number(node.value)}"
            case Index():
                axis = f" {node.axis}" if node.kind in _AXES else ""
                return node.kind.value + axis
            case Unary():
                return f"{node.op.value} {n(node.x)}"
            case Binary():
                return f"{node.op.value} {n(node.a)}, {n(node.b)}"
            case Compare():
                return f"cmp {node.op.value} {n(node.a)}, {n(node.b)}"
            case Select():
                return f"select {n(node.cond)}, {n(node.a)}, {n(node.b)}"
            case Fma():
                return f"fma {n(node.a)}, {n(node.b)}, {n(node.c)}"
            case Convert():
                return f"convert {node.op.value} {n(node.x)}"
            case Load():
                return f"load {self._place(node)}{self._mask(node)}"
            case Bitcast():
                return f"bitcast {n(node.x)}"
            case Splat() | Extract() | Insert() | Shuffle() | Reduce():
                return self._vector(node)
            case SubgroupReduce():
                return f"subgroup_reduce {node.op.value} {n(node.x)}"
            case SubgroupShuffle():
                return f"subgroup_shuffle {n(node.x)} xor {node.mask}"
            case MatFill() | MatLoad() | MatMulAdd() | MatConvert() | TensorLoad() | MatMap():
                return self._matrix(node)
            case _:
                assert_never(node)

    def _vector(self, node: Splat | Extract | Insert | Shuffle | Reduce) -> str:
        n = self.name
        match node:
            case Splat():
                return f"splat {n(node.x)}"
            case Extract():
                return f"extract {n(node.x)}[{node.lane}]"
            case Insert():
                return f"insert {n(node.x)}[{node.lane}], {n(node.scalar)}"
            case Shuffle():
                lanes = ", ".join(map(str, node.lanes))
                return f"shuffle {n(node.a)}, {n(node.b)} ({lanes})"
            case Reduce():
                return f"reduce {node.op.value} {n(node.x)}"
            case _:
                assert_never(node)

    def _matrix(
        self, node: MatFill | MatLoad | MatMulAdd | MatConvert | TensorLoad | MatMap
    ) -> str:
        n = self.name
        match node:
            case MatFill():
                return f"mat_fill {n(node.x)}"
            case MatLoad():
                return f"mat_load {self._strided(node)}"
            case MatMulAdd():
                return f"mat_mul_add {n(node.a)}, {n(node.b)}, {n(node.c)}"
            case MatConvert():
                return f"mat_convert {n(node.x)}"
            case TensorLoad():
                return f"tensor_load {self._tensor(node)}"
            case MatMap():
                return f"mat_map {self._list(node.sources)}"
            case _:
                assert_never(node)
