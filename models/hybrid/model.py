"""A Qwen3.5-shaped dense hybrid model as pure functions of (parameters, adapters, inputs).

Most blocks mix tokens by a gated delta net (Yang et al. 2024, arXiv:2412.06464), the others by
softmax attention whose output is gated; norms are zero-centred, ``x / rms(x) * (1 + w)``. Formulas
as in transformers' Qwen3_5ForCausalLM. The delta rule runs token by token in a `lax.scan`: its
gradient keeps a state of each token, which suits short windows. `vkjit_models.lora_sft` trains
Llama-shaped models only; this model is not wired into it.

Letters in the shapes at line ends: B windows, T tokens, d width, V vocabulary, C channels of the
convolution; of attention N query heads, K key heads, D head width; of delta nets H value heads,
E width of a key head, F width of a value head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, assert_never, final

import numpy as np
from numpy.typing import NDArray

import vkjit.numpy as jnp
from vkjit import checkpoint, lax, nn
from vkjit.errors import ArgumentError
from vkjit_models.llama.attention import KEEP_ATTENDED, causal_attention
from vkjit_models.llama.lora import pairs_from_peft
from vkjit_models.llama.model import (
    Adapters,
    Batch,
    Inputs,
    LoraPair,
    Params,
    at_targets,
    gated_mlp,
    low_rank,
    project,
    rotate,
    rotation,
)

from .config import EMBEDDING, FINAL_NORM, HEAD, HybridHyper, linear_shapes

Layers: TypeAlias = Callable[[str, Any], Any]
"""Applies the linear layer of a name, with its adapter: [B,T,in] to [B,T,out]."""
_L2_EPS = 1e-6
"""Of the norms of keys and queries in the delta rule; a constant of the architecture."""


@final
@dataclass(frozen=True)
class HybridSpec:
    """What is constant when the model is traced.

    Args:
        hyper: Sizes and constants of the base model.
        lora_scale: Factor on every adapter's product.
        recompute: Whether derivatives keep each block's input and compute the rest again.
        dtype: Of the states between layers and of the factors of products; norms, rotations,
            softmax, the delta rule, logits and losses are float32.
    """

    hyper: HybridHyper
    lora_scale: float = 1.0
    recompute: bool = False
    dtype: str = "float32"


class DeltaInputs(NamedTuple):
    """What the gated delta rule reads of each token.

    Args:
        query: f32[B,T,H,E].
        key: f32[B,T,H,E], of length 1.
        value: f32[B,T,H,F].
        decay: f32[B,T,H], the factor on the state, 0 to 1.
        beta: f32[B,T,H], the share of the error that is written, 0 to 1.
    """

    query: Any
    key: Any
    value: Any
    decay: Any
    beta: Any


def forward(spec: HybridSpec, params: Params, adapters: Adapters, inputs: Inputs) -> Any:
    """Logits f32 [B,T,V] (or [T,V] for inputs without a batch axis).

    Args:
        spec: Sizes and scale.
        params: The base weights under Hugging Face names (`config.param_shapes`).
        adapters: The trained weights; an empty mapping is the base model.
        inputs: Tokens, positions, segments.

    Raises:
        ArgumentError: An adapter has magnitudes (DoRA).
    """
    return head(spec, params, hidden_states(spec, params, adapters, inputs))


def hidden_states(spec: HybridSpec, params: Params, adapters: Adapters, inputs: Inputs) -> Any:
    """States after the final norm, [B,T,d] or [T,d]: what `head` turns into logits."""
    if inputs.tokens.ndim == 1:
        batched = Inputs(*(None if field is None else field[None] for field in inputs))
        return hidden_states(spec, params, adapters, batched)[0]
    hyper, layers = spec.hyper, _linears(spec, params, adapters)
    angles = rotation(inputs, hyper.rotary_dim, hyper.rope_theta)
    x = jnp.take(params[f"{EMBEDDING}.weight"], inputs.tokens, axis=0).astype(spec.dtype)  # [B,T,d]

    def mixed(prefix: str, layer: int, h: Any) -> Any:
        match hyper.kinds[layer]:
            case "linear_attention":
                name = f"{prefix}.linear_attn"
                return _delta_net(hyper, (params, layers), name, h, inputs.segments)
            case "full_attention":
                name, where = f"{prefix}.self_attn", (angles, inputs.segments)
                return _attention(hyper, (params, layers), name, h, where)
            case _:
                assert_never(hyper.kinds[layer])

    def block(x: Any, layer: int) -> Any:
        prefix = f"model.layers.{layer}"
        h = _centred_norm(hyper, params, f"{prefix}.input_layernorm", x)  # [B,T,d]
        x = x + mixed(prefix, layer, h)
        h = _centred_norm(hyper, params, f"{prefix}.post_attention_layernorm", x)  # [B,T,d]
        return x + gated_mlp(layers, f"{prefix}.mlp", h)

    if spec.recompute:
        block = checkpoint(block, static_argnums=1, policy=KEEP_ATTENDED)
    for layer in range(hyper.layers):
        x = block(x, layer)
    return _centred_norm(hyper, params, FINAL_NORM, x)  # [B,T,d]


def head(spec: HybridSpec, params: Params, hidden: Any) -> Any:
    """Logits f32 of hidden states: [...,d] to [...,V]."""
    return project(hidden, head_weight(spec, params)).astype(jnp.float32)


def head_weight(spec: HybridSpec, params: Params) -> Any:
    """The matrix [V,d] that logits are made with: the embeddings themselves where tied."""
    return params[f"{EMBEDDING if spec.hyper.tied else HEAD}.weight"]


def target_states(
    spec: HybridSpec, params: Params, adapters: Adapters, batch: Batch
) -> tuple[Any, Any]:
    """States [K,d] that predict a target, and the targets int32 [K], negative for none.

    What the fused losses of `vkjit.nn` take, beside `head_weight`. K as in `at_targets`.
    """
    return at_targets(hidden_states(spec, params, adapters, batch.inputs), batch)


def loss_and_count(
    spec: HybridSpec, params: Params, adapters: Adapters, batch: Batch
) -> tuple[Any, Any]:
    """Sum of the targets' cross-entropy (f32 scalar) and how many there are (f32 scalar)."""
    hidden, targets = target_states(spec, params, adapters, batch)
    losses = nn.linear_cross_entropy(hidden, head_weight(spec, params), targets)  # [K]
    return jnp.sum(losses), jnp.sum((targets >= 0).astype(jnp.float32))


def mean_loss(spec: HybridSpec, params: Params, adapters: Adapters, batch: Batch) -> Any:
    """Mean cross-entropy over the targets; 0, with zero gradients, where there is none."""
    total, count = loss_and_count(spec, params, adapters, batch)
    return total / jnp.maximum(count, 1.0)


def from_peft(
    hyper: HybridHyper, tensors: Mapping[str, NDArray[np.float32]]
) -> dict[str, LoraPair]:
    """Adapters from arrays under PEFT's names, in the model's order.

    Raises:
        DataError: A name is no layer of the model, a pair is not whole, or a shape does not fit.
    """
    return pairs_from_peft(linear_shapes(hyper), tensors)


def gated_delta(given: DeltaInputs) -> Any:
    """The gated delta rule, token by token: f32[B,T,H,F].

    A state S [E,F] of each head starts at 0; a token makes it ``P = decay S``, then
    ``S = P + k (beta (v - Pᵀk))ᵀ``, and reads ``Sᵀq``.
    """
    batch, _, heads, width = given.key.shape

    def turn(state: Any, at: DeltaInputs) -> tuple[Any, Any]:
        state = at.decay[..., None, None] * state  # [B,H,E,F]
        seen = jnp.einsum("bhef,bhe->bhf", state, at.key)
        written = at.beta[..., None] * (at.value - seen)  # [B,H,F]
        state = state + jnp.einsum("bhe,bhf->bhef", at.key, written)
        return state, jnp.einsum("bhef,bhe->bhf", state, at.query)

    start = jnp.zeros((batch, heads, width, given.value.shape[-1]), jnp.float32)
    _, out = lax.scan(turn, start, DeltaInputs(*(jnp.swapaxes(x, 0, 1) for x in given)))
    return jnp.swapaxes(out, 0, 1)


def causal_conv(x: Any, weight: Any, segments: Any = None) -> Any:
    """Each channel's weighted sum of its last values: [B,T,C] to [B,T,C].

    Args:
        x: f32[B,T,C].
        weight: f32[C,1,n]; the last of the n entries weighs the token itself.
        segments: int32 [B,T]; nothing crosses from one document into another. None: one document.
    """
    taps, length = weight.shape[-1], x.shape[1]
    total = x * weight[:, 0, -1]
    for back in range(1, min(taps, length)):
        earlier = _delayed(x, back)
        if segments is not None:
            same = _delayed(segments, back) == segments
            earlier = jnp.where(same[..., None], earlier, 0.0)
        total = total + earlier * weight[:, 0, taps - 1 - back]
    return total


def _linears(spec: HybridSpec, params: Params, adapters: Adapters) -> Layers:
    for name, pair in adapters.items():
        if pair.magnitude is not None:
            raise ArgumentError(
                f"hybrid: the adapter of {name} has magnitudes (DoRA), expected A and B alone; "
                "merge it into its layer first"
            )

    def linear(name: str, x: Any) -> Any:
        y, pair = project(x, params[f"{name}.weight"]), adapters.get(name)  # [B,T,out]
        return y if pair is None else y + low_rank(x, pair, spec.lora_scale)

    return linear


def _centred_norm(hyper: HybridHyper, params: Params, name: str, x: Any) -> Any:
    return nn.rms_norm(x, 1.0 + params[f"{name}.weight"], eps=hyper.rms_eps)


def _attention(
    hyper: HybridHyper, weights: tuple[Params, Layers], name: str, h: Any, where: tuple[Any, Any]
) -> Any:
    """Causal attention, gated: [B,T,d] to [B,T,d]."""
    (params, layers), (angles, segments) = weights, where

    def heads(kind: str, number: int) -> Any:
        return jnp.reshape(layers(f"{name}.{kind}_proj", h), (*h.shape[:2], number, -1))

    def turned(kind: str, x: Any) -> Any:
        """Normed over a head; then RoPE on its leading dimensions."""
        x = _centred_norm(hyper, params, f"{name}.{kind}_norm", x)
        moved, kept = x[..., : hyper.rotary_dim], x[..., hyper.rotary_dim :]
        return jnp.concatenate([rotate(moved, angles), kept], axis=-1)

    both = heads("q", hyper.heads)  # [B,T,N,2D]: a head's query, then its gate
    q, gate = both[..., : hyper.head_dim], both[..., hyper.head_dim :]  # [B,T,N,D]
    k, v = heads("k", hyper.kv_heads), heads("v", hyper.kv_heads)  # [B,T,K,D]
    out = causal_attention(turned("q", q), turned("k", k), v, segments) * nn.sigmoid(gate)
    return layers(f"{name}.o_proj", jnp.reshape(out, (*h.shape[:2], -1)))  # [B,T,d]


def _delta_net(
    hyper: HybridHyper, weights: tuple[Params, Layers], name: str, h: Any, segments: Any
) -> Any:
    """A gated delta net: [B,T,d] to [B,T,d]."""
    params, layers = weights
    out = gated_delta(_delta_inputs(hyper, weights, name, h, segments))  # [B,T,H,F]
    out = nn.rms_norm(out, params[f"{name}.norm.weight"], eps=hyper.rms_eps)
    z = jnp.reshape(layers(f"{name}.in_proj_z", h), out.shape).astype(jnp.float32)
    gated = jnp.reshape(out * nn.silu(z), (*h.shape[:2], -1)).astype(h.dtype)  # [B,T,H*F]
    return layers(f"{name}.out_proj", gated)


def _delta_inputs(
    hyper: HybridHyper, weights: tuple[Params, Layers], name: str, h: Any, segments: Any
) -> DeltaInputs:
    params, layers = weights
    groups = hyper.delta_value_heads // hyper.delta_key_heads

    def wide(kind: str) -> Any:
        return layers(f"{name}.in_proj_{kind}", h).astype(jnp.float32)

    def of_value_heads(x: Any) -> Any:
        """Keys or queries of length 1, for each value head: [B,T,H,E]."""
        x = jnp.reshape(x, (*h.shape[:2], hyper.delta_key_heads, hyper.delta_key_dim))
        x = x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _L2_EPS)
        return jnp.repeat(x, groups, axis=2)

    mixed = nn.silu(causal_conv(wide("qkv"), params[f"{name}.conv1d.weight"], segments))  # [B,T,C]
    q, k, v = jnp.split(mixed, [hyper.delta_keys, 2 * hyper.delta_keys], axis=-1)
    rate = nn.softplus(wide("a") + params[f"{name}.dt_bias"])
    decay = jnp.exp(-jnp.exp(params[f"{name}.A_log"]) * rate)  # [B,T,H]
    if segments is not None:
        same = _delayed(segments, 1) == segments  # a document starts with the state 0
        decay = jnp.where(same[..., None], decay, 0.0)
    return DeltaInputs(
        of_value_heads(q) * hyper.delta_key_dim**-0.5,
        of_value_heads(k),
        jnp.reshape(v, (*h.shape[:2], hyper.delta_value_heads, hyper.delta_value_dim)),
        decay,
        nn.sigmoid(wide("b")),
    )


def _delayed(x: Any, steps: int) -> Any:
    """``x`` [B,T,...] some tokens later, after zeros."""
    start = jnp.zeros((x.shape[0], steps, *x.shape[2:]), x.dtype)
    return jnp.concatenate([start, x[:, : x.shape[1] - steps]], axis=1)
