"""Comparisons: eq, ne, lt, le, gt, ge, is_finite; the result is boolean and has no derivative."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np

from vkjit import dtypes
from vkjit.dtypes import DType
from vkjit.ir.primitive import Array, Sample, Value
from vkjit.lowering.kernel import nodes
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.types import I8, CmpOp, ConvertOp, UnOp, with_elem
from vkjit.ops.pointwise import FLOATS, INTS, Flat, binary_samples, const_like, unary_samples
from vkjit.trace import bind

_UNSIGNED = {
    CmpOp.LT: CmpOp.LT_U,
    CmpOp.LE: CmpOp.LE_U,
    CmpOp.GT: CmpOp.GT_U,
    CmpOp.GE: CmpOp.GE_U,
}


def comparison(op: CmpOp, dtype: DType) -> CmpOp:
    """The comparison for values of ``dtype``: unsigned integers and booleans have their own."""
    return op if dtypes.is_float(dtype) or dtypes.is_signed(dtype) else _UNSIGNED.get(op, op)


class _Compare(Flat):
    """A comparison of two operands; NaN compares unequal to everything."""

    function: ClassVar[Callable[[Array, Array], Any]]
    kernel: ClassVar[CmpOp]

    @final
    def result_dtype(self, *operands: DType) -> DType:
        """Boolean."""
        return dtypes.bool_

    @final
    def evaluate(self, *arrays: Array) -> Array:
        """The NumPy comparison."""
        with np.errstate(invalid="ignore"):
            return np.asarray(type(self).function(*arrays))

    @final
    def scalar(self, b: Builder, operands: Sequence[DType], *args: nodes.Value) -> nodes.Value:
        """One node; booleans compare as 0 and 1."""
        x, y = args
        if operands[0] == dtypes.bool_:
            x, y = (b.convert(ConvertOp.ZEXT, v, with_elem(v.type, I8)) for v in args)
        return b.compare(comparison(self.kernel, operands[0]), x, y)

    @classmethod
    def samples(cls) -> list[Sample]:
        """All dtypes; the range is small, so that equal values occur."""
        return binary_samples(cls(), (*FLOATS, *INTS, dtypes.bool_), -3, 3, smooth=False)


@final
@dataclass(frozen=True)
class Eq(_Compare):
    """``x == y``."""

    function: ClassVar[Callable[[Array, Array], Any]] = np.equal
    kernel: ClassVar[CmpOp] = CmpOp.EQ


@final
@dataclass(frozen=True)
class Ne(_Compare):
    """``x != y``; true for NaN."""

    function: ClassVar[Callable[[Array, Array], Any]] = np.not_equal
    kernel: ClassVar[CmpOp] = CmpOp.NE


@final
@dataclass(frozen=True)
class Lt(_Compare):
    """``x < y``."""

    function: ClassVar[Callable[[Array, Array], Any]] = np.less
    kernel: ClassVar[CmpOp] = CmpOp.LT


@final
@dataclass(frozen=True)
class Le(_Compare):
    """``x <= y``."""

    function: ClassVar[Callable[[Array, Array], Any]] = np.less_equal
    kernel: ClassVar[CmpOp] = CmpOp.LE


@final
@dataclass(frozen=True)
class Gt(_Compare):
    """``x > y``."""

    function: ClassVar[Callable[[Array, Array], Any]] = np.greater
    kernel: ClassVar[CmpOp] = CmpOp.GT


@final
@dataclass(frozen=True)
class Ge(_Compare):
    """``x >= y``."""

    function: ClassVar[Callable[[Array, Array], Any]] = np.greater_equal
    kernel: ClassVar[CmpOp] = CmpOp.GE


@final
@dataclass(frozen=True)
class IsFinite(Flat):
    """Whether a float is neither infinite nor NaN."""

    def accepts(self, dtype: DType) -> bool:
        """Floats."""
        return dtypes.is_float(dtype)

    def result_dtype(self, *operands: DType) -> DType:
        """Boolean."""
        return dtypes.bool_

    def evaluate(self, *arrays: Array) -> Array:
        """np.isfinite."""
        return np.asarray(np.isfinite(arrays[0]))

    def scalar(self, b: Builder, operands: Sequence[DType], *args: nodes.Value) -> nodes.Value:
        """``|x| < inf``, which is false for NaN."""
        (x,) = args
        return b.compare(CmpOp.LT, b.unary(UnOp.ABS, x), const_like(b, x, float("inf")))

    @classmethod
    def samples(cls) -> list[Sample]:
        """Floats; special values come from the tests."""
        return unary_samples(cls(), FLOATS, smooth=False)


def eq(x: Value, y: Value) -> Value:
    """``x == y``."""
    return bind(Eq(), x, y)


def ne(x: Value, y: Value) -> Value:
    """``x != y``."""
    return bind(Ne(), x, y)


def lt(x: Value, y: Value) -> Value:
    """``x < y``."""
    return bind(Lt(), x, y)


def le(x: Value, y: Value) -> Value:
    """``x <= y``."""
    return bind(Le(), x, y)


def gt(x: Value, y: Value) -> Value:
    """``x > y``."""
    return bind(Gt(), x, y)


def ge(x: Value, y: Value) -> Value:
    """``x >= y``."""
    return bind(Ge(), x, y)


def is_finite(x: Value) -> Value:
    """Whether floats are neither infinite nor NaN."""
    return bind(IsFinite(), x)
