"""Optimizers against PyTorch and lion-pytorch (golden/ops), and the laws of composition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import vkjit as vj
import vkjit.numpy as jnp
from vkjit import optim
from vkjit.errors import ArgumentError

LR_MULTIPLIERS = (1.0, 1.0, 0.5, 0.5, 0.25, 0.0)  # of golden/ops/index.json, one a step


def stepped(peak: float) -> optim.Schedule:
    """The learning rates of the golden runs."""
    table = np.asarray([peak * m for m in LR_MULTIPLIERS], np.float32)
    return lambda count: jnp.take(jnp.asarray(table), count)


GOLDEN = {
    "optim_adamw": lambda: optim.adamw(stepped(1e-2), weight_decay=0.1),
    "optim_adamw_amsgrad_off_eps1e-6_b2_95": lambda: optim.adamw(
        stepped(3e-3), b1=0.8, b2=0.95, eps=1e-6, weight_decay=0.01
    ),
    "optim_adam_l2": lambda: optim.chain(optim.add_decayed_weights(0.1), optim.adam(stepped(1e-2))),
    "optim_sgd": lambda: optim.sgd(stepped(0.1)),
    "optim_sgd_momentum": lambda: optim.chain(
        optim.add_decayed_weights(0.01), optim.momentum(stepped(0.05), 0.9)
    ),
    "optim_sgd_nesterov": lambda: optim.sgd(stepped(0.05), 0.9, nesterov=True),
    "optim_lion": lambda: optim.lion(stepped(1e-3), weight_decay=0.1),
}


def run(
    optimizer: optim.GradientTransformation, params: Any, gradients: list[Any]
) -> list[dict[str, np.ndarray]]:
    """Parameters after each step, every step compiled."""

    @vj.jit
    def step(params: Any, state: Any, gradient: Any) -> Any:
        updates, state = optimizer.update(gradient, state, params)
        return optim.apply_updates(params, updates), state

    state, after = optimizer.init(params), []
    for gradient in gradients:
        params, state = step(params, state, gradient)
        after.append({name: np.asarray(value) for name, value in params.items()})
    return after


@pytest.mark.parametrize("name", GOLDEN)
def test_matches_the_reference_after_every_step(name: str, shared: Path) -> None:
    data = load_file(shared / "golden" / "ops" / f"{name}.safetensors")
    params = {leaf: jnp.asarray(data[f"in.{leaf}"]) for leaf in ("b", "w")}
    gradients = [
        {leaf: jnp.asarray(data[f"in.grad.{leaf}"][i]) for leaf in ("b", "w")} for i in range(6)
    ]
    for i, after in enumerate(run(GOLDEN[name](), params, gradients)):
        for leaf, value in after.items():
            want = data[f"out.{leaf}"][i]
            # f32 rounding of the parameter itself, once per step
            np.testing.assert_allclose(value, want, rtol=0, atol=4e-7 * np.abs(want).max())


def test_clipping_matches_torch(shared: Path) -> None:
    data = load_file(shared / "golden" / "ops" / "clip_global_norm.safetensors")
    for case in range(3):
        grads = {g: jnp.asarray(data[f"in.{case}.{g}"]) for g in ("g0", "g1", "g2")}
        clip = optim.clip_by_global_norm(float(data[f"in.{case}.max_norm"][0]))
        clipped, _ = clip.update(grads, clip.init(grads))
        np.testing.assert_allclose(optim.global_norm(grads), data[f"out.{case}.norm"][0], rtol=1e-6)
        for name, value in clipped.items():
            np.testing.assert_allclose(value, data[f"out.{case}.{name}"], rtol=1e-6, atol=0)


def test_clipping_leaves_small_gradients_alone_and_shows_nan() -> None:
    clip = optim.clip_by_global_norm(1.0)
    small = {"a": jnp.asarray(np.array([0.3, -0.4], np.float32))}
    np.testing.assert_array_equal(clip.update(small, ())[0]["a"], np.array([0.3, -0.4], np.float32))
    bad = {"a": jnp.asarray(np.array([np.nan], np.float32)), "b": jnp.ones(2, jnp.float32)}
    assert np.isnan(np.asarray(clip.update(bad, ())[0]["b"])).all()


def test_global_norm_of_nothing_is_zero() -> None:
    assert float(optim.global_norm({})) == 0.0


def test_chain_applies_the_first_part_to_the_gradient() -> None:
    clip_then_double = optim.chain(optim.clip_by_global_norm(1.0), optim.scale(2.0))
    double_then_clip = optim.chain(optim.scale(2.0), optim.clip_by_global_norm(1.0))
    grad = {"a": jnp.asarray(np.array([3.0, 4.0], np.float32))}
    first, _ = clip_then_double.update(grad, clip_then_double.init(grad))
    second, _ = double_then_clip.update(grad, double_then_clip.init(grad))
    np.testing.assert_allclose(first["a"], [1.2, 1.6], rtol=1e-6)
    np.testing.assert_allclose(second["a"], [0.6, 0.8], rtol=1e-6)


@pytest.mark.parametrize("make_mask", [lambda _: {"a": True, "b": False}, None])
def test_decay_spares_what_the_mask_leaves_out(make_mask: Any) -> None:
    params = {"a": jnp.ones(2, jnp.float32), "b": jnp.ones(2, jnp.float32)}
    zeros = {name: jnp.zeros(2, jnp.float32) for name in params}
    mask = {"a": True, "b": False} if make_mask is None else make_mask
    optimizer = optim.adamw(0.1, weight_decay=0.5, mask=mask)
    after = run(optimizer, params, [zeros])[0]
    np.testing.assert_allclose(after["a"], 0.95, rtol=1e-6)
    np.testing.assert_array_equal(after["b"], np.float32(1.0))


def test_decay_without_parameters_is_an_error_that_says_what_to_call() -> None:
    decay = optim.add_decayed_weights(0.1)
    with pytest.raises(ArgumentError, match=r"call update\(updates, state, params\)"):
        decay.update({"a": jnp.ones(2)}, ())


def test_updates_keep_the_dtype_of_the_parameter() -> None:
    params = {"a": jnp.ones(3, jnp.float16)}
    updates = {"a": jnp.full((3,), 0.25, jnp.float32)}
    after = optim.apply_updates(params, updates)["a"]
    assert after.dtype == np.float16
    np.testing.assert_array_equal(np.asarray(after), np.float16(1.25))


def test_identity_and_scale_by_schedule() -> None:
    both = optim.chain(optim.identity(), optim.scale_by_schedule(lambda n: n + 1.0))
    grad, seen = {"a": jnp.ones(1, jnp.float32)}, []
    state = both.init(grad)
    for _ in range(3):
        updates, state = both.update(grad, state)
        seen.append(float(updates["a"][0]))
    assert seen == [1.0, 2.0, 3.0]


def test_adam_is_exact_at_the_first_step() -> None:
    """Bias correction must undo (1-b2) to f32 accuracy: the first step has size lr * sign(g)."""
    params = {"a": jnp.zeros(4, jnp.float32)}
    grad = {"a": jnp.asarray(np.array([1e-3, -2.0, 7.5, -1e3], np.float32))}
    after = run(optim.adam(0.5, eps=0.0), params, [grad])[0]["a"]
    np.testing.assert_allclose(after, [-0.5, 0.5, -0.5, 0.5], rtol=5e-7)
