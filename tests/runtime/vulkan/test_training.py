"""A perceptron and a one-layer Llama train on Vulkan with the losses of the CPU.

In both addressing modes and under the validation layer, whose silence counts only because the first
test of each device leaves out a barrier and wants it reported.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import pytest

import vkjit as vj
import vkjit.numpy as jnp
from tests.runtime.vulkan.test_device import chain, values
from vkjit import nn, optim, runtime
from vkjit.errors import DeviceError
from vkjit.lowering.target import Addressing
from vkjit_models.common.gguf import LlamaHyper
from vkjit_models.llama.config import module_shapes
from vkjit_models.llama.lora import LoraSpec, plan_adapters
from vkjit_models.llama.model import Batch, LlamaSpec, LoraPair, mean_loss

TOLERANCE = 1e-5
"""Relative, of losses: sums run in another order."""


@pytest.fixture(scope="module")
def watched(vulkan):
    """The device, once the layer has reported a planted hazard; device addresses hide theirs."""
    if vulkan.target.addressing is Addressing.DESCRIPTOR:
        with pytest.raises(DeviceError, match="SYNC-HAZARD"):
            vulkan.load(chain(set())).run([vulkan.upload(values())])
        vulkan.synchronize()
    return vulkan


def trained(step: Callable[..., Any], state: Any, data: Any, steps: int) -> list[float]:
    """The losses of ``steps`` steps on the default device; the state is donated."""
    put = partial(vj.tree.map, jnp.asarray)
    state, data = put(state), put(data)
    compiled = vj.jit(step, donate_argnums=0)
    losses = []
    for _ in range(steps):
        state, loss = compiled(state, data)
        losses.append(loss)
    return [float(loss) for loss in losses]


def step_of(loss_fn: Callable[..., Any], rule: optim.GradientTransformation) -> Callable[..., Any]:
    """One step of ``rule`` on ``loss_fn(params, data)``; the state starts without moments."""

    def step(state: Any, data: Any) -> Any:
        params, moments = state
        loss, gradients = vj.value_and_grad(loss_fn)(params, data)
        updates, moments = rule.update(gradients, moments, params)
        return (optim.apply_updates(params, updates), moments), loss

    return step


@cache
def perceptron(name: str) -> tuple[float, ...]:
    """Ten steps of two layers with softmax cross-entropy on the device ``name``."""
    rng = np.random.default_rng(0)
    params = {
        "w1": rng.normal(0, 0.2, (20, 32)).astype(np.float32),
        "b1": np.zeros(32, np.float32),
        "w2": rng.normal(0, 0.2, (32, 10)).astype(np.float32),
        "b2": np.zeros(10, np.float32),
    }
    x, y = rng.normal(size=(24, 20)).astype(np.float32), rng.integers(0, 10, 24).astype(np.int32)

    def loss_fn(p: Any, data: Any) -> Any:
        x, y = data
        hidden = jnp.tanh(x @ p["w1"] + p["b1"])
        log_probs = nn.log_softmax(hidden @ p["w2"] + p["b2"])
        return -jnp.mean(jnp.sum(log_probs * nn.one_hot(y, 10), axis=-1))

    rule = optim.adamw(1e-2, weight_decay=0.01)
    with vj.default_device("cpu"):
        moments = vj.tree.map(np.asarray, rule.init(vj.tree.map(jnp.asarray, params)))
    with vj.default_device(name):
        return tuple(trained(step_of(loss_fn, rule), (params, moments), (x, y), 10))


@cache
def llama(name: str) -> tuple[float, ...]:
    """Five LoRA steps on two packed rows, with masks and clipping, on the device ``name``."""
    hyper = LlamaHyper(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        layers=1,
        heads=4,
        kv_heads=2,
        head_dim=8,
        rope_theta=1e4,
        rms_eps=1e-5,
        tied=True,
        context_length=64,
    )
    rng = np.random.default_rng(1)

    def normal(scale: float, *shape: int) -> Any:
        return rng.normal(0, scale, shape).astype(np.float32)

    weights = {
        f"{module}.weight": normal(0.3, *shape) if len(shape) > 1 else 1 + normal(0.1, *shape)
        for module, shape in module_shapes(hyper).items()
    }
    plan = plan_adapters(hyper, LoraSpec(rank=4, alpha=8.0))
    adapters = {
        row.module: LoraPair(normal(0.2, 4, row.shape[1]), normal(0.02, row.shape[0], 4))
        for row in plan.adapted
    }
    tokens = rng.integers(0, 64, (2, 16)).astype(np.int32)
    labels = np.where(rng.random((2, 16)) < 0.7, tokens, -100).astype(np.int32)
    row = np.concatenate([np.arange(10), np.arange(6)]).astype(np.int32)
    segments = np.repeat(np.array([0, 1], np.int32), [10, 6])
    batch = Batch(tokens, labels, np.stack([row, row]), np.stack([segments, segments]))
    spec = LlamaSpec(hyper, plan.spec.scale)

    def loss_fn(adapters: Any, data: Any) -> Any:
        weights, batch = data
        return mean_loss(spec, weights, adapters, batch)

    rule = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-2))
    with vj.default_device("cpu"):
        moments = vj.tree.map(np.asarray, rule.init(vj.tree.map(jnp.asarray, adapters)))
    with vj.default_device(name):
        return tuple(trained(step_of(loss_fn, rule), (adapters, moments), (weights, batch), 5))


@pytest.mark.parametrize("train", [perceptron, llama], ids=["perceptron", "llama"])
def test_training_gives_the_losses_of_the_cpu(
    watched, train: Callable[[str], tuple[float, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"vulkan:{watched.target.addressing.value}"
    monkeypatch.setattr(watched, "name", name)
    monkeypatch.setitem(runtime._open, name, watched)
    losses, wanted = train(name), train("cpu")
    watched.synchronize()
    assert wanted[-1] < 0.8 * wanted[0]
    np.testing.assert_allclose(losses, wanted, rtol=TOLERANCE)
