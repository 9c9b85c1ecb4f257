"""Loss and rotation against PyTorch and transformers on every device; a GGUF model end to end."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import vkjit as vj
import vkjit.numpy as jnp
from vkjit_models.common.gguf import WeightFormat, llama_hyper, llama_weights, open_gguf
from vkjit_models.llama.lora import from_peft, to_peft
from vkjit_models.llama.model import (
    Batch,
    LlamaSpec,
    forward,
    mean_loss,
    rope_tables,
    rotate,
    token_losses,
)
from vkjit_models.lora_sft.base import upload

GGUF = Path(__file__).resolve().parents[2] / "data" / "gguf" / "tiny_llama.gguf"
Load = Callable[[str], dict[str, np.ndarray]]


@pytest.fixture
def load(shared: Path) -> Load:
    return lambda name: load_file(shared / "golden" / f"{name}.safetensors")


@pytest.fixture
def on(device: str) -> Generator[None]:
    with vj.default_device(device):
        yield


@pytest.mark.usefixtures("on")
@pytest.mark.parametrize("name", ["plain", "extreme"])
def test_cross_entropy_and_its_gradient(name: str, load: Load) -> None:
    data = load(f"ops/cross_entropy_{name}")
    labels = jnp.asarray(data["in.labels"])

    def total(logits: Any) -> Any:
        return token_losses(logits, labels).sum()

    logits = jnp.asarray(data["in.logits"])
    scale = np.abs(data["in.logits"]).max()
    losses = vj.jit(token_losses)(logits, labels)
    np.testing.assert_allclose(losses, data["out.per_token"], rtol=2e-6, atol=1e-7 * scale)
    np.testing.assert_allclose(
        vj.jit(vj.grad(total))(logits), data["out.grad_sum"], rtol=0, atol=1e-6
    )


@pytest.mark.usefixtures("on")
def test_rotation_at_near_and_far_positions(load: Load) -> None:
    data = load("ops/rope_half_full")
    positions = data["in.positions"][0]
    cos, sin = (t[positions][:, None] for t in rope_tables(int(positions.max()) + 1, 16, 1e4))
    turn = partial(rotate, angles=(jnp.asarray(cos), jnp.asarray(sin)))
    x, cotangent = (jnp.asarray(data[n].swapaxes(1, 2).copy()) for n in ("in.x", "in.d_y"))

    @vj.jit
    def turned(x: Any, cotangent: Any) -> Any:
        out, pull = vj.vjp(turn, x)
        return out, *pull(cotangent)

    out, grad = turned(x, cotangent)
    np.testing.assert_allclose(out, data["out.y"].swapaxes(1, 2), rtol=0, atol=1e-6)
    np.testing.assert_allclose(grad, data["out.grad.x"].swapaxes(1, 2), rtol=0, atol=1e-6)


@pytest.mark.usefixtures("on")
@pytest.mark.parametrize("weights", ["packed", "float32"])
def test_a_quantised_untied_model(
    weights: WeightFormat, device: str, load: Load, shared: Path
) -> None:
    """golden/gguf/tiny_llama: fifteen tensor types, the head not tied."""
    if device == "reference":
        pytest.skip("minutes in the interpreter, which runs one layer in test_interpreted.py")
    if "+" in device and weights == "packed":
        pytest.skip("the kernels are those of the device without its suffix")
    want = load("gguf/tiny_llama_expected")
    facts = json.loads((shared / "golden" / "gguf" / "expected.json").read_text())["llama"]
    file = open_gguf(GGUF)
    hyper = llama_hyper(file)
    params, _ = upload(llama_weights(file, hyper, weights))
    adapters = from_peft(hyper, load("gguf/tiny_llama_adapter"))
    ids, labels = want["input_ids"], want["labels"]
    positions = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
    fields = (ids, labels, positions, np.zeros_like(ids))
    batch = Batch(*(jnp.asarray(np.ascontiguousarray(field)) for field in fields))
    spec = LlamaSpec(hyper, facts["lora"]["scale"])
    for name, pairs in (("base_logits", {}), ("lora_logits", adapters)):
        logits = vj.jit(partial(forward, spec))(params, pairs, batch.inputs)
        np.testing.assert_allclose(logits, want[name], rtol=0, atol=1e-4)
        if not pairs:
            best = np.asarray(logits)[0].argmax(-1)
            np.testing.assert_array_equal(best, facts["argmax_every_position"])
    loss, grads = vj.jit(vj.value_and_grad(partial(mean_loss, spec), argnums=1))(
        params, adapters, batch
    )
    np.testing.assert_allclose(loss, facts["lora_loss_labels_from_32"], rtol=2e-6)
    for name, grad in to_peft(grads).items():
        reference = want[f"grad.{name}"]
        bound = 3e-5 * np.abs(reference).max()
        np.testing.assert_allclose(grad, reference, rtol=0, atol=bound, err_msg=name)
