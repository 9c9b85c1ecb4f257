"""Every bound that the doctor judges by.

Two devices add in different orders, so results are compared up to

    allowed = 2 * (u_out + c * (sqrt(K) + d) * u_sum)

- ``u_out``, ``u_sum``: unit roundoffs of the result's dtype and of the dtype in which sums run
  (float32 at least, half of ``ml_dtypes.finfo(dtype).eps``).
- ``K``: the number of terms of the longest sum behind an element. Roundings of independent terms
  grow with its root: Higham and Mary, *A new approach to probabilistic rounding error analysis*,
  SIAM J. Sci. Comput. 41 (2019), theorem 2.4, where ``c`` is the ``lambda`` that sets how sure one
  wants to be: with 4 the theorem bounds the chance of each operation to exceed it by 1 in 1,500.
- ``d``: roundings before and after the sum, see ``DEPTH``.
- 2: both sides are off, each by the bracket.

The error is relative to the scale of the result, never to the difference itself: the sum of the
magnitudes of the terms where a check knows it (products, sums), else the largest magnitude in the
array, because gradients are differences of larger numbers. In float32 the bound is 1e-6 to 1e-4; an
error of 1% is far outside, also in float16 (1e-3 to 8e-3) and bfloat16 (8e-3).

Elementary functions are judged in units in the last place instead, by ``ULPS``.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from enum import Enum
from typing import Any, cast, final

import ml_dtypes
import numpy as np

DType = np.dtype[Any]
Array = np.ndarray[Any, Any]


class Kind(Enum):
    """How a result comes about; decides ``DEPTH``."""

    EXACT = "exact"  # moves, selections, integers, barriers: the same bits
    SUM = "sum"  # one sum of products
    ELEMENT = "element"  # one primitive, elementary functions included
    LAYER = "layer"  # a layer forward, or the gradients of its inputs
    STEP = "step"  # a training step: several layers, their gradients, an update


CONFIDENCE = 4.0
"""``c`` of the formula."""

DEPTH = {Kind.SUM: 2, Kind.ELEMENT: 8, Kind.LAYER: 24, Kind.STEP: 64}
"""``d`` of the formula: roundings beside those of the longest sum, at most."""

ULPS = {
    "add": 0.5,
    "subtract": 0.5,
    "multiply": 0.5,
    "divide": 0.51,
    "sqrt": 0.51,
    "rsqrt": 1.5,
    "reciprocal": 0.51,
    "exp": 1.2,
    "exp2": 1.2,
    "expm1": 1.5,
    "log": 1.0,
    "log1p": 1.5,
    "sin": 1.6,
    "cos": 1.6,
    "tan": 3.5,
    "arctan": 1.5,
    "tanh": 6.0,
    "erf": 6.3,
    "erf_inv": 2.0,
    "power": 1.5,
    "arctan2": 2.0,
}
"""Largest error in float32, in units in the last place of the exact result.

Where a driver rounds ``Fma`` twice, exp and exp2 may be off by 1.2, tanh by 6.0 and erf by 6.3
instead of 1.0, 5.5 and 6.0. Subnormal inputs and results may be flushed to zero.
"""

NARROW_ULPS = 1.0
"""The same in float16 and bfloat16: the float32 result rounded once, or the neighbour."""


@final
@dataclass(frozen=True, slots=True)
class Format:
    """Distance from 1 to the next number, smallest normal and largest finite number of a dtype."""

    eps: float
    tiny: float
    largest: float


@functools.cache
def format_of(dtype: DType) -> Format:
    """The limits of a floating-point dtype."""
    info = cast(Any, ml_dtypes.finfo(dtype))
    return Format(float(info.eps), float(info.smallest_normal), float(info.max))


def unit(dtype: DType) -> float:
    """Unit roundoff: half the distance from 1 to the next number."""
    return format_of(dtype).eps / 2


def is_float(dtype: DType) -> bool:
    """Whether values of ``dtype`` are rounded."""
    return dtype.kind == "f" or dtype == ml_dtypes.bfloat16


def allowed(kind: Kind, dtype: DType, length: int = 1, summed: DType | None = None) -> float:
    """The largest relative error of a result.

    Args:
        kind: how the result comes about.
        dtype: of the result.
        length: ``K``, the number of terms of the longest sum behind an element.
        summed: the dtype in which work is rounded in between, unless it is float32 (or wider).
    """
    if kind is Kind.EXACT or not is_float(dtype):
        return 0.0
    return 2 * (unit(dtype) + _between(kind, dtype, length, summed))


def _between(kind: Kind, dtype: DType, length: int, summed: DType | None) -> float:
    """``c * (sqrt(K) + d) * u_sum``."""
    wide = np.dtype(np.float64) if dtype == np.float64 else np.dtype(np.float32)
    return CONFIDENCE * (math.sqrt(max(length, 1)) + DEPTH[kind]) * unit(summed or wide)


@final
@dataclass(frozen=True, slots=True)
class SumBound:
    """The bound of results whose terms are known, ``limit`` relative to ``scale``.

    ``u_out`` then counts relative to the result and only the rest relative to the sum of the
    magnitudes of the terms, so that an error of 1% is found under heavy cancellation, too.
    """

    kind: Kind
    dtype: DType
    length: int
    summed: DType | None = None

    @property
    def limit(self) -> float:
        """The largest error relative to ``scale``."""
        return allowed(self.kind, self.dtype, self.length, self.summed)

    def scale(self, want: Array, terms: Array) -> Array:
        """What errors are relative to; ``terms`` are the sums of the terms' magnitudes."""
        between = _between(self.kind, self.dtype, self.length, self.summed)
        size = np.abs(want.astype(np.float64))
        return np.asarray(2 * (unit(self.dtype) * size + between * terms) / self.limit)
