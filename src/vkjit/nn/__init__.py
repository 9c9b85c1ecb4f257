"""Functions of neural networks, composed from `vkjit.numpy`.

Names, argument order and values follow ``jax.nn`` where it has the function. Gradients come from
differentiating the compositions, which are written so that neither values nor gradients turn into
NaN at large arguments.
"""

from __future__ import annotations

from vkjit.nn._cross_entropy import linear_cross_entropy
from vkjit.nn._divergence import kl_divergence, target_masked_kl
from vkjit.nn._functions import (
    dot_product_attention,
    gelu,
    layer_norm,
    log_sigmoid,
    log_softmax,
    logsumexp,
    one_hot,
    relu,
    rms_norm,
    sigmoid,
    silu,
    softmax,
    softplus,
)
from vkjit.nn._linear_divergence import linear_kl_divergence, linear_target_masked_kl

__all__ = [
    "dot_product_attention",
    "gelu",
    "kl_divergence",
    "layer_norm",
    "linear_cross_entropy",
    "linear_kl_divergence",
    "linear_target_masked_kl",
    "log_sigmoid",
    "log_softmax",
    "logsumexp",
    "one_hot",
    "relu",
    "rms_norm",
    "sigmoid",
    "silu",
    "softmax",
    "softplus",
    "target_masked_kl",
]
