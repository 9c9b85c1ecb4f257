"""Gradient descent, with and without momentum."""

from __future__ import annotations

from typing import Any, NamedTuple

import vkjit.numpy as jnp
from vkjit import tree
from vkjit.optim.base import GradientTransformation, Params, State, chain
from vkjit.optim.scaling import scale_by_learning_rate
from vkjit.optim.schedules import Schedule


class MomentumState(NamedTuple):
    """The velocity: a pytree like the parameters, zeros before the first step."""

    velocity: Params


def scale_by_momentum(decay: float, *, nesterov: bool = False) -> GradientTransformation:
    """Replaces updates by their decaying sum: ``b = decay * b + g``.

    With ``nesterov`` the result is ``g + decay * b``, otherwise ``b``. There is no damping, as in
    PyTorch's default and Optax's ``trace``: the first velocity is the first gradient.
    Polyak 1964; Sutskever et al. 2013 (ICML) for the Nesterov form.
    """

    def init(params: Params) -> MomentumState:
        return MomentumState(tree.map(jnp.zeros_like, params))

    def update(updates: Params, state: State, params: Params | None = None) -> tuple[Params, State]:
        del params
        velocity = tree.map(_accumulate, state.velocity, updates)
        if nesterov:
            return tree.map(_accumulate, velocity, updates), MomentumState(velocity)
        return velocity, MomentumState(velocity)

    def _accumulate(before: Any, gradient: Any) -> Any:
        return decay * before + gradient

    return GradientTransformation(init, update)


def sgd(
    learning_rate: float | Schedule, momentum: float = 0.0, *, nesterov: bool = False
) -> GradientTransformation:
    """Stochastic gradient descent: ``p -= learning_rate * g``.

    With ``momentum`` the velocity of `scale_by_momentum` takes the place of ``g``. Coupled weight
    decay as in ``torch.optim.SGD`` is ``chain(add_decayed_weights(wd), sgd(...))``.
    """
    step = scale_by_learning_rate(learning_rate)
    if not momentum:
        return step
    return chain(scale_by_momentum(momentum, nesterov=nesterov), step)


def momentum(
    learning_rate: float | Schedule, decay: float = 0.9, *, nesterov: bool = False
) -> GradientTransformation:
    """Gradient descent with momentum: `sgd` whose ``momentum`` is ``decay``."""
    return sgd(learning_rate, decay, nesterov=nesterov)
