"""Lion: the sign of an interpolated momentum."""

from __future__ import annotations

from typing import Any, NamedTuple

import vkjit.numpy as jnp
from vkjit import tree
from vkjit.optim.base import GradientTransformation, Params, State, chain
from vkjit.optim.decay import Mask, Toward, add_decayed_weights
from vkjit.optim.scaling import scale_by_learning_rate
from vkjit.optim.schedules import Schedule


class LionState(NamedTuple):
    """The decaying mean of the gradient: a pytree like the parameters."""

    mean: Params


def scale_by_lion(b1: float = 0.9, b2: float = 0.99) -> GradientTransformation:
    """Updates by ``sign(b1 m + (1-b1) g)``, then ``m = b2 m + (1-b2) g``.

    Every entry is -1, 0 or 1: 0 where the interpolation is exactly 0.
    Chen et al. 2023, arXiv:2302.06675.
    """

    def init(params: Params) -> LionState:
        return LionState(tree.map(jnp.zeros_like, params))

    def update(updates: Params, state: State, params: Params | None = None) -> tuple[Params, State]:
        del params
        signs = tree.map(_direction, state.mean, updates)
        return signs, LionState(tree.map(_mean, state.mean, updates))

    def _direction(mean: Any, gradient: Any) -> Any:
        return jnp.sign(b1 * mean + (1.0 - b1) * gradient)

    def _mean(mean: Any, gradient: Any) -> Any:
        return b2 * mean + (1.0 - b2) * gradient

    return GradientTransformation(init, update)


def lion(  # noqa: PLR0913  the five hyperparameters of the method, and where decay pulls to
    learning_rate: float | Schedule,
    b1: float = 0.9,
    b2: float = 0.99,
    weight_decay: float = 1e-3,
    mask: Mask | None = None,
    *,
    toward: Toward = "zero",
) -> GradientTransformation:
    """Lion with decoupled weight decay.

    ``p -= learning_rate * (sign + weight_decay * p)``. Its steps all have size ``learning_rate``,
    so it wants a rate 3 to 10 times smaller than AdamW and a decay as much larger.
    Chen et al. 2023, arXiv:2302.06675.
    """
    return chain(
        scale_by_lion(b1, b2),
        add_decayed_weights(weight_decay, mask, toward=toward),
        scale_by_learning_rate(learning_rate),
    )
