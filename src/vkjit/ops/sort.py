"""Sorting: one primitive, the stable order of the elements along an axis.

Sorted values, the largest k and payloads are gathered at these positions, so that their derivatives
are those of a gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from vkjit import dtypes
from vkjit.dtypes import DType
from vkjit.errors import ShapeError
from vkjit.ir.avals import Aval, aval
from vkjit.ir.primitive import Array, Kind, Op, Remat, Sample, Tangent, Traits, Value
from vkjit.lowering.kernel import nodes
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.specs import KernelSpec, SortSpec
from vkjit.lowering.kernel.types import (
    F32,
    F64,
    I32,
    I64,
    BinOp,
    CmpOp,
    ConvertOp,
    ScalarType,
    scalar_of,
)
from vkjit.ops.pointwise import FLOATS, INTS
from vkjit.ops.structural import float_of
from vkjit.trace import bind


@final
@dataclass(frozen=True, slots=True)
class SortKey:
    """A signed integer for an element: smaller keys come first, equal elements have equal keys.

    The bits of a float that is not negative are ordered as integers are; those of a negative one
    are ordered once all bits but the sign are inverted. Zeros of both signs are equal, all NaNs are
    equal and larger than infinity. ``descending`` inverts the order, and puts NaN first.
    """

    dtype: DType
    descending: bool

    @property
    def type(self) -> ScalarType:
        """Of the key: 64 bits for 64-bit elements, else 32."""
        return I64 if self.dtype.itemsize == 8 else I32

    def __call__(self, b: Builder, x: nodes.Value) -> nodes.Value:
        """The key of an element."""
        key = self._of_float(b, x) if dtypes.is_float(self.dtype) else self._of_integer(b, x)
        if self.descending:
            key = b.binary(BinOp.XOR, key, b.const(self.type, -1))
        return key

    def _of_integer(self, b: Builder, x: nodes.Value) -> nodes.Value:
        signed = dtypes.is_int(self.dtype) and dtypes.is_signed(self.dtype)
        if scalar_of(x.type) is not self.type:
            return b.convert(ConvertOp.SEXT if signed else ConvertOp.ZEXT, x, self.type)
        if signed:
            return x
        return b.binary(BinOp.XOR, x, b.const(self.type, -1 << (self.type.bits - 1)))

    def _of_float(self, b: Builder, x: nodes.Value) -> nodes.Value:
        wide = b.convert(ConvertOp.FLOAT, x, F64 if self.type is I64 else F32)
        most = (1 << (self.type.bits - 1)) - 1
        bits = b.bitcast(wide, self.type)
        zero = b.const(self.type, 0)
        flipped = b.binary(BinOp.XOR, bits, b.const(self.type, most))
        key = b.select(b.compare(CmpOp.LT, bits, zero), flipped, bits)
        key = b.select(b.compare(CmpOp.EQ, key, b.const(self.type, -1)), zero, key)  # -0.0
        magnitude = b.binary(BinOp.AND, bits, b.const(self.type, most))
        infinity = 0x7FF << 52 if self.type is I64 else 0xFF << 23
        is_nan = b.compare(CmpOp.GT, magnitude, b.const(self.type, infinity))
        return b.select(is_nan, b.const(self.type, most), key)


@final
@dataclass(frozen=True)
class Argsort(Op):
    """The i32 positions that sort ``axis``; equal elements keep their order.

    NaN is larger than everything else; zeros of both signs are equal.
    """

    axis: int
    descending: bool = False

    traits: ClassVar[Traits] = Traits(Kind.REDUCE, Remat.COSTLY, differentiable=False)

    def infer(self, *avals: Aval) -> Aval:
        """An axis in range."""
        (x,) = avals
        if not 0 <= self.axis < x.ndim:
            raise ShapeError(
                f"argsort: axis {self.axis} for operand {x}; expected one below {x.ndim}"
            )
        return aval(x.shape, dtypes.int32)

    def evaluate(self, *arrays: Array) -> Array:
        """np.argsort; descending is the stable order from the end, read from the end."""
        x = arrays[0].astype(float_of(arrays[0].dtype), copy=False)  # bfloat16 does not order NaN
        if not self.descending:
            return np.argsort(x, axis=self.axis, kind="stable").astype(np.int32)
        found = np.argsort(np.flip(x, self.axis), axis=self.axis, kind="stable")
        return np.flip(x.shape[self.axis] - 1 - found, self.axis).astype(np.int32)

    def jvp(self, primals: Sequence[Value], tangents: Sequence[Tangent]) -> tuple[Value, Tangent]:
        """Positions have no derivative."""
        return bind(self, *primals), None

    def batch(self, args: Sequence[Value], batched: Sequence[bool]) -> Value:
        """The batch axis stays in front."""
        return argsort(args[0], self.axis + 1, descending=self.descending)

    def kernel_spec(self, avals: Sequence[Aval], out: Aval) -> KernelSpec:
        """A sort of keys."""
        return SortSpec(self.axis, SortKey(avals[0].dtype, self.descending))

    @classmethod
    def samples(cls) -> list[Sample]:
        """All axes and both directions; lengths about powers of two; dtypes; small: with ties."""
        f = aval((3, 4, 5), dtypes.float32)
        made = [Sample(cls(i, d), (f,), smooth=False) for i in range(3) for d in (False, True)]
        shapes = ((0,), (1,), (2,), (3,), (0, 3), (2, 0), (33,), (4, 2, 1))
        made += [Sample(cls(0), (aval(s, dtypes.float32),), smooth=False) for s in shapes]
        for dtype in (*FLOATS, *INTS, dtypes.bool_):
            low = 0.0 if str(dtype).startswith("u") else -3.0
            for descending in (False, True):
                of = (aval((2, 9), dtype),)
                made.append(Sample(cls(1, descending), of, low, 3.0, smooth=False))
        return made


def argsort(x: Value, axis: int, *, descending: bool = False) -> Value:
    """The i32 positions that sort ``axis``, stable."""
    return bind(Argsort(axis, descending), x)
