"""Clipping by one norm over all updates."""

from __future__ import annotations

from typing import Any

import vkjit.numpy as jnp
from vkjit import tree
from vkjit.optim.base import GradientTransformation, Params, State, stateless_init

CLIP_EPSILON = 1e-6
"""What PyTorch adds to the norm before it divides."""


def global_norm(updates: Params) -> Any:
    """Euclidean norm of all leaves together: f32 scalar, 0 for a tree without leaves.

    Squares are summed in f32, whatever the leaves' dtype. NaN or infinity in any leaf shows in
    the result.
    """
    total = jnp.zeros((), jnp.float32)
    for leaf in tree.leaves(updates):
        total = total + jnp.sum(jnp.square(leaf.astype(jnp.float32)))
    return jnp.sqrt(total)


def clip_factor(norm: Any, max_norm: float) -> Any:
    """Returns ``min(1, max_norm / (norm + 1e-6))``, the factor of `clip_by_global_norm`."""
    return jnp.minimum(1.0, max_norm / (norm + CLIP_EPSILON))


def clip_by_global_norm(max_norm: float) -> GradientTransformation:
    """Scales all updates by ``min(1, max_norm / (norm + 1e-6))``.

    This is ``torch.nn.utils.clip_grad_norm_``. Optax differs: it has no 1e-6, so there a clipped
    update has exactly the norm ``max_norm``; here it is smaller by a factor of about
    ``1 - 1e-6 / norm``. Clip after gradients have been accumulated and unscaled, since the norm
    is that of the whole step. A NaN in any leaf makes every update NaN; it is not hidden.
    Pascanu, Mikolov and Bengio 2013, arXiv:1211.5063.
    """

    def update(updates: Params, state: State, params: Params | None = None) -> tuple[Params, State]:
        del params
        factor = clip_factor(global_norm(updates), max_norm)

        def clipped(leaf: Any) -> Any:
            return (leaf * factor).astype(leaf.dtype)

        return tree.map(clipped, updates), state

    return GradientTransformation(stateless_init, update)
