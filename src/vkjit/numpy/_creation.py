"""New arrays: from data, filled, ranges, triangles, grids; and dtype conversion."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from vkjit import dtypes
from vkjit.blocks import block_of
from vkjit.errors import ArgumentError, ShapeError
from vkjit.ir.primitive import Value
from vkjit.numpy._core import (
    ArrayLike,
    DTypeLike,
    ShapeLike,
    aligned,
    cast,
    constant,
    dtype_or,
    index_of,
    inexact,
    is_sequence,
    lift,
    operand_aval,
    promoted,
    refuse_blocks,
    reshaped,
    shape_of,
)
from vkjit.numpy._elementwise import integer_power, power
from vkjit.numpy._logic import where
from vkjit.numpy._shape import broadcast_to, concatenate, expand_dims, ndim, ravel, stack
from vkjit.ops import arithmetic, compare, logical, movement, structural
from vkjit.trace import aval_of, bind, is_numpy

__all__ = [
    "arange",
    "array",
    "asarray",
    "astype",
    "empty",
    "empty_like",
    "eye",
    "full",
    "full_like",
    "identity",
    "linspace",
    "logspace",
    "meshgrid",
    "ones",
    "ones_like",
    "tri",
    "tril",
    "tril_indices",
    "triu",
    "triu_indices",
    "vander",
    "view",
    "zeros",
    "zeros_like",
]


def array(object: Any, dtype: DTypeLike = None, copy: bool = True, ndmin: int = 0) -> Value:  # noqa: FBT001
    """An array from nested sequences, scalars, NumPy data or arrays.

    Args:
        object: what to convert; 64-bit data narrows to 32 bits; Python scalars stay weakly typed.
        dtype: of the result; None: that of the data. Blocks stay blocks.
        copy: accepted for compatibility; arrays are immutable.
        ndmin: least number of axes; new ones stand in front.

    Raises:
        DTypeError: the data has no numeric dtype; or it is blocks, and ``dtype`` is another one.
        ShapeError: nested sequences of different lengths.
    """
    out = _converted(object, _wanted(object, dtype))
    rank = aval_of(out).ndim
    return reshaped(out, (1,) * (ndmin - rank) + aval_of(out).shape) if rank < ndmin else out


def asarray(a: Any, dtype: DTypeLike = None, copy: bool | None = None) -> Value:  # noqa: FBT001
    """As ``array``."""
    if dtype is None and not isinstance(a, (list, tuple)) and not is_numpy(a):
        of = getattr(a, "aval", None)
        if of is not None:
            return lift("asarray", a)
    return array(a, dtype)


def _wanted(data: Any, dtype: DTypeLike) -> dtypes.DType | None:
    """The dtype to convert to, None for that of the data."""
    if dtype is None:
        return None
    if _is_blocks(data):
        if dtype is aval_of(data).dtype or dtype == aval_of(data).dtype:
            return None
        refuse_blocks("array", aval_of(data))
    return dtypes.canonical(dtype)


def _is_blocks(x: object) -> bool:
    """Whether an array of blocks, of NumPy or here."""
    of = x if is_numpy(x) else getattr(x, "aval", None)
    return of is not None and block_of(of.dtype) is not None


def _converted(data: Any, dtype: dtypes.DType | None) -> Value:
    if isinstance(data, (bool, int, float)):
        if dtype is not None:
            return constant(np.asarray(cast(data, dtype)))
        return bind(structural.Broadcast((), ()), data)  # an array that keeps the weak type
    if is_numpy(data):
        return constant(np.ascontiguousarray(_numpy(data, dtype)).reshape(data.shape))
    if is_sequence(data):
        return _from_sequence(data, dtype)
    if hasattr(data, "aval"):
        return lift("array", data) if dtype is None else cast(data, dtype)
    if hasattr(data, "__array__"):
        return _converted(np.asarray(data), dtype)
    of = operand_aval("array", data)
    return cast(data, of.dtype)


def _numpy(data: np.ndarray[Any, Any], dtype: dtypes.DType | None) -> np.ndarray[Any, Any]:
    if dtype is None:
        return np.asarray(data, dtypes.of_array(data.dtype))
    if data.dtype.kind == "f" and dtypes.is_int(dtype):
        return np.asarray(cast(np.asarray(data, dtypes.canonical(data.dtype)), dtype))
    return np.asarray(data).astype(dtype)


def _from_sequence(data: Sequence[Any], dtype: dtypes.DType | None) -> Value:
    leaves = list(_leaves(data))
    if any(hasattr(leaf, "aval") or _is_blocks(leaf) for leaf in leaves):
        parts = [_converted(part, None) for part in data]
        out = stack(promoted("array", *parts))
        return out if dtype is None else cast(out, dtype)
    kinds = [operand_aval("array", leaf) for leaf in leaves]
    found, _ = (
        dtypes.promote(*[(k.dtype, k.weak) for k in kinds])
        if kinds
        else (dtypes.default_float(), False)
    )
    try:
        plain = np.array(data)
    except ValueError as error:
        raise ShapeError(
            f"array: nested sequences of different lengths ({error}); expected equal lengths"
        ) from None
    return constant(_numpy(plain, dtype) if dtype is not None else plain.astype(found))


def _leaves(data: Any) -> Iterator[Any]:
    if is_sequence(data):
        for part in data:
            yield from _leaves(part)
    elif is_numpy(data) and data.ndim and not _is_blocks(data):
        yield data.dtype.type(0)
    else:
        yield data


def astype(x: ArrayLike, dtype: DTypeLike, /, *, copy: bool = False) -> Value:
    """``x`` in another dtype.

    Floats to integers truncate, saturate and take NaN to 0; integers wrap; to bool: not 0.
    """
    wanted = dtypes.default_float() if dtype is None else dtypes.canonical(dtype)
    operand_aval("astype", x)
    return cast(x, wanted)


def view(x: ArrayLike, dtype: DTypeLike) -> Value:
    """The bits of ``x`` as another dtype of the same width."""
    return logical.bitcast_convert_type(lift("view", x), dtypes.canonical(dtype))


def full(shape: ShapeLike, fill_value: ArrayLike, dtype: DTypeLike = None) -> Value:
    """An array with ``fill_value``, broadcast, everywhere; its dtype unless one is given."""
    sizes = shape_of("full", shape)
    operand_aval("full", fill_value)
    value = fill_value if dtype is None else cast(fill_value, dtypes.canonical(dtype))
    if not sizes and isinstance(value, (np.generic, bool, int, float)):
        return _converted(value, None)
    return broadcast_to(value, sizes)


def zeros(shape: ShapeLike, dtype: DTypeLike = None) -> Value:
    """Zeros of float32 or ``dtype``."""
    return full(shape, 0, dtype_or(dtype, dtypes.default_float()))


def ones(shape: ShapeLike, dtype: DTypeLike = None) -> Value:
    """Ones of float32 or ``dtype``."""
    return full(shape, 1, dtype_or(dtype, dtypes.default_float()))


def empty(shape: ShapeLike, dtype: DTypeLike = None) -> Value:
    """Zeros: there is no uninitialised memory here."""
    return zeros(shape, dtype)


def full_like(
    a: ArrayLike, fill_value: ArrayLike, dtype: DTypeLike = None, shape: ShapeLike | None = None
) -> Value:
    """``fill_value`` in the shape and dtype of ``a``."""
    of = operand_aval("full_like", a)
    sizes = of.shape if shape is None else shape
    return full(sizes, fill_value, dtype_or(dtype, of.dtype))


def zeros_like(a: ArrayLike, dtype: DTypeLike = None, shape: ShapeLike | None = None) -> Value:
    """Zeros in the shape and dtype of ``a``."""
    return full_like(a, 0, dtype, shape)


def ones_like(a: ArrayLike, dtype: DTypeLike = None, shape: ShapeLike | None = None) -> Value:
    """Ones in the shape and dtype of ``a``."""
    return full_like(a, 1, dtype, shape)


def empty_like(a: ArrayLike, dtype: DTypeLike = None, shape: ShapeLike | None = None) -> Value:
    """As ``zeros_like``."""
    return full_like(a, 0, dtype, shape)


def arange(
    start: float, stop: float | None = None, step: float | None = None, dtype: DTypeLike = None
) -> Value:
    """``start``, ``start + step``, ... below ``stop``; the arguments are static.

    Raises:
        ArgumentError: a step of 0.
        TracerError: an argument is traced.
    """
    low, high, by = (0, start, 1) if stop is None else (start, stop, 1)
    by = by if step is None else step
    numbers = [_static("arange", v) for v in (low, high, by)]
    if numbers[2] == 0:
        raise ArgumentError("arange: step 0, expected a nonzero step")
    whole = all(isinstance(v, int) for v in numbers)
    wanted = dtype_or(dtype, dtypes.default_int() if whole else dtypes.default_float())
    count = max(0, math.ceil((numbers[1] - numbers[0]) / numbers[2]))
    if not whole:
        return constant(np.arange(*numbers).astype(wanted))
    return _affine(movement.iota(_counting(wanted), (count,), 0), numbers[0], numbers[2], wanted)


def _counting(dtype: dtypes.DType) -> dtypes.DType:
    return dtype if dtypes.is_int(dtype) else dtypes.default_int()


def _affine(steps: Value, start: float, step: float, dtype: dtypes.DType) -> Value:
    """``start + step * steps``, in integers, then cast."""
    of = aval_of(steps).dtype
    out = steps if step == 1 else arithmetic.mul(steps, cast(int(step), of))
    out = out if start == 0 else structural.add(out, cast(int(start), of))
    return cast(out, dtype)


def _static(name: str, value: Any) -> int | float:
    if isinstance(value, float):  # np.float64 is one
        return value
    return float(value) if is_numpy(value) and value.dtype.kind == "f" else index_of(name, value)


def linspace(
    start: ArrayLike,
    stop: ArrayLike,
    num: int = 50,
    endpoint: bool = True,  # noqa: FBT001  numpy's signature
    dtype: DTypeLike = None,
) -> Value:
    """``num`` floats from ``start`` to ``stop``, evenly spaced along a new first axis.

    Each is ``start * (1 - t) + stop * t``, so that both ends are exact.
    """
    low, high = aligned("linspace", inexact("linspace", start, stop))
    of = aval_of(low)
    wanted = dtype_or(dtype, of.dtype)
    count = index_of("linspace", num)
    parts = count - 1 if endpoint else count
    place = np.arange(count, dtype=np.float64) / max(parts, 1)
    rank = max(aval_of(low).ndim, aval_of(high).ndim)
    t = constant(place.astype(of.dtype).reshape((count,) + (1,) * rank))
    rest = constant((1 - place).astype(of.dtype).reshape((count,) + (1,) * rank))
    left = arithmetic.mul(*aligned("linspace", [rest, low]))
    right = arithmetic.mul(*aligned("linspace", [t, high]))
    return cast(structural.add(*aligned("linspace", [left, right])), wanted)


def logspace(
    start: ArrayLike,
    stop: ArrayLike,
    num: int = 50,
    endpoint: bool = True,  # noqa: FBT001  numpy's signature
    base: float = 10.0,
) -> Value:
    """``base`` to the powers of ``linspace``."""
    return power(base, linspace(start, stop, num, endpoint))


def eye(N: int, M: int | None = None, k: int = 0, dtype: DTypeLike = None) -> Value:
    """Ones on the ``k``-th diagonal of an N by M matrix, zeros elsewhere."""
    rows, columns = _grid("eye", N, M)
    row, column = _coordinates(rows, columns)
    on = compare.eq(structural.add(row, np.int32(k)), column)
    return cast(on, dtype_or(dtype, dtypes.default_float()))


def identity(n: int, dtype: DTypeLike = None) -> Value:
    """The identity matrix."""
    return eye(n, None, 0, dtype)


def tri(N: int, M: int | None = None, k: int = 0, dtype: DTypeLike = None) -> Value:
    """Ones at and below the ``k``-th diagonal of an N by M matrix."""
    return cast(_below(*_grid("tri", N, M), k), dtype_or(dtype, dtypes.default_float()))


def _grid(name: str, rows: int, columns: int | None) -> tuple[int, int]:
    first = index_of(name, rows)
    return first, first if columns is None else index_of(name, columns)


def _coordinates(rows: int, columns: int) -> tuple[Value, Value]:
    shape = (rows, columns)
    return movement.iota(dtypes.int32, shape, 0), movement.iota(dtypes.int32, shape, 1)


def _below(rows: int, columns: int, k: int) -> Value:
    row, column = _coordinates(rows, columns)
    return compare.ge(structural.add(row, np.int32(k)), column)


def tril(m: ArrayLike, k: int = 0) -> Value:
    """The last two axes at and below the ``k``-th diagonal, zeros elsewhere."""
    return _triangle("tril", m, k)


def triu(m: ArrayLike, k: int = 0) -> Value:
    """The last two axes at and above the ``k``-th diagonal, zeros elsewhere."""
    return _triangle("triu", m, k)


def _triangle(name: str, m: ArrayLike, k: int) -> Value:
    of = operand_aval(name, m)
    if of.ndim < 2:
        raise ShapeError(f"{name}: operand {of}, expected at least two axes")
    kept, zero = lift(name, m), of.dtype.type(0)
    below = _below(of.shape[-2], of.shape[-1], index_of(name, k) - (name == "triu"))
    return where(below, kept, zero) if name == "tril" else where(below, zero, kept)


def meshgrid(*xi: ArrayLike, indexing: str = "xy", sparse: bool = False) -> list[Value]:
    """Coordinate arrays of a grid; ``"xy"`` has the second operand along the first axis."""
    if indexing not in ("xy", "ij"):
        raise ArgumentError(f"meshgrid: indexing {indexing!r}, expected 'xy' or 'ij'")
    if any(ndim(x) > 1 for x in xi):
        raise ShapeError("meshgrid: expected vectors")
    order = list(range(len(xi)))
    if indexing == "xy" and len(xi) > 1:
        order[:2] = [1, 0]
    flat = [ravel(x) for x in xi]
    lifted = [
        expand_dims(x, tuple(a for a in range(len(xi)) if a != order[i])) if len(xi) > 1 else x
        for i, x in enumerate(flat)
    ]
    if sparse:
        return lifted
    sizes = [0] * len(xi)
    for i, x in enumerate(flat):
        sizes[order[i]] = aval_of(x).shape[0]
    return [broadcast_to(x, tuple(sizes)) for x in lifted]


def tril_indices(n: int, k: int = 0, m: int | None = None) -> tuple[Value, Value]:
    """Row and column of each position at or below a diagonal."""
    rows, columns = np.tril_indices(n, k, m)
    return constant(rows.astype(np.int32)), constant(columns.astype(np.int32))


def triu_indices(n: int, k: int = 0, m: int | None = None) -> tuple[Value, Value]:
    """Row and column of each position at or above a diagonal."""
    rows, columns = np.triu_indices(n, k, m)
    return constant(rows.astype(np.int32)), constant(columns.astype(np.int32))


def vander(x: ArrayLike, N: int | None = None, increasing: bool = False) -> Value:  # noqa: FBT001
    """Powers of a vector as columns."""
    of = operand_aval("vander", x)
    if of.ndim != 1:
        raise ShapeError(f"vander: operand {of}, expected a vector")
    count = of.shape[0] if N is None else N
    columns = [expand_dims(integer_power(x, i), 1) for i in range(count)]
    return concatenate(columns if increasing else columns[::-1], 1)


def dynamic_shape(name: str) -> Any:
    """A function that says why ``name`` cannot be there."""

    def refuse(*args: Any, **kwargs: Any) -> Value:
        raise ArgumentError(
            f"{name}: the shape of its result depends on values, which a traced function cannot "
            "have; use vkjit.numpy.where(condition, x, y) with masks, or NumPy outside the trace"
        )

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__doc__ = f"Not available: the shape of ``{name}``'s result depends on values."
    return refuse
