"""Weight decay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from vkjit import tree
from vkjit.errors import ArgumentError
from vkjit.optim.base import GradientTransformation, Params, State, stateless_init

Mask: TypeAlias = Params | Callable[[Params], Params]
"""A pytree of Python bools with the structure of the parameters, or a function that makes one."""


def add_decayed_weights(weight_decay: float, mask: Mask | None = None) -> GradientTransformation:
    """Adds ``weight_decay * params`` to the updates.

    Before an adaptive scaling this is L2 regularisation (the decay passes through the moments);
    after it, decoupled decay as in AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101).

    Args:
        weight_decay: The factor on the parameters, per step and before the learning rate.
        mask: Which parameters decay: a pytree of bools shaped like the parameters, or a function
            from the parameters to one. None: all of them.

    The update raises ArgumentError where it is called without the parameters.
    """

    def update(updates: Params, state: State, params: Params | None = None) -> tuple[Params, State]:
        if params is None:
            raise ArgumentError(
                "add_decayed_weights: no parameters were given, the decay is a multiple of them; "
                "call update(updates, state, params)"
            )
        if mask is None:
            return tree.map(_decayed, updates, params), state
        chosen = mask(params) if callable(mask) else mask

        def where_chosen(update: Any, param: Any, decays: Any) -> Any:
            return _decayed(update, param) if decays else update

        return tree.map(where_chosen, updates, params, chosen), state

    def _decayed(update: Any, param: Any) -> Any:
        return update + weight_decay * param

    return GradientTransformation(stateless_init, update)
