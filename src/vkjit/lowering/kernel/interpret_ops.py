"""What each scalar operation means, in NumPy: the definition that every emitter is judged by.

Integers are signed arrays of their width, ``i1`` is ``bool``, ``bf16`` is ``ml_dtypes.bfloat16``.
Lanes and invocations are axes of the arrays; nothing here knows about them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, assert_never

import ml_dtypes
import numpy as np
import numpy.typing as npt

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
    ScalarType,
    UnOp,
)

Array = npt.NDArray[Any]

DTYPES: dict[ScalarType, np.dtype[Any]] = {
    I1: np.dtype(np.bool_),
    I8: np.dtype(np.int8),
    I16: np.dtype(np.int16),
    I32: np.dtype(np.int32),
    I64: np.dtype(np.int64),
    F16: np.dtype(np.float16),
    BF16: np.dtype(ml_dtypes.bfloat16),
    F32: np.dtype(np.float32),
    F64: np.dtype(np.float64),
}
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def unsigned(x: Array) -> Array:
    """The bits of an integer array as unsigned numbers."""
    return x.view(_UNSIGNED[x.dtype.itemsize])


# -- special functions, in float64 ----------------------------------------------------------------

_erf_each = np.frompyfunc(math.erf, 1, 1)

# Wichura, "Algorithm AS241: The Percentage Points of the Normal Distribution", Applied Statistics
# 37 (1988), PPND16: numerators and denominators, highest power first; relative error 1e-16.
CENTRE = (
    (2509.0809287301226727, 33430.575583588128105, 67265.770927008700853, 45921.953931549871457,
     13731.693765509461125, 1971.5909503065514427, 133.14166789178437745, 3.3871328727963666080),
    (5226.4952788528545610, 28729.085735721942674, 39307.895800092710610, 21213.794301586595867,
     5394.1960214247511077, 687.18700749205790830, 42.313330701600911252, 1.0),
)  # fmt: skip
MIDDLE = (
    (7.74545014278341407640e-4, 2.27238449892691845833e-2, 2.41780725177450611770e-1,
     1.27045825245236838258, 3.64784832476320460504, 5.76949722146069140550,
     4.63033784615654529590, 1.42343711074968357734),
    (1.05075007164441684324e-9, 5.47593808499534494600e-4, 1.51986665636164571966e-2,
     1.48103976427480074590e-1, 6.89767334985100004550e-1, 1.67638483018380384940,
     2.05319162663775882187, 1.0),
)  # fmt: skip
TAIL = (
    (2.01033439929228813265e-7, 2.71155556874348757815e-5, 1.24266094738807843860e-3,
     2.65321895265761230930e-2, 2.96560571828504891230e-1, 1.78482653991729133580,
     5.46378491116411436990, 6.65790464350110377720),
    (2.04426310338993978564e-15, 1.42151175831644588870e-7, 1.84631831751005468180e-5,
     7.86869131145613259100e-4, 1.48753612908506148525e-2, 1.36929880922735805310e-1,
     5.99832206555887937690e-1, 1.0),
)  # fmt: skip


def erf(x: Array) -> Array:
    """The error function of a float64 array, by libm."""
    return np.asarray(_erf_each(x), dtype=np.float64)


def erf_inv(x: Array) -> Array:
    """The inverse error function of a float64 array; NaN outside [-1, 1], infinite at its ends."""
    tail = (1.0 - np.abs(x)) * 0.5  # exact for float32 arguments
    root = np.sqrt(-np.log(np.where(tail > 0.0, tail, 0.5)))
    centre = 0.180625 - 0.25 * x * x
    outer = np.where(root <= 5.0, _ratio(MIDDLE, root - 1.6), _ratio(TAIL, root - 5.0))
    inside = np.where(np.abs(x) <= 0.85, _ratio(CENTRE, centre) * (0.5 * x), np.copysign(outer, x))
    edge = np.where(np.abs(x) == 1.0, np.copysign(np.inf, x), np.nan)
    return np.where(np.abs(x) < 1.0, inside / math.sqrt(2.0), edge)


def _ratio(terms: tuple[tuple[float, ...], tuple[float, ...]], x: Array) -> Array:
    return np.polyval(terms[0], x) / np.polyval(terms[1], x)


# -- unary ----------------------------------------------------------------------------------------

_FLOAT_UNARY: dict[UnOp, Callable[[Array], Array]] = {
    UnOp.ABS: np.abs,
    UnOp.FLOOR: np.floor,
    UnOp.CEIL: np.ceil,
    UnOp.ROUND_EVEN: np.rint,
    UnOp.TRUNC: np.trunc,
    UnOp.SQRT: np.sqrt,
    UnOp.EXP: np.exp,
    UnOp.EXP2: np.exp2,
    UnOp.EXPM1: np.expm1,
    UnOp.LOG: np.log,
    UnOp.LOG1P: np.log1p,
    UnOp.SIN: np.sin,
    UnOp.COS: np.cos,
    UnOp.TAN: np.tan,
    UnOp.ATAN: np.arctan,
    UnOp.TANH: np.tanh,
}


def unary(op: UnOp, x: Array) -> Array:
    """``op x`` in the dtype of ``x``; functions of 16-bit floats go through float32."""
    if op is UnOp.NOT:
        return np.logical_not(x) if x.dtype == np.bool_ else np.invert(x)
    if op is UnOp.NEG:
        return np.negative(x)
    if op is UnOp.POPCOUNT:
        return np.bitwise_count(unsigned(x)).astype(x.dtype)
    if op is UnOp.CLZ:
        return _leading_zeros(x)
    if op is UnOp.ERF or op is UnOp.ERF_INV:
        function = erf if op is UnOp.ERF else erf_inv
        return function(x.astype(np.float64)).astype(x.dtype)
    wide = x.astype(np.float32) if x.dtype.itemsize == 2 else x
    made = 1.0 / np.sqrt(wide) if op is UnOp.RSQRT else _FLOAT_UNARY[op](wide)
    return made.astype(x.dtype)


def _leading_zeros(x: Array) -> Array:
    bits = unsigned(x).copy()
    step = 1
    while step < x.dtype.itemsize * 8:
        bits |= bits >> bits.dtype.type(step)
        step *= 2
    return np.bitwise_count(~bits).astype(x.dtype)


# -- binary ---------------------------------------------------------------------------------------

_BINARY: dict[BinOp, Callable[[Array, Array], Array]] = {
    BinOp.ADD: np.add,
    BinOp.SUB: np.subtract,
    BinOp.MUL: np.multiply,
    BinOp.DIV: np.divide,
    BinOp.MIN: np.minimum,
    BinOp.MAX: np.maximum,
    BinOp.MIN_S: np.minimum,
    BinOp.MAX_S: np.maximum,
    BinOp.AND: np.bitwise_and,
    BinOp.OR: np.bitwise_or,
    BinOp.XOR: np.bitwise_xor,
    BinOp.SHL: np.left_shift,
    BinOp.SHR_A: np.right_shift,
}
_UNSIGNED_BINARY: dict[BinOp, Callable[[Array, Array], Array]] = {
    BinOp.DIV_U: np.floor_divide,
    BinOp.REM_U: np.remainder,
    BinOp.MIN_U: np.minimum,
    BinOp.MAX_U: np.maximum,
    BinOp.SHR_L: np.right_shift,
}
_WIDE_BINARY: dict[BinOp, Callable[[Array, Array], Array]] = {
    BinOp.POW: np.power,
    BinOp.ATAN2: np.arctan2,
}


def binary(op: BinOp, a: Array, b: Array) -> Array:
    """``a op b`` in their common dtype; integer ADD, SUB and MUL wrap."""
    found = _BINARY.get(op)
    if found is not None:
        return found(a, b)
    found = _UNSIGNED_BINARY.get(op)
    if found is not None:
        return found(unsigned(a), unsigned(b)).view(a.dtype)
    found = _WIDE_BINARY.get(op)
    if found is not None:
        wide = np.float32 if a.dtype.itemsize == 2 else a.dtype
        return found(a.astype(wide), b.astype(wide)).astype(a.dtype)
    if op is BinOp.REM_S:
        return np.fmod(a, b)
    if op is BinOp.DIV_S:  # towards zero; NumPy divides towards minus infinity
        quotient = np.floor_divide(a, b)
        return quotient + ((quotient < 0) & (quotient * b != a)).astype(a.dtype)
    raise InternalError(f"{op.value}: no meaning for operands of dtype {a.dtype}")


def identity(op: BinOp, elem: ScalarType) -> Array:
    """The value that changes nothing under ``op``, as an array without axes."""
    dtype = DTYPES[elem]
    if op in (BinOp.MIN, BinOp.MAX):
        return np.asarray(np.inf if op is BinOp.MIN else -np.inf, dtype)
    if op in (BinOp.ADD, BinOp.OR, BinOp.XOR, BinOp.MAX_U):
        # -0.0 is the neutral element of float addition: it keeps a sum of -0.0 negative.
        return np.asarray(-0.0 if elem.kind == "float" else 0, dtype)
    if op is BinOp.MUL:
        return np.asarray(1, dtype)
    if op in (BinOp.AND, BinOp.MIN_U):
        return np.asarray(1 if elem is I1 else -1, dtype)
    if op in (BinOp.MIN_S, BinOp.MAX_S):
        limits = np.iinfo(dtype)
        return np.asarray(limits.max if op is BinOp.MIN_S else limits.min, dtype)
    raise InternalError(f"reduce {op.value}: expected ADD, MUL, MIN*, MAX*, AND, OR or XOR")


def reduce_last(op: BinOp, x: Array) -> Array:
    """The last axis combined pairwise: neighbours first, an odd lane carried along."""
    while x.shape[-1] > 1:
        pairs = x.shape[-1] // 2
        made = binary(op, x[..., 0 : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2])
        rest = x[..., 2 * pairs :]
        x = np.concatenate((made, rest), axis=-1) if rest.shape[-1] else made
    return x[..., 0]


_COMPARE: dict[CmpOp, Callable[[Array, Array], Array]] = {
    CmpOp.EQ: np.equal,
    CmpOp.NE: np.not_equal,
    CmpOp.LT: np.less,
    CmpOp.LE: np.less_equal,
    CmpOp.GT: np.greater,
    CmpOp.GE: np.greater_equal,
    CmpOp.LT_U: np.less,
    CmpOp.LE_U: np.less_equal,
    CmpOp.GT_U: np.greater,
    CmpOp.GE_U: np.greater_equal,
}
UNSIGNED_COMPARISONS = frozenset({CmpOp.LT_U, CmpOp.LE_U, CmpOp.GT_U, CmpOp.GE_U})


def compare(op: CmpOp, a: Array, b: Array) -> Array:
    """``a op b`` as booleans."""
    if op in UNSIGNED_COMPARISONS:
        return _COMPARE[op](unsigned(a), unsigned(b))
    return _COMPARE[op](a, b)


# -- fused multiply-add ---------------------------------------------------------------------------


def fma(a: Array, b: Array, c: Array) -> Array:
    """``a * b + c`` rounded once (float64: to within the last bit of an exact sum)."""
    dtype = a.dtype
    if dtype == np.float64:
        return _fma64(a, b, c)
    product = a.astype(np.float64) * b.astype(np.float64)  # exact: at most 48 bits
    addend = c.astype(np.float64)
    total = product + addend
    # Rounding to 53 bits and then to 24 differs from rounding once only where the first result
    # lies halfway between two numbers of the second kind; round those to odd first.
    suspects = _suspects(total, dtype)
    if suspects.any():
        total = np.where(suspects, _round_to_odd(product, addend, total), total)
    return narrowed(total, dtype)


_PRECISION = {
    DTYPES[F32]: (24, 2.0**-126),
    DTYPES[F16]: (11, 2.0**-14),
    DTYPES[BF16]: (8, 2.0**-126),
}


def _suspects(total: Array, dtype: np.dtype[Any]) -> Array:
    kept, smallest = _PRECISION[dtype]
    low = np.uint64((1 << (53 - kept)) - 1)
    halfway = np.uint64(1 << (52 - kept))
    bits = np.ascontiguousarray(total).view(np.uint64)
    return ((bits & low) == halfway) | (np.abs(total) < smallest)


def _round_to_odd(product: Array, addend: Array, total: Array) -> Array:
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = np.ascontiguousarray(total).view(np.int64)
    inexact = (error != 0.0) & np.isfinite(error) & ((bits & 1) == 0) & (total != 0.0)
    away = (error > 0.0) == (total > 0.0)
    return (bits + np.where(inexact, np.where(away, 1, -1), 0)).view(np.float64)


def _fma64(a: Array, b: Array, c: Array) -> Array:
    plain = a * b + c
    product = a * b
    a_high, b_high = _upper_half(a), _upper_half(b)
    a_low, b_low = a - a_high, b - b_high
    low = ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low
    total = product + c
    back = total - product
    error = (product - (total - back)) + (c - back)
    made = total + (error + low)
    return np.where(np.isfinite(made), made, plain)


def _upper_half(x: Array) -> Array:
    scaled = x * 134217729.0  # 2**27 + 1: Veltkamp's splitting
    return scaled - (scaled - x)


# -- conversions ----------------------------------------------------------------------------------


def convert(op: ConvertOp, x: Array, target: ScalarType) -> Array:
    """``x`` as ``target``; what is out of range gives any value."""
    dtype = DTYPES[target]
    match op:
        case ConvertOp.FLOAT:
            return narrowed(x, dtype) if x.dtype == np.float64 else x.astype(dtype)
        case ConvertOp.SINT_TO_FLOAT:
            return _whole_to_float(x, dtype)
        case ConvertOp.UINT_TO_FLOAT:
            return _whole_to_float(unsigned(x) if x.dtype != np.bool_ else x, dtype)
        case ConvertOp.FLOAT_TO_SINT:
            return np.trunc(x.astype(np.float64)).astype(np.int64).astype(dtype)
        case ConvertOp.FLOAT_TO_UINT:
            whole = np.trunc(x.astype(np.float64)).astype(np.uint64)
            return whole.astype(_UNSIGNED[dtype.itemsize]).view(dtype)
        case ConvertOp.SEXT:
            return -x.astype(dtype) if x.dtype == np.bool_ else x.astype(dtype)
        case ConvertOp.ZEXT:
            wide = x if x.dtype == np.bool_ else unsigned(x)
            return wide.astype(_UNSIGNED[dtype.itemsize]).view(dtype)
        case ConvertOp.TRUNC:
            return (x & 1).astype(dtype) if target is I1 else x.astype(dtype)
        case _:
            assert_never(op)


def _whole_to_float(x: Array, dtype: np.dtype[Any]) -> Array:
    via = dtype == DTYPES[BF16] and x.dtype.itemsize > 2
    return narrowed(x.astype(np.float64), dtype) if via else x.astype(dtype)


def narrowed(x: Array, dtype: np.dtype[Any]) -> Array:
    """A float64 array in ``dtype``, rounded once; ``ml_dtypes`` passes through float32."""
    if dtype != DTYPES[BF16]:
        return x.astype(dtype)
    bits = np.ascontiguousarray(x).view(np.int64)
    sticky = ((bits & 0xFFFFFFFF) != 0).astype(np.int64) << 32
    return ((bits & ~np.int64(0xFFFFFFFF)) | sticky).view(np.float64).astype(dtype)


def bitcast(x: Array, target: ScalarType, lanes: int) -> Array:
    """The bits of ``x`` as ``target``; a change of width changes the number of lanes."""
    dtype = DTYPES[target]
    if dtype.itemsize == x.dtype.itemsize:
        return np.ascontiguousarray(x).view(dtype)
    vector = x if lanes * dtype.itemsize != x.dtype.itemsize else x[..., np.newaxis]
    made = np.ascontiguousarray(vector).view(dtype)
    return made[..., 0] if lanes == 1 else made
