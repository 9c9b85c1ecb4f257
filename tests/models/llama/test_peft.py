"""A DoRA adapter that PEFT wrote, with ranks and alphas of single layers: logits and gradients.

tests/data/dora/make_reference says how the files were made; the reference is float64.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import vkjit as vj
import vkjit.numpy as jnp
from vkjit_models.common.adapter_io import load_adapter, save_adapter
from vkjit_models.llama.lora import from_peft, to_peft, with_adapter
from vkjit_models.llama.model import Inputs, LlamaSpec, forward

from .tiny import HYPER

DATA = Path(__file__).resolve().parents[2] / "data" / "dora"
CONFIG, TENSORS = load_adapter(DATA)
EXPECTED = load_file(DATA / "expected.safetensors")


def test_logits_and_every_gradient(device: str) -> None:
    if device == "reference" or "+" in device:
        pytest.skip("minutes in the interpreter and under validation")
    with vj.default_device(device):
        adapters = from_peft(HYPER, TENSORS)
        weights = load_file(DATA / "weights.safetensors")
        params = {name: jnp.asarray(x) for name, x in weights.items()}
        inputs = Inputs(jnp.asarray(np.array([1, 2, 3, 9, 4], np.int32)))
        spec = with_adapter(LlamaSpec(HYPER), CONFIG, adapters)

        def loss(adapters: Any) -> Any:
            logits = forward(spec, params, adapters, inputs)
            return jnp.sum(jnp.sin(logits)), logits

        run = vj.jit(vj.value_and_grad(loss, has_aux=True))
        (_, logits), grads = run(adapters)
        bound = 3e-6 * np.abs(EXPECTED["logits"]).max()
        np.testing.assert_allclose(logits, EXPECTED["logits"], rtol=0, atol=bound)
        found = {f"grad.{name}": grad for name, grad in to_peft(grads).items()}
    assert found.keys() | {"logits"} == EXPECTED.keys()
    for name, grad in found.items():
        bound = 1e-5 * np.abs(EXPECTED[name]).max()
        np.testing.assert_allclose(grad, EXPECTED[name], rtol=0, atol=bound, err_msg=name)


def test_what_is_written_again_says_the_same(tmp_path: Path) -> None:
    save_adapter(tmp_path, CONFIG, TENSORS)
    for name, array in load_file(DATA / "adapter_model.safetensors").items():
        np.testing.assert_array_equal(
            load_file(tmp_path / "adapter_model.safetensors")[name], array
        )
    ours, theirs = (
        json.loads((folder / "adapter_config.json").read_text()) for folder in (tmp_path, DATA)
    )
    keys = ours.keys() - {"base_model_name_or_path", "task_type"}
    assert {key: ours[key] for key in keys} == {key: theirs[key] for key in keys}
    assert ours["use_dora"] is True
    assert ours["rank_pattern"].keys() == {r"layers\.1\.mlp\..*", "q_proj"}
