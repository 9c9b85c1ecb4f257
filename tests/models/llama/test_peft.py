"""A DoRA adapter that PEFT wrote, with ranks and alphas of single layers: logits and gradients.

tests/data/dora/make_reference says how the files were made; the reference is float64.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

import vkjit as vj
import vkjit.numpy as jnp
from vkjit_models.common.adapter_io import load_adapter, save_adapter
from vkjit_models.llama.lora import from_peft, to_peft, with_adapter
from vkjit_models.llama.model import LlamaSpec, forward

from .tiny import HYPER, INPUTS

DATA = Path(__file__).resolve().parents[2] / "data" / "dora"
CONFIG, TENSORS = load_adapter(DATA)
ADAPTERS = from_peft(HYPER, TENSORS)
SPEC = with_adapter(LlamaSpec(HYPER), CONFIG, ADAPTERS)
PARAMS = {n: jnp.asarray(x) for n, x in load_file(DATA / "weights.safetensors").items()}
EXPECTED = load_file(DATA / "expected.safetensors")


def test_logits_and_every_gradient() -> None:
    np.testing.assert_allclose(
        vj.jit(partial(forward, SPEC))(PARAMS, ADAPTERS, INPUTS),
        EXPECTED["logits"],
        rtol=0,
        atol=3e-6 * np.abs(EXPECTED["logits"]).max(),
    )

    def loss(adapters: Any) -> Any:
        return jnp.sum(jnp.sin(forward(SPEC, PARAMS, adapters, INPUTS)))

    grads = to_peft(vj.jit(vj.grad(loss))(ADAPTERS))
    assert {f"grad.{name}" for name in grads} | {"logits"} == EXPECTED.keys()
    for name, grad in grads.items():
        want = EXPECTED[f"grad.{name}"]
        bound = 1e-5 * np.abs(want).max()
        np.testing.assert_allclose(grad, want, rtol=0, atol=bound, err_msg=name)


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
