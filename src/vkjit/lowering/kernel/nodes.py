"""Vocabulary of kernels: types, memory, expressions and statements as closed unions.

A kernel is a grid of workgroups that all run the same structured body. Values are SSA: a node
that produces a value *is* that value, and it must stand in a region before its uses. There is no
goto and no early exit.

Evaluation order: the nodes of a region run in list order. Expressions have no side effects, so
only the order of loads, stores, atomics and barriers can be observed. Between two barriers the
invocations of a workgroup run in any order; workgroups run in any order, always.

Arithmetic: integers wrap and carry no sign, operations do (``DIV_S``, ``LT_U``). Floats follow
IEEE 754 without contraction or reassociation, except in ``Reduce`` (lanes combine in any order) and
where ``Fma`` asks for it. Undefined: shifts by the width or more, integer division by zero,
float to integer out of range, loads outside a buffer whose mask is not false there.
"""

from __future__ import annotations

from enum import Enum
from typing import final

from vkjit.lowering.kernel.matrices import (
    MatConvert,
    MatFill,
    MatLoad,
    MatMap,
    MatMulAdd,
    MatStore,
    TensorLoad,
    TensorStore,
)
from vkjit.lowering.kernel.matrices import MatLayout as MatLayout
from vkjit.lowering.kernel.matrices import Tensor as Tensor
from vkjit.lowering.kernel.types import (
    I1,
    I32,
    BinOp,
    Buffer,
    CmpOp,
    ConvertOp,
    IndexKind,
    Memory,
    Number,
    ScalarType,
    Scratch,
    Type,
    UnOp,
    VecType,
)
from vkjit.lowering.kernel.values import BlockArg, Region, Value


@final
class Const(Value):
    """A constant; for a vector type either one number for all lanes or a tuple of them."""

    __slots__ = ("value",)

    def __init__(self, type_: Type, value: Number | tuple[float, ...]) -> None:
        self.type = type_
        self.value = value


@final
class Index(Value):
    """A built-in index along ``axis`` (0, 1 or 2; always 0 for subgroup indices)."""

    __slots__ = ("axis", "kind")

    def __init__(self, type_: Type, kind: IndexKind, axis: int = 0) -> None:
        self.type = type_
        self.kind = kind
        self.axis = axis


@final
class Unary(Value):
    """``op x``, lane by lane."""

    __slots__ = ("op", "x")

    def __init__(self, op: UnOp, x: Value) -> None:
        self.type = x.type
        self.op = op
        self.x = x


@final
class Binary(Value):
    """``a op b``, lane by lane."""

    __slots__ = ("a", "b", "op")

    def __init__(self, op: BinOp, a: Value, b: Value) -> None:
        self.type = a.type
        self.op = op
        self.a = a
        self.b = b


@final
class Compare(Value):
    """``a op b`` as ``i1``, lane by lane."""

    __slots__ = ("a", "b", "op")

    def __init__(self, op: CmpOp, a: Value, b: Value) -> None:
        self.type = VecType(I1, a.type.lanes) if isinstance(a.type, VecType) else I1
        self.op = op
        self.a = a
        self.b = b


@final
class Select(Value):
    """``a`` where ``cond`` holds, else ``b``; a scalar condition chooses whole vectors."""

    __slots__ = ("a", "b", "cond")

    def __init__(self, cond: Value, a: Value, b: Value) -> None:
        self.type = a.type
        self.cond = cond
        self.a = a
        self.b = b


@final
class Fma(Value):
    """``a * b + c`` with one rounding."""

    __slots__ = ("a", "b", "c")

    def __init__(self, a: Value, b: Value, c: Value) -> None:
        self.type = a.type
        self.a = a
        self.b = b
        self.c = c


@final
class Convert(Value):
    """``x`` in another scalar kind or width, lane by lane."""

    __slots__ = ("op", "x")

    def __init__(self, op: ConvertOp, x: Value, type_: Type) -> None:
        self.type = type_
        self.op = op
        self.x = x


@final
class Bitcast(Value):
    """The bits of ``x`` read as a type of the same width."""

    __slots__ = ("x",)

    def __init__(self, x: Value, type_: Type) -> None:
        self.type = type_
        self.x = x


@final
class Load(Value):
    """Elements of ``memory``.

    A scalar index with a vector type reads consecutive elements from ``index``; a vector index
    gathers. Where ``mask`` (``i1`` per lane) is false nothing is read and the lane is 0. A vector
    of ``i32`` reads any narrower number as raw words, at an index aligned to the whole vector.
    """

    __slots__ = ("index", "mask", "memory")

    def __init__(
        self, memory: Memory, index: Value, type_: Type, mask: Value | None = None
    ) -> None:
        self.type = type_
        self.memory = memory
        self.index = index
        self.mask = mask


@final
class Splat(Value):
    """A scalar in every lane."""

    __slots__ = ("x",)

    def __init__(self, x: Value, type_: VecType) -> None:
        self.type = type_
        self.x = x


@final
class Extract(Value):
    """One lane of a vector."""

    __slots__ = ("lane", "x")

    def __init__(self, x: Value, lane: int) -> None:
        assert isinstance(x.type, VecType)
        self.type = x.type.elem
        self.x = x
        self.lane = lane


@final
class Insert(Value):
    """A vector with one lane replaced."""

    __slots__ = ("lane", "scalar", "x")

    def __init__(self, x: Value, scalar: Value, lane: int) -> None:
        self.type = x.type
        self.x = x
        self.scalar = scalar
        self.lane = lane


@final
class Shuffle(Value):
    """Lanes picked from the concatenation of ``a`` and ``b`` by constant position."""

    __slots__ = ("a", "b", "lanes")

    def __init__(self, a: Value, b: Value, lanes: tuple[int, ...]) -> None:
        assert isinstance(a.type, VecType)
        self.type = VecType(a.type.elem, len(lanes))
        self.a = a
        self.b = b
        self.lanes = lanes


@final
class Reduce(Value):
    """All lanes of a vector combined in any order: ADD, MUL, MIN*, MAX*, AND, OR or XOR."""

    __slots__ = ("op", "x")

    def __init__(self, op: BinOp, x: Value) -> None:
        assert isinstance(x.type, VecType)
        self.type = x.type.elem
        self.op = op
        self.x = x


@final
class SubgroupReduce(Value):
    """``x`` of all invocations of the subgroup combined in any order."""

    __slots__ = ("op", "x")

    def __init__(self, op: BinOp, x: Value) -> None:
        self.type = x.type
        self.op = op
        self.x = x


@final
class SubgroupShuffle(Value):
    """``x`` of the invocation whose lane is this one's lane xor ``mask``."""

    __slots__ = ("mask", "x")

    def __init__(self, x: Value, mask: int) -> None:
        self.type = x.type
        self.x = x
        self.mask = mask


@final
class Store:
    """Writes ``value`` where ``mask`` holds; a vector index scatters (lanes must not collide)."""

    __slots__ = ("index", "mask", "memory", "value")

    def __init__(
        self, memory: Memory, index: Value, value: Value, mask: Value | None = None
    ) -> None:
        self.memory = memory
        self.index = index
        self.value = value
        self.mask = mask


@final
class AtomicAdd:
    """Adds a scalar to one element, atomically."""

    __slots__ = ("index", "memory", "value")

    def __init__(self, memory: Memory, index: Value, value: Value) -> None:
        self.memory = memory
        self.index = index
        self.value = value


class BarrierScope(Enum):
    """Who waits, and whose writes become visible."""

    WORKGROUP = "workgroup"
    SUBGROUP = "subgroup"


@final
class Barrier:
    """All invocations of the scope arrive before any goes on; must be in uniform control flow."""

    __slots__ = ("scope",)

    def __init__(self, scope: BarrierScope = BarrierScope.WORKGROUP) -> None:
        self.scope = scope


@final
class For:
    """``for index in range(lower, upper, step)`` with carried values; runs zero or more times.

    ``carried`` are the values inside an iteration, ``inits`` the first of them, ``body.yields``
    the next ones and ``results`` what is left after the last iteration.
    """

    __slots__ = ("body", "carried", "index", "inits", "lower", "results", "step", "upper")

    def __init__(
        self, lower: Value, upper: Value, step: Value, inits: tuple[Value, ...], hint: str = "i"
    ) -> None:
        self.lower = lower
        self.upper = upper
        self.step = step
        self.inits = inits
        self.index = BlockArg(lower.type, hint)
        self.carried = tuple(BlockArg(v.type, "c") for v in inits)
        self.results = tuple(BlockArg(v.type, "r") for v in inits)
        self.body = Region()


@final
class If:
    """Runs one of two regions; both yield as many values as there are ``results``."""

    __slots__ = ("cond", "otherwise", "results", "then")

    def __init__(self, cond: Value, result_types: tuple[Type, ...] = ()) -> None:
        self.cond = cond
        self.then = Region()
        self.otherwise = Region()
        self.results = tuple(BlockArg(t, "r") for t in result_types)


Expr = (
    Const
    | Index
    | Unary
    | Binary
    | Compare
    | Select
    | Fma
    | Convert
    | Bitcast
    | Load
    | Splat
    | Extract
    | Insert
    | Shuffle
    | Reduce
    | SubgroupReduce
    | SubgroupShuffle
    | MatFill
    | MatLoad
    | MatMulAdd
    | MatConvert
    | TensorLoad
    | MatMap
)
Statement = Store | AtomicAdd | MatStore | TensorStore | Barrier | For | If
Node = Expr | Statement


@final
class Kernel:
    """A named grid of workgroups over buffers.

    ``grid`` counts workgroups, ``workgroup`` invocations; both are static. ``index_type`` is the
    type of all index arithmetic (``i32`` or ``i64``). ``subgroup`` is a required subgroup size, if
    any. ``origin`` names the operations and source lines that the kernel computes.
    """

    __slots__ = (
        "__weakref__",
        "body",
        "buffers",
        "grid",
        "index_type",
        "name",
        "origin",
        "scratch",
        "subgroup",
        "workgroup",
    )

    def __init__(self, name: str, index_type: ScalarType = I32) -> None:
        self.name = name
        self.index_type = index_type
        self.buffers: tuple[Buffer, ...] = ()
        self.scratch: tuple[Scratch, ...] = ()
        self.grid: tuple[int, int, int] = (1, 1, 1)
        self.workgroup: tuple[int, int, int] = (1, 1, 1)
        self.subgroup: int | None = None
        self.origin: tuple[str, ...] = ()
        self.body = Region()
