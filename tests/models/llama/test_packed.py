"""A base in quantized blocks: no float copy in a step's plan, 16-bit states, recompute."""

from __future__ import annotations

import dataclasses
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vkjit as vj
import vkjit.numpy as jnp
from vkjit import quant
from vkjit.lowering.artifact import Plan, Role
from vkjit.lowering.compile import compile_program
from vkjit.lowering.plan.hazards import footprint
from vkjit.passes.pipeline import simplify
from vkjit_models.common.gguf import LlamaHyper, llama_hyper, llama_weights, open_gguf
from vkjit_models.llama.config import EMBEDDING, module_shapes
from vkjit_models.llama.lora import LoraSpec, plan_adapters
from vkjit_models.llama.model import Batch, LlamaSpec, LoraPair, mean_loss
from vkjit_models.lora_sft.base import upload

from .test_plan import GPU, SMOLLM2, size

GGUF = Path(__file__).resolve().parents[2] / "data" / "gguf" / "tiny_llama.gguf"
TOKENS = 48


def blocks(kind: str, shape: tuple[int, ...]) -> quant.QuantizedArray:
    block = quant.BLOCK_TYPES[kind]
    counts = (*shape[:-1], shape[-1] // block.size)
    return quant.QuantizedArray(np.zeros(counts, block.dtype))


def step_plan() -> tuple[Plan, dict[int, int]]:
    """The plan of a LoRA gradient of one SmolLM2 block, and the numbers of each packed input."""
    adapted = plan_adapters(SMOLLM2, LoraSpec(rank=4, alpha=8.0))
    spec = LlamaSpec(SMOLLM2, adapted.spec.scale)
    weights: dict[str, Any] = {}
    for module, shape in module_shapes(SMOLLM2).items():
        kind = "Q8_0" if module == EMBEDDING else "Q4_1"
        numbers = np.zeros(shape, np.float32) if len(shape) == 1 else blocks(kind, shape)
        weights[f"{module}.weight"] = numbers
    adapters = {
        row.module: LoraPair(np.zeros((4, row.shape[1]), "f"), np.zeros((row.shape[0], 4), "f"))
        for row in adapted.adapted
    }
    batch = Batch(*(np.zeros((1, TOKENS), np.int32) for _ in range(4)))

    def step(weights: Any, adapters: Any, batch: Any) -> Any:
        return vj.value_and_grad(partial(mean_loss, spec), argnums=1)(weights, adapters, batch)

    program = vj.make_ir(step)(weights, adapters, batch)
    captured = len(program.in_avals) - len(vj.tree.leaves((weights, adapters, batch)))
    plan = compile_program(simplify(program), GPU, captured).plan
    inputs = {b.position: i for i, b in enumerate(plan.buffers) if b.role is Role.INPUT}
    counts = [
        leaf.size * quant.BLOCK_TYPES[kind].size if kind else 0
        for leaf, kind in ((leaf, kind_of(leaf)) for leaf in vj.tree.leaves(weights))
    ]
    return plan, {inputs[i]: count for i, count in enumerate(counts) if count}


def kind_of(leaf: Any) -> str:
    found = [name for name, block in quant.BLOCK_TYPES.items() if block.dtype == leaf.dtype]
    return found[0] if found else ""


def test_no_step_writes_the_numbers_of_a_weight() -> None:
    plan, packed = step_plan()
    assert len(packed) == 8
    read: set[int] = set()
    for step in plan.steps:
        touched = footprint(step)
        weights = {r.buffer for r in touched.reads if r.buffer in packed}
        read |= weights
        written = size(touched.writes)
        assert all(written not in (2 * packed[w], 4 * packed[w]) for w in weights), step
    assert read == packed.keys()


@cache
def tiny() -> tuple[LlamaHyper, dict[str, Any]]:
    file = open_gguf(GGUF)
    hyper = llama_hyper(file)
    return hyper, upload(llama_weights(file, hyper, "packed"))[0]


def loss_and_gradients(spec: LlamaSpec) -> tuple[float, Any]:
    hyper, params = tiny()
    plan = plan_adapters(hyper, LoraSpec(rank=4, alpha=8.0))
    generator = np.random.default_rng(5)

    def normal(*shape: int) -> Any:
        return jnp.asarray(0.05 * generator.standard_normal(shape, dtype=np.float32))

    adapters = {
        row.module: LoraPair(normal(4, row.shape[1]), normal(row.shape[0], 4))
        for row in plan.adapted
    }
    ids = jnp.asarray(generator.integers(0, hyper.vocab_size, (1, TOKENS)).astype(np.int32))
    batch = Batch(ids, ids, None, None)
    step = vj.jit(vj.value_and_grad(partial(mean_loss, spec), argnums=1))
    loss, gradients = step(params, adapters, batch)
    return float(loss), gradients


def test_recomputing_blocks_changes_no_bit() -> None:
    spec = LlamaSpec(tiny()[0], 2.0)
    loss, gradients = loss_and_gradients(spec)
    again, recomputed = loss_and_gradients(dataclasses.replace(spec, recompute=True))
    assert again == loss
    for got, wanted in zip(vj.tree.leaves(recomputed), vj.tree.leaves(gradients), strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_states_of_sixteen_bits() -> None:
    """Relative to float32: three digits of the loss, two of the gradients' norms."""
    spec = LlamaSpec(tiny()[0], 2.0)
    loss, gradients = loss_and_gradients(spec)
    low_loss, low_gradients = loss_and_gradients(dataclasses.replace(spec, dtype="bfloat16"))
    assert low_loss == pytest.approx(loss, rel=2e-3)
    for got, wanted in zip(vj.tree.leaves(low_gradients), vj.tree.leaves(gradients), strict=True):
        assert got.dtype == jnp.float32
        error = np.linalg.norm(np.asarray(got) - np.asarray(wanted))
        assert error < 0.05 * np.linalg.norm(np.asarray(wanted))
