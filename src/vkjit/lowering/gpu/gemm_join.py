"""Sums cut into parts that run beside each other, for products with few outputs and long sums.

The parts become a batch axis of an ordinary product without epilogue, so that any template computes
them. A second kernel adds the parts of each output, always in the same order, and runs the
epilogue. No atomics: equal inputs give equal bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import assert_never

from vkjit.lowering.gpu.gemm_epilogue import widened
from vkjit.lowering.gpu.loops import pointwise
from vkjit.lowering.kernel.build import Builder
from vkjit.lowering.kernel.nodes import Value
from vkjit.lowering.kernel.types import ScalarType
from vkjit.lowering.kernel.views import View, dense
from vkjit.lowering.plan.groups import (
    BodyStep,
    ConstStep,
    ContractGroup,
    GatherStep,
    LoadStep,
    LoopGroup,
    ProductStep,
    ReduceStep,
    ScalarStep,
    StoreStep,
)
from vkjit.lowering.templates.context import Lowered, TemplateContext

MOST_PARTS = 32
"""Parts of a sum, at most: the second kernel reads each of them."""
_MULTIPLE = 16
"""Parts begin where vectors of the operands are aligned."""


def split_sum(
    group: ContractGroup,
    parts: int,
    context: TemplateContext,
    lower: Callable[[ContractGroup], list[Lowered]],
) -> list[Lowered]:
    """The kernels of a product whose sum is cut into ``parts``, in order.

    Args:
        group: the product.
        parts: at most ``MOST_PARTS``; they have equal lengths, multiples of ``_MULTIPLE`` where
            that is short, and the last one may be shorter.
        context: given one temporary of the accumulation type, for the parts.
        lower: the kernels of one product; called with each kind of part.
    """
    length = -(-group.k // parts)
    if length > _MULTIPLE:
        length = -(-length // _MULTIPLE) * _MULTIPLE
    if parts <= 1 or length in (0, group.k):
        return lower(group)
    parts, rest = divmod(group.k, length)
    shape = (parts + bool(rest), *group.batch, group.m, group.n)
    whole = dense(shape)
    array = context.new_array(group.accumulate, whole.size)
    kernels = lower(_part(group, StoreStep(0, array, whole), 0, length, parts))
    if rest:
        last = replace(dense(shape[1:]), offset=parts * whole.strides[0])
        store = StoreStep(0, array, View((1, *last.shape), (0, *last.strides), last.offset))
        kernels += lower(_part(group, store, parts * length, rest, 1))
    return kernels + pointwise(_joined(group, array, shape), context)


def _part(
    group: ContractGroup, store: StoreStep, first: int, length: int, parts: int
) -> ContractGroup:
    """``parts`` products over ``length`` steps each from ``first`` on, the parts a batch axis."""
    batch = (parts, *group.batch)
    lhs, rhs = group.lhs.view, group.rhs.view
    step_lhs, step_rhs = lhs.strides[-1], rhs.strides[-2]
    view = replace(store.view, shape=(*batch, group.m, group.n))
    return replace(
        group,
        batch=batch,
        k=length,
        lhs=replace(
            group.lhs,
            view=View(
                (*batch, group.m, length),
                (length * step_lhs, *lhs.strides),
                lhs.offset + first * step_lhs,
            ),
        ),
        rhs=replace(
            group.rhs,
            view=View(
                (*batch, length, group.n),
                (length * step_rhs, *rhs.strides),
                rhs.offset + first * step_rhs,
            ),
        ),
        body=(ProductStep(group.accumulate),),
        stores=(replace(store, view=view),),
    )


def _joined(group: ContractGroup, array: int, shape: Sequence[int]) -> LoopGroup:
    """The sums of the parts in ``array``, then the body of ``group``."""
    elem, outputs = group.accumulate, tuple(shape[1:])
    strides = dense(shape).strides
    body: list[BodyStep] = [
        LoadStep(array, View(outputs, strides[1:], part * strides[0]), elem)
        for part in range(shape[0])
    ]
    # Pairs of pairs: the rounding errors grow with the logarithm of the parts.
    level = list(range(shape[0]))
    while len(level) > 1:
        pairs = zip(level[::2], level[1::2], strict=False)
        first, odd = len(body), level[len(level) // 2 * 2 :]
        body += [ScalarStep(_sum, pair, elem) for pair in pairs]
        level = [*range(first, len(body)), *odd]
    body.append(ScalarStep(_converted(group.body[0].type), (level[0],), group.body[0].type))
    # Value 0 of the group, the product, is now the last one; the others follow it.
    moved = len(body) - 1
    body += [_moved(step, moved) for step in group.body[1:]]
    stores = tuple(replace(s, value=s.value + moved) for s in group.stores)
    return LoopGroup(outputs, 0, tuple(body), stores, group.origin)


def _moved(step: BodyStep, by: int) -> BodyStep:
    """The step with the numbers of its arguments changed."""
    match step:
        case ScalarStep(args=args):
            return replace(step, args=tuple(a + by for a in args))
        case GatherStep(index=index):
            return replace(step, index=index + by)
        case ReduceStep(arg=arg):
            return replace(step, arg=arg + by)
        case LoadStep() | ConstStep() | ProductStep():
            return step
        case _:
            assert_never(step)


def _sum(b: Builder, *values: Value) -> Value:
    return b.add(*values)


def _converted(elem: ScalarType) -> Callable[..., Value]:
    def convert(b: Builder, *values: Value) -> Value:
        return widened(b, values[0], elem)

    return convert
