"""The plan of a LoRA step on a GPU: every barrier needed, no frozen weight copied or transposed."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import numpy as np
import pytest

import vkjit as vj
from vkjit import optim
from vkjit.errors import InternalError
from vkjit.lowering.artifact import Copy, Launch, Plan, Range, Role, Step
from vkjit.lowering.compile import compile_program
from vkjit.lowering.kernel.cost import flops
from vkjit.lowering.plan.hazards import check_order, footprint
from vkjit.lowering.target import ALL_SCALARS, MINIMAL_GPU
from vkjit.passes.pipeline import simplify
from vkjit_models.common.gguf import LlamaHyper
from vkjit_models.llama.config import module_shapes
from vkjit_models.llama.lora import LoraSpec, plan_adapters
from vkjit_models.llama.model import Batch, LlamaSpec, LoraPair, mean_loss

SMALL = LlamaHyper(
    vocab_size=80,
    hidden_size=32,
    intermediate_size=48,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    rope_theta=1e4,
    rms_eps=1e-5,
    tied=True,
    context_length=64,
)
SMOLLM2 = dataclasses.replace(
    SMALL,
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    layers=1,
    heads=9,
    kv_heads=3,
    head_dim=64,
    rope_theta=1e5,
    context_length=8192,
)
SIZES = {"small": (SMALL, 24), "smollm2": (SMOLLM2, 512)}
GPU = dataclasses.replace(
    MINIMAL_GPU,
    name="gpu",
    storage=ALL_SCALARS,
    max_workgroup=(1024, 1024, 64),
    max_invocations=1024,
    shared_bytes=49152,
    subgroup_sizes=(32,),
    subgroup_ops=True,
)


@cache
def step_plan(name: str) -> tuple[Plan, frozenset[int]]:
    """The plan of a LoRA step with AdamW, and the indices of the frozen matrices in it."""
    hyper, tokens = SIZES[name]
    adapted = plan_adapters(hyper, LoraSpec(rank=4, alpha=8.0))
    spec, rule = LlamaSpec(hyper, adapted.spec.scale), optim.adamw(1e-2)

    def array(*shape: int, dtype: str = "float32") -> vj.ShapeDtypeStruct:
        return vj.ShapeDtypeStruct(shape, dtype)

    def step(weights: Any, state: Any, batch: Any) -> Any:
        adapters, moments = state
        loss, grads = vj.value_and_grad(lambda adapters: mean_loss(spec, weights, adapters, batch))(
            adapters
        )
        updates, moments = rule.update(grads, moments, adapters)
        return (vj.tree.map(lambda p, u: p + u, adapters, updates), moments), loss

    weights = {f"{m}.weight": array(*shape) for m, shape in module_shapes(hyper).items()}
    adapters = {
        row.module: LoraPair(array(4, row.shape[1]), array(row.shape[0], 4))
        for row in adapted.adapted
    }
    integers = [array(1, tokens, dtype="int32") for _ in range(4)]
    moments = vj.eval_shape(rule.init, adapters)
    arguments = (weights, (adapters, moments), Batch(*integers))
    program = vj.make_ir(step)(*arguments)
    captured = len(program.in_avals) - len(vj.tree.leaves(arguments))
    plan = compile_program(simplify(program), GPU, captured).plan
    inputs = {b.position: i for i, b in enumerate(plan.buffers) if b.role is Role.INPUT}
    leaves = vj.tree.leaves(weights)
    return plan, frozenset(inputs[i] for i, leaf in enumerate(leaves) if leaf.ndim > 1)


def moves_only(step: Step) -> bool:
    """Whether a step computes nothing: a copy, a transpose, a cast."""
    return isinstance(step, Copy) or (isinstance(step, Launch) and flops(step.kernel) == 0.0)


def size(ranges: tuple[Range, ...]) -> int:
    return sum(r.size for r in ranges)


@pytest.mark.parametrize("name", SIZES)
def test_no_step_only_moves_a_frozen_weight(name: str) -> None:
    plan, frozen = step_plan(name)
    assert len(frozen) == SIZES[name][0].layers * 7 + 1
    read: set[int] = set()
    for step in plan.steps:
        touched = footprint(step)
        weights = [r for r in touched.reads if r.buffer in frozen]
        read |= {r.buffer for r in weights}
        if weights and moves_only(step):
            assert size(touched.writes) < min(r.size for r in weights), step
    assert read == frozen


def test_a_planted_transpose_is_seen() -> None:
    w = np.ones((48, 40), np.float32)
    program = vj.make_ir(lambda w, x: (w.T, x @ w.T))(w, w)
    plan = compile_program(simplify(program), GPU).plan
    planted = [s for s in plan.steps if moves_only(s)]
    assert [size(footprint(s).writes) for s in planted] == [w.nbytes]


@pytest.mark.parametrize("name", SIZES)
def test_every_barrier_is_needed(name: str) -> None:
    plan, _ = step_plan(name)
    check_order(plan)
    for position in plan.barriers:
        with pytest.raises(InternalError, match="is not ordered by a barrier"):
            check_order(dataclasses.replace(plan, barriers=plan.barriers - {position}))
    assert len(plan.barriers) < len(plan.steps)
