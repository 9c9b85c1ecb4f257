"""Sizes of a Qwen3.5-shaped dense hybrid model and the names and shapes of its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, final

from vkjit.errors import DataError

LayerKind: TypeAlias = Literal["linear_attention", "full_attention"]
"""A gated delta net, or gated attention over all tokens; Hugging Face's words."""
EMBEDDING = "model.embed_tokens"
FINAL_NORM = "model.norm"
HEAD = "lm_head"


@final
@dataclass(frozen=True)
class HybridHyper:
    """Sizes and constants of a hybrid model, as its file states them.

    Args:
        vocab_size: Rows of the embedding matrix.
        hidden_size: Width of the residual stream.
        intermediate_size: Width of the gated MLP.
        kinds: What each block mixes tokens with; its length is the number of blocks.
        heads: Query heads of attention.
        kv_heads: Key and value heads of attention; divides ``heads``.
        head_dim: Width of one head of attention.
        rotary_dim: Leading dimensions of a head that RoPE turns; even, at most ``head_dim``.
        rope_theta: Base of the RoPE frequencies.
        rms_eps: Added to the mean square inside every RMS norm.
        delta_key_heads: Key and query heads of a delta net.
        delta_value_heads: Value heads of a delta net; a multiple of ``delta_key_heads``. Value
            head j reads key head ``j // (delta_value_heads // delta_key_heads)``.
        delta_key_dim: Width of one of its key heads.
        delta_value_dim: Width of one of its value heads.
        conv_kernel: Tokens that its causal convolution reads.
        tied: The output head is the embedding matrix.
        context_length: Longest window, in tokens, that the model was trained for.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    kinds: tuple[LayerKind, ...]
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    rms_eps: float
    delta_key_heads: int
    delta_value_heads: int
    delta_key_dim: int
    delta_value_dim: int
    conv_kernel: int
    tied: bool
    context_length: int

    @property
    def layers(self) -> int:
        """Number of blocks."""
        return len(self.kinds)

    @property
    def delta_keys(self) -> int:
        """Width of all key heads of a delta net."""
        return self.delta_key_heads * self.delta_key_dim

    @property
    def delta_values(self) -> int:
        """Width of all value heads of a delta net."""
        return self.delta_value_heads * self.delta_value_dim


def from_hugging_face(config: Mapping[str, Any]) -> HybridHyper:
    """Sizes from a Hugging Face ``config.json`` of ``Qwen3_5ForCausalLM`` (``qwen3_5_text``).

    RoPE's constants may stand in ``rope_parameters``, as in transformers 5, or beside the sizes.

    Raises:
        DataError: A feature that this model does not compute.
    """
    kinds: tuple[LayerKind, ...] = tuple(config["layer_types"])
    rope = config.get("rope_parameters") or config
    if rope.get("rope_type", "default") != "default":
        raise DataError(
            f"hybrid config: rope_type={rope['rope_type']!r} was given, expected 'default'; choose "
            "a model without RoPE scaling"
        )
    refused = {
        "hidden_act": config.get("hidden_act", "silu") != "silu",
        "attention_bias": bool(config.get("attention_bias", False)),
        "layer_types": not set(kinds) <= {"linear_attention", "full_attention"},
    }
    for key, bad in refused.items():
        if bad:
            raise DataError(
                f"hybrid config: {key}={config[key]!r} was given, expected delta nets and full "
                "attention with SiLU and without biases; choose another model"
            )
    return HybridHyper(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        kinds=kinds,
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        rotary_dim=int(config["head_dim"] * rope["partial_rotary_factor"]),
        rope_theta=rope["rope_theta"],
        rms_eps=config["rms_norm_eps"],
        delta_key_heads=config["linear_num_key_heads"],
        delta_value_heads=config["linear_num_value_heads"],
        delta_key_dim=config["linear_key_head_dim"],
        delta_value_dim=config["linear_value_head_dim"],
        conv_kernel=config["linear_conv_kernel_dim"],
        tied=config["tie_word_embeddings"],
        context_length=config["max_position_embeddings"],
    )


def linear_shapes(hyper: HybridHyper) -> dict[str, tuple[int, int]]:
    """Shape (out, in) of every linear layer inside the blocks, by module name, in order."""
    d, ff = hyper.hidden_size, hyper.intermediate_size
    q, kv = hyper.heads * hyper.head_dim, hyper.kv_heads * hyper.head_dim
    keys, values, heads = hyper.delta_keys, hyper.delta_values, hyper.delta_value_heads
    mixers: dict[LayerKind, dict[str, tuple[int, int]]] = {
        "linear_attention": {
            "linear_attn.in_proj_qkv": (2 * keys + values, d),
            "linear_attn.in_proj_z": (values, d),
            "linear_attn.in_proj_b": (heads, d),
            "linear_attn.in_proj_a": (heads, d),
            "linear_attn.out_proj": (d, values),
        },
        "full_attention": {
            "self_attn.q_proj": (2 * q, d),
            "self_attn.k_proj": (kv, d),
            "self_attn.v_proj": (kv, d),
            "self_attn.o_proj": (d, q),
        },
    }
    mlp = {
        "mlp.gate_proj": (ff, d),
        "mlp.up_proj": (ff, d),
        "mlp.down_proj": (d, ff),
    }
    return {
        f"model.layers.{layer}.{name}": shape
        for layer, kind in enumerate(hyper.kinds)
        for name, shape in (mixers[kind] | mlp).items()
    }


def param_shapes(hyper: HybridHyper) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter, by its Hugging Face name."""
    d, channels = hyper.hidden_size, 2 * hyper.delta_keys + hyper.delta_values
    own: dict[LayerKind, dict[str, tuple[int, ...]]] = {
        "linear_attention": {
            "linear_attn.conv1d.weight": (channels, 1, hyper.conv_kernel),
            "linear_attn.A_log": (hyper.delta_value_heads,),
            "linear_attn.dt_bias": (hyper.delta_value_heads,),
            "linear_attn.norm.weight": (hyper.delta_value_dim,),
        },
        "full_attention": {
            "self_attn.q_norm.weight": (hyper.head_dim,),
            "self_attn.k_norm.weight": (hyper.head_dim,),
        },
    }
    norms = {"input_layernorm.weight": (d,), "post_attention_layernorm.weight": (d,)}
    shapes: dict[str, tuple[int, ...]] = {f"{EMBEDDING}.weight": (hyper.vocab_size, d)}
    shapes |= {f"{name}.weight": shape for name, shape in linear_shapes(hyper).items()}
    for layer, kind in enumerate(hyper.kinds):
        for name, shape in (own[kind] | norms).items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    shapes[f"{FINAL_NORM}.weight"] = (d,)
    if not hyper.tied:
        shapes[f"{HEAD}.weight"] = (hyper.vocab_size, d)
    return shapes


def check_params(hyper: HybridHyper, params: Mapping[str, Any]) -> None:
    """Refuses parameters whose names or shapes are not the model's.

    Raises:
        DataError: Names the first parameter that is missing, foreign or misshapen.
    """
    want = param_shapes(hyper)
    for name in sorted(want.keys() | params.keys()):
        found = tuple(params[name].shape) if name in params else None
        if found != want.get(name):
            raise DataError(
                f"hybrid: parameter {name!r} has shape {found}, expected {want.get(name)}; load "
                "weights that belong to this config"
            )
