"""The type in which kernels count: 32 bits, or 64 where there is too much for them.

Arrays may have less than 2^31 elements by a margin: loops and workgroups count on beyond the end,
and a signed counter that wraps never ends its loop.
"""

from __future__ import annotations

from vkjit.errors import MissingRuleError
from vkjit.lowering.kernel.types import I64, ScalarType
from vkjit.lowering.plan.groups import GatherStep, Group, reads
from vkjit.lowering.templates.context import TemplateContext

MAX_ELEMENTS = (1 << 31) - (1 << 20)
"""Signed 32-bit indices count this many elements, and how far kernels count beyond them."""


def index_type(context: TemplateContext, counted: int = 0) -> ScalarType:
    """The type of indices of the kernels of a group.

    Args:
        context: the target, and the arrays of the group.
        counted: points that kernels number, where that may be more than any array has elements:
            reductions of what arrays are broadcast to.

    Raises:
        MissingRuleError: the group needs 64-bit indices, and the target has none.
    """
    if I64 in context.target.arithmetic and _too_much(context, counted):
        return I64
    check_sizes(context, counted)
    return context.target.index_type


def check_sizes(context: TemplateContext, counted: int = 0) -> None:
    """Refuses a group that 32-bit indices do not reach; for kernels that know no others.

    Raises:
        MissingRuleError: as for ``index_type``.
    """
    fault = _too_much(context, counted)
    if fault:
        raise MissingRuleError(
            f"gpu: {fault}, {context.target.name} indexes fewer than {MAX_ELEMENTS}; split the "
            "array or run on cpu"
        )


def _too_much(context: TemplateContext, counted: int) -> str | None:
    """What of the group is more than 32-bit indices reach."""
    for number, info in enumerate(context.arrays):
        if info.length >= MAX_ELEMENTS:
            return f"array {number} of the group has {info.length} elements of {info.elem}"
    if context.numbers >= MAX_ELEMENTS:
        return f"the group reads blocks of {context.numbers} numbers"
    return f"the group has {counted} points" if counted >= MAX_ELEMENTS else None


def numbers_in_blocks(group: Group) -> int:
    """How far a group counts numbers in blocks, of which an array has fewer elements."""
    found = 0
    for step in reads(group):
        if step.blocks is None:
            continue
        steps = zip(step.view.shape, step.view.strides, strict=True)
        last = sum((size - 1) * max(stride, 0) for size, stride in steps if size)
        if isinstance(step, GatherStep):
            last += (step.size - 1) * max(step.stride, 0)
        found = max(found, step.view.offset + last + 1)
    return found
