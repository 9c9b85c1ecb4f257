"""A Llama-shaped model as pure functions of (parameters, adapters, inputs).

Formulas: RMS norm, grouped-query attention with rotary positions (Hugging Face order: dimension j
is paired with j + D/2), gated MLP, pre-norm residuals. Touvron et al. 2023, arXiv:2302.13971.

Letters in the shapes at line ends: B windows, T tokens, d width, N query heads, K key heads,
D head width, f MLP width, V vocabulary, r adapter rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

import vkjit.numpy as jnp
from vkjit import checkpoint, lax, nn, random
from vkjit.errors import ArgumentError
from vkjit_models.common.gguf import LlamaHyper

from .config import EMBEDDING, FINAL_NORM, HEAD, linear_shapes

Params: TypeAlias = Mapping[str, Any]
"""f32 arrays under Hugging Face names (``model.layers.0.mlp.up_proj.weight``), (out, in)."""


class LoraPair(NamedTuple):
    """One adapted layer: ``a`` f32[r,in] and ``b`` f32[out,r]; the layer gains scale * b @ a."""

    a: Any
    b: Any


Adapters: TypeAlias = Mapping[str, LoraPair]
"""Adapted layers by module name (``model.layers.0.mlp.up_proj``); empty: the base model."""


@final
@dataclass(frozen=True)
class LlamaSpec:
    """What is constant when the model is traced.

    Args:
        hyper: Sizes and constants of the base model.
        lora_scale: Factor on every adapter's product.
        lora_dropout: Share of an adapter's inputs that is zeroed where a key is given.
        recompute: Whether derivatives keep each block's input alone and compute the rest again.
    """

    hyper: LlamaHyper
    lora_scale: float = 1.0
    lora_dropout: float = 0.0
    recompute: bool = False


class Inputs(NamedTuple):
    """Tokens and where they stand; every field int32 [B,T] or [T].

    Args:
        tokens: Ids, 0 up to the vocabulary's size.
        positions: Place of each token in its document, below T. None: 0, 1, 2, ...
        segments: Document of each token; attention stays inside one. None: one document.
    """

    tokens: Any
    positions: Any = None
    segments: Any = None


class Batch(NamedTuple):
    """Inputs and their labels; int32 [B,T] each, but for ``rows`` and ``categories``.

    Args:
        tokens: As in `Inputs`.
        labels: Aligned with ``tokens`` and shifted in the loss, once: position t predicts label
            t+1. A negative label is no target.
        positions: As in `Inputs`.
        segments: As in `Inputs`.
        rows: int32 [K], the places in [B*T] that predict a target (`target_rows`), negative ones
            to fill up. Only these meet the head, whose V logits are the widest array of the model.
            None: all places do.
        categories: int32 [K], the category of each entry of ``rows``, negative for a fill entry.
            The model does not read it: losses are summed by it.
    """

    tokens: Any
    labels: Any
    positions: Any
    segments: Any
    rows: Any = None
    categories: Any = None

    @property
    def inputs(self) -> Inputs:
        """The fields that the model reads."""
        return Inputs(self.tokens, self.positions, self.segments)


def forward(
    spec: LlamaSpec, params: Params, adapters: Adapters, inputs: Inputs, key: Any = None
) -> Any:
    """Logits f32 [B,T,V] (or [T,V] for inputs without a batch axis).

    Args:
        spec: Sizes, scale and dropout.
        params: The frozen base weights.
        adapters: The trained weights; an empty mapping is the base model.
        inputs: Tokens, positions, segments.
        key: Random key of the adapters' dropout; None switches dropout off.
    """
    return head(spec, params, hidden_states(spec, params, adapters, inputs, key))


def hidden_states(
    spec: LlamaSpec, params: Params, adapters: Adapters, inputs: Inputs, key: Any = None
) -> Any:
    """States after the final norm, f32 [B,T,d] or [T,d]: what `head` turns into logits."""
    if inputs.tokens.ndim == 1:
        batched = Inputs(*(None if field is None else field[None] for field in inputs))
        return hidden_states(spec, params, adapters, batched, key)[0]
    hyper, layers = spec.hyper, _Linears(spec, params, adapters, key)
    rotation = _rotation(hyper, inputs)
    mask = _segment_mask(inputs.segments)
    x = jnp.take(params[f"{EMBEDDING}.weight"], inputs.tokens, axis=0)  # [B,T,d]

    def block(x: Any, layer: int) -> Any:
        prefix = f"model.layers.{layer}"
        h = _norm(hyper, params, f"{prefix}.input_layernorm", x)  # [B,T,d]
        x = x + _attention(hyper, layers, f"{prefix}.self_attn", h, (rotation, mask))
        h = _norm(hyper, params, f"{prefix}.post_attention_layernorm", x)  # [B,T,d]
        return x + _mlp(layers, f"{prefix}.mlp", h)

    if spec.recompute:
        block = checkpoint(block, static_argnums=1)
    for layer in range(hyper.layers):
        x = block(x, layer)
    return _norm(hyper, params, FINAL_NORM, x)  # [B,T,d]


def head(spec: LlamaSpec, params: Params, hidden: Any) -> Any:
    """Logits of hidden states: [...,d] to [...,V]; the embedding matrix itself where tied."""
    name = EMBEDDING if spec.hyper.tied else HEAD
    return project(hidden, params[f"{name}.weight"])


def next_logits(
    spec: LlamaSpec, params: Params, adapters: Adapters, tokens: Any, length: Any
) -> Any:
    """Logits f32 [V] of the token after the first ``length`` of ``tokens`` [T].

    What stands behind ``length`` is padding: causality keeps it out. One row meets the head.
    """
    hidden = hidden_states(spec, params, adapters, Inputs(tokens))  # [T,d]
    last = jnp.take(hidden, length - 1, axis=0)  # [d]
    return head(spec, params, last[None])[0]  # [V]


def token_losses(logits: Any, targets: Any) -> Any:
    """Cross-entropy f32 of each position, 0 where its target is negative.

    The log-softmax is never formed: the loss is logsumexp minus the target's logit.

    Args:
        logits: f32 [...,V].
        targets: int32 [...], already shifted.
    """
    # A comparison instead of a lookup: its gradient is a mask, where a lookup's would be a
    # scatter into zeros as large as the logits.
    vocabulary = jnp.arange(logits.shape[-1], dtype=targets.dtype)
    here = vocabulary == targets[..., None]  # [...,V]
    picked = jnp.sum(jnp.where(here, logits, 0.0), axis=-1)
    return jnp.where(targets >= 0, nn.logsumexp(logits, axis=-1) - picked, 0.0)


def shifted_targets(labels: Any) -> Any:
    """Targets of each position: the next label, none (-1) at the end. int32 [B,T] both."""
    after_the_end = jnp.full((labels.shape[0], 1), -1, labels.dtype)
    return jnp.concatenate([labels[:, 1:], after_the_end], axis=1)


def target_rows(labels: NDArray[np.int32], capacity: int) -> NDArray[np.int32]:
    """Places in [B*T] that predict a label of ``labels`` [B,T], then -1 up to ``capacity``.

    Raises:
        ArgumentError: There are more targets than ``capacity``.
    """
    predicts = np.zeros(labels.shape, bool)
    predicts[:, :-1] = labels[:, 1:] >= 0
    places = np.flatnonzero(predicts)
    if len(places) > capacity:
        raise ArgumentError(
            f"target_rows: {len(places)} targets, expected at most {capacity}; give more room"
        )
    rows = np.full(capacity, -1, np.int32)
    rows[: len(places)] = places
    return rows


def target_losses(
    spec: LlamaSpec, params: Params, adapters: Adapters, batch: Batch, key: Any = None
) -> tuple[Any, Any]:
    """Cross-entropies (0 without a target) and targets (negative for none) of the batch.

    Both are [B,T], or [K] in the order of ``batch.rows``.
    """
    targets = shifted_targets(batch.labels)  # [B,T]
    hidden = hidden_states(spec, params, adapters, batch.inputs, key)  # [B,T,d]
    if batch.rows is not None:
        places = jnp.maximum(batch.rows, 0)
        hidden = jnp.take(jnp.reshape(hidden, (-1, hidden.shape[-1])), places, axis=0)  # [K,d]
        targets = jnp.take(jnp.reshape(targets, (-1,)), places)
        targets = jnp.where(batch.rows >= 0, targets, -1)  # [K]
    return token_losses(head(spec, params, hidden), targets), targets


def loss_and_count(
    spec: LlamaSpec, params: Params, adapters: Adapters, batch: Batch, key: Any = None
) -> tuple[Any, Any]:
    """Sum of the targets' cross-entropy (f32 scalar) and how many there are (f32 scalar).

    Sums add up over micro-batches of any masks: the loss of a step is the sum of the sums over
    the sum of the counts.
    """
    losses, targets = target_losses(spec, params, adapters, batch, key)
    return jnp.sum(losses), jnp.sum((targets >= 0).astype(jnp.float32))


def mean_loss(
    spec: LlamaSpec, params: Params, adapters: Adapters, batch: Batch, key: Any = None
) -> Any:
    """Mean cross-entropy over the targets; 0, with zero gradients, where there is none."""
    total, count = loss_and_count(spec, params, adapters, batch, key)
    return total / jnp.maximum(count, 1.0)


@final
class _Linears:
    """The linear layers with their adapters, looked up by module name."""

    def __init__(self, spec: LlamaSpec, params: Params, adapters: Adapters, key: Any) -> None:
        self._spec, self._params, self._adapters = spec, params, adapters
        self._key = key if spec.lora_dropout else None
        # Each adapter drops its own inputs: its key depends on its place in the model alone.
        self._places = {name: i for i, name in enumerate(linear_shapes(spec.hyper))}

    def __call__(self, name: str, x: Any) -> Any:
        """The layer ``name``: [B,T,in] to [B,T,out]."""
        y = project(x, self._params[f"{name}.weight"])  # [B,T,out]
        pair = self._adapters.get(name)
        if pair is None:
            return y
        return y + low_rank(self._dropped(name, x), pair, self._spec.lora_scale)  # [B,T,out]

    def _dropped(self, name: str, x: Any) -> Any:
        if self._key is None:
            return x
        keep = 1.0 - self._spec.lora_dropout
        kept = random.bernoulli(random.fold_in(self._key, self._places[name]), keep, x.shape)
        return jnp.where(kept, x / keep, 0.0)


def low_rank(x: Any, pair: LoraPair, scale: float) -> Any:
    """``scale * B (A x)``: [...,in] to [...,out]. B A, as large as the layer, is never formed."""
    return project(scale * project(x, pair.a), pair.b)


def project(x: Any, weight: Any) -> Any:
    """``x Wᵀ`` with W (out, in) read as it lies: [...,in] to [...,out]."""
    return lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())))


def _norm(hyper: LlamaHyper, params: Params, name: str, x: Any) -> Any:
    return nn.rms_norm(x, params[f"{name}.weight"], eps=hyper.rms_eps)


def _attention(
    hyper: LlamaHyper, layers: _Linears, name: str, h: Any, where: tuple[tuple[Any, Any], Any]
) -> Any:
    rotation, mask = where
    batch, length = h.shape[:2]

    def split(x: Any, heads: int) -> Any:
        return jnp.reshape(x, (batch, length, heads, hyper.head_dim))

    q = rotate(split(layers(f"{name}.q_proj", h), hyper.heads), rotation)  # [B,T,N,D]
    k = rotate(split(layers(f"{name}.k_proj", h), hyper.kv_heads), rotation)  # [B,T,K,D]
    v = split(layers(f"{name}.v_proj", h), hyper.kv_heads)  # [B,T,K,D]
    out = nn.dot_product_attention(q, k, v, mask=mask, is_causal=True)  # [B,T,N,D]
    return layers(f"{name}.o_proj", jnp.reshape(out, (batch, length, -1)))  # [B,T,d]


def _mlp(layers: _Linears, name: str, h: Any) -> Any:
    gate = nn.silu(layers(f"{name}.gate_proj", h))  # [B,T,f]
    return layers(f"{name}.down_proj", gate * layers(f"{name}.up_proj", h))  # [B,T,d]


def _segment_mask(segments: Any) -> Any:
    """Bool [B,1,T,T], True where query and key stand in the same document."""
    if segments is None:
        return None
    return (segments[:, :, None] == segments[:, None, :])[:, None]


def rope_tables(
    length: int, head_dim: int, theta: float
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cosine and sine of ``position * theta^(-2j/D)``, f32 [length, D/2] each.

    Angles are float64: in float32 they are off by 1e-4 at position 4095. Su et al. 2021,
    arXiv:2104.09864.
    """
    frequencies = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    angles = np.arange(length, dtype=np.float64)[:, None] * frequencies
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _rotation(hyper: LlamaHyper, inputs: Inputs) -> tuple[Any, Any]:
    """Cosine and sine of every token's angles, [B,T,1,D/2] or [T,1,D/2]."""
    tables = rope_tables(inputs.tokens.shape[1], hyper.head_dim, hyper.rope_theta)
    if inputs.positions is None:
        cos, sin = (jnp.asarray(table[:, None]) for table in tables)
        return cos, sin
    cos, sin = (jnp.take(jnp.asarray(table), inputs.positions, axis=0) for table in tables)
    return cos[:, :, None], sin[:, :, None]


def rotate(x: Any, rotation: tuple[Any, Any]) -> Any:
    """Rotates the pairs (j, j + D/2) of [B,T,N,D] by cosines and sines that broadcast to them."""
    cos, sin = rotation
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]  # [B,T,N,D/2]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
