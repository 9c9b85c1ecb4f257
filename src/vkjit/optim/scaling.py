"""Factors on the updates: constant, from a schedule, and the learning rate."""

from __future__ import annotations

from typing import Any, NamedTuple

import vkjit.numpy as jnp
from vkjit import tree
from vkjit.optim.base import GradientTransformation, Params, State, stateless_init
from vkjit.optim.schedules import Schedule


class ScheduleState(NamedTuple):
    """How many steps have been made: int32 scalar, 0 before the first."""

    count: Any


def scale(factor: float) -> GradientTransformation:
    """Multiplies every update by ``factor``."""

    def update(updates: Params, state: State, params: Params | None = None) -> tuple[Params, State]:
        del params
        return _times(updates, factor), state

    return GradientTransformation(stateless_init, update)


def scale_by_schedule(schedule: Schedule) -> GradientTransformation:
    """Multiplies every update by ``schedule(count)``; ``count`` is 0 at the first step."""

    def init(params: Params) -> ScheduleState:
        del params
        return ScheduleState(jnp.zeros((), jnp.int32))

    def update(updates: Params, state: State, params: Params | None = None) -> tuple[Params, State]:
        del params
        return _times(updates, schedule(state.count)), ScheduleState(state.count + 1)

    return GradientTransformation(init, update)


def scale_by_learning_rate(learning_rate: float | Schedule) -> GradientTransformation:
    """Multiplies every update by ``-learning_rate``: the last part of a descent method."""
    if not callable(learning_rate):
        return scale(-learning_rate)

    def negated(count: Any) -> Any:
        return -learning_rate(count)

    return scale_by_schedule(negated)


def _times(updates: Params, factor: Any) -> Params:
    def times(update: Any) -> Any:
        return (update * factor).astype(update.dtype)

    return tree.map(times, updates)
