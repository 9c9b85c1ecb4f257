"""GGUF adapters: llama.cpp's keys, names, shapes, scale and row order, written and read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter
from numpy.typing import NDArray
from safetensors.numpy import load_file

from vkjit.errors import DataError
from vkjit_models.common.adapter_config import AdapterConfig
from vkjit_models.common.adapter_gguf import (
    load_any_adapter,
    load_gguf_adapter,
    save_gguf_adapter,
)
from vkjit_models.common.adapter_io import Part, peft_name, save_adapter
from vkjit_models.common.gguf import GgufFile, LlamaHyper, llama_hyper

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Tensors = dict[str, NDArray[np.float32]]
HALVES: tuple[Part, ...] = ("A", "B")
Q, UP = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def hyper(tiny_gguf: GgufFile) -> LlamaHyper:
    return llama_hyper(tiny_gguf)


@pytest.fixture
def pairs(hyper: LlamaHyper) -> Tensors:
    """Two layers of ranks 2 and 3."""
    rng = np.random.default_rng(0)
    shapes = {Q: (2, hyper.hidden_size, hyper.hidden_size), UP: (3, hyper.hidden_size, 512)}
    tensors: Tensors = {}
    for name, (rank, columns, rows) in shapes.items():
        tensors[peft_name(name, "A")] = rng.standard_normal((rank, columns), np.float32)
        tensors[peft_name(name, "B")] = rng.standard_normal((rows, rank), np.float32)
    return tensors


def stored(path: Path) -> dict[str, NDArray[Any]]:
    """Tensors as the ``gguf`` library reads them, in row-major shape."""
    reader = GGUFReader(path)
    return {t.name: np.array(t.data).reshape(t.shape[::-1]) for t in reader.tensors}


def keys(path: Path) -> dict[str, Any]:
    return {f.name: f.contents() for f in GGUFReader(path).fields.values()}


def deltas(
    config: AdapterConfig, tensors: Tensors, modules: tuple[str, ...]
) -> dict[str, NDArray[Any]]:
    return {
        m: config.scale_of(m) * tensors[peft_name(m, "B")] @ tensors[peft_name(m, "A")]
        for m in modules
    }


def test_writes_the_file_that_llama_cpp_was_checked_with(
    tmp_path: Path, shared: Path, hyper: LlamaHyper
) -> None:
    """golden/gguf: the same adapter in both formats; llama.cpp's logits agree with the first."""
    folder = shared / "golden" / "gguf"
    tensors = load_file(folder / "tiny_llama_adapter.safetensors")
    notes = save_gguf_adapter(tmp_path / "a.gguf", hyper, AdapterConfig(4, 8.0, ALL), tensors)
    assert notes == ()
    ours, theirs = stored(tmp_path / "a.gguf"), stored(folder / "tiny_llama_lora.gguf")
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        np.testing.assert_array_equal(ours[name], array, err_msg=name)
    wanted = keys(folder / "tiny_llama_lora.gguf")
    found = keys(tmp_path / "a.gguf")
    for key in ("general.architecture", "general.type", "adapter.type", "adapter.lora.alpha"):
        assert found[key] == wanted[key]


def test_reads_the_file_that_llama_cpp_was_checked_with(shared: Path, hyper: LlamaHyper) -> None:
    folder = shared / "golden" / "gguf"
    config, tensors = load_gguf_adapter(folder / "tiny_llama_lora.gguf", hyper)
    assert (config.r, config.lora_alpha, config.scale) == (4, 8.0, 2.0)
    assert set(config.target_modules) == set(ALL)
    want = load_file(folder / "tiny_llama_adapter.safetensors")
    assert tensors.keys() == want.keys()
    for name, array in want.items():
        np.testing.assert_array_equal(tensors[name], array, err_msg=name)


def test_rank_stabilised_scale_is_stored_as_alpha_over_r(
    tmp_path: Path, hyper: LlamaHyper, pairs: Tensors
) -> None:
    """llama.cpp scales by alpha / r: alpha * sqrt(r) is what gives alpha / sqrt(r)."""
    config = AdapterConfig(2, 6.0, ("q_proj",), use_rslora=True)
    only = {name: array for name, array in pairs.items() if Q in name}
    (note,) = save_gguf_adapter(tmp_path / "a.gguf", hyper, config, only)
    assert note.startswith("adapter.lora.alpha = 8.48528 (alpha * sqrt(r)")
    alpha = keys(tmp_path / "a.gguf")["adapter.lora.alpha"]
    assert alpha / 2 == pytest.approx(config.scale, rel=1e-6)


@pytest.mark.parametrize(
    ("rslora", "alphas", "factor"),
    [
        (False, {}, False),  # llama.cpp divides by each layer's own rank
        (False, {"up_proj": 5.0}, True),
        (True, {}, True),
        (True, {"up_proj": 5.0}, True),
    ],
)
def test_scales_of_single_layers_survive(  # noqa: PLR0913  two fixtures and a case
    tmp_path: Path,
    hyper: LlamaHyper,
    pairs: Tensors,
    rslora: bool,  # noqa: FBT001  a case
    alphas: dict[str, float],
    factor: bool,  # noqa: FBT001  a case
) -> None:
    config = AdapterConfig(
        2, 6.0, ("q_proj", "up_proj"), rslora,
        rank_pattern={"up_proj": 3}, alpha_pattern=alphas,
    )  # fmt: skip
    notes = save_gguf_adapter(tmp_path / "a.gguf", hyper, config, pairs)
    assert any("holds a factor" in note for note in notes) is factor
    back, tensors = load_any_adapter(tmp_path / "a.gguf", hyper)
    assert (back.rank_of(Q), back.rank_of(UP)) == (2, 3)
    want, got = deltas(config, pairs, (Q, UP)), deltas(back, tensors, (Q, UP))
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-5)


def test_alpha_zero_is_the_scale_one_as_in_llama_cpp(
    tmp_path: Path, hyper: LlamaHyper, pairs: Tensors
) -> None:
    path = tmp_path / "zero.gguf"
    write_adapter(path, {"adapter.lora.alpha": 0.0}, pairs)
    config, _ = load_gguf_adapter(path, hyper)
    assert (config.scale_of(Q), config.scale_of(UP)) == (1.0, 1.0)
    # And an adapter whose scale is 0 stays one.
    off = AdapterConfig(2, 0.0, ("q_proj", "up_proj"), rank_pattern={"up_proj": 3})
    save_gguf_adapter(path, hyper, off, pairs)
    assert not stored(path)["blk.0.attn_q.weight.lora_b"].any()


def test_either_format_is_found_by_its_path(
    tmp_path: Path, hyper: LlamaHyper, pairs: Tensors
) -> None:
    config = AdapterConfig(2, 6.0, ("q_proj", "up_proj"), rank_pattern={"up_proj": 3})
    save_adapter(tmp_path / "peft", config, pairs)
    for path in (tmp_path / "peft", tmp_path / "peft" / "adapter_model.safetensors"):
        assert load_any_adapter(path, hyper)[0] == config
    with pytest.raises(DataError, match="does not exist, expected a folder in PEFT's layout or a"):
        load_any_adapter(tmp_path / "absent", hyper)


def test_what_the_format_cannot_hold_is_refused(
    tmp_path: Path, hyper: LlamaHyper, pairs: Tensors
) -> None:
    dora = AdapterConfig(2, 6.0, ("q_proj",), use_dora=True)
    with pytest.raises(DataError, match=r"DoRA's magnitudes .* merge it into the base"):
        save_gguf_adapter(tmp_path / "a.gguf", hyper, dora, pairs)
    other = {name.replace("q_proj", "c_attn"): array for name, array in pairs.items()}
    with pytest.raises(DataError, match=r"GGUF has no name for 'model\.layers\.0\.self_attn\.c_at"):
        save_gguf_adapter(tmp_path / "a.gguf", hyper, AdapterConfig(2, 6.0, ("c_attn",)), other)
    assert list(tmp_path.iterdir()) == []


def write_adapter(path: Path, metadata: dict[str, Any], tensors: Tensors) -> None:
    """A GGUF with an adapter's keys, except where ``metadata`` says otherwise."""
    usual = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 8.0}
    merged = {"general.architecture": "llama", **usual, **metadata}
    writer = GGUFWriter(path, merged.pop("general.architecture"))
    for key, value in merged.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            add: Any = writer.add_string if isinstance(value, str) else writer.add_float32
            add(key, value)
    names = {
        peft_name(theirs, half): f"{ours}.weight.lora_{half.lower()}"
        for theirs, ours in {Q: "blk.0.attn_q", UP: "blk.1.ffn_up"}.items()
        for half in HALVES
    }
    for name, array in tensors.items():
        writer.add_tensor(names.get(name, name), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.type": "model"}, "has general.type = 'model', .* expected 'adapter'"),
        ({"general.type": None}, "has general.type = None"),
        ({"adapter.type": "control_vector"}, "adapter.type = 'control_vector'"),
        ({"general.architecture": "qwen2"}, "is for the architecture 'qwen2', expected llama"),
        ({"adapter.lora.alpha": None}, "lacks the metadata key adapter.lora.alpha"),
        ({"adapter.alora.invocation_tokens": [1]}, "is an activated LoRA"),
    ],
)
def test_files_that_are_no_such_adapter(
    tmp_path: Path, hyper: LlamaHyper, pairs: Tensors, metadata: dict[str, Any], message: str
) -> None:
    write_adapter(tmp_path / "a.gguf", metadata, pairs)
    with pytest.raises(DataError, match=message):
        load_gguf_adapter(tmp_path / "a.gguf", hyper)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_embd.weight.lora_a": (2, 8)}, r"has the tensor 'token_embd\.weight\.lora_a', exp"),
        ({peft_name(UP, "B"): None}, r"has lora_a and lora_b of shapes \[\(3, 256\), None\] for"),
        ({peft_name(Q, "B"): (128, 2)}, r"has B of shape \(128, 2\) .* expected \(256, r\)"),
        ({peft_name(UP, "A"): (4, 256)}, r"shapes \[\(4, 256\), \(512, 3\)\].*\(r, in\) and"),
    ],
)
def test_tensors_that_do_not_fit(
    tmp_path: Path, hyper: LlamaHyper, pairs: Tensors, change: dict[str, Any], message: str
) -> None:
    for name, shape in change.items():
        pairs.pop(name, None)
        if shape is not None:
            pairs[name] = np.zeros(shape, np.float32)
    write_adapter(tmp_path / "a.gguf", {}, pairs)
    with pytest.raises(DataError, match=message):
        load_gguf_adapter(tmp_path / "a.gguf", hyper)
