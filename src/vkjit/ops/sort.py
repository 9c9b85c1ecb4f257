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
from vkjit.lowering.kernel.specs import KernelSpec, PutBackSpec, ReorderSpec, SortSpec
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
from vkjit.ops.structural import broadcast, float_of, zeros
from vkjit.trace import aval_of, bind

Ints = tuple[int, ...]


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
    """The first ``count`` of the i32 positions that sort ``axis``; equal elements keep their order.

    NaN is larger than everything else; zeros of both signs are equal.
    """

    axis: int
    descending: bool
    count: int

    traits: ClassVar[Traits] = Traits(Kind.REDUCE, Remat.COSTLY, differentiable=False)

    def infer(self, *avals: Aval) -> Aval:
        """An axis in range, and no more positions than there are."""
        (x,) = avals
        if not 0 <= self.axis < x.ndim:
            raise ShapeError(
                f"argsort: axis {self.axis} for operand {x}; expected one below {x.ndim}"
            )
        length = x.shape[self.axis]
        if not 0 <= self.count <= length:
            raise ShapeError(
                f"argsort: {self.count} positions of operand {x} along axis {self.axis}; expected "
                f"0 to {length}"
            )
        return aval(_with_size(x.shape, self.axis, self.count), dtypes.int32)

    def evaluate(self, *arrays: Array) -> Array:
        """np.argsort; descending is the stable order from the end, read from the end."""
        x = arrays[0].astype(float_of(arrays[0].dtype), copy=False)  # bfloat16 does not order NaN
        if self.descending:
            found = np.argsort(np.flip(x, self.axis), axis=self.axis, kind="stable")
            found = np.flip(x.shape[self.axis] - 1 - found, self.axis)
        else:
            found = np.argsort(x, axis=self.axis, kind="stable")
        first = (slice(None),) * self.axis + (slice(0, self.count),)
        return found[first].astype(np.int32)

    def jvp(self, primals: Sequence[Value], tangents: Sequence[Tangent]) -> tuple[Value, Tangent]:
        """Positions have no derivative."""
        return bind(self, *primals), None

    def batch(self, args: Sequence[Value], batched: Sequence[bool]) -> Value:
        """The batch axis stays in front."""
        return bind(Argsort(self.axis + 1, self.descending, self.count), args[0])

    def kernel_spec(self, avals: Sequence[Aval], out: Aval) -> KernelSpec:
        """A sort of keys."""
        return SortSpec(self.axis, self.count, SortKey(avals[0].dtype, self.descending))

    @classmethod
    def samples(cls) -> list[Sample]:
        """All axes, both directions, fewer positions; lengths about powers of two; dtypes; ties."""
        of, made = aval((3, 4, 5), dtypes.float32), list[Sample]()
        for axis, length in enumerate(of.shape):
            for descending, count in ((False, length), (True, length), (True, 2)):
                made.append(Sample(cls(axis, descending, count), (of,), smooth=False))
        for shape in ((0,), (1,), (2,), (3,), (0, 3), (2, 0), (33,), (4, 2, 1)):
            whole = cls(0, False, shape[0])
            made.append(Sample(whole, (aval(shape, dtypes.float32),), smooth=False))
        for dtype in (*FLOATS, *INTS, dtypes.bool_):
            low = 0.0 if str(dtype).startswith("u") else -3.0
            for descending in (False, True):
                pair = (aval((2, 9), dtype),)
                made.append(Sample(cls(1, descending, 9), pair, low, 3.0, smooth=False))
        return made


@final
@dataclass(frozen=True)
class PutBack(Op):
    """Elements put where an order says, among ``length`` along ``axis``, and zeros elsewhere.

    Operands are (x, order) of one shape, the order i32: ``out[a, order[a, i, c], c] = x[a, i, c]``.
    No line of the order names a position twice; else the result is undefined.
    """

    axis: int
    length: int

    traits: ClassVar[Traits] = Traits(Kind.INDEXED, Remat.COSTLY, linear_in=(0,))

    def infer(self, *avals: Aval) -> Aval:
        """An order of no more than all positions, and not of none."""
        x, order = avals
        made = aval(_with_size(x.shape, self.axis, self.length), x.dtype, x.weak)
        _check_order(self.name, made, order, self.axis)
        if order.shape != x.shape or (made.size and not order.size):
            raise ShapeError(
                f"put_back: operand {x} and order {order}; expected one shape, and one element"
            )
        return made

    def evaluate(self, *arrays: Array) -> Array:
        """np.put_along_axis."""
        x, order = arrays
        out = np.zeros(_with_size(x.shape, self.axis, self.length), x.dtype)
        np.put_along_axis(out, order, x, self.axis)
        return out

    def jvp(self, primals: Sequence[Value], tangents: Sequence[Tangent]) -> tuple[Value, Tangent]:
        """Linear in the elements."""
        (x, order), dx = primals, tangents[0]
        return bind(self, x, order), None if dx is None else bind(self, dx, order)

    def transpose(
        self, cotangents: Sequence[Value], args: Sequence[Value | Linear]
    ) -> tuple[Tangent, ...]:
        """The cotangents in the order."""
        return reorder(cotangents[0], args[1], self.axis), None

    def batch(self, args: Sequence[Value], batched: Sequence[bool]) -> Value:
        """What has no batch axis is repeated."""
        return bind(PutBack(self.axis + 1, self.length), *_both_batched(args, batched))

    def kernel_spec(self, avals: Sequence[Aval], out: Aval) -> KernelSpec:
        """A read in the inverse order."""
        return PutBackSpec(self.axis)

    @classmethod
    def samples(cls) -> list[Sample]:
        """Orders of one position, which random ones cannot get wrong; dtypes."""
        made: list[Sample] = []
        for shape, axis, length in (
            ((1,), 0, 1),
            ((3, 1, 2), 1, 4),
            ((4, 1), 1, 9),
            ((0, 2), 0, 0),
        ):
            pair = aval(shape, dtypes.float32), aval(shape, dtypes.int32)
            made.append(Sample(cls(axis, length), pair, 0.0, max(length - 1, 0.9)))
        for dtype in (*FLOATS, *INTS, dtypes.bool_):
            pair = aval((2, 1), dtype), aval((2, 1), dtypes.int32)
            made.append(Sample(cls(1, 3), pair, 0.0, 2.0))
        return made


@final
@dataclass(frozen=True)
class Reorder(Op):
    """Elements along ``axis`` in the order of some or all of their positions.

    Operands are (x, order): ``out[a, i, c] = x[a, order[a, i, c], c]``, the order i32. No line of
    it names a position twice, else the transpose is undefined. Positions out of range clamp.
    """

    axis: int

    traits: ClassVar[Traits] = Traits(Kind.INDEXED, Remat.COSTLY, linear_in=(0,))

    def infer(self, *avals: Aval) -> Aval:
        """An order of the elements."""
        x, order = avals
        _check_order(self.name, x, order, self.axis)
        return aval(order.shape, x.dtype, x.weak)

    def evaluate(self, *arrays: Array) -> Array:
        """np.take_along_axis."""
        x, order = arrays
        inside = np.clip(order, 0, max(x.shape[self.axis] - 1, 0))
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
        if not aval_of(order).size:
            return zeros(x.aval), None
        return bind(PutBack(self.axis, x.aval.shape[self.axis]), cotangents[0], order), None

    def batch(self, args: Sequence[Value], batched: Sequence[bool]) -> Value:
        """What has no batch axis is repeated."""
        return reorder(*_both_batched(args, batched), self.axis + 1)

    def kernel_spec(self, avals: Sequence[Aval], out: Aval) -> KernelSpec:
        """A read at computed positions."""
        return ReorderSpec(self.axis)

    @classmethod
    def samples(cls) -> list[Sample]:
        """Orders of one position and of none, which random ones cannot get wrong; dtypes."""
        made: list[Sample] = []
        for shape, axis, count in (((1,), 0, 1), ((3, 4, 2), 1, 1), ((2, 5), 1, 0), ((0, 2), 0, 0)):
            order = aval(_with_size(shape, axis, count), dtypes.int32)
            high = max(shape[axis] - 1, 0.9)
            made.append(Sample(cls(axis), (aval(shape, dtypes.float32), order), 0.0, high))
        for dtype in (*FLOATS, *INTS, dtypes.bool_):
            pair = aval((2, 3), dtype), aval((2, 1), dtypes.int32)
            made.append(Sample(cls(1), pair, 0.0, 2.0))
        return made


def _with_size(shape: Ints, axis: int, size: int) -> Ints:
    return (*shape[:axis], size, *shape[axis + 1 :])


def _check_order(name: str, x: Aval, order: Aval, axis: int) -> None:
    if not (0 <= axis < x.ndim == order.ndim) or order.dtype != dtypes.int32:
        raise ShapeError(
            f"{name}: operand {x} and order {order} along axis {axis}; expected i32 positions, as "
            "many axes, and one of them"
        )
    fits = order.shape[axis] <= x.shape[axis]
    if not fits or order.shape != _with_size(x.shape, axis, order.shape[axis]):
        raise ShapeError(
            f"{name}: order {order} for operand {x}; expected its shape, or fewer along axis {axis}"
        )


def _both_batched(args: Sequence[Value], batched: Sequence[bool]) -> tuple[Value, Value]:
    size = next(aval_of(a).shape[0] for a, b in zip(args, batched, strict=True) if b)
    x, order = (a if b else _repeated(a, size) for a, b in zip(args, batched, strict=True))
    return x, order


def _repeated(x: Value, size: int) -> Value:
    shape = aval_of(x).shape
    return broadcast(x, (size, *shape), tuple(range(1, len(shape) + 1)))


def reorder(x: Value, order: Value, axis: int) -> Value:
    """Elements of ``x`` along ``axis`` in an order of some or all of their positions."""
    return bind(Reorder(axis), x, order)


def argsort(x: Value, axis: int, *, descending: bool = False, count: int | None = None) -> Value:
    """The i32 positions that sort ``axis``, stable; all of them or the first ``count``."""
    length = aval_of(x).shape[axis]
    return bind(Argsort(axis, descending, length if count is None else count), x)
