"""Typed builder of kernels: one method per node, constants folded, loops as context managers.

b = Builder("add_one", index_type=I64)
x = b.buffer("x", F32, 1024, Access.READ)
y = b.buffer("y", F32, 1024, Access.WRITE)
i = b.workgroup_id()
with b.loop(b.index(0), b.index(8), carried=(b.const(F32, 0.0),)) as loop:
    loop.yields(b.add(loop.carried[0], b.load(x, i)))
b.store(y, i, loop.results[0])
kernel = b.finish(grid=(1024, 1, 1))
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import final

from vkjit.errors import InternalError
from vkjit.lowering.kernel.nodes import (
    AtomicAdd,
    Barrier,
    BarrierScope,
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
    MatLayout,
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
    Tensor,
    TensorLoad,
    TensorStore,
    Unary,
    Value,
)
from vkjit.lowering.kernel.types import (
    I1,
    I32,
    Access,
    BinOp,
    Buffer,
    CmpOp,
    ConvertOp,
    IndexKind,
    MatType,
    Memory,
    Number,
    ScalarType,
    Scratch,
    Space,
    Type,
    UnOp,
    VecType,
    scalar_of,
)


@final
class Loop:
    """Handle of an open loop: ``index`` and ``carried`` inside, ``results`` after it."""

    __slots__ = ("_node", "carried", "index", "results")

    def __init__(self, node: For) -> None:
        self._node = node
        self.index: Value = node.index
        self.carried: tuple[Value, ...] = node.carried
        self.results: tuple[Value, ...] = node.results

    def yields(self, *values: Value) -> None:
        """Sets the carried values of the next iteration."""
        self._node.body.yields = values


@final
class Branch:
    """Handle of an open branch: fill ``then()`` and ``otherwise()``, read ``results``."""

    __slots__ = ("_builder", "_node", "results")

    def __init__(self, builder: Builder, node: If) -> None:
        self._builder = builder
        self._node = node
        self.results: tuple[Value, ...] = node.results

    @contextmanager
    def then(self) -> Generator[Region]:
        """Opens the region that runs where the condition holds; set its ``yields``."""
        with self._builder.inside(self._node.then):
            yield self._node.then

    @contextmanager
    def otherwise(self) -> Generator[Region]:
        """Opens the region that runs where the condition does not hold; set its ``yields``."""
        with self._builder.inside(self._node.otherwise):
            yield self._node.otherwise


@final
class Builder:
    """Appends nodes to the current region of one kernel."""

    def __init__(self, name: str, index_type: ScalarType = I32) -> None:
        self.kernel = Kernel(name, index_type)
        self._region = self.kernel.body
        self._consts: dict[tuple[Type, object, type], Const] = {}
        self._entry: list[Node] = []
        self.in_map = False  # whether the current region allows expressions only

    # -- memory ---------------------------------------------------------------------------------

    def buffer(self, name: str, elem: ScalarType, length: int, access: Access) -> Buffer:
        """Declares the next global array argument."""
        made = Buffer(name, elem, length, access)
        self.kernel.buffers += (made,)
        return made

    def scratch(
        self, name: str, elem: ScalarType, length: int, space: Space = Space.SHARED
    ) -> Scratch:
        """Declares shared or local scratch memory."""
        made = Scratch(name, elem, length, space)
        self.kernel.scratch += (made,)
        return made

    def load(
        self, memory: Memory, index: Value, lanes: int = 1, mask: Value | None = None
    ) -> Value:
        """Reads one element, ``lanes`` consecutive ones, or gathers when ``index`` is a vector."""
        if isinstance(index.type, VecType):
            type_: Type = VecType(memory.elem, index.type.lanes)
        else:
            type_ = VecType(memory.elem, lanes) if lanes > 1 else memory.elem
        return self._add(Load(memory, index, type_, mask))

    def load_words(self, memory: Memory, index: Value, lanes: int) -> Value:
        """Reads ``lanes`` raw 32-bit words from the element ``index``, aligned to all of them."""
        return self._add(Load(memory, index, VecType(I32, lanes)))

    def store(self, memory: Memory, index: Value, value: Value, mask: Value | None = None) -> None:
        """Writes a scalar or vector; a vector ``index`` scatters."""
        self._append(Store(memory, index, value, mask))

    def atomic_add(self, memory: Memory, index: Value, value: Value) -> None:
        """Adds a scalar to one element, atomically."""
        self._append(AtomicAdd(memory, index, value))

    # -- constants and indices ------------------------------------------------------------------

    def const(self, type_: Type, value: Number | tuple[float, ...]) -> Const:
        """A constant; equal constants are one node, placed before everything else."""
        key = (type_, repr(value), type(value))
        found = self._consts.get(key)
        if found is None:
            found = self._consts[key] = Const(type_, value)
            self._entry.append(found)
        return found

    def index(self, value: int) -> Const:
        """A constant of the kernel's index type."""
        return self.const(self.kernel.index_type, value)

    def workgroup_id(self, axis: int = 0) -> Value:
        """Position of the workgroup in the grid along ``axis``."""
        return self._builtin(IndexKind.WORKGROUP, axis)

    def local_id(self, axis: int = 0) -> Value:
        """Position of the invocation in its workgroup along ``axis``."""
        return self._builtin(IndexKind.LOCAL, axis)

    def lane(self) -> Value:
        """Position of the invocation in its subgroup."""
        return self._builtin(IndexKind.LANE, 0)

    def subgroup_id(self) -> Value:
        """Position of the subgroup in its workgroup."""
        return self._builtin(IndexKind.SUBGROUP, 0)

    def iota(self, lanes: int, step: int = 1) -> Const:
        """The vector 0, step, 2*step, ... of the index type."""
        return self.const(
            VecType(self.kernel.index_type, lanes), tuple(i * step for i in range(lanes))
        )

    # -- scalar and vector arithmetic -----------------------------------------------------------

    def unary(self, op: UnOp, x: Value) -> Value:
        """``op x``."""
        return self._add(Unary(op, x))

    def binary(self, op: BinOp, a: Value, b: Value) -> Value:
        """``a op b``; folds integer constants and the neutral elements of index arithmetic."""
        if a.type is not b.type and a.type != b.type:
            raise InternalError(f"{op.value}: operands of types {a.type} and {b.type}")
        return _folded(self, op, a, b) or self._add(Binary(op, a, b))

    def add(self, a: Value, b: Value) -> Value:
        """``a + b``."""
        return self.binary(BinOp.ADD, a, b)

    def sub(self, a: Value, b: Value) -> Value:
        """``a - b``."""
        return self.binary(BinOp.SUB, a, b)

    def mul(self, a: Value, b: Value) -> Value:
        """``a * b``."""
        return self.binary(BinOp.MUL, a, b)

    def scaled(self, x: Value, factor: int) -> Value:
        """An index times a constant, vector or scalar."""
        return self.mul(x, self.const(x.type, factor))

    def offset(self, x: Value, amount: int) -> Value:
        """An index plus a constant, vector or scalar."""
        return self.add(x, self.const(x.type, amount))

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """``a * b + c`` with one rounding."""
        return self._add(Fma(a, b, c))

    def compare(self, op: CmpOp, a: Value, b: Value) -> Value:
        """``a op b`` as ``i1`` per lane."""
        return self._add(Compare(op, a, b))

    def select(self, cond: Value, a: Value, b: Value) -> Value:
        """``a`` where ``cond`` holds, else ``b``."""
        return self._add(Select(cond, a, b))

    def convert(self, op: ConvertOp, x: Value, type_: Type) -> Value:
        """``x`` converted to ``type_``; nothing happens when it already has that type."""
        return x if x.type == type_ else self._add(Convert(op, x, type_))

    def bitcast(self, x: Value, type_: Type) -> Value:
        """The bits of ``x`` as ``type_``."""
        return x if x.type == type_ else self._add(Bitcast(x, type_))

    # -- vectors --------------------------------------------------------------------------------

    def splat(self, x: Value, lanes: int) -> Value:
        """A scalar in every one of ``lanes`` lanes; the scalar itself for one lane."""
        if lanes == 1 or isinstance(x.type, VecType):
            return x
        type_ = VecType(scalar_of(x.type), lanes)
        if isinstance(x, Const):
            return self.const(type_, x.value)
        return self._add(Splat(x, type_))

    def extract(self, x: Value, lane: int) -> Value:
        """One lane of a vector."""
        return self._add(Extract(x, lane))

    def insert(self, x: Value, scalar: Value, lane: int) -> Value:
        """``x`` with ``lane`` replaced."""
        return self._add(Insert(x, scalar, lane))

    def shuffle(self, a: Value, b: Value, lanes: Sequence[int]) -> Value:
        """Lanes of ``a`` then ``b`` picked by position."""
        return self._add(Shuffle(a, b, tuple(lanes)))

    def reduce(self, op: BinOp, x: Value) -> Value:
        """All lanes combined, in any order."""
        return self._add(Reduce(op, x)) if isinstance(x.type, VecType) else x

    # -- invocations ----------------------------------------------------------------------------

    def barrier(self, scope: BarrierScope = BarrierScope.WORKGROUP) -> None:
        """All invocations of the scope wait for each other."""
        self._append(Barrier(scope))

    def subgroup_reduce(self, op: BinOp, x: Value) -> Value:
        """``x`` of the whole subgroup combined."""
        return self._add(SubgroupReduce(op, x))

    def subgroup_shuffle(self, x: Value, mask: int) -> Value:
        """``x`` of the invocation at lane xor ``mask``."""
        return self._add(SubgroupShuffle(x, mask))

    # -- cooperative matrices -------------------------------------------------------------------

    def mat_fill(self, type_: MatType, value: float = 0.0) -> Value:
        """A cooperative matrix of one value."""
        return self._add(MatFill(self.const(type_.elem, value), type_))

    def mat_load(
        self, memory: Memory, index: Value, stride: Value, layout: MatLayout, type_: MatType
    ) -> Value:
        """A cooperative matrix from memory; ``stride`` in elements."""
        return self._add(MatLoad(memory, index, stride, layout, type_))

    def mat_store(
        self, memory: Memory, index: Value, stride: Value, layout: MatLayout, value: Value
    ) -> None:
        """Writes a cooperative matrix; ``stride`` in elements."""
        self._append(MatStore(memory, index, stride, layout, value))

    def mat_mul_add(self, a: Value, b: Value, c: Value) -> Value:
        """``a @ b + c``."""
        return self._add(MatMulAdd(a, b, c))

    def mat_convert(self, x: Value, type_: MatType) -> Value:
        """A cooperative matrix in another element type."""
        return x if x.type == type_ else self._add(MatConvert(x, type_))

    def tensor_load(
        self, memory: Memory, index: Value, tensor: Tensor, at: tuple[Value, Value], type_: MatType
    ) -> Value:
        """A cooperative matrix at a position of a tensor that starts at ``index``."""
        return self._add(TensorLoad(memory, index, tensor, at, type_))

    def tensor_store(
        self, memory: Memory, index: Value, tensor: Tensor, at: tuple[Value, Value], value: Value
    ) -> None:
        """Writes a cooperative matrix at a position of a tensor that starts at ``index``."""
        self._append(TensorStore(memory, index, tensor, at, value))

    @contextmanager
    def mat_map(self, *sources: Value) -> Generator[MatMap]:
        """Opens the body of a map; set its ``yields``. The node is the result."""
        node = MatMap(sources)
        self._append(node)
        with self.inside_map(node):
            yield node

    @contextmanager
    def inside_map(self, node: MatMap) -> Generator[None]:
        """Appends to the body of a map until the block ends."""
        self.in_map = True
        try:
            with self.inside(node.body):
                yield
        finally:
            self.in_map = False

    # -- control --------------------------------------------------------------------------------

    @contextmanager
    def loop(
        self,
        lower: Value,
        upper: Value,
        step: Value | None = None,
        carried: Sequence[Value] = (),
        hint: str = "i",
    ) -> Generator[Loop]:
        """Opens a counted loop; call ``yields`` inside it once per carried value set."""
        node = For(lower, upper, step or self.index(1), tuple(carried), hint)
        self._append(node)
        with self.inside(node.body):
            yield Loop(node)

    def branch(self, cond: Value, result_types: Sequence[Type] = ()) -> Branch:
        """Starts a two-way branch on a scalar ``i1``."""
        if cond.type is not I1:
            raise InternalError(f"branch: condition of type {cond.type}, expected i1")
        node = If(cond, tuple(result_types))
        self._append(node)
        return Branch(self, node)

    @contextmanager
    def inside(self, region: Region) -> Generator[None]:
        """Appends to ``region`` until the block ends."""
        outer, self._region = self._region, region
        try:
            yield
        finally:
            self._region = outer

    def finish(
        self,
        grid: tuple[int, int, int],
        workgroup: tuple[int, int, int] = (1, 1, 1),
        origin: Sequence[str] = (),
    ) -> Kernel:
        """The finished kernel."""
        self.kernel.grid = grid
        self.kernel.workgroup = workgroup
        self.kernel.origin = tuple(origin)
        self.kernel.body.nodes[:0] = self._entry
        return self.kernel

    def _builtin(self, kind: IndexKind, axis: int) -> Value:
        for node in self._entry:
            if isinstance(node, Index) and node.kind is kind and node.axis == axis:
                return node
        node = Index(self.kernel.index_type, kind, axis)
        self._entry.append(node)
        return node

    def _add(self, node: Expr) -> Value:
        self._append(node)
        return node

    def _append(self, node: Node) -> None:
        self._region.nodes.append(node)


def _whole(x: Value) -> int | None:
    """The integer of a scalar or uniform vector constant, else None."""
    if isinstance(x, Const) and scalar_of(x.type).kind == "int" and isinstance(x.value, int):
        return x.value
    return None


def _wrapped(value: int, bits: int) -> int:
    return (value + (1 << (bits - 1))) % (1 << bits) - (1 << (bits - 1))


def _folded(b: Builder, op: BinOp, x: Value, y: Value) -> Value | None:
    """Integer folding that keeps index arithmetic readable; None where nothing applies."""
    left, right = _whole(x), _whole(y)
    if left is None and right is None:
        return None
    if op is BinOp.ADD:
        if left is not None and right is not None:
            return b.const(x.type, _wrapped(left + right, scalar_of(x.type).bits))
        return y if left == 0 else x if right == 0 else None
    if op is BinOp.SUB:
        return x if right == 0 else None
    if op is BinOp.MUL:
        if left is not None and right is not None:
            return b.const(x.type, _wrapped(left * right, scalar_of(x.type).bits))
        if left == 0 or right == 0:
            return b.const(x.type, 0)
        return y if left == 1 else x if right == 1 else None
    if op in (BinOp.DIV_S, BinOp.DIV_U) and right == 1:
        return x
    return None
