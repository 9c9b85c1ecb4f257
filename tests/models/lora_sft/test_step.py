"""One optimizer step: accumulation, clipping, gradients that are not finite."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

import vkjit.numpy as jnp
from vkjit import optim, tree
from vkjit_models.lora_sft.step import Totals, TrainState, update


def weights(*values: float) -> dict[str, Any]:
    return {"w": jnp.asarray(np.array(values, np.float32))}


def state_of(optimizer: optim.GradientTransformation, adapters: dict[str, Any]) -> TrainState:
    return TrainState(adapters, optimizer.init(adapters), jnp.zeros((), jnp.int32))


def totals_of(gradient: tuple[float, ...], loss: float, count: float) -> Totals:
    return Totals(weights(*gradient), jnp.float32(loss), jnp.float32(count))


def run(gradient: tuple[float, ...], count: float, clip: float) -> tuple[TrainState, Any]:
    optimizer = optim.sgd(1.0)
    if clip:
        optimizer = optim.chain(optim.clip_by_global_norm(clip), optimizer)
    step = partial(update, optimizer, optim.schedules.constant(1.0), clip)
    return step(state_of(optimizer, weights(1.0, 1.0)), totals_of(gradient, 6.0, count))


def test_the_gradient_is_that_of_the_mean_over_all_targets() -> None:
    state, metrics = run((3.0, -6.0), 3.0, 0.0)
    np.testing.assert_allclose(state.adapters["w"], [0.0, 3.0])
    assert (float(metrics.loss), float(metrics.targets), int(state.step)) == (2.0, 3.0, 1)


def test_the_norm_is_reported_before_clipping() -> None:
    state, metrics = run((3.0, 4.0), 1.0, 1.0)
    np.testing.assert_allclose(metrics.gradient_norm, 5.0)
    np.testing.assert_allclose(state.adapters["w"], [0.4, 0.2], rtol=1e-5)
    assert (float(metrics.clipped), float(metrics.skipped)) == (1.0, 0.0)


def test_no_targets_change_nothing() -> None:
    state, metrics = run((0.0, 0.0), 0.0, 1.0)
    np.testing.assert_array_equal(state.adapters["w"], [1.0, 1.0])
    assert np.isfinite(float(metrics.loss))


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_reported() -> None:
    optimizer = optim.adamw(0.1)
    before = state_of(optimizer, weights(1.0, 2.0))
    step = partial(update, optimizer, optim.schedules.constant(0.1), 0.0)
    after, metrics = step(before, totals_of((np.nan, 1.0), 1.0, 1.0))
    assert float(metrics.skipped) == 1.0
    assert int(after.step) == 1
    old, new = (tree.leaves((s.adapters, s.optimizer)) for s in (before, after))
    for one, other in zip(old, new, strict=True):
        np.testing.assert_array_equal(one, other)
