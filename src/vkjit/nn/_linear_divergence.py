"""Divergences of a model from its base whose logits never exist as a whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import vkjit.numpy as jnp
from vkjit.api.custom import custom_vjp
from vkjit.errors import ShapeError
from vkjit.nn import _divergence as div
from vkjit.nn import _operands as op
from vkjit.nn._chunks import over_slices, sizes
from vkjit.nn._cotangents import of_hidden, of_weight


@final
@dataclass(frozen=True)
class _Spec:
    kind: div.Kind
    rows: int
    columns: int


def linear_target_masked_kl(  # noqa: PLR0913  two models, one head, two sizes
    hidden: Any,
    base_hidden: Any,
    weight: Any,
    targets: Any,
    *,
    direction: div.Direction = "adapted||base",
    row_chunk: int | None = None,
    vocab_chunk: int | None = None,
) -> Any:
    """`target_masked_kl` of ``hidden weightᵀ`` and ``base_hidden weightᵀ``, block by block.

    The backward computes a block's logits once more; where one block is the whole, compiled
    programs keep it instead. Differentiable in ``hidden`` and in a ``weight`` of floats, in reverse
    mode; ``base_hidden``, and the base's logits as a function of ``weight``, are constants.

    Args:
        hidden: [N,d], states of the adapted model.
        base_hidden: [N,d], states of the base.
        weight: [V,d], the head of both: an array or a quantized one.
        targets: As in `target_masked_kl`.
        direction: As in `target_masked_kl`.
        row_chunk: As in `linear_cross_entropy`.
        vocab_chunk: As in `linear_cross_entropy`; up to five blocks exist at a time, logits of both
            models and what is made of them.

    Returns:
        f32 [N].

    Raises:
        ShapeError, DTypeError: The operands do not fit.
        ArgumentError: There is no such direction, or a size is below 1.
    """
    name = "linear_target_masked_kl"
    kind = div.kind_of(name, direction, masked=True)
    return _checked(name, kind, (hidden, base_hidden, weight, targets), (row_chunk, vocab_chunk))


def linear_kl_divergence(  # noqa: PLR0913  as above
    hidden: Any,
    base_hidden: Any,
    weight: Any,
    targets: Any,
    *,
    direction: div.Direction = "adapted||base",
    row_chunk: int | None = None,
    vocab_chunk: int | None = None,
) -> Any:
    """As `linear_target_masked_kl`, over the whole vocabulary: targets say which rows count."""
    name = "linear_kl_divergence"
    kind = div.kind_of(name, direction, masked=False)
    return _checked(name, kind, (hidden, base_hidden, weight, targets), (row_chunk, vocab_chunk))


def _checked(
    name: str, kind: div.Kind, operands: tuple[Any, ...], chunks: tuple[int | None, int | None]
) -> Any:
    hidden, base_hidden, weight, targets = operands
    hidden, weight, targets = op.checked(name, hidden, weight, targets)
    base_hidden = jnp.asarray(base_hidden)
    if base_hidden.shape != hidden.shape or base_hidden.dtype != hidden.dtype:
        raise ShapeError(
            f"{name}: base_hidden {base_hidden.dtype}{list(base_hidden.shape)} was given with "
            f"hidden {hidden.dtype}{list(hidden.shape)}, expected the same; compute both alike"
        )
    block = sizes(name, hidden.shape[0], weight.shape[0], *chunks)
    return _divergences(_Spec(kind, *block), hidden, base_hidden, weight, targets)


def _value(spec: _Spec, hidden: Any, base_hidden: Any, weight: Any, targets: Any) -> Any:
    return _forward(spec, hidden, base_hidden, weight, targets)[0]


def _forward(
    spec: _Spec, hidden: Any, base_hidden: Any, weight: Any, targets: Any
) -> tuple[Any, Any]:
    def of_rows(carry: Any, rows: Any, row: Any) -> tuple[Any, Any]:
        del row

        def more(sums: div.Sums, part: Any, first: Any) -> tuple[div.Sums, None]:
            return div.more(spec.kind, sums, _block(spec, rows, part, first)), None

        start = div.nothing(rows[2].shape)
        sums, _ = over_slices(more, start, weight, spec.columns)
        found = div.divergence(spec.kind, sums)
        return carry, (op.counted(found, rows[2], weight.shape[0]), sums)

    rows = (hidden, base_hidden, targets)
    _, (found, sums) = over_slices(of_rows, None, rows, spec.rows)
    return found, (rows, weight, sums)


def _backward(spec: _Spec, saved: Any, cotangent: Any) -> tuple[Any, None, Any, None]:
    rows, weight, sums = saved
    scale = op.counted(cotangent, rows[2], weight.shape[0])

    def slope(given: Any, part: Any, first: Any) -> Any:
        *rows, sums, scale = given
        return div.slope(spec.kind, sums, _block(spec, rows, part, first)) * scale[:, None]

    given, block = (*rows, sums, scale), (spec.rows, spec.columns)
    hidden = of_hidden(slope, given, weight, block)
    if not op.is_float_array(weight):
        return hidden, None, None, None
    return hidden, None, of_weight(slope, given, weight, block), None


_divergences = custom_vjp(_value, nondiff_argnums=(0,))
_divergences.defvjp(_forward, _backward)


def _block(spec: _Spec, rows: Any, part: Any, first: Any) -> div.Block:
    """The logits of some rows, (hidden, base_hidden, targets), in a slice of the head."""
    hidden, base_hidden, targets = rows
    target = op.here(targets, part.shape[0], first) if spec.kind.masked else None
    return div.Block(op.logits(hidden, part), op.logits(base_hidden, part), target)
