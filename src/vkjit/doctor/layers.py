"""Stages ``gru``, ``norm``, ``attention`` and ``loss``: layers, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import vkjit.numpy as jnp
from vkjit import nn, tree
from vkjit.api.autodiff import grad
from vkjit.doctor.comparing import Array
from vkjit.doctor.session import Judge, Session
from vkjit.doctor.tolerances import Kind

Function = Callable[..., Any]


def _with_gradients(layer: Function, weights: Array) -> Function:
    """A function of floats: the layer's result, and the gradients of its sum under ``weights``."""

    def both(*args: Any) -> Any:
        def weighted(*args: Any) -> Any:
            return jnp.sum(layer(*args) * weights)

        return layer(*args), grad(weighted, tuple(range(len(args))))(*args)

    return both


def _normal(session: Session, *shape: int, scale: float = 1.0) -> Array:
    return (session.rng.standard_normal(shape) * scale).astype(np.float32)


# -- GRU ------------------------------------------------------------------------------------------


def gru(session: Session) -> None:
    """A gated recurrent unit over some steps: both gates, the candidate, gradients through time.

    K. Cho et al., arXiv:1406.1078, with the reset gate before the candidate's product.
    """
    sizes = [(3, 8, 12, 1)] if session.quick else [(3, 8, 12, 4), (16, 64, 96, 6)]
    for batch, inputs, width, steps in session.cases(sizes):
        args = (
            _normal(session, steps, batch, inputs),
            _normal(session, batch, width),
            _normal(session, inputs, 3 * width, scale=inputs**-0.5),
            _normal(session, width, 3 * width, scale=width**-0.5),
            _normal(session, 3 * width, scale=0.3),
        )
        judged = _with_gradients(gated, _normal(session, batch, width))
        length = (width + inputs) * steps
        what = f"GRU of {batch} x {inputs} to {width}, {steps} steps"
        session.both(what, judged, args, Judge(Kind.LAYER, length))


def gated(xs: Any, h: Any, w: Any, u: Any, bias: Any) -> Any:
    """The last state; ``xs`` is [T,B,I], ``h`` [B,H], ``w`` [I,3H], ``u`` [H,3H]."""
    width = h.shape[-1]
    for t in range(xs.shape[0]):
        given = xs[t] @ w + bias
        z = nn.sigmoid(given[:, :width] + h @ u[:, :width])
        r = nn.sigmoid(given[:, width : 2 * width] + h @ u[:, width : 2 * width])
        candidate = jnp.tanh(given[:, 2 * width :] + (r * h) @ u[:, 2 * width :])
        h = (1.0 - z) * h + z * candidate
    return h


# -- RMSNorm --------------------------------------------------------------------------------------


def norm(session: Session) -> None:
    """RMSNorm; rows of zeros and of tiny numbers give finite values and gradients."""
    widths = (64,) if session.quick else (7, 64, 576, 4097)
    for width in session.cases(widths):
        rows = 9 if session.quick else 130
        x = _normal(session, rows, width)
        x[1], x[2] = 0.0, x[2] * 1e-6
        x[3] = x[3] * 1e12
        weight = 1 + _normal(session, width, scale=0.1)
        judged = _with_gradients(nn.rms_norm, _normal(session, rows, width))
        what = f"RMSNorm of {rows} x {width}"
        judge = Judge(Kind.LAYER, width, by_row=True)
        got = session.both(what, judged, (x, weight), judge)
        _require_finite(session, f"{what}, zero row included", got)


def _require_finite(session: Session, what: str, result: Any) -> None:
    """Infinities and NaN are faults of their own: the host may have them, too."""
    missing = sum(int(np.sum(~np.isfinite(np.asarray(leaf)))) for leaf in tree.leaves(result))
    session.require(
        what, holds=missing == 0, got=f"{missing} that are not finite", wanted="finite numbers"
    )


# -- attention ------------------------------------------------------------------------------------


def attention(session: Session) -> None:
    """Causal, grouped and masked; a row that may attend to nothing gives 0, also backwards."""
    shapes = [(1, 9, 2, 1, 8)] if session.quick else [(1, 9, 2, 1, 8), (2, 70, 4, 2, 64)]
    for batch, length, heads, groups, width in session.cases(shapes):
        query = _normal(session, batch, length, heads, width)
        key, value = (_normal(session, batch, length, groups, width) for _ in range(2))
        weights = _normal(session, batch, length, heads, width)
        mask = session.rng.random((batch, 1, length, length)) < 0.6
        mask[:, :, ::4] = False

        def causal(query: Any, key: Any, value: Any) -> Any:
            return nn.dot_product_attention(query, key, value, is_causal=True)

        def masked(query: Any, key: Any, value: Any, mask: Array = mask) -> Any:
            return nn.dot_product_attention(query, key, value, mask=mask)

        judge = Judge(Kind.LAYER, length + width)
        for name, layer in {"causal": causal, "masked": masked}.items():
            what = f"{name} attention of {batch} x {length}, {heads}/{groups} heads of {width}"
            judged = _with_gradients(layer, weights)
            got = session.both(what, judged, (query, key, value), judge)
            _require_finite(session, what, got)
            if name == "masked":
                rows = np.asarray(got[0])[:, ::4]
                session.compare(f"{what}, rows without a key", rows, np.zeros_like(rows))


# -- cross-entropy --------------------------------------------------------------------------------


def loss(session: Session) -> None:
    """Softmax-cross-entropy of small and of very large logits, with ignored labels."""
    sizes = [(6, 50)] if session.quick else [(6, 50), (64, 4097), (33, 49_152)]
    cases = [(size, scale) for size in sizes for scale in (1.0, 1e4)]
    for (rows, classes), scale in session.cases(cases):
        logits = _normal(session, rows, classes, scale=scale)
        labels = session.rng.integers(0, classes, rows).astype(np.int32)
        labels[1] = -1

        def judged(logits: Any, labels: Array = labels) -> Any:
            return cross_entropy(logits, labels), grad(cross_entropy)(logits, labels)

        what = f"cross-entropy of {rows} x {classes}, logits of {scale:g}"
        got = session.both(what, judged, (logits,), Judge(Kind.LAYER, classes))
        _require_finite(session, what, got)


def cross_entropy(logits: Any, labels: Any) -> Any:
    """Mean over the labels that are not negative; ``logits`` is [N,C], ``labels`` int32[N]."""
    picked = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[:, None], axis=-1)[:, 0]
    losses = jnp.where(labels >= 0, nn.logsumexp(logits, axis=-1) - picked, 0.0)
    return jnp.sum(losses) / jnp.sum((labels >= 0).astype(jnp.float32))
