"""Sizes of a Llama-shaped model and the names and shapes of its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vkjit.errors import DataError
from vkjit_models.common.gguf import LlamaHyper

EMBEDDING = "model.embed_tokens"
FINAL_NORM = "model.norm"
HEAD = "lm_head"


def from_hugging_face(config: Mapping[str, Any]) -> LlamaHyper:
    """Sizes from a Hugging Face ``config.json`` of ``LlamaForCausalLM``.

    Raises:
        DataError: Another architecture, or a feature that this model does not compute.
    """
    architecture = config.get("architecture") or next(iter(config.get("architectures", [])), None)
    refused = {
        "architecture": architecture not in ("LlamaForCausalLM", None),
        "hidden_act": config.get("hidden_act", "silu") != "silu",
        "attention_bias": bool(config.get("attention_bias", False)),
        "rope_scaling": config.get("rope_scaling") is not None,
    }
    for key, bad in refused.items():
        if bad:
            raise DataError(
                f"llama config: {key}={config.get(key, architecture)!r} was given, expected "
                "LlamaForCausalLM with SiLU, without biases or RoPE scaling; choose another model"
            )
    heads = config["num_attention_heads"]
    return LlamaHyper(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads", heads),
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        rope_theta=config["rope_theta"],
        rms_eps=config["rms_norm_eps"],
        tied=config["tie_word_embeddings"],
        context_length=config["max_position_embeddings"],
    )


def linear_shapes(hyper: LlamaHyper) -> dict[str, tuple[int, int]]:
    """Shape (out, in) of every linear layer inside the blocks, by module name, in order."""
    d, ff = hyper.hidden_size, hyper.intermediate_size
    q, kv = hyper.heads * hyper.head_dim, hyper.kv_heads * hyper.head_dim
    block = {
        "self_attn.q_proj": (q, d),
        "self_attn.k_proj": (kv, d),
        "self_attn.v_proj": (kv, d),
        "self_attn.o_proj": (d, q),
        "mlp.gate_proj": (ff, d),
        "mlp.up_proj": (ff, d),
        "mlp.down_proj": (d, ff),
    }
    return {
        f"model.layers.{layer}.{kind}": shape
        for layer in range(hyper.layers)
        for kind, shape in block.items()
    }


def module_shapes(hyper: LlamaHyper) -> dict[str, tuple[int, ...]]:
    """Shape of the weight of every module that has one, by module name."""
    d = hyper.hidden_size
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (hyper.vocab_size, d)}
    linears = linear_shapes(hyper)
    for layer in range(hyper.layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm"] = (d,)
        shapes |= {name: s for name, s in linears.items() if name.startswith(prefix)}
        shapes[prefix + "post_attention_layernorm"] = (d,)
    shapes[FINAL_NORM] = (d,)
    if not hyper.tied:
        shapes[HEAD] = (hyper.vocab_size, d)
    return shapes


def check_params(hyper: LlamaHyper, params: Mapping[str, Any]) -> None:
    """Refuses parameters whose names or shapes are not the model's.

    Raises:
        DataError: Names the first parameter that is missing, foreign or misshapen.
    """
    want = {f"{name}.weight": shape for name, shape in module_shapes(hyper).items()}
    for name in sorted(want.keys() | params.keys()):
        found = tuple(params[name].shape) if name in params else None
        if found != want.get(name):
            raise DataError(
                f"llama: parameter {name!r} has shape {found}, expected {want.get(name)}; load "
                "weights that belong to this config"
            )
