"""Activations, softmax, norms and attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import vkjit.numpy as jnp
from vkjit import lax
from vkjit.errors import ShapeError

Axis: TypeAlias = int | Sequence[int] | None

SQRT_HALF = math.sqrt(0.5)
SQRT_TWO_OVER_PI = math.sqrt(2.0 / math.pi)
GELU_CUBIC = 0.044715
"""Coefficient of Hendrycks and Gimpel 2016, arXiv:1606.08415."""


def relu(x: Any) -> Any:
    """``max(x, 0)``. NaN stays NaN; the derivative at 0 is 0."""
    x = jnp.asarray(x)
    return jnp.where(x <= 0, jnp.zeros_like(x), x)


def sigmoid(x: Any) -> Any:
    """``1 / (1 + exp(-x))``, accurate relative to its value on both sides.

    Nothing overflows, and the derivative ``s (1 - s)`` is 0 far out.
    """
    return lax.logistic(x)


def softplus(x: Any) -> Any:
    """``log(1 + exp(x))`` as ``max(x, 0) + log1p(exp(-|x|))``; its derivative is `sigmoid`."""
    x = jnp.asarray(x)
    positive = jnp.where(x >= 0, x, jnp.zeros_like(x))
    return positive + jnp.log1p(jnp.exp(_minus_abs(x)))


def log_sigmoid(x: Any) -> Any:
    """``log(sigmoid(x))`` as ``-softplus(-x)``; about ``x`` for very negative ``x``."""
    return -softplus(-jnp.asarray(x))


def silu(x: Any) -> Any:
    """``x * sigmoid(x)``, also called swish."""
    x = jnp.asarray(x)
    return x * sigmoid(x)


def gelu(x: Any, approximate: bool = True) -> Any:  # noqa: FBT001  jax.nn.gelu's signature
    """``x`` times the standard normal distribution function at ``x``.

    Args:
        x: Array of a floating dtype.
        approximate: The form with tanh (arXiv:1606.08415, at most 5e-4 off) instead of erf.
    """
    x = jnp.asarray(x)
    if approximate:
        # Beyond 20 the tanh is ±1 to the last bit; the cube of a larger x may overflow.
        near = jnp.clip(x, -20.0, 20.0)
        inner = SQRT_TWO_OVER_PI * (near + GELU_CUBIC * (near * near * near))
        # (1 + tanh(u)) / 2 is sigmoid(2u), which does not cancel on the left.
        return x * sigmoid(2.0 * inner)
    return 0.5 * x * (1.0 + lax.erf(x * SQRT_HALF))


def logsumexp(a: Any, axis: Axis = None, *, keepdims: bool = False) -> Any:
    """``log(sum(exp(a)))`` over ``axis`` (None: all), without overflow.

    All -inf gives -inf, any +inf gives +inf, NaN spreads. The derivative is the softmax; an entry
    of -inf beside finite ones has the derivative 0.
    """
    a = jnp.asarray(a)
    top = _finite_max(a, axis)
    total = jnp.log(jnp.sum(jnp.exp(a - top), axis=axis, keepdims=keepdims))
    return total + (top if keepdims else jnp.reshape(top, total.shape))


def softmax(x: Any, axis: Axis = -1) -> Any:
    """``exp(x) / sum(exp(x))`` over ``axis``; a row of only -inf is NaN, as in JAX."""
    x = jnp.asarray(x)
    raised = jnp.exp(x - _stopped_max(x, axis))
    return raised / jnp.sum(raised, axis=axis, keepdims=True)


def log_softmax(x: Any, axis: Axis = -1) -> Any:
    """``log(softmax(x))``, finite where the softmax underflows to 0."""
    x = jnp.asarray(x)
    shifted = x - _stopped_max(x, axis)
    return shifted - jnp.log(jnp.sum(jnp.exp(shifted), axis=axis, keepdims=True))


def one_hot(x: Any, num_classes: int, *, dtype: Any = jnp.float32, axis: int = -1) -> Any:
    """Ones where the class is ``x``, zeros elsewhere; a row of zeros where ``x`` is no class.

    Args:
        x: Integer array of any shape.
        num_classes: Length of the new axis.
        dtype: Dtype of the result.
        axis: Where the new axis stands in the result.
    """
    x = jnp.asarray(x)
    rank = x.ndim + 1
    place = axis + rank if axis < 0 else axis
    classes = jnp.reshape(
        jnp.arange(num_classes, dtype=x.dtype),
        tuple(num_classes if i == place else 1 for i in range(rank)),
    )
    return (jnp.expand_dims(x, place) == classes).astype(dtype)


def rms_norm(x: Any, weight: Any = None, *, eps: float = 1e-6, axis: int = -1) -> Any:
    """``x / sqrt(mean(x²) + eps) * weight`` over ``axis``.

    The mean square and the division are computed in f32, so f16 does not overflow; the result
    has the dtype of ``x``. Zhang and Sennrich 2019, arXiv:1910.07467.

    Args:
        x: Array of a floating dtype.
        weight: Factor that broadcasts against ``x``; None for none.
        eps: Added to the mean square, inside the root.
        axis: The axis that is normalised.
    """
    x = jnp.asarray(x)
    wide = x.astype(jnp.float32)
    normed = wide * lax.rsqrt(jnp.mean(wide * wide, axis=axis, keepdims=True) + eps)
    return _affine(normed, weight, None).astype(x.dtype)


def layer_norm(
    x: Any, weight: Any = None, bias: Any = None, *, eps: float = 1e-5, axis: int = -1
) -> Any:
    """``(x - mean) / sqrt(variance + eps) * weight + bias`` over ``axis``.

    Computed in f32 from centred values (the variance never cancels); the result has the dtype of
    ``x``. Ba, Kiros and Hinton 2016, arXiv:1607.06450.

    Args:
        x: Array of a floating dtype.
        weight: Factor that broadcasts against ``x``; None for none.
        bias: Summand that broadcasts against ``x``; None for none.
        eps: Added to the variance, inside the root.
        axis: The axis that is normalised.
    """
    x = jnp.asarray(x)
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=axis, keepdims=True)
    variance = jnp.mean(centred * centred, axis=axis, keepdims=True)
    return _affine(centred * lax.rsqrt(variance + eps), weight, bias).astype(x.dtype)


def dot_product_attention(  # noqa: PLR0913  jax.nn.dot_product_attention's signature
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
) -> Any:
    """Softmax attention with grouped heads.

    Head h of the N query heads reads head ``h // (N / K)`` of the K key and value heads. Logits
    and softmax are f32; the result has the dtype of ``query``. With 16-bit inputs the cotangents of
    both products are rounded to that type, as in fused attention elsewhere. A query that may see no
    key gives 0 and has zero gradients (JAX leaves that open).

    Args:
        query: [B,T,N,H] or [T,N,H].
        key: [B,S,K,H] or [S,K,H]; N is a multiple of K.
        value: As ``key``.
        bias: Added to the scaled logits; broadcasts to [B,N,T,S].
        mask: Bool, True where a query may see a key; broadcasts to [B,N,T,S].
        scale: Factor on the logits; None is ``1 / sqrt(H)``.
        is_causal: Query t sees the keys 0..t only (in addition to ``mask``).

    Returns:
        [B,T,N,H], or [T,N,H] where the query has no batch axis.

    Raises:
        ShapeError: Ranks, batch, head counts or head sizes do not fit.
    """
    query, key, value = jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)
    if query.ndim == 3:
        batched = (jnp.expand_dims(x, 0) for x in (query, key, value))
        out = dot_product_attention(
            *batched, bias=bias, mask=mask, scale=scale, is_causal=is_causal
        )
        return jnp.squeeze(out, 0)
    _check_attention(query, key, value)
    (batch, rows, heads, width), (columns, shared) = query.shape, key.shape[1:3]
    group = heads // shared

    # The G query heads of a key head are stacked as rows: one product per key head.
    stacked = jnp.reshape(query, (batch, rows, shared, group, width))
    stacked = jnp.transpose(stacked, (0, 2, 3, 1, 4))
    stacked = jnp.reshape(stacked, (batch, shared, group * rows, width))  # [B,K,GT,H]
    logits = lax.dot_general(
        stacked, key, (((3,), (3,)), ((0, 1), (0, 2))), preferred_element_type=jnp.float32
    )  # [B,K,GT,S]
    logits = _with_rounded_cotangent(logits, query.dtype)
    logits = logits * (width**-0.5 if scale is None else scale)
    if bias is not None:
        logits = logits + _stacked(jnp.asarray(bias).astype(jnp.float32), rows, shared, group)
    allowed = _allowed(mask, rows, columns, is_causal=is_causal)
    if allowed is not None:
        allowed = _stacked(allowed, rows, shared, group)
    out = _attend(logits, allowed, value)
    out = jnp.reshape(out, (batch, shared, group, rows, width))
    out = jnp.reshape(jnp.transpose(out, (0, 3, 1, 2, 4)), query.shape)
    return out.astype(query.dtype)


def _attend(logits: Any, allowed: Any, value: Any) -> Any:
    """Softmax of [B,K,R,S] times values [B,S,K,H]: f32 [B,K,R,H].

    The rows are divided by their sums after the product, H columns instead of S. Its transpose
    then needs the exponentials alone, and the sum in the softmax's derivative is one over H, too.
    """
    lowest = float(jnp.finfo(jnp.float32).min)
    if allowed is not None:
        logits = jnp.where(allowed, logits, lowest)
    top = _stopped_max(logits, -1)
    raised = jnp.exp(logits - top)
    total = jnp.sum(raised, axis=-1, keepdims=True)
    out = lax.dot_general(
        raised.astype(value.dtype),
        value,
        (((3,), (1,)), ((0, 1), (0, 2))),
        preferred_element_type=jnp.float32,
    )  # [B,K,R,H]
    out = _with_rounded_cotangent(out, value.dtype) / total
    return out if allowed is None else jnp.where(top > lowest, out, 0.0)


def _with_rounded_cotangent(x: Any, dtype: Any) -> Any:
    """``x``, an f32 product of operands of ``dtype``; its cotangent is rounded to ``dtype``.

    The products of the backward then multiply operands of one 16-bit type, which matrix units do.
    """
    if jnp.dtype(dtype).itemsize != 2:
        return x
    fixed = lax.stop_gradient(x)
    # The difference is 0: unlike x itself it has a value in every 16-bit type.
    return fixed + (x - fixed).astype(dtype).astype(jnp.float32)


def _stacked(x: Any, rows: int, shared: int, group: int) -> Any:
    """What broadcasts to [B,N,T,S] in the layout [B,K,GT,S]; axes of size 1 stay so, but GT."""
    x = jnp.reshape(x, (1,) * (4 - x.ndim) + x.shape)
    batch, heads, _, columns = x.shape
    split = (1, 1) if heads == 1 else (shared, group)
    x = jnp.reshape(x, (batch, *split, *x.shape[2:]))
    x = jnp.broadcast_to(x, (batch, split[0], group, rows, columns))
    return jnp.reshape(x, (batch, split[0], group * rows, columns))


def _minus_abs(x: Any) -> Any:
    # Not -abs(x): whatever the derivative of abs at 0 is, this one is 1 there, as sigmoid needs.
    return jnp.where(x >= 0, -x, x)


def _stopped_max(x: Any, axis: Axis) -> Any:
    return lax.stop_gradient(jnp.max(x, axis=axis, keepdims=True))


def _finite_max(a: Any, axis: Axis) -> Any:
    top = _stopped_max(a, axis)
    # Subtracting an infinite maximum would give NaN where the answer is an infinity.
    return jnp.where(jnp.isfinite(top), top, jnp.zeros_like(top))


def _allowed(mask: Any, rows: int, columns: int, *, is_causal: bool) -> Any:
    if not is_causal:
        return None if mask is None else jnp.asarray(mask)
    causal = jnp.reshape(jnp.arange(rows), (rows, 1)) >= jnp.reshape(
        jnp.arange(columns), (1, columns)
    )
    return causal if mask is None else jnp.logical_and(jnp.asarray(mask), causal)


def _affine(normed: Any, weight: Any, bias: Any) -> Any:
    if weight is not None:
        normed = normed * jnp.asarray(weight).astype(jnp.float32)
    if bias is not None:
        normed = normed + jnp.asarray(bias).astype(jnp.float32)
    return normed


def _check_attention(query: Any, key: Any, value: Any) -> None:
    fits = (
        query.ndim == key.ndim == value.ndim == 4
        and key.shape == value.shape
        and query.shape[0] == key.shape[0]
        and query.shape[3] == key.shape[3]
        and query.shape[2] % key.shape[2] == 0
    )
    if not fits:
        raise ShapeError(
            f"dot_product_attention: query {query.shape}, key {key.shape}, value {value.shape} "
            "were given, expected [B,T,N,H], [B,S,K,H], [B,S,K,H] with N a multiple of K; "
            "transpose or reshape the operands"
        )
