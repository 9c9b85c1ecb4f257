"""Cross-entropy of a linear head whose logits never exist as a whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, final

import vkjit.numpy as jnp
from vkjit.api.custom import custom_vjp
from vkjit.errors import ArgumentError
from vkjit.nn import _operands as op
from vkjit.nn._chunks import over_slices, sizes
from vkjit.nn._cotangents import of_weight


@final
@dataclass(frozen=True)
class _Spec:
    """Constants of a loss: as `linear_cross_entropy` takes them, and the block's sizes."""

    smoothing: float
    z_loss: float
    rows: int
    columns: int


class _Sums(NamedTuple):
    """What is known of some rows after some columns; f32.

    Logits are counted from the largest: a loss is their difference, which does not round then.

    Args:
        top: [n], the largest logit so far.
        total: [n], sum of ``exp(logit - top)``.
        picked: [n], the target's ``logit - top``; 0 before its column.
        plain: [n], sum of ``logit - top``, or None where nothing is smoothed.
        moments: [n,d], sum of ``exp(logit - top)`` times the head's rows, or None.
        columns: [1,d], sum of the head's rows, or None.
    """

    top: Any
    total: Any
    picked: Any
    plain: Any
    moments: Any
    columns: Any


class _Saved(NamedTuple):
    """What the backward needs: the operands, and of each row what the forward found.

    Args:
        slope: f32 [N,d], the loss's derivative in the hidden state.
        logsumexp: f32 [N].
    """

    hidden: Any
    weight: Any
    targets: Any
    slope: Any
    logsumexp: Any


def linear_cross_entropy(  # noqa: PLR0913  operands, two terms of the loss, two sizes
    hidden: Any,
    weight: Any,
    targets: Any,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    row_chunk: int | None = None,
    vocab_chunk: int | None = None,
) -> Any:
    """Cross-entropy of the logits ``hidden weightᵀ``, of which one block exists at a time.

    The loss of a row is ``logsumexp(z) - (1-a) z[target] - a mean(z) + w logsumexp(z)²`` with a
    ``label_smoothing`` (Szegedy et al. 2016, arXiv:1512.00567, the target's share included) and w
    ``z_loss`` (Chowdhery et al. 2022, arXiv:2204.02311). Sums are f32 for every dtype; maxima and
    sums over the vocabulary are carried from block to block (Milakov and Gimelshein 2018,
    arXiv:1805.02867), and so is the derivative in the hidden states, as in attention: where the
    head is frozen nothing is computed twice.

    Differentiable in ``hidden`` and in a ``weight`` of floats, in reverse mode, any number of
    times; a quantized weight is frozen.

    Args:
        hidden: [N,d] of a floating dtype, in which products multiply.
        weight: [V,d], an array or a quantized one.
        targets: Integers [N]; a negative one is no target: its loss is 0, and so is its gradient.
            One of V or more names no class: its loss and the gradients are NaN.
        label_smoothing: Share of the label that is spread over the vocabulary, from 0 up to 1.
        z_loss: Weight of the squared logsumexp, at least 0.
        row_chunk: Rows of a block of logits at most; None: 2048.
        vocab_chunk: Columns of a block at most; None: so many that a block has 2^24 logits.

    Returns:
        f32 [N].

    Raises:
        ShapeError, DTypeError: The operands do not fit.
        ArgumentError: A constant is outside its domain.
    """
    name = "linear_cross_entropy"
    hidden, weight, targets = op.checked(name, hidden, weight, targets)
    if not 0.0 <= label_smoothing <= 1.0 or not z_loss >= 0.0:
        raise ArgumentError(
            f"{name}: label_smoothing={label_smoothing} and z_loss={z_loss} were given, expected "
            "0 <= label_smoothing <= 1 and z_loss >= 0; correct them"
        )
    block = sizes(name, hidden.shape[0], weight.shape[0], row_chunk, vocab_chunk)
    return _losses(_Spec(label_smoothing, z_loss, *block), hidden, weight, targets)


def _value(spec: _Spec, hidden: Any, weight: Any, targets: Any) -> Any:
    def rows(carry: Any, part: Any, first: Any) -> tuple[Any, Any]:
        del first
        hidden, targets = part
        sums = _sums(spec, hidden, targets, weight, slopes=False)
        return carry, _loss(spec, sums, targets, weight.shape[0])

    return over_slices(rows, None, (hidden, targets), spec.rows)[1]


def _forward(spec: _Spec, hidden: Any, weight: Any, targets: Any) -> tuple[Any, _Saved]:
    def rows(carry: Any, part: Any, first: Any) -> tuple[Any, Any]:
        del first
        hidden, targets = part
        sums = _sums(spec, hidden, targets, weight, slopes=True)
        loss = _loss(spec, sums, targets, weight.shape[0])
        return carry, (loss, _slope(spec, sums, targets, weight), _logsumexp(sums))

    _, (losses, slope, known) = over_slices(rows, None, (hidden, targets), spec.rows)
    return losses, _Saved(hidden, weight, targets, slope, known)


def _backward(spec: _Spec, saved: _Saved, cotangent: Any) -> tuple[Any, Any, None]:
    counted = saved.targets >= 0
    scale = op.counted(cotangent, saved.targets, saved.weight.shape[0])
    hidden = jnp.where(counted[:, None], saved.slope * scale[:, None], 0.0)
    hidden = hidden.astype(saved.hidden.dtype)
    if not op.is_float_array(saved.weight):
        return hidden, None, None
    return hidden, _weight_slope(spec, saved, scale), None


_losses = custom_vjp(_value, nondiff_argnums=(0,))
_losses.defvjp(_forward, _backward)


def _sums(spec: _Spec, hidden: Any, targets: Any, weight: Any, *, slopes: bool) -> _Sums:
    """The sums of some rows over the whole vocabulary, slice by slice."""
    count, width = hidden.shape
    none = jnp.zeros((count,), jnp.float32)
    start = _Sums(
        top=jnp.full((count,), op.LOWEST, jnp.float32),
        total=none,
        picked=none,
        plain=none if spec.smoothing else None,
        moments=jnp.zeros((count, width), jnp.float32) if slopes else None,
        columns=jnp.zeros((1, width), jnp.float32) if slopes and spec.smoothing else None,
    )

    def more(sums: _Sums, part: Any, first: Any) -> tuple[_Sums, None]:
        logits = op.logits(hidden, part)  # [n,C]
        mine = op.here(targets, part.shape[0], first)
        top = jnp.maximum(sums.top, jnp.max(logits, axis=-1))
        logits = logits - top[:, None]
        raised, risen = jnp.exp(logits), sums.top - top
        kept = jnp.exp(risen)
        picked = jnp.sum(jnp.where(mine, logits, 0.0), axis=-1)
        after = sums._replace(
            top=top,
            total=sums.total * kept + jnp.sum(raised, axis=-1),
            picked=jnp.where(targets < first, sums.picked + risen, picked),
        )
        if sums.plain is not None:
            plain = sums.plain + jnp.sum(logits, axis=-1)
            after = after._replace(plain=plain + jnp.asarray(first, jnp.float32) * risen)
        if sums.moments is not None:
            moments = op.back(raised, part, hidden.dtype)  # [n,d]
            after = after._replace(moments=sums.moments * kept[:, None] + moments)
        if sums.columns is not None:
            columns = op.column_sums(part, hidden.dtype)
            after = after._replace(columns=sums.columns + columns)
        return after, None

    return over_slices(more, start, weight, spec.columns)[0]


def _logsumexp(sums: _Sums) -> Any:
    return sums.top + jnp.log(sums.total)


def _loss(spec: _Spec, sums: _Sums, targets: Any, vocabulary: int) -> Any:
    loss = jnp.log(sums.total) - (1.0 - spec.smoothing) * sums.picked
    if sums.plain is not None:
        loss = loss - (spec.smoothing / vocabulary) * sums.plain
    if spec.z_loss:
        known = _logsumexp(sums)
        loss = loss + spec.z_loss * (known * known)
    return op.counted(loss, targets, vocabulary)


def _slope(spec: _Spec, sums: _Sums, targets: Any, weight: Any) -> Any:
    """The derivative of each row's loss in its hidden state: f32 [n,d]."""
    share = (_weighted(spec, _logsumexp(sums)) / sums.total)[:, None]
    picked = op.rows_of(weight, jnp.maximum(targets, 0))
    slope = share * sums.moments - (1.0 - spec.smoothing) * picked
    if sums.columns is not None:
        slope = slope - (spec.smoothing / weight.shape[0]) * sums.columns
    return slope


def _weighted(spec: _Spec, known: Any) -> Any:
    """The loss's derivative in its logsumexp."""
    return 1.0 + (2.0 * spec.z_loss) * known


def _weight_slope(spec: _Spec, saved: _Saved, scale: Any) -> Any:
    """The cotangent of the head, from logits that are computed again."""
    vocabulary = saved.weight.shape[0]

    def slope(given: Any, part: Any, first: Any) -> Any:
        hidden, targets, known, scale = given
        softmax = jnp.exp(op.logits(hidden, part) - known[:, None])  # [n,C]
        slope = _weighted(spec, known)[:, None] * softmax - spec.smoothing / vocabulary
        mine = op.here(targets, part.shape[0], first)
        return (slope - jnp.where(mine, 1.0 - spec.smoothing, 0.0)) * scale[:, None]

    rows = (saved.hidden, saved.targets, saved.logsumexp, scale)
    return of_weight(slope, rows, saved.weight, (spec.rows, spec.columns))
