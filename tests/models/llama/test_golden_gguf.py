"""golden/gguf/tiny_llama: what `expected.json` says of the file, the adapter and llama.cpp.

llama.cpp's logits themselves are not stored, but how far they are from the float64 reference, with
the adapter and without, once its weights are float32. Ours may be three times as far from the
reference, and are thereby within four times that of llama.cpp's.
"""

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
from vkjit_models.common.adapter_gguf import load_gguf_adapter
from vkjit_models.common.gguf import llama_hyper, llama_weights, open_gguf
from vkjit_models.common.tokenizer import Tokenizer
from vkjit_models.llama.lora import from_peft
from vkjit_models.llama.model import Inputs, LlamaSpec, forward
from vkjit_models.lora_sft.base import upload


@pytest.fixture(scope="module")
def folder(shared: Path) -> Path:
    return shared / "golden" / "gguf"


@pytest.fixture(scope="module")
def facts(folder: Path) -> Mapping[str, Any]:
    return json.loads((folder / "expected.json").read_text())["llama"]


def test_text_types_and_scale_of_the_files(folder: Path, facts: Mapping[str, Any]) -> None:
    file = open_gguf(folder / facts["file"])
    types = {name: tensor.tensor_type.name for name, tensor in file.tensors.items()}
    assert types == facts["tensor_types"]
    assert Tokenizer(file).encode(facts["text"]).ids.tolist() == facts["input_ids"]
    config, _ = load_gguf_adapter(folder / "tiny_llama_lora.gguf", llama_hyper(file))
    found = {"r": config.r, "alpha": config.lora_alpha, "scale": config.scale}
    assert found == {key: facts["lora"][key] for key in found}
    assert sorted(config.target_modules) == sorted(facts["lora"]["targets"])


def test_logits_are_as_near_as_those_of_llama_cpp(
    folder: Path, facts: Mapping[str, Any], device: str
) -> None:
    if device == "reference" or "+" in device:
        pytest.skip("minutes in the interpreter; the kernels are those of the plain device")
    file = open_gguf(folder / facts["file"])
    hyper = llama_hyper(file)
    want = load_file(folder / "tiny_llama_expected.safetensors")
    theirs = facts["llama.cpp_check"]["weights_expanded_to_float32"]
    with vj.default_device(device):
        params, _ = upload(llama_weights(file, hyper, "packed"))
        pairs = from_peft(hyper, load_gguf_adapter(folder / "tiny_llama_lora.gguf", hyper)[1])
        run = vj.jit(partial(forward, LlamaSpec(hyper, facts["lora"]["scale"])))
        inputs = Inputs(jnp.asarray(np.array([facts["input_ids"]], np.int32)))
        base, adapted = (np.asarray(run(params, adapters, inputs)) for adapters in ({}, pairs))
    base_bound, bound = theirs["max_abs_logit_error"], theirs["lora_max_abs_logit_error"]
    np.testing.assert_allclose(base, want["base_logits"], rtol=0, atol=3 * base_bound)
    np.testing.assert_allclose(adapted, want["lora_logits"], rtol=0, atol=3 * bound)
    np.testing.assert_array_equal(base[0].argmax(-1), facts["argmax_every_position"])
