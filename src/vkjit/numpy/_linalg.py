"""Products: matmul, dot, vdot, inner, outer, tensordot, kron, norm; and contracted axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import SupportsIndex

import numpy as np

from vkjit import dtypes
from vkjit.errors import ArgumentError, ShapeError
from vkjit.ir.avals import Aval
from vkjit.ir.primitive import Value
from vkjit.numpy._core import (
    ArrayLike,
    Axis,
    DTypeLike,
    Shape,
    axes_of,
    axis_of,
    beside,
    broadcast_shapes,
    broadcast_value,
    cast,
    cast_axes,
    index_of,
    operand_aval,
    promoted,
    reshaped,
)
from vkjit.numpy._elementwise import abs as abs_
from vkjit.numpy._elementwise import multiply, power, subtract
from vkjit.numpy._logic import logical_xor
from vkjit.numpy._math import sqrt
from vkjit.numpy._reduce import max as max_
from vkjit.numpy._reduce import min as min_
from vkjit.numpy._reduce import sum as sum_
from vkjit.numpy._shape import expand_dims, moveaxis, ravel, reshape, roll, slice_axis
from vkjit.ops import compare, contract
from vkjit.trace import aval_of

__all__ = [
    "cross",
    "diff",
    "dot",
    "inner",
    "kron",
    "matmul",
    "outer",
    "tensordot",
    "vdot",
    "vecdot",
]


Pairs = tuple[tuple[int, ...], tuple[int, ...]]


def contracted(  # noqa: PLR0913  a product has that many parts
    x: Value,
    y: Value,
    axes: Pairs,
    batch: Pairs = ((), ()),
    wide: DTypeLike = None,
    precision: object = None,
) -> Value:
    """The product of two arrays of one dtype: batch axes, free axes of ``x``, free axes of ``y``.

    Args:
        x: array.
        y: array.
        axes: axes of ``x`` and of ``y`` that are summed, in pairs.
        batch: axes that run together, in pairs.
        wide: dtype of sums and result; None: float32 sums for 16-bit floats, the operands' dtype.
        precision: of float32 products; see ``default_matmul_precision``.
    """
    preferred = None if wide is None else dtypes.canonical(wide)
    of = aval_of(x).dtype
    if of != dtypes.bool_:
        return contract.dot_general(x, y, axes, batch, preferred, precision)
    counts = contract.dot_general(cast(x, dtypes.int32), cast(y, dtypes.int32), axes, batch, None)
    return cast(counts, dtypes.bool_ if preferred is None else preferred)


def matmul(
    a: ArrayLike,
    b: ArrayLike,
    *,
    precision: object = None,
    preferred_element_type: DTypeLike = None,
) -> Value:
    """Matrix product over the last two axes; leading axes broadcast; vectors lose their axis.

    Args:
        a: [..., m, k] or [k].
        b: [..., k, n] or [k].
        precision: of float32 products; see ``default_matmul_precision``.
        preferred_element_type: dtype of sums and result.

    Returns:
        [..., m, n], without m or n where that operand is a vector.

    Raises:
        ShapeError: an operand has rank 0, or the inner sizes differ.
    """
    a, b = promoted("matmul", *beside(a, b))
    left, right = aval_of(a), aval_of(b)
    if left.ndim == 0 or right.ndim == 0:
        raise ShapeError(f"matmul: operands {left} and {right}, expected rank 1 or more; use *")
    inner = right.ndim - 2 if right.ndim > 1 else 0
    if left.shape[-1] != right.shape[inner]:
        raise ShapeError(
            f"matmul: operands {left} and {right}: inner sizes {left.shape[-1]} and "
            f"{right.shape[inner]} differ; expected (..., m, k) @ (..., k, n); transpose one"
        )
    if right.ndim <= 2:
        axes = (left.ndim - 1,), (inner,)
        return contracted(a, b, axes, wide=preferred_element_type, precision=precision)
    if left.ndim == 1:
        axes = (0,), (inner,)
        return contracted(a, b, axes, wide=preferred_element_type, precision=precision)
    return _batched(a, b, preferred_element_type, precision)


def _batched(a: Value, b: Value, wide: DTypeLike, precision: object) -> Value:
    """Both have batch axes, or only ``b`` has: shared ones run together, sizes of 1 repeat."""
    left, right = aval_of(a), aval_of(b)
    batch = broadcast_shapes("matmul", left.shape[:-2], right.shape[:-2])
    if left.ndim == 2:
        axes = (1,), (right.ndim - 2,)
        out = contracted(a, b, axes, wide=wide, precision=precision)  # [m, ..., n]
        return moveaxis(out, 0, -2)
    rank = len(batch)
    a = broadcast_value(a, (*batch, *left.shape[-2:]))
    b = broadcast_value(b, (*batch, *right.shape[-2:]))
    runs = tuple(range(rank))
    return contracted(a, b, ((rank + 1,), (rank,)), (runs, runs), wide, precision)


def dot(
    a: ArrayLike,
    b: ArrayLike,
    *,
    precision: object = None,
    preferred_element_type: DTypeLike = None,
) -> Value:
    """Product over the last axis of ``a`` and the last but one of ``b``; scalars multiply."""
    a, b = promoted("dot", *beside(a, b))
    left, right = aval_of(a), aval_of(b)
    if left.ndim == 0 or right.ndim == 0:
        return multiply(a, b)
    inner = right.ndim - 2 if right.ndim > 1 else 0
    _same("dot", left, right, left.shape[-1], right.shape[inner])
    axes = (left.ndim - 1,), (inner,)
    return contracted(a, b, axes, wide=preferred_element_type, precision=precision)


def _same(name: str, left: Aval, right: Aval, first: int, second: int) -> None:
    if first != second:
        raise ShapeError(
            f"{name}: operands {left} and {right}: summed sizes {first} and {second} differ; "
            "expected equal sizes; transpose or reshape one"
        )


def vdot(a: ArrayLike, b: ArrayLike) -> Value:
    """Dot product of the flattened operands."""
    return dot(ravel(a), ravel(b))


def inner(a: ArrayLike, b: ArrayLike) -> Value:
    """Product over the last axes of both; scalars multiply."""
    a, b = promoted("inner", *beside(a, b))
    left, right = aval_of(a), aval_of(b)
    if left.ndim == 0 or right.ndim == 0:
        return multiply(a, b)
    _same("inner", left, right, left.shape[-1], right.shape[-1])
    return contracted(a, b, ((left.ndim - 1,), (right.ndim - 1,)))


def vecdot(x1: ArrayLike, x2: ArrayLike, /, *, axis: SupportsIndex = -1) -> Value:
    """Dot products along one axis, the others broadcast."""
    return sum_(multiply(x1, x2), axis=axis, dtype=_product_dtype("vecdot", x1, x2))


def _product_dtype(name: str, *operands: ArrayLike) -> dtypes.DType:
    avals = [operand_aval(name, x) for x in operands]
    return dtypes.promote(*[(a.dtype, a.weak) for a in avals])[0]


def outer(a: ArrayLike, b: ArrayLike) -> Value:
    """Every product of an element of ``a`` and one of ``b``, as a matrix."""
    return multiply(expand_dims(ravel(a), 1), expand_dims(ravel(b), 0))


def tensordot(
    a: ArrayLike,
    b: ArrayLike,
    axes: int | Sequence[int] | Sequence[Sequence[int]] = 2,
    *,
    precision: object = None,
    preferred_element_type: DTypeLike = None,
) -> Value:
    """Sum over pairs of axes: the last ``axes`` of ``a`` and the first of ``b``, or those named.

    Raises:
        ShapeError: sizes of a pair differ.
        ArgumentError: different numbers of axes.
    """
    a, b = promoted("tensordot", *beside(a, b))
    left, right = aval_of(a), aval_of(b)
    if isinstance(axes, Sequence):
        first, second = (cast_axes(group) for group in axes)
        pairs = axes_of("tensordot", first, left.ndim), axes_of("tensordot", second, right.ndim)
    else:
        count = index_of("tensordot", axes)
        if count > min(left.ndim, right.ndim):
            raise ArgumentError(f"tensordot: {count} axes of operands {left} and {right}")
        pairs = tuple(range(left.ndim - count, left.ndim)), tuple(range(count))
    if len(pairs[0]) != len(pairs[1]):
        raise ArgumentError(f"tensordot: axes {pairs}, expected as many for both operands")
    for i, j in zip(*pairs, strict=True):
        _same("tensordot", left, right, left.shape[i], right.shape[j])
    return contracted(a, b, pairs, wide=preferred_element_type, precision=precision)


def kron(a: ArrayLike, b: ArrayLike) -> Value:
    """Kronecker product."""
    a, b = promoted("kron", a, b)
    rank = max(aval_of(a).ndim, aval_of(b).ndim)
    left, right = (_led(v, rank) for v in (a, b))
    spread = multiply(
        reshaped(a, tuple(n for size in left for n in (size, 1))),
        reshaped(b, tuple(n for size in right for n in (1, size))),
    )
    return reshape(spread, tuple(m * n for m, n in zip(left, right, strict=True)))


def _led(x: Value, rank: int) -> Shape:
    shape = aval_of(x).shape
    return (1,) * (rank - len(shape)) + shape


def cross(a: ArrayLike, b: ArrayLike, axis: SupportsIndex = -1) -> Value:
    """Cross product of vectors of three along ``axis``."""
    a, b = promoted("cross", a, b)
    first = axis_of("cross", axis, aval_of(a).ndim)
    second = axis_of("cross", axis, aval_of(b).ndim)
    a, b = moveaxis(a, first, -1), moveaxis(b, second, -1)
    if aval_of(a).shape[-1] != 3 or aval_of(b).shape[-1] != 3:
        raise ShapeError(f"cross: operands {aval_of(a)} and {aval_of(b)}, expected vectors of 3")
    turned = [_turned(v, by) for v, by in ((a, 1), (b, 2), (a, 2), (b, 1))]
    out = subtract(multiply(turned[0], turned[1]), multiply(turned[2], turned[3]))
    return moveaxis(out, -1, axis)


def _turned(x: Value, by: int) -> Value:
    return roll(x, -by, -1)


def norm(
    x: ArrayLike,
    ord: int | float | str | None = None,
    axis: Axis = None,
    keepdims: bool = False,  # noqa: FBT001
) -> Value:
    """Vector norm over one axis (2, 1, inf, -inf, 0, p), or the Frobenius norm over axes.

    Raises:
        ArgumentError: a matrix norm that needs singular values.
    """
    of = operand_aval("norm", x)
    size = abs_(cast(x, of.dtype if dtypes.is_float(of.dtype) else dtypes.default_float()))
    axes = axes_of("norm", axis, of.ndim)
    if ord is None or (ord == 2 and len(axes) == 1) or (ord == "fro" and len(axes) == 2):
        return sqrt(sum_(multiply(size, size), axis=axes, keepdims=keepdims))
    if len(axes) != 1 or isinstance(ord, str):
        raise ArgumentError(
            f"norm: ord {ord!r} over axes {axes} of {of}; expected None, 'fro', or a vector norm "
            "over one axis"
        )
    return _vector_norm(size, ord, axes, keepdims=keepdims)


def _vector_norm(size: Value, order: float, axes: tuple[int, ...], *, keepdims: bool) -> Value:
    if order == np.inf:
        return max_(size, axis=axes, keepdims=keepdims)
    if order == -np.inf:
        return min_(size, axis=axes, keepdims=keepdims)
    dtype = aval_of(size).dtype
    if order == 0:
        return sum_(compare.ne(size, dtype.type(0)), axis=axes, keepdims=keepdims, dtype=dtype)
    if order == 1:
        return sum_(size, axis=axes, keepdims=keepdims)
    return power(sum_(power(size, order), axis=axes, keepdims=keepdims), 1 / order)


def diff(a: ArrayLike, n: int = 1, axis: SupportsIndex = -1) -> Value:
    """Differences of neighbours along an axis, ``n`` times."""
    of = operand_aval("diff", a)
    along = axis_of("diff", axis, of.ndim)
    out = a
    for _ in range(n):
        length = aval_of(out).shape[along]
        upper = slice_axis(out, min(1, length), length, along)
        lower = slice_axis(out, 0, max(length - 1, 0), along)
        out = logical_xor(upper, lower) if of.dtype == dtypes.bool_ else subtract(upper, lower)
    return out
