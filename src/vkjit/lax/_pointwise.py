"""Elementwise operations without broadcasting: operands have one shape or rank 0."""

from __future__ import annotations

from enum import Enum
from typing import Any, final

import numpy as np

from vkjit import dtypes, tree
from vkjit.errors import ArgumentError, DTypeError
from vkjit.ir.primitive import Value
from vkjit.numpy._core import (
    ArrayLike,
    DTypeLike,
    cast,
    lift,
    operand_aval,
    promoted,
)
from vkjit.numpy._math import (
    floating,
    rint,
)
from vkjit.ops import arithmetic, compare, logical, special
from vkjit.ops import math as math_
from vkjit.ops.extrema import clamp as clamp_op
from vkjit.trace import aval_of


@final
class Precision(Enum):
    """How exact products are asked to be; every value means exact to the accumulation dtype."""

    DEFAULT = "default"
    HIGH = "high"
    HIGHEST = "highest"


def same_dtype(name: str, *operands: ArrayLike) -> list[Value]:
    """Operands of one dtype, Python scalars adapted, and of one shape or rank 0.

    Raises:
        DTypeError: arrays of different dtypes.
    """
    strong = {a.dtype for a in (operand_aval(name, x) for x in operands) if not a.weak}
    if len(strong) > 1:
        given = ", ".join(str(operand_aval(name, x)) for x in operands)
        raise DTypeError(f"{name}: operands {given} have different dtypes; cast with .astype(...)")
    return promoted(name, *operands)


def div(x: ArrayLike, y: ArrayLike) -> Value:
    """Quotient in the operands' dtype; integers truncate, x / 0 is -1."""
    return arithmetic.div(*same_dtype("div", x, y))


def rem(x: ArrayLike, y: ArrayLike) -> Value:
    """Remainder of ``div``, with the sign of ``x``; x for an integer y of 0."""
    return arithmetic.rem(*same_dtype("rem", x, y))


def shift_left(x: ArrayLike, y: ArrayLike) -> Value:
    """Bits moved up; 0 for a shift by the width or more."""
    return logical.shift_left(*same_dtype("shift_left", x, y))


def shift_right_logical(x: ArrayLike, y: ArrayLike) -> Value:
    """Bits moved down, zeros move in."""
    return logical.shift_right_logical(*same_dtype("shift_right_logical", x, y))


def shift_right_arithmetic(x: ArrayLike, y: ArrayLike) -> Value:
    """Bits moved down, the sign moves in."""
    return logical.shift_right_arithmetic(*same_dtype("shift_right_arithmetic", x, y))


def population_count(x: ArrayLike) -> Value:
    """Number of set bits, in the dtype of ``x``."""
    return logical.population_count(lift("population_count", x))


def clz(x: ArrayLike) -> Value:
    """Number of leading zero bits, in the dtype of ``x``."""
    return logical.clz(lift("clz", x))


def rsqrt(x: ArrayLike) -> Value:
    """``1 / sqrt(x)``."""
    return math_.rsqrt(floating("rsqrt", x))


def logistic(x: ArrayLike) -> Value:
    """``1 / (1 + exp(-x))`` without overflow."""
    return special.logistic(floating("logistic", x))


def erf(x: ArrayLike) -> Value:
    """The error function."""
    return special.erf(floating("erf", x))


def erfc(x: ArrayLike) -> Value:
    """``1 - erf(x)`` without cancellation."""
    return special.erfc(floating("erfc", x))


def erf_inv(x: ArrayLike) -> Value:
    """The inverse of ``erf``; infinite at -1 and 1."""
    return special.erf_inv(floating("erf_inv", x))


def reciprocal(x: ArrayLike) -> Value:
    """``1 / x``."""
    x = floating("reciprocal", x)
    return arithmetic.div(aval_of(x).dtype.type(1), x)


def round(x: ArrayLike) -> Value:
    """The nearest whole number, halves to even."""
    return rint(x)


def clamp(min: ArrayLike, x: ArrayLike, max: ArrayLike) -> Value:
    """``x`` limited to ``[min, max]``; NaN spreads."""
    return clamp_op(*same_dtype("clamp", min, x, max))


def select(pred: ArrayLike, on_true: ArrayLike, on_false: ArrayLike) -> Value:
    """``on_true`` where ``pred`` holds, else ``on_false``; ``pred`` is boolean."""
    return logical.select(lift("select", pred), *same_dtype("select", on_true, on_false))


def select_n(which: ArrayLike, *cases: ArrayLike) -> Value:
    """``cases[which]``, element by element; numbers beyond the ends are clamped.

    Args:
        which: boolean for up to two cases, else int32; of rank 0 or of the shape of the cases.
        cases: of one shape and dtype.

    Raises:
        DTypeError: ``which`` is neither, or boolean with more than two cases.
        ArgumentError: there are no cases.
    """
    if not cases:
        raise ArgumentError("select_n: no cases, expected at least one")
    of = operand_aval("select_n", which)
    if of.dtype != dtypes.int32 and (of.dtype != dtypes.bool_ or len(cases) > 2):
        raise DTypeError(
            f"select_n: which {of} for {len(cases)} cases; expected bool[] for two, else i32[]"
        )
    first, *others = same_dtype("select_n", *cases)
    number = lift("select_n", which)
    out = first
    for position, case in enumerate(others, 1):
        test = number
        if of.dtype == dtypes.int32:
            test = compare.ge(number, np.int32(position))
        out = logical.select(test, case, out)
    return out


def stop_gradient(x: Any) -> Any:
    """``x`` (an array or a tree of them), taken for a constant by differentiation."""
    return tree.map(_stopped, x)


def _stopped(x: ArrayLike) -> Value:
    smooth = dtypes.is_float(operand_aval("stop_gradient", x).dtype)
    return special.stop_gradient(x) if smooth else x


def convert_element_type(operand: ArrayLike, new_dtype: DTypeLike) -> Value:
    """``operand`` in another dtype; see ``vkjit.numpy.astype``."""
    operand_aval("convert_element_type", operand)
    return cast(operand, dtypes.canonical(new_dtype))


def bitcast_convert_type(operand: ArrayLike, new_dtype: DTypeLike) -> Value:
    """The bits of ``operand`` as another dtype of the same width."""
    lifted = lift("bitcast_convert_type", operand)
    return logical.bitcast_convert_type(lifted, dtypes.canonical(new_dtype))
