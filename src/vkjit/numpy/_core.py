"""What every function of this package does first: promote dtypes, broadcast shapes, read axes.

Operations below take operands of one dtype and one shape (or rank 0). The functions here bring
there whatever JAX's semantics allow: Python scalars (weakly typed), NumPy arrays, arrays, tracers.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, SupportsIndex, TypeAlias, TypeGuard

import ml_dtypes
import numpy as np

from vkjit import dtypes
from vkjit.dtypes import DType
from vkjit.errors import ArgumentError, DTypeError, ShapeError, TracerError
from vkjit.ir.avals import Aval
from vkjit.ir.primitive import Value
from vkjit.ops.cast import cast as cast_op
from vkjit.ops.movement import reshape as reshape_op
from vkjit.ops.structural import broadcast
from vkjit.trace import Hooks, Tracer, aval_of, is_numpy

Shape: TypeAlias = tuple[int, ...]
ShapeLike: TypeAlias = SupportsIndex | Sequence[SupportsIndex]
Axis: TypeAlias = SupportsIndex | Sequence[SupportsIndex] | None
DTypeLike: TypeAlias = Any
ArrayLike: TypeAlias = Any
"""An Array, a tracer, a NumPy array or scalar, or a Python scalar."""

PythonScalar = bool | int | float


class Packed(ABC):
    """What holds numbers in another form and gives them in several float dtypes: quantized arrays.

    ``aval`` is that of the numbers in float32, which is how functions of one array see it.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def aval(self) -> Aval:
        """Shape and dtype of the numbers."""

    @abstractmethod
    def dequantize(self, dtype: DTypeLike = dtypes.float32) -> Value:
        """The numbers, as ``dtype``."""


_READ = (dtypes.float32, dtypes.bfloat16, dtypes.float16)
"""Dtypes in which packed numbers are read."""


def is_sequence(x: object) -> TypeGuard[Sequence[Any]]:
    """Whether a list or tuple."""
    return isinstance(x, (list, tuple))


def limits_of(dtype: DType) -> Any:
    """``finfo`` of a float dtype, bfloat16 included."""
    return ml_dtypes.finfo(dtype)  # type: ignore[return-value]


def operand_aval(name: str, x: ArrayLike) -> Aval:
    """The aval of an operand.

    Raises:
        DTypeError: ``x`` is a list or another thing that is not an array.
    """
    try:
        return aval_of(x)
    except DTypeError:
        raise DTypeError(
            f"{name}: given {type(x).__name__}, expected an array or scalar; "
            "make one with vkjit.numpy.asarray(...)"
        ) from None


def constant(value: np.ndarray[Any, Any]) -> Value:
    """An array of the current device from NumPy data of a supported dtype."""
    return Hooks.constant(value)


def float_like(dtype: DType, value: float) -> Value:
    """A Python float as a scalar of a float dtype."""
    return dtype.type(value)


def scalar_of(value: PythonScalar, dtype: DType) -> Value:
    """A Python scalar as a strongly typed NumPy scalar; integers wrap, as in JAX.

    Raises:
        ArgumentError: an integer of more than 64 bits.
    """
    if dtypes.is_float(dtype) or dtype == dtypes.bool_:
        return np.asarray(value).astype(dtype)[()]
    whole = int(value)
    if not -(1 << 63) <= whole < 1 << 64:
        raise ArgumentError(f"scalar: {whole} has more than 64 bits; use a float")
    bits = 8 * dtype.itemsize
    wrapped = whole & ((1 << bits) - 1)
    if dtypes.is_signed(dtype) and wrapped >> (bits - 1):
        wrapped -= 1 << bits
    return np.asarray(wrapped, dtype)[()]


def lift(name: str, x: ArrayLike) -> Value:
    """An operand as it is, NumPy data narrowed to a supported dtype."""
    of = operand_aval(name, x)
    if isinstance(x, Packed):
        return x.dequantize()
    return np.asarray(x, of.dtype)[()] if is_numpy(x) and x.dtype != of.dtype else x


def cast(x: Value, dtype: DType, *, weak: bool = False) -> Value:
    """``x`` in ``dtype``; Python scalars become literals, nothing happens where it fits already."""
    if isinstance(x, PythonScalar):
        if weak:
            return float(x) if dtypes.is_float(dtype) else int(x)
        return scalar_of(x, dtype)
    if isinstance(x, Packed):
        x = x.dequantize(dtype if dtype in _READ else dtypes.float32)
    of = aval_of(x)
    if of.dtype == dtype and (weak or not of.weak):
        return np.asarray(x, dtype)[()] if is_numpy(x) and x.dtype != dtype else x
    return cast_op(x, dtype)


def promoted(name: str, *operands: ArrayLike) -> list[Value]:
    """The operands in their common dtype by JAX's lattice; shapes untouched."""
    avals = [operand_aval(name, x) for x in operands]
    first = avals[0]
    if all(a.dtype == first.dtype and not a.weak for a in avals):
        return [cast(x, first.dtype) for x in operands]
    refuse_blocks(name, *avals)
    dtype, weak = dtypes.promote(*[(a.dtype, a.weak) for a in avals])
    return [_fit(x, a, dtype, weak=weak) for x, a in zip(operands, avals, strict=True)]


def beside(*operands: ArrayLike) -> list[Value]:
    """The operands of a product, quantized ones read in the dtype of the others.

    So a product of bfloat16 activations reads its packed weights in bfloat16, not in float32.
    """
    if not any(isinstance(x, Packed) for x in operands):
        return list(operands)
    others = [aval_of(x).dtype for x in operands if not isinstance(x, Packed)]
    narrow = bool(others) and all(d in (dtypes.bfloat16, dtypes.float16) for d in others)
    dtype = dtypes.promote(*[(d, False) for d in others])[0] if narrow else dtypes.float32
    return [x.dequantize(dtype) if isinstance(x, Packed) else x for x in operands]


def refuse_blocks(name: str, *avals: Aval) -> None:
    """Refuses operands whose elements are blocks.

    Raises:
        DTypeError: one is; the message says what reads its numbers.
    """
    if any(a.block is not None for a in avals):
        raise DTypeError(
            f"{name}: operands {', '.join(map(str, avals))}; blocks hold packed numbers, which "
            "nothing computes with; expected numbers; read them with quant.dequantize(x)"
        )


def _fit(x: Value, of: Aval, dtype: DType, *, weak: bool) -> Value:
    if not isinstance(x, PythonScalar) and of.dtype == dtype:
        return x
    return cast(x, dtype, weak=weak)


def inexact(name: str, *operands: ArrayLike) -> list[Value]:
    """As ``promoted``, with integers and booleans taken to the default float."""
    avals = [operand_aval(name, x) for x in operands]
    refuse_blocks(name, *avals)
    dtype, weak = dtypes.promote(*[(a.dtype, a.weak) for a in avals])
    if not dtypes.is_float(dtype):
        dtype = dtypes.default_float()
    return [_fit(x, a, dtype, weak=weak) for x, a in zip(operands, avals, strict=True)]


def broadcast_shapes(name: str, *shapes: Shape) -> Shape:
    """NumPy's broadcast of shapes.

    Raises:
        ShapeError: two sizes differ and neither is 1.
    """
    rank = max((len(s) for s in shapes), default=0)
    out = [1] * rank
    for shape in shapes:
        for i, size in enumerate(shape, start=rank - len(shape)):
            if size != 1 and out[i] not in (1, size):
                given = ", ".join(map(str, shapes))
                raise ShapeError(
                    f"{name}: operands of shapes {given} cannot be broadcast together "
                    f"(sizes {out[i]} and {size}); expected equal sizes or 1; reshape or slice one"
                )
            if size != 1:
                out[i] = size
    return tuple(out)


def broadcast_value(x: Value, shape: Shape) -> Value:
    """``x`` repeated to ``shape``, aligned at the last axis."""
    of = aval_of(x)
    return (
        x
        if of.shape == shape
        else broadcast(x, shape, tuple(range(len(shape)))[len(shape) - of.ndim :])
    )


def aligned(name: str, operands: Sequence[Value]) -> list[Value]:
    """Operands broadcast to one shape; rank-0 ones stay, since operations repeat them."""
    shapes = [aval_of(x).shape for x in operands]
    first = shapes[0]
    if all(s == first or s == () for s in shapes):
        return list(operands)
    shape = broadcast_shapes(name, *shapes)
    return [
        x if s in ((), shape) else broadcast_value(x, shape)
        for x, s in zip(operands, shapes, strict=True)
    ]


def index_of(name: str, value: Any) -> int:
    """A static integer.

    Raises:
        TracerError: the value is traced.
        ArgumentError: it is not an integer.
    """
    if isinstance(value, Tracer):
        raise TracerError(
            f"{name}: got the traced value {value.aval} where a size, axis or position that is "
            "known at trace time is needed; pass a Python integer or make the argument static"
        )
    try:
        return operator.index(value)
    except TypeError:
        raise ArgumentError(f"{name}: got {value!r}, expected an integer") from None


def shape_of(name: str, shape: ShapeLike) -> Shape:
    """A static shape from an integer or a sequence of integers.

    Raises:
        ShapeError: a size is negative.
    """
    many = isinstance(shape, Sequence) or (is_numpy(shape) and shape.ndim == 1)
    sizes: Iterable[Any] = cast_axes(shape) if not many else shape  # type: ignore[assignment]
    out = tuple([index_of(name, s) for s in sizes])
    if any(s < 0 for s in out):
        raise ShapeError(f"{name}: shape {out} has a negative size; expected sizes of at least 0")
    return out


def axis_of(name: str, axis: SupportsIndex, rank: int) -> int:
    """An axis counted from the front.

    Raises:
        ShapeError: there is no such axis.
    """
    found = index_of(name, axis)
    if not -rank <= found < rank:
        raise ShapeError(
            f"{name}: axis {found} is out of range for an array with {rank} axes; "
            f"expected {-rank} to {rank - 1}"
        )
    return found % rank


def axes_of(name: str, axis: Axis, rank: int) -> tuple[int, ...]:
    """Axes counted from the front; None is all of them.

    Raises:
        ShapeError: an axis is out of range or named twice.
    """
    if axis is None:
        return tuple(range(rank))
    many = cast_axes(axis)
    out = tuple([axis_of(name, a, rank) for a in many])
    if len(set(out)) != len(out):
        raise ShapeError(f"{name}: axes {out} name an axis twice; name each once")
    return out


def cast_axes(axis: SupportsIndex | Sequence[SupportsIndex]) -> tuple[SupportsIndex, ...]:
    """One axis or several as a tuple."""
    return tuple(axis) if isinstance(axis, Sequence) else (axis,)


def reshaped(x: Value, shape: Shape) -> Value:
    """``x`` in another shape of the same size."""
    return x if aval_of(x).shape == shape else reshape_op(x, shape)


def dtype_or(dtype: DTypeLike, default: DType) -> DType:
    """A requested dtype, narrowed to 32 bits, or the default where None was given."""
    return default if dtype is None else dtypes.canonical(dtype)
