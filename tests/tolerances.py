"""Error bounds for comparing a device with the NumPy evaluator, by dtype, kind and length.

A bound is relative to the sum of the magnitudes that were added (the value itself where nothing is
added), in multiples of the unit roundoff ``u`` of the dtype in which the work is done.

Sources: N. Higham, *Accuracy and Stability of Numerical Algorithms*, 2nd ed., section 3.1 (any
order of ``n`` additions of products is within ``gamma(n) = n u / (1 - n u)``); the expansions of
``lowering/legalize`` are tested one by one to at most ``FUNCTION_ULPS`` units in the last place,
and the evaluator's own functions (NumPy) are within 4.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]

FUNCTION_ULPS = 16.0


class Kind(Enum):
    """How a result comes about."""

    EXACT = "exact"  # selections, moves, comparisons, integers
    ROUNDED = "rounded"  # one correctly rounded operation, and the division of drivers (2.5 ulp)
    FUNCTION = "function"  # an elementary function
    SUM = "sum"  # of `length` terms or products, in any order


def unit(dtype: np.dtype[Any]) -> float:
    """Unit roundoff: half the distance from 1 to the next number."""
    return float(ml_dtypes.finfo(dtype).eps) / 2


def gamma(length: int, dtype: np.dtype[Any]) -> float:
    """The bound of Higham's lemma 3.1; ``length`` stays below ``1 / u``."""
    nu = length * unit(dtype)
    assert nu < 1, f"a sum of {length} terms in {dtype} has no bound"
    return nu / (1 - nu)


def accumulator(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype in which sums of ``dtype`` run: float32 at least."""
    return np.dtype(np.float64) if dtype == np.float64 else np.dtype(np.float32)


def bound(dtype: np.dtype[Any], kind: Kind, length: int = 1) -> float:
    """Largest relative difference of two results of ``dtype``, each with the error of ``kind``."""
    if kind is Kind.EXACT:
        return 0.0
    if kind is Kind.ROUNDED:
        return 2 * 2.5 * 2 * unit(dtype)
    if kind is Kind.FUNCTION:
        return 2 * FUNCTION_ULPS * unit(dtype)
    return 2 * (gamma(length + 1, accumulator(dtype)) + unit(dtype))


def assert_within(got: Array, want: Array, scale: Array | None, tolerance: float, of: str) -> None:
    """Every element of ``got`` is within ``tolerance * scale`` of ``want``.

    Args:
        got: from a device.
        want: from the evaluator; infinities and NaN must be met exactly.
        scale: what the bound is relative to, or None for the magnitude of ``want``.
        tolerance: from ``bound``; 0 asks for equality.
        of: what is compared, for the message.
    """
    assert got.shape == want.shape, of
    assert got.dtype == want.dtype, of
    if want.dtype.kind in "biu":
        np.testing.assert_array_equal(got, want, err_msg=of)
        return
    if want.dtype.names:  # blocks
        assert got.tobytes() == want.tobytes(), of
        return
    a, b = got.astype(np.float64), want.astype(np.float64)
    size = np.abs(b) if scale is None else np.abs(scale.astype(np.float64))
    # Devices may flush subnormals to zero (Vulkan without the float controls that keep them).
    tiny = float(ml_dtypes.finfo(want.dtype).smallest_normal)
    with np.errstate(invalid="ignore"):
        near = np.abs(a - b) <= tolerance * size + tiny
    same = near | (a == b) | (np.isnan(a) & np.isnan(b))
    if not np.all(same):
        bad = tuple(int(i) for i in np.argwhere(~np.atleast_1d(same))[0])
        at = bad if want.ndim else ()
        raise AssertionError(
            f"{of}: {np.sum(~same)} of {want.size} differ, first at {at}: got {a[at]!r}, "
            f"wanted {b[at]!r}, allowed {tolerance:.2e} of {size[at]!r}"
        )
