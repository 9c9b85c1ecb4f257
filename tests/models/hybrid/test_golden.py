"""A tiny hybrid model against transformers and peft: logits, losses and every gradient."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import vkjit as vj
import vkjit.numpy as jnp
from vkjit import nn
from vkjit.errors import ArgumentError, DataError
from vkjit_models.common.adapter_io import load_adapter
from vkjit_models.hybrid.config import check_params, from_hugging_face
from vkjit_models.hybrid.model import (
    HybridSpec,
    forward,
    from_peft,
    head_weight,
    loss_and_count,
    mean_loss,
    target_states,
)
from vkjit_models.llama.lora import to_peft
from vkjit_models.llama.model import Batch, Inputs

from .tiny import LOGITS, LOSS, Tiny, assert_gradients, batch_of, hyper_of, tiny_on

ON = ("cpu", "vulkan:0")
STEEP_TOKEN = (0, 2)
"""With the doubled scale of rank-stabilised adapters the second net's output for the token before
has the root mean square 3e-4 in one head, and is divided by it: rounding the weights alone to
float32, all else in float64, moves logits here by up to 4e-4."""
STEEP_GRADIENT = 3 * 3.3e-4
"""Three times what the same rounding does to a gradient, of its tensor's largest entry."""


@pytest.fixture
def data(shared: Path) -> Path:
    return shared / "golden" / "hybrid"


@pytest.fixture
def tiny(data: Path) -> Tiny:
    return tiny_on(data, "cpu")


def gradients_in(data: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {k.removeprefix("grad."): v for k, v in data.items() if k.startswith("grad.")}


def spec_of(data: Path, scale: float | None = None, *, recompute: bool = False) -> HybridSpec:
    scale = load_adapter(data)[0].scale if scale is None else scale
    return HybridSpec(hyper_of(data), scale, recompute)


@pytest.mark.parametrize("name", ["logits", "base_logits"])
def test_logits(name: str, data: Path, tiny: Tiny) -> None:
    adapters = tiny.adapters if name == "logits" else {}
    want = load_file(data / "expected.safetensors")[name]
    real = load_file(data / "batch.safetensors")["attention_mask"] == 1
    run = vj.jit(partial(forward, spec_of(data)))
    got = run(tiny.params, adapters, Inputs(batch_of(data, "batch").tokens))
    np.testing.assert_allclose(np.asarray(got)[real], want[real], rtol=0, atol=LOGITS)


def test_base_loss_and_count(data: Path, tiny: Tiny) -> None:
    expected, batch = json.loads((data / "expected.json").read_text()), batch_of(data, "batch")
    total, count = vj.jit(partial(loss_and_count, spec_of(data)))(tiny.params, {}, batch)
    assert float(count) == expected["n_loss_tokens"]
    np.testing.assert_allclose(total / count, expected["base_loss"], rtol=0, atol=LOSS)


def test_loss_and_every_gradient(data: Path, tiny: Tiny) -> None:
    """Of the adapters and of the base weights, each block computed again for its derivatives."""
    expected, batch = json.loads((data / "expected.json").read_text()), batch_of(data, "batch")
    run = vj.value_and_grad(partial(mean_loss, spec_of(data, recompute=True)), argnums=(0, 1))
    loss, (base, grads) = vj.jit(run)(*tiny, batch)
    np.testing.assert_allclose(loss, expected["loss"], rtol=0, atol=LOSS)
    assert_gradients(to_peft(grads), load_file(data / "lora_grads.safetensors"))
    assert_gradients(base, load_file(data / "base_grads.safetensors"))


def test_rank_stabilised_scale(data: Path, tiny: Tiny) -> None:
    rslora = json.loads((data / "expected.json").read_text())["rslora"]
    spec = spec_of(data, rslora["scale"])
    want = load_file(data / "rslora_expected.safetensors")
    batch = batch_of(data, "batch")
    logits = vj.jit(partial(forward, spec))(*tiny, batch.inputs)
    real = load_file(data / "batch.safetensors")["attention_mask"] == 1
    real[STEEP_TOKEN] = False
    np.testing.assert_allclose(np.asarray(logits)[real], want["logits"][real], rtol=0, atol=LOGITS)
    loss, grads = vj.jit(vj.value_and_grad(partial(mean_loss, spec), argnums=1))(*tiny, batch)
    np.testing.assert_allclose(loss, rslora["loss"], rtol=0, atol=LOSS)
    assert_gradients(to_peft(grads), gradients_in(want), STEEP_GRADIENT)


def test_packed_documents_equal_their_separate_runs(data: Path, tiny: Tiny) -> None:
    """Convolutions, states and attention all start anew with a document."""
    want, batch = load_file(data / "packed.safetensors"), batch_of(data, "packed")
    logits = vj.jit(partial(forward, spec_of(data)))(*tiny, batch.inputs)
    np.testing.assert_allclose(logits, want["logits"].reshape(logits.shape), rtol=0, atol=LOGITS)
    grads = vj.jit(vj.grad(partial(mean_loss, spec_of(data)), argnums=1))(*tiny, batch)
    assert_gradients(to_peft(grads), gradients_in(want))


@pytest.mark.parametrize("device", ON, indirect=True)
def test_masked_divergence_and_its_gradients(device: str, shared: Path, data: Path) -> None:
    """CE + 0.25 * KL(adapted||base) without targets, from states of both models."""
    want = json.loads((shared / "golden/tmkl/tmkl.json").read_text())["models"]["hybrid"]
    spec = spec_of(data)

    def objective(params: Any, adapters: Any, batch: Batch) -> tuple[Any, tuple[Any, Any]]:
        hidden, targets = target_states(spec, params, adapters, batch)
        base, _ = target_states(spec, params, {}, batch)
        weight, count = head_weight(spec, params), jnp.sum((targets >= 0).astype(jnp.float32))
        ce = jnp.sum(nn.linear_cross_entropy(hidden, weight, targets)) / count
        kl = jnp.sum(nn.linear_target_masked_kl(hidden, base, weight, targets)) / count
        return ce + want["lambda"] * kl, (ce, kl)

    with vj.default_device(device):
        run = vj.jit(vj.value_and_grad(objective, argnums=1, has_aux=True))
        (total, (ce, kl)), grads = run(*tiny_on(data, device), batch_of(data, "batch"))
    np.testing.assert_allclose(total, want["loss"], rtol=0, atol=LOSS)
    np.testing.assert_allclose(ce, want["ce"], rtol=0, atol=LOSS)
    np.testing.assert_allclose(kl, want["tmkl"], rtol=0, atol=LOSS)
    golden = load_file(shared / "golden" / "tmkl" / "model_hybrid_lora_grads.safetensors")
    assert_gradients(to_peft(grads), golden)


def test_parameters_and_configs_are_checked(data: Path, tiny: Tiny) -> None:
    hyper = hyper_of(data)
    check_params(hyper, tiny.params)
    with pytest.raises(DataError, match=r"layers\.0\.linear_attn\.A_log' has shape None"):
        check_params(
            hyper, {k: v for k, v in tiny.params.items() if "0.linear_attn.A_log" not in k}
        )
    config = json.loads((data / "config.json").read_text())
    with pytest.raises(DataError, match="layer_types"):
        from_hugging_face(config | {"layer_types": ["sliding_attention"] * 4})
    rope = {key: config.pop(key) for key in ("rope_theta", "partial_rotary_factor")}
    assert from_hugging_face(config | {"rope_parameters": rope}) == hyper
    with pytest.raises(DataError, match="rope_type='yarn' was given"):
        from_hugging_face(config | {"rope_parameters": rope | {"rope_type": "yarn"}})


def test_adapters_that_the_model_does_not_compute_are_refused(data: Path, tiny: Tiny) -> None:
    tensors = load_adapter(data)[1]
    foreign = {name.replace("layers.3", "layers.7"): x for name, x in tensors.items()}
    with pytest.raises(DataError, match=r"belong to no layer.*layers\.7"):
        from_peft(hyper_of(data), foreign)
    pairs = {name: pair._replace(magnitude=pair.b[:, 0]) for name, pair in tiny.adapters.items()}
    with pytest.raises(ArgumentError, match="has magnitudes"):
        forward(spec_of(data), tiny.params, pairs, Inputs(batch_of(data, "batch").tokens))
