"""One layer of the tiny Llama in the interpreter, which would take minutes for the golden one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

import vkjit as vj
import vkjit.numpy as jnp
from vkjit_models.common.adapter_io import load_adapter
from vkjit_models.common.gguf import LlamaHyper
from vkjit_models.llama.config import from_hugging_face
from vkjit_models.llama.lora import from_peft, to_peft
from vkjit_models.llama.model import Batch, LlamaSpec, mean_loss, target_rows

DATA = Path(__file__).resolve().parents[2] / "data" / "llama"
GRADIENT = 3 * 4e-6  # of the tensor's largest entry; three times float32's cost in transformers
LOSS = 3 * 8e-7
HYPER = from_hugging_face(json.loads((DATA / "config.json").read_text()))


def loss_and_gradients(
    device: str, hyper: LlamaHyper, fields: tuple[np.ndarray, ...]
) -> tuple[float, dict[str, np.ndarray]]:
    config, tensors = load_adapter(DATA)
    layers = tuple(f".layers.{i}." for i in range(hyper.layers))
    tensors = {k: v for k, v in tensors.items() if any(layer in k for layer in layers)}
    with vj.default_device(device):
        params = {k: jnp.asarray(v) for k, v in load_file(DATA / "weights.safetensors").items()}
        batch = Batch(*(jnp.asarray(field) for field in fields))

        def loss_of(adapters: Any) -> Any:
            return mean_loss(LlamaSpec(hyper, config.scale), params, adapters, batch)

        loss, grads = vj.jit(vj.value_and_grad(loss_of))(from_peft(hyper, tensors))
        return float(loss), to_peft(grads)


def fields_of(ids: np.ndarray, labels: np.ndarray, capacity: int) -> tuple[np.ndarray, ...]:
    positions = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape).copy()
    return ids, labels, positions, np.zeros_like(ids), target_rows(labels, capacity)


def assert_equal(
    got: tuple[float, dict[str, np.ndarray]], loss: float, grads: dict[str, np.ndarray]
) -> None:
    np.testing.assert_allclose(got[0], loss, rtol=0, atol=LOSS)
    assert got[1].keys() == grads.keys()
    for name, want in grads.items():
        bound = GRADIENT * np.abs(want).max()
        np.testing.assert_allclose(got[1][name], want, rtol=0, atol=bound, err_msg=name)


def test_one_layer_agrees_with_the_interpreter() -> None:
    """Three tokens, one layer, on `cpu` and on `reference`."""
    ids = np.array([[3, 100, 41]], np.int32)
    fields = fields_of(ids, ids, 2)
    one = replace(HYPER, layers=1)
    assert_equal(
        loss_and_gradients("cpu", one, fields), *loss_and_gradients("reference", one, fields)
    )
