"""GGUF reading: values against a model that llama.cpp reads too, and every kind of bad file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter, quants
from numpy.typing import NDArray
from safetensors.numpy import load_file

import vkjit.numpy as jnp
from vkjit.blocks import BLOCK_TYPES
from vkjit.errors import ArgumentError, DataError
from vkjit_models.common.gguf import (
    SUPPORTED_TYPES,
    GgufFile,
    LlamaHyper,
    WeightFormat,
    llama_hyper,
    llama_weights,
    open_gguf,
    permute_rows,
    read_llama,
    unpermute_rows,
)

Weights = Mapping[str, NDArray[np.floating]]


def test_hyper_is_what_the_metadata_say(tiny_gguf: GgufFile) -> None:
    hyper, weights = read_llama(tiny_gguf)
    assert hyper == LlamaHyper(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=64,
        rope_theta=50000.0,
        rms_eps=float(np.float32(1e-5)),
        tied=False,
        context_length=512,
    )
    assert len(weights) == 2 * 9 + 3
    assert weights["lm_head.weight"].shape == (512, 256)
    assert weights["model.layers.1.mlp.down_proj.weight"].shape == (256, 512)
    assert all(weight.dtype == np.float32 for weight in weights.values())
    assert all(weight.flags.c_contiguous for weight in weights.values())


def test_the_tiny_model_holds_every_supported_type(tiny_gguf: GgufFile) -> None:
    found = {tensor.tensor_type.name for tensor in tiny_gguf.tensors.values()}
    assert found == set(SUPPORTED_TYPES)


def test_weights_give_the_reference_logits(tiny_gguf: GgufFile, data: Path) -> None:
    expected = json.loads((data / "gguf" / "tiny_llama.json").read_text())
    hyper, weights = read_llama(tiny_gguf)
    logits = _forward(hyper, weights, expected["input_ids"])
    assert logits.argmax(-1).tolist() == expected["argmax_every_position"]
    assert _loss(logits, expected["input_ids"]) == pytest.approx(
        expected["base_loss_all_tokens"], rel=1e-9
    )


def test_raw_row_order_of_q_and_k_would_show(tiny_gguf: GgufFile, data: Path) -> None:
    expected = json.loads((data / "gguf" / "tiny_llama.json").read_text())
    hyper, weights = read_llama(tiny_gguf)
    for layer in range(hyper.layers):
        name = f"model.layers.{layer}.self_attn.q_proj.weight"
        weights[name] = tiny_gguf.load_tensor(f"blk.{layer}.attn_q.weight")
    loss = _loss(_forward(hyper, weights, expected["input_ids"]), expected["input_ids"])
    assert abs(loss - expected["base_loss_all_tokens"]) > 1e-3


def test_packed_weights_lie_over_the_file_but_for_the_rows_of_q_and_k(tiny_gguf: GgufFile) -> None:
    seen = {kind: 0 for kind in SUPPORTED_TYPES}
    for weight in llama_weights(tiny_gguf, llama_hyper(tiny_gguf), "packed"):
        seen[weight.kind] += 1
        expanded = weight.kind in ("IQ4_NL", "IQ4_XS", "Q2_K", "Q3_K")
        if expanded:
            assert weight.value.dtype == np.float32
            assert weight.copied_bytes == weight.value.nbytes
            continue
        assert weight.value.nbytes == weight.file_bytes
        moved = "q_proj" in weight.name or "k_proj" in weight.name
        assert weight.copied_bytes == (weight.file_bytes if moved else 0)
        assert _is_mapped(weight.value) is not moved
        block = BLOCK_TYPES.get(weight.kind)
        assert weight.value.dtype.names == (block.dtype.names if block else None)
    assert all(seen.values())


def test_packed_rows_hold_the_bytes_of_the_expanded_ones(tiny_gguf: GgufFile) -> None:
    hyper, packed = read_llama(tiny_gguf, "packed")
    _, expanded = read_llama(tiny_gguf)
    for weight in llama_weights(tiny_gguf, hyper, "packed"):
        if weight.kind in BLOCK_TYPES:
            raw = np.ascontiguousarray(packed[weight.name]).view(np.uint8)
            values = quants.dequantize(raw, GGMLQuantizationType[weight.kind])
        else:
            values = packed[weight.name].astype(np.float32)
        np.testing.assert_array_equal(values, expanded[weight.name])


@pytest.mark.parametrize("weights", ["float16", "bfloat16"])
def test_matrices_in_a_float_type_and_norms_in_float32(
    tiny_gguf: GgufFile, weights: WeightFormat
) -> None:
    _, expanded = read_llama(tiny_gguf)
    for name, value in read_llama(tiny_gguf, weights)[1].items():
        wanted = np.dtype(np.float32) if value.ndim == 1 else jnp.dtype(weights)
        assert value.dtype == wanted
        np.testing.assert_array_equal(value, expanded[name].astype(wanted))


def test_an_unknown_format_is_refused(tiny_gguf: GgufFile) -> None:
    with pytest.raises(ArgumentError, match="weights='int8' was given, expected one of packed, fl"):
        read_llama(tiny_gguf, "int8")  # type: ignore[arg-type]


def _is_mapped(array: NDArray[Any]) -> bool:
    base: Any = array
    while base is not None and not isinstance(base, np.memmap):
        base = base.base
    return base is not None


def test_row_orders_are_inverse() -> None:
    rows = np.arange(24, dtype=np.float32).reshape(12, 2)
    assert unpermute_rows(rows, 2)[:, 0].tolist() == [0, 4, 8, 2, 6, 10, 12, 16, 20, 14, 18, 22]
    np.testing.assert_array_equal(permute_rows(unpermute_rows(rows, 3), 3), rows)


@pytest.mark.parametrize("kind", [kind for kind in SUPPORTED_TYPES if kind != "F32"])
def test_blocks_expand_as_in_ggml(kind: str, shared: Path, tmp_path: Path) -> None:
    blocks = load_file(shared / "golden" / "quant" / "blocks.safetensors")
    writer = GGUFWriter(tmp_path / "blocks.gguf", "llama")
    names = [name for name in ("", "random_") if f"{kind}.{name}raw" in blocks]
    for name in names:
        writer.add_tensor(
            f"t{name}", blocks[f"{kind}.{name}raw"], raw_dtype=GGMLQuantizationType[kind]
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = open_gguf(tmp_path / "blocks.gguf")
    for name in names:
        np.testing.assert_array_equal(
            file.load_tensor(f"t{name}"), blocks[f"{kind}.{name}dequantized"]
        )


def test_tied_model_has_no_head(write_llama: Callable[..., Path]) -> None:
    hyper, weights = read_llama(write_llama())
    assert hyper.tied
    assert "lm_head.weight" not in weights


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read .*absent\.gguf: No such file"):
        open_gguf(tmp_path / "absent.gguf")


@pytest.mark.parametrize("content", [b"", b"GG", b"\x7fELF\x02\x01" * 40, b"PK\x03\x04"])
def test_foreign_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"model\.gguf starts with .* expected b'GGUF'"):
        open_gguf(path)


@pytest.mark.parametrize("share", [0.0, 0.0005, 0.01, 0.5, 0.999])
def test_truncated_anywhere(tiny_gguf: GgufFile, tmp_path: Path, share: float) -> None:
    whole = tiny_gguf.path.read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[: 4 + int(share * len(whole))])
    with pytest.raises(DataError, match=r"cut\.gguf \(\d+ bytes\) is truncated or damaged"):
        open_gguf(path)


@pytest.mark.parametrize("version", [1, 99])
def test_unknown_version(tiny_gguf: GgufFile, tmp_path: Path, version: int) -> None:
    content = bytearray(tiny_gguf.path.read_bytes()[:4096])
    content[4] = version
    path = tmp_path / "version.gguf"
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"version {version}"):
        open_gguf(path)


def test_unsupported_architecture_lists_the_supported(write_llama: Callable[..., Path]) -> None:
    with pytest.raises(DataError, match=r"architecture 'mamba', expected one of llama"):
        read_llama(write_llama(architecture="mamba"))


def test_unsupported_type_lists_the_supported(write_llama: Callable[..., Path]) -> None:
    blocks = np.zeros((4, 8 // 8 * 66), np.uint8)
    path = write_llama(tensors={"token_embd.weight": (blocks, "TQ2_0")})
    with pytest.raises(DataError, match=r"'token_embd.weight' .* type TQ2_0, .* Q4_1, .*Q6_K"):
        open_gguf(path).load_tensor("token_embd.weight")


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            {"blk.0.ffn_up.weight": None},
            r"lacks 1 tensors \(blk\.0\.ffn_up\.weight\), expected .*11",
        ),
        ({"blk.0.attn_q.bias": np.zeros(8, np.float32)}, r"unexpected 1 .*attn_q\.bias"),
        (
            {"blk.0.attn_k.weight": np.zeros((8, 8), np.float32)},
            r"attn_k\.weight' .* shape \(8, 8\), expected \(4, 8\)",
        ),
    ],
)
def test_wrong_tensors(
    write_llama: Callable[..., Path], tensors: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        read_llama(write_llama(tensors=tensors))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"rope.scaling.type": "yarn"}, "RoPE scaling 'yarn'"),
        ({"rope.dimension_count": 2}, "RoPE over 2 of 4 dimensions"),
        ({"expert_count": 8}, "8 experts"),
        ({"attention.head_count_kv": 3}, "2 heads and 3 kv heads"),
        ({"block_count": "one"}, "block_count of .* is str, expected an integer"),
    ],
)
def test_unsupported_variant(
    write_llama: Callable[..., Path], metadata: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        read_llama(write_llama(metadata=metadata))


def test_absent_tensor_is_named(tiny_gguf: GgufFile) -> None:
    with pytest.raises(DataError, match=r"no tensor 'blk\.9\.attn_q\.weight'"):
        tiny_gguf.load_tensor("blk.9.attn_q.weight")


def _loss(logits: NDArray[np.float64], ids: list[int]) -> float:
    rows = logits[:-1] - logits[:-1].max(-1, keepdims=True)
    log_probs = rows - np.log(np.exp(rows).sum(-1, keepdims=True))
    return float(-log_probs[np.arange(len(ids) - 1), ids[1:]].mean())


def _forward(hyper: LlamaHyper, weights: Weights, ids: list[int]) -> NDArray[np.float64]:
    """Plain Llama in float64: logits (T, vocabulary)."""
    w = {name: weight.astype(np.float64) for name, weight in weights.items()}
    x = w["model.embed_tokens.weight"][ids]
    for layer in range(hyper.layers):
        p = f"model.layers.{layer}."
        h = _rms(x, w[p + "input_layernorm.weight"], hyper.rms_eps)
        q, k, v = (h @ w[f"{p}self_attn.{name}_proj.weight"].T for name in "qkv")
        x = x + _attention(hyper, q, k, v) @ w[p + "self_attn.o_proj.weight"].T
        h = _rms(x, w[p + "post_attention_layernorm.weight"], hyper.rms_eps)
        gate = h @ w[p + "mlp.gate_proj.weight"].T
        gate = gate / (1 + np.exp(-gate)) * (h @ w[p + "mlp.up_proj.weight"].T)
        x = x + gate @ w[p + "mlp.down_proj.weight"].T
    return _rms(x, w["model.norm.weight"], hyper.rms_eps) @ w["lm_head.weight"].T


def _attention(
    hyper: LlamaHyper, q: NDArray[np.float64], k: NDArray[np.float64], v: NDArray[np.float64]
) -> NDArray[np.float64]:
    time, dim = len(q), hyper.head_dim
    angle = np.arange(time)[:, None] * hyper.rope_theta ** (-np.arange(0, dim, 2) / dim)
    out = []
    for head in range(hyper.heads):
        group = head // (hyper.heads // hyper.kv_heads)
        key = _rotate(k[:, group * dim :][:, :dim], angle)
        scores = _rotate(q[:, head * dim :][:, :dim], angle) @ key.T / np.sqrt(dim)
        scores = np.where(np.tri(time, dtype=bool), scores, -np.inf)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        out.append(scores / scores.sum(-1, keepdims=True) @ v[:, group * dim :][:, :dim])
    return np.concatenate(out, -1)


def _rotate(x: NDArray[np.float64], angle: NDArray[np.float64]) -> NDArray[np.float64]:
    a, b = np.split(x, 2, -1)
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def _rms(x: NDArray[np.float64], weight: NDArray[np.float64], eps: float) -> NDArray[np.float64]:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight
