"""golden/gguf/tiny_hybrid, a file of architecture qwen35: weights, adapter, logits and gradients.

The references are computed in float64 from the dequantised weights. `expected.json` states how far
llama.cpp's logits are from them, with the adapter and without, once its weights are float32 (it
rounds activations to 8 bits for weights in blocks); ours may be three times as far. Gradients in
PyTorch's float32 are up to 2.6e-5 of a tensor's norm from them; the bound is three times that.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load_file

import vkjit as vj
import vkjit.numpy as jnp
from vkjit.blocks import block_of, decode
from vkjit_models.common.adapter_config import AdapterConfig
from vkjit_models.common.adapter_gguf import load_gguf_adapter, save_gguf_adapter
from vkjit_models.common.gguf import GgufFile, WeightFormat, open_gguf
from vkjit_models.common.tokenizer import Tokenizer
from vkjit_models.hybrid.config import HybridHyper, check_params
from vkjit_models.hybrid.gguf import adapter_layout, hybrid_hyper, hybrid_weights, read_hybrid
from vkjit_models.hybrid.model import HybridSpec, forward, from_peft, mean_loss
from vkjit_models.llama.lora import to_peft
from vkjit_models.llama.model import Batch, token_losses
from vkjit_models.lora_sft.base import upload

GRADIENT = 3 * 2.6e-5  # of the tensor's norm


class Golden(NamedTuple):
    folder: Path
    file: GgufFile
    hyper: HybridHyper
    want: Mapping[str, np.ndarray]
    facts: Mapping[str, Any]


@pytest.fixture(scope="module")
def golden(shared: Path) -> Golden:
    folder = shared / "golden" / "gguf"
    file = open_gguf(folder / "tiny_hybrid.gguf")
    want = load_file(folder / "tiny_hybrid_expected.safetensors")
    facts = json.loads((folder / "expected.json").read_text())["hybrid"]
    return Golden(folder, file, hybrid_hyper(file), want, facts)


@pytest.fixture
def on(device: str) -> Generator[None]:
    if device == "reference":
        pytest.skip("minutes in the interpreter")
    with vj.default_device(device):
        yield


def batch_of(golden: Golden) -> Batch:
    ids = golden.want["input_ids"]
    positions = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
    fields = (ids, golden.want["labels"], positions, np.zeros_like(ids))
    return Batch(*(jnp.asarray(np.ascontiguousarray(field)) for field in fields))


def test_packed_weights_are_the_expanded_ones_and_keep_the_types_of_the_file(
    golden: Golden,
) -> None:
    _, expanded = read_hybrid(golden.file)
    check_params(golden.hyper, expanded)
    kinds: list[str] = []
    for weight in hybrid_weights(golden.file, golden.hyper, "packed"):
        block = block_of(weight.value.dtype)
        values = weight.value if block is None else decode(block, weight.value)
        np.testing.assert_array_equal(values, expanded[weight.name], err_msg=weight.name)
        assert weight.value.nbytes == weight.file_bytes
        assert block is None or block.name == weight.kind
        kinds.append(weight.kind)
    assert sorted(kinds) == sorted(golden.facts["tensor_types"].values())


def test_the_adapter_in_both_formats(golden: Golden, tmp_path: Path) -> None:
    layout, path = adapter_layout(golden.hyper), golden.folder / "tiny_hybrid_lora.gguf"
    config, tensors = load_gguf_adapter(path, layout)
    facts = golden.facts["lora"]
    assert (config.r, config.lora_alpha, config.scale) == tuple(
        facts[key] for key in ("r", "alpha", "scale")
    )
    assert sorted(config.target_modules) == facts["targets"]
    want = load_file(golden.folder / "tiny_hybrid_adapter.safetensors")
    assert tensors.keys() == want.keys()
    for name, array in want.items():
        np.testing.assert_array_equal(tensors[name], array, err_msg=name)
    config = AdapterConfig(config.r, config.lora_alpha, config.target_modules)
    assert save_gguf_adapter(tmp_path / "a.gguf", layout, config, want) == ()
    ours, theirs = open_gguf(tmp_path / "a.gguf"), open_gguf(path)
    assert ours.architecture == theirs.architecture
    assert ours.tensors.keys() == theirs.tensors.keys()
    for name in theirs.tensors:
        np.testing.assert_array_equal(ours.load_tensor(name), theirs.load_tensor(name))


def test_its_tokenizer_gives_the_ids(golden: Golden) -> None:
    tokenizer = Tokenizer(golden.file)
    assert tokenizer.encode(golden.facts["text"]).ids.tolist() == golden.facts["input_ids"]
    assert golden.want["input_ids"][0].tolist() == golden.facts["input_ids"]


@pytest.mark.usefixtures("on")
@pytest.mark.parametrize("weights", ["packed", "float32"])
def test_logits_with_and_without_the_adapter(
    weights: WeightFormat, device: str, golden: Golden
) -> None:
    if "+" in device or (device != "cpu" and weights == "float32"):
        pytest.skip("blocks on the plain device; its kernels for floats are those of test_golden")
    params, _ = upload(hybrid_weights(golden.file, golden.hyper, weights))
    spec = HybridSpec(golden.hyper, golden.facts["lora"]["scale"])
    theirs = golden.facts["llama.cpp_check"]["weights_expanded_to_float32"]
    bounds = {"base": theirs["max_abs_logit_error"], "lora": theirs["lora_max_abs_logit_error"]}
    for name, pairs in (("base", {}), ("lora", adapters_of(golden))):
        logits = vj.jit(partial(forward, spec))(params, pairs, batch_of(golden).inputs)
        want = golden.want[f"{name}_logits"]
        np.testing.assert_allclose(logits, want, rtol=0, atol=3 * bounds[name])
        if name == "base":
            rows = np.asarray(logits)[0]
            np.testing.assert_array_equal(rows.argmax(-1), golden.facts["argmax_every_position"])
            loss = token_losses(rows[:-1], golden.want["input_ids"][0, 1:]).mean()
            np.testing.assert_allclose(loss, golden.facts["base_loss_all_tokens"], rtol=2e-6)


def adapters_of(golden: Golden) -> dict[str, Any]:
    path = golden.folder / "tiny_hybrid_lora.gguf"
    return from_peft(golden.hyper, load_gguf_adapter(path, adapter_layout(golden.hyper))[1])


def test_the_loss_and_every_adapter_gradient(golden: Golden) -> None:
    """On the CPU, out of blocks; test_golden has the gradients on every device."""
    params, _ = upload(hybrid_weights(golden.file, golden.hyper, "packed"))
    spec = HybridSpec(golden.hyper, golden.facts["lora"]["scale"])
    loss, pairs = vj.jit(vj.value_and_grad(partial(mean_loss, spec), argnums=1))(
        params, adapters_of(golden), batch_of(golden)
    )
    np.testing.assert_allclose(loss, golden.facts["lora_loss_labels_from_32"], rtol=2e-6)
    grads = {f"grad.{name}": np.asarray(grad) for name, grad in to_peft(pairs).items()}
    assert grads.keys() == {name for name in golden.want if name.startswith("grad.")}
    norm = np.sqrt(sum(np.sum(np.square(grad)) for grad in grads.values()))
    np.testing.assert_allclose(norm, golden.facts["lora_grad_norm"], rtol=1e-5)
    for name, grad in grads.items():
        reference = golden.want[name]
        assert np.linalg.norm(grad - reference) <= GRADIENT * np.linalg.norm(reference), name
