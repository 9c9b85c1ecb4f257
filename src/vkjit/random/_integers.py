"""Integers and order: randint, permutation, choice."""

from __future__ import annotations

import math
from typing import Any, SupportsIndex

import numpy as np

import vkjit.numpy as jnp
from vkjit import dtypes, lax
from vkjit.dtypes import DType
from vkjit.errors import ArgumentError, DTypeError, ShapeError
from vkjit.numpy._core import index_of, shape_of
from vkjit.random._keys import (
    UINTS,
    Array,
    ArrayLike,
    ShapeLike,
    random_bits,
    two_keys,
    uniform,
)
from vkjit.trace import Tracer, aval_of, tracing

PAIRWISE_LIMIT = 16384
"""Longest axis that ``permutation`` orders inside a trace, where it compares all pairs."""


def randint(
    key: ArrayLike, shape: ShapeLike, minval: ArrayLike, maxval: ArrayLike, dtype: Any = None
) -> Array:
    """Integers from [minval, maxval); ``minval`` where the interval is empty.

    Each takes two words of random bits, so that the remainder's bias is negligible.

    Args:
        key: u32[2].
        shape: of the result; bounds broadcast to it.
        minval: included; clipped to the range of ``dtype``.
        maxval: excluded; clipped to one above the range of ``dtype``.
        dtype: an integer dtype; None: int32.
    """
    wanted = dtypes.default_int() if dtype is None else dtypes.canonical(dtype)
    if not dtypes.is_int(wanted):
        raise DTypeError(f"randint: dtype {wanted.name}, expected an integer dtype")
    if wanted.itemsize < 4:
        wide = [_narrow_bound(v, wanted, extra) for v, extra in ((minval, 0), (maxval, 1))]
        return jnp.astype(randint(key, shape, *wide), wanted)
    unsigned = UINTS[wanted.itemsize * 8]
    sizes = shape_of("randint", shape)
    high, low = [random_bits("randint", k, sizes, unsigned) for k in two_keys(key)]
    if isinstance(minval, int) and isinstance(maxval, int):
        start, span = _static_span(minval, maxval, wanted)
    else:
        start, span = _dynamic_span(minval, maxval, wanted, unsigned)
    half = unsigned.type(1 << (4 * wanted.itemsize))
    factor = _rest(half, span)
    factor = _rest(jnp.multiply(factor, factor), span)
    offset = jnp.add(jnp.multiply(_rest(high, span), factor), _rest(low, span))
    return jnp.add(start, jnp.astype(_rest(offset, span), wanted))


def permutation(
    key: ArrayLike, x: ArrayLike, axis: SupportsIndex = 0, *, independent: bool = False
) -> Array:
    """``x`` in random order along ``axis``, or ``arange(x)`` where it is an integer.

    Args:
        key: u32[2].
        x: array, or a static integer.
        axis: along which whole slices move.
        independent: shuffle every line along ``axis`` on its own.

    Raises:
        ArgumentError: inside a trace, where the axis is longer than ``PAIRWISE_LIMIT``.
    """
    if aval_of(x).shape == ():
        return _shuffled(key, jnp.arange(index_of("permutation", x)), 0)
    x = jnp.asarray(x)
    along = index_of("permutation", axis) % x.ndim
    if independent or x.ndim == 1:
        return _shuffled(key, x, along)
    return jnp.take(x, _shuffled(key, jnp.arange(x.shape[along]), 0), along)


def choice(  # noqa: PLR0913  jax.random.choice's signature
    key: ArrayLike,
    a: ArrayLike,
    shape: ShapeLike = (),
    replace: bool = True,  # noqa: FBT001
    p: ArrayLike | None = None,
    axis: int = 0,
) -> Array:
    """Elements of ``a`` along ``axis`` (or of ``arange(a)``) drawn at random.

    Args:
        key: u32[2].
        a: array, or a static integer.
        shape: of the draws.
        replace: whether an element may be drawn again.
        p: probability of each element; None: equal.
        axis: of ``a``.

    Raises:
        ArgumentError: more draws than elements without replacement, or ``p`` without replacement.
    """
    draws = shape_of("choice", shape)
    whole = aval_of(a).shape == ()
    array = jnp.arange(index_of("choice", a)) if whole else jnp.asarray(a)
    axis %= array.ndim
    size, count = array.shape[axis], math.prod(draws)
    if size == 0 and count:
        raise ArgumentError(f"choice: {count} draws from an empty axis of {array.aval}")
    if not replace:
        if count > size or p is not None:
            raise ArgumentError(
                f"choice: {count} draws without replacement from {size} elements, p "
                f"{'given' if p is not None else 'not given'}; expected at most {size} and no p"
            )
        start = jnp.arange(count)
        chosen = jnp.take(permutation(key, size if whole else array, axis), start, axis)
    else:
        chosen = jnp.take(array, _draws(key, size, draws, p).reshape(-1), axis)
    return jnp.reshape(chosen, (*array.shape[:axis], *draws, *array.shape[axis + 1 :]))


def _draws(key: ArrayLike, size: int, shape: tuple[int, ...], p: ArrayLike | None) -> Array:
    if p is None:
        return randint(key, shape, 0, size)
    if jnp.shape(p) != (size,):
        raise ShapeError(f"choice: p {aval_of(p)} for {size} elements, expected shape ({size},)")
    total = jnp.cumsum(p)
    at = jnp.multiply(total[-1], jnp.subtract(1, uniform(key, shape, aval_of(total).dtype)))
    below = jnp.less(total, jnp.expand_dims(at, -1))
    return jnp.sum(below, axis=-1, dtype=dtypes.int32)


def _narrow_bound(value: ArrayLike, dtype: DType, extra: int) -> Any:
    """A bound clipped to a narrow dtype's range (and one above), int32 or a Python integer."""
    low, high = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max) + extra
    if isinstance(value, int):
        return min(max(value, low), high)
    return jnp.clip(jnp.astype(value, dtypes.int32), low, high)


def _static_span(low: int, high: int, dtype: DType) -> tuple[Any, Any]:
    """The first value and how many there are; 0 stands for the whole range of the dtype."""
    info = np.iinfo(dtype)
    above, bits = high > info.max, dtype.itemsize * 8
    low = min(max(low, int(info.min)), int(info.max))
    high = min(max(high, int(info.min)), int(info.max))
    span = 1 if high <= low else (high - low + above) % (1 << bits)
    return dtype.type(low), UINTS[bits].type(span)


def _dynamic_span(
    low: ArrayLike, high: ArrayLike, dtype: DType, unsigned: DType
) -> tuple[Any, Any]:
    low, high = jnp.asarray(low), jnp.asarray(high)
    for bound in (low, high):
        if not dtypes.is_int(aval_of(bound).dtype):
            raise DTypeError(f"randint: bound {aval_of(bound)}, expected an integer")
    largest = np.iinfo(dtype).max
    reaches = largest < np.iinfo(aval_of(high).dtype).max
    above = jnp.greater(high, aval_of(high).dtype.type(largest)) if reaches else np.bool_(False)
    low, high = _clipped(low, dtype), _clipped(high, dtype)
    span = jnp.astype(jnp.subtract(high, low), unsigned)
    some = jnp.greater(high, low)
    span = jnp.where(some, span, unsigned.type(1))
    wider = jnp.logical_and(above, some)
    return low, jnp.where(wider, jnp.add(span, unsigned.type(1)), span)


def _clipped(value: Array, dtype: DType) -> Array:
    """An integer array in another dtype, limited to its range instead of wrapped."""
    own, wanted = np.iinfo(aval_of(value).dtype), np.iinfo(dtype)
    low, high = max(own.min, wanted.min), min(own.max, wanted.max)
    if (low, high) != (own.min, own.max):
        of = aval_of(value).dtype.type
        value = jnp.clip(value, of(low), of(high))
    return jnp.astype(value, dtype)


def _rest(x: ArrayLike, span: ArrayLike) -> Array:
    """``x`` modulo ``span``, where 0 stands for 2 to the width of the dtype."""
    if isinstance(span, np.generic):
        return jnp.asarray(x) if span == 0 else lax.rem(x, span)
    whole = jnp.equal(span, aval_of(span).dtype.type(0))
    safe = jnp.where(whole, aval_of(span).dtype.type(1), span)
    return jnp.where(whole, x, lax.rem(*jnp.broadcast_arrays(x, safe)))


def _shuffled(key: ArrayLike, x: Array, axis: int) -> Array:
    """Sorted by random words, so often that ties in all rounds are unlikely, as JAX does it."""
    of = aval_of(x)
    rounds = math.ceil(3 * math.log(max(1, of.size)) / math.log(0xFFFFFFFF))
    for _ in range(rounds):
        key, words = two_keys(key)
        x = _ordered(random_bits("permutation", words, of.shape, dtypes.uint32), x, axis)
    return x


def _ordered(words: Array, x: Array, axis: int) -> Array:
    """``x`` stably sorted along ``axis`` by ``words``.

    Outside a trace the order is found on the host; inside, by counting for every element those
    that come before it: n * n comparisons, fused into one kernel.
    """
    if not tracing() and not isinstance(words, Tracer):
        order = np.argsort(np.asarray(words), axis=axis, kind="stable").astype(np.int32)
        return jnp.take_along_axis(x, jnp.asarray(order), axis)
    size = aval_of(words).shape[axis]
    if size > PAIRWISE_LIMIT:
        raise ArgumentError(
            f"permutation: axis of length {size} inside a traced function, expected at most "
            f"{PAIRWISE_LIMIT}; call it outside and pass the result in"
        )
    line = jnp.moveaxis(words, axis, -1)
    mine, other = jnp.expand_dims(line, -1), jnp.expand_dims(line, -2)
    index = jnp.arange(size, dtype=dtypes.int32)
    earlier = jnp.greater(jnp.expand_dims(index, -1), index)
    before = jnp.logical_or(jnp.less(other, mine), jnp.logical_and(jnp.equal(other, mine), earlier))
    rank = jnp.sum(before, axis=-1, dtype=dtypes.int32)
    here = jnp.equal(jnp.expand_dims(rank, -2), jnp.expand_dims(index, -1))
    order = jnp.sum(jnp.where(here, index, 0), axis=-1, dtype=dtypes.int32)
    return jnp.take_along_axis(x, jnp.moveaxis(order, -1, axis), axis)
