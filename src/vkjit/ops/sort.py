"""Sorting: the stable order of the elements along an axis, and elements read in such an order.

Sorted values, the largest k and payloads are elements in the order of a sort. An order is a
permutation of each line, so that cotangents go back in the inverse order, without additions.
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
from vkjit.ir.primitive import Array, Kind, Linear, Op, Remat, Sample, Tangent, Traits, Value
from vkjit.lowering.kernel import nodes
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.specs import KernelSpec, ReorderSpec, SortSpec
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
from vkjit.ops.movement import pad
from vkjit.ops.pointwise import FLOATS, INTS
from vkjit.ops.structural import broadcast, float_of
from vkjit.trace import aval_of, bind


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


@final
@dataclass(frozen=True)
class InverseOrder(Op):
    """The inverse of the permutations along ``axis``: ``out[a, order[a, i, c], c] = i``, i32.

    Lines that are no permutations of 0, 1, 2, ... have no inverse: the result is undefined.
    """

    axis: int

    traits: ClassVar[Traits] = Traits(Kind.REDUCE, Remat.COSTLY, differentiable=False)

    def infer(self, *avals: Aval) -> Aval:
        """An order."""
        (order,) = avals
        _check_order(self.name, order, order, self.axis)
        return aval(order.shape, dtypes.int32)

    def evaluate(self, *arrays: Array) -> Array:
        """np.argsort: what sorts a permutation is its inverse."""
        return np.argsort(arrays[0], axis=self.axis, kind="stable").astype(np.int32)

    def jvp(self, primals: Sequence[Value], tangents: Sequence[Tangent]) -> tuple[Value, Tangent]:
        """Positions have no derivative."""
        return bind(self, *primals), None

    def batch(self, args: Sequence[Value], batched: Sequence[bool]) -> Value:
        """The batch axis stays in front."""
        return bind(InverseOrder(self.axis + 1), args[0])

    def kernel_spec(self, avals: Sequence[Aval], out: Aval) -> KernelSpec:
        """A sort that needs no keys."""
        return SortSpec(self.axis, None)

    @classmethod
    def samples(cls) -> list[Sample]:
        """Lines of one element and of none, which random values cannot get wrong."""
        shapes = (((1,), 0), ((3, 1, 2), 1), ((0, 2), 0))
        return [
            Sample(cls(axis), (aval(shape, dtypes.int32),), 0.0, 0.0, smooth=False)
            for shape, axis in shapes
        ]


@final
@dataclass(frozen=True)
class Reorder(Op):
    """The first ``count`` elements along ``axis`` in a given order.

    Operands are (x, order) of one shape: ``out[a, i, c] = x[a, order[a, i, c], c]``. Each line of
    the order is a permutation of its i32 positions; with others the transpose is undefined, and
    positions out of range clamp to the ends.
    """

    axis: int
    count: int

    traits: ClassVar[Traits] = Traits(Kind.INDEXED, Remat.COSTLY, linear_in=(0,))

    def infer(self, *avals: Aval) -> Aval:
        """An order of the elements, and no more of them than there are."""
        x, order = avals
        _check_order(self.name, x, order, self.axis)
        if not 0 <= self.count <= x.shape[self.axis]:
            raise ShapeError(
                f"reorder: {self.count} elements of operand {x} along axis {self.axis}; expected "
                f"0 to {x.shape[self.axis]}"
            )
        shape = (*x.shape[: self.axis], self.count, *x.shape[self.axis + 1 :])
        return aval(shape, x.dtype, x.weak)

    def evaluate(self, *arrays: Array) -> Array:
        """np.take_along_axis."""
        x, order = arrays
        first = order[(slice(None),) * self.axis + (slice(0, self.count),)]
        inside = np.clip(first, 0, max(x.shape[self.axis] - 1, 0))
        return np.take_along_axis(x, inside, self.axis)

    def jvp(self, primals: Sequence[Value], tangents: Sequence[Tangent]) -> tuple[Value, Tangent]:
        """Linear in the array."""
        (x, order), dx = primals, tangents[0]
        return bind(self, x, order), None if dx is None else bind(self, dx, order)

    def transpose(
        self, cotangents: Sequence[Value], args: Sequence[Value | Linear]
    ) -> tuple[Tangent, ...]:
        """Each cotangent where its element came from, zeros elsewhere."""
        x, order = args
        assert isinstance(x, Linear)
        length, rank = x.aval.shape[self.axis], x.aval.ndim
        missing = tuple((length - self.count) * (i == self.axis) for i in range(rank))
        none = (0,) * rank
        ct = pad(cotangents[0], x.aval.dtype.type(0), none, missing, none)
        return reorder(ct, bind(InverseOrder(self.axis), order), self.axis), None

    def batch(self, args: Sequence[Value], batched: Sequence[bool]) -> Value:
        """What has no batch axis is repeated."""
        size = next(aval_of(a).shape[0] for a, b in zip(args, batched, strict=True) if b)
        x, order = (a if b else _repeated(a, size) for a, b in zip(args, batched, strict=True))
        return reorder(x, order, self.axis + 1, self.count)

    def kernel_spec(self, avals: Sequence[Aval], out: Aval) -> KernelSpec:
        """A read at computed positions."""
        return ReorderSpec(self.axis)

    @classmethod
    def samples(cls) -> list[Sample]:
        """Lines of one element and of none, for which random positions are an order; dtypes."""
        made: list[Sample] = []
        for shape, axis, count in (((1,), 0, 1), ((3, 1, 2), 1, 1), ((4, 1), 1, 0), ((0, 2), 0, 0)):
            pair = aval(shape, dtypes.float32), aval(shape, dtypes.int32)
            made.append(Sample(cls(axis, count), pair, 0.0, 0.9))
        for dtype in (dtypes.float16, dtypes.bfloat16, dtypes.int8, dtypes.uint32, dtypes.bool_):
            pair = aval((2, 1), dtype), aval((2, 1), dtypes.int32)
            made.append(Sample(cls(1, 1), pair, 0.0, 0.9))
        return made


def _check_order(name: str, x: Aval, order: Aval, axis: int) -> None:
    if order.dtype != dtypes.int32 or order.shape != x.shape:
        raise ShapeError(
            f"{name}: order {order} for operand {x}; expected i32 positions of its shape"
        )
    if not 0 <= axis < x.ndim:
        raise ShapeError(f"{name}: axis {axis} for operand {x}; expected one below {x.ndim}")


def _repeated(x: Value, size: int) -> Value:
    shape = aval_of(x).shape
    return broadcast(x, (size, *shape), tuple(range(1, len(shape) + 1)))


def reorder(x: Value, order: Value, axis: int, count: int | None = None) -> Value:
    """Elements of ``x`` along ``axis`` in an order, all of them or the first ``count``."""
    return bind(Reorder(axis, aval_of(x).shape[axis] if count is None else count), x, order)


def argsort(x: Value, axis: int, *, descending: bool = False) -> Value:
    """The i32 positions that sort ``axis``, stable."""
    return bind(Argsort(axis, descending), x)
