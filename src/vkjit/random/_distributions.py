"""Distributions of floats, booleans and classes, from uniform floats."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

import vkjit.numpy as jnp
from vkjit import dtypes, lax
from vkjit.errors import DTypeError, ShapeError
from vkjit.numpy._core import shape_of
from vkjit.random._keys import (
    Array,
    ArrayLike,
    ShapeLike,
    float_dtype,
    uniform,
)
from vkjit.trace import aval_of


def normal(key: ArrayLike, shape: ShapeLike = (), dtype: Any = None) -> Array:
    """Standard normal floats: sqrt(2) * erf_inv(u), u uniform on (-1, 1)."""
    wanted = float_dtype("normal", dtype)
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
    wanted = float_dtype("truncated_normal", dtype)
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
    wanted = float_dtype("gumbel", dtype)
    u = uniform(key, shape, wanted, float(jnp.finfo(wanted).tiny), 1.0)
    return jnp.negative(jnp.log(jnp.negative(jnp.log(u))))


def exponential(key: ArrayLike, shape: ShapeLike = (), dtype: Any = None) -> Array:
    """Floats with the density exp(-x): -log(1 - u)."""
    return jnp.negative(jnp.log1p(jnp.negative(uniform(key, shape, dtype))))


def laplace(key: ArrayLike, shape: ShapeLike = (), dtype: Any = None) -> Array:
    """Floats with the density exp(-|x|) / 2."""
    wanted = float_dtype("laplace", dtype)
    low = float(np.nextafter(wanted.type(-1), wanted.type(0), dtype=wanted))
    u = uniform(key, shape, wanted, low, 1.0)
    return jnp.multiply(jnp.sign(u), jnp.log1p(jnp.negative(jnp.abs(u))))


def logistic(key: ArrayLike, shape: ShapeLike = (), dtype: Any = None) -> Array:
    """Floats of the logistic distribution: log(u / (1 - u))."""
    wanted = float_dtype("logistic", dtype)
    u = uniform(key, shape, wanted, float(jnp.finfo(wanted).eps), 1.0)
    return jnp.log(jnp.divide(u, jnp.subtract(wanted.type(1), u)))


def rademacher(key: ArrayLike, shape: ShapeLike = (), dtype: Any = None) -> Array:
    """-1 or 1 with equal probability; int32 unless ``dtype`` says otherwise."""
    wanted = dtypes.default_int() if dtype is None else dtypes.canonical(dtype)
    heads = jnp.astype(bernoulli(key, 0.5, shape), wanted)
    return jnp.subtract(jnp.multiply(wanted.type(2), heads), wanted.type(1))
