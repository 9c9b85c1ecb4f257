"""Hybrid models and their adapters out of GGUF files (llama.cpp's architecture ``qwen35``).

The file differs from Hugging Face's weights, which the model takes, in three ways: zero-centred
norms hold 1 + w; ``ssm_a`` holds -exp(A_log); and value heads of delta nets are tiled. With Hk key
heads and R value heads to each of them, the file's value head r*Hk + k is Hugging Face's k*R + r,
in the rows of everything that makes or scales values and in the columns of ``ssm_out``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from vkjit.blocks import block_of
from vkjit.errors import DataError
from vkjit_models.common.adapter_gguf import AdapterLayout
from vkjit_models.common.gguf import GgufFile, HostWeight, WeightFormat, check_format, open_gguf

from .config import EMBEDDING, FINAL_NORM, HEAD, HybridHyper, LayerKind, param_shapes

ARCHITECTURE = "qwen35"
"""Value of ``general.architecture`` that :func:`read_hybrid` accepts."""

LINEAR_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_out": "linear_attn.out_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Hugging Face names of a block's linear layers by their names in the file."""

_A_LOG = "linear_attn.A_log"
_IN_BLOCK = {f"{theirs}.weight": f"{ours}.weight" for ours, theirs in LINEAR_NAMES.items()} | {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.dt_bias": "ssm_dt.bias",
    _A_LOG: "ssm_a",
}
_OUTSIDE = {
    f"{EMBEDDING}.weight": "token_embd.weight",
    f"{FINAL_NORM}.weight": "output_norm.weight",
    f"{HEAD}.weight": "output.weight",
}
_ZERO_CENTRED = (
    "input_layernorm.weight", "post_attention_layernorm.weight", "q_norm.weight", "k_norm.weight",
    f"{FINAL_NORM}.weight",
)  # fmt: skip
_Axis = Literal["rows", "columns"]


def read_hybrid(
    source: Path | str | GgufFile, weights: WeightFormat = "float32"
) -> tuple[HybridHyper, dict[str, NDArray[Any]]]:
    """Sizes and weights of a ``qwen35`` GGUF, by Hugging Face name.

    The weights are those of :func:`hybrid_weights`, all at once.

    Raises:
        ArgumentError: ``weights`` is none of the formats.
        DataError: As :func:`hybrid_hyper`.
    """
    file = source if isinstance(source, GgufFile) else open_gguf(source)
    hyper = hybrid_hyper(file)
    return hyper, {weight.name: weight.value for weight in hybrid_weights(file, hyper, weights)}


def hybrid_hyper(file: GgufFile) -> HybridHyper:
    """Sizes and constants of a ``qwen35`` file whose tensors are all there.

    Raises:
        DataError: Another architecture, tensor type or RoPE scaling, experts or layers that
            predict further tokens; missing, foreign or misshapen tensors.
    """
    if file.architecture != ARCHITECTURE:
        raise DataError(
            f"gguf: {file.path} has architecture {file.architecture!r}, expected {ARCHITECTURE}; "
            "choose another model"
        )
    hyper = _hyper(file)
    _check_variant(file, hyper)
    file.check_tensors(dict(_tensor_of(n, s) for n, s in param_shapes(hyper).items()))
    return hyper


def hybrid_weights(
    file: GgufFile, hyper: HybridHyper, weights: WeightFormat
) -> Iterator[HostWeight]:
    """The weights of a file that :func:`hybrid_hyper` accepted, one after the other.

    Names, shapes and orders are Hugging Face's. Matrices are (out, in), in the format ``weights``
    as :func:`~vkjit_models.common.gguf.llama_weights` says. Rows of blocks change places as they
    are; so do columns where a head's are whole blocks, and are expanded to float32 where a block
    holds numbers of several heads. Vectors and convolutions are float32 in every format.

    Raises:
        ArgumentError: ``weights`` is none of the formats.
        DataError: A number of ``ssm_a`` is not negative.
    """
    check_format("read_hybrid", weights)
    for name, shape in param_shapes(hyper).items():
        stored, _ = _tensor_of(name, shape)
        tensor = file.tensors[stored]
        value, copied = file.in_format(stored, weights if len(shape) == 2 else "float32")
        for axis in get_args(_Axis):
            places = _places(hyper, name, axis)
            if places is None:
                continue
            moved = _take(value, places, axis)
            if moved is None:
                expanded = file.load_tensor(stored)
                copied += expanded.nbytes
                moved = expanded[:, places]
            value = np.ascontiguousarray(moved)
            copied += value.nbytes
        if len(shape) != 2:
            numbers = _numbers(file, name, value)
            copied += 0 if numbers is value else numbers.nbytes
            value = numbers.reshape(shape)
        yield HostWeight(name, tensor.tensor_type.name, value, int(tensor.n_bytes), copied)


def adapter_layout(hyper: HybridHyper) -> AdapterLayout:
    """Names and orders of a GGUF adapter of this model."""

    def places(kind: str, half: Literal["A", "B"]) -> NDArray[np.intp] | None:
        return _places(hyper, f"{kind}.weight", "rows" if half == "B" else "columns")

    return AdapterLayout(ARCHITECTURE, LINEAR_NAMES, places)


def _tensor_of(name: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Name and shape in the file of the parameter ``name``: convolutions lose their axis of 1."""
    if name in _OUTSIDE:
        return _OUTSIDE[name], shape
    _, _, layer, kind = name.split(".", 3)
    return f"blk.{layer}.{_IN_BLOCK[kind]}", (shape[0], shape[2]) if len(shape) == 3 else shape


def _places(hyper: HybridHyper, name: str, axis: _Axis) -> NDArray[np.intp] | None:
    """For each of a parameter's rows or columns its place in the file; None: the same place."""
    part = name.rpartition("linear_attn.")[2].removesuffix(".weight")
    if axis == "columns":
        return _value_places(hyper, hyper.delta_value_dim) if part == "out_proj" else None
    if part in ("in_proj_a", "in_proj_b", "A_log", "dt_bias"):
        return _value_places(hyper, 1)
    if part not in ("in_proj_qkv", "in_proj_z", "conv1d"):
        return None
    places = _value_places(hyper, hyper.delta_value_dim)
    if places is None or part == "in_proj_z":
        return places
    queries_and_keys = 2 * hyper.delta_keys
    return np.concatenate([np.arange(queries_and_keys), queries_and_keys + places])


def _value_places(hyper: HybridHyper, width: int) -> NDArray[np.intp] | None:
    """Places of value heads of ``width`` entries each; None where tiling them changes nothing."""
    repeats = hyper.delta_value_heads // hyper.delta_key_heads
    if 1 in (repeats, hyper.delta_key_heads):
        return None
    tiled = np.arange(hyper.delta_value_heads * width, dtype=np.intp)
    return tiled.reshape(repeats, hyper.delta_key_heads, width).swapaxes(0, 1).reshape(-1)


def _take(value: NDArray[Any], places: NDArray[np.intp], axis: _Axis) -> NDArray[Any] | None:
    """``value`` with its rows or columns from ``places``; None where that divides blocks."""
    if axis == "rows":
        return value[places]
    block = block_of(value.dtype)
    if block is None:
        return value[:, places]
    runs = places.reshape(-1, block.size)
    firsts = runs[:, :1]
    whole = np.all(runs == firsts + np.arange(block.size)) and not np.any(firsts % block.size)
    return value[:, firsts[:, 0] // block.size] if whole else None


def _numbers(file: GgufFile, name: str, value: NDArray[Any]) -> NDArray[Any]:
    """What Hugging Face holds in place of the numbers of a vector."""
    if name.endswith(_ZERO_CENTRED):
        return value - np.float32(1)
    if not name.endswith(_A_LOG):
        return value
    if not np.all(value < 0):
        raise DataError(
            f"gguf: ssm_a of {name.removesuffix('.' + _A_LOG)} in {file.path} holds "
            f"{value.max():g}, expected -exp(A_log), negative everywhere; the file is damaged"
        )
    return np.log(-value.astype(np.float64)).astype(np.float32)


def _hyper(file: GgufFile) -> HybridHyper:
    def integer(key: str, default: int | None = None) -> int:
        return file.integer(f"{ARCHITECTURE}.{key}", default)

    interval, inner = integer("full_attention_interval", 4), integer("ssm.inner_size")
    value_heads, key_heads = integer("ssm.time_step_rank"), integer("ssm.group_count")
    heads, kv_heads = integer("attention.head_count"), integer("attention.head_count_kv")
    parts = {
        "full_attention_interval": (interval, 1),
        "query by kv heads": (heads, kv_heads),
        "value by key heads": (value_heads, key_heads),
        "ssm.inner_size by value heads": (inner, value_heads),
    }
    for what, (whole, part) in parts.items():
        if part < 1 or whole < 1 or whole % part:
            raise DataError(
                f"gguf: {file.path} has {what} = {whole} / {part}, expected positive numbers that "
                "divide; the file is damaged"
            )
    embedding = file.tensors.get("token_embd.weight")
    kinds: list[LayerKind] = [
        "linear_attention" if (layer + 1) % interval else "full_attention"
        for layer in range(integer("block_count"))
    ]
    head_dim = integer("attention.key_length")
    return HybridHyper(
        vocab_size=integer("vocab_size", int(embedding.shape[-1]) if embedding is not None else 0),
        hidden_size=integer("embedding_length"),
        intermediate_size=integer("feed_forward_length"),
        kinds=tuple(kinds),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rotary_dim=integer("rope.dimension_count", head_dim),
        rope_theta=file.number(f"{ARCHITECTURE}.rope.freq_base", 10000.0),
        rms_eps=file.number(f"{ARCHITECTURE}.attention.layer_norm_rms_epsilon"),
        delta_key_heads=key_heads,
        delta_value_heads=value_heads,
        delta_key_dim=integer("ssm.state_size"),
        delta_value_dim=inner // value_heads,
        conv_kernel=integer("ssm.conv_kernel"),
        tied="output.weight" not in file.tensors,
        context_length=integer("context_length"),
    )


def _check_variant(file: GgufFile, hyper: HybridHyper) -> None:
    """Refuse what would load and compute something else."""
    scaling = file.metadata.get(f"{ARCHITECTURE}.rope.scaling.type", "none")
    value_dim = file.integer(f"{ARCHITECTURE}.attention.value_length", hyper.head_dim)
    further = file.integer(f"{ARCHITECTURE}.nextn_predict_layers", 0)
    experts = file.integer(f"{ARCHITECTURE}.expert_count", 0)
    found: list[str] = []
    if hyper.rotary_dim % 2 or hyper.rotary_dim > hyper.head_dim:
        found.append(
            f"RoPE over {hyper.rotary_dim} of {hyper.head_dim} dimensions (supported: an even "
            "number of them)"
        )
    if value_dim != hyper.head_dim:
        found.append(
            f"value heads of {value_dim} beside key heads of {hyper.head_dim} (supported: equal)"
        )
    if scaling != "none":
        found.append(f"RoPE scaling {scaling!r} (supported: none)")
    if further:
        found.append(f"{further} blocks that predict further tokens (supported: none)")
    if experts:
        found.append(f"{experts} experts (supported: dense MLP)")
    if found:
        raise DataError(f"gguf: {file.path} uses {'; '.join(found)}; choose another model")
