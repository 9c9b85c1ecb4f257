"""Random numbers from explicit keys, the same bits as JAX's default generator.

A key is a uint32 array of two words (``PRNGKey``); it is never changed, only split. Bits are
Threefry-2x32 of the key and the row-major position in the result, as in JAX with
``jax_threefry_partitionable``. Integers, bits and uniforms on [0, 1) equal JAX's bit for bit;
distributions that go through logarithms or erf_inv agree up to float rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, SupportsIndex, TypeAlias

import numpy as np

import vkjit.numpy as jnp
from vkjit import dtypes, lax
from vkjit.dtypes import DType
from vkjit.errors import ArgumentError, DTypeError, ShapeError
from vkjit.numpy._core import index_of, shape_of
from vkjit.ops.rng import Word, threefry
from vkjit.trace import Tracer, aval_of, tracing

__all__ = [
    "PRNGKey",
    "bernoulli",
    "bits",
    "categorical",
    "choice",
    "exponential",
    "fold_in",
    "gumbel",
    "key",
    "key_data",
    "laplace",
    "logistic",
    "normal",
    "permutation",
    "rademacher",
    "randint",
    "split",
    "truncated_normal",
    "uniform",
]

Array: TypeAlias = Any
ArrayLike: TypeAlias = Any
ShapeLike: TypeAlias = SupportsIndex | Sequence[SupportsIndex]

PAIRWISE_LIMIT = 16384
"""Longest axis that ``permutation`` orders inside a trace, where it compares all pairs of keys."""

_UINTS = {8: dtypes.uint8, 16: dtypes.uint16, 32: dtypes.uint32}


def PRNGKey(seed: ArrayLike) -> Array:
    """The key u32[2] of an integer seed; the low 32 bits of the seed count, as in JAX.

    Args:
        seed: Python integer or integer array of rank 0.

    Raises:
        DTypeError: the seed is not an integer.
        ShapeError: the seed is not of rank 0.
    """
    if isinstance(seed, int):
        return jnp.asarray(np.array([0, seed & 0xFFFFFFFF], np.uint32))
    of = aval_of(seed)
    if not dtypes.is_int(of.dtype):
        raise DTypeError(f"PRNGKey: seed {of}, expected an integer")
    if of.shape:
        raise ShapeError(f"PRNGKey: seed {of}, expected rank 0; use vmap for many keys")
    return jnp.stack([jnp.zeros((), dtypes.uint32), jnp.astype(seed, dtypes.uint32)])


def key(seed: ArrayLike) -> Array:
    """As ``PRNGKey``: keys are plain u32[2] arrays here, without a dtype of their own."""
    return PRNGKey(seed)


def key_data(keys: ArrayLike) -> Array:
    """The words of keys: the array itself."""
    return jnp.asarray(keys)


def split(key: ArrayLike, num: ShapeLike = 2) -> Array:
    """New keys u32[*num, 2], independent of each other and of ``key``."""
    words, count = _words("split", key), _positions("split", shape_of("split", num))
    both = [threefry(words, count, word) for word in (Word.FIRST, Word.SECOND)]
    return jnp.stack(both, axis=-1)


def fold_in(key: ArrayLike, data: ArrayLike) -> Array:
    """A new key from ``key`` and an integer, for example a step or layer number.

    Raises:
        ShapeError: ``data`` is not of rank 0.
    """
    if isinstance(data, int):
        data = np.uint32(data & 0xFFFFFFFF)
    if aval_of(data).shape:
        raise ShapeError(f"fold_in: data {aval_of(data)}, expected rank 0; use vmap for many")
    count = (np.uint32(0), jnp.astype(data, dtypes.uint32))
    words = _words("fold_in", key)
    return jnp.stack([threefry(words, count, word) for word in (Word.FIRST, Word.SECOND)])


def bits(key: ArrayLike, shape: ShapeLike = (), dtype: Any = None) -> Array:
    """Random bits of ``shape`` as uint8, uint16 or uint32 (default).

    Raises:
        DTypeError: another dtype.
    """
    wanted = dtypes.uint32 if dtype is None else dtypes.canonical(dtype)
    if wanted not in _UINTS.values():
        raise DTypeError(f"bits: dtype {wanted.name}, expected uint8, uint16 or uint32")
    return _bits("bits", key, shape_of("bits", shape), wanted)


def uniform(
    key: ArrayLike,
    shape: ShapeLike = (),
    dtype: Any = None,
    minval: ArrayLike = 0.0,
    maxval: ArrayLike = 1.0,
) -> Array:
    """Floats from [minval, maxval) with as many random bits as the mantissa holds.

    Args:
        key: u32[2].
        shape: of the result; bounds broadcast to it.
        dtype: float32 (default), float16 or bfloat16.
        minval: included.
        maxval: excluded, up to rounding.
    """
    wanted = _float("uniform", dtype)
    floats = _unit("uniform", key, shape_of("uniform", shape), wanted)
    if isinstance(minval, (int, float)) and isinstance(maxval, (int, float)):
        if minval == 0 and maxval == 1:
            return floats
        low, high = wanted.type(minval), wanted.type(maxval)
        with np.errstate(over="ignore"):
            span: Any = high - low
    else:
        low, high = jnp.astype(minval, wanted), jnp.astype(maxval, wanted)
        span = high - low
    return jnp.maximum(low, jnp.add(jnp.multiply(floats, span), low))


def normal(key: ArrayLike, shape: ShapeLike = (), dtype: Any = None) -> Array:
    """Standard normal floats: sqrt(2) * erf_inv(u), u uniform on (-1, 1)."""
    wanted = _float("normal", dtype)
    low = np.nextafter(wanted.type(-1), wanted.type(0), dtype=wanted)
    u = uniform(key, shape, wanted, float(low), 1.0)
    return jnp.multiply(wanted.type(math.sqrt(2)), lax.erf_inv(u))


def truncated_normal(
    key: ArrayLike,
    lower: ArrayLike,
    upper: ArrayLike,
    shape: ShapeLike | None = None,
    dtype: Any = None,
) -> Array:
    """Standard normal floats within the open interval (lower, upper).

    Args:
        key: u32[2].
        lower: bound, broadcast to ``shape``.
        upper: bound, broadcast to ``shape``.
        shape: of the result; None: that of the bounds.
        dtype: a float dtype.
    """
    wanted = _float("truncated_normal", dtype)
    if shape is None:
        shape = jnp.broadcast_shapes(jnp.shape(lower), jnp.shape(upper))
    root = wanted.type(math.sqrt(2))
    low, high = jnp.astype(lower, wanted), jnp.astype(upper, wanted)
    u = uniform(key, shape, wanted, lax.erf(jnp.divide(low, root)), lax.erf(jnp.divide(high, root)))
    out = jnp.multiply(root, lax.erf_inv(u))
    inside = (
        jnp.nextafter(lax.stop_gradient(low), wanted.type(np.inf)),
        jnp.nextafter(lax.stop_gradient(high), wanted.type(-np.inf)),
    )
    return jnp.clip(out, *inside)


def bernoulli(key: ArrayLike, p: ArrayLike = 0.5, shape: ShapeLike | None = None) -> Array:
    """Booleans that are true with probability ``p``.

    Args:
        key: u32[2].
        p: float, broadcast to ``shape``.
        shape: of the result; None: that of ``p``.

    Raises:
        DTypeError: ``p`` is not a float.
    """
    of = aval_of(p)
    if not dtypes.is_float(of.dtype):
        raise DTypeError(f"bernoulli: probability {of}, expected a float; write 1.0 for 1")
    out = of.shape if shape is None else shape_of("bernoulli", shape)
    return jnp.less(uniform(key, out, of.dtype), p)


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
    unsigned = _UINTS[wanted.itemsize * 8]
    sizes = shape_of("randint", shape)
    high, low = [_bits("randint", k, sizes, unsigned) for k in _pair(key)]
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


def categorical(
    key: ArrayLike, logits: ArrayLike, axis: int = -1, shape: ShapeLike | None = None
) -> Array:
    """Class indices int32 with probabilities ``softmax(logits)``, by the Gumbel maximum.

    Args:
        key: u32[2].
        logits: unnormalised log probabilities; classes along ``axis``.
        axis: of the classes.
        shape: of the result; ends with the other axes of ``logits``; None: exactly these.
    """
    logits = jnp.asarray(logits)
    axis = axis - logits.ndim if axis >= 0 else axis
    batch = tuple(n for i, n in enumerate(logits.shape) if i != axis % logits.ndim)
    out = batch if shape is None else shape_of("categorical", shape)
    if len(out) < len(batch) or jnp.broadcast_shapes(out, batch) != out:
        raise ShapeError(
            f"categorical: shape {out} for logits {logits.aval} without axis {axis}; expected it "
            f"to end with {batch}"
        )
    extra = len(out) - len(batch)
    full = list(out[extra:])
    full.insert(axis % logits.ndim, logits.shape[axis])
    noise = gumbel(key, (*out[:extra], *full), logits.dtype)
    return jnp.argmax(jnp.add(noise, logits), axis=axis)


def gumbel(key: ArrayLike, shape: ShapeLike = (), dtype: Any = None) -> Array:
    """Standard Gumbel floats: -log(-log(u)), u uniform on (0, 1)."""
    wanted = _float("gumbel", dtype)
    u = uniform(key, shape, wanted, float(jnp.finfo(wanted).tiny), 1.0)
    return jnp.negative(jnp.log(jnp.negative(jnp.log(u))))


def exponential(key: ArrayLike, shape: ShapeLike = (), dtype: Any = None) -> Array:
    """Floats with the density exp(-x): -log(1 - u)."""
    return jnp.negative(jnp.log1p(jnp.negative(uniform(key, shape, dtype))))


def laplace(key: ArrayLike, shape: ShapeLike = (), dtype: Any = None) -> Array:
    """Floats with the density exp(-|x|) / 2."""
    wanted = _float("laplace", dtype)
    low = float(np.nextafter(wanted.type(-1), wanted.type(0), dtype=wanted))
    u = uniform(key, shape, wanted, low, 1.0)
    return jnp.multiply(jnp.sign(u), jnp.log1p(jnp.negative(jnp.abs(u))))


def logistic(key: ArrayLike, shape: ShapeLike = (), dtype: Any = None) -> Array:
    """Floats of the logistic distribution: log(u / (1 - u))."""
    wanted = _float("logistic", dtype)
    u = uniform(key, shape, wanted, float(jnp.finfo(wanted).eps), 1.0)
    return jnp.log(jnp.divide(u, jnp.subtract(wanted.type(1), u)))


def rademacher(key: ArrayLike, shape: ShapeLike = (), dtype: Any = None) -> Array:
    """-1 or 1 with equal probability; int32 unless ``dtype`` says otherwise."""
    wanted = dtypes.default_int() if dtype is None else dtypes.canonical(dtype)
    heads = jnp.astype(bernoulli(key, 0.5, shape), wanted)
    return jnp.subtract(jnp.multiply(wanted.type(2), heads), wanted.type(1))


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


def _float(name: str, dtype: Any) -> DType:
    wanted = dtypes.default_float() if dtype is None else dtypes.canonical(dtype)
    if wanted not in (dtypes.float32, dtypes.float16, dtypes.bfloat16):
        raise DTypeError(f"{name}: dtype {wanted.name}, expected float32, float16 or bfloat16")
    return wanted


def _words(name: str, key: ArrayLike) -> tuple[Array, Array]:
    """The two words of a key as scalars."""
    of = aval_of(key)
    if of.shape != (2,) or of.dtype != dtypes.uint32:
        raise DTypeError(
            f"{name}: key {of}, expected u32[2] from PRNGKey or split; use vmap for many keys"
        )
    return lax.index_in_dim(key, 0, keepdims=False), lax.index_in_dim(key, 1, keepdims=False)


def _positions(name: str, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """Row-major position of each element as two words, high and low."""
    size = math.prod(shape)
    if size >= 1 << 32:
        raise ArgumentError(f"{name}: {size} elements of shape {shape}, expected below 2**32")
    return np.uint32(0), jnp.reshape(jnp.arange(size, dtype=dtypes.uint32), shape)


def _bits(name: str, key: ArrayLike, shape: tuple[int, ...], dtype: DType) -> Array:
    words = threefry(_words(name, key), _positions(name, shape), Word.BOTH)
    return jnp.astype(words, dtype)


def _unit(name: str, key: ArrayLike, shape: tuple[int, ...], dtype: DType) -> Array:
    """Floats on [0, 1): random mantissa bits under the exponent of 1, minus 1."""
    mantissa, width = jnp.finfo(dtype).nmant, dtype.itemsize * 8
    drawn = 8 if mantissa < 8 else width
    holder = _UINTS[width]
    words = jnp.astype(_bits(name, key, shape, _UINTS[drawn]), holder)
    one = np.asarray(1, dtype).view(holder)[()]
    under = jnp.bitwise_or(lax.shift_right_logical(words, holder.type(drawn - mantissa)), one)
    return jnp.subtract(lax.bitcast_convert_type(under, dtype), dtype.type(1))


def _pair(key: ArrayLike) -> tuple[Array, Array]:
    both = split(key)
    return lax.index_in_dim(both, 0, keepdims=False), lax.index_in_dim(both, 1, keepdims=False)


def _static_span(low: int, high: int, dtype: DType) -> tuple[Any, Any]:
    """The first value and how many there are; 0 stands for the whole range of the dtype."""
    info = np.iinfo(dtype)
    above, bits = high > info.max, dtype.itemsize * 8
    low = min(max(low, int(info.min)), int(info.max))
    high = min(max(high, int(info.min)), int(info.max))
    span = 1 if high <= low else (high - low + above) % (1 << bits)
    return dtype.type(low), _UINTS[bits].type(span)


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
        key, words = _pair(key)
        x = _ordered(_bits("permutation", words, of.shape, dtypes.uint32), x, axis)
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
