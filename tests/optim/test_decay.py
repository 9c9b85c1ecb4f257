"""Where weight decay pulls to, and parameters that never move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import vkjit as vj
import vkjit.numpy as jnp
from vkjit import optim
from vkjit.errors import ArgumentError

START = np.array([2.0, -1.0], np.float32)


def decay_alone(rule: optim.GradientTransformation, steps: int) -> list[np.ndarray]:
    """The parameters' path from ``START`` moved to 3 * START, with gradients of zero."""
    params = {"w": jnp.asarray(START)}
    state = rule.init(params)
    params, path = {"w": jnp.asarray(3.0 * START)}, []
    for _ in range(steps):
        updates, state = rule.update({"w": jnp.zeros(2)}, state, params)
        params = optim.apply_updates(params, updates)
        path.append(np.asarray(params["w"]))
    return path


@pytest.mark.parametrize("make", [optim.adamw, optim.lion])
@pytest.mark.parametrize(("toward", "target"), [("zero", 0.0 * START), ("init", START)])
def test_decay_alone_is_geometric_toward_its_target(
    make: Callable[..., optim.GradientTransformation], toward: Any, target: np.ndarray
) -> None:
    path = decay_alone(make(0.1, weight_decay=2.0, toward=toward), 3)
    for i, found in enumerate(path, 1):
        want = target + (1 - 0.1 * 2.0) ** i * (3.0 * START - target)
        np.testing.assert_allclose(found, want, rtol=1e-6)


def test_the_initial_values_are_a_copy_that_survives_donation() -> None:
    rule = optim.adamw(0.1, weight_decay=1.0, toward="init")
    params = {"w": jnp.asarray(START)}
    state = rule.init(params)

    def step(params: Any, state: Any) -> tuple[Any, Any]:
        updates, state = rule.update({"w": jnp.ones(2)}, state, params)
        return optim.apply_updates(params, updates), state

    run = vj.jit(step, donate_argnums=(0, 1))
    for _ in range(2):
        params, state = run(params, state)
    np.testing.assert_array_equal(state[1].target["w"], START)
    assert not np.array_equal(params["w"], START)


def test_the_mask_also_spares_from_decay_toward_the_initial_values() -> None:
    rule = optim.add_decayed_weights(1.0, {"a": True, "b": False}, toward="init")
    state = rule.init({"a": jnp.ones(1), "b": jnp.ones(1)})
    moved = {"a": jnp.ones(1) * 3.0, "b": jnp.ones(1) * 3.0}
    updates, _ = rule.update({"a": jnp.zeros(1), "b": jnp.zeros(1)}, state, moved)
    assert (float(updates["a"][0]), float(updates["b"][0])) == (2.0, 0.0)


def test_frozen_parameters_never_move() -> None:
    rule = optim.chain(optim.adamw(0.1, weight_decay=0.5), optim.freeze({"a": True, "b": False}))
    params = {"a": jnp.ones(1), "b": jnp.ones(1)}
    updates, _ = rule.update({"a": jnp.ones(1), "b": jnp.ones(1)}, rule.init(params), params)
    assert float(updates["a"][0]) == 0.0
    assert float(updates["b"][0]) < 0.0


def test_mistakes_are_named() -> None:
    wrong: Any = "start"
    with pytest.raises(ArgumentError, match=r"toward='start' was given, expected 'zero' or 'init'"):
        optim.add_decayed_weights(0.1, toward=wrong)
    frozen = optim.freeze(lambda params: params)
    with pytest.raises(ArgumentError, match="freeze: no parameters were given"):
        frozen.update({"a": jnp.ones(1)}, ())
