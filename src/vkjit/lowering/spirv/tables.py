"""Which SPIR-V instruction stands for which operation of the kernel IR.

An operation that is in no table has no instruction: ``legalize`` rewrites it before emission.
"""

from __future__ import annotations

from vkjit.lowering.kernel.types import BinOp, CmpOp, ConvertOp, UnOp
from vkjit.lowering.spirv.grammar import Glsl, Op

# Floats only. The precision of the transcendental ones is Vulkan's (a few ULP at best, SIN and COS
# absolute); legalize expands them wherever the promised errors are tighter.
GLSL_UNARY = {
    UnOp.ABS: Glsl.FAbs,
    UnOp.FLOOR: Glsl.Floor,
    UnOp.CEIL: Glsl.Ceil,
    UnOp.ROUND_EVEN: Glsl.RoundEven,
    UnOp.TRUNC: Glsl.Trunc,
    UnOp.SQRT: Glsl.Sqrt,
    UnOp.RSQRT: Glsl.InverseSqrt,
    UnOp.EXP: Glsl.Exp,
    UnOp.EXP2: Glsl.Exp2,
    UnOp.LOG: Glsl.Log,
    UnOp.SIN: Glsl.Sin,
    UnOp.COS: Glsl.Cos,
    UnOp.TAN: Glsl.Tan,
    UnOp.ATAN: Glsl.Atan,
    UnOp.TANH: Glsl.Tanh,
}
# These take 16 and 32 bit floats only, in GLSL.std.450.
NARROW_GLSL = frozenset(
    {UnOp.EXP, UnOp.EXP2, UnOp.LOG, UnOp.SIN, UnOp.COS, UnOp.TAN, UnOp.ATAN, UnOp.TANH}
)
UNEXPANDED = frozenset({UnOp.EXPM1, UnOp.LOG1P, UnOp.ERF, UnOp.ERF_INV})

FLOAT_BINARY = {
    BinOp.ADD: Op.FAdd,
    BinOp.SUB: Op.FSub,
    BinOp.MUL: Op.FMul,
    BinOp.DIV: Op.FDiv,
}
GLSL_FLOAT_BINARY = {BinOp.POW: Glsl.Pow, BinOp.ATAN2: Glsl.Atan2}
INT_BINARY = {
    BinOp.ADD: Op.IAdd,
    BinOp.SUB: Op.ISub,
    BinOp.MUL: Op.IMul,
    BinOp.DIV_S: Op.SDiv,
    BinOp.DIV_U: Op.UDiv,
    BinOp.REM_U: Op.UMod,
    BinOp.AND: Op.BitwiseAnd,
    BinOp.OR: Op.BitwiseOr,
    BinOp.XOR: Op.BitwiseXor,
    BinOp.SHL: Op.ShiftLeftLogical,
    BinOp.SHR_L: Op.ShiftRightLogical,
    BinOp.SHR_A: Op.ShiftRightArithmetic,
}
GLSL_INT_BINARY = {
    BinOp.MIN_S: Glsl.SMin,
    BinOp.MIN_U: Glsl.UMin,
    BinOp.MAX_S: Glsl.SMax,
    BinOp.MAX_U: Glsl.UMax,
}
BOOL_BINARY = {
    BinOp.AND: Op.LogicalAnd,
    BinOp.OR: Op.LogicalOr,
    BinOp.XOR: Op.LogicalNotEqual,
}

FLOAT_COMPARE = {
    CmpOp.EQ: Op.FOrdEqual,
    CmpOp.NE: Op.FUnordNotEqual,
    CmpOp.LT: Op.FOrdLessThan,
    CmpOp.LE: Op.FOrdLessThanEqual,
    CmpOp.GT: Op.FOrdGreaterThan,
    CmpOp.GE: Op.FOrdGreaterThanEqual,
}
INT_COMPARE = {
    CmpOp.EQ: Op.IEqual,
    CmpOp.NE: Op.INotEqual,
    CmpOp.LT: Op.SLessThan,
    CmpOp.LE: Op.SLessThanEqual,
    CmpOp.GT: Op.SGreaterThan,
    CmpOp.GE: Op.SGreaterThanEqual,
    CmpOp.LT_U: Op.ULessThan,
    CmpOp.LE_U: Op.ULessThanEqual,
    CmpOp.GT_U: Op.UGreaterThan,
    CmpOp.GE_U: Op.UGreaterThanEqual,
}
BOOL_COMPARE = {CmpOp.EQ: Op.LogicalEqual, CmpOp.NE: Op.LogicalNotEqual}

CONVERT = {
    ConvertOp.FLOAT: Op.FConvert,
    ConvertOp.SINT_TO_FLOAT: Op.ConvertSToF,
    ConvertOp.UINT_TO_FLOAT: Op.ConvertUToF,
    ConvertOp.FLOAT_TO_SINT: Op.ConvertFToS,
    ConvertOp.FLOAT_TO_UINT: Op.ConvertFToU,
    ConvertOp.SEXT: Op.SConvert,
    ConvertOp.ZEXT: Op.UConvert,
    ConvertOp.TRUNC: Op.UConvert,
}
# Conversions that change only the width may read and give narrow types without arithmetic on them.
WIDTH_ONLY = frozenset({ConvertOp.FLOAT, ConvertOp.SEXT, ConvertOp.ZEXT, ConvertOp.TRUNC})

SUBGROUP_FLOAT = {
    BinOp.ADD: Op.GroupNonUniformFAdd,
    BinOp.MUL: Op.GroupNonUniformFMul,
    BinOp.MIN: Op.GroupNonUniformFMin,
    BinOp.MAX: Op.GroupNonUniformFMax,
}
SUBGROUP_INT = {
    BinOp.ADD: Op.GroupNonUniformIAdd,
    BinOp.MUL: Op.GroupNonUniformIMul,
    BinOp.MIN_S: Op.GroupNonUniformSMin,
    BinOp.MIN_U: Op.GroupNonUniformUMin,
    BinOp.MAX_S: Op.GroupNonUniformSMax,
    BinOp.MAX_U: Op.GroupNonUniformUMax,
    BinOp.AND: Op.GroupNonUniformBitwiseAnd,
    BinOp.OR: Op.GroupNonUniformBitwiseOr,
    BinOp.XOR: Op.GroupNonUniformBitwiseXor,
}
SUBGROUP_BOOL = {
    BinOp.AND: Op.GroupNonUniformLogicalAnd,
    BinOp.OR: Op.GroupNonUniformLogicalOr,
    BinOp.XOR: Op.GroupNonUniformLogicalXor,
}
