"""One optimizer step: accumulation, clipping, gradients that are not finite."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import vkjit.numpy as jnp
from vkjit import optim, tree
from vkjit_models.lora_sft.config import RunConfig
from vkjit_models.lora_sft.step import (
    Totals,
    TrainState,
    UpdateSpec,
    make_optimizer,
    make_schedule,
    rates_of,
    scaled_update,
    start,
    unscale_and_clip,
    update,
)


def weights(*values: float) -> dict[str, Any]:
    return {"w": jnp.asarray(np.array(values, np.float32))}


def totals_of(gradient: tuple[float, ...], loss: float, count: float, scale: float = 1.0) -> Totals:
    values = (loss, count, scale, loss, np.nan, np.nan)
    numbers = (jnp.asarray(np.float32(x)) for x in values)
    return Totals(weights(*gradient), *numbers)


def run(gradient: tuple[float, ...], count: float, clip: float) -> tuple[TrainState, Any]:
    optimizer = optim.sgd(1.0)
    step = partial(update, optimizer, optim.schedules.constant(1.0), UpdateSpec(clip))
    return step(start(optimizer, weights(1.0, 1.0)), totals_of(gradient, 6.0, count))


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
    before = start(optimizer, weights(1.0, 2.0))
    step = partial(update, optimizer, optim.schedules.constant(0.1), UpdateSpec())
    after, metrics = step(before, totals_of((np.nan, 1.0), 1.0, 1.0))
    assert float(metrics.skipped) == 1.0
    assert int(after.step) == 1
    old, new = (tree.leaves((s.adapters, s.optimizer)) for s in (before, after))
    for one, other in zip(old, new, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_skipped_step_takes_its_place_in_the_schedule(config: RunConfig) -> None:
    """The logged rate is the one that the weights were moved with, also after a skipped step."""
    section = config.optimizer.model_copy(
        update={"name": "sgd", "clip_norm": 1e6, "decay_toward": "init"}
    )
    config = config.model_copy(update={"optimizer": section})
    rates = rates_of(section)
    optimizer = make_optimizer(section, make_schedule(config, rates.learning_rate), rates)
    state = start(optimizer, weights(0.0))
    rows: list[tuple[float, float, float]] = []
    for gradient in (np.inf, 1.0, np.nan, 1.0):
        before = float(state.adapters["w"][0])
        state, metrics = scaled_update(config, (), state, totals_of((gradient,), 1.0, 1.0), rates)
        moved = before - float(state.adapters["w"][0])
        rows.append((moved, float(metrics.skipped), float(metrics.clipped)))
        if not metrics.skipped:
            np.testing.assert_allclose(moved, float(metrics.learning_rate), rtol=1e-5)
    # A warm-up of one step of four, then half a cosine: rates 0, 1, 3/4, 1/4 of 0.01.
    want = [(0.0, 1.0, 0.0), (0.01, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0025, 0.0, 0.0)]
    np.testing.assert_allclose(rows, want, rtol=1e-5)


def test_clipping_is_that_of_the_optimizers_library() -> None:
    gradients = {
        "a": jnp.asarray(np.array([3.0, -1.0], np.float32)),
        "b": jnp.asarray(np.array([[4.0]], np.float32)),
    }
    clip = optim.clip_by_global_norm(1.5)
    want, _ = clip.update(gradients, clip.init(gradients))
    got, norm, factor = unscale_and_clip(gradients, 1.0, 1.5)
    np.testing.assert_allclose(norm, np.sqrt(26.0), rtol=1e-6)
    assert float(factor) < 1.0
    for name, array in want.items():
        np.testing.assert_array_equal(got[name], array)


@pytest.mark.parametrize("scale", [1.0, 128.0, 65536.0])
def test_the_loss_scale_does_not_change_the_step(scale: float) -> None:
    optimizer, rule = optim.adamw(0.1), UpdateSpec(1.0)
    step = partial(update, optimizer, optim.schedules.constant(0.1), rule)
    before = start(optimizer, weights(1.0, 2.0), scale)
    plain, _ = step(before, totals_of((3.0, -5.0), 6.0, 2.0))
    after, metrics = step(before, totals_of((3.0 * scale, -5.0 * scale), 6.0, 2.0, scale))
    assert float(metrics.loss_scale) == scale
    np.testing.assert_array_equal(after.adapters["w"], plain.adapters["w"])
    np.testing.assert_allclose(metrics.gradient_norm, np.sqrt(34.0) / 2.0, rtol=1e-6)


def test_a_growing_loss_scale_doubles_and_halves() -> None:
    optimizer, rule = optim.sgd(0.1), UpdateSpec(0.0, scale_growth=2)
    step = partial(update, optimizer, optim.schedules.constant(0.1), rule)
    state, scales = start(optimizer, weights(1.0), 8.0), []
    for gradient in (1.0, 1.0, 1.0, np.inf, 1.0, 1.0, 1.0):
        state, metrics = step(state, totals_of((gradient,), 1.0, 1.0, float(state.loss_scale)))
        scales.append((float(state.loss_scale), float(metrics.skipped)))
    assert scales == [(8, 0), (16, 0), (16, 0), (8, 1), (8, 0), (16, 0), (16, 0)]


def test_the_update_ratio_is_the_way_over_the_norm() -> None:
    state, metrics = run((3.0, 4.0), 1.0, 1.0)
    np.testing.assert_allclose(
        metrics.update_ratio, 1.0 / np.linalg.norm(np.asarray(state.adapters["w"])), rtol=1e-5
    )
