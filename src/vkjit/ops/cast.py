"""Conversion between dtypes: pure, cheap, differentiable between floats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final
from typing import cast as as_type

import numpy as np

from vkjit import dtypes
from vkjit.dtypes import DType
from vkjit.ir.avals import Aval, aval
from vkjit.ir.primitive import (
    Array,
    Kind,
    Linear,
    Producer,
    Sample,
    Simpler,
    Tangent,
    Traits,
    Value,
)
from vkjit.ir.program import Atom
from vkjit.lowering.kernel import nodes
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.elements import scalar_type
from vkjit.lowering.kernel.types import (
    I32,
    BinOp,
    CmpOp,
    ConvertOp,
    UnOp,
    lanes_of,
    scalar_of,
    with_elem,
)
from vkjit.ops.pointwise import INTS, const_like, widened
from vkjit.ops.structural import Pointwise
from vkjit.trace import aval_of, bind


@final
@dataclass(frozen=True)
class Cast(Pointwise):
    """``x`` as ``dtype``, never weakly typed.

    Floats round to nearest even; float to integer truncates, saturates and turns NaN into 0 (as in
    JAX); integers wrap; to boolean is ``x != 0``.
    """

    dtype: DType

    traits: ClassVar[Traits] = Traits(Kind.POINTWISE, linear_in=(0,))

    def result_dtype(self, *operands: DType) -> DType:
        """The parameter."""
        return self.dtype

    def is_weak(self, *avals: Aval) -> bool:
        """The dtype was asked for."""
        return False

    def evaluate(self, *arrays: Array) -> Array:
        """ndarray.astype with every case defined."""
        (x,) = arrays
        with np.errstate(all="ignore"):
            if self.dtype == dtypes.bool_:
                return np.asarray(x != 0)
            if dtypes.is_float(x.dtype) and dtypes.is_int(self.dtype):
                return _saturated(x, self.dtype)
            return x.astype(self.dtype)

    def scalar(self, b: Builder, operands: Sequence[DType], *args: nodes.Value) -> nodes.Value:
        """One conversion node, with guards from float to integer."""
        (x,), (of,) = args, operands
        if self.dtype == of:
            return x
        if self.dtype == dtypes.bool_:
            zero = 0.0 if dtypes.is_float(of) else 0
            return b.compare(CmpOp.NE, x, const_like(b, x, zero))
        to = with_elem(x.type, scalar_type(self.dtype))
        if dtypes.is_float(of):
            if dtypes.is_float(self.dtype):
                return b.convert(ConvertOp.FLOAT, x, to)
            return _float_to_int(b, widened(b, x), self.dtype)
        if dtypes.is_float(self.dtype):
            if of == dtypes.bool_:
                zero, one = (b.splat(b.const(scalar_of(to), v), lanes_of(to)) for v in (0.0, 1.0))
                return b.select(x, one, zero)
            signed = dtypes.is_signed(of)
            return b.convert(ConvertOp.SINT_TO_FLOAT if signed else ConvertOp.UINT_TO_FLOAT, x, to)
        if scalar_of(to).bits < scalar_of(x.type).bits:
            return b.convert(ConvertOp.TRUNC, x, to)
        return b.convert(ConvertOp.SEXT if dtypes.is_signed(of) else ConvertOp.ZEXT, x, to)

    def simplify(self, args: Sequence[Atom], producer: Producer) -> Simpler | None:
        """What makes the operand may make it in this dtype: packed numbers are read in any."""
        made = producer(args[0])
        prim = None if made is None else made.prim.rounded_to(self.dtype)
        return None if made is None or prim is None else (prim, made.args)

    def jvp(self, primals: Sequence[Value], tangents: Sequence[Tangent]) -> tuple[Value, Tangent]:
        """The tangent is cast too; nothing flows through integers and booleans."""
        out = bind(self, primals[0])
        is_smooth = dtypes.is_float(self.dtype) and dtypes.is_float(aval_of(primals[0]).dtype)
        return out, cast(tangents[0], self.dtype) if is_smooth else None

    def transpose(
        self, cotangents: Sequence[Value], args: Sequence[Value | Linear]
    ) -> tuple[Tangent, ...]:
        """The cotangent in the operand's dtype."""
        return (cast(cotangents[0], as_type("Linear", args[0]).aval.dtype),)

    @classmethod
    def samples(cls) -> list[Sample]:
        """Every pair of dtypes without 64 bits."""
        every = (dtypes.float32, dtypes.float16, dtypes.bfloat16, *INTS, dtypes.bool_)
        return [
            Sample(
                cls(to),
                (aval((3, 5), of),),
                0.0 if of == dtypes.bool_ or str(of).startswith("u") else -300.0,
                300.0,
                smooth=dtypes.is_float(to),
            )
            for of in every
            for to in every
            if of != to
        ]


def _saturated(x: Array, dtype: DType) -> Array:
    limits = np.iinfo(dtype)
    wide = np.where(np.isnan(x), 0.0, x.astype(np.float64))
    inside = (wide > float(limits.min) - 1.0) & (wide < float(limits.max) + 1.0)
    if dtype.itemsize == 8:  # the limits are not exact in float64
        inside = (wide >= float(limits.min)) & (wide < float(limits.max))
    made = np.trunc(np.where(inside, wide, 0.0)).astype(dtype)
    ends = np.array([limits.max, limits.min], dtype)
    return np.where(inside, made, ends[(wide < 0).astype(np.int8)]).astype(dtype)


def _float_to_int(b: Builder, x: nodes.Value, dtype: DType) -> nodes.Value:
    """Saturating conversion: only values that fit reach the node, which is undefined elsewhere."""
    limits = np.iinfo(dtype)
    elem = scalar_type(dtype)
    whole = b.unary(UnOp.TRUNC, x)
    # The first whole numbers beyond both ends: powers of two (or -1), exact in every float type.
    above = b.compare(CmpOp.GE, whole, const_like(b, x, float(limits.max + 1)))
    below = b.compare(CmpOp.LT, whole, const_like(b, x, float(limits.min)))
    is_nan = b.compare(CmpOp.NE, x, x)
    outside = b.binary(BinOp.OR, b.binary(BinOp.OR, above, below), is_nan)
    safe = b.select(outside, const_like(b, x, 0.0), whole)
    # Narrow results go through i32, which every target converts to.
    through = elem if elem.bits >= 32 else I32
    signed = dtypes.is_signed(dtype) or elem.bits < 32
    op = ConvertOp.FLOAT_TO_SINT if signed else ConvertOp.FLOAT_TO_UINT
    made = b.convert(op, safe, with_elem(x.type, through))
    made = b.convert(ConvertOp.TRUNC, made, with_elem(x.type, elem))
    top = limits.max if dtypes.is_signed(dtype) else -1  # kernel integers carry no sign
    clipped = b.select(above, const_like(b, made, top), made)
    return b.select(below, const_like(b, made, int(limits.min)), clipped)


def cast(x: Value, dtype: DType) -> Value:
    """``x`` as ``dtype``; ``x`` itself when it has that dtype and is not weakly typed."""
    of = aval_of(x)
    return x if of.dtype == dtype and not of.weak else bind(Cast(dtype), x)
