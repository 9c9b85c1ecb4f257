"""Weight decay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import vkjit.numpy as jnp
from vkjit import tree
from vkjit.errors import ArgumentError
from vkjit.optim.base import (
    EmptyState,
    GradientTransformation,
    Params,
    State,
    stateless_init,
)

Mask: TypeAlias = Params | Callable[[Params], Params]
"""A pytree of Python bools with the structure of the parameters, or a function that makes one."""


Toward: TypeAlias = Literal["zero", "init"]
"""Where decay pulls the parameters: to zero, or to their values when the state was made."""


class DecayState(NamedTuple):
    """The values that decay pulls to: a pytree like the parameters."""

    target: Params


def add_decayed_weights(
    weight_decay: float, mask: Mask | None = None, *, toward: Toward = "zero"
) -> GradientTransformation:
    """Adds ``weight_decay * (params - target)`` to the updates.

    Before an adaptive scaling this is L2 regularisation (the decay passes through the moments);
    after it, decoupled decay as in AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101).

    The target is zero, or with ``toward="init"`` the parameters that ``init`` was given: it keeps
    a copy of them, as much memory as the parameters (L2-SP; Li et al. 2018, arXiv:1802.01483).

    Args:
        weight_decay: The factor on the distance, per step and before the learning rate.
        mask: Which parameters decay: a pytree of bools shaped like the parameters, or a function
            from the parameters to one. None: all of them.
        toward: The target.

    The update raises ArgumentError where it is called without the parameters.
    """
    if toward not in get_args(Toward):
        raise ArgumentError(
            f"add_decayed_weights: toward={toward!r} was given, expected 'zero' or 'init'; "
            "choose one of them"
        )

    def init(params: Params) -> State:
        # Copies: a step that donates parameters and state must not hand over one array twice.
        return DecayState(tree.map(_copy, params)) if toward == "init" else EmptyState()

    def update(updates: Params, state: State, params: Params | None = None) -> tuple[Params, State]:
        if params is None:
            raise ArgumentError(
                "add_decayed_weights: no parameters were given, the decay is a multiple of them; "
                "call update(updates, state, params)"
            )
        far = params if toward == "zero" else tree.map(jnp.subtract, params, state.target)
        if mask is None:
            return tree.map(_decayed, updates, far), state
        chosen = mask(params) if callable(mask) else mask

        def where_chosen(update: Any, distance: Any, decays: Any) -> Any:
            return _decayed(update, distance) if decays else update

        return tree.map(where_chosen, updates, far, chosen), state

    def _decayed(update: Any, distance: Any) -> Any:
        return update + weight_decay * distance

    return GradientTransformation(init, update)


def freeze(mask: Mask) -> GradientTransformation:
    """Makes the updates of the chosen parameters zero; last in a chain, they never move.

    Args:
        mask: Which parameters are frozen, see `add_decayed_weights`.

    The update raises ArgumentError where ``mask`` is a function and no parameters are given.
    """

    def update(updates: Params, state: State, params: Params | None = None) -> tuple[Params, State]:
        if callable(mask) and params is None:
            raise ArgumentError(
                "freeze: no parameters were given, the mask is a function of them; call "
                "update(updates, state, params)"
            )
        chosen = mask(params) if callable(mask) else mask
        return tree.map(_zero_where, updates, chosen), state

    def _zero_where(update: Any, frozen: Any) -> Any:
        return jnp.zeros_like(update) if frozen else update

    return GradientTransformation(stateless_init, update)


def _copy(param: Any) -> Any:
    # Arrays are immutable, so nothing offers copies; a sum is a new array.
    return param + jnp.zeros_like(param)
