"""A Llama-shaped model as pure functions of (parameters, adapters, inputs).

Formulas: RMS norm, grouped-query attention with rotary positions (Hugging Face order: dimension j
is paired with j + D/2), gated MLP, pre-norm residuals. Touvron et al. 2023, arXiv:2302.13971.

Letters in the shapes at line ends: B windows, T tokens, d width, N query heads, K key heads,
D head width, f MLP width, V vocabulary, r adapter rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

import vkjit.numpy as jnp
from vkjit import checkpoint, lax, nn, random, tree
from vkjit.blocks import block_of
from vkjit.errors import ArgumentError
from vkjit_models.common.gguf import LlamaHyper

from .attention import KEEP_ATTENDED, causal_attention
from .config import EMBEDDING, FINAL_NORM, HEAD, linear_shapes

Params: TypeAlias = Mapping[str, Any]
"""Weights under Hugging Face names (``model.layers.0.mlp.up_proj.weight``), (out, in).

Vectors are f32; matrices are arrays of any float type or, as GGUF files store them, arrays of
quantized blocks, which products and lookups read in place.
"""


class LoraPair(NamedTuple):
    """One adapted layer, W becoming ``W + scale * b @ a``.

    Args:
        a: f32[r,in].
        b: f32[out,r].
        magnitude: f32[out], the norms that the rows of the sum are scaled to (DoRA); None: the
            sum's own.
    """

    a: Any
    b: Any
    magnitude: Any = None


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
        recompute: Whether derivatives keep each block's input, and what attention in runs gave,
            and compute the rest again.
        lora_scales: Layers whose factor is not ``lora_scale``, by module name.
        lora_frozen: Layers whose adapter acts and has the gradient 0.
        dtype: Of the states between layers and of the factors of products; norms, rotations,
            softmax, logits and losses are float32.
    """

    hyper: LlamaHyper
    lora_scale: float = 1.0
    lora_dropout: float = 0.0
    recompute: bool = False
    lora_scales: tuple[tuple[str, float], ...] = ()
    lora_frozen: tuple[str, ...] = ()
    dtype: str = "float32"


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
    """States after the final norm, [B,T,d] or [T,d]: what `head` turns into logits."""
    if inputs.tokens.ndim == 1:
        batched = Inputs(*(None if field is None else field[None] for field in inputs))
        return hidden_states(spec, params, adapters, batched, key)[0]
    hyper, layers = spec.hyper, _Linears(spec, params, adapters, key)
    where = (rotation(inputs, hyper.head_dim, hyper.rope_theta), inputs.segments)
    x = jnp.take(params[f"{EMBEDDING}.weight"], inputs.tokens, axis=0).astype(spec.dtype)  # [B,T,d]

    def block(x: Any, layer: int) -> Any:
        prefix = f"model.layers.{layer}"
        h = _norm(hyper, params, f"{prefix}.input_layernorm", x)  # [B,T,d]
        x = x + _attention(hyper, layers, f"{prefix}.self_attn", h, where)
        h = _norm(hyper, params, f"{prefix}.post_attention_layernorm", x)  # [B,T,d]
        return x + gated_mlp(layers, f"{prefix}.mlp", h)

    if spec.recompute:
        block = checkpoint(block, static_argnums=1, policy=KEEP_ATTENDED)
    for layer in range(hyper.layers):
        x = block(x, layer)
    return _norm(hyper, params, FINAL_NORM, x)  # [B,T,d]


def head(spec: LlamaSpec, params: Params, hidden: Any) -> Any:
    """Logits f32 of hidden states: [...,d] to [...,V]."""
    return project(hidden, head_weight(spec, params)).astype(jnp.float32)


def head_weight(spec: LlamaSpec, params: Params) -> Any:
    """The matrix [V,d] that logits are made with: the embeddings themselves where tied."""
    return params[f"{EMBEDDING if spec.hyper.tied else HEAD}.weight"]


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
    hidden = hidden_states(spec, params, adapters, batch.inputs, key)  # [B,T,d]
    if batch.rows is None:
        targets = shifted_targets(batch.labels)  # [B,T]
    else:
        hidden, targets = at_targets(hidden, batch)  # [K,d], [K]
    return token_losses(head(spec, params, hidden), targets), targets


def at_targets(hidden: Any, batch: Batch) -> tuple[Any, Any]:
    """The states [K,d] of ``hidden`` [B,T,d] that predict a target, and the targets int32 [K].

    A target is negative for none. K is the length of ``batch.rows``, or B*T where there is none.
    """
    hidden = jnp.reshape(hidden, (-1, hidden.shape[-1]))
    targets = jnp.reshape(shifted_targets(batch.labels), (-1,))
    if batch.rows is None:
        return hidden, targets
    places = jnp.maximum(batch.rows, 0)
    targets = jnp.where(batch.rows >= 0, jnp.take(targets, places), -1)
    return jnp.take(hidden, places, axis=0), targets


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
        self._scales = dict(spec.lora_scales)
        self._key = key if spec.lora_dropout else None
        # Each adapter drops its own inputs: its key depends on its place in the model alone.
        self._places = {name: i for i, name in enumerate(linear_shapes(spec.hyper))}

    def __call__(self, name: str, x: Any) -> Any:
        """The layer ``name``: [B,T,in] to [B,T,out]."""
        weight = self._params[f"{name}.weight"]
        y = project(x, weight)  # [B,T,out]
        pair = self._adapters.get(name)
        if pair is None:
            return y
        if name in self._spec.lora_frozen:
            pair = tree.map(lax.stop_gradient, pair)
        scale = self._scales.get(name, self._spec.lora_scale)
        kept = self._dropped(name, x)
        gained = low_rank(kept, pair, scale)  # [B,T,out]
        if pair.magnitude is None:
            return y + gained
        norms = adapted_norms(weight, pair, scale, self._params.get(f"{name}.row_squares"))
        ratio = pair.magnitude / lax.stop_gradient(norms)  # [out]
        # With dropout, what the ratio changes of W's own part reads the kept inputs, as in PEFT.
        own = y if kept is x else project(kept, weight)
        change = (ratio - 1.0).astype(x.dtype) * own  # [B,T,out]
        return y + change + ratio.astype(x.dtype) * gained  # [B,T,out]

    def _dropped(self, name: str, x: Any) -> Any:
        if self._key is None:
            return x
        keep = 1.0 - self._spec.lora_dropout
        kept = random.bernoulli(random.fold_in(self._key, self._places[name]), keep, x.shape)
        return jnp.where(kept, x / keep, 0.0)


def low_rank(x: Any, pair: LoraPair, scale: float) -> Any:
    """``scale * B (A x)``: [...,in] to [...,out]. B A, as large as the layer, is never formed."""
    return project(scale * project(x, pair.a), pair.b)


def adapted_norms(weight: Any, pair: LoraPair, scale: float, squares: Any = None) -> Any:
    """Norms of the rows of ``W + scale * B A``: f32[out]. Neither the sum nor B A is formed.

    A row's square is ``|w|² + 2s b·(A w) + s² b·(A Aᵀ b)``, so that a packed W is read as it lies.

    Args:
        weight: W, (out, in).
        pair: A and B.
        scale: The factor s.
        squares: `row_squares` of W, which do not change; None: they are computed here.
    """
    if squares is None:
        squares = row_squares(weight)
    cross = project(pair.a, weight)  # [r,out]
    own = project(pair.b, project(pair.a, pair.a))  # [out,r]
    both = pair.b * (2.0 * scale * jnp.transpose(cross) + scale * scale * own)  # [out,r]
    return jnp.sqrt(jnp.maximum(squares + jnp.sum(both, axis=1), 0.0))


def row_squares(weight: Any) -> Any:
    """Sums of the squares of each row of W (out, in): f32[out]."""
    return jnp.sum(jnp.square(jnp.asarray(weight).astype(jnp.float32)), axis=1)


def project(x: Any, weight: Any) -> Any:
    """``x Wᵀ`` with W (out, in) read as it lies, in the type of ``x``: [...,in] to [...,out]."""
    if block_of(weight.dtype) is None and weight.dtype != x.dtype:
        weight = weight.astype(x.dtype)  # blocks are read in the type of the other factor anyway
    return lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())))


def _norm(hyper: LlamaHyper, params: Params, name: str, x: Any) -> Any:
    return nn.rms_norm(x, params[f"{name}.weight"], eps=hyper.rms_eps)


def _attention(
    hyper: LlamaHyper, layers: _Linears, name: str, h: Any, where: tuple[tuple[Any, Any], Any]
) -> Any:
    angles, segments = where
    batch, length = h.shape[:2]

    def split(x: Any, heads: int) -> Any:
        return jnp.reshape(x, (batch, length, heads, hyper.head_dim))

    q = rotate(split(layers(f"{name}.q_proj", h), hyper.heads), angles)  # [B,T,N,D]
    k = rotate(split(layers(f"{name}.k_proj", h), hyper.kv_heads), angles)  # [B,T,K,D]
    v = split(layers(f"{name}.v_proj", h), hyper.kv_heads)  # [B,T,K,D]
    out = causal_attention(q, k, v, segments)  # [B,T,N,D]
    return layers(f"{name}.o_proj", jnp.reshape(out, (batch, length, -1)))  # [B,T,d]


def gated_mlp(layers: Callable[[str, Any], Any], name: str, h: Any) -> Any:
    """``down(silu(gate(h)) * up(h))``: [B,T,d] to [B,T,d].

    Args:
        layers: Applies the linear layer of a name, with its adapter.
        name: Of the module that has the three layers.
        h: The normed input.
    """
    gate = nn.silu(layers(f"{name}.gate_proj", h))  # [B,T,f]
    return layers(f"{name}.down_proj", gate * layers(f"{name}.up_proj", h))  # [B,T,d]


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


def rotation(inputs: Inputs, head_dim: int, theta: float) -> tuple[Any, Any]:
    """Cosine and sine of every token's angles, [B,T,1,D/2] or [T,1,D/2], as `rotate` takes them."""
    tables = rope_tables(inputs.tokens.shape[1], head_dim, theta)
    if inputs.positions is None:
        cos, sin = (jnp.asarray(table[:, None]) for table in tables)
        return cos, sin
    cos, sin = (jnp.take(jnp.asarray(table), inputs.positions, axis=0) for table in tables)
    return cos[:, :, None], sin[:, :, None]


def rotate(x: Any, angles: tuple[Any, Any]) -> Any:
    """Rotates the pairs (j, j + D/2) of [B,T,N,D] by cosines and sines that broadcast to them.

    Computed in f32; the result has the dtype of ``x``.
    """
    cos, sin = angles
    half, wide = x.shape[-1] // 2, x.astype(jnp.float32)
    first, second = wide[..., :half], wide[..., half:]  # [B,T,N,D/2]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
