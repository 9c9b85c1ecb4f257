"""What the pointwise families share: constants, 16-bit floats in float32, bases, samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from vkjit import dtypes
from vkjit.dtypes import DType
from vkjit.ir.avals import aval
from vkjit.ir.primitive import Array, Kind, Remat, Sample, Tangent, Traits, Value
from vkjit.lowering.kernel import nodes
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.types import (
    F32,
    CmpOp,
    ConvertOp,
    Number,
    UnOp,
    lanes_of,
    scalar_of,
    with_elem,
)
from vkjit.ops.structural import Pointwise, add, float_of
from vkjit.trace import aval_of, bind

FLOATS = (dtypes.float32, dtypes.float16, dtypes.bfloat16)
INTS = (dtypes.int32, dtypes.uint32, dtypes.int8, dtypes.uint8, dtypes.int16, dtypes.uint16)

CHEAP = Traits(Kind.POINTWISE)
COSTLY = Traits(Kind.POINTWISE, Remat.COSTLY)
FLAT = Traits(Kind.POINTWISE, differentiable=False)
"""Operations whose derivative is zero wherever it exists, or whose result is no float."""


def scalar_like(x: Value, value: float) -> Value:
    """A rank-0 constant of the dtype of ``x``."""
    return aval_of(x).dtype.type(value)


def zero_like(x: Value) -> Value:
    """A rank-0 zero of the dtype of ``x``."""
    return scalar_like(x, 0)


def total(parts: Sequence[Tangent]) -> Tangent:
    """The sum of tangents, None when all are."""
    known = [p for p in parts if p is not None]
    if not known:
        return None
    out = known[0]
    for part in known[1:]:
        out = add(out, part)
    return out


# -- NumPy ----------------------------------------------------------------------------------------


def apply_wide(function: Callable[..., Any], *arrays: Array) -> Array:
    """``function`` of the arrays; 16-bit floats compute in float32 and round once."""
    dtype = arrays[0].dtype
    wide = float_of(dtype)
    with np.errstate(all="ignore"):
        return np.asarray(function(*[a.astype(wide, copy=False) for a in arrays])).astype(
            dtype, copy=False
        )


def unsigned_view(x: Array) -> Array:
    """The bits of integers as unsigned numbers."""
    return np.asarray(x).view(f"u{x.dtype.itemsize}")


# -- kernel values --------------------------------------------------------------------------------


def const_like(b: Builder, x: nodes.Value, value: Number) -> nodes.Value:
    """A constant of the type of ``x`` in every lane."""
    return b.splat(b.const(scalar_of(x.type), value), lanes_of(x.type))


def widened(b: Builder, x: nodes.Value) -> nodes.Value:
    """A 16-bit float as f32; others as they are."""
    elem = scalar_of(x.type)
    if elem.kind != "float" or elem.bits != 16:
        return x
    return b.convert(ConvertOp.FLOAT, x, with_elem(x.type, F32))


def narrowed(b: Builder, x: nodes.Value, like: nodes.Value) -> nodes.Value:
    """``x`` rounded to the float type of ``like``."""
    return b.convert(ConvertOp.FLOAT, x, like.type)


def has_sign(b: Builder, x: nodes.Value) -> nodes.Value:
    """Whether a float is below zero (false for -0.0 and NaN)."""
    return b.compare(CmpOp.LT, x, const_like(b, x, 0.0))


def with_sign_of(b: Builder, magnitude: nodes.Value, x: nodes.Value) -> nodes.Value:
    """An odd function's value from its value at ``|x|``; a zero keeps the sign of ``x``."""
    zero = const_like(b, x, 0.0)
    signed = b.select(has_sign(b, x), b.unary(UnOp.NEG, magnitude), magnitude)
    return b.select(b.compare(CmpOp.EQ, x, zero), x, signed)


# -- bases ----------------------------------------------------------------------------------------


class Flat(Pointwise):
    """An operation with no derivative to speak of: its tangent is a symbolic zero."""

    traits: ClassVar[Traits] = FLAT

    def jvp(self, primals: Sequence[Value], tangents: Sequence[Tangent]) -> tuple[Value, Tangent]:
        """No tangent."""
        return bind(self, *primals), None


# -- samples --------------------------------------------------------------------------------------


def unary_samples(
    prim: Pointwise,
    of: Sequence[DType],
    low: float = -2.0,
    high: float = 2.0,
    *,
    smooth: bool = True,
) -> list[Sample]:
    """One operand: a matrix of each dtype; an odd vector, a scalar and an empty array of the first.

    Ranges start at 0 for unsigned dtypes.
    """
    shapes = [((3, 5), d) for d in of] + [(s, of[0]) for s in ((17,), (), (0, 3))]
    return [
        Sample(prim, (aval(s, d),), max(low, 0.0) if _unsigned(d) else low, high, smooth)
        for s, d in shapes
    ]


def binary_samples(
    prim: Pointwise,
    of: Sequence[DType],
    low: float = -2.0,
    high: float = 2.0,
    *,
    smooth: bool = True,
) -> list[Sample]:
    """Two operands: matrices of each dtype; repeated scalars and an empty array of the first."""
    first = of[0]
    pairs = [(aval((3, 5), d), aval((3, 5), d)) for d in of]
    for left, right in (((17,), ()), ((), (17,)), ((0, 3), (0, 3)), ((), ())):
        pairs.append((aval(left, first), aval(right, first)))
    return [
        Sample(prim, p, max(low, 0.0) if _unsigned(p[0].dtype) else low, high, smooth)
        for p in pairs
    ]


def _unsigned(dtype: DType) -> bool:
    return dtype == dtypes.bool_ or (dtypes.is_int(dtype) and not dtypes.is_signed(dtype))
