"""Divergences of a model from its base, given the logits of both.

With the target's logit left out of both and the rest normalised again, in logarithms, only what the
model says beside the target is held to the base. p is the adapted model's distribution, q the
base's; KL(p||q) and KL(q||p) have different gradients, ``p ((log p - log q) - KL)`` and ``p - q``,
both 0 at the target.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, final

import vkjit.numpy as jnp
from vkjit.api.custom import custom_jvp
from vkjit.errors import ArgumentError, ShapeError
from vkjit.lax import stop_gradient
from vkjit.nn import _operands as op

Direction: TypeAlias = Literal["adapted||base", "base||adapted"]
"""Which distribution stands first; terms are weighted by its probabilities."""
DIRECTIONS = ("adapted||base", "base||adapted")


@final
@dataclass(frozen=True)
class Kind:
    """Which divergence: its direction, and whether it leaves out the target."""

    direction: Direction
    masked: bool


class Block(NamedTuple):
    """Some columns of some rows: logits f32 [...,C] of both models, and what to leave out."""

    adapted: Any
    base: Any
    target: Any
    """Bool [...,C], which logits are left out; None: none."""


class Sums(NamedTuple):
    """What is known of some rows after some columns; f32 [...] each.

    Args:
        adapted_top: The adapted model's largest logit so far.
        adapted_total: Sum of ``exp(logit - top)`` of the adapted model.
        base_top: As ``adapted_top``, of the base.
        base_total: As ``adapted_total``, of the base.
        shift: Sum of ``exp(logit - top)`` of the model that stands first, times its ``logit - top``
            minus the other's.
    """

    adapted_top: Any
    adapted_total: Any
    base_top: Any
    base_total: Any
    shift: Any


def target_masked_kl(
    logits: Any, base_logits: Any, targets: Any, *, direction: Direction = "adapted||base"
) -> Any:
    """Divergence of two distributions over everything but the target.

    Differentiable in ``logits``, forward and backward, by the closed form of the gradient; the
    base's logits are constants. With two classes nothing is left to differ: 0.

    Args:
        logits: [...,V], of the adapted model.
        base_logits: As ``logits``, of the base.
        targets: Integers [...]; a negative one is no target: its divergence and gradient are 0.
            One of V or more names no class: its divergence and gradient are NaN.
        direction: "adapted||base" is the sum of ``p (log p - log q)``, "base||adapted" that of
            ``q (log q - log p)``, with p of ``logits`` and q of ``base_logits``.

    Returns:
        f32 [...].

    Raises:
        ShapeError, DTypeError: The operands do not fit.
        ArgumentError: There is no such direction.
    """
    kind = kind_of("target_masked_kl", direction, masked=True)
    return _of_logits("target_masked_kl", kind, logits, base_logits, targets)


def kl_divergence(
    logits: Any, base_logits: Any, targets: Any, *, direction: Direction = "adapted||base"
) -> Any:
    """As `target_masked_kl`, over all classes: targets only say which rows count."""
    kind = kind_of("kl_divergence", direction, masked=False)
    return _of_logits("kl_divergence", kind, logits, base_logits, targets)


def kind_of(name: str, direction: str, *, masked: bool) -> Kind:
    """The divergence of that direction.

    Raises:
        ArgumentError: There is no such direction.
    """
    for known in DIRECTIONS:
        if direction == known:
            return Kind(known, masked)
    raise ArgumentError(
        f"{name}: direction={direction!r} was given, expected one of {', '.join(DIRECTIONS)}; "
        "the first of a pair is the distribution that weights the terms"
    )


def nothing(shape: tuple[int, ...]) -> Sums:
    """The sums over no columns."""
    lowest, zero = jnp.full(shape, op.LOWEST, jnp.float32), jnp.zeros(shape, jnp.float32)
    return Sums(lowest, zero, lowest, zero, zero)


def more(kind: Kind, sums: Sums, block: Block) -> Sums:
    """``sums`` with the columns of ``block``."""
    tops = tuple(
        jnp.maximum(before, jnp.max(_kept(logits, block.target), axis=-1))
        for before, logits in ((sums.adapted_top, block.adapted), (sums.base_top, block.base))
    )
    adapted, base = _below(block, *tops)
    adapted_raised, base_raised = jnp.exp(adapted), jnp.exp(base)
    adapted_risen, base_risen = sums.adapted_top - tops[0], sums.base_top - tops[1]
    adapted_kept, base_kept = jnp.exp(adapted_risen), jnp.exp(base_risen)
    if _leads(kind):
        risen, kept, total = adapted_risen - base_risen, adapted_kept, sums.adapted_total
        moved = jnp.sum(adapted_raised * (adapted - base), axis=-1)
    else:
        risen, kept, total = base_risen - adapted_risen, base_kept, sums.base_total
        moved = jnp.sum(base_raised * (base - adapted), axis=-1)
    return Sums(
        tops[0],
        sums.adapted_total * adapted_kept + jnp.sum(adapted_raised, axis=-1),
        tops[1],
        sums.base_total * base_kept + jnp.sum(base_raised, axis=-1),
        (sums.shift + total * risen) * kept + moved,
    )


def divergence(kind: Kind, sums: Sums) -> Any:
    """The divergence once all columns are summed.

    Its rounding error is relative to how far the distributions lie apart, not to how large the
    logits are.
    """
    apart = jnp.log(sums.adapted_total / sums.base_total)
    return _mean_shift(kind, sums) - (apart if _leads(kind) else -apart)


def slope(kind: Kind, sums: Sums, block: Block) -> Any:
    """The divergence's derivative in the adapted logits of ``block``; exactly 0 at the target."""
    adapted, base = _below(block, sums.adapted_top, sums.base_top)
    p = jnp.exp(adapted) / sums.adapted_total[..., None]
    if _leads(kind):
        return p * ((adapted - base) - _mean_shift(kind, sums)[..., None])
    return p - jnp.exp(base) / sums.base_total[..., None]


def _mean_shift(kind: Kind, sums: Sums) -> Any:
    return sums.shift / (sums.adapted_total if _leads(kind) else sums.base_total)


def _below(block: Block, adapted_top: Any, base_top: Any) -> tuple[Any, Any]:
    """The logits counted from the largest; those left out are so low that they raise to 0."""
    adapted, base = _kept(block.adapted, block.target), _kept(block.base, block.target)
    return adapted - adapted_top[..., None], base - base_top[..., None]


def _leads(kind: Kind) -> bool:
    return kind.direction == "adapted||base"


def _kept(logits: Any, target: Any) -> Any:
    """Without the target's logit, and finite below: classes that no model allows do not differ."""
    logits = jnp.maximum(logits, op.LOWEST)
    return logits if target is None else jnp.where(target, op.LOWEST, logits)


def _of_logits(name: str, kind: Kind, logits: Any, base: Any, targets: Any) -> Any:
    logits, base, targets = jnp.asarray(logits), jnp.asarray(base), op.integers(name, targets)
    shapes = (tuple(logits.shape), tuple(base.shape), tuple(targets.shape))
    if shapes[0] != shapes[1] or shapes[0][:-1] != shapes[2] or not shapes[0]:
        raise ShapeError(
            f"{name}: logits {shapes[0]}, base_logits {shapes[1]} and targets {shapes[2]} were "
            "given, expected [...,V], [...,V] and [...]; reshape them"
        )
    wide = (logits.astype(jnp.float32), stop_gradient(base).astype(jnp.float32))
    found = _rows(kind, *wide, targets)
    return op.counted(found, targets, shapes[0][-1])


def _block(kind: Kind, logits: Any, base: Any, targets: Any) -> Block:
    columns = jnp.arange(logits.shape[-1], dtype=targets.dtype)
    return Block(logits, base, columns == targets[..., None] if kind.masked else None)


def _value(kind: Kind, logits: Any, base: Any, targets: Any) -> Any:
    block = _block(kind, logits, base, targets)
    return divergence(kind, more(kind, nothing(targets.shape), block))


def _rule(
    kind: Kind, primals: tuple[Any, Any, Any], tangents: tuple[Any, Any, Any]
) -> tuple[Any, Any]:
    block = _block(kind, *primals)
    sums = more(kind, nothing(primals[2].shape), block)
    moved = jnp.sum(slope(kind, sums, block) * tangents[0], axis=-1)
    return divergence(kind, sums), moved


_rows = custom_jvp(_value, nondiff_argnums=(0,))
_rows.defjvp(_rule)
