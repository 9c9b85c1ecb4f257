"""How far two arrays are apart, and the planted error that must not go unnoticed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, final

import numpy as np

from vkjit.doctor.tolerances import format_of, is_float

Array = np.ndarray[Any, Any]

PLANTED = 0.01
"""Relative size of a planted error."""


@final
@dataclass(frozen=True, slots=True)
class Mismatch:
    """One comparison that failed.

    ``differ`` of ``size`` elements are off by more than ``allowed``; the worst stands at ``at`` and
    is off by ``error``, both relative to the scale of the result.
    """

    what: str
    differ: int
    size: int
    at: tuple[int, ...]
    got: str
    wanted: str
    error: float
    allowed: float

    def __str__(self) -> str:
        return (
            f"{self.what}: {self.differ} of {self.size} differ, worst at {self.at}: "
            f"got {self.got}, wanted {self.wanted}, off by {self.error:.2e}, "
            f"allowed {self.allowed:.2e}"
        )

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        error = self.error if np.isfinite(self.error) else None
        return {**asdict(self), "at": list(self.at), "error": error}


@final
@dataclass(frozen=True, slots=True)
class Distance:
    """The largest error in units of what is allowed, and the fault if there is one."""

    share: float
    mismatch: Mismatch | None


def compared(
    what: str, got: Array, want: Array, allowed: float, scale: Array | float | None = None
) -> Distance:
    """Compares ``got`` with ``want``.

    Args:
        what: name for messages.
        got: from the device.
        want: from the host; NaN and infinities must be met.
        allowed: largest error relative to ``scale``; 0 asks for equality.
        scale: what errors are relative to, broadcast; the largest finite magnitude of ``want``
            without it.
    """
    if got.shape != want.shape:
        shapes = f"shape {got.shape}", f"shape {want.shape}"
        return Distance(np.inf, Mismatch(what, got.size, want.size, (), *shapes, np.inf, allowed))
    if want.size == 0:
        return Distance(0.0, None)
    error = _errors(got, want, allowed, scale)
    worst = np.unravel_index(int(error.argmax()), error.shape)
    largest = float(error[worst])
    differ = int(np.sum(error > allowed))
    share = largest / allowed if allowed else (np.inf if differ else 0.0)
    if not differ:
        return Distance(share, None)
    at = tuple(int(i) for i in worst) if want.ndim else ()
    values = repr(got[at].item()), repr(want[at].item())
    return Distance(share, Mismatch(what, differ, want.size, at, *values, largest, allowed))


def _errors(got: Array, want: Array, allowed: float, scale: Array | float | None) -> Array:
    """Errors relative to the scale; infinite where a NaN or an infinity is missed."""
    if not is_float(want.dtype):
        return np.atleast_1d(np.where(got == want, 0.0, np.inf))
    a, b = got.astype(np.float64), want.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        if allowed == 0.0:
            return np.atleast_1d(np.where(same, 0.0, np.inf))
        largest = np.abs(b[np.isfinite(b)]).max(initial=0.0) if scale is None else scale
        # Devices may flush subnormals to zero.
        size: Array = np.maximum(np.asarray(largest), format_of(want.dtype).tiny / allowed)
        error: Array = np.abs(a - b) / size
    return np.atleast_1d(np.where(same, 0.0, np.where(np.isnan(error), np.inf, error)))


def with_error(values: Array) -> Array:
    """A copy with an error of 1% in its largest element; whole numbers change by 1 at least.

    Floats come back as float64, so that the error is not rounded away in a narrow dtype.
    """
    if values.size == 0:
        return values
    if values.dtype == np.bool_:
        changed = values.copy()
        changed.flat[0] = not changed.flat[0]
        return changed
    if not is_float(values.dtype):
        changed = values.copy()
        place = int(np.argmax(np.abs(values.astype(np.float64))))
        changed.flat[place] = _moved(int(changed.flat[place]))
        return changed
    wide = values.astype(np.float64)
    finite = np.isfinite(wide)
    place = int(np.argmax(np.where(finite, np.abs(wide), -1.0)))
    wide.flat[place] = wide.flat[place] * (1 + PLANTED) or PLANTED
    return wide


def _moved(value: int) -> int:
    """A whole number changed by 1%, towards zero, so that it still fits its dtype."""
    step = max(1, abs(value) // 100)
    return value - step if value > 0 else value + step
