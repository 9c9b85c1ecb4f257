"""Reductions over axes: max, min, prod, and, or; positions of extrema: argmax, argmin."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np

from vkjit import dtypes
from vkjit.dtypes import DType
from vkjit.errors import ArgumentError, DTypeError
from vkjit.ir.avals import Aval, aval
from vkjit.ir.primitive import Array, Kind, Op, Remat, Sample, Tangent, Traits, Value
from vkjit.lowering.kernel.specs import KernelSpec, ReduceRule, ReduceSpec
from vkjit.lowering.kernel.types import BinOp
from vkjit.ops.arithmetic import div, mul
from vkjit.ops.cast import cast
from vkjit.ops.compare import eq
from vkjit.ops.logical import select
from vkjit.ops.movement import reshape
from vkjit.ops.pointwise import FLOATS, INTS, zero_like
from vkjit.ops.rules import BooleanRule, PositionRule, max_rule, min_rule, product_rule
from vkjit.ops.scan import others_product
from vkjit.ops.structural import broadcast, float_of, permute, reduce_sum, reduced_shape
from vkjit.trace import aval_of, bind

Ints = tuple[int, ...]


class _Reduce(Op):
    """A reduction of ``axes`` that keeps the dtype."""

    traits: ClassVar[Traits] = Traits(Kind.REDUCE, Remat.COSTLY)
    axes: Ints

    @abstractmethod
    def rule(self, dtype: DType) -> ReduceRule:
        """How values combine."""

    @abstractmethod
    def accepts(self, dtype: DType) -> bool:
        """Whether operands may have ``dtype``."""

    @final
    def infer(self, *avals: Aval) -> Aval:
        """The operand without ``axes``."""
        (x,) = avals
        if not self.accepts(x.dtype):
            raise DTypeError(f"{self.name}: does not take operand {x}; cast with .astype(...)")
        return aval(reduced_shape(self.name, x, self.axes), x.dtype, x.weak)

    def batch(self, args: Sequence[Value], batched: Sequence[bool]) -> Value:
        """The batch axis stays in front."""
        kind: Any = type(self)
        return bind(kind(tuple(a + 1 for a in self.axes)), args[0])

    def kernel_spec(self, avals: Sequence[Aval], out: Aval) -> KernelSpec:
        """The rule over the axes."""
        return ReduceSpec(self.axes, self.rule(avals[0].dtype))


class _Extremum(_Reduce):
    """Max or min; NaN spreads; ties share the derivative equally; empty gives the identity."""

    def accepts(self, dtype: DType) -> bool:
        """Numbers."""
        return dtype != dtypes.bool_

    def jvp(self, primals: Sequence[Value], tangents: Sequence[Tangent]) -> tuple[Value, Tangent]:
        """The mean of the tangents at all places that hold the result."""
        (x,), (dx,) = primals, tangents
        out = bind(self, x)
        of = aval_of(x)
        if of.size == 0:
            return out, None
        kept = tuple(i for i in range(of.ndim) if i not in self.axes)
        chosen = eq(x, broadcast(out, of.shape, kept))
        count = reduce_sum(cast(chosen, of.dtype), self.axes)
        return out, div(reduce_sum(select(chosen, dx, zero_like(dx)), self.axes), count)


def _samples(kind: Any, of: Sequence[DType], low: float, high: float) -> list[Sample]:
    f = aval((3, 4, 5), of[0])
    made = [Sample(kind(axes), (f,), low, high) for axes in ((2,), (0,), (1,), (0, 2), (0, 1, 2))]
    # The identity of max is infinite: differences of it are NaN.
    made.append(Sample(kind((1,)), (aval((3, 0), of[0]),), low, high, smooth=False))
    for dtype in of[1:]:
        lower = max(low, 0.0) if str(dtype).startswith(("u", "b")) else low
        made.append(Sample(kind((1,)), (aval((3, 17), dtype),), lower, high))
    return made


@final
@dataclass(frozen=True)
class ReduceMax(_Extremum):
    """The largest element over ``axes``; -inf (or the least integer) over nothing."""

    axes: Ints

    def rule(self, dtype: DType) -> ReduceRule:
        """Max."""
        return max_rule(dtype)

    def evaluate(self, *arrays: Array) -> Array:
        """np.max."""
        return _extremum(np.maximum, arrays[0], self.axes, largest=True)

    @classmethod
    def samples(cls) -> list[Sample]:
        """All kinds of axes; floats and integers."""
        return _samples(cls, (*FLOATS, *INTS), -9.0, 9.0)


@final
@dataclass(frozen=True)
class ReduceMin(_Extremum):
    """The smallest element over ``axes``; inf (or the greatest integer) over nothing."""

    axes: Ints

    def rule(self, dtype: DType) -> ReduceRule:
        """Min."""
        return min_rule(dtype)

    def evaluate(self, *arrays: Array) -> Array:
        """np.min."""
        return _extremum(np.minimum, arrays[0], self.axes, largest=False)

    @classmethod
    def samples(cls) -> list[Sample]:
        """All kinds of axes; floats and integers."""
        return _samples(cls, (*FLOATS, *INTS), -9.0, 9.0)


def _extremum(function: np.ufunc, x: Array, axes: Ints, *, largest: bool) -> Array:
    if dtypes.is_float(x.dtype):
        first: Any = -math.inf if largest else math.inf
    else:
        limits = np.iinfo(x.dtype)
        first = limits.min if largest else limits.max
    with np.errstate(invalid="ignore"):
        made = function.reduce(x, axis=axes, initial=x.dtype.type(first))
        return np.asarray(made).astype(x.dtype, copy=False)


@final
@dataclass(frozen=True)
class ReduceProd(_Reduce):
    """The product over ``axes``, in float32 for 16-bit floats; integers wrap; empty gives 1."""

    axes: Ints

    def accepts(self, dtype: DType) -> bool:
        """Numbers."""
        return dtype != dtypes.bool_

    def rule(self, dtype: DType) -> ReduceRule:
        """Product."""
        return product_rule(dtype)

    def evaluate(self, *arrays: Array) -> Array:
        """np.prod in the accumulation dtype."""
        (x,) = arrays
        with np.errstate(all="ignore"):
            made: Any = np.prod(x, axis=self.axes, dtype=float_of(x.dtype))
            return np.asarray(made).astype(x.dtype)

    def jvp(self, primals: Sequence[Value], tangents: Sequence[Tangent]) -> tuple[Value, Tangent]:
        """Each tangent times the product of all other elements, without division."""
        (x,), (dx,) = primals, tangents
        last = mul(_rows(dx, self.axes), others_product(_rows(x, self.axes)))
        return bind(self, x), reduce_sum(last, (aval_of(last).ndim - 1,))

    @classmethod
    def samples(cls) -> list[Sample]:
        """All kinds of axes; floats and integers."""
        return _samples(cls, (*FLOATS, *INTS), -2.0, 2.0)


def _rows(x: Value, axes: Ints) -> Value:
    """``x`` with ``axes`` merged into one last axis."""
    of = aval_of(x)
    kept = tuple(i for i in range(of.ndim) if i not in axes)
    moved = permute(x, kept + axes)
    length = math.prod(of.shape[a] for a in axes)
    return reshape(moved, (*(of.shape[i] for i in kept), length))


class _Boolean(_Reduce):
    """And or or of booleans."""

    traits: ClassVar[Traits] = Traits(Kind.REDUCE, Remat.COSTLY, differentiable=False)

    def accepts(self, dtype: DType) -> bool:
        """Booleans."""
        return dtype == dtypes.bool_

    @classmethod
    def samples(cls) -> list[Sample]:
        """All kinds of axes."""
        return _samples(cls, (dtypes.bool_,), 0.0, 1.0)


@final
@dataclass(frozen=True)
class ReduceAnd(_Boolean):
    """Whether all are true over ``axes``; true over nothing."""

    axes: Ints

    def rule(self, dtype: DType) -> ReduceRule:
        """And."""
        return BooleanRule(BinOp.AND)

    def evaluate(self, *arrays: Array) -> Array:
        """np.all."""
        return np.asarray(np.all(arrays[0], axis=self.axes))


@final
@dataclass(frozen=True)
class ReduceOr(_Boolean):
    """Whether any is true over ``axes``; false over nothing."""

    axes: Ints

    def rule(self, dtype: DType) -> ReduceRule:
        """Or."""
        return BooleanRule(BinOp.OR)

    def evaluate(self, *arrays: Array) -> Array:
        """np.any."""
        return np.asarray(np.any(arrays[0], axis=self.axes))


class _Position(Op):
    """The i32 position of an extremum along ``axis``: the first NaN, else the first of the ties."""

    traits: ClassVar[Traits] = Traits(Kind.REDUCE, Remat.COSTLY, differentiable=False)
    axis: int

    @final
    def infer(self, *avals: Aval) -> Aval:
        """Something is there to find."""
        (x,) = avals
        shape = reduced_shape(self.name, x, (self.axis,))
        if x.shape[self.axis] == 0:
            raise ArgumentError(
                f"{self.name}: operand {x} is empty along axis {self.axis}; expected at least one "
                "element; there is no position to give"
            )
        if x.dtype == dtypes.bool_:
            raise DTypeError(f"{self.name}: operand {x}; expected numbers; cast with .astype(...)")
        return aval(shape, dtypes.int32)

    def jvp(self, primals: Sequence[Value], tangents: Sequence[Tangent]) -> tuple[Value, Tangent]:
        """Positions have no derivative."""
        return bind(self, *primals), None

    def batch(self, args: Sequence[Value], batched: Sequence[bool]) -> Value:
        """The batch axis stays in front."""
        kind: Any = type(self)
        return bind(kind(self.axis + 1), args[0])

    @classmethod
    def samples(cls) -> list[Sample]:
        """All axes; the range of integers is small, so that ties occur."""
        kind: Any = cls
        f = aval((3, 4, 5), dtypes.float32)
        made = [Sample(kind(axis), (f,), smooth=False) for axis in range(3)]
        for d in (dtypes.float16, dtypes.bfloat16, dtypes.float32, *INTS):
            low = 0.0 if str(d).startswith("u") else -3.0
            made.append(Sample(kind(1), (aval((3, 37), d),), low, 3.0, smooth=False))
        return made


@final
@dataclass(frozen=True)
class Argmax(_Position):
    """The position of the largest element along ``axis``."""

    axis: int

    def evaluate(self, *arrays: Array) -> Array:
        """np.argmax."""
        return np.asarray(np.argmax(_comparable(arrays[0]), axis=self.axis)).astype(np.int32)

    def kernel_spec(self, avals: Sequence[Aval], out: Aval) -> KernelSpec:
        """A reduction over (value, position)."""
        return ReduceSpec((self.axis,), PositionRule(avals[0].dtype, largest=True))


@final
@dataclass(frozen=True)
class Argmin(_Position):
    """The position of the smallest element along ``axis``."""

    axis: int

    def evaluate(self, *arrays: Array) -> Array:
        """np.argmin."""
        return np.asarray(np.argmin(_comparable(arrays[0]), axis=self.axis)).astype(np.int32)

    def kernel_spec(self, avals: Sequence[Aval], out: Aval) -> KernelSpec:
        """A reduction over (value, position)."""
        return ReduceSpec((self.axis,), PositionRule(avals[0].dtype, largest=False))


def _comparable(x: Array) -> Array:
    """16-bit floats as float32: argmax of bfloat16 does not know NaN."""
    return x.astype(float_of(x.dtype), copy=False)


def reduce_max(x: Value, axes: Ints) -> Value:
    """The largest over ``axes``; any for booleans."""
    if aval_of(x).dtype == dtypes.bool_:
        return reduce_or(x, axes)
    return bind(ReduceMax(axes), x) if axes else x


def reduce_min(x: Value, axes: Ints) -> Value:
    """The smallest over ``axes``; all for booleans."""
    if aval_of(x).dtype == dtypes.bool_:
        return reduce_and(x, axes)
    return bind(ReduceMin(axes), x) if axes else x


def reduce_prod(x: Value, axes: Ints) -> Value:
    """The product over ``axes``."""
    return bind(ReduceProd(axes), x) if axes else x


def reduce_and(x: Value, axes: Ints) -> Value:
    """Whether all booleans are true over ``axes``."""
    return bind(ReduceAnd(axes), x) if axes else x


def reduce_or(x: Value, axes: Ints) -> Value:
    """Whether any boolean is true over ``axes``."""
    return bind(ReduceOr(axes), x) if axes else x


def argmax(x: Value, axis: int) -> Value:
    """The i32 position of the largest along ``axis``."""
    return bind(Argmax(axis), x)


def argmin(x: Value, axis: int) -> Value:
    """The i32 position of the smallest along ``axis``."""
    return bind(Argmin(axis), x)
