"""A linear head and its losses in float64: what the blockwise ones are compared with."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class Head(NamedTuple):
    """Hidden states [N,d] of two models, the head [V,d], targets [N], cotangents f32 [N]."""

    hidden: np.ndarray
    base: np.ndarray
    weight: np.ndarray
    targets: np.ndarray
    cotangent: np.ndarray


def make_head(seed: int, rows: int, vocabulary: int, width: int, dtype: Any = np.float32) -> Head:
    """Random operands; every third row or so has no target."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32).astype(dtype)

    targets = rng.integers(0, vocabulary, rows).astype(np.int32)
    targets[rng.random(rows) < 0.3] = -1
    hidden, base, weight = normal(rows, width), normal(rows, width), normal(vocabulary, width)
    return Head(hidden, base, weight, targets, rng.normal(size=rows).astype(np.float32))


def log_softmax(z: np.ndarray) -> np.ndarray:
    shifted = z - z.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def onehot(head: Head) -> np.ndarray:
    """Float64 [N,V], rows of zeros where there is no target."""
    return (np.arange(len(head.weight)) == head.targets[:, None]).astype(np.float64)


def cross_entropy(
    head: Head, smoothing: float, z_loss: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Losses, and the cotangents of hidden states and head."""
    hidden, weight = (np.asarray(x, np.float64) for x in (head.hidden, head.weight))
    z, counted = hidden @ weight.T, head.targets >= 0
    logp = log_softmax(z)
    lse = (z - logp)[:, 0]
    labels = (1 - smoothing) * onehot(head) + smoothing / len(weight)
    losses = np.where(counted, -(labels * logp).sum(-1) + z_loss * lse**2, 0.0)
    slope = (1 + 2 * z_loss * lse)[:, None] * np.exp(logp) - labels
    return losses, *_pulled(head, slope)


def divergence(
    head: Head, direction: str, *, masked: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Divergences, and the cotangents of hidden states and head."""
    weight = np.asarray(head.weight, np.float64)
    out = onehot(head) > 0 if masked else np.zeros((len(head.targets), len(weight)), bool)
    logits = (np.asarray(x, np.float64) @ weight.T for x in (head.hidden, head.base))
    logp, logq = (log_softmax(np.where(out, -1e300, z)) for z in logits)
    logp, logq = (np.where(out, -np.inf, x) for x in (logp, logq))
    p, q = np.exp(logp), np.exp(logq)
    apart = np.where(out, 0.0, np.where(out, 0.0, logp) - np.where(out, 0.0, logq))
    if direction == "adapted||base":
        found = (p * apart).sum(-1)
        slope = p * (apart - found[:, None])
    else:
        found, slope = -(q * apart).sum(-1), p - q
    return np.where(head.targets >= 0, found, 0.0), *_pulled(head, slope)


def _pulled(head: Head, slope: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    hidden, weight = (np.asarray(x, np.float64) for x in (head.hidden, head.weight))
    slope = slope * np.where(head.targets >= 0, head.cotangent, 0.0)[:, None]
    return slope @ weight, slope.T @ hidden
