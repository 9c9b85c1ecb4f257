"""The larger or smaller of two operands: max, min, clamp; NaN spreads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from vkjit import dtypes
from vkjit.dtypes import DType
from vkjit.ir.primitive import Array, Sample, Tangent, Value
from vkjit.lowering.kernel import nodes
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.types import BinOp
from vkjit.ops.arithmetic import mul
from vkjit.ops.compare import eq, gt
from vkjit.ops.logical import select
from vkjit.ops.pointwise import FLOATS, INTS, binary_samples, scalar_like, zero_like
from vkjit.ops.structural import Pointwise, add, expand
from vkjit.trace import aval_of, bind


class _Extremum(Pointwise):
    """The larger or smaller operand; NaN spreads; equal operands share the derivative in halves."""

    floats: ClassVar[BinOp]
    signed: ClassVar[BinOp]
    unsigned: ClassVar[BinOp]
    booleans: ClassVar[BinOp]

    def scalar(self, b: Builder, operands: Sequence[DType], *args: nodes.Value) -> nodes.Value:
        """One node."""
        (dtype, _) = operands
        if dtype == dtypes.bool_:
            return b.binary(self.booleans, *args)
        if dtypes.is_float(dtype):
            return b.binary(self.floats, *args)
        return b.binary(self.signed if dtypes.is_signed(dtype) else self.unsigned, *args)

    def share(self, left: Value, right: Value, dx: Tangent, dy: Tangent) -> Value:
        """``dx`` where left > right, ``dy`` where right > left, their mean where both are equal."""
        known = dx if dx is not None else dy
        zero, half = zero_like(known), scalar_like(known, 0.5)
        dx = zero if dx is None else dx
        dy = zero if dy is None else dy
        shared = mul(add(dx, dy), half)
        return select(gt(left, right), dx, select(eq(left, right), shared, dy))

    @classmethod
    def samples(cls) -> list[Sample]:
        """All dtypes; random floats do not tie."""
        return binary_samples(cls(), (*FLOATS, *INTS, dtypes.bool_), -5, 5, smooth=False)


@final
@dataclass(frozen=True)
class Max(_Extremum):
    """The larger operand; NaN spreads; equal operands share the derivative in halves."""

    floats: ClassVar[BinOp] = BinOp.MAX
    signed: ClassVar[BinOp] = BinOp.MAX_S
    unsigned: ClassVar[BinOp] = BinOp.MAX_U
    booleans: ClassVar[BinOp] = BinOp.OR

    def evaluate(self, *arrays: Array) -> Array:
        """np.maximum."""
        with np.errstate(invalid="ignore"):
            return np.asarray(np.maximum(*arrays))

    def jvp(self, primals: Sequence[Value], tangents: Sequence[Tangent]) -> tuple[Value, Tangent]:
        """The tangent of the larger operand."""
        x, y = primals
        out = bind(self, x, y)
        return out, expand(self.share(x, y, *tangents), aval_of(out).shape)


@final
@dataclass(frozen=True)
class Min(_Extremum):
    """The smaller operand; NaN spreads; equal operands share the derivative in halves."""

    floats: ClassVar[BinOp] = BinOp.MIN
    signed: ClassVar[BinOp] = BinOp.MIN_S
    unsigned: ClassVar[BinOp] = BinOp.MIN_U
    booleans: ClassVar[BinOp] = BinOp.AND

    def evaluate(self, *arrays: Array) -> Array:
        """np.minimum."""
        with np.errstate(invalid="ignore"):
            return np.asarray(np.minimum(*arrays))

    def jvp(self, primals: Sequence[Value], tangents: Sequence[Tangent]) -> tuple[Value, Tangent]:
        """The tangent of the smaller operand."""
        x, y = primals
        out = bind(self, x, y)
        return out, expand(self.share(y, x, *tangents), aval_of(out).shape)


def maximum(x: Value, y: Value) -> Value:
    """The larger of both; NaN spreads."""
    return bind(Max(), x, y)


def minimum(x: Value, y: Value) -> Value:
    """The smaller of both; NaN spreads."""
    return bind(Min(), x, y)


def clamp(low: Value, x: Value, high: Value) -> Value:
    """``x`` limited to ``[low, high]``; NaN spreads."""
    return minimum(maximum(x, low), high)
