"""The type in which kernels count elements: 32 bits, or 64 where an array is too large for them."""

from __future__ import annotations

from vkjit.errors import MissingRuleError
from vkjit.lowering.kernel.types import I64, ScalarType
from vkjit.lowering.templates.context import TemplateContext

MAX_ELEMENTS = 1 << 31
"""Signed 32-bit indices count this many elements."""


def index_type(context: TemplateContext) -> ScalarType:
    """The type of indices of the kernels of a group.

    Raises:
        MissingRuleError: an array needs 64-bit indices, and the target has none.
    """
    for number, info in enumerate(context.arrays):
        if info.length < MAX_ELEMENTS:
            continue
        if I64 in context.target.arithmetic:
            return I64
        raise MissingRuleError(
            f"gpu: array {number} of the group has {info.length} elements of {info.elem}, "
            f"{context.target.name} indexes fewer than {MAX_ELEMENTS}; split the array or "
            "run on cpu"
        )
    return context.target.index_type
