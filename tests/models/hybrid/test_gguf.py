"""Hybrid GGUF files: every rule of their layout on a small file, and every kind of bad file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter, quants
from numpy.typing import NDArray

import vkjit.numpy as jnp
from tests.gguf_files import write_gguf
from vkjit.blocks import block_of, decode
from vkjit.errors import ArgumentError, DataError
from vkjit_models.common.adapter_config import AdapterConfig
from vkjit_models.common.adapter_gguf import load_gguf_adapter, save_gguf_adapter
from vkjit_models.common.adapter_io import peft_name
from vkjit_models.common.gguf import LlamaHyper, WeightFormat, open_gguf
from vkjit_models.hybrid.config import HybridHyper, check_params
from vkjit_models.hybrid.gguf import adapter_layout, hybrid_hyper, hybrid_weights, read_hybrid

Write = Callable[..., Path]
DELTA, ATTENTION = "model.layers.0.linear_attn", "model.layers.1.self_attn"
SMALL = HybridHyper(
    vocab_size=4,
    hidden_size=8,
    intermediate_size=16,
    kinds=("linear_attention", "full_attention"),
    heads=2,
    kv_heads=1,
    head_dim=4,
    rotary_dim=2,
    rope_theta=5000.0,
    rms_eps=0.5,
    delta_key_heads=2,
    delta_value_heads=4,
    delta_key_dim=3,
    delta_value_dim=64,
    conv_kernel=4,
    tied=True,
    context_length=32,
)
HUGGING_FACE_HEADS = [0, 2, 1, 3]
"""The file's value head at each place of Hugging Face, with 2 key heads and 2 values to each."""


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a file of `SMALL`; tests break it in one place."""

    def write(
        *,
        metadata: Mapping[str, Any] | None = None,
        tensors: Mapping[str, Any] | None = None,
        architecture: str = "qwen35",
    ) -> Path:
        settings: dict[str, Any] = {
            "embedding_length": 8, "feed_forward_length": 16, "block_count": 2,
            "attention.head_count": 2, "attention.head_count_kv": 1, "attention.key_length": 4,
            "context_length": 32, "attention.layer_norm_rms_epsilon": 0.5, "rope.freq_base": 5e3,
            "rope.dimension_count": 2, "ssm.conv_kernel": 4, "ssm.state_size": 3,
            "ssm.group_count": 2, "ssm.time_step_rank": 4, "ssm.inner_size": 256,
            "full_attention_interval": 2,
        }  # fmt: skip
        whole = {f"{architecture}.{key}": v for key, v in (settings | dict(metadata or {})).items()}
        values = small_tensors() | dict(tensors or {})
        return write_gguf(tmp_path / "small.gguf", architecture, whole, values)

    return write


def small_tensors() -> dict[str, Any]:
    shapes = {
        "token_embd.weight": (4, 8), "output_norm.weight": (8,),
        "blk.0.attn_qkv.weight": (268, 8), "blk.0.attn_gate.weight": (256, 8),
        "blk.0.ssm_beta.weight": (4, 8), "blk.0.ssm_alpha.weight": (4, 8),
        "blk.0.ssm_out.weight": (8, 256), "blk.0.ssm_conv1d.weight": (268, 4),
        "blk.0.ssm_dt.bias": (4,), "blk.0.ssm_a": (4,), "blk.0.ssm_norm.weight": (64,),
        "blk.1.attn_q.weight": (16, 8), "blk.1.attn_k.weight": (4, 8),
        "blk.1.attn_v.weight": (4, 8), "blk.1.attn_output.weight": (8, 8),
        "blk.1.attn_q_norm.weight": (4,), "blk.1.attn_k_norm.weight": (4,),
    }  # fmt: skip
    for layer in range(2):
        shapes |= {
            f"blk.{layer}.attn_norm.weight": (8,), f"blk.{layer}.post_attention_norm.weight": (8,),
            f"blk.{layer}.ffn_gate.weight": (16, 8), f"blk.{layer}.ffn_up.weight": (16, 8),
            f"blk.{layer}.ffn_down.weight": (8, 16),
        }  # fmt: skip
    rng = np.random.default_rng(0)
    tensors = {
        name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()
    }
    tensors["blk.0.ssm_a"] = -np.exp(tensors["blk.0.ssm_a"])
    return tensors


def heads_of(values: NDArray[Any], width: int) -> NDArray[Any]:
    """Rows of the file's value heads, put where Hugging Face has them, head by head."""
    return np.concatenate([values[h * width : (h + 1) * width] for h in HUGGING_FACE_HEADS])


def numbers_of(value: NDArray[Any]) -> NDArray[np.float32]:
    block = block_of(value.dtype)
    return value.astype(np.float32) if block is None else decode(block, value)


def test_hyper_is_what_the_metadata_say(write: Write) -> None:
    assert hybrid_hyper(open_gguf(write())) == SMALL


def test_every_weight_follows_the_layout_rules(write: Write) -> None:
    hyper, weights = read_hybrid(write())
    check_params(hyper, weights)
    stored = small_tensors()
    block = {name.removeprefix("blk.0."): array for name, array in stored.items()}
    qkv, conv = block["attn_qkv.weight"], block["ssm_conv1d.weight"]
    want = {
        "model.embed_tokens.weight": stored["token_embd.weight"],
        "model.norm.weight": stored["output_norm.weight"] - 1,
        "model.layers.0.input_layernorm.weight": block["attn_norm.weight"] - 1,
        "model.layers.0.post_attention_layernorm.weight": block["post_attention_norm.weight"] - 1,
        f"{DELTA}.in_proj_qkv.weight": np.concatenate([qkv[:12], heads_of(qkv[12:], 64)]),
        f"{DELTA}.in_proj_z.weight": heads_of(block["attn_gate.weight"], 64),
        f"{DELTA}.in_proj_b.weight": heads_of(block["ssm_beta.weight"], 1),
        f"{DELTA}.in_proj_a.weight": heads_of(block["ssm_alpha.weight"], 1),
        f"{DELTA}.out_proj.weight": heads_of(block["ssm_out.weight"].T, 64).T,
        f"{DELTA}.conv1d.weight": np.concatenate([conv[:12], heads_of(conv[12:], 64)])[:, None],
        f"{DELTA}.dt_bias": heads_of(block["ssm_dt.bias"], 1),
        f"{DELTA}.A_log": np.log(-heads_of(block["ssm_a"], 1)),
        f"{DELTA}.norm.weight": block["ssm_norm.weight"],
        f"{ATTENTION}.q_proj.weight": stored["blk.1.attn_q.weight"],
        f"{ATTENTION}.k_proj.weight": stored["blk.1.attn_k.weight"],
        f"{ATTENTION}.v_proj.weight": stored["blk.1.attn_v.weight"],
        f"{ATTENTION}.o_proj.weight": stored["blk.1.attn_output.weight"],
        f"{ATTENTION}.q_norm.weight": stored["blk.1.attn_q_norm.weight"] - 1,
        f"{ATTENTION}.k_norm.weight": stored["blk.1.attn_k_norm.weight"] - 1,
        "model.layers.1.mlp.gate_proj.weight": stored["blk.1.ffn_gate.weight"],
        "model.layers.1.mlp.up_proj.weight": stored["blk.1.ffn_up.weight"],
        "model.layers.1.mlp.down_proj.weight": stored["blk.1.ffn_down.weight"],
    }
    for name, array in want.items():
        np.testing.assert_allclose(weights[name], array, rtol=1e-6, atol=1e-7, err_msg=name)
        assert weights[name].dtype == np.float32
        assert weights[name].flags.c_contiguous


@pytest.mark.parametrize(
    ("kind", "held"), [("Q8_0", "Q8_0"), ("Q4_0", "Q4_0"), ("Q4_K", "float32"), ("F16", "float16")]
)
def test_columns_stay_in_blocks_where_a_head_is_whole_blocks(
    kind: str, held: str, write: Write
) -> None:
    """Heads of 64: two blocks of 32 each; a block of 256 holds four heads and is expanded."""
    numbers = small_tensors()["blk.0.ssm_out.weight"]
    if kind == "F16":
        stored: Any = numbers.astype(np.float16)
        values = stored.astype(np.float32)
    elif kind == "Q4_K":
        raw = np.random.default_rng(1).integers(0, 64, (8, 144), dtype=np.uint8)
        stored, values = (raw, kind), quants.dequantize(raw, GGMLQuantizationType.Q4_K)
    else:
        raw = quants.quantize(numbers, GGMLQuantizationType[kind])
        stored, values = (raw, kind), quants.dequantize(raw, GGMLQuantizationType[kind])
    file = open_gguf(write(tensors={"blk.0.ssm_out.weight": stored}))
    (weight,) = (
        weight
        for weight in hybrid_weights(file, hybrid_hyper(file), "packed")
        if weight.name == f"{DELTA}.out_proj.weight"
    )
    block = block_of(weight.value.dtype)
    assert held == (block.name if block else weight.value.dtype.name)
    np.testing.assert_array_equal(numbers_of(weight.value), heads_of(values.T, 64).T)
    assert weight.copied_bytes == (2 if kind == "Q4_K" else 1) * weight.value.nbytes


def test_one_value_head_to_a_key_head_moves_nothing(write: Write) -> None:
    wider = {
        "blk.0.attn_qkv.weight": np.zeros((280, 8), np.float32),
        "blk.0.ssm_conv1d.weight": np.zeros((280, 4), np.float32),
    }
    file = open_gguf(write(metadata={"ssm.group_count": 4}, tensors=wider))
    for weight in hybrid_weights(file, hybrid_hyper(file), "packed"):
        plain = weight.name == f"{DELTA}.norm.weight"
        computed = ("norm" in weight.name and not plain) or "A_log" in weight.name
        assert weight.copied_bytes == (weight.value.nbytes if computed else 0), weight.name


@pytest.mark.parametrize("weights", ["float16", "bfloat16"])
def test_matrices_in_a_float_type_and_the_rest_in_float32(
    write: Write, weights: WeightFormat
) -> None:
    _, expanded = read_hybrid(write())
    for name, value in read_hybrid(write(), weights)[1].items():
        wanted = jnp.dtype(weights) if value.ndim == 2 else np.dtype(np.float32)
        assert value.dtype == wanted
        np.testing.assert_array_equal(value, expanded[name].astype(wanted))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "qwen2"}, "has architecture 'qwen2', expected qwen35"),
        ({"tensors": {"blk.0.ssm_a": None}}, r"lacks 1 tensors \(blk\.0\.ssm_a\), .* of a qwen35"),
        (
            {"tensors": {"blk.0.attn_q.weight": np.zeros((8, 8), np.float32)}},
            r"unexpected 1 tensors \(blk\.0\.attn_q\.weight\)",
        ),
        (
            {"tensors": {"blk.0.ssm_conv1d.weight": np.zeros((268, 3), np.float32)}},
            r"ssm_conv1d\.weight' .* shape \(268, 3\), expected \(268, 4\)",
        ),
        (
            {"tensors": {"blk.0.ssm_a": np.ones(4, np.float32)}},
            r"ssm_a of model\.layers\.0 in .* holds 1, expected -exp\(A_log\)",
        ),
        ({"metadata": {"full_attention_interval": 0}}, "full_attention_interval = 0 / 1"),
        ({"metadata": {"ssm.group_count": 3}}, "value by key heads = 4 / 3"),
        ({"metadata": {"rope.dimension_count": 3}}, "RoPE over 3 of 4 dimensions"),
        ({"metadata": {"attention.value_length": 8}}, "value heads of 8 beside key heads of 4"),
        ({"metadata": {"rope.scaling.type": "yarn"}}, "RoPE scaling 'yarn'"),
        ({"metadata": {"nextn_predict_layers": 1}}, "1 blocks that predict further tokens"),
        ({"metadata": {"expert_count": 8}}, "8 experts"),
    ],
)
def test_files_that_are_no_such_model(write: Write, change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_hybrid(write(**change))


def test_an_unknown_format_is_refused(write: Write) -> None:
    with pytest.raises(ArgumentError, match="read_hybrid: weights='int8' was given, expected one"):
        read_hybrid(write(), "int8")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("module", "half", "shape", "wanted"),
    [
        (f"{DELTA}.in_proj_qkv", "B", (256, 2), r"B of shape \(256, 2\) .* \(268, r\)"),
        (f"{DELTA}.out_proj", "A", (2, 128), r"A of shape \(2, 128\) .* \(r, 256\)"),
    ],
)
def test_an_adapter_of_other_sizes(
    module: str, half: str, shape: tuple[int, int], wanted: str, tmp_path: Path
) -> None:
    pair = {"A": np.zeros((2, 8), np.float32), "B": np.zeros((8, 2), np.float32)}
    pair[half] = np.zeros(shape, np.float32)
    writer = GGUFWriter(tmp_path / "a.gguf", "qwen35")
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 4.0)
    name = f"blk.0.{adapter_layout(SMALL).to_gguf[module.split('.', 3)[3]]}.weight"
    for which, array in pair.items():
        writer.add_tensor(f"{name}.lora_{which.lower()}", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(DataError, match=wanted):
        load_gguf_adapter(tmp_path / "a.gguf", adapter_layout(SMALL))


def test_adapters_are_written_as_they_are_read(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    shapes = {f"{DELTA}.in_proj_qkv": (268, 8), f"{DELTA}.out_proj": (8, 256)}
    tensors = {}
    for module, (out, inputs) in shapes.items():
        tensors[peft_name(module, "A")] = rng.standard_normal((2, inputs)).astype(np.float32)
        tensors[peft_name(module, "B")] = rng.standard_normal((out, 2)).astype(np.float32)
    layout, config = adapter_layout(SMALL), AdapterConfig(2, 4.0, ("in_proj_qkv", "out_proj"))
    assert save_gguf_adapter(tmp_path / "a.gguf", layout, config, tensors) == ()
    back, read = load_gguf_adapter(tmp_path / "a.gguf", layout)
    assert back.scale == 2.0
    assert read.keys() == tensors.keys()
    for name, array in tensors.items():
        np.testing.assert_array_equal(read[name], array)
    stored = open_gguf(tmp_path / "a.gguf").load_tensor("blk.0.ssm_out.weight.lora_a")
    np.testing.assert_array_equal(
        tensors[peft_name(f"{DELTA}.out_proj", "A")], heads_of(stored.T, 64).T
    )
    llama = LlamaHyper(4, 8, 16, 2, 2, 1, 4, 1e4, 1e-5, tied=True, context_length=32)
    with pytest.raises(DataError, match="architecture 'qwen35', expected llama"):
        load_gguf_adapter(tmp_path / "a.gguf", llama)
