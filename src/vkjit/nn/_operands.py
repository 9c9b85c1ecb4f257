"""Products of hidden states with the rows of a head, whatever the head is stored as."""

from __future__ import annotations

from typing import Any

import vkjit.numpy as jnp
from vkjit import lax
from vkjit.dtypes import is_float
from vkjit.errors import ArgumentError, DTypeError, ShapeError
from vkjit.quant import QuantizedArray

LOWEST = float(jnp.finfo(jnp.float32).min)


def logits(hidden: Any, weight: Any) -> Any:
    """``hidden weightᵀ``: [N,d] and [C,d] to f32 [N,C]; multiplied in hidden's dtype."""
    return _product(hidden, weight, (1, 1))


def back(cotangent: Any, weight: Any, dtype: Any) -> Any:
    """``cotangent weight``: f32 [N,C] and [C,d] to f32 [N,d]; multiplied in ``dtype``."""
    return _product(cotangent.astype(dtype), weight, (1, 0))


def outer(cotangent: Any, hidden: Any) -> Any:
    """``cotangentᵀ hidden``: f32 [N,C] and [N,d] to f32 [C,d]; multiplied in hidden's dtype."""
    return _product(cotangent.astype(hidden.dtype), hidden, (0, 0))


def is_float_array(weight: Any) -> bool:
    """Whether ``weight`` holds floats; blocks of quantized numbers do not, and stay as they are."""
    return is_float(weight.dtype)


def rows_of(weight: Any, places: Any) -> Any:
    """Rows of [V,d] at ``places`` [N]: f32 [N,d]."""
    return jnp.take(weight, places, axis=0).astype(jnp.float32)


def column_sums(weight: Any, dtype: Any) -> Any:
    """Sums over the rows of [C,d]: f32 [1,d]; a product, which reads blocks where they lie."""
    ones = jnp.ones((1, weight.shape[0]), dtype)
    return _product(ones, weight, (1, 0))


def counted(x: Any, targets: Any, vocabulary: int) -> Any:
    """``x`` [N], 0 where there is no target, NaN where there is no such class."""
    known = jnp.where(targets < vocabulary, 1.0, jnp.nan)
    return jnp.where(targets >= 0, x * known, 0.0)


def integers(op: str, targets: Any) -> Any:
    """Targets as int32, which counts every class: narrower integers may not.

    Raises:
        DTypeError: They are no integers.
    """
    targets = jnp.asarray(targets)
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise DTypeError(
            f"{op}: targets of {targets.dtype} were given, expected integers; cast them with astype"
        )
    return targets.astype(jnp.int32)


def here(targets: Any, columns: int, first: Any) -> Any:
    """Bool [N,columns]: which column, counted from ``first``, is the row's target."""
    return jnp.arange(columns, dtype=targets.dtype) == (targets - first)[:, None]


def checked(op: str, hidden: Any, weight: Any, targets: Any) -> tuple[Any, Any, Any]:
    """The operands as arrays; a quantized weight stays what it is.

    Raises:
        ShapeError: They are no [N,d], [V,d] and [N].
        DTypeError: Hidden states are no floats, or targets no integers.
        ArgumentError: The weight is a transpose of blocks.
    """
    hidden, targets = jnp.asarray(hidden), integers(op, targets)
    if not isinstance(weight, QuantizedArray):
        weight = jnp.asarray(weight)
    elif weight.turned:
        raise ArgumentError(
            f"{op}: weight {weight!r} is a transpose of blocks, expected the head as it is stored, "
            "[V,d]; give it without mT or T"
        )
    shapes = tuple(tuple(x.shape) for x in (hidden, weight, targets))
    ranks = tuple(len(shape) for shape in shapes)
    if ranks != (2, 2, 1) or shapes[0] != (*shapes[2], shapes[1][1]) or 0 in shapes[1]:
        raise ShapeError(
            f"{op}: hidden {shapes[0]}, weight {shapes[1]} and targets {shapes[2]} were given, "
            "expected [N,d], [V,d] and [N]; reshape leading axes into one"
        )
    if not is_float(hidden.dtype):
        raise DTypeError(
            f"{op}: hidden of {hidden.dtype} was given, expected floats; cast it with astype"
        )
    return hidden, weight, targets


def _product(x: Any, y: Any, axes: tuple[int, int]) -> Any:
    if is_float_array(y):  # blocks are read in the type of the other factor anyway
        y = y.astype(x.dtype)
    dims = (((axes[0],), (axes[1],)), ((), ()))
    return lax.dot_general(x, y, dims, preferred_element_type=jnp.float32)
