"""Attention in runs of queries: the values and gradients of attention at once, in less memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import vkjit as vj
import vkjit.numpy as jnp
from vkjit_models.llama import attention
from vkjit_models.llama.attention import causal_attention

LENGTH, HEADS, KEY_HEADS, WIDTH = 40, 4, 2, 8


def given(seed: int) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    heads = (HEADS, KEY_HEADS, KEY_HEADS, HEADS)
    return [generator.standard_normal((2, LENGTH, n, WIDTH), dtype=np.float32) for n in heads]


def value_and_gradients(segments: Any) -> tuple[Any, Any]:
    query, key, value, cotangent = (jnp.asarray(x) for x in given(3))

    @vj.jit
    def run(*qkv: Any) -> Any:
        out, pull = vj.vjp(lambda q, k, v: causal_attention(q, k, v, segments), *qkv)
        return out, pull(cotangent)

    return run(query, key, value)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("run", [16, 20, 39])
def test_runs_give_what_attention_at_once_gives(
    monkeypatch: pytest.MonkeyPatch,
    run: int,
    packed: bool,  # noqa: FBT001  a parameter of the test
) -> None:
    segments = None
    if packed:
        lengths = np.array([[7, 12, 21], [1, 30, 9]])
        segments = jnp.asarray(
            np.stack([np.repeat(np.arange(3, dtype=np.int32), n) for n in lengths])
        )
    out, gradients = value_and_gradients(segments)
    monkeypatch.setattr(attention, "WHOLE_SCORES", 0)
    monkeypatch.setattr(attention, "RUN", run)
    in_runs, run_gradients = value_and_gradients(segments)
    np.testing.assert_allclose(in_runs, out, rtol=0, atol=1e-6)
    for got, wanted in zip(run_gradients, gradients, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=5e-6)


def test_the_scores_of_all_queries_never_exist() -> None:
    length, heads = 2048, 12
    shapes = ((1, length, heads, 64), (1, length, 2, 64), (1, length, 2, 64))
    query, key, value = (vj.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes)

    def loss(query: Any, key: Any, value: Any) -> Any:
        return jnp.sum(causal_attention(query, key, value, None).astype(jnp.float32))

    memory = vj.jit(vj.grad(loss, argnums=(0, 1, 2))).lower(query, key, value).memory()
    assert memory.peak < 4 * heads * length**2
