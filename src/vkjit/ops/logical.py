"""Choice and bits: select, and, or, xor, not, shifts, population count, leading zeros, bitcast."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from vkjit import dtypes
from vkjit.dtypes import DType
from vkjit.errors import DTypeError
from vkjit.ir.avals import Aval, aval
from vkjit.ir.primitive import Array, Kind, Linear, Producer, Sample, Tangent, Traits, Value
from vkjit.ir.program import Atom
from vkjit.lowering.kernel import nodes
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.elements import scalar_type
from vkjit.lowering.kernel.types import BinOp, CmpOp, UnOp, scalar_of, with_elem
from vkjit.ops.pointwise import (
    INTS,
    Flat,
    binary_samples,
    const_like,
    unary_samples,
    unsigned_view,
    zero_like,
)
from vkjit.ops.structural import Pointwise, expand, unbroadcast
from vkjit.trace import aval_of, bind


@final
@dataclass(frozen=True)
class Select(Pointwise):
    """``on_true`` where ``cond`` holds, else ``on_false``; operands are (cond, on_true, on_false).

    A zero cotangent stays zero: the side that is not taken receives 0, never ``0 * ct``.
    """

    traits: ClassVar[Traits] = Traits(Kind.POINTWISE, linear_in=(1, 2))

    def mixes_dtypes(self) -> bool:
        """A boolean comes first."""
        return True

    def accepts(self, dtype: DType) -> bool:
        """The condition is boolean."""
        return dtype == dtypes.bool_

    def result_dtype(self, *operands: DType) -> DType:
        """The dtype of both sides."""
        _, left, right = operands
        if left != right:
            raise DTypeError(
                f"select: sides of dtypes {left} and {right}; expected one dtype; "
                "cast with .astype(...)"
            )
        return left

    def is_weak(self, *avals: Aval) -> bool:
        """When both sides are."""
        return avals[1].weak and avals[2].weak

    def evaluate(self, *arrays: Array) -> Array:
        """np.where."""
        return np.where(*arrays).astype(arrays[1].dtype, copy=False)

    def scalar(self, b: Builder, operands: Sequence[DType], *args: nodes.Value) -> nodes.Value:
        """One node."""
        return b.select(*args)

    def simplify(self, args: Sequence[Atom], producer: Producer) -> Atom | None:
        """Either side where both are the same."""
        cond, left, right = args
        return left if left is right and cond.aval.shape in ((), left.aval.shape) else None

    def jvp(self, primals: Sequence[Value], tangents: Sequence[Tangent]) -> tuple[Value, Tangent]:
        """Chooses between tangents."""
        cond, left, right = primals
        out = bind(self, cond, left, right)
        known = next((t for t in tangents[1:] if t is not None), None)
        if known is None:
            return out, None
        sides = [zero_like(known) if t is None else t for t in tangents[1:]]
        return out, expand(select(cond, *sides), aval_of(out).shape)

    def transpose(
        self, cotangents: Sequence[Value], args: Sequence[Value | Linear]
    ) -> tuple[Tangent, ...]:
        """The cotangent where the side was taken, zero elsewhere."""
        (ct,) = cotangents
        cond, left, right = args
        zero = zero_like(ct)
        to_left = to_right = None
        if isinstance(left, Linear):
            to_left = unbroadcast(select(cond, ct, zero), left.aval)
        if isinstance(right, Linear):
            to_right = unbroadcast(select(cond, zero, ct), right.aval)
        return None, to_left, to_right

    @classmethod
    def samples(cls) -> list[Sample]:
        """Arrays, scalar sides, a scalar condition; integers and booleans."""
        made: list[Sample] = []
        shapes = (((3, 5),) * 3, ((3, 5), (3, 5), ()), ((3, 5), (), ()), ((), (7,), (7,)))
        for shape in shapes:
            f = [aval(s, dtypes.float32) for s in shape[1:]]
            made.append(Sample(cls(), (aval(shape[0], dtypes.bool_), *f)))
        for dtype in (dtypes.float16, dtypes.bfloat16, dtypes.int32, dtypes.uint8, dtypes.bool_):
            x = aval((3, 5), dtype)
            made.append(Sample(cls(), (aval((3, 5), dtypes.bool_), x, x), low=0.0))
        return made


class _Bitwise(Flat):
    """A bitwise operation on booleans and integers."""

    def accepts(self, dtype: DType) -> bool:
        """Booleans and integers."""
        return not dtypes.is_float(dtype)


class _BitwisePair(_Bitwise):
    kernel: ClassVar[BinOp]

    @final
    def scalar(self, b: Builder, operands: Sequence[DType], *args: nodes.Value) -> nodes.Value:
        """One node."""
        return b.binary(self.kernel, *args)

    @classmethod
    def samples(cls) -> list[Sample]:
        """Booleans and integers."""
        return binary_samples(cls(), (dtypes.bool_, *INTS), -100, 100)


@final
@dataclass(frozen=True)
class And(_BitwisePair):
    """Bitwise and."""

    kernel: ClassVar[BinOp] = BinOp.AND

    def evaluate(self, *arrays: Array) -> Array:
        """np.bitwise_and."""
        return np.asarray(np.bitwise_and(*arrays))


@final
@dataclass(frozen=True)
class Or(_BitwisePair):
    """Bitwise or."""

    kernel: ClassVar[BinOp] = BinOp.OR

    def evaluate(self, *arrays: Array) -> Array:
        """np.bitwise_or."""
        return np.asarray(np.bitwise_or(*arrays))


@final
@dataclass(frozen=True)
class Xor(_BitwisePair):
    """Bitwise exclusive or."""

    kernel: ClassVar[BinOp] = BinOp.XOR

    def evaluate(self, *arrays: Array) -> Array:
        """np.bitwise_xor."""
        return np.asarray(np.bitwise_xor(*arrays))


@final
@dataclass(frozen=True)
class Not(_Bitwise):
    """Bitwise complement; negation of booleans."""

    def evaluate(self, *arrays: Array) -> Array:
        """np.invert."""
        return np.asarray(np.invert(arrays[0]))

    def scalar(self, b: Builder, operands: Sequence[DType], *args: nodes.Value) -> nodes.Value:
        """One node."""
        return b.unary(UnOp.NOT, args[0])

    @classmethod
    def samples(cls) -> list[Sample]:
        """Booleans and integers."""
        return unary_samples(cls(), (dtypes.bool_, *INTS), -100, 100)


class _Shift(Flat):
    """A shift of integers; the amount counts as unsigned, so negative ones are large."""

    def accepts(self, dtype: DType) -> bool:
        """Integers."""
        return dtypes.is_int(dtype)

    @abstractmethod
    def shifted(self, x: Array, amount: Array, width: int) -> Array:
        """The shift for amounts below ``width``; larger ones have been cut to ``width - 1``."""

    clears: ClassVar[bool] = True
    kernel: ClassVar[BinOp]

    @final
    def evaluate(self, *arrays: Array) -> Array:
        """The NumPy shift, with amounts of the width or more defined."""
        x, amount = (np.array(a) for a in np.broadcast_arrays(*arrays))
        width = x.dtype.itemsize * 8
        unsigned = unsigned_view(amount)
        inside = unsigned < width
        cut = np.minimum(unsigned, width - 1).astype(x.dtype)
        made = self.shifted(x, cut, width)
        return np.where(inside, made, x.dtype.type(0)) if self.clears else made

    @final
    def scalar(self, b: Builder, operands: Sequence[DType], *args: nodes.Value) -> nodes.Value:
        """Amounts of the width or more never reach the node, where they are undefined."""
        x, amount = args
        width = scalar_of(x.type).bits
        cut = b.binary(BinOp.MIN_U, amount, const_like(b, x, width - 1))
        made = b.binary(self.kernel, x, cut)
        if not self.clears:
            return made
        inside = b.compare(CmpOp.LT_U, amount, const_like(b, x, width))
        return b.select(inside, made, const_like(b, x, 0))

    @classmethod
    def samples(cls) -> list[Sample]:
        """Amounts below zero, inside and beyond the width."""
        return binary_samples(cls(), INTS, -5, 40)


@final
@dataclass(frozen=True)
class ShiftLeft(_Shift):
    """``x << amount``; 0 from the width on."""

    kernel: ClassVar[BinOp] = BinOp.SHL

    def shifted(self, x: Array, amount: Array, width: int) -> Array:
        """np.left_shift."""
        return np.left_shift(x, amount)


@final
@dataclass(frozen=True)
class ShiftRightLogical(_Shift):
    """``x >> amount`` filling with zeros; 0 from the width on."""

    kernel: ClassVar[BinOp] = BinOp.SHR_L

    def shifted(self, x: Array, amount: Array, width: int) -> Array:
        """np.right_shift of the bits."""
        return np.right_shift(unsigned_view(x), unsigned_view(amount)).view(x.dtype)


@final
@dataclass(frozen=True)
class ShiftRightArithmetic(_Shift):
    """``x >> amount`` filling with the top bit; only it is left from the width on."""

    kernel: ClassVar[BinOp] = BinOp.SHR_A
    clears: ClassVar[bool] = False

    def shifted(self, x: Array, amount: Array, width: int) -> Array:
        """np.right_shift of signed numbers."""
        signed = f"i{x.dtype.itemsize}"
        return np.right_shift(x.view(signed), amount.view(signed)).view(x.dtype)


class _Count(Flat):
    """A count over the bits of an integer, in its dtype."""

    def accepts(self, dtype: DType) -> bool:
        """Integers."""
        return dtypes.is_int(dtype)

    kernel: ClassVar[UnOp]

    @final
    def scalar(self, b: Builder, operands: Sequence[DType], *args: nodes.Value) -> nodes.Value:
        """One node."""
        return b.unary(self.kernel, args[0])

    @classmethod
    def samples(cls) -> list[Sample]:
        """Integers of all widths."""
        return unary_samples(cls(), INTS, -100, 100)


@final
@dataclass(frozen=True)
class PopulationCount(_Count):
    """Number of bits that are set."""

    kernel: ClassVar[UnOp] = UnOp.POPCOUNT

    def evaluate(self, *arrays: Array) -> Array:
        """np.bitwise_count of the bits."""
        (x,) = arrays
        return np.asarray(np.bitwise_count(unsigned_view(x))).astype(x.dtype)


@final
@dataclass(frozen=True)
class Clz(_Count):
    """Number of leading zero bits; the width for 0."""

    kernel: ClassVar[UnOp] = UnOp.CLZ

    def evaluate(self, *arrays: Array) -> Array:
        """Spreads the highest bit downwards and counts what is left."""
        (x,) = arrays
        bits = np.array(unsigned_view(x))
        step = 1
        while step < x.dtype.itemsize * 8:
            bits |= bits >> bits.dtype.type(step)
            step *= 2
        return np.asarray(np.bitwise_count(~bits)).astype(x.dtype)


@final
@dataclass(frozen=True)
class BitcastConvertType(Flat):
    """The bits of ``x`` read as ``dtype``, which has the same width."""

    dtype: DType

    def accepts(self, dtype: DType) -> bool:
        """Numbers of the same width."""
        return dtypes.bool_ not in (dtype, self.dtype) and dtype.itemsize == self.dtype.itemsize

    def is_weak(self, *avals: Aval) -> bool:
        """The dtype was asked for."""
        return False

    def result_dtype(self, *operands: DType) -> DType:
        """The parameter."""
        return self.dtype

    def evaluate(self, *arrays: Array) -> Array:
        """ndarray.view."""
        return np.array(arrays[0], order="C").view(self.dtype)

    def scalar(self, b: Builder, operands: Sequence[DType], *args: nodes.Value) -> nodes.Value:
        """One node, none between integers."""
        return b.bitcast(args[0], with_elem(args[0].type, scalar_type(self.dtype)))

    @classmethod
    def samples(cls) -> list[Sample]:
        """Between floats and integers of one width."""
        pairs = (
            (dtypes.float32, dtypes.uint32),
            (dtypes.int32, dtypes.float32),
            (dtypes.float16, dtypes.uint16),
            (dtypes.bfloat16, dtypes.int16),
            (dtypes.int8, dtypes.uint8),
        )
        return [Sample(cls(to), (aval((3, 5), of),)) for of, to in pairs]


def select(cond: Value, on_true: Value, on_false: Value) -> Value:
    """``on_true`` where ``cond``, else ``on_false``."""
    return bind(Select(), cond, on_true, on_false)


def and_(x: Value, y: Value) -> Value:
    """Bitwise and of booleans or integers."""
    return bind(And(), x, y)


def or_(x: Value, y: Value) -> Value:
    """Bitwise or of booleans or integers."""
    return bind(Or(), x, y)


def xor(x: Value, y: Value) -> Value:
    """Bitwise exclusive or of booleans or integers."""
    return bind(Xor(), x, y)


def not_(x: Value) -> Value:
    """Bitwise complement of booleans or integers."""
    return bind(Not(), x)


def shift_left(x: Value, amount: Value) -> Value:
    """``x << amount``; 0 from the width on."""
    return bind(ShiftLeft(), x, amount)


def shift_right_logical(x: Value, amount: Value) -> Value:
    """``x >> amount`` filling with zeros; 0 from the width on."""
    return bind(ShiftRightLogical(), x, amount)


def shift_right_arithmetic(x: Value, amount: Value) -> Value:
    """``x >> amount`` filling with the top bit."""
    return bind(ShiftRightArithmetic(), x, amount)


def population_count(x: Value) -> Value:
    """Number of set bits."""
    return bind(PopulationCount(), x)


def clz(x: Value) -> Value:
    """Number of leading zero bits."""
    return bind(Clz(), x)


def bitcast_convert_type(x: Value, dtype: DType) -> Value:
    """The bits of ``x`` as ``dtype`` of the same width; ``x`` itself when it has that dtype."""
    return x if aval_of(x).dtype == dtype else bind(BitcastConvertType(dtype), x)
