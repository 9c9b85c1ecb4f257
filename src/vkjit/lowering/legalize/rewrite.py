"""Rebuilds a kernel node by node; what a rule does not replace is copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never, final

from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import (
    AtomicAdd,
    Barrier,
    Binary,
    Bitcast,
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
from vkjit.lowering.kernel.types import (
    Buffer,
    MatType,
    Memory,
    ScalarType,
    Scratch,
    Type,
    VecType,
    with_elem,
)

Get = Callable[[Value], Value]
Rule = Callable[[Builder, Expr, Get], Value | None]


@final
class Rewriter:
    """One pass over a kernel.

    ``rule`` sees every expression and the new value of each old operand, and returns the new
    value or None to copy the node. ``retyped`` replaces scalar types everywhere else: in memory,
    in copied nodes, in carried values.
    """

    def __init__(self, kernel: Kernel, rule: Rule, retyped: dict[ScalarType, ScalarType]) -> None:
        self._old = kernel
        self._rule = rule
        self._retyped = retyped
        self._builder = Builder(kernel.name, kernel.index_type)
        self._values: dict[Value, Value] = {}
        self._memory: dict[Memory, Memory] = {}

    def run(self) -> Kernel:
        """The rewritten kernel; the old one is untouched."""
        old, new = self._old, self._builder.kernel
        new.buffers = tuple(self._buffer(buffer) for buffer in old.buffers)
        new.scratch = tuple(self._scratch(scratch) for scratch in old.scratch)
        new.subgroup = old.subgroup
        self._region(old.body, new.body)
        return self._builder.finish(old.grid, old.workgroup, old.origin)

    def _buffer(self, old: Buffer) -> Buffer:
        elem = self._retyped.get(old.elem)
        made = old
        if elem is not None:
            made = Buffer(old.name, elem, old.length, old.access, old.emulated or old.elem)
        self._memory[old] = made
        return made

    def _scratch(self, old: Scratch) -> Scratch:
        elem = self._retyped.get(old.elem)
        made = old if elem is None else Scratch(old.name, elem, old.length, old.space)
        self._memory[old] = made
        return made

    def _type(self, type_: Type) -> Type:
        if isinstance(type_, MatType):
            return type_
        old = type_.elem if isinstance(type_, VecType) else type_
        elem = self._retyped.get(old)
        return type_ if elem is None else with_elem(type_, elem)

    def _get(self, value: Value) -> Value:
        return self._values[value]

    def _region(self, old: Region, new: Region) -> None:
        with self._builder.inside(new):
            for node in old.nodes:
                self._node(node, new.nodes)
        new.yields = tuple(map(self._get, old.yields))

    def _node(self, node: Node, out: list[Node]) -> None:
        get, memory = self._get, self._memory
        match node:
            case Store():
                mask = None if node.mask is None else get(node.mask)
                out.append(Store(memory[node.memory], get(node.index), get(node.value), mask))
            case AtomicAdd():
                out.append(AtomicAdd(memory[node.memory], get(node.index), get(node.value)))
            case MatStore():
                parts = (get(node.index), get(node.stride), node.layout, get(node.value))
                out.append(MatStore(memory[node.memory], *parts))
            case TensorStore():
                at = (get(node.at[0]), get(node.at[1]))
                place = (memory[node.memory], get(node.index), node.tensor, at)
                out.append(TensorStore(*place, get(node.value)))
            case Barrier():
                out.append(Barrier(node.scope))
            case For():
                self._for(node, out)
            case If():
                self._if(node, out)
            case _:
                made = self._rule(self._builder, node, get)
                if made is None:
                    made = self._copy(node)
                    out.append(made)
                self._values[node] = made

    def _for(self, old: For, out: list[Node]) -> None:
        get = self._get
        inits = tuple(map(get, old.inits))
        new = For(get(old.lower), get(old.upper), get(old.step), inits, old.index.hint)
        self._values[old.index] = new.index
        self._values.update(zip(old.carried, new.carried, strict=True))
        self._values.update(zip(old.results, new.results, strict=True))
        self._region(old.body, new.body)
        out.append(new)

    def _if(self, old: If, out: list[Node]) -> None:
        new = If(self._get(old.cond), tuple(self._type(r.type) for r in old.results))
        self._region(old.then, new.then)
        self._region(old.otherwise, new.otherwise)
        self._values.update(zip(old.results, new.results, strict=True))
        out.append(new)

    def _copy(self, node: Expr) -> Expr:  # noqa: C901, PLR0912  one flat case each
        get, memory = self._get, self._memory
        match node:
            case Binary():
                return Binary(node.op, get(node.a), get(node.b))
            case Fma():
                return Fma(get(node.a), get(node.b), get(node.c))
            case Unary():
                return Unary(node.op, get(node.x))
            case Const():
                return Const(self._type(node.type), node.value)
            case Load():
                mask = None if node.mask is None else get(node.mask)
                return Load(memory[node.memory], get(node.index), self._type(node.type), mask)
            case Select():
                return Select(get(node.cond), get(node.a), get(node.b))
            case Compare():
                return Compare(node.op, get(node.a), get(node.b))
            case Convert():
                return Convert(node.op, get(node.x), self._type(node.type))
            case Bitcast():
                return Bitcast(get(node.x), self._type(node.type))
            case Index():
                return Index(node.type, node.kind, node.axis)
            case Splat() | Extract() | Insert() | Shuffle() | Reduce():
                return self._copy_vector(node)
            case SubgroupReduce():
                return SubgroupReduce(node.op, get(node.x))
            case SubgroupShuffle():
                return SubgroupShuffle(get(node.x), node.mask)
            case MatFill() | MatLoad() | MatMulAdd() | MatConvert() | TensorLoad() | MatMap():
                return self._copy_matrix(node)
            case _:
                assert_never(node)

    def _copy_vector(self, node: Splat | Extract | Insert | Shuffle | Reduce) -> Expr:
        get = self._get
        match node:
            case Splat():
                type_ = self._type(node.type)
                assert isinstance(type_, VecType)
                return Splat(get(node.x), type_)
            case Extract():
                return Extract(get(node.x), node.lane)
            case Insert():
                return Insert(get(node.x), get(node.scalar), node.lane)
            case Shuffle():
                return Shuffle(get(node.a), get(node.b), node.lanes)
            case Reduce():
                return Reduce(node.op, get(node.x))
            case _:
                assert_never(node)

    def _copy_matrix(
        self, node: MatFill | MatLoad | MatMulAdd | MatConvert | TensorLoad | MatMap
    ) -> Expr:
        get = self._get
        type_ = node.type
        assert isinstance(type_, MatType)
        match node:
            case MatFill():
                return MatFill(get(node.x), type_)
            case MatLoad():
                place = (get(node.index), get(node.stride), node.layout)
                return MatLoad(self._memory[node.memory], *place, type_)
            case MatMulAdd():
                return MatMulAdd(get(node.a), get(node.b), get(node.c))
            case MatConvert():
                return MatConvert(get(node.x), type_)
            case TensorLoad():
                at = (get(node.at[0]), get(node.at[1]))
                memory = self._memory[node.memory]
                return TensorLoad(memory, get(node.index), node.tensor, at, type_)
            case MatMap():
                return self._copy_map(node)
            case _:
                assert_never(node)

    def _copy_map(self, old: MatMap) -> MatMap:
        new = MatMap([self._get(source) for source in old.sources])
        self._values[old.row] = new.row
        self._values[old.column] = new.column
        self._values.update(zip(old.elements, new.elements, strict=True))
        with self._builder.inside_map(new):
            self._region(old.body, new.body)
        return new
