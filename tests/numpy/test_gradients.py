"""Gradients through the surface against central differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import vkjit as vj
import vkjit.numpy as jnp
from vkjit import lax

RNG = np.random.default_rng(11)
X = RNG.uniform(0.4, 1.6, (3, 4)).astype(np.float32)
ROWS = np.array([2, 0, 2])
COLUMNS = np.array([[1], [3], [0]])
W = RNG.normal(size=(4, 3)).astype(np.float32)

FUNCTIONS: dict[str, Any] = {
    "getitem": lambda x: x[ROWS, ::-2] * 2,
    "getitem by arrays": lambda x: x[ROWS, COLUMNS],
    "at set": lambda x: x.at[1, 1:3].set(x[0, :2] * 3),
    "at set by array": lambda x: x.at[jnp.asarray(ROWS)].set(x * 3),
    "at add": lambda x: x.at[jnp.asarray(ROWS)].add(x * x),
    "at multiply": lambda x: x.at[jnp.asarray(ROWS)].multiply(x),
    "at max": lambda x: x.at[:, 1].max(x[:, 2] * 1.1),
    "take": lambda x: jnp.take(x, jnp.asarray(ROWS), 0),
    "take_along_axis": lambda x: jnp.take_along_axis(x, jnp.asarray(COLUMNS), 1),
    "dynamic_slice": lambda x: lax.dynamic_slice(x, (jnp.asarray(1), jnp.asarray(9)), (2, 2)),
    "dynamic_update": lambda x: lax.dynamic_update_slice(x, x[:1, :2] * 4, (jnp.asarray(1), 1)),
    "einsum": lambda x: jnp.einsum("ij,jk,ik->k", x, W, x[:, :3]),
    "matmul": lambda x: x @ W @ x,
    "norm": lambda x: jnp.linalg.norm(x, axis=1),
    "var": lambda x: x.var(1, ddof=1),
    "mean under a mask": lambda x: jnp.mean(x, 0, where=np.array([[True], [False], [True]])),
    "prod": lambda x: x.prod(1),
    "cumprod": lambda x: jnp.cumprod(x, 1),
    "cumsum": lambda x: jnp.cumsum(x) ** 2,
    "power": lambda x: x**x + x**-2 + x**1.5,
    "hypot": lambda x: jnp.hypot(x, 0.7),
    "logaddexp": lambda x: jnp.logaddexp(x, 2 * x - 1),
    "remainder": lambda x: jnp.remainder(3 * x, 1.7),
    "where": lambda x: jnp.where(X > 1, jnp.sqrt(x), x * x),
    "clip": lambda x: jnp.clip(x, 0.7, 1.3),
    "pad": lambda x: jnp.pad(x, 1, mode="reflect") * 2,
    "roll and flip": lambda x: jnp.roll(jnp.flip(x, 0), 3) * x,
    "diag": lambda x: jnp.tril(jnp.diag(x[0]) * jnp.diag(x[:, :3], -1).sum()),
    "repeat and tile": lambda x: jnp.repeat(x, 2, 0) * jnp.tile(x, (2, 1)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradient_is_the_slope(name: str) -> None:
    weights = RNG.normal(size=np.shape(FUNCTIONS[name](jnp.asarray(X)))).astype(np.float32)

    def loss(x: Any) -> Any:
        return (FUNCTIONS[name](x) * weights).sum()

    gradient = np.asarray(vj.grad(loss)(jnp.asarray(X)))
    step = 1e-2
    for at in np.ndindex(*X.shape):
        moved = [X.copy(), X.copy()]
        moved[0][at] += step
        moved[1][at] -= step
        high, low = (float(loss(jnp.asarray(m))) for m in moved)
        slope = (high - low) / (2 * step)
        assert gradient[at] == pytest.approx(slope, rel=2e-2, abs=2e-2), at
