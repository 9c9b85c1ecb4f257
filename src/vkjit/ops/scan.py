"""Running reductions along an axis: cumsum, cumprod, cummax, cummin; from the end if reversed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np

from vkjit import dtypes
from vkjit.dtypes import DType
from vkjit.errors import DTypeError, ShapeError
from vkjit.ir.avals import Aval, aval
from vkjit.ir.primitive import Array, Kind, Linear, Op, Remat, Sample, Tangent, Traits, Value
from vkjit.lowering.kernel.specs import KernelSpec, ReduceRule, ScanSpec
from vkjit.ops.arithmetic import mul
from vkjit.ops.compare import eq, gt, lt
from vkjit.ops.logical import select
from vkjit.ops.movement import pad
from vkjit.ops.pointwise import FLOATS, INTS, scalar_like, zero_like
from vkjit.ops.rules import max_rule, min_rule, product_rule
from vkjit.ops.structural import SumRule, add, float_of
from vkjit.trace import aval_of, bind

Pair = tuple[Value, Value]


class _Scan(Op):
    """A running reduction along ``axis`` that keeps shape and dtype."""

    traits: ClassVar[Traits] = Traits(Kind.REDUCE, Remat.COSTLY)
    axis: int
    reverse: bool

    function: ClassVar[np.ufunc]

    @abstractmethod
    def rule(self, dtype: DType) -> ReduceRule:
        """How values combine."""

    @final
    def infer(self, *avals: Aval) -> Aval:
        """Numbers and an axis in range."""
        (x,) = avals
        if x.dtype == dtypes.bool_:
            raise DTypeError(f"{self.name}: operand {x}; expected numbers; cast with .astype(...)")
        if not 0 <= self.axis < x.ndim:
            raise ShapeError(
                f"{self.name}: axis {self.axis} for operand {x}; expected one below {x.ndim}"
            )
        return x

    @final
    def evaluate(self, *arrays: Array) -> Array:
        """ufunc.accumulate, 16-bit floats in float32."""
        (x,) = arrays
        wide = np.flip(x, self.axis) if self.reverse else x
        with np.errstate(all="ignore"):
            made: Any = type(self).function.accumulate(
                wide.astype(float_of(x.dtype)), axis=self.axis, dtype=float_of(x.dtype)
            )
            made = np.asarray(made).astype(x.dtype)
        return np.flip(made, self.axis) if self.reverse else made

    def batch(self, args: Sequence[Value], batched: Sequence[bool]) -> Value:
        """The batch axis stays in front."""
        kind: Any = type(self)
        return bind(kind(self.axis + 1, self.reverse), args[0])

    def kernel_spec(self, avals: Sequence[Aval], out: Aval) -> KernelSpec:
        """A scan."""
        return ScanSpec(self.axis, self.reverse, self.rule(out.dtype))

    @classmethod
    def samples(cls) -> list[Sample]:
        """Both directions, each axis; lengths that are no power of two; dtypes."""
        kind: Any = cls
        f = aval((3, 4, 5), dtypes.float32)
        made = [Sample(kind(axis, back), (f,)) for axis in range(3) for back in (False, True)]
        made += [Sample(kind(0, False), (aval((0, 3), dtypes.float32),))]
        for d in (*FLOATS, *INTS):
            low = 0.0 if str(d).startswith("u") else -2.0
            made.append(Sample(kind(1, False), (aval((2, 9), d),), low))
        return made


@final
@dataclass(frozen=True)
class Cumsum(_Scan):
    """Running sums along ``axis``, in float32 for 16-bit floats; integers wrap."""

    axis: int
    reverse: bool

    traits: ClassVar[Traits] = Traits(Kind.REDUCE, Remat.COSTLY, linear_in=(0,))
    function: ClassVar[np.ufunc] = np.add

    def rule(self, dtype: DType) -> ReduceRule:
        """Sum."""
        return SumRule(dtype)

    def jvp(self, primals: Sequence[Value], tangents: Sequence[Tangent]) -> tuple[Value, Tangent]:
        """Linear."""
        return bind(self, primals[0]), bind(self, tangents[0])

    def transpose(
        self, cotangents: Sequence[Value], args: Sequence[Value | Linear]
    ) -> tuple[Tangent, ...]:
        """Running sums from the other end."""
        return (cumsum(cotangents[0], self.axis, reverse=not self.reverse),)


@final
@dataclass(frozen=True)
class Cumprod(_Scan):
    """Running products along ``axis``, in float32 for 16-bit floats; integers wrap."""

    axis: int
    reverse: bool

    function: ClassVar[np.ufunc] = np.multiply

    def rule(self, dtype: DType) -> ReduceRule:
        """Product."""
        return product_rule(dtype)

    def jvp(self, primals: Sequence[Value], tangents: Sequence[Tangent]) -> tuple[Value, Tangent]:
        """Pairs (p, dp) under the product rule, which never divides."""
        (x,), (dx,) = primals, tangents
        ends = scalar_like(x, 1), zero_like(x)
        _, tangent = doubling(_product_pair, (x, dx), ends, self.axis, reverse=self.reverse)
        return bind(self, x), tangent


def _product_pair(earlier: Pair, later: Pair) -> Pair:
    (p, dp), (q, dq) = earlier, later
    return mul(p, q), add(mul(dp, q), mul(p, dq))


class _RunningExtremum(_Scan):
    """Running max or min; NaN spreads."""

    @abstractmethod
    def better(self, x: Value, y: Value) -> Value:
        """Whether ``x`` wins over ``y``."""

    def jvp(self, primals: Sequence[Value], tangents: Sequence[Tangent]) -> tuple[Value, Tangent]:
        """The tangent of the element that holds the result; ties share in halves."""
        (x,), (dx,) = primals, tangents
        worst = -np.inf if type(self).function is np.maximum else np.inf
        ends = scalar_like(x, worst), zero_like(dx)
        _, tangent = doubling(self._pair, (x, dx), ends, self.axis, reverse=self.reverse)
        return bind(self, x), tangent

    def _pair(self, earlier: Pair, later: Pair) -> Pair:
        (x, dx), (y, dy) = earlier, later
        shared = mul(add(dx, dy), scalar_like(dx, 0.5))
        wins, ties = self.better(x, y), eq(x, y)
        return select(wins, x, y), select(wins, dx, select(ties, shared, dy))


@final
@dataclass(frozen=True)
class Cummax(_RunningExtremum):
    """The largest element so far along ``axis``."""

    axis: int
    reverse: bool

    function: ClassVar[np.ufunc] = np.maximum

    def rule(self, dtype: DType) -> ReduceRule:
        """Max."""
        return max_rule(dtype)

    def better(self, x: Value, y: Value) -> Value:
        """Larger."""
        return gt(x, y)


@final
@dataclass(frozen=True)
class Cummin(_RunningExtremum):
    """The smallest element so far along ``axis``."""

    axis: int
    reverse: bool

    function: ClassVar[np.ufunc] = np.minimum

    def rule(self, dtype: DType) -> ReduceRule:
        """Min."""
        return min_rule(dtype)

    def better(self, x: Value, y: Value) -> Value:
        """Smaller."""
        return lt(x, y)


def doubling(
    combine: Callable[[Pair, Pair], Pair], pair: Pair, ends: Pair, axis: int, *, reverse: bool
) -> Pair:
    """Running ``combine`` along ``axis`` in log2(n) rounds (Hillis and Steele 1986).

    Args:
        combine: an associative function of an earlier and a later pair of arrays.
        pair: the arrays.
        ends: scalars that change nothing, for what lies before the first element.
        axis: along which.
        reverse: from the last element on.
    """
    shape = aval_of(pair[0]).shape
    distance = 1
    while distance < shape[axis]:
        earlier = (
            _shifted(pair[0], ends[0], axis, -distance if reverse else distance),
            _shifted(pair[1], ends[1], axis, -distance if reverse else distance),
        )
        pair = combine(earlier, pair)
        distance *= 2
    return pair


def _shifted(x: Value, fill: Value, axis: int, distance: int) -> Value:
    """``x`` moved by ``distance`` along ``axis``; ``fill`` moves in."""
    rank = aval_of(x).ndim
    low = tuple(distance if i == axis else 0 for i in range(rank))
    return pad(x, fill, low, tuple(-n for n in low), (0,) * rank)


def others_product(x: Value) -> Value:
    """For each element, the product of all others along the last axis, without division."""
    axis = aval_of(x).ndim - 1
    one = scalar_like(x, 1)
    before = _shifted(cumprod(x, axis), one, axis, 1)
    after = _shifted(cumprod(x, axis, reverse=True), one, axis, -1)
    return mul(before, after)


def cumsum(x: Value, axis: int, *, reverse: bool = False) -> Value:
    """Running sums along ``axis``."""
    return bind(Cumsum(axis, reverse), x)


def cumprod(x: Value, axis: int, *, reverse: bool = False) -> Value:
    """Running products along ``axis``."""
    return bind(Cumprod(axis, reverse), x)


def cummax(x: Value, axis: int, *, reverse: bool = False) -> Value:
    """The largest so far along ``axis``."""
    return bind(Cummax(axis, reverse), x)


def cummin(x: Value, axis: int, *, reverse: bool = False) -> Value:
    """The smallest so far along ``axis``."""
    return bind(Cummin(axis, reverse), x)
