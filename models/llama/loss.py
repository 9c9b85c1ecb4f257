"""What training minimises: cross-entropy, and what holds the adapted model to the base.

The quantity is a sum over targets, so that sums over micro-batches divided by the number of all
targets give the mean of the whole batch and its gradient. Logits exist block by block only
(`vkjit.nn.linear_cross_entropy`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias, assert_never, final

import vkjit.numpy as jnp
from vkjit import lax, nn, tree
from vkjit.errors import ArgumentError

from .model import Adapters, Batch, LlamaSpec, Params, at_targets, head_weight, hidden_states

Kl: TypeAlias = Literal["none", "tmkl", "tmkl_reverse", "kl", "kl_reverse"]
"""KL(adapted||base), or its reverse KL(base||adapted); ``tmkl`` leaves the target out of both."""
IDLE_MOVE = 1e-5
"""Relative move per step below which a pull-back cannot be told from rounding of the weights."""


@final
@dataclass(frozen=True)
class LossSpec:
    """The terms of the loss; constant when the model is traced.

    Args:
        label_smoothing: Share of each label that is spread over the vocabulary.
        z_loss: Weight of the squared logsumexp.
        kl: Divergence from the base model.
        kl_weight: Its weight.
        pullback_weight: Weight of half the squared distance from the initial adapters.
        vocab_chunk: Columns of a block of logits; None: as `vkjit.nn` chooses.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    kl: Kl = "none"
    kl_weight: float = 0.0
    pullback_weight: float = 0.0
    vocab_chunk: int | None = None


class Objective(NamedTuple):
    """What a batch contributes. K is the length of ``batch.rows``, or B*T where there is none.

    Args:
        total: f32 scalar, the sum over the batch's targets whose gradient is accumulated.
        losses: f32 [K], the plain cross-entropy of each target; 0 where there is none.
        counted: Bool [K], which entries are targets.
        divergences: f32 [K], the divergence at each target, without its weight; None: no such term.
        pullback: f32 scalar, half the squared distance from the initial adapters, without its
            weight; None: no such term.
    """

    total: Any
    losses: Any
    counted: Any
    divergences: Any
    pullback: Any


def objective(  # noqa: PLR0913  two descriptions, then what the model reads
    spec: LlamaSpec,
    loss_spec: LossSpec,
    params: Params,
    adapters: Adapters,
    batch: Batch,
    key: Any = None,
    initial_adapters: Adapters | None = None,
) -> Objective:
    """The loss of a batch, summed over its targets.

    ``total`` is the sum over targets of cross-entropy (smoothed, with z-loss) + kl_weight *
    divergence + pullback_weight * pull-back. Divided by the number of targets it is their mean
    plus the pull-back, however the targets are spread over micro-batches. The base model's states
    come from the same parameters with the adapters off and without dropout; no gradient enters
    them.

    Args:
        spec: Sizes, scale and dropout.
        loss_spec: The terms.
        params: The frozen base weights.
        adapters: The trained weights.
        batch: Tokens, labels and the rows that predict a target.
        key: Random key of the adapters' dropout; None switches dropout off.
        initial_adapters: Where the pull-back leads; needed for that term alone.

    Raises:
        ArgumentError: The initial adapters are missing.
    """
    hidden, targets = _target_states(spec, params, adapters, batch, key)
    weight, counted = head_weight(spec, params), targets >= 0
    chunk = loss_spec.vocab_chunk
    losses = trained = nn.linear_cross_entropy(hidden, weight, targets, vocab_chunk=chunk)
    if loss_spec.label_smoothing or loss_spec.z_loss:
        losses = lax.stop_gradient(losses)
        trained = nn.linear_cross_entropy(
            hidden,
            weight,
            targets,
            label_smoothing=loss_spec.label_smoothing,
            z_loss=loss_spec.z_loss,
            vocab_chunk=chunk,
        )
    total, divergences, pullback = jnp.sum(trained), None, None
    if loss_spec.kl != "none":
        base, _ = _target_states(spec, params, {}, batch, None)
        states = (hidden, lax.stop_gradient(base), weight, targets)
        divergences = _divergences(loss_spec, *states)
        total = total + loss_spec.kl_weight * jnp.sum(divergences)
    if loss_spec.pullback_weight:
        pullback = half_squared_distance(adapters, initial_adapters)
        count = jnp.sum(counted.astype(jnp.float32))
        total = total + loss_spec.pullback_weight * count * pullback
    return Objective(total, losses, counted, divergences, pullback)


def half_squared_distance(adapters: Adapters, initial: Adapters | None) -> Any:
    """``sum((θ - θ₀)²) / 2`` over all adapter weights: f32 scalar, whose gradient is θ - θ₀.

    Raises:
        ArgumentError: There is no θ₀.
    """
    if initial is None:
        raise ArgumentError(
            "objective: pullback_weight was given without initial_adapters, expected the adapters "
            "that training began with; pass them, or set the weight to 0"
        )
    squares = tree.map(_squared_distance, adapters, lax.stop_gradient(initial))
    return 0.5 * sum(tree.leaves(squares))


def pullback_relative(learning_rate: float, weight: float) -> tuple[float, str | None]:
    """The share of the way back to the initial adapters that one step goes, and a warning.

    A step of plain descent on the pull-back alone is ``θ -= lr * λ * (θ - θ₀)``, which is the
    pull-back that some recipes apply after a step instead. (Adam divides gradients by their size:
    there the term acts by its share of the whole gradient.)

    Args:
        learning_rate: The peak rate.
        weight: λ, the term's weight.

    Returns:
        ``lr * λ``; and the warning where it is below `IDLE_MOVE` but not 0, else None.
    """
    move = learning_rate * weight
    if not 0.0 < move < IDLE_MOVE:
        return move, None
    return move, (
        f"loss.pullback_weight = {weight:g} with learning rate {learning_rate:g} moves the "
        f"adapters back by {move:.1e} of their way per step, less than {IDLE_MOVE:g}: it cannot "
        f"matter; raise it to about {IDLE_MOVE / learning_rate:.1g} or more, or set it to 0"
    )


def _target_states(
    spec: LlamaSpec, params: Params, adapters: Adapters, batch: Batch, key: Any
) -> tuple[Any, Any]:
    """States [K,d] that predict a target, and the targets [K], negative for none."""
    return at_targets(hidden_states(spec, params, adapters, batch.inputs, key), batch)


def _divergences(spec: LossSpec, hidden: Any, base: Any, weight: Any, targets: Any) -> Any:
    """The divergence at each target: f32 [K]."""
    masked = partial(nn.linear_target_masked_kl, vocab_chunk=spec.vocab_chunk)
    plain = partial(nn.linear_kl_divergence, vocab_chunk=spec.vocab_chunk)
    match spec.kl:
        case "none":
            return jnp.zeros(targets.shape, jnp.float32)
        case "tmkl":
            return masked(hidden, base, weight, targets)
        case "tmkl_reverse":
            return masked(hidden, base, weight, targets, direction="base||adapted")
        case "kl":
            return plain(hidden, base, weight, targets)
        case "kl_reverse":
            return plain(hidden, base, weight, targets, direction="base||adapted")
        case _:
            assert_never(spec.kl)


def _squared_distance(now: Any, before: Any) -> Any:
    apart = now.astype(jnp.float32) - before.astype(jnp.float32)
    return jnp.sum(apart * apart)
