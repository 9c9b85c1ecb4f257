"""Blocks that are computed again for the gradient: the same bits, one state a block in memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import vkjit as vj
from vkjit import random
from vkjit_models.common.gguf import LlamaHyper
from vkjit_models.llama.config import module_shapes
from vkjit_models.llama.lora import LoraSpec, init_adapters, plan_adapters
from vkjit_models.llama.model import Batch, LlamaSpec, loss_and_count

HYPER = LlamaHyper(
    vocab_size=17,
    hidden_size=16,
    intermediate_size=48,
    layers=1,
    heads=2,
    kv_heads=1,
    head_dim=8,
    rope_theta=1e4,
    rms_eps=1e-5,
    tied=True,
    context_length=32,
)
LENGTH = 24


def gradient(layers: int, *, recompute: bool) -> tuple[Any, tuple[Any, ...]]:
    """The jitted gradient of a LoRA loss with dropout, and its arguments."""
    rng = np.random.default_rng(2)
    hyper, lora = replace(HYPER, layers=layers), LoraSpec(2, 4.0)
    spec = LlamaSpec(hyper, lora.scale, lora_dropout=0.25, recompute=recompute)
    params = {
        f"{name}.weight": rng.normal(0, 0.3, shape).astype(np.float32)
        for name, shape in module_shapes(hyper).items()
    }
    adapters = vj.tree.map(
        lambda v: v + 0.1, init_adapters(plan_adapters(hyper, lora), random.key(0))
    )
    tokens = rng.integers(0, hyper.vocab_size, (1, LENGTH)).astype(np.int32)

    def loss(adapters: Any, tokens: Any, key: Any) -> Any:
        return loss_and_count(spec, params, adapters, Batch(tokens, tokens, None, None), key)[0]

    return vj.jit(vj.value_and_grad(loss)), (adapters, tokens, random.key(7))


def test_masks_are_drawn_again_with_the_same_bits() -> None:
    results: list[list[bytes]] = []
    for recompute in (False, True):
        step, arguments = gradient(1, recompute=recompute)
        results.append([np.asarray(v).tobytes() for v in vj.tree.leaves(step(*arguments))])
    assert results[0] == results[1]


@pytest.mark.parametrize("recompute", [False, True])
def test_each_block_keeps_its_input_alone(recompute: bool) -> None:  # noqa: FBT001  a parameter
    temporaries: list[int] = []
    for layers in (2, 6):
        step, arguments = gradient(layers, recompute=recompute)
        with vj.default_device("cpu"):
            temporaries.append(step.lower(*arguments).memory().temporaries)
    grown = (temporaries[1] - temporaries[0]) / 4
    state = LENGTH * HYPER.hidden_size * 4
    assert (grown <= 1.5 * state) == recompute
    assert (grown >= 6 * state) != recompute
