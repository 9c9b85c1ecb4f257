"""The type rules of the kernel vocabulary: one fault in words for each node that breaks one."""

from __future__ import annotations

from typing import assert_never

from vkjit.lowering.kernel.nodes import (
    AtomicAdd,
    Binary,
    Bitcast,
    Compare,
    Const,
    Convert,
    Expr,
    Extract,
    Fma,
    Index,
    Insert,
    Load,
    MatConvert,
    MatFill,
    MatLoad,
    MatMap,
    MatMulAdd,
    MatStore,
    Reduce,
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
    BF16,
    I1,
    I16,
    I32,
    Access,
    BinOp,
    Buffer,
    CmpOp,
    ConvertOp,
    IndexKind,
    MatType,
    MatUse,
    ScalarType,
    Type,
    UnOp,
    VecType,
    lanes_of,
    scalar_of,
    with_elem,
)

Accessing = Load | Store | AtomicAdd | MatLoad | MatStore | TensorLoad | TensorStore

_INTEGER_UNARY = frozenset({UnOp.POPCOUNT, UnOp.CLZ})
_BOTH = frozenset({BinOp.ADD, BinOp.SUB, BinOp.MUL})
_FLOAT = frozenset({BinOp.DIV, BinOp.MIN, BinOp.MAX, BinOp.POW, BinOp.ATAN2})
_LOGICAL = frozenset({BinOp.AND, BinOp.OR, BinOp.XOR})
_REDUCING = frozenset(
    {BinOp.ADD, BinOp.MUL, BinOp.MIN, BinOp.MAX, BinOp.MIN_S, BinOp.MIN_U, BinOp.MAX_S}
    | {BinOp.MAX_U}
    | _LOGICAL
)
_EQUALITY = frozenset({CmpOp.EQ, CmpOp.NE})
_UNSIGNED = frozenset({CmpOp.LT_U, CmpOp.LE_U, CmpOp.GT_U, CmpOp.GE_U})
_IN_MAPS = (Const, Unary, Binary, Compare, Select, Fma, Convert, Bitcast)
# What each conversion reads and makes.
_KINDS = {
    ConvertOp.FLOAT: ({"float"}, "float"),
    ConvertOp.SINT_TO_FLOAT: ({"int"}, "float"),
    ConvertOp.UINT_TO_FLOAT: ({"int", "bool"}, "float"),
    ConvertOp.FLOAT_TO_SINT: ({"float"}, "int"),
    ConvertOp.FLOAT_TO_UINT: ({"float"}, "int"),
    ConvertOp.SEXT: ({"int", "bool"}, "int"),
    ConvertOp.ZEXT: ({"int", "bool"}, "int"),
}


def expression_fault(  # noqa: C901, PLR0912  one flat case each
    node: Expr, index_type: ScalarType
) -> str | None:
    """What is wrong with the types of an expression, or None."""
    match node:
        case Unary():
            return _unary(node)
        case Binary():
            return _same(node.type, node.a, node.b) or binary_fault(node.op, node.type)
        case Compare():
            return _compare(node)
        case Fma():
            return _same(node.type, node.a, node.b, node.c) or _need(node.type, {"float"})
        case Select():
            return _select(node)
        case Const():
            return _const(node)
        case Index():
            return _index(node, index_type)
        case Convert() | Bitcast():
            return _convert(node) if isinstance(node, Convert) else _bitcast(node)
        case Load() | MatLoad() | TensorLoad():
            return access_fault(node, index_type)
        case Splat() | Extract() | Insert() | Shuffle() | Reduce():
            return _vector(node)
        case SubgroupReduce():
            return _reducing(node.op, node.type)
        case SubgroupShuffle():
            return None if node.mask > 0 else f"xor mask {node.mask}, expected more than 0"
        case MatFill() | MatMulAdd() | MatConvert() | MatMap():
            return _matrix(node)
        case _:
            assert_never(node)


def binary_fault(op: BinOp, type_: Type) -> str | None:
    """What is wrong with ``op`` on operands of ``type_``, or None."""
    if op in _BOTH:
        return _need(type_, {"int", "float"})
    if op in _FLOAT:
        return _need(type_, {"float"})
    return _need(type_, {"int", "bool"} if op in _LOGICAL else {"int"})


def _need(type_: Type, kinds: set[str]) -> str | None:
    if scalar_of(type_).kind in kinds:
        return None
    return f"operands of type {type_}, expected {' or '.join(sorted(kinds))}"


def _same(type_: Type, *values: Value) -> str | None:
    for value in values:
        if value.type is not type_ and value.type != type_:
            break
    else:
        return None
    return f"operands of types {', '.join(str(v.type) for v in values)}, expected {type_}"


def _unary(node: Unary) -> str | None:
    if node.op is UnOp.NOT:
        return _need(node.type, {"int", "bool"})
    if node.op is UnOp.NEG:
        return _need(node.type, {"int", "float"})
    return _need(node.type, {"int"} if node.op in _INTEGER_UNARY else {"float"})


def _compare(node: Compare) -> str | None:
    if isinstance(node.a.type, MatType):
        return f"operands of type {node.a.type}, expected scalars or vectors"
    kinds = {"int"} if node.op in _UNSIGNED else {"int", "float"}
    kinds |= {"bool"} if node.op in _EQUALITY else set()
    return _same(node.a.type, node.b) or _need(node.a.type, kinds)


def _select(node: Select) -> str | None:
    if node.cond.type is not I1 and node.cond.type != with_elem(node.type, I1):
        return f"condition of type {node.cond.type}, expected i1 or i1 per lane of {node.type}"
    return _same(node.type, node.a, node.b)


def _const(node: Const) -> str | None:
    kind = scalar_of(node.type).kind
    values = node.value if isinstance(node.value, tuple) else (node.value,)
    if isinstance(node.type, MatType):
        return "constant of a matrix type, expected mat_fill"
    if isinstance(node.value, tuple) and len(values) != lanes_of(node.type):
        return f"{len(values)} constants for {node.type}"
    accepted = bool if kind == "bool" else int
    # Integers may be written with either sign.
    bits = scalar_of(node.type).bits
    wrong = [
        v
        for v in values
        if kind != "float" and not (isinstance(v, accepted) and -(1 << bits - 1) <= v < 1 << bits)
    ]
    return f"constant {wrong[0]!r} of type {node.type}" if wrong else None


def _index(node: Index, index_type: ScalarType) -> str | None:
    if node.type is not index_type:
        return f"index of type {node.type}, expected {index_type}"
    spatial = node.kind in (IndexKind.WORKGROUP, IndexKind.LOCAL)
    if not 0 <= node.axis <= (2 if spatial else 0):
        return f"axis {node.axis}"
    return None


def _convert(node: Convert) -> str | None:
    source, target = scalar_of(node.x.type), scalar_of(node.type)
    what = f"{node.op.value} from {node.x.type} to {node.type}"
    if isinstance(node.type, MatType) or lanes_of(node.x.type) != lanes_of(node.type):
        return what + ", expected as many lanes"
    if node.op is ConvertOp.TRUNC:
        kinds = source.kind == "int" and target.kind in ("int", "bool")
        return None if kinds and target.bits < source.bits else what + ", expected a narrower int"
    reads, makes = _KINDS[node.op]
    if source.kind not in reads or target.kind != makes:
        return what + f", expected {' or '.join(sorted(reads))} to {makes}"
    widens = node.op in (ConvertOp.SEXT, ConvertOp.ZEXT)
    return what + ", expected a wider int" if widens and target.bits <= source.bits else None


def _bitcast(node: Bitcast) -> str | None:
    sizes = [scalar_of(t).bits * lanes_of(t) for t in (node.x.type, node.type)]
    kinds = {scalar_of(t).kind for t in (node.x.type, node.type)}
    if "bool" in kinds or isinstance(node.type, MatType) or sizes[0] != sizes[1]:
        return f"from {node.x.type} to {node.type}, expected equal widths of numbers"
    return None


def _vector(node: Splat | Extract | Insert | Shuffle | Reduce) -> str | None:
    match node:
        case Splat():
            fits = isinstance(node.type, VecType) and node.x.type is node.type.elem
            return None if fits else f"{node.x.type} into {node.type}"
        case Extract():
            fits = 0 <= node.lane < lanes_of(node.x.type)
            return None if fits else f"lane {node.lane} of {node.x.type}"
        case Insert():
            fits = isinstance(node.type, VecType) and 0 <= node.lane < node.type.lanes
            if not fits:
                return f"lane {node.lane} of {node.type}"
            return _same(scalar_of(node.type), node.scalar)
        case Shuffle():
            if scalar_of(node.a.type) is not scalar_of(node.b.type):
                return f"operands of types {node.a.type} and {node.b.type}"
            count = lanes_of(node.a.type) + lanes_of(node.b.type)
            fits = all(0 <= lane < count for lane in node.lanes)
            return None if fits else f"lanes {node.lanes} of {count}"
        case Reduce():
            return _reducing(node.op, node.type)
        case _:
            assert_never(node)


def _reducing(op: BinOp, type_: Type) -> str | None:
    if op not in _REDUCING:
        return f"{op.value}, expected ADD, MUL, MIN*, MAX*, AND, OR or XOR"
    return binary_fault(op, type_)


def access_fault(node: Accessing, index_type: ScalarType) -> str | None:
    """What is wrong with the types of a load, store or atomic, or None."""
    if scalar_of(node.index.type) is not index_type:
        return f"index of type {node.index.type}, expected {index_type}"
    if node.memory.elem is I1:
        return f"{node.memory.name} holds i1, expected i8"
    value = node.type if isinstance(node, Load | MatLoad | TensorLoad) else node.value.type
    if not _held(value, node.memory.elem) and not _raw(node, value):
        return f"{value} in {node.memory.name}, which holds {node.memory.elem}"
    if isinstance(node, MatLoad | MatStore):
        fits = isinstance(value, MatType) and node.stride.type is index_type
        fits = fits and node.index.type is index_type
        return None if fits else f"{value} with a stride of type {node.stride.type}"
    if isinstance(node, TensorLoad | TensorStore):
        return _tensor(node, value, index_type)
    if isinstance(value, MatType):
        return f"{value}, expected mat_load and mat_store"
    if isinstance(node.index.type, VecType) and node.index.type.lanes != lanes_of(value):
        return f"index of type {node.index.type} for {value}"
    if isinstance(node, AtomicAdd):
        return None if isinstance(value, ScalarType) else f"{value}, expected a scalar"
    if node.mask is not None and node.mask.type != with_elem(value, I1):
        return f"mask of type {node.mask.type}, expected {with_elem(value, I1)}"
    return None


def _held(value: Type, elem: ScalarType) -> bool:
    """Whether memory of ``elem`` holds ``value``; legalized memory holds bf16 matrices as bits."""
    bits = isinstance(value, MatType) and (value.elem, elem) == (BF16, I16)
    return bits or scalar_of(value) is elem


def _raw(node: Accessing, value: Type) -> bool:
    """Whether memory is read or written as raw words: by vectors of them, or as a matrix."""
    match node:
        case MatLoad() | MatStore():
            return node.memory.elem is I32 and scalar_of(value).bits <= I32.bits
        case Load() | Store():
            whole = node.mask is None and isinstance(node.index.type, ScalarType)
            words = isinstance(value, VecType) and value.elem is I32
            return whole and words and node.memory.elem.bits < I32.bits
        case AtomicAdd() | TensorLoad() | TensorStore():
            return False
        case _:
            assert_never(node)


def _tensor(node: TensorLoad | TensorStore, value: Type, index_type: ScalarType) -> str | None:
    types = {v.type for v in (node.index, *node.at)}
    if not isinstance(value, MatType) or types != {index_type}:
        names = ", ".join(sorted(map(str, types)))
        return f"{value} at indices of types {names}, expected a matrix and {index_type}"
    tensor = node.tensor
    if not isinstance(node.memory, Buffer):
        return f"{node.memory.name} is scratch memory, expected a buffer"
    if min(tensor.shape) < 1 or min(tensor.strides) < 0:
        return f"{tensor}, expected a positive shape and strides that are not negative"
    if isinstance(node, TensorStore) and 0 in tensor.strides:
        return f"{tensor}, expected no stride 0 in a store"
    return None


def map_fault(node: MatMap) -> str | None:
    """What is wrong with the body of a map, or None; its nodes are known to be well formed."""
    assert isinstance(node.type, MatType)
    for inner in node.body.nodes:
        if isinstance(inner, Load):
            memory = inner.memory
            if not isinstance(memory, Buffer) or memory.access is not Access.READ:
                return f"loads from {memory.name}, expected a buffer that is read only"
        elif not isinstance(inner, _IN_MAPS) or isinstance(inner.type, MatType):
            return f"holds {type(inner).__name__}, expected expressions on scalars and loads"
    got = [value.type for value in node.body.yields]
    return None if got == [node.type.elem] else f"yields {got}, expected [{node.type.elem}]"


def _matrix(node: MatFill | MatMulAdd | MatConvert | MatMap) -> str | None:
    type_ = node.type
    if not isinstance(type_, MatType):
        return f"result of type {type_}, expected a matrix"
    match node:
        case MatFill():
            return _same(type_.elem, node.x)
        case MatConvert():
            old = node.x.type
            shapes = isinstance(old, MatType) and (old.rows, old.cols, old.scope) == (
                type_.rows,
                type_.cols,
                type_.scope,
            )
            return None if shapes else f"from {old} to {type_}"
        case MatMulAdd():
            a, b = node.a.type, node.b.type
            fits = (
                isinstance(a, MatType)
                and isinstance(b, MatType)
                and (a.use, b.use, type_.use) == (MatUse.A, MatUse.B, MatUse.ACC)
                and (a.rows, b.cols, a.cols) == (type_.rows, type_.cols, b.rows)
                and a.scope is b.scope is type_.scope
            )
            return None if fits else f"{a} @ {b} + {type_}"
        case MatMap():
            return _same(type_, *node.sources)
        case _:
            assert_never(node)
