"""Keys and bits: seeds, splitting, and the uniform floats made of bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, SupportsIndex, TypeAlias

import numpy as np

import vkjit.numpy as jnp
from vkjit import dtypes, lax
from vkjit.dtypes import DType
from vkjit.errors import ArgumentError, DTypeError, ShapeError
from vkjit.numpy._core import shape_of
from vkjit.ops.rng import Word, threefry
from vkjit.trace import Hooks, aval_of

Array: TypeAlias = Any
ArrayLike: TypeAlias = Any
ShapeLike: TypeAlias = SupportsIndex | Sequence[SupportsIndex]

UINTS = {8: dtypes.uint8, 16: dtypes.uint16, 32: dtypes.uint32}
"""The unsigned dtype of each width."""


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
    words, count = words_of("split", key), _positions("split", shape_of("split", num))
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
    words = words_of("fold_in", key)
    return jnp.stack([threefry(words, count, word) for word in (Word.FIRST, Word.SECOND)])


def bits(key: ArrayLike, shape: ShapeLike = (), dtype: Any = None) -> Array:
    """Random bits of ``shape`` as uint8, uint16 or uint32 (default).

    Raises:
        DTypeError: another dtype.
    """
    wanted = dtypes.uint32 if dtype is None else dtypes.canonical(dtype)
    if wanted not in UINTS.values():
        raise DTypeError(f"bits: dtype {wanted.name}, expected uint8, uint16 or uint32")
    return random_bits("bits", key, shape_of("bits", shape), wanted)


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
    wanted = float_dtype("uniform", dtype)
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


def float_dtype(name: str, dtype: Any) -> DType:
    wanted = dtypes.default_float() if dtype is None else dtypes.canonical(dtype)
    if wanted not in (dtypes.float32, dtypes.float16, dtypes.bfloat16):
        raise DTypeError(f"{name}: dtype {wanted.name}, expected float32, float16 or bfloat16")
    return wanted


def words_of(name: str, key: ArrayLike) -> tuple[Array, Array]:
    """The two words of a key as scalars."""
    of = aval_of(key)
    if of.shape != (2,) or of.dtype != dtypes.uint32:
        raise DTypeError(
            f"{name}: key {of}, expected u32[2] from PRNGKey or split; use vmap for many keys"
        )
    Hooks.key_used(name, key)
    return lax.index_in_dim(key, 0, keepdims=False), lax.index_in_dim(key, 1, keepdims=False)


def _positions(name: str, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """Row-major position of each element as two words, high and low."""
    size = math.prod(shape)
    if size >= 1 << 32:
        raise ArgumentError(f"{name}: {size} elements of shape {shape}, expected below 2**32")
    return np.uint32(0), jnp.reshape(jnp.arange(size, dtype=dtypes.uint32), shape)


def random_bits(name: str, key: ArrayLike, shape: tuple[int, ...], dtype: DType) -> Array:
    words = threefry(words_of(name, key), _positions(name, shape), Word.BOTH)
    return jnp.astype(words, dtype)


def _unit(name: str, key: ArrayLike, shape: tuple[int, ...], dtype: DType) -> Array:
    """Floats on [0, 1): random mantissa bits under the exponent of 1, minus 1."""
    mantissa, width = jnp.finfo(dtype).nmant, dtype.itemsize * 8
    drawn = 8 if mantissa < 8 else width
    holder = UINTS[width]
    words = jnp.astype(random_bits(name, key, shape, UINTS[drawn]), holder)
    one = np.asarray(1, dtype).view(holder)[()]
    under = jnp.bitwise_or(lax.shift_right_logical(words, holder.type(drawn - mantissa)), one)
    return jnp.subtract(lax.bitcast_convert_type(under, dtype), dtype.type(1))


def two_keys(key: ArrayLike) -> tuple[Array, Array]:
    both = split(key)
    return lax.index_in_dim(both, 0, keepdims=False), lax.index_in_dim(both, 1, keepdims=False)
