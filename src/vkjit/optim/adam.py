"""Adam and AdamW."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import vkjit.numpy as jnp
from vkjit import tree
from vkjit.optim.base import GradientTransformation, Params, State, chain
from vkjit.optim.decay import Mask, Toward, add_decayed_weights
from vkjit.optim.scaling import scale_by_learning_rate
from vkjit.optim.schedules import Schedule


class AdamState(NamedTuple):
    """Moments of the gradient.

    ``count`` is an int32 scalar, 0 before the first step; ``mean`` and ``square`` are pytrees
    like the parameters: decaying averages of g and g², not yet corrected for their start at 0.
    """

    count: Any
    mean: Params
    square: Params


def scale_by_adam(b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> GradientTransformation:
    """Divides the mean gradient by its root mean square.

    ``m = b1 m + (1-b1) g``, ``v = b2 v + (1-b2) g²``, then the update is
    ``(m / (1-b1^t)) / (sqrt(v / (1-b2^t)) + eps)`` with t = 1 at the first step. ``eps`` is added
    outside the root, after the correction. Kingma and Ba 2015, arXiv:1412.6980.
    """

    def init(params: Params) -> AdamState:
        zeros = tree.map(jnp.zeros_like, params)
        return AdamState(jnp.zeros((), jnp.int32), zeros, tree.map(jnp.zeros_like, params))

    def update(updates: Params, state: State, params: Params | None = None) -> tuple[Params, State]:
        del params
        count = state.count + 1
        mean_correction = _one_minus_power(b1, count)
        square_correction = _one_minus_power(b2, count)
        mean = tree.map(_mean, state.mean, updates)
        square = tree.map(_square, state.square, updates)

        def direction(m: Any, v: Any) -> Any:
            return (m / mean_correction) / (jnp.sqrt(v / square_correction) + eps)

        return tree.map(direction, mean, square), AdamState(count, mean, square)

    def _mean(before: Any, gradient: Any) -> Any:
        return b1 * before + (1.0 - b1) * gradient

    def _square(before: Any, gradient: Any) -> Any:
        return b2 * before + (1.0 - b2) * jnp.square(gradient)

    return GradientTransformation(init, update)


def _one_minus_power(base: float, count: Any) -> Any:
    # expm1 keeps 1 - 0.999 to f32 accuracy; 1 - pow(base, count) would lose 5 of 24 bits or more.
    log_base = math.log(base) if base > 0.0 else -math.inf
    return -jnp.expm1(count.astype(jnp.float32) * log_base)


def adam(
    learning_rate: float | Schedule, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8
) -> GradientTransformation:
    """Adam: `scale_by_adam`, then ``-learning_rate``. No weight decay; see `adamw`."""
    return chain(scale_by_adam(b1, b2, eps), scale_by_learning_rate(learning_rate))


def adamw(  # noqa: PLR0913  the six hyperparameters of the method, in Optax's order
    learning_rate: float | Schedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-4,
    mask: Mask | None = None,
    *,
    toward: Toward = "zero",
) -> GradientTransformation:
    """Adam with decoupled weight decay.

    ``p -= learning_rate * (adam + weight_decay * p)``, which is PyTorch's
    ``p *= 1 - learning_rate * weight_decay`` followed by the Adam step, as that step does not
    read ``p``. The decay is not divided by the moments and does not enter them.
    Loshchilov and Hutter 2019, arXiv:1711.05101.

    Args:
        learning_rate: A number, or a schedule from the step count.
        b1: Decay of the mean gradient.
        b2: Decay of the mean squared gradient.
        eps: Added to the root mean square.
        weight_decay: Factor on the parameters, before the learning rate.
        mask: Which parameters decay, see `add_decayed_weights`. None: all of them.
        toward: What they decay to.
    """
    return chain(
        scale_by_adam(b1, b2, eps),
        add_decayed_weights(weight_decay, mask, toward=toward),
        scale_by_learning_rate(learning_rate),
    )
