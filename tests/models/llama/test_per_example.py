"""Gradients of each example by itself: vmap of grad over the LoRA loss equals a loop."""

from __future__ import annotations

from typing import Any

import numpy as np

import vkjit as vj
import vkjit.numpy as jnp
from vkjit import lax, random
from vkjit_models.common.gguf import LlamaHyper
from vkjit_models.llama.config import module_shapes
from vkjit_models.llama.lora import LoraSpec, init_adapters, plan_adapters
from vkjit_models.llama.model import Batch, LlamaSpec, loss_and_count

HYPER = LlamaHyper(
    vocab_size=17,
    hidden_size=8,
    intermediate_size=12,
    layers=1,
    heads=2,
    kv_heads=1,
    head_dim=4,
    rope_theta=1e4,
    rms_eps=1e-5,
    tied=True,
    context_length=16,
)
EXAMPLES, LENGTH = 3, 6


def setting() -> tuple[LlamaSpec, Any, Any, Any]:
    rng = np.random.default_rng(2)
    lora = LoraSpec(2, 4.0, ("q_proj", "down_proj"))
    spec = LlamaSpec(HYPER, lora_scale=lora.scale)
    params = {
        f"{name}.weight": rng.normal(0, 0.4, shape).astype(np.float32)
        for name, shape in module_shapes(HYPER).items()
    }
    adapters = init_adapters(plan_adapters(HYPER, lora), random.key(0))
    adapters = vj.tree.map(lambda v: v + 0.1, adapters)  # B starts at zero
    tokens = rng.integers(0, HYPER.vocab_size, (EXAMPLES, LENGTH)).astype(np.int32)
    return spec, params, adapters, tokens


def loss(setting: tuple[LlamaSpec, Any], adapters: Any, row: Any) -> Any:
    spec, params = setting
    return loss_and_count(spec, params, adapters, Batch(row[None], row[None], None, None))[0]


def clipped(setting: tuple[LlamaSpec, Any], adapters: Any, row: Any) -> tuple[Any, Any]:
    gradient = vj.grad(loss, argnums=1)(setting, adapters, row)
    norm = jnp.sqrt(sum((g**2).sum() for g in vj.tree.leaves(gradient)))
    return vj.tree.map(lambda g: g / jnp.maximum(norm, 1.0), gradient), norm


def assert_close(got: Any, want: Any) -> None:
    for g, w in zip(vj.tree.leaves(got), vj.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=5e-4, atol=2e-5)


def test_vmap_of_grad_equals_a_loop() -> None:
    spec, params, adapters, tokens = setting()

    def of_row(adapters: Any, row: Any) -> Any:
        return vj.grad(loss, argnums=1)((spec, params), adapters, row)

    per_example = vj.jit(vj.vmap(of_row, in_axes=(None, 0)))(adapters, tokens)
    for i, row in enumerate(tokens):
        assert_close(vj.tree.map(lambda v, i=i: v[i], per_example), of_row(adapters, row))


def test_clipped_gradients_are_averaged_by_a_collective() -> None:
    spec, params, adapters, tokens = setting()

    def step(adapters: Any, row: Any) -> Any:
        gradient, norm = clipped((spec, params), adapters, row)
        return lax.pmean(gradient, "batch"), norm

    mapped = vj.vmap(step, in_axes=(None, 0), out_axes=(None, 0), axis_name="batch")
    mean, norms = mapped(adapters, tokens)
    parts, alone = zip(*[clipped((spec, params), adapters, row) for row in tokens], strict=True)
    np.testing.assert_allclose(norms, alone, rtol=1e-4)
    want = vj.tree.map(lambda *gs: np.mean([np.asarray(g) for g in gs], 0), *parts)
    assert_close(mean, want)
