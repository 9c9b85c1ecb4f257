"""How types, constants and operations are written in LLVM text."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from vkjit.errors import InternalError
from vkjit.lowering.kernel.types import (
    BF16,
    F16,
    F32,
    F64,
    I1,
    I8,
    I16,
    I32,
    I64,
    BinOp,
    CmpOp,
    ConvertOp,
    Number,
    ScalarType,
    Type,
    UnOp,
    VecType,
)

_SCALARS: Mapping[ScalarType, str] = MappingProxyType(
    {
        I1: "i1",
        I8: "i8",
        I16: "i16",
        I32: "i32",
        I64: "i64",
        F16: "half",
        BF16: "bfloat",
        F32: "float",
        F64: "double",
    }
)

UNARY_INTRINSICS: Mapping[UnOp, str] = MappingProxyType(
    {
        UnOp.ABS: "fabs",
        UnOp.FLOOR: "floor",
        UnOp.CEIL: "ceil",
        UnOp.ROUND_EVEN: "roundeven",
        UnOp.TRUNC: "trunc",
        UnOp.SQRT: "sqrt",
        UnOp.POPCOUNT: "ctpop",
    }
)

LIBM_UNARY: Mapping[UnOp, str] = MappingProxyType(
    {
        UnOp.EXP: "exp",
        UnOp.EXP2: "exp2",
        UnOp.EXPM1: "expm1",
        UnOp.LOG: "log",
        UnOp.LOG1P: "log1p",
        UnOp.SIN: "sin",
        UnOp.COS: "cos",
        UnOp.TAN: "tan",
        UnOp.ATAN: "atan",
        UnOp.TANH: "tanh",
        UnOp.ERF: "erf",
    }
)
"""Functions of the C library, in double only; ``legalize`` expands the rest."""

LIBM_BINARY: Mapping[BinOp, str] = MappingProxyType({BinOp.POW: "pow", BinOp.ATAN2: "atan2"})

LIBM_SYMBOLS = tuple(sorted({*LIBM_UNARY.values(), *LIBM_BINARY.values()}))

_INT_BINARY: Mapping[BinOp, str] = MappingProxyType(
    {
        BinOp.ADD: "add",
        BinOp.SUB: "sub",
        BinOp.MUL: "mul",
        BinOp.DIV_S: "sdiv",
        BinOp.DIV_U: "udiv",
        BinOp.REM_S: "srem",
        BinOp.REM_U: "urem",
        BinOp.AND: "and",
        BinOp.OR: "or",
        BinOp.XOR: "xor",
        BinOp.SHL: "shl",
        BinOp.SHR_L: "lshr",
        BinOp.SHR_A: "ashr",
    }
)
_FLOAT_BINARY: Mapping[BinOp, str] = MappingProxyType(
    {BinOp.ADD: "fadd", BinOp.SUB: "fsub", BinOp.MUL: "fmul", BinOp.DIV: "fdiv"}
)
BINARY_INTRINSICS: Mapping[BinOp, str] = MappingProxyType(
    {
        BinOp.MIN: "minimum",
        BinOp.MAX: "maximum",
        BinOp.MIN_S: "smin",
        BinOp.MIN_U: "umin",
        BinOp.MAX_S: "smax",
        BinOp.MAX_U: "umax",
    }
)
_REDUCTIONS: Mapping[BinOp, str] = MappingProxyType(
    {
        BinOp.MIN: "fminimum",
        BinOp.MAX: "fmaximum",
        BinOp.MIN_S: "smin",
        BinOp.MIN_U: "umin",
        BinOp.MAX_S: "smax",
        BinOp.MAX_U: "umax",
        BinOp.AND: "and",
        BinOp.OR: "or",
        BinOp.XOR: "xor",
    }
)
_INT_COMPARE: Mapping[CmpOp, str] = MappingProxyType(
    {
        CmpOp.EQ: "eq",
        CmpOp.NE: "ne",
        CmpOp.LT: "slt",
        CmpOp.LE: "sle",
        CmpOp.GT: "sgt",
        CmpOp.GE: "sge",
        CmpOp.LT_U: "ult",
        CmpOp.LE_U: "ule",
        CmpOp.GT_U: "ugt",
        CmpOp.GE_U: "uge",
    }
)
_FLOAT_COMPARE: Mapping[CmpOp, str] = MappingProxyType(
    {
        CmpOp.EQ: "oeq",
        CmpOp.NE: "une",
        CmpOp.LT: "olt",
        CmpOp.LE: "ole",
        CmpOp.GT: "ogt",
        CmpOp.GE: "oge",
    }
)
_CONVERSIONS: Mapping[ConvertOp, str] = MappingProxyType(
    {
        ConvertOp.SINT_TO_FLOAT: "sitofp",
        ConvertOp.UINT_TO_FLOAT: "uitofp",
        ConvertOp.FLOAT_TO_SINT: "fptosi",
        ConvertOp.FLOAT_TO_UINT: "fptoui",
        ConvertOp.SEXT: "sext",
        ConvertOp.ZEXT: "zext",
        ConvertOp.TRUNC: "trunc",
    }
)


def type_text(type_: Type) -> str:
    """The LLVM name of a scalar or vector type."""
    if isinstance(type_, ScalarType):
        return _SCALARS[type_]
    if isinstance(type_, VecType):
        return f"<{type_.lanes} x {_SCALARS[type_.elem]}>"
    raise InternalError(f"llvm: type {type_} has no LLVM form; CPU schedules make no matrices")


def mangled(type_: Type) -> str:
    """The suffix of an intrinsic that is overloaded on ``type_``."""
    if isinstance(type_, VecType):
        return f"v{type_.lanes}{mangled(type_.elem)}"
    assert isinstance(type_, ScalarType)
    return type_.name


def constant(type_: Type, value: Number | tuple[float, ...]) -> str:
    """A constant operand of ``type_``, without the type."""
    if isinstance(type_, VecType):
        elem = type_text(type_.elem)
        if isinstance(value, tuple):
            return "<" + ", ".join(f"{elem} {_scalar(type_.elem, v)}" for v in value) + ">"
        return f"splat ({elem} {_scalar(type_.elem, value)})"
    if isinstance(value, tuple) or not isinstance(type_, ScalarType):
        raise InternalError(f"llvm: constant {value} of type {type_}")
    return _scalar(type_, value)


def _scalar(type_: ScalarType, value: Number) -> str:
    if type_ is I1:
        return "true" if value else "false"
    if type_.kind == "int":
        half = 1 << (type_.bits - 1)
        return str((int(value) + half) % (2 * half) - half)
    return _float(type_, float(value))


def _float(type_: ScalarType, value: float) -> str:
    """A float by its bits: LLVM writes f32 as the double of equal value."""
    if type_ is F64:
        rounded = value
    else:
        with np.errstate(over="ignore"):
            rounded = float(np.float32(value))
    if type_ is F16:
        with np.errstate(over="ignore"):
            return f"0xH{int(np.float16(value).view(np.uint16)):04X}"
    if type_ is BF16:
        return f"0xR{_bf16_bits(value):04X}"
    return f"0x{struct.unpack('<Q', struct.pack('<d', rounded))[0]:016X}"


def _bf16_bits(value: float) -> int:
    """Bits of ``value`` rounded through f32 to bfloat16, to nearest even."""
    with np.errstate(over="ignore"):
        bits = int(np.float32(value).view(np.uint32))
    if value != value:
        return (bits >> 16) | 0x40
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF


def binary_opcode(op: BinOp, elem: ScalarType) -> str | None:
    """The instruction of ``op`` on ``elem``, None where it takes a call."""
    return (_FLOAT_BINARY if elem.kind == "float" else _INT_BINARY).get(op)


def compare_opcode(op: CmpOp, elem: ScalarType) -> str:
    """``icmp`` or ``fcmp`` with its predicate."""
    if elem.kind != "float":
        return f"icmp {_INT_COMPARE[op]}"
    predicate = _FLOAT_COMPARE.get(op)
    if predicate is None:
        raise InternalError(f"llvm: unsigned comparison {op.value} of {elem}")
    return f"fcmp {predicate}"


def convert_opcode(op: ConvertOp, source: ScalarType, target: ScalarType) -> str:
    """The instruction that converts ``source`` to ``target``."""
    if op is ConvertOp.FLOAT:
        return "fpext" if source.bits < target.bits else "fptrunc"
    return _CONVERSIONS[op]


def reduction(op: BinOp, type_: VecType) -> tuple[str, str]:
    """Name of the reduction intrinsic, and its typed start value with a comma, or nothing."""
    elem = type_.elem
    if op in (BinOp.ADD, BinOp.MUL):
        name = "add" if op is BinOp.ADD else "mul"
        if elem.kind != "float":
            return f"llvm.vector.reduce.{name}.{mangled(type_)}", ""
        start = constant(elem, -0.0 if op is BinOp.ADD else 1.0)
        return f"llvm.vector.reduce.f{name}.{mangled(type_)}", f"{type_text(elem)} {start}, "
    found = _REDUCTIONS.get(op)
    if found is None:
        raise InternalError(f"llvm: reduction by {op.value}")
    return f"llvm.vector.reduce.{found}.{mangled(type_)}", ""


__all__ = [
    "BINARY_INTRINSICS",
    "LIBM_BINARY",
    "LIBM_SYMBOLS",
    "LIBM_UNARY",
    "UNARY_INTRINSICS",
    "binary_opcode",
    "compare_opcode",
    "constant",
    "convert_opcode",
    "mangled",
    "reduction",
    "type_text",
]
