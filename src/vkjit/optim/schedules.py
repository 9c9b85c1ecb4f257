"""Learning rates as functions of the step count.

The count is 0 at the first step, as in Hugging Face transformers and Optax. With a warm-up the
first step therefore has the rate 0: it moves no parameter, but its gradient enters the moments.
Past ``total_steps`` a schedule stays at its end value (the cosine of transformers would rise
again). Values are f32 scalars.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import vkjit.numpy as jnp
from vkjit.errors import ArgumentError


class Schedule(Protocol):
    """A pure function from the number of steps already made to a factor."""

    def __call__(self, count: Any, /) -> Any:
        """Returns the f32 scalar for ``count`` (an int32 scalar or a Python int)."""
        ...


def constant(value: float, warmup_steps: int = 0) -> Schedule:
    """``value``, after a linear rise from 0 over ``warmup_steps`` steps."""

    def body(progress: Any) -> Any:
        return jnp.ones_like(progress)

    return _with_warmup(value, 1, warmup_steps, body)


def linear(peak: float, total_steps: int, warmup_steps: int = 0, end: float = 0.0) -> Schedule:
    """Rises from 0 to ``peak`` over the warm-up, then falls in a line to ``end``.

    ``end`` is reached when ``total_steps`` steps have been made, so the last of them still has a
    rate above it.
    """

    def body(progress: Any) -> Any:
        return 1.0 - progress * (1.0 - end / peak)

    _check_peak("linear", peak)
    return _with_warmup(peak, total_steps, warmup_steps, body)


def cosine(peak: float, total_steps: int, warmup_steps: int = 0, end: float = 0.0) -> Schedule:
    """Rises from 0 to ``peak`` over the warm-up, then falls to ``end`` along half a cosine.

    ``end + (peak - end) (1 + cos(pi progress)) / 2``, where ``progress`` runs from 0 at the end of
    the warm-up to 1 after ``total_steps``. Loshchilov and Hutter 2017, arXiv:1608.03983, without
    restarts.
    """

    def body(progress: Any) -> Any:
        share = end / peak
        return share + (1.0 - share) * 0.5 * (1.0 + jnp.cos(math.pi * progress))

    _check_peak("cosine", peak)
    return _with_warmup(peak, total_steps, warmup_steps, body)


def join(schedules: Sequence[Schedule], boundaries: Sequence[int]) -> Schedule:
    """Uses ``schedules[i]`` up to the count ``boundaries[i]``, then the next one.

    Each schedule counts from 0 at its own start, as in Optax's ``join_schedules``.

    Raises:
        ArgumentError: There is not exactly one boundary between each two schedules, or they do
            not rise.
    """
    if len(boundaries) != len(schedules) - 1:
        raise ArgumentError(
            f"join: {len(schedules)} schedules and {len(boundaries)} boundaries were given, "
            f"expected one boundary between each two schedules; give {len(schedules) - 1}"
        )
    if any(b <= a for a, b in itertools.pairwise(boundaries)):
        raise ArgumentError(
            f"join: boundaries {list(boundaries)} were given, expected rising counts; sort them"
        )

    def schedule(count: Any) -> Any:
        count = jnp.asarray(count, jnp.int32)
        value = schedules[0](count)
        for boundary, after in zip(boundaries, schedules[1:], strict=True):
            value = jnp.where(count < boundary, value, after(count - boundary))
        return value

    return schedule


def _with_warmup(
    peak: float, total_steps: int, warmup_steps: int, body: Callable[[Any], Any]
) -> Schedule:
    if warmup_steps < 0 or total_steps < 1:
        raise ArgumentError(
            f"schedule: warmup_steps={warmup_steps} and total_steps={total_steps} were given, "
            "expected warmup_steps >= 0 and total_steps >= 1; correct them"
        )
    span = max(1, total_steps - warmup_steps)

    def schedule(count: Any) -> Any:
        steps = jnp.asarray(count).astype(jnp.float32)
        progress = jnp.clip((steps - warmup_steps) / span, 0.0, 1.0)
        factor = body(progress)
        if warmup_steps:
            factor = jnp.where(steps < warmup_steps, steps / warmup_steps, factor)
        return peak * factor

    return schedule


def _check_peak(name: str, peak: float) -> None:
    if peak <= 0:
        raise ArgumentError(
            f"{name}: peak={peak} was given, expected a positive rate; use constant(0.0) for none"
        )
