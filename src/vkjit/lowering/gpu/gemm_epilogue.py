"""What every product on the GPU does with its sums: convert them, run the body, store."""

from __future__ import annotations

from collections.abc import Sequence

from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.types import ConvertOp, ScalarType, scalar_of, with_elem
from vkjit.lowering.plan.groups import ContractGroup, GatherStep, LoadStep
from vkjit.lowering.templates.body import Point, access_of, evaluate, store
from vkjit.lowering.templates.context import Buffers, TemplateContext
from vkjit.lowering.templates.space import views_of

_READING = 8
"""Vectors of outputs whose bodies read memory at a time."""


def buffers_of(b: Builder, group: ContractGroup, context: TemplateContext) -> Buffers:
    """The arrays of a product: its operands, and those of its body and stores."""
    operands = {group.lhs.array, group.rhs.array}
    return Buffers(b, context, access_of(group.body, group.stores, operands))


def finish(point: Point, buffers: Buffers, group: ContractGroup, total: Value) -> None:
    """Body and stores for the sum of one output, or for a vector of them along n."""
    finish_all([(point, total)], buffers, group)


def finish_all(
    outputs: Sequence[tuple[Point, Value]], buffers: Buffers, group: ContractGroup
) -> None:
    """As ``finish`` for several outputs: their bodies read memory side by side.

    A driver may not move a load ahead of a store that stands before it: they might meet in memory.
    """
    wanted = {step.value for step in group.stores}
    found: list[tuple[Point, dict[int, Value]]] = []
    for point, total in outputs:
        product = widened(point.b, total, group.body[0].type)
        found.append((point, evaluate(point, buffers, group.body, wanted, {0: product})))
    for point, values in found:
        for step in group.stores:
            store(point, buffers, step, values[step.value])


def at_once(group: ContractGroup) -> int:
    """Outputs of an invocation that are worth the registers to be finished side by side."""
    reads = any(isinstance(step, (LoadStep, GatherStep)) for step in group.body)
    return _READING if reads else 1


def stores_vectors(group: ContractGroup, lanes: int) -> bool:
    """Whether ``lanes`` neighbouring outputs along n are read and written as one."""
    views = views_of(group.body, group.stores)
    return group.n % lanes == 0 and all(v.strides[-1] in (0, 1) for v in views)


def number(b: Builder, elem: ScalarType, value: int) -> Value:
    """A small whole number of type ``elem``."""
    return b.const(elem, float(value) if elem.kind == "float" else value)


def widened(b: Builder, value: Value, elem: ScalarType) -> Value:
    """``value`` in the accumulation or output type."""
    have = scalar_of(value.type)
    if have is elem:
        return value
    type_ = with_elem(value.type, elem)
    if elem.kind == "float":
        return b.convert(ConvertOp.FLOAT, value, type_)
    return b.convert(ConvertOp.SEXT if elem.bits > have.bits else ConvertOp.TRUNC, value, type_)


def multiply_add(b: Builder, x: Value, y: Value, total: Value) -> Value:
    """``x * y + total``, with one rounding for floats."""
    if scalar_of(total.type).kind == "float":
        return b.fma(x, y, total)
    return b.add(b.mul(x, y), total)


def added(b: Builder, values: Sequence[Value]) -> Value:
    """The sum of values, in pairs of pairs: rounding errors grow with the logarithm of them."""
    level = list(values)
    while len(level) > 1:
        pairs = zip(level[::2], level[1::2], strict=False)
        level = [b.add(x, y) for x, y in pairs] + level[len(level) // 2 * 2 :]
    return level[0]
