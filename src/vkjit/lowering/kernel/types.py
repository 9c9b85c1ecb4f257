"""Types, memory and operations of the kernel IR: the words that ``nodes`` puts together."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import final


@final
class ScalarType:
    """A scalar type, interned: compare with ``is``. ``kind`` is bool, int or float."""

    __slots__ = ("bits", "kind", "name")

    def __init__(self, name: str, kind: str, bits: int) -> None:
        self.name = name
        self.kind = kind
        self.bits = bits

    @property
    def bytes(self) -> int:
        """Size of one element in memory; ``i1`` never lives in memory."""
        return self.bits // 8

    def __repr__(self) -> str:
        return self.name


I1 = ScalarType("i1", "bool", 1)
I8 = ScalarType("i8", "int", 8)
I16 = ScalarType("i16", "int", 16)
I32 = ScalarType("i32", "int", 32)
I64 = ScalarType("i64", "int", 64)
F16 = ScalarType("f16", "float", 16)
BF16 = ScalarType("bf16", "float", 16)
F32 = ScalarType("f32", "float", 32)
F64 = ScalarType("f64", "float", 64)
SCALARS = {t.name: t for t in (I1, I8, I16, I32, I64, F16, BF16, F32, F64)}


@final
@dataclass(frozen=True, slots=True)
class VecType:
    """``lanes`` scalars held by one invocation."""

    elem: ScalarType
    lanes: int

    def __repr__(self) -> str:
        return f"vec<{self.elem},{self.lanes}>"


class MatScope(Enum):
    """Who holds a cooperative matrix together."""

    SUBGROUP = "subgroup"
    WORKGROUP = "workgroup"


class MatUse(Enum):
    """Operand position of a cooperative matrix in ``MatMulAdd``."""

    A = "a"
    B = "b"
    ACC = "acc"


@final
@dataclass(frozen=True, slots=True)
class MatType:
    """A cooperative matrix of ``rows`` x ``cols``, spread over the invocations of ``scope``."""

    elem: ScalarType
    rows: int
    cols: int
    use: MatUse
    scope: MatScope = MatScope.SUBGROUP

    def __repr__(self) -> str:
        return f"mat<{self.elem},{self.scope.value},{self.rows},{self.cols},{self.use.value}>"


Type = ScalarType | VecType | MatType


Number = bool | int | float


class Access(Enum):
    """What a kernel may do with a buffer."""

    READ = "r"
    WRITE = "w"
    READ_WRITE = "rw"


@final
@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """A global array argument of ``length`` elements; booleans are stored as ``i8`` 0 or 1.

    ``emulated`` is the type that the elements stand for, where the target lacks it.
    """

    name: str
    elem: ScalarType
    length: int
    access: Access
    emulated: ScalarType | None = None


class Space(Enum):
    """Where scratch memory lives."""

    SHARED = "shared"  # one per workgroup
    LOCAL = "local"  # one per invocation


@final
@dataclass(frozen=True, slots=True, eq=False)
class Scratch:
    """An uninitialised array that lives as long as its workgroup or invocation runs."""

    name: str
    elem: ScalarType
    length: int
    space: Space


Memory = Buffer | Scratch


class IndexKind(Enum):
    """The built-in indices of an invocation."""

    WORKGROUP = "workgroup_id"
    LOCAL = "local_id"
    LANE = "subgroup_lane"
    SUBGROUP = "subgroup_id"


class UnOp(Enum):
    """Unary operations; all but NOT, NEG, POPCOUNT and CLZ take floats only."""

    NEG = "neg"
    NOT = "not"
    ABS = "abs"
    FLOOR = "floor"
    CEIL = "ceil"
    ROUND_EVEN = "round_even"
    TRUNC = "trunc"
    SQRT = "sqrt"
    RSQRT = "rsqrt"
    EXP = "exp"
    EXP2 = "exp2"
    EXPM1 = "expm1"
    LOG = "log"
    LOG1P = "log1p"
    SIN = "sin"
    COS = "cos"
    TAN = "tan"
    ATAN = "atan"
    TANH = "tanh"
    ERF = "erf"
    ERF_INV = "erf_inv"
    POPCOUNT = "popcount"
    CLZ = "clz"


class BinOp(Enum):
    """Binary operations; both operands and the result have one type.

    ``MIN``/``MAX`` are for floats and spread NaN, and of -0 and 0 give either; ``ADD SUB MUL`` take
    both kinds; ``AND OR XOR`` take integers and ``i1``.
    """

    ADD = "add"
    SUB = "sub"
    MUL = "mul"
    DIV = "div"
    MIN = "min"
    MAX = "max"
    POW = "pow"
    ATAN2 = "atan2"
    DIV_S = "div_s"
    DIV_U = "div_u"
    REM_S = "rem_s"
    REM_U = "rem_u"
    MIN_S = "min_s"
    MIN_U = "min_u"
    MAX_S = "max_s"
    MAX_U = "max_u"
    AND = "and"
    OR = "or"
    XOR = "xor"
    SHL = "shl"
    SHR_L = "shr_l"
    SHR_A = "shr_a"


class CmpOp(Enum):
    """Comparisons. On floats they are ordered, except NE, which holds when a side is NaN."""

    EQ = "eq"
    NE = "ne"
    LT = "lt"
    LE = "le"
    GT = "gt"
    GE = "ge"
    LT_U = "lt_u"
    LE_U = "le_u"
    GT_U = "gt_u"
    GE_U = "ge_u"


class ConvertOp(Enum):
    """Conversions between scalar kinds; widths follow from the operand and the result type."""

    FLOAT = "float"  # float to float, round to nearest even
    SINT_TO_FLOAT = "sint_to_float"
    UINT_TO_FLOAT = "uint_to_float"
    FLOAT_TO_SINT = "float_to_sint"  # truncates; out of range is undefined
    FLOAT_TO_UINT = "float_to_uint"
    SEXT = "sext"
    ZEXT = "zext"  # also i1 to int
    TRUNC = "trunc_int"


def scalar_of(type_: Type) -> ScalarType:
    """The element type of a scalar, vector or matrix type."""
    return type_ if isinstance(type_, ScalarType) else type_.elem


def with_elem(type_: Type, elem: ScalarType) -> Type:
    """``type_`` with another element type and the same lanes."""
    return VecType(elem, type_.lanes) if isinstance(type_, VecType) else elem


def lanes_of(type_: Type) -> int:
    """Lanes of a vector, 1 for a scalar."""
    return type_.lanes if isinstance(type_, VecType) else 1
