"""How exact products of float32 are: named by the caller, or by a setting of the thread."""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import cast

from vkjit.errors import ArgumentError
from vkjit.lowering.kernel.specs import Precision

_NAMES = {
    "default": None,
    "highest": Precision.HIGHEST,
    "float32": Precision.HIGHEST,
    "F32_F32_F32": Precision.HIGHEST,
    "high": Precision.HIGH,
    "tensorfloat32": Precision.HIGH,
    "bfloat16_3x": Precision.HIGH,
    "BF16_BF16_F32_X3": Precision.HIGH,
    "TF32_TF32_F32": Precision.HIGH,
    "bfloat16": Precision.BFLOAT16,
    "fastest": Precision.BFLOAT16,
    "BF16_BF16_F32": Precision.BFLOAT16,
    "F16_F16_F32_X3": Precision.F16X3,
}
"""JAX's names. What it calls TF32 is served by three products of bfloat16, which are closer."""

_state = threading.local()


def matmul_precision() -> Precision:
    """The precision of products that name none: that of the innermost block, or float32's own."""
    return getattr(_state, "precision", Precision.HIGHEST)


@contextmanager
def default_matmul_precision(name: object) -> Generator[None]:
    """Sets the precision of float32 products that name none, for the block, in this thread.

    Args:
        name: as for ``precision`` of ``jax.numpy.matmul``: "highest" or "float32" (no operand is
            rounded; the default), "high" or "BF16_BF16_F32_X3" (three products of bfloat16 parts,
            errors of about 1e-5 of the sum of magnitudes), "bfloat16" or "BF16_BF16_F32" (operands
            rounded to bfloat16, 4e-3), "F16_F16_F32_X3" (three products of float16 parts, about
            1e-6; operands of 65504 and more give infinities). Devices without matrix units, and
            products too small for them, stay in float32.
    """
    before = matmul_precision()
    _state.precision = named_precision("default_matmul_precision", name)
    try:
        yield
    finally:
        _state.precision = before


def named_precision(op: str, given: object) -> Precision:
    """The precision that a caller names: a string, a member of ``lax.Precision``, or one of each.

    Raises:
        ArgumentError: nothing has that name, or the two operands are given different ones.
    """
    if given is None:
        return matmul_precision()
    if isinstance(given, Precision):
        return given
    if isinstance(given, Sequence) and not isinstance(given, str):
        found = {named_precision(op, part) for part in cast("Sequence[object]", given)}
        if len(found) == 1:
            return found.pop()
        raise ArgumentError(f"{op}: precision {given!r}, expected the same for both operands")
    name = given if isinstance(given, str) else str(getattr(given, "name", given))
    for key in (name, name.lower()):
        if key in _NAMES:
            return _NAMES[key] or matmul_precision()
    raise ArgumentError(f"{op}: precision {given!r}, expected one of {', '.join(_NAMES)}, or None")
