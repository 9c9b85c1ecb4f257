"""Random numbers against JAX's, from tests/data/random/reference.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vkjit.device_array  # noqa: F401  installs device arrays and tracers with operators
import vkjit.numpy as jnp
from vkjit import random
from vkjit.errors import ArgumentError, DTypeError, ShapeError
from vkjit.ir.evaluate import evaluate
from vkjit.trace import aval_of, trace

REFERENCE: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "data" / "random" / "reference.json").read_text("utf-8")
)
LOGITS = np.array([[0, 1, 2, 3], [1, 1, -5, 0.5]], np.float32)
ROWS = np.arange(12, dtype=np.int32).reshape(4, 3)
P = np.array([0.1, 0.2, 0.3, 0.4], np.float32)
LOWS, HIGHS = np.array([0, 5, -9], np.int32), np.array([1, 50, 900], np.int32)
KEYS = {name: np.array([0, int(name)], np.uint32) for name in ("42", "7")}

Sampler = Callable[[Any], Any]
EXACT: dict[str, Sampler] = {
    "split(42)": random.split,
    "split(42, 5)": lambda k: random.split(k, 5),
    "split(42, (2, 3))": lambda k: random.split(k, (2, 3)),
    "fold_in(42, 0)": lambda k: random.fold_in(k, 0),
    "fold_in(42, 123456789)": lambda k: random.fold_in(k, 123456789),
    "fold_in(42, -1)": lambda k: random.fold_in(k, np.int32(-1)),
    "bits(42, (5,))": lambda k: random.bits(k, (5,)),
    "bits(42, (), uint16)": lambda k: random.bits(k, (), jnp.uint16),
    "bits(42, (2, 3), uint16)": lambda k: random.bits(k, (2, 3), jnp.uint16),
    "bits(7, (9,), uint8)": lambda k: random.bits(k, (9,), jnp.uint8),
    "uniform(42, (6,))": lambda k: random.uniform(k, (6,)),
    "uniform(42, (2, 3), float16)": lambda k: random.uniform(k, (2, 3), jnp.float16),
    "uniform(42, (5,), bfloat16)": lambda k: random.uniform(k, (5,), jnp.bfloat16),
    "bernoulli(42, 0.3, (16,))": lambda k: random.bernoulli(k, 0.3, (16,)),
    "randint(42, (8,), 0, 10)": lambda k: random.randint(k, (8,), 0, 10),
    "randint(42, (6,), -1000000, 2000000000)": lambda k: random.randint(
        k, (6,), -1000000, 2000000000
    ),
    "randint(7, (6,), 0, 256, uint8)": lambda k: random.randint(k, (6,), 0, 256, jnp.uint8),
    "randint(7, (6,), -5, 100, int16)": lambda k: random.randint(k, (6,), -5, 100, jnp.int16),
    "randint(7, (4,), 3, 3)": lambda k: random.randint(k, (4,), 3, 3),
    "randint(42, (2, 3), lows, highs)": lambda k: random.randint(k, (2, 3), LOWS, HIGHS),
    "permutation(42, 10)": lambda k: random.permutation(k, 10),
    "permutation(7, 100)": lambda k: random.permutation(k, 100),
    "permutation(42, rows)": lambda k: random.permutation(k, ROWS),
    "permutation(42, columns)": lambda k: random.permutation(k, ROWS, 1),
    "permutation(42, independent)": lambda k: random.permutation(k, ROWS, independent=True),
    "categorical(42, logits)": lambda k: random.categorical(k, LOGITS),
    "categorical(42, logits, 0)": lambda k: random.categorical(k, LOGITS, 0),
    "categorical(42, logits, shape)": lambda k: random.categorical(k, LOGITS, shape=(5, 2)),
    "rademacher(42, (8,))": lambda k: random.rademacher(k, (8,)),
    "choice(42, 10, (6,))": lambda k: random.choice(k, 10, (6,)),
    "choice(42, 10, (4,), no)": lambda k: random.choice(k, 10, (4,), replace=False),
    "choice(42, 4, (6,), p)": lambda k: random.choice(k, 4, (6,), p=P),
}
CLOSE: dict[str, Sampler] = {
    "uniform(7, (5,), float32, -2, 2)": lambda k: random.uniform(k, (5,), jnp.float32, -2.0, 2.0),
    "normal(42, (8,))": lambda k: random.normal(k, (8,)),
    "normal(7, (2, 3), float16)": lambda k: random.normal(k, (2, 3), jnp.float16),
    "normal(7, (4,), bfloat16)": lambda k: random.normal(k, (4,), jnp.bfloat16),
    "truncated_normal(42, -1, 2, (6,))": lambda k: random.truncated_normal(k, -1.0, 2.0, (6,)),
    "gumbel(42, (6,))": lambda k: random.gumbel(k, (6,)),
    "exponential(42, (6,))": lambda k: random.exponential(k, (6,)),
    "laplace(42, (6,))": lambda k: random.laplace(k, (6,)),
    "logistic(42, (6,))": lambda k: random.logistic(k, (6,)),
}


def expected(name: str) -> np.ndarray:
    entry = REFERENCE[name]
    dtype = jnp.zeros((), entry["dtype"]).dtype
    bits = np.array(entry["bits"], f"u{dtype.itemsize}" if dtype.kind not in "biu" else dtype)
    return bits.view(dtype).reshape(entry["shape"])


def key_of(name: str) -> np.ndarray:
    return KEYS[name[name.index("(") + 1 :].split(",")[0].rstrip(")")]


def eager(fn: Sampler, key: np.ndarray) -> np.ndarray:
    return np.asarray(fn(jnp.asarray(key)))


def traced(fn: Sampler, key: Any) -> np.ndarray:
    staged = trace(lambda k: [fn(k)], [aval_of(key)])
    captured = [np.asarray(v) for v in staged.captured]
    return np.asarray(evaluate(staged.program, [*captured, key])[0])


@pytest.mark.parametrize("run", [eager, traced])
@pytest.mark.parametrize("name", EXACT)
def test_integers_bits_and_unit_uniforms_equal_jax(name: str, run: Callable[..., Any]) -> None:
    got, want = run(EXACT[name], key_of(name)), expected(name)
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("run", [eager, traced])
@pytest.mark.parametrize("name", CLOSE)
def test_other_floats_agree_up_to_rounding(name: str, run: Callable[..., Any]) -> None:
    got, want = run(CLOSE[name], key_of(name)), expected(name)
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    eps = float(jnp.finfo(want.dtype).eps)
    np.testing.assert_allclose(
        got.astype(np.float64), want.astype(np.float64), rtol=8 * eps, atol=4 * eps
    )


@pytest.mark.parametrize("seed", [0, 42, -3, 2**40 + 5])
def test_a_seed_makes_jax_key(seed: int) -> None:
    name = "PRNGKey(2**40+5)" if seed > 2**40 else f"PRNGKey({seed})"
    np.testing.assert_array_equal(np.asarray(random.PRNGKey(seed)), expected(name))


def test_a_seed_may_be_traced() -> None:
    got = traced(random.PRNGKey, np.int32(-3))
    np.testing.assert_array_equal(got, expected("PRNGKey(-3)"))


def test_keys_of_another_kind_are_refused() -> None:
    with pytest.raises(DTypeError, match=r"uniform: key f32\[2\], expected u32\[2\]"):
        random.uniform(np.zeros(2, np.float32), (3,))
    with pytest.raises(DTypeError, match="expected a float"):
        random.bernoulli(KEYS["42"], 1, (3,))
    with pytest.raises(ShapeError, match="rank 0"):
        random.PRNGKey(np.arange(3))
    with pytest.raises(DTypeError, match="expected uint8"):
        random.bits(KEYS["42"], (3,), jnp.float32)


def test_a_long_permutation_inside_a_trace_says_what_to_do() -> None:
    with pytest.raises(ArgumentError, match="call it outside"):
        traced(lambda k: random.permutation(k, random.PAIRWISE_LIMIT + 1), KEYS["42"])


def test_moments_of_many_samples() -> None:
    key = random.PRNGKey(3)
    draws = np.asarray(random.normal(key, (20000,)))
    assert abs(draws.mean()) < 0.03
    assert abs(draws.std() - 1) < 0.03
    inside = np.asarray(random.truncated_normal(key, -0.5, 0.25, (5000,)))
    assert inside.min() > -0.5
    assert inside.max() < 0.25
