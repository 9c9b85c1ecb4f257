"""A model of two layers with random weights, small enough to be computed again in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

import vkjit.numpy as jnp
from vkjit_models.common.gguf import LlamaHyper
from vkjit_models.llama.config import module_shapes
from vkjit_models.llama.lora import LoraPlan
from vkjit_models.llama.model import Inputs, LoraPair

HYPER = LlamaHyper(
    vocab_size=11,
    hidden_size=8,
    intermediate_size=12,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=4,
    rope_theta=1e4,
    rms_eps=1e-5,
    tied=True,
    context_length=16,
)
INPUTS = Inputs(jnp.asarray(np.array([1, 2, 3, 9, 4], np.int32)))


def random_params(seed: int = 0, hyper: LlamaHyper = HYPER) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        f"{name}.weight": jnp.asarray(
            np.float32(rng.normal(size=shape) * 0.3 if len(shape) == 2 else np.ones(shape))
        )
        for name, shape in module_shapes(hyper).items()
    }


def random_adapters(plan: LoraPlan, seed: int = 1) -> dict[str, LoraPair]:
    """A, B and magnitudes that are not those of a start."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> Any:
        return jnp.asarray(np.float32(rng.normal(size=shape) * 0.3))

    return {
        row.module: LoraPair(
            draw(row.rank, row.shape[1]),
            draw(row.shape[0], row.rank),
            jnp.abs(draw(row.shape[0])) + 0.5 if plan.spec.dora else None,
        )
        for row in plan.adapted
    }
