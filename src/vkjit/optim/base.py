"""The pair of functions that every optimizer is, and how pairs are put together."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, TypeAlias

from vkjit import tree

Params: TypeAlias = Any
"""A pytree of arrays: parameters, or anything shaped like them (gradients, updates)."""

State: TypeAlias = Any
"""A pytree of arrays: what a transformation remembers from one step to the next."""


class InitFn(Protocol):
    """Makes the state of the first step."""

    def __call__(self, params: Params) -> State:
        """Returns the state for ``params``.

        Only decay toward the initial values reads more of them than shapes and dtypes.
        """
        ...


class UpdateFn(Protocol):
    """Turns updates (at first: gradients) into other updates."""

    def __call__(
        self, updates: Params, state: State, params: Params | None = None
    ) -> tuple[Params, State]:
        """Returns the new updates, shaped like ``updates``, and the next state."""
        ...


class GradientTransformation(NamedTuple):
    """An optimizer, or a part of one: a pure ``init`` and a pure ``update``.

    ``update(updates, state, params)`` returns ``(updates, state)``; the result is meant to be
    *added* to the parameters (`apply_updates`), so a full optimizer ends with the factor
    ``-learning_rate``. Both functions can be traced and are safe under ``jit``.
    """

    init: InitFn
    update: UpdateFn


class EmptyState(NamedTuple):
    """State of a transformation that remembers nothing."""


def stateless_init(params: Params) -> EmptyState:
    """Returns the state of a transformation that remembers nothing."""
    del params
    return EmptyState()


def identity() -> GradientTransformation:
    """Leaves the updates as they are."""

    def update(updates: Params, state: State, params: Params | None = None) -> tuple[Params, State]:
        del params
        return updates, state

    return GradientTransformation(stateless_init, update)


def chain(*transformations: GradientTransformation) -> GradientTransformation:
    """Applies ``transformations`` one after another, the first one to the gradients.

    The state is the tuple of their states, in the same order.
    """

    def init(params: Params) -> State:
        return tuple(part.init(params) for part in transformations)

    def update(updates: Params, state: State, params: Params | None = None) -> tuple[Params, State]:
        after: list[State] = []
        for part, before in zip(transformations, state, strict=True):
            updates, new = part.update(updates, before, params)
            after.append(new)
        return updates, tuple(after)

    return GradientTransformation(init, update)


def apply_updates(params: Params, updates: Params) -> Params:
    """Returns ``params + updates``, each leaf in the dtype of its parameter."""

    def add(param: Any, update: Any) -> Any:
        return (param + update).astype(param.dtype)

    return tree.map(add, params, updates)
